"""The HTTP/1.1 service: a thread per connection, heads by h11, bodies straight from the socket to their destination.

Why so, with the measurement: docs/adr/0004-threads-and-the-http-server.md. What all of it may cost: limits.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import h11

from ..errors import (
    BadRequest,
    Forbidden,
    LengthRequired,
    MethodNotAllowed,
    Refused,
    ServerError,
    TlsRequired,
    TooLarge,
    Unauthorized,
    UnsupportedMedia,
)
from ..security import Caller, Guard
from ..security.guard import OpenDoor
from ..types import Control, GetPart, Heartbeat, Leave, Offer, PutPart
from . import probe, strict_json
from .connections import Connection, Connections
from .http_body import SLICE_BYTES, Allowance, HttpBody, peer_of, shut
from .http_head import HEAD_READ_BYTES, Gone, headers_of, read_head
from .limits import ServiceLimits
from .messages import (
    BYTES_TYPE,
    HASH_HEADER,
    JSON_TYPE,
    LARGE,
    MAX_JOIN_BYTES,
    MAX_JSON_BYTES,
    MAX_PART_BYTES,
    AnyRequest,
    decode_request,
    encode_error,
    find_route,
    parse_query,
)
from .pace import Pace
from .peers import GetHeld, PeerRequest
from .service import Service
from .turns import Line, Turn

log = logging.getLogger(__name__)

BACKLOG = 1024
LEAST_AT_WORK = 4  # connections at a time; more if there are more cores
LOOKING = (b"GET /status", b"GET /healthz")  # operators and monitors go first
QUICK = (Offer, Heartbeat, Leave)  # answered without waiting for anything
DRAIN_S = 2.0


@dataclass(frozen=True)
class RefusedRequest:
    """For whoever keeps account of refusals. `by_service`: the service behind has said no, and taken note of it."""

    refusal: Refused
    peer: str
    method: str
    path: str
    request_id: str
    by_service: bool = False


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes | memoryview
    headers: tuple[tuple[str, str], ...] = (("Content-Type", JSON_TYPE),)


def log_refusal(refused: RefusedRequest) -> None:
    """ "Too late" and "ask again" are everyday answers; an operator wants to see the others."""
    level = logging.DEBUG if refused.refusal.status in (409, 503) else logging.INFO
    what, refusal = f"{refused.method} {refused.path}".strip() or "a request", refused.refusal
    log.log(
        level, "%s from %s refused: %s: %s [%s]", what, refused.peer, refusal.code, refusal.message, refused.request_id
    )


class HttpService:
    """Listens on `host:port` (port 0 = any free one) and passes requests to `service`. With a `guard`, those without
    its token get nothing but 401, whatever they ask; `GET /healthz` alone is for everybody."""

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        limits: ServiceLimits = ServiceLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        guard: Guard = OpenDoor(),  # noqa: B008 - holds nothing
        on_refusal: Callable[[RefusedRequest], None] = log_refusal,
    ) -> None:
        self._service = service
        self._tls = tls
        self._guard = guard
        self._on_refusal = on_refusal
        self._limits = limits
        self._connections = Connections(limits, time.monotonic)
        self._pace = Pace(self._connections, limits, time.monotonic)
        self._messages = Allowance(limits.message_bytes)
        self._one_large = threading.Lock()
        self._places = threading.BoundedSemaphore(max(LEAST_AT_WORK, 2 * (os.cpu_count() or 1)))
        self._stopping = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="outerstep-accept", daemon=True)

    @property
    def connections(self) -> dict[str, int]:
        """How many there are, and what was done about others."""
        return self._connections.summary()

    def start(self) -> None:
        self._thread.start()
        self._pace.start()

    def stop(self, *, patience_s: float = 5.0) -> None:
        """Take no more requests, let those being served finish, close."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at and any(one.is_served for one in self._connections.list()):
            time.sleep(0.02)
        for connection in self._connections.list():
            shut(connection.sock)
        self._pace.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=patience_s)

    def let_go(self) -> None:
        """In a process that was forked: the port is its parent's, and free when that one is gone."""
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._stopping.is_set():
                    return
                log.exception("accept failed")
                time.sleep(0.1)  # out of file descriptors, say: don't spin
                continue
            admission = self._connections.admit(sock, str(peer[0]))
            if admission.dropped is not None:
                shut(admission.dropped.sock)
            if admission.connection is None:
                log.debug("turned a connection from %s away: there is no more room for strangers", peer[0])
                sock.close()
                continue
            try:
                threading.Thread(
                    target=self._converse, args=(admission.connection,), name="outerstep-connection", daemon=True
                ).start()
            except RuntimeError:  # no more threads to be had: lose this connection, not all that come after it
                log.exception("refused a connection")
                self._connections.leave(admission.connection)
                sock.close()

    def _converse(self, connection: Connection) -> None:
        try:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._secure(connection)
            carry: bytes | None = b""
            while carry is not None and not self._stopping.is_set():
                carry = self._serve_one(connection, carry)
        except (Gone, OSError) as error:
            log.debug("connection ended: %s", error)
        finally:
            self._connections.leave(connection)
            connection.sock.close()

    def _secure(self, connection: Connection) -> None:
        """Shake hands, if the peer is to be spoken with in TLS. That is this thread's: a peer that is slow at it keeps
        nobody else waiting."""
        if self._tls is None:
            return
        connection.sock.settimeout(self._limits.stall_s)
        begun = connection.sock.recv(1, socket.MSG_PEEK)
        if begun.isalpha():
            self._turn_away_plain(connection)
        # The socket is handed over before the handshake: whoever wants to shut it must find the one that is in use.
        secured = self._tls.wrap_socket(connection.sock, server_side=True, do_handshake_on_connect=False)
        connection.sock = secured
        if connection.is_gone:
            raise Gone("it had to make room just now")
        try:
            secured.do_handshake()
        except OSError:
            self._connections.note("handshakes_failed")
            self._connections.refusals.note(connection.address)
            raise

    def _turn_away_plain(self, connection: Connection) -> None:
        """Somebody speaks HTTP without TLS. That much can be said in the clear; what they sent is not looked at."""
        refusal = TlsRequired("this port speaks TLS", hint="use the join string, or https:// for /healthz")
        request_id = _new_id()
        self._on_refusal(RefusedRequest(refusal, peer_of(connection.sock), "", "", request_id))
        self._connections.refusals.note(connection.address)
        line = Line(connection, None, self._limits.stall_s)
        self._send(line, h11.Connection(h11.SERVER), _error_reply(refusal, request_id), close=True)
        _linger(line)
        raise Gone("it spoke plain HTTP")

    def _serve_one(self, connection: Connection, carry: bytes) -> bytes | None:
        """One request and its answer; returns what already arrived of the next one, None = close."""
        http = h11.Connection(h11.SERVER)
        carry = carry or self._first_bytes(connection)
        connection.request, connection.idle_since = connection.request + 1, None
        in_turns = len(self._connections) > self._limits.few_connections and not carry.startswith(LOOKING)
        line = Line(connection, self._places if in_turns else None, self._limits.stall_s)
        try:
            with line.turn:
                head, beyond = read_head(http, line, carry)
        except h11.RemoteProtocolError as error:
            self._connections.refusals.note(connection.address)
            self._send(line, http, self._refuse_head(error, peer_of(line.sock)), close=True)
            _linger(line)
            return None
        connection.is_served, headers = True, headers_of(head)
        body = HttpBody(
            line,
            int(headers.get("content-length", "0")),  # h11 has checked that it is a number, and only one
            beyond,
            expects_continue=headers.get("expect", "").lower() == "100-continue",
            allowance=self._messages,
        )
        try:
            with line.turn:
                reply = self._reply(head, headers, body, line)
            close = head.http_version == b"1.0" or headers.get("connection", "").lower() == "close"
            if reply.status == Unauthorized.status:
                close = self._doubt(connection) or close
            if head.method == b"HEAD":
                reply = dataclasses.replace(reply, body=b"")
            if body.left > MAX_PART_BYTES or body.is_held_back:
                self._send(line, http, reply, close=True)
                _linger(line)
                return None
            # A client that sends its whole body before it reads would never see an answer to a half-read one.
            self._send(line, http, reply, close=close)
            body.discard()
            return None if close else body.unexpected
        except BadRequest as error:  # the body ended early, here or while discarding it
            log.debug("connection ended: %s", error)
            return None
        finally:
            body.release()
            connection.is_served = False
            connection.idle_since = time.monotonic()

    def _doubt(self, connection: Connection) -> bool:
        """It has shown no valid token. True: so have many from there before, and this one has waited for its answer."""
        self._connections.doubt(connection)
        self._connections.refusals.note(connection.address)
        if not self._connections.refusals.is_doubtful(connection.address):
            return False
        self._connections.note("refusals_delayed")
        self._stopping.wait(self._limits.penalty_s)
        return True

    def _first_bytes(self, connection: Connection) -> bytes:
        """Of the next request. Without a turn: only they tell whether it needs one."""
        connection.idle_since = time.monotonic()
        return Line(connection, None, self._limits.idle_s).receive(HEAD_READ_BYTES)

    def _refuse_head(self, error: h11.RemoteProtocolError, peer: str) -> _Reply:
        refusal: Refused = BadRequest(f"not HTTP/1.1 as we take it: {error}")
        status = error.error_status_hint or 400
        if status == 501:  # a Transfer-Encoding that h11 does not know; here none is taken
            status = 411
        if status == 431:
            try:
                self._guard.admit(None)  # a head too long to be read has no token in it
            except Unauthorized as unauthorized:
                refusal, status = unauthorized, unauthorized.status
        request_id = _new_id()
        self._on_refusal(RefusedRequest(refusal, peer, "", "", request_id))
        return dataclasses.replace(_error_reply(refusal, request_id), status=status)

    def _reply(self, head: h11.Request, headers: dict[str, str], body: HttpBody, line: Line) -> _Reply:
        request_id = _new_id()
        method = head.method.decode("latin-1")
        path, _, query = head.target.decode("latin-1").partition("?")
        by_service = False
        try:
            kind, act = self._understand(method, path, query, headers, body, line)
            by_service = kind not in (PutPart, GetPart, GetHeld)  # of those it keeps no account
            return act()
        except Refused as refusal:
            self._on_refusal(RefusedRequest(refusal, body.peer, method[:16], path[:64], request_id, by_service))
            return _error_reply(refusal, request_id)
        except (TimeoutError, ConnectionError) as error:
            raise Gone(str(error)) from error
        except Exception as error:  # the last line of defence of a thread that serves strangers
            log.exception("%s %s failed [%s]", method[:16], path[:64], request_id)
            failure = ServerError(
                f"internal error ({type(error).__name__})", hint=f"see the server's log: {request_id}"
            )
            return _error_reply(failure, request_id)

    def _understand(
        self, method: str, path: str, query: str, headers: dict[str, str], body: HttpBody, line: Line
    ) -> tuple[type[AnyRequest] | None, Callable[[], _Reply]]:
        """Who asks, what for, and how to do it; raises what can be refused without troubling the service. The token
        comes first: without one, nobody learns which paths there are."""
        if (method, path) == ("GET", "/healthz"):
            return None, self._health
        caller, turn = self._guard.admit(headers.get("authorization")), line.turn
        self._connections.greet(line.connection)
        if (method, path) == ("GET", "/status"):
            return None, self._status
        probing = path == probe.PATH and method in probe.METHODS
        kind = None if probing else find_route(method, path)
        if kind is Control:
            caller.check_operates()
            self._check_operator(body, headers)
        if headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedMedia("compressed bodies are not taken", hint="send without Content-Encoding")
        if method != "GET" and "content-length" not in headers:
            raise LengthRequired(f"{method} {path} needs a Content-Length")
        if kind is None:
            return None, self._probe(method, query, body, turn)
        if issubclass(kind, PutPart):
            put = _for(caller, parse_query(query, kind))
            assert isinstance(put, PutPart)
            _check_size(body, MAX_PART_BYTES, "a part", hint="a run's parts have part_size_bytes, as its plan says")
            return kind, partial(self._take_part, put, body, turn)
        if issubclass(kind, GetPart | GetHeld):
            get = _for(caller, parse_query(query, kind))
            assert isinstance(get, GetPart | GetHeld)
            return kind, partial(self._send_part, get)
        _check_size(body, MAX_JOIN_BYTES if kind in LARGE else MAX_JSON_BYTES, f"the body of {path}")
        with turn.away():
            data = body.read()
        with self._one_large if len(data) > MAX_JSON_BYTES else contextlib.nullcontext():
            request = self._decode(data, kind)  # of a large one, many times its size for a moment
        return kind, partial(self._answer, _for(caller, request), turn)

    def _status(self) -> _Reply:
        return _Reply(200, strict_json.encode({**self._service.status(), "connections": self.connections}))

    def _decode(self, data: bytes | bytearray, kind: type[AnyRequest]) -> AnyRequest:
        """Who offers something on top of a version that cannot be is told where the run stands."""
        try:
            return decode_request(data, kind)
        except BadRequest as error:
            if kind is Offer and "base" in error.message:
                hint = f"the run has completed round {self._service.status()['sync_round']}"
                raise BadRequest(error.message, hint=hint) from error
            raise

    def _health(self) -> _Reply:
        """For whoever asks, so it says no more than that; what is wrong is in the status."""
        health = "failing" if self._service.failure else "waiting for its disk" if self._service.trouble else "ok"
        return _Reply(200 if health == "ok" else 503, strict_json.encode({"status": health}))

    def _probe(self, method: str, query: str, body: HttpBody, turn: Turn) -> Callable[[], _Reply]:
        if method == "GET":
            noise = probe.noise_for(query)
            return lambda: _Reply(200, noise, (("Content-Type", BYTES_TYPE),))
        _check_size(body, probe.MAX_BYTES, "a probe")

        def take() -> _Reply:
            with turn.away():
                body.discard()
            return _Reply(200, strict_json.encode(probe.received(body.length)))

        return take

    def _answer(self, request: AnyRequest, turn: Turn) -> _Reply:
        if isinstance(request, QUICK):
            return _Reply(200, strict_json.encode(self._service.answer(request)))
        with turn.away():
            answer = self._service.answer(request)
        return _Reply(200, strict_json.encode(answer))

    def _take_part(self, put: PutPart, body: HttpBody, turn: Turn) -> _Reply:
        with turn.away():
            stored = self._service.put_part(put, body)
        return _Reply(200, strict_json.encode(stored))

    def _send_part(self, get: GetPart | GetHeld) -> _Reply:
        answer, data = self._service.get_part(get)
        return _Reply(200, data, (("Content-Type", BYTES_TYPE), (HASH_HEADER, answer.hash)))

    def _check_operator(self, body: HttpBody, headers: dict[str, str]) -> None:
        if not self._limits.control_from_anywhere and not body.is_from_here:
            raise Forbidden(
                f"control is taken from the server's own machine only; this comes from {body.peer}",
                hint="run `outerstep control` there, or start the server with --remote-control",
            )
        # A web page open on that machine can post here too, but not with this type unless we let it ask first.
        if headers.get("content-type", "").partition(";")[0].strip() != JSON_TYPE:
            raise UnsupportedMedia(f"control is {JSON_TYPE}", hint=f"send Content-Type: {JSON_TYPE}")

    @staticmethod
    def _send(line: Line, http: h11.Connection, reply: _Reply, *, close: bool) -> None:
        headers = [("Content-Length", str(len(reply.body))), *reply.headers]
        if close:
            headers.append(("Connection", "close"))
        head = http.send(h11.Response(status_code=reply.status, headers=headers))
        assert head is not None
        if len(reply.body) <= HEAD_READ_BYTES:
            line.send(head + bytes(reply.body))  # one packet for a small answer
        else:
            line.send(head)
            line.send(reply.body)


def _for(caller: Caller, request: AnyRequest) -> AnyRequest:
    """A request speaks for a worker or a peer; whoever sends it must be allowed to."""
    if isinstance(request, PeerRequest):
        caller.check_speaks_for(request.sender)
    elif not isinstance(request, Control):
        caller.check_speaks_for(request.worker_id)
    return request


def _check_size(body: HttpBody, limit_bytes: int, what: str, hint: str = "this limit is the protocol's") -> None:
    if body.length > limit_bytes:
        raise TooLarge(f"{what} has {body.length} bytes; at most {limit_bytes} are taken", hint=hint)


def _new_id() -> str:
    """By which a refusal is found in the server's log."""
    return secrets.token_hex(6)


def _error_reply(refusal: Refused, request_id: str) -> _Reply:
    headers = [("Content-Type", JSON_TYPE)]
    if isinstance(refusal, Unauthorized):
        headers.append(("WWW-Authenticate", "Bearer"))
    if isinstance(refusal, MethodNotAllowed):
        headers.append(("Allow", refusal.allow))
    if refusal.retry_after_s:
        headers.append(("Retry-After", str(max(1, round(refusal.retry_after_s)))))
    return _Reply(refusal.status, encode_error(refusal, request_id), tuple(headers))


def _linger(line: Line) -> None:
    """Closing with unread bytes resets the connection and may destroy our answer on its way: read a little first."""
    with contextlib.suppress(OSError):
        line.sock.shutdown(socket.SHUT_WR)
        line.set_timeout(DRAIN_S)
        give_up_at = time.monotonic() + DRAIN_S
        while time.monotonic() < give_up_at and line.receive(SLICE_BYTES):
            pass


__all__ = ["HttpBody", "HttpService", "RefusedRequest", "ServiceLimits", "log_refusal"]
