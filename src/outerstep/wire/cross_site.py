"""Requests that a web page sends from somebody's browser, to a port that asks for no token.

A page of any site can make its visitor's browser speak to 127.0.0.1, or to a machine of the same network, and such a
port would take the browser for a worker. Two headers give it away, because no page can change them:

- `Origin` (and `Sec-Fetch-Site`) say which site the page is of; a worker sends neither;
- `Host` is the name that the browser was told to go to. A site may let its own name point to 127.0.0.1 and then count
  as the same site (DNS rebinding); so a name that anybody can register must be one that this machine is known by.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping

from ..errors import Forbidden

# Names that nobody can register: RFC 6761, 6762 (appendix G), 8375, and those of a cluster's services.
PRIVATE = (
    *("localhost", "local", "localdomain", "internal", "intranet", "private", "corp", "home", "lan", "home.arpa"),
    *("test", "svc"),
)
FROM_HERE = ("same-origin", "none")


def check_site(headers: Mapping[str, str], known: Collection[str]) -> None:
    """Raise Forbidden for a request of a web page. `known`: the names that this port is reached under."""
    host, origin, site = headers.get("host"), headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise Forbidden(
            f"a port without tokens takes no requests of web pages, got one with Origin {origin[:80]!r}",
            hint="use a client that is no browser, or a server with tokens",
        )
    if site is not None and site not in FROM_HERE:
        raise Forbidden(
            f"a port without tokens takes no requests of other sites, got one with Sec-Fetch-Site {site[:80]!r}",
            hint="use a client that is no browser, or a server with tokens",
        )
    if host is not None and not _is_ours(_name(host), known):
        raise Forbidden(
            f"this port is not known as {_name(host)[:80]!r}: a name that others can register must be said to it",
            hint="connect to its address, or start the server with --advertise and this name",
        )


def own_names(*named: str | None) -> frozenset[str]:
    """The names that a port is reached under: what its operator has named, as host or host:port, and what the machine
    calls itself."""
    return frozenset(_name(host) for host in (socket.gethostname(), *named) if host)


def _name(host: str) -> str:
    """Without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_ours(name: str, known: Collection[str]) -> bool:
    if name in known or "." not in name:  # one without a dot is of this network only
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.endswith(tuple(f".{suffix}" for suffix in PRIVATE))
    return True
