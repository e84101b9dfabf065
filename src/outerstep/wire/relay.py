"""A relay: this server passes bytes on between a neighbour and the layer above, and sees nothing but TLS.

    POST /v1/relay {"target": "HOST:PORT"}       a neighbour with a token asks for a ticket: {"ticket": …, "cluster": …}
    CONNECT HOST:PORT HTTP/1.1                   on a new connection, in the clear, before any TLS
    Proxy-Authorization: Bearer TICKET
    200, and from then on both directions are passed on as they are

The ticket is asked for over TLS and is good for one tunnel within half a minute: nothing that travels in the clear can
be used again. (TLS inside TLS would need a second TLS stack in Python, at twice the price.) Through the tunnel the
neighbour speaks TLS with the server above and checks *its* certificate, so this relay can delay and cut, and nothing
else. It leads nowhere but to this server's own layer above. docs/adr/0028-tunnels-between-clusters.md
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import h11
from msgspec import Meta

from ..errors import BadRequest, Forbidden, QuotaExceeded
from ..printable import printable
from ..security import is_join_string, parse_address, parse_join_string
from ..security.access import write_address
from ..types import Plain, WorkerId
from .connections import Connection, Connections, group_of
from .http_request import HttpRequest
from .messages import RELAY_PATH, decode_json, encode_json
from .routes import TUNNEL, PlainRoute, Reply, Routes, TunnelRoute
from .sockets import block, shut

log = logging.getLogger(__name__)

HEAD_BYTES = 4096
PIECE_BYTES = 256 << 10


@dataclass(frozen=True)
class RelayLimits:
    """What relaying may cost. `each`: of one address."""

    tunnels: int = 64
    tunnels_each: int = 24
    tickets_per_minute_each: int = 120
    ticket_s: float = 30.0
    connect_s: float = 10.0
    idle_s: float = 180.0  # without a byte either way


class AskRelay(Plain, frozen=True):
    """`target`: the server above, as the asker calls it."""

    target: str


class RelayTicket(Plain, frozen=True):
    """`cluster`: what the relay is called in the layer above."""

    ticket: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    cluster: WorkerId | None = None


@dataclass(frozen=True)
class _TunnelTicket:
    secret: str
    target: str
    address: str
    until: float


class Relay:
    """`targets`: the addresses of this server's layer above, and the only ones that it leads to. `cluster`: the name
    that this server has there, by which plans speak of it."""

    def __init__(
        self,
        targets: Sequence[str],
        limits: RelayLimits = RelayLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        *,
        cluster: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._targets = {_place(target) for target in targets}
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._tickets: deque[_TunnelTicket] = deque()
        self._given: dict[str, deque[float]] = {}  # by address: when
        self._tunnels: Counter[str] = Counter()  # by address
        self.carried_bytes = 0
        self.opened = 0

    @property
    def routes(self) -> Routes:
        """For the table of the port that relays."""
        return {("POST", RELAY_PATH): PlainRoute(self.give, joins=True), TUNNEL: TunnelRoute(self.serve)}

    # --- tickets ------------------------------------------------------------------------------------------------------

    def give(self, request: HttpRequest) -> Reply:
        request.body.check_size(HEAD_BYTES, "a request for a relay")
        asked = decode_json(request.body.read(), AskRelay)
        ticket = self.ticket(asked.target, group_of(request.body.peer))
        return Reply(encode_json(RelayTicket(ticket=ticket, cluster=self._cluster)))

    def ticket(self, target: str, address: str) -> str:
        """For one tunnel of a neighbour at `address`."""
        if target not in self._targets:
            raise Forbidden(
                f"this relay leads to {', '.join(sorted(self._targets))} only, not to {printable(target[:128])}",
                hint="name the layer above (--above) here as it is named there",
            )
        limits, now = self._limits, self._clock()
        with self._lock:
            self._forget(now)
            given = self._given.setdefault(address, deque())
            waiting = Counter(ticket.address for ticket in self._tickets)
            under_way = self._tunnels.total() + waiting.total()
            if under_way >= limits.tunnels or self._tunnels[address] + waiting[address] >= limits.tunnels_each:
                raise QuotaExceeded("this relay has no room for another tunnel", retry_after_s=limits.ticket_s)
            if len(given) >= limits.tickets_per_minute_each:
                raise QuotaExceeded("too many tunnels in a minute", retry_after_s=60.0 - (now - given[0]))
            given.append(now)
            secret = secrets.token_hex(16)
            self._tickets.append(_TunnelTicket(secret, target, address, now + limits.ticket_s))
            return secret

    def _redeem(self, secret: str, target: str) -> _TunnelTicket | None:
        with self._lock:
            self._forget(self._clock())
            for ticket in self._tickets:
                if hmac.compare_digest(ticket.secret.encode(), secret.encode()) and ticket.target == target:
                    self._tickets.remove(ticket)
                    return ticket
        return None

    def _forget(self, now: float) -> None:
        while self._tickets and self._tickets[0].until <= now:
            self._tickets.popleft()
        for address, given in list(self._given.items()):
            while given and now - given[0] >= 60.0:
                given.popleft()
            if not given:
                del self._given[address]

    # --- tunnels ------------------------------------------------------------------------------------------------------

    def serve(self, connection: Connection, connections: Connections) -> None:
        """In the connection's own thread, until the tunnel ends. Raises OSError if the peer goes."""
        try:
            target, secret = self._read_head(connection.sock)
        except (BadRequest, h11.RemoteProtocolError):
            self._refuse(connection, connections, b"400 Bad Request")
            return
        ticket = self._redeem(secret, target)
        if ticket is None:
            self._refuse(connection, connections, b"407 Proxy Authentication Required")
            return
        connections.greet(connection)
        with self._lock:
            self._tunnels[ticket.address] += 1
            self.opened += 1
        try:
            self._lead(connection, target)
        finally:
            with self._lock:
                self._tunnels[ticket.address] -= 1
                self._tunnels += Counter()  # without those that are zero

    def _read_head(self, sock: socket.socket) -> tuple[str, str]:
        http, size = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES), 0
        while (event := http.next_event()) is h11.NEED_DATA:
            piece = sock.recv(HEAD_BYTES)
            size += len(piece)
            if size > HEAD_BYTES:
                raise BadRequest("a head this long is none")
            http.receive_data(piece)
        if not isinstance(event, h11.Request) or http.trailing_data[0]:
            raise BadRequest("a CONNECT ends with its head")
        named = dict(event.headers).get(b"proxy-authorization", b"").decode("latin-1")
        scheme, _, secret = named.partition(" ")
        if event.method != b"CONNECT" or scheme.lower() != "bearer":
            raise BadRequest("this port takes CONNECT with a ticket")
        host, _, port = event.target.decode("latin-1").rpartition(":")
        if not port.isdigit():
            raise BadRequest("a CONNECT names a host and a port")
        return write_address(host.strip("[]"), int(port)), secret

    def _refuse(self, connection: Connection, connections: Connections, status: bytes) -> None:
        connections.note("tunnels_refused")
        connections.refusals.note(connection.address)
        if connections.refusals.is_doubtful(connection.address):
            time.sleep(self._limits.ticket_s / 30.0)
        connection.sock.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def _lead(self, connection: Connection, target: str) -> None:
        near = connection.sock
        try:
            far = socket.create_connection(parse_address(target), timeout=self._limits.connect_s)
        except OSError as error:
            log.info("a tunnel to %s could not be opened: %s", target, error)
            near.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        with contextlib.closing(far):
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for end in (near, far):
                block(end, self._limits.idle_s)
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            tunnel = _RelayedTunnel(near, far, self._limits.idle_s, self._clock)
            tunnel.carry()
        with self._lock:
            self.carried_bytes += tunnel.carried_bytes


class _RelayedTunnel:
    """Two directions, each with a thread; when one ends, both do."""

    def __init__(self, near: socket.socket, far: socket.socket, idle_s: float, clock: Callable[[], float]) -> None:
        self._near, self._far, self._idle_s, self._clock = near, far, idle_s, clock
        self._moved_at = clock()
        self.carried_bytes = 0

    def carry(self) -> None:
        back = threading.Thread(target=self._pass, args=(self._far, self._near), name="outerstep-tunnel", daemon=True)
        back.start()
        self._pass(self._near, self._far)
        back.join()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := self._receive(source):
                sink.sendall(piece)
                self.carried_bytes += len(piece)
                self._moved_at = self._clock()
        except OSError as error:
            log.debug("a tunnel ended: %s", error)
        finally:
            shut(source)
            shut(sink)

    def _receive(self, source: socket.socket) -> bytes:
        """b"" = it has ended, or nothing has moved either way for too long."""
        while True:
            try:
                return source.recv(PIECE_BYTES)
            except BlockingIOError:  # the kernel's limit on silence
                if self._clock() - self._moved_at >= self._idle_s:
                    return b""


def _place(server: str) -> str:
    """host:port of an address or a join string."""
    return parse_join_string(server).address if is_join_string(server) else write_address(*parse_address(server))


# --- the other end ----------------------------------------------------------------------------------------------------


def open_tunnel(relay: tuple[str, int], target: str, ticket: str, timeout_s: float) -> socket.socket:
    """A connection to `target` through the relay there. What the relay answers is read within a length and a time."""
    sock = socket.create_connection(relay, timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(
            f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: Bearer {ticket}\r\n\r\n".encode()
        )
        head, give_up_at = b"", time.monotonic() + timeout_s
        while not head.endswith(b"\r\n\r\n"):
            piece = sock.recv(HEAD_BYTES - len(head)) if len(head) < HEAD_BYTES else b""
            if not piece or time.monotonic() > give_up_at:
                raise ConnectionError("the relay gave no whole answer")
            head += piece
        if not head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.0 200 ")):
            raise ConnectionError(
                f"the relay answered {printable(head[:64].decode('latin-1')).partition(chr(13))[0]!r}"
            )
    except BaseException:
        sock.close()
        raise
    return sock
