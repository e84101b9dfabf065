"""The HTTP/1.1 server: a thread per connection, heads by h11, bodies straight from the socket to their destination.

What it serves is the table of routes that it is given (routes.py). Why threads and h11, with the measurement:
docs/adr/0004-threads-and-the-http-server.md. What all of it may cost: limits.py.
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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import h11

from ..errors import (
    BadRequest,
    Forbidden,
    LengthRequired,
    MethodNotAllowed,
    Refused,
    ServerError,
    TlsRequired,
    Unauthorized,
    UnsupportedMedia,
)
from ..printable import printable
from ..security import Guard
from ..security.guard import OpenGuard, check_own_page, own_names
from ..versions import OLDEST_PROTOCOL, PROTOCOL_VERSION, SPOKEN_HERE, as_spoken
from .connections import Connection, Connections
from .http_request import HEAD_READ_BYTES, SLICE_BYTES, Gone, HttpRequest, read_request
from .limits import ServiceLimits
from .messages import (
    BYTES_TYPE,
    CARRIED_HEADER,
    HASH_HEADER,
    JSON_TYPE,
    MAX_JSON_BYTES,
    MAX_PART_BYTES,
    PROTOCOLS_HEADER,
    SESSION_HEADER,
    decode_json,
    encode_error,
    encode_json,
    parse_query,
    protocol_of,
)
from .pace import Pace
from .routes import (
    TUNNEL,
    Carrying,
    DownloadRoute,
    MessageRoute,
    PlainRoute,
    Presented,
    Reply,
    Routes,
    TunnelRoute,
    UploadRoute,
    admit,
    no_route,
)
from .sockets import Channel, Places, has_all, peer_of, probe_often, shut

log = logging.getLogger(__name__)

BACKLOG = 1024
LEAST_AT_WORK = 4  # connections at a time; more if there are more cores
LOOKING = (b"GET /status", b"GET /healthz", b"GET /metrics")  # operators and monitors go first
DRAIN_S = 2.0
PARTING_S = 5.0
NOT_MODIFIED = 304


@dataclass(frozen=True)
class RefusedRequest:
    """For the account of refusals. `by_service`: the service behind has said no, and taken note of it. `token`: the
    name of the one that was shown; `worker`: for whom it spoke."""

    refusal: Refused
    peer: str
    method: str
    path: str
    request_id: str
    by_service: bool = False
    token: str = ""
    worker: str = ""


def log_refusal(refused: RefusedRequest) -> None:
    """ "Too late" and "ask again" are everyday answers; an operator wants to see the others."""
    level = logging.DEBUG if refused.refusal.status in (409, 503) else logging.INFO
    what, refusal = f"{refused.method} {refused.path}".strip() or "a request", refused.refusal
    shown = f" with the token {refused.token!r}" if refused.token else ""
    why = f"{what} from {refused.peer}{shown} refused: {refusal.code}: {refusal.message} [{refused.request_id}]"
    log.log(level, "%s", printable(why))


class HttpServer:
    """Listens on `host:port` (port 0 = any free one) and serves `routes`. With a `guard`, a request without its token
    gets nothing but 401, whatever it asks; public routes alone are for everybody. Without one, workers are, but no web
    pages; `names`: which the port is reached under, beside addresses. `reply_to_error`: given a refusal, the request's
    id and the protocol; None = as every port of today answers."""

    def __init__(
        self,
        routes: Routes,
        host: str,
        port: int,
        limits: ServiceLimits = ServiceLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        guard: Guard | None = None,
        on_refusal: Callable[[RefusedRequest], None] = log_refusal,
        names: Collection[str] = (),
        reply_to_error: Callable[[Refused, str, int], Reply] | None = None,
    ) -> None:
        self._routes = routes
        self._tls = tls
        self._guard = guard or OpenGuard(own_names(host, *names))
        self._on_refusal = on_refusal
        self._error_reply = reply_to_error or error_reply
        self._limits = limits
        self._connections = Connections(limits, time.monotonic)
        self._pace = Pace(self._connections, limits, time.monotonic)
        self._one_large = threading.Lock()
        self._places = Places(max(LEAST_AT_WORK, 2 * (os.cpu_count() or 1)))
        self._stopping = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="outerstep-accept", daemon=True)

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

    # --- connections ------------------------------------------------------------------------------------------------

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
            if self._limits.keepalive_s is not None:
                probe_often(connection.sock, self._limits.keepalive_s)
            tunnel = self._routes.get(TUNNEL)
            if isinstance(tunnel, TunnelRoute) and self._begins_with_connect(connection):
                tunnel.handler(connection, self._connections)
                return
            if self._tls is not None:
                self._secure(connection, self._tls)
            carry: bytes | None = b""
            while carry is not None and not self._stopping.is_set():
                carry = self._serve_one(connection, carry)
        except (Gone, OSError) as error:
            log.debug("connection ended: %s", error)
        finally:
            connection.answer_ended(arrived=False)
            self._connections.leave(connection)
            if not connection.is_handed_over:
                connection.sock.close()

    def _begins_with_connect(self, connection: Connection) -> bool:
        """No other method begins with a C, and no TLS."""
        connection.sock.settimeout(self._limits.stall_s)
        return connection.sock.recv(1, socket.MSG_PEEK) == b"C"

    def _secure(self, connection: Connection, tls: ssl.SSLContext) -> None:
        """Shake hands. That is this thread's: a peer that is slow at it keeps no other waiting."""
        connection.sock.settimeout(self._limits.stall_s)
        begun = connection.sock.recv(1, socket.MSG_PEEK)
        if begun.isalpha():
            self._turn_away_plain(connection)
        # The socket is handed over before the handshake: a thread that wants to shut it must find the one in use.
        secured = tls.wrap_socket(connection.sock, server_side=True, do_handshake_on_connect=False)
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
        """The peer speaks HTTP without TLS. That much can be said in the clear; what it sent is not looked at."""
        refusal = TlsRequired("this port speaks TLS", hint="use the join string, or https:// for /healthz")
        request_id = secrets.token_hex(6)
        self._on_refusal(RefusedRequest(refusal, peer_of(connection.sock), "", "", request_id))
        self._connections.refusals.note(connection.address)
        channel = Channel(connection, None, self._limits.stall_s)
        self._send(
            channel, h11.Connection(h11.SERVER), self._error_reply(refusal, request_id, OLDEST_PROTOCOL), close=True
        )
        _linger(channel)
        raise Gone("it spoke plain HTTP")

    def _serve_one(self, connection: Connection, carry: bytes) -> bytes | None:
        """One request and its answer; returns what already arrived of the next one, None = close."""
        http = h11.Connection(h11.SERVER)
        if not carry:  # the first bytes come without a turn: only they tell whether the request needs one
            connection.idle_since = time.monotonic()
            carry = Channel(connection, None, self._limits.idle_s).receive(HEAD_READ_BYTES)
        # A peer that speaks again has read our last answer. One that closed on unread bytes would have reset instead.
        if connection.on_ended is not None:
            connection.answer_ended(arrived=bool(carry) or has_all(connection.sock))
        connection.request, connection.idle_since = connection.request + 1, None
        in_turns = len(self._connections.open) > self._limits.few_connections and not carry.startswith(LOOKING)
        channel = Channel(connection, self._places if in_turns else None, self._limits.stall_s)
        request: HttpRequest | None = None
        try:
            with channel.turn:
                try:
                    request = read_request(http, channel, carry, self._connections)
                except h11.RemoteProtocolError as error:
                    reply = self._refuse_head(error, peer_of(channel.sock))
                else:
                    connection.is_served = True
                    reply = self._reply(request, channel)
            if request is None:
                self._connections.refusals.note(connection.address)
                self._send(channel, http, reply, close=True)
                _linger(channel)
                return None
            body = request.body
            if reply.hand_over is not None:
                connection.is_handed_over = True
                reply.hand_over(connection.sock)
                return None
            if request.is_admitted:
                reply = dataclasses.replace(reply, headers=(*reply.headers, (PROTOCOLS_HEADER, SPOKEN_HERE)))
            close = request.closes
            if reply.status == Unauthorized.status:
                close = self._doubt(connection) or close
            if request.method == "HEAD":
                reply = dataclasses.replace(reply, body=b"")
            if body.left > MAX_PART_BYTES or (body.left and body.expects_continue):  # which will not come any more
                self._send(channel, http, reply, close=True)
                _linger(channel)
                return None
            # A client that sends its whole body before it reads would never see an answer to a half-read one.
            self._send(channel, http, reply, close=close)
            if body.left:
                body.discard()
            if close and connection.on_ended is not None:
                _await_close(channel)
            return None if close else body.beyond
        except BadRequest as error:  # the body ended early, here or while discarding it
            log.debug("connection ended: %s", error)
            return None
        finally:
            if request is not None:
                request.body.release()
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

    # --- one request ------------------------------------------------------------------------------------------------

    def _refuse_head(self, error: h11.RemoteProtocolError, peer: str) -> Reply:
        hint = "Content-Length must be one number" if "Content-Length" in str(error) else ""
        wrong, _, _ = str(error).partition(": bytearray(")  # h11 quotes the line, and there may be a token in it
        refusal: Refused = BadRequest(f"not HTTP/1.1 as we take it: {wrong}", hint=hint)
        status = error.error_status_hint or 400
        if status == 501:  # a Transfer-Encoding that h11 does not know; here none is taken
            status = 411
        if status == 431:
            try:
                self._guard.admit({})  # a head too long to be read has no token in it
            except Unauthorized as unauthorized:
                refusal, status = unauthorized, unauthorized.status
        request_id = secrets.token_hex(6)
        self._on_refusal(RefusedRequest(refusal, peer, "", "", request_id))
        return dataclasses.replace(self._error_reply(refusal, request_id, OLDEST_PROTOCOL), status=status)

    def _reply(self, request: HttpRequest, channel: Channel) -> Reply:
        request_id = secrets.token_hex(6)
        method, path = request.method[:16], request.path[:64]
        try:
            return self._serve(request, channel)
        except Refused as refusal:
            who = request.is_with_service, request.token, request.worker
            self._on_refusal(RefusedRequest(refusal, request.body.peer, method, path, request_id, *who))
            return self._error_reply(refusal, request_id, request.protocol)
        except (TimeoutError, ConnectionError) as error:
            raise Gone(str(error)) from error
        except Exception as error:  # the last line of defence of a thread that serves strangers
            log.exception("%s failed [%s]", printable(f"{method} {path}"), request_id)
            failure = ServerError(
                f"internal error ({type(error).__name__})", hint=f"see the server's log: {request_id}"
            )
            return self._error_reply(failure, request_id, OLDEST_PROTOCOL)

    def _serve(self, request: HttpRequest, channel: Channel) -> Reply:
        """Who asks, what for, and the answer. The token comes first: without one, nobody learns which paths there are.
        What can be refused without troubling the service is refused before its handler is called."""
        method, path, headers, body = request.method, request.path, request.headers, request.body
        route = self._routes.get((method, path))
        if isinstance(route, PlainRoute) and route.is_public:
            with channel.away():
                return route.handler(request)
        if isinstance(route, PlainRoute) and route.opens is not None and not isinstance(self._guard, OpenGuard):
            caller = route.opens(request)
        else:
            caller = self._guard.admit(headers)
        if not channel.connection.is_known:
            self._connections.greet(channel.connection)
        request.is_admitted, request.token = True, caller.name
        request.protocol = protocol_of(headers)
        if route is None or isinstance(route, TunnelRoute):
            raise no_route(self._routes, method, path)
        if isinstance(route, MessageRoute) and route.is_order:
            caller.check_operates()
            self._check_operator(request)
        if isinstance(route, PlainRoute) and route.reads:
            caller.check_reads()
        if isinstance(route, PlainRoute) and route.joins:
            caller.check_joins()
        if headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedMedia("compressed bodies are not taken", hint="send without Content-Encoding")
        if method != "GET" and "content-length" not in headers:
            raise LengthRequired(f"{method} {path} needs a Content-Length")
        shown = Presented(
            caller,
            headers.get(SESSION_HEADER.lower(), ""),
            channel.connection.address,
            headers.get("authorization", "").partition(" ")[2],
        )
        match route:
            case MessageRoute():
                body.check_size(route.most_bytes, f"the body of {path}")
                with contextlib.nullcontext() if body.is_here else channel.away():
                    data = body.read()
                with self._one_large if len(data) > MAX_JSON_BYTES else contextlib.nullcontext():
                    # Of a large one, decoding takes many times its size for a moment.
                    message = decode_json(data, route.kind) if route.decode is None else route.decode(data)
                request.worker = getattr(message, route.speaker) if route.speaker is not None else ""
                admit(route, message, shown, request.protocol)
                request.is_with_service = True
                given = (message, shown) if route.sees_caller else (message,)
                shown.away = channel.away
                with contextlib.nullcontext() if route.is_quick or route.waits_away else channel.away():
                    answer = route.handler(*given)
                if not route.is_quick:
                    self._guard.admit(headers)  # it may have been revoked while this one waited
                return answer if isinstance(answer, Reply) else _answer(answer, request)
            case UploadRoute():
                part: Any = parse_query(request.query, route.kind)
                request.worker = getattr(part, route.speaker)
                admit(route, part, shown, request.protocol)
                body.check_size(route.most_bytes, "a part", "a run's parts have part_size_bytes, as its plan says")
                request.is_with_service = route.sees_caller
                with channel.away():
                    stored = route.handler(part, body, shown) if route.sees_caller else route.handler(part, body)
                self._guard.admit(headers)
                return _answer(stored, request)
            case DownloadRoute():
                part = parse_query(request.query, route.kind)
                request.worker = getattr(part, route.speaker)
                admit(route, part, shown, request.protocol)
                found, bytes_ = route.handler(part)
                return Reply(bytes_, headers=(("Content-Type", BYTES_TYPE), (HASH_HEADER, found.hash)))
            case PlainRoute():
                with channel.away():
                    return route.handler(request)

    def _check_operator(self, request: HttpRequest) -> None:
        is_page = check_own_page(request.headers)
        if is_page and not self._limits.control_from_anywhere:
            raise Forbidden(
                "this server takes no orders from its page",
                hint="run `outerstep control` on its machine, or start the server with --remote-control",
            )
        if not self._limits.control_from_anywhere and not request.body.is_from_here:
            raise Forbidden(
                f"control is taken from the server's own machine only; this comes from {request.body.peer}",
                hint="run `outerstep control` there, or start the server with --remote-control",
            )
        # A web page open on that machine can post here too, but not with this type unless we let it ask first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != JSON_TYPE:
            raise UnsupportedMedia(f"control is {JSON_TYPE}", hint=f"send Content-Type: {JSON_TYPE}")

    @staticmethod
    def _send(channel: Channel, http: h11.Connection, reply: Reply, *, close: bool) -> None:
        headers = list(reply.headers)
        if reply.status != NOT_MODIFIED:  # of which the length would be that of what is not sent
            headers.insert(0, ("Content-Length", str(len(reply.body) + sum(map(len, reply.rest)))))
        if close:
            headers.append(("Connection", "close"))
        try:
            head = http.send(h11.Response(status_code=reply.status, headers=headers, reason=reply.reason))
            assert head is not None
            body = memoryview(reply.body)
            if len(body) > HEAD_READ_BYTES:
                channel.send(head)
                head = b""
                if reply.handed is not None:  # before the client can act on it: the last bytes wait
                    channel.send(body[:-HEAD_READ_BYTES])
                    body = body[-HEAD_READ_BYTES:]
            if reply.handed is not None:
                reply.handed()
            channel.connection.on_ended = reply.ended
            channel.send(head + bytes(body) if head else body)  # one packet for a small answer
            for piece in reply.rest:
                channel.send(piece)
        finally:
            if reply.over is not None:
                reply.over()


def _answer(answer: object, request: HttpRequest) -> Reply:
    """In the protocol of the request."""
    if isinstance(answer, Carrying):
        alone = _answer(answer.answer, request).body
        headers = (("Content-Type", BYTES_TYPE), (CARRIED_HEADER, str(answer.size_bytes)))
        return Reply(b"".join((alone, *answer.pieces)), headers=headers)  # small: to copy costs less than to send twice
    is_newest = request.protocol == PROTOCOL_VERSION
    return Reply(encode_json(answer if is_newest else as_spoken(answer, request.protocol)))


def error_reply(refusal: Refused, request_id: str, protocol: int) -> Reply:
    headers = [("Content-Type", JSON_TYPE)]
    if isinstance(refusal, Unauthorized):
        headers.append(("WWW-Authenticate", "Bearer"))
    if isinstance(refusal, MethodNotAllowed):
        headers.append(("Allow", refusal.allow))
    if refusal.retry_after_s:
        headers.append(("Retry-After", str(max(1, round(refusal.retry_after_s)))))
    return Reply(encode_error(refusal, request_id, protocol), refusal.status, tuple(headers))


def _linger(channel: Channel) -> None:
    """Closing with unread bytes resets the connection and may destroy our answer on its way: read a little first."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_WR)
        channel.set_timeout(DRAIN_S)
        give_up_at = time.monotonic() + DRAIN_S
        while time.monotonic() < give_up_at and channel.receive(SLICE_BYTES):
            pass


def _await_close(channel: Channel) -> None:
    """A client that has our answer closes its side: then we know."""
    channel.set_timeout(PARTING_S)
    give_up_at = time.monotonic() + PARTING_S
    while time.monotonic() < give_up_at:
        if not channel.receive(SLICE_BYTES):
            channel.connection.answer_ended(arrived=has_all(channel.sock))
            return


__all__ = ["HttpServer", "RefusedRequest", "ServiceLimits", "error_reply", "log_refusal"]
