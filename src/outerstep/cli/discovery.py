"""Runs on this network: announced by `outerstep run --announce`, found by `--discover` (DNS-SD over multicast DNS).

What is announced is where a server listens, and the fingerprint of its certificate. It never holds a token: whoever can
hear it can hear it. It is not believed either. A second PC joins by itself only where it has the token of that very
certificate already, from a line that was pasted once; then an address that has changed is found again. A liar who
announces that fingerprint cannot show the certificate, and is sent nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..installing import install_line
from ..printable import printable
from ..security import Access, Credentials
from ..security.access import write_address
from ..security.certificate import FINGERPRINT
from ..security.interfaces import outward_hosts

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_outerstep._tcp.local."
PIN = "sha256"
LOOK_S = 3.0
ANSWER_MS = 1000
MOST_FOUND = 32
MOST_ADDRESSES = 8


@dataclass(frozen=True)
class Announced:
    """Somebody's word that a server is there."""

    name: str
    places: tuple[tuple[str, int], ...]
    fingerprint: str

    def __str__(self) -> str:
        places = ", ".join(write_address(*place) for place in self.places)
        return f"{self.name} at {places}, certificate sha256 {self.fingerprint[:16]}…"


@contextlib.contextmanager
def announced(access: Access, hosts: Sequence[str] | None = None) -> Iterator[None]:
    """Say on this network where the server is, for as long as this lasts. `hosts`: the interfaces to say it on."""
    kinds, line = _zeroconf(), None
    addresses = [ipaddress.ip_address(host) for host, _ in access.places if _is_address(host)]
    name = f"{socket.gethostname().partition('.')[0]}-{access.port}"[:63]
    info = kinds.ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=access.port,
        addresses=[address.packed for address in addresses],
        properties={PIN: access.fingerprint or ""},
    )
    try:
        line = _open(kinds, hosts)
        try:
            line.register_service(info, allow_name_change=True)
        except kinds.Error as error:
            raise ConfigError(f"this run cannot be announced ({error!r}); leave --announce out") from error
        yield
    finally:
        if line is not None:
            line.unregister_all_services()
            line.close()


def look_around(look_s: float | None = None, hosts: Sequence[str] | None = None) -> list[Announced]:
    """The runs that announce themselves within so many seconds."""
    kinds = _zeroconf()
    line = _open(kinds, hosts)
    heard: dict[str, None] = {}

    def note(name: str, **_: Any) -> None:
        if len(heard) < MOST_FOUND:
            heard[name] = None

    try:
        browser = kinds.ServiceBrowser(line, SERVICE, handlers=[lambda name, **rest: note(name)])
        time.sleep(LOOK_S if look_s is None else look_s)
        browser.cancel()
        return [found for name in heard if (found := _ask(kinds, line, name)) is not None]
    finally:
        line.close()


def find_known(credentials: str | None, hosts: Sequence[str] | None = None) -> Access:
    """The announced run whose token is known here; otherwise says what was found, and what is missing."""
    found, folder = look_around(hosts=hosts), Credentials(credentials)
    if not found:
        raise ConfigError(
            "no run announces itself on this network: start the first PC with `outerstep run --announce`, or paste its "
            "line with --join. (Some Wi-Fi networks keep their devices apart.)"
        )
    tokens = {known.fingerprint: known.token for known in folder.known().values() if known.token and not known.own}
    ours = {one.fingerprint: one for one in found if one.fingerprint in tokens}
    if len(ours) != 1:
        shown = "; ".join(map(str, found))
        why = "more than one of them is known here: choose with --join HOST:PORT"
        if not ours:
            why = "no token of it is known here: paste the line that it printed with --join, once"
        raise ConfigError(f"found {shown}; {why}")
    [(fingerprint, one)] = ours.items()
    (host, port), *others = one.places
    return Access(host, port, tokens[fingerprint], fingerprint, others=tuple(others))


def _ask(kinds: Any, line: Zeroconf, name: str) -> Announced | None:
    try:
        info = line.get_service_info(SERVICE, name, timeout=ANSWER_MS)
    except kinds.Error:  # a name that nobody may have
        return None
    return None if info is None else _read(info)


def _read(info: ServiceInfo) -> Announced | None:
    """None: it is nothing that a server of ours would say."""
    given = info.properties.get(PIN.encode()) or b""
    pin, port = given.decode("ascii", "replace").lower(), info.port or 0
    hosts = [host for host in info.parsed_addresses()[:MOST_ADDRESSES] if not host.lower().startswith("fe80:")]
    if FINGERPRINT.fullmatch(pin) is None or not 0 < port < 65536 or not hosts:
        return None
    name = printable(info.name.removesuffix(f".{SERVICE}"))[:64]
    return Announced(name, tuple((host, port) for host in dict.fromkeys(hosts)), pin)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _open(kinds: Any, hosts: Sequence[str] | None) -> Zeroconf:
    """On each interface by its address: there may be no default route that would choose one."""
    try:
        opened: Zeroconf = kinds.Zeroconf(interfaces=list(hosts or [h for h in outward_hosts() if _is_address(h)]))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"this network cannot be asked (multicast DNS): {error}; use --join with the line") from error
    return opened


def _zeroconf() -> Any:
    try:
        import zeroconf
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--announce and --discover need the package zeroconf, which is not installed: {install_line('lan')}"
        ) from error
    return zeroconf
