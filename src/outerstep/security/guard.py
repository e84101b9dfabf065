"""Whose token a request shows. It is checked before anything else about the request is looked at."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import Forbidden, Unauthorized
from .tokens import RIGHTS, Right, TokenFile, Tokens, digest_of, token_kind

NEW_STRING = (
    "get the join string from the server (`outerstep token show` on its machine) and give it to `outerstep join -` here"
)

# Names that nobody can register: RFC 6761, 6762 (appendix G), 8375, and those of a cluster's services.
PRIVATE = (
    *("localhost", "local", "localdomain", "internal", "intranet", "private", "corp", "home", "lan", "home.arpa"),
    *("test", "svc"),
)
FROM_HERE = ("same-origin", "none")


@dataclass(frozen=True)
class Caller:
    """Whose token it was. `reserved`: worker ids that have tokens of their own. `name`: of the token. `rights`: None =
    those that go with the kind."""

    kind: Literal["anybody", "run", "worker", "admin"]
    worker_id: str = ""
    reserved: Collection[str] = ()
    name: str = ""
    rights: frozenset[Right] | None = None

    def may(self, right: Right) -> bool:
        rights = RIGHTS.get(self.kind) if self.rights is None else self.rights
        return rights is None or right in rights

    def check_reads(self) -> None:
        if not self.may("read"):
            raise Forbidden(
                f"the token {self.name!r} does not have the right to read", hint="use one with `--rights join,read`"
            )

    def check_joins(self) -> None:
        if not self.may("join"):
            raise Forbidden(
                f"the token {self.name!r} does not have the right to join",
                hint="use the join string that `outerstep token show` prints",
            )

    def check_speaks_for(self, worker_id: str) -> None:
        if self.kind == "anybody":
            return
        if self.kind == "admin":
            raise Forbidden(
                "the admin token is for control and status; workers do not join with it",
                hint="use the join string that `outerstep token show` prints",
            )
        self.check_joins()
        if self.kind == "worker" and worker_id != self.worker_id:
            raise Forbidden(
                f"this token belongs to worker {self.worker_id!r}, the request speaks for {worker_id!r}",
                hint=f"start with --worker-id {self.worker_id}, or use the token of {worker_id}",
            )
        if self.kind == "run" and worker_id in self.reserved:
            raise Forbidden(
                f"worker {worker_id!r} has a token of its own; the run's token does not speak for it",
                hint="join with the worker's own join string, or choose another --worker-id",
            )

    def check_operates(self) -> None:
        if not self.may("control"):
            raise Forbidden(
                "control needs the admin token",
                hint="run `outerstep control` on the server's machine as the user who runs the server",
            )


ANYBODY = Caller("anybody")


class Guard(Protocol):
    def admit(self, headers: Mapping[str, str]) -> Caller:
        """From a request's headers, their names in lower case, decoded as latin-1; raises Unauthorized or Forbidden."""


class OpenGuard:
    """`--insecure`: everybody may do everything, except web pages. `known`: the names that the port is reached under.

    A page of any site can make its visitor's browser speak to 127.0.0.1, or to a machine of the same network, and this
    port would take the browser for a worker. Two headers give it away, because no page can change them:

    - `Origin` (and `Sec-Fetch-Site`) say which site the page is of; a worker sends neither;
    - `Host` is the name that the browser was told to go to. A site may let its own name point to 127.0.0.1 and then
      count as the same site (DNS rebinding); so a name that anybody can register must be one that this machine is known
      by.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = known

    def admit(self, headers: Mapping[str, str]) -> Caller:
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
        name = "" if host is None else _name(host)
        if name not in self._known and "." in name and _can_be_registered(name):  # one without a dot is of this network
            raise Forbidden(
                f"this port is not known as {name[:80]!r}: a name that others can register must be said to it",
                hint="connect to its address, or start the server with --advertise and this name",
            )
        return ANYBODY


def check_own_page(headers: Mapping[str, str]) -> bool:
    """Is this a request of a web page? Raise Forbidden if the page is not of this very port. Where there are tokens,
    too: no other page has any business here."""
    host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")
    own = [f"{scheme}://{host}".lower() for scheme in ("https", "http")]
    if origin is not None and origin.lower() not in own:
        raise Forbidden(
            f"only this server's own page may ask for that, got a request with Origin {origin[:80]!r}",
            hint="behind a proxy: let it pass the Host header on as it is",
        )
    if site is not None and site not in FROM_HERE:
        raise Forbidden(f"only this server's own page may ask for that, got one with Sec-Fetch-Site {site[:80]!r}")
    return origin is not None or site is not None


def own_names(*named: str | None) -> frozenset[str]:
    """The names that a port is reached under: what its operator has named, as host or host:port, and what the machine
    calls itself."""
    return frozenset(_name(host) for host in (socket.gethostname(), *named) if host)


def _name(host: str) -> str:
    """Without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _can_be_registered(name: str) -> bool:
    """And so by anybody; an address cannot."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return not name.endswith(tuple(f".{suffix}" for suffix in PRIVATE))
    return False


class TokenGuard:
    """Takes what is in the token file at that moment. The presented token is hashed, and its digest compared with every
    digest there is, each in constant time: how long it takes says nothing about how much of it was right."""

    def __init__(self, file: TokenFile, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = file, clock
        self._of: Tokens | None = None
        self._known: list[tuple[bytes, Caller, float | None]] = []

    def admit(self, headers: Mapping[str, str]) -> Caller:
        known, authorization = self._digests(), headers.get("authorization")
        scheme, _, token = (authorization or "").partition(" ")
        presented = digest_of(token.encode("latin-1", "replace"))
        found: Caller | None = None
        expires: float | None = None
        for expected, caller, until in known:
            if hmac.compare_digest(presented, expected):
                found, expires = caller, until
        if found is not None and scheme.lower() == "bearer":
            if expires is not None and self._clock() >= expires:
                when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(expires))
                raise Unauthorized(f"the token {found.name!r} was valid until {when} UTC", hint=NEW_STRING)
            return found
        if authorization is None:
            raise Unauthorized("this server wants a token, and the request has none", hint=NEW_STRING)
        raise Unauthorized("this token is not valid here, or no longer", hint=NEW_STRING)

    def valid_names(self) -> frozenset[str]:
        """Of the tokens that are there and have not expired."""
        known, now = self._digests(), self._clock()
        return frozenset(caller.name for _, caller, until in known if until is None or now < until)

    def _digests(self) -> list[tuple[bytes, Caller, float | None]]:
        tokens = self._file.current()
        if tokens is not self._of:
            self._known, self._of = _callers(tokens), tokens
        return self._known


def _callers(tokens: Tokens) -> list[tuple[bytes, Caller, float | None]]:
    """Digest, caller, and when it ends."""
    named = tokens.all_named
    reserved = frozenset(each.worker for each in named.values() if each.worker)
    known: list[tuple[bytes, Caller, float | None]] = [
        (digest_of(tokens.run.encode()), Caller("run", reserved=reserved, name="run"), None),
        (digest_of(tokens.admin.encode()), Caller("admin", name="admin"), None),
    ]
    for name, each in named.items():
        kind = token_kind(each.worker, each.rights)
        caller = Caller(kind, each.worker, reserved, name, frozenset(each.rights))
        known.append((bytes.fromhex(each.digest), caller, each.expires))
    current = {caller.name: (caller, end) for _, caller, end in known}
    for digest, old in tokens.replaced.items():
        if old.name in current:
            caller, end = current[old.name]
            known.append((bytes.fromhex(digest), caller, old.until if end is None else min(old.until, end)))
    return known
