"""What it takes to reach a server, and the one line that carries it: the join string.

    outerstep://TOKEN@HOST:PORT#sha256=FINGERPRINT
    outerstep://TOKEN@HOST:PORT,HOST:PORT#sha256=FINGERPRINT

TOKEN is one of security/tokens.py, HOST a name, an IPv4 address or an IPv6 address in brackets, FINGERPRINT the SHA-256
of the server's certificate as 64 hexadecimal digits. Without the last part the client checks the certificate as a
browser would, against the system's authorities. A server with several addresses names all of them, and a client tries
them in turn. Nothing else is allowed in it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field, replace

from ..defaults import SERVER_PORT
from ..errors import ConfigError
from .certificate import FINGERPRINT
from .tokens import is_token

DEFAULT_PORT = SERVER_PORT
SCHEME = "outerstep://"
MOST_PLACES = 8  # in one join string
QUOTES = "\"'`“”„‘’«»"


@dataclass(frozen=True)
class Access:
    """A server's address, fingerprint and tokens. `fingerprint` None = check by the system's authorities; `plain` =
    neither encryption nor tokens, requested explicitly. `others`: where else it may be reached."""

    host: str
    port: int
    token: str = field(default="", repr=False)
    fingerprint: str | None = None
    admin: str = field(default="", repr=False)
    plain: bool = False
    others: tuple[tuple[str, int], ...] = ()

    @property
    def address(self) -> str:
        return write_address(self.host, self.port)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Every address, in the order in which they are tried."""
        return ((self.host, self.port), *self.others)

    def at(self, host: str, port: int) -> Access:
        """The same server, reached there first. An address that is not among its own becomes its only one."""
        if (host, port) not in self.places:
            return replace(self, host=host, port=port, others=())
        return replace(self, host=host, port=port, others=tuple(p for p in self.places if p != (host, port)))

    @property
    def join_string(self) -> str:
        """Holds the token: not for logs."""
        pin = "" if self.fingerprint is None else f"#sha256={self.fingerprint}"
        places = ",".join(write_address(*place) for place in self.places)
        return f"{SCHEME}{self.token or self.admin}@{places}{pin}"


def is_join_string(text: str) -> bool:
    return text.strip().lower().startswith(SCHEME)


def mended(text: str) -> str:
    """A pasted join string without what a terminal, a chat or a mail program put into it: quotes around it, and line
    breaks and spaces, of which it has none."""
    return re.sub(r"\s+", "", text).strip(QUOTES)


def parse_join_string(text: str) -> Access:
    """Parse strictly; an error says which part is wrong, and shows no token."""
    text = text.strip()
    if not text.startswith(SCHEME):
        raise _bad("it must begin with outerstep://")
    if re.search(r"\s", text):
        raise _bad("it contains a space or a line break; it is one line")
    rest, hashed, pin = text.removeprefix(SCHEME).partition("#")
    token, at, place = rest.rpartition("@")
    if not at or not token:
        raise _bad("the token is missing: it goes between outerstep:// and @")
    if not is_token(token):
        raise _bad(f"the part before @ is not a token (it has {len(token)} characters): was it cut off?")
    if not place:
        raise _bad("the server's address is missing: it goes after @")
    named = place.split(",")
    if len(named) > MOST_PLACES:
        raise _bad(f"it names {len(named)} addresses, at most {MOST_PLACES} are tried")
    try:
        (host, port), *others = dict.fromkeys(map(parse_address, named))
    except ConfigError as error:
        raise _bad(str(error)) from error
    fingerprint = _parse_pin(pin) if hashed else None
    if token.startswith("admin-"):
        return Access(host, port, fingerprint=fingerprint, admin=token, others=tuple(others))
    return Access(host, port, token, fingerprint, others=tuple(others))


def _parse_pin(pin: str) -> str:
    name, _, digits = pin.partition("=")
    if name != "sha256":
        raise _bad(f"the part after # must start with sha256=, got {redact(name[:32])!r}")
    if not FINGERPRINT.fullmatch(digits.lower()):
        raise _bad(f"a fingerprint has 64 hexadecimal digits, got {len(digits)} characters: was it cut off?")
    return digits.lower()


def _bad(what: str) -> ConfigError:
    return ConfigError(f"this is not a join string: {what}. It looks like outerstep://TOKEN@HOST:PORT#sha256=…")


def parse_address(address: str) -> tuple[str, int]:
    """ "host", "host:port" or "[v6]:port", with http:// in front or without → (host, port)."""
    text = address.strip().removeprefix("http://").rstrip("/")
    shown = redact(repr(address))
    if "://" in text:
        raise ConfigError(f"server address {shown}: write host:port, or the whole join string")
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or str(DEFAULT_PORT)
    elif text.count(":") > 1:
        raise ConfigError(f"server address {shown}: write an IPv6 address as [address]:port")
    else:
        host, _, port = text.partition(":")
        port = port or str(DEFAULT_PORT)
    try:
        host.encode("idna")  # what the socket will do with it
    except UnicodeError:
        host = ""
    if (
        not host
        or not host.isprintable()
        or re.search(r"[\s/@#?]", host)
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or not 0 < int(port) < 65536
    ):
        raise ConfigError(f"server address must be host:port, got {shown}; for example 192.168.1.100:{DEFAULT_PORT}")
    _check_scope(host)
    return host, int(port)


def _check_scope(host: str) -> None:
    """An IPv6 link-local address means nothing without the link, and each machine has its own name for that."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return  # a name
    if isinstance(ip, ipaddress.IPv6Address) and ip.is_link_local and ip.scope_id is None:
        raise ConfigError(
            f"server address {host} is link-local, and does not say on which interface of this machine: write "
            f"[{host}%eth0]:{DEFAULT_PORT} with the name that `ip link` shows here, or use another address"
        )


def write_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])  # a link-local one names its interface: fe80::1%eth0
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def is_here(host: str) -> bool:
    """Whether this is an address (not a name) of this machine: one that can be bound to."""
    try:
        ip = ipaddress.ip_address(host)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return not ip.is_unspecified


def shown_address(text: str) -> str:
    """Of an address or a join string what people need to see: host and port, neither token nor fingerprint."""
    return redact(text).partition("@")[2].partition("#")[0] if is_join_string(text) else redact(text)


def redact(text: str) -> str:
    """The text without secrets: tokens by their form, and everything before @ in an address."""
    text = re.sub(r"[^\s/@'\"]+@", "…@", text)
    return re.sub(r"(run|admin|worker)-[A-Za-z0-9_-]{16,}", r"\1-…", text)  # also a truncated one
