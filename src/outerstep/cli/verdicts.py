"""How `outerstep doctor` interprets what it found. Pure: facts in, one finding out, with a remedy if there is one."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal

from ..errors import NotFound, OuterstepError, Refused, TlsRequired, Unauthorized, UntrustedServer
from ..observe.quantities import counted, duration, size
from ..security import is_loopback
from ..security.access import write_address
from ..versions import PROTOCOL_VERSION

Level = Literal["ok", "warn", "fail"]

LITTLE_DISK_BYTES = 2 << 30
SLOW_FSYNC_S = 0.1
FEW_FILES = 256
FILES_BESIDE_CONNECTIONS = 64
CLOCKS_APART_S = 5.0
FAR_AWAY_S = 1.0
MUCH_OF_A_CYCLE = 0.5  # of the time between two exchanges, spent on one
CALLS_PER_EXCHANGE = 5  # offer, parts, commit, poll, fetch: round trips that one exchange waits for


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check, "ok", found, remedy)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, remedy)


# --- this machine ---------------------------------------------------------------------------------------------------


def software(python: str, outerstep: str, torch: str, error: str = "") -> Finding:
    """`torch`: its version, "" if it cannot be imported, and why."""
    here = f"Python {python}, outerstep {outerstep}"
    if not torch:
        return fail("software", f"{here}; torch cannot be imported: {error}", "pip install torch")
    return ok("software", f"{here}, torch {torch}")


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Gpus:
    """`built_for`: torch's CUDA or ROCm, "" = none; `driver`: the NVIDIA driver's version, "" = none; `visible`:
    CUDA_VISIBLE_DEVICES; `error`: what torch raised when asked for the devices."""

    built_for: str = ""
    driver: str = ""
    devices: Sequence[Gpu] = ()
    visible: str | None = None
    error: str = ""


def gpus(facts: Gpus) -> Finding:
    if facts.devices:
        return _usable(facts)
    if not facts.driver:
        return ok("GPU", "none: training here runs on the CPU; a server needs none")
    there = f"NVIDIA driver {facts.driver} is here, but torch uses no GPU"
    if facts.visible is not None and facts.visible.strip() in ("", "-1"):
        return warn("GPU", f"{there}: CUDA_VISIBLE_DEVICES={facts.visible!r} hides them", "unset it")
    if not facts.built_for:
        return warn(
            "GPU", f"{there}: this torch is built without CUDA", "install a CUDA build: pytorch.org, Get Started"
        )
    return warn(
        "GPU",
        f"{there}: it is built for {facts.built_for}" + (f"; {facts.error}" if facts.error else ""),
        "update the driver, or install a torch that is built for what `nvidia-smi` shows",
    )


def _usable(facts: Gpus) -> Finding:
    named = ", ".join(f"{g.name} ({size(g.free_bytes)} of {size(g.total_bytes)} free)" for g in facts.devices)
    driver = f"; driver {facts.driver}" if facts.driver else ""
    found = f"{named}{driver}; torch is built for {facts.built_for}"
    crowded = [i for i, gpu in enumerate(facts.devices) if gpu.free_bytes < gpu.total_bytes / 2]
    if crowded:
        which = ", ".join(map(str, crowded))
        return warn("GPU", found, f"another program uses GPU {which}: choose others with `outerstep worker -d`")
    return ok("GPU", found)


def threads(cores: int, seen: int, omp: str | None) -> Finding:
    """`cores`: available to this process (a container may have fewer than the machine); `seen`: torch's default."""
    if omp is None and cores < seen:
        return warn(
            "CPU",
            f"{counted(cores, 'core')} may be used, {seen} are seen, and OMP_NUM_THREADS is not set",
            f"set OMP_NUM_THREADS={cores}: more threads than cores stall each other",
        )
    if omp is None:
        several = (
            f"with several workers on this machine give each its share: OMP_NUM_THREADS={max(cores // 2, 1)} for two"
        )
        return ok("CPU", f"{counted(cores, 'core')}; OMP_NUM_THREADS is not set, so each process uses all", several)
    if omp.isdecimal() and int(omp) > cores:
        return warn("CPU", f"OMP_NUM_THREADS={omp}, but {counted(cores, 'core')}", f"set it to {cores} or less")
    return ok("CPU", f"{counted(cores, 'core')}, OMP_NUM_THREADS={omp}")


def open_files(soft: int, hard: int) -> Finding:
    if soft < FEW_FILES:
        return warn("open files", f"at most {soft}", f"`ulimit -n {min(4096, hard)}`; for a service LimitNOFILE=4096")
    room = soft - FILES_BESIDE_CONNECTIONS
    return ok("open files", f"at most {soft}: enough for a worker, and for a server's {room} connections")


@dataclass(frozen=True)
class DiskProbe:
    """`folder`: as given; `tried`: the folder itself, or its nearest existing parent; `error`: of writing there."""

    what: str
    folder: str
    tried: str
    free_bytes: int = 0
    fsync_s: float = 0.0
    error: OSError | None = None


def disk(facts: DiskProbe, needed_bytes: int = LITTLE_DISK_BYTES) -> Finding:
    where = facts.folder if facts.folder == facts.tried else f"{facts.folder} (to be made in {facts.tried})"
    if facts.error is not None:
        return fail(
            facts.what,
            f"{where} cannot be written: {facts.error.strerror or facts.error}",
            _disk_remedy(facts.error.errno, facts.tried),
        )
    found = f"{where}: {size(facts.free_bytes)} free, a synced write takes {_seconds(facts.fsync_s)}"
    if facts.free_bytes < needed_bytes:
        return warn(facts.what, found, f"make room: {size(needed_bytes)} should be free, or choose another folder")
    if facts.fsync_s > SLOW_FSYNC_S:
        return warn(facts.what, found, "each round is synced to it: choose a faster disk, not a network folder")
    return ok(facts.what, found)


def _disk_remedy(number: int | None, folder: str) -> str:
    return {
        errno.ENOSPC: "the disk is full: make room, or choose another folder",
        errno.EDQUOT: "your quota is used up: make room, or choose another folder",
        errno.EROFS: "it is mounted read-only: choose another folder",
        errno.EACCES: f"another user owns it: `ls -ld {folder}`, or choose another folder",
        errno.EIO: "the disk is failing: see `dmesg`, and choose another",
    }.get(number or 0, "choose another folder")


def secrets(folder: str, exists: bool, open_to_others: Sequence[tuple[str, int, bool]]) -> Finding:
    """`open_to_others`: path, mode, and whether it is a folder, of everything that others can read or change there."""
    if not exists:
        found = f"nothing is stored in {folder} yet; `outerstep join` or a server's first start stores them there"
        return ok("secrets", found)
    if open_to_others:
        path, mode, is_folder = open_to_others[0]
        found = f"{path} is open to others (mode {mode:04o}), and will be refused"
        return fail("secrets", found, f"chmod {'700' if is_folder else '600'} {path}")
    return ok("secrets", f"{folder} is yours alone")


def unreadable(folder: str, error: OSError) -> Finding:
    return fail(
        "secrets", f"{error.filename or folder} cannot be read: {error.strerror}", f"chown it to yourself: {folder}"
    )


# --- the path to a server -------------------------------------------------------------------------------------------


def name(host: str, addresses: Sequence[str], error: str = "") -> Finding:
    if not addresses:
        return fail(
            "address", f"{host} has no address: {error}", "check the name for a typo, or use the numeric address"
        )
    return ok("address", host if [host] == list(addresses) else f"{host} is {', '.join(addresses)}")


def port(host: str, number: int, error: OSError | None, took_s: float) -> Finding:
    """Refused, swallowed and unreachable have different causes."""
    address = write_address(host, number)
    if error is None:
        return ok("port", f"{address} takes connections ({_seconds(took_s)})")
    if isinstance(error, ConnectionRefusedError):
        there = (
            "start it, or check which port it listens on"
            if is_loopback(host)
            else "does it run, and on this port? Without --host 0.0.0.0 it listens for its own machine only (127.0.0.1)"
        )
        return fail("port", f"{address} refuses: nobody listens there", there)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return fail(
            "port",
            f"{address} does not answer at all",
            f"a firewall drops it, or the address is wrong: allow TCP port {number} on the server's machine "
            f"(`ufw allow {number}/tcp`), and behind a router or in a cloud forward or allow it there too",
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return fail("port", f"there is no route to {address}: {error.strerror}", "check the network, VPN or tunnel")
    return fail("port", f"{address}: {error.strerror or error}", "check whether this machine reaches others at all")


@dataclass(frozen=True)
class ShownCertificate:
    """The certificate that the server presented, or why it presented none."""

    fingerprint: str = ""
    begins: datetime | None = None
    ends: datetime | None = None
    error: Exception | None = None


def certificate(address: str, expected: str | None, pinned: bool, shown: ShownCertificate, now: datetime) -> Finding:
    """`expected`: the stored fingerprint; None = check by the system's authorities, if the server is known at all."""
    if shown.error is not None:
        return _no_handshake(address, shown.error)
    if expected is not None and shown.fingerprint != expected:
        return fail(
            "certificate",
            f"{address} shows another certificate than the one known here: expected sha256 {expected}, "
            f"got {shown.fingerprint}",
            "if the server was moved or its credentials were recreated: `outerstep join -` with its new join string. "
            "If not, someone is intercepting the connection",
        )
    how = "is the one known here" if pinned else "is not known here, so not checked"
    found = f"sha256 {shown.fingerprint[:16]}… {how}"
    if (shown.begins is not None and now < shown.begins) or (shown.ends is not None and now > shown.ends):
        return warn(
            "certificate",
            f"{found}; by this machine's clock it is not valid now ({_day(shown.begins)} to {_day(shown.ends)})",
            "outerstep checks only the fingerprint, but browsers and proxies check the date; check the clock",
        )
    return ok("certificate", f"{found}; TLS 1.3, valid until {_day(shown.ends)}")


def _no_handshake(address: str, error: Exception) -> Finding:
    if isinstance(error, UntrustedServer):
        remedy = f"if it was started with --insecure, and you trust the network: http://{address}"
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            remedy = "use its whole join string, with #sha256=… at the end"
        return fail("certificate", str(error).split(". ")[0], remedy)
    return fail(
        "certificate", f"no TLS with {address}: {error}", "something on the path (a proxy?) may end the connection"
    )


def unencrypted(address: str) -> Finding:
    return warn(
        "certificate",
        f"http://{address} has neither encryption nor tokens: anyone who reaches the port can change the model",
        "start the server without --insecure, unless only you can reach it",
    )


def token(kind: str, status: Mapping[str, Any] | None, error: OuterstepError | None = None) -> Finding:
    """`kind`: the token used: run, worker, admin, or "" for a server without tokens."""
    if status is not None:
        may = {
            "run": "the run's: any worker whose id has no token of its own",
            "worker": "a worker's own: only for that worker's id",
            "admin": "the admin's: control and status, but workers do not join with it",
        }.get(kind, "none is needed")
        return Finding("token", "warn" if kind == "admin" else "ok", may, _ADMIN_REMEDY if kind == "admin" else "")
    if isinstance(error, Unauthorized):
        return fail("token", error.message, error.hint)
    if isinstance(error, TlsRequired):
        return fail("token", "the server requires TLS, but the address says http://", "leave http:// out")
    if isinstance(error, Refused):
        return fail("token", error.message, error.hint)
    return fail("token", str(error), "")


_ADMIN_REMEDY = "for workers use the join string that `outerstep token show` prints"


def no_credentials(message: str) -> Finding:
    rule, _, remedy = message.partition(": ")
    return fail("token", rule, remedy)


def server(status: Mapping[str, Any], outerstep: str, protocol: int | None) -> Finding:
    """Versions, the protocol that both ends speak (None: it was not found out), and whether the server can continue."""
    spoken = "" if protocol is None else f", protocol {protocol}"
    found = (
        f"outerstep {status.get('outerstep', '?')}{spoken}, run {status.get('run_id', '?')}, "
        f"round {status.get('sync_round')}"
    )
    if status.get("failure"):
        return fail("server", f"{found}; it has stopped: {status['failure']}", "restart it; its log has the cause")
    if status.get("closing"):
        return warn("server", f"{found}; shutting down: {status['closing']}", "no worker can join it any more")
    differs = [f"it is {outerstep}"] if status.get("outerstep") != outerstep else []
    if protocol is not None and protocol < PROTOCOL_VERSION:
        differs.append(f"the newest is protocol {PROTOCOL_VERSION}")
    if differs:
        remedy = "the versions are compatible; update when you can"
        return warn("server", f"{found}; here {' and '.join(differs)}", remedy)
    return ok("server", f"{found}, {counted(len(status.get('workers') or {}), 'worker')}")


def clock(ahead_s: float) -> Finding:
    """`ahead_s`: the server's clock minus this machine's."""
    if abs(ahead_s) > CLOCKS_APART_S:
        which = "ahead of" if ahead_s > 0 else "behind"
        return warn(
            "clock",
            f"the server's is {duration(abs(ahead_s))} {which} this one",
            "no round depends on it, but logs are hard to compare: `timedatectl set-ntp true`",
        )
    return ok("clock", f"{abs(ahead_s):.1f} s apart")


def latency(samples_s: Sequence[float]) -> Finding:
    middle = median(samples_s)
    found = f"{_seconds(middle)} there and back (median of {len(samples_s)})"
    if middle > FAR_AWAY_S:
        return warn("latency", found, "slow even for another continent: check for a saturated link or a busy server")
    return ok("latency", found)


def bandwidth(up_bytes_per_s: float, down_bytes_per_s: float, connections: int) -> Finding:
    lanes = f"over {counted(connections, 'connection')}"
    return ok("bandwidth", f"up {_rate(up_bytes_per_s)}, down {_rate(down_bytes_per_s)}, {lanes}")


def unmeasured(error: OuterstepError) -> Finding:
    if isinstance(error, NotFound):
        return warn("bandwidth", "the server is older than this check", "update outerstep there")
    return fail("bandwidth", f"it could not be measured: {error}", "the connection breaks under load: retry")


@dataclass(frozen=True)
class LinkSpeed:
    """What was measured."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float


def exchange(up_bytes: int, down_bytes: int, line: LinkSpeed, plan: Mapping[str, Any], steps_per_s: float) -> Finding:
    """One exchange of the whole model: upload, download, and the round trips between. `steps_per_s`: of the current
    workers, 0 = unknown."""
    takes_s = up_bytes / line.up_bytes_per_s + down_bytes / line.down_bytes_per_s + CALLS_PER_EXCHANGE * line.latency_s
    found = (
        f"about {_seconds(takes_s)} for {size(up_bytes)} up ({plan['codec']}) and {size(down_bytes)} down "
        f"({plan['down_codec']}), every {plan['sync_every']} steps"
    )
    if steps_per_s > 0:
        cycle_s = plan["sync_every"] / steps_per_s
        found += f", which take about {_seconds(cycle_s)}"
        if takes_s > MUCH_OF_A_CYCLE * cycle_s:
            return warn(
                "exchange",
                found,
                "the link is slow for this run: raise --sync-every, use a smaller --codec (int8, int4), or fragments "
                "that travel while training continues (--num-fragments, --fragment-delay)",
            )
    return ok("exchange", found)


def no_model_yet() -> Finding:
    return ok("exchange", "unknown until the first worker has joined and described its model")


def _seconds(value: float) -> str:
    if value < 1.0:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 60 else duration(value)


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


def _day(moment: datetime | None) -> str:
    return "?" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d")
