"""Where a node is reached, what it wants to be shown there, and how it reaches others.

Every peer has a certificate of its own, whose fingerprint is in its beats and in its join string, and all peers of a
run have one token, which the founder's machine made and every join string carries.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping

from ....dashboard import Dashboard, PeerTokens
from ....errors import ConfigError, NoCredentials, Unauthorized
from ....security import Access, Caller, Credentials, ServerIdentity, parse_address, parse_join_string
from ....security.access import write_address
from ....security.credentials import outward_host
from ....security.tokens import digest_of
from ....statements import Beat
from ....wire.http_server import HttpServer
from ....wire.http_transport import HttpTransport
from ....wire.routes import Service
from .settings import NodeSettings
from .speeds import Speeds

log = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::", "")
NEW_STRING = "use the join string that any peer of the run shows"


class RunGuard:
    """The run's token, which is the same at all peers; and this user's own admin token, for looking at the status."""

    def __init__(self, run_token: Callable[[], str], identity: ServerIdentity) -> None:
        self._run_token, self._identity = run_token, identity

    def admit(self, headers: Mapping[str, str]) -> Caller:
        authorization = headers.get("authorization")
        scheme, _, token = (authorization or "").partition(" ")
        presented = digest_of(token.encode("latin-1", "replace"))
        known = {"run": self._run_token(), "admin": self._identity.tokens.current().admin}
        found = [kind for kind, t in known.items() if hmac.compare_digest(presented, digest_of(t.encode()))]
        if found and scheme.lower() == "bearer":
            return Caller("run", name="run") if "run" in found else Caller("admin", name="admin")
        if authorization is None:
            raise Unauthorized("this peer wants the run's token, and the request has none", hint=NEW_STRING)
        raise Unauthorized("this is not the token of this peer's run", hint=NEW_STRING)


class NodeListener:
    """Listens as soon as it is made. `kept_token`: of the run in the peer's folder."""

    def __init__(
        self, settings: NodeSettings, service: Service, kept_token: str | None, dashboard: Dashboard | None = None
    ) -> None:
        self._settings = settings
        self._credentials = Credentials(settings.credentials)
        self.joins: tuple[Access, ...] = tuple(self._access(place) for place in settings.join)
        self._identity = None if settings.insecure else self._credentials.server_identity()
        self.token = self._choose_token(kept_token)
        host, port = _parse_listen(settings.listen)
        guard = None if self._identity is None else RunGuard(lambda: self.token, self._identity)
        tls = self._identity.context() if self._identity is not None else None
        if dashboard is not None:
            tokens = None if self._identity is None else PeerTokens(self._identity.tokens, lambda: self.token)
            dashboard.guard_with(tokens, tls=tls is not None)
        try:
            self._http = HttpServer(service.routes, host, port, tls=tls, guard=guard, names=[settings.advertise or ""])
        except OSError as error:
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise ConfigError(
                f"cannot listen on {settings.listen}: {why}; choose another address, or stop what uses it"
            ) from error
        self.access = self._own_access(host)
        try:
            if port:  # one that is the same next time
                self._announce(host)
        except ConfigError:
            self._http.stop()
            raise
        self._http.start()

    @property
    def address(self) -> str:
        return self.access.address

    @property
    def fingerprint(self) -> str | None:
        return self.access.fingerprint

    @property
    def join_string(self) -> str:
        """What to type on the next machine."""
        return f"http://{self.address}" if self.access.plain else self.access.join_string

    def stop(self, patience_s: float) -> None:
        self._http.stop(patience_s=patience_s)

    def let_go(self) -> None:
        """In a process that was forked."""
        self._http.let_go()

    # --- reaching others --------------------------------------------------------------------------------------------

    def reach(self, access: Access, timeout_s: float) -> HttpTransport:
        return HttpTransport(
            f"http://{access.address}" if access.plain else access.join_string,
            timeout_s=timeout_s,
            credentials=self._settings.credentials,
        )

    def access_of(self, beat: Beat) -> Access | None:
        """How to reach who sent this beat; None = not at all."""
        return access_to(beat, self.token, insecure=self._settings.insecure)

    def can_call(self, beat: Beat) -> bool:
        return self.access_of(beat) is not None

    def _access(self, place: str) -> Access:
        if self._settings.insecure and "://" not in place:
            place = f"http://{place}"
        access = self._credentials.find(place)
        if access is None:
            raise NoCredentials(f"nothing is known here about {place}: give the join string that the peer there shows")
        if access.plain != self._settings.insecure:
            raise ConfigError(
                f"{access.address} is reached {'without' if access.plain else 'with'} encryption, and this peer was "
                f"started {'with' if self._settings.insecure else 'without'} insecure: all peers of a run are the same"
            )
        return access

    def _choose_token(self, kept: str | None) -> str:
        """That of the run: of the one that is to be joined, else of the one in the folder, else this user's own."""
        if self._identity is None:
            return ""
        shown = {access.token for access in self.joins if access.token}
        if kept is not None:
            shown.add(kept)
        if len(shown) > 1:
            raise ConfigError(
                "join strings of one run carry the same token, and these do not"
                + (" (or the folder holds another run)" if kept is not None else "")
            )
        if self.joins and not shown:
            raise NoCredentials("no token of the run is known here: give a whole join string, not an admin's")
        return shown.pop() if shown else self._identity.tokens.load().run

    # --- being reached ----------------------------------------------------------------------------------------------

    def _own_access(self, host: str) -> Access:
        port, named = self._http.port, self._settings.advertise
        if named is not None:
            host, stated = parse_address(named)
            port = stated if named.rstrip("/").endswith(f":{stated}") else port
        elif host in EVERYWHERE:
            host = outward_host()
        if self._identity is None:
            return Access(host, port, plain=True)
        return Access(host, port, self.token, self._identity.fingerprint)

    def _announce(self, host: str) -> None:
        """So that this user's commands on this machine find the peer by its address."""
        if self._identity is None:
            return
        hosts = {"127.0.0.1" if host in EVERYWHERE else host}
        if self.token == self._identity.tokens.load().run:
            self._credentials.announce(hosts, self._http.port, self._identity)
            return
        for name in hosts:
            self._credentials.remember(Access(name, self._http.port, self.token, self._identity.fingerprint))


class Contacts:
    """A transport to each peer, replaced when its beats name another place."""

    def __init__(self, listener: NodeListener, find_beat: Callable[[str], Beat | None], timeout_s: float) -> None:
        self._listener, self._find_beat, self._timeout_s = listener, find_beat, timeout_s
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Access, HttpTransport]] = {}
        self.speeds = Speeds()

    def transport(self, key: str) -> HttpTransport | None:
        """None: nobody has said where it is, so that it can be called."""
        beat = self._find_beat(key)
        access = self._listener.access_of(beat) if beat is not None else None
        if access is None:
            return None
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] == access:
                return known[1]
            made = self._listener.reach(access, self._timeout_s)
            self._known[key] = (access, made)
        if known is not None:
            known[1].close()
        return made

    def keep_only(self, keys: set[str]) -> None:
        with self._lock:
            gone = [self._known.pop(key) for key in list(self._known) if key not in keys]
        self.speeds.keep_only(keys)
        for _, transport in gone:
            transport.close()

    def close(self) -> None:
        self.keep_only(set())


def access_to(beat: Beat, token: str, *, insecure: bool) -> Access | None:
    """How to reach who sent this beat; None = not at all: what it names is no place, or it speaks no TLS and this node
    nothing else."""
    try:
        host, port = parse_address(beat.address)
        if parse_address(write_address(host, port)) != (host, port):
            return None
        if insecure:
            return Access(host, port, plain=True)
        access = Access(host, port, token, beat.fingerprint)
        return access if beat.fingerprint and parse_join_string(access.join_string) == access else None
    except ConfigError:
        return None


def _parse_listen(listen: str) -> tuple[str, int]:
    """As an address, but the port may be 0, and the host may be missing (everywhere)."""
    host, colon, port = listen.rpartition(":")
    if colon and port == "0":
        return host.strip("[]") or EVERYWHERE[0], 0
    with contextlib.suppress(ConfigError):
        return parse_address(listen)
    raise ConfigError(f"listen must be host:port, got {listen!r}; for example {write_address(EVERYWHERE[0], 8512)}")
