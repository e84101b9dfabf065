"""What `outerstep doctor` checks: this machine, and the path to a server. verdicts.py interprets the results."""

from __future__ import annotations

import os
import platform
import resource
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import NoCredentials, OuterstepError, Refused, TransportError, UntrustedServer
from ..lanes import lanes
from ..security import Access, Credentials, is_join_string, parse_address, parse_join_string
from ..security.certificate import fingerprint_of, validity_of
from ..security.tls import explain, pinning_context
from ..threads import usable_cores
from ..versions import OLDEST_PROTOCOL
from ..wire.http_transport import HttpTransport
from ..wire.pages import MAX_BYTES, noise
from . import verdicts
from .verdicts import Finding

CONNECT_S = 5.0
ROUND_TRIPS = 7
SYNCED_WRITES = 5
FIRST_BYTES = 16 << 10  # of a measurement, per connection: quick even on a link of 100 kbit/s
ENOUGH_S = 0.5  # a transfer this long measures the rate
DRIVER_FILE = Path("/proc/driver/nvidia/version")

Say = Callable[[str], None]


# --- this machine ---------------------------------------------------------------------------------------------------


def look_at_machine(say: Say, folders: Mapping[str, str], credentials: Credentials) -> Iterator[Finding]:
    """`folders`: purpose → folder, as "save_dir": "/data/run"."""
    say("loading torch")
    yield from look_at_torch()
    say("checking this machine")
    yield verdicts.threads(usable_cores(), os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS"))
    yield verdicts.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    for what, folder in folders.items():
        say(f"writing to {folder}")
        yield verdicts.disk(try_disk(what, folder))
    yield look_at_secrets(credentials.folder)


def look_at_torch() -> Iterator[Finding]:
    own, python = version("outerstep"), platform.python_version()
    try:
        import torch
    except (ImportError, OSError) as error:  # one of its libraries is missing, or built for another machine
        yield verdicts.software(python, own, "", str(error))
        return
    yield verdicts.software(python, own, torch.__version__)
    yield verdicts.gpus(find_gpus(torch))


def find_gpus(torch: Any) -> verdicts.Gpus:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip or ''}".strip()
    built_for = built_for if torch.version.cuda or torch.version.hip else ""
    devices, error = [], ""
    try:
        for index in range(torch.cuda.device_count() if built_for else 0):
            free, total = torch.cuda.mem_get_info(index)
            devices.append(verdicts.Gpu(torch.cuda.get_device_name(index), total, free))
    except (RuntimeError, AssertionError) as failed:  # the driver does not match this build
        devices, error = [], str(failed).splitlines()[0]
    return verdicts.Gpus(built_for, nvidia_driver(), devices, os.environ.get("CUDA_VISIBLE_DEVICES"), error)


def nvidia_driver() -> str:
    """The driver's version, from the kernel module itself; "" if there is none."""
    try:
        words = DRIVER_FILE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")


def try_disk(what: str, folder: str) -> verdicts.DiskProbe:
    """Write and sync a few small files where `folder` is, or would be created."""
    wanted = Path(folder).absolute()
    place = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))
    try:
        took = [_synced_write(place) for _ in range(SYNCED_WRITES)]
        found = os.statvfs(place)
    except OSError as error:
        return verdicts.DiskProbe(what, folder, _as_named(folder, place), error=error)
    free = found.f_bavail * found.f_frsize
    return verdicts.DiskProbe(what, folder, _as_named(folder, place), free_bytes=free, fsync_s=median(took))


def _synced_write(folder: Path) -> float:
    began_at = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".outerstep-doctor-") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - began_at


def _as_named(folder: str, place: Path) -> str:
    return folder if place == Path(folder).absolute() else str(place)


def look_at_secrets(folder: Path) -> Finding:
    """Applies the same rules as the code that reads secrets."""
    try:
        paths = [folder, *folder.rglob("*")] if folder.is_dir() else []
        modes = [(path, stat.S_IMODE(path.stat().st_mode), path.is_dir()) for path in sorted(paths)]
    except OSError as error:
        return verdicts.unreadable(str(folder), error)
    opened = [(str(path), mode, is_folder) for path, mode, is_folder in modes if mode & (0o022 if is_folder else 0o077)]
    return verdicts.secrets(str(folder), bool(paths), opened)


# --- the path to a server -------------------------------------------------------------------------------------------


@dataclass
class Way:
    """How to reach a server, and the status it answered. `unknown`: why nothing is known about it here."""

    host: str
    port: int
    access: Access | None
    unknown: str = ""
    status: dict[str, Any] | None = None


def find_way(server: str, credentials: Credentials) -> Way:
    """A malformed address is an error; one that is merely unknown here is checked anyway."""
    if is_join_string(server):
        named = parse_join_string(server)
        host, port = named.host, named.port
    else:
        host, port = parse_address(server)
    try:
        access = credentials.find(server)
    except NoCredentials as error:
        return Way(host, port, None, str(error))
    if access is None:
        return Way(host, port, None, "this user has not started a server here yet: start one, or join one elsewhere")
    return Way(host, port, access)


def look_at_server(
    say: Say, way: Way, transport: Callable[[], HttpTransport], connections: int | None
) -> Iterator[Finding]:
    """From the outside in; after a failure the checks that depend on it are skipped. `transport` is called once the
    server's port is known to answer."""
    say(f"looking for {way.host}")
    for look in (look_up, knock, shake_hands):
        finding = look(way)
        yield finding
        if finding.level == "fail":
            return
    if way.access is None:
        yield verdicts.no_credentials(way.unknown)
        return
    line = transport()
    try:
        yield ask_status(way, line)
        if way.status is not None:
            yield from measure(say, way.status, line, connections)
    finally:
        line.close()


def look_up(way: Way) -> Finding:
    try:
        found = socket.getaddrinfo(way.host, way.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return verdicts.name(way.host, [], error.strerror or str(error))
    return verdicts.name(way.host, list(dict.fromkeys(str(entry[4][0]) for entry in found)))


def knock(way: Way) -> Finding:
    began_at = time.perf_counter()
    try:
        socket.create_connection((way.host, way.port), timeout=CONNECT_S).close()
    except OSError as error:
        return verdicts.port(way.host, way.port, error, 0.0)
    return verdicts.port(way.host, way.port, None, time.perf_counter() - began_at)


def shake_hands(way: Way) -> Finding:
    access = way.access
    address = (access or Access(way.host, way.port)).address
    if access is not None and access.plain:
        return verdicts.unencrypted(address)
    by_authority = access is not None and access.fingerprint is None
    shown = show_certificate(
        way.host, way.port, address, ssl.create_default_context() if by_authority else pinning_context()
    )
    expected = access.fingerprint if access is not None else None
    return verdicts.certificate(address, expected, access is not None, shown, datetime.now(UTC))


def show_certificate(host: str, port: int, address: str, context: ssl.SSLContext) -> verdicts.ShownCertificate:
    try:
        with (
            socket.create_connection((host, port), timeout=CONNECT_S) as sock,
            context.wrap_socket(sock, server_hostname=host) as secured,
        ):
            der = secured.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        return verdicts.ShownCertificate(error=_explained(error, address))
    except OSError as error:
        return verdicts.ShownCertificate(error=error)
    begins, ends = validity_of(der)
    return verdicts.ShownCertificate(fingerprint_of(der), begins, ends)


def _explained(error: ssl.SSLError, address: str) -> Exception:
    meant = explain(error, address)
    if meant is None:
        return error
    meant.__cause__ = error
    return meant


def ask_status(way: Way, line: HttpTransport) -> Finding:
    assert way.access is not None
    kind = (way.access.token or way.access.admin).partition("-")[0]
    try:
        way.status = line.status()
    except (Refused, UntrustedServer, TransportError) as error:
        return verdicts.token(kind, None, error)
    return verdicts.token(kind, way.status)


def measure(say: Say, status: dict[str, Any], line: HttpTransport, connections: int | None) -> Iterator[Finding]:
    own = version("outerstep")
    try:
        say("measuring latency")
        trips, ahead_s, protocol = take_trips(line)
        yield verdicts.server(status, own, protocol)
        yield verdicts.clock(ahead_s)
        yield verdicts.latency(trips)
        noise(MAX_BYTES)  # generated before the clock runs
        say("measuring upload speed")
        trip_s = median(trips)
        up, most = found_rate(lambda size: line.probe_up(noise(size)), connections, trip_s)
        say("measuring download speed")
        down, count = found_rate(lambda size: line.probe_down(memoryview(bytearray(size))), connections, trip_s)
    except OuterstepError as error:
        if isinstance(error, Refused):
            yield verdicts.server(status, own, None)
        yield verdicts.unmeasured(error)
        return
    yield verdicts.bandwidth(up, down, max(most, count))
    yield estimate(status, verdicts.LinkSpeed(up, down, trip_s))


def take_trips(line: HttpTransport) -> tuple[list[float], float, int]:
    """Round-trip times in seconds; by how much the server's clock is ahead; the protocol spoken. The first may have
    to connect and does not count."""
    trips, ahead, protocol = [], [], OLDEST_PROTOCOL
    for _ in range(ROUND_TRIPS + 1):
        sent_at, began_at = time.time(), time.perf_counter()
        answer = line.probe_up(memoryview(b""))
        trips.append(time.perf_counter() - began_at)
        ahead.append(answer.time_s - (sent_at + trips[-1] / 2))
        protocol = answer.protocol
    return trips[1:], median(ahead[1:]), protocol


def found_rate(transfer: Callable[[int], object], connections: int | None, trip_s: float) -> tuple[float, int]:
    """Over as many connections as a worker would use: so many, or (None) as it finds that the link needs."""
    if connections is not None:
        return rate(transfer, connections), connections
    count = lanes(0.0, trip_s)
    found = rate(transfer, count)
    while (more := lanes(found, trip_s)) > count:
        found, count = max(found, rate(transfer, more)), more
    return found, count


def rate(transfer: Callable[[int], object], connections: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second over so many parallel connections, like a worker's parts; transfers grow until one takes long
    enough to measure."""
    size = FIRST_BYTES
    with ThreadPoolExecutor(connections) as pool:
        while True:
            began_at = clock()
            list(pool.map(transfer, [size] * connections))
            took_s = max(clock() - began_at, 1e-9)
            if took_s >= ENOUGH_S or size >= MAX_BYTES:
                return connections * size / took_s
            size = min(4 * size, MAX_BYTES)


def estimate(status: dict[str, Any], line: verdicts.LinkSpeed) -> Finding:
    """For the run's model, with its codecs."""
    plan, values = status.get("plan"), status.get("num_parameters")
    if not plan or not values:
        return verdicts.no_model_yet()
    from ..core.codecs.recipe import Recipe

    up, down = (Recipe.parse(plan[name]).usual.codec.encoded_bytes(values) for name in ("codec", "down_codec"))
    speeds = [facts["steps_per_second"] for facts in status["workers"].values() if facts["steps_per_second"] > 0]
    return verdicts.exchange(up, down, line, plan, median(speeds) if speeds else 0.0)
