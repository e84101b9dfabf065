"""The worker's end of HTTP: `http.client`, a few kept-alive connections, bodies from and to the caller's own memory."""

from __future__ import annotations

import functools
import http.client
import logging
import os
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

import msgspec
from msgspec import UNSET

from ..errors import (
    BadRequest,
    ConfigError,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    OuterstepError,
    ProtocolMismatch,
    Refused,
    TransportError,
    Unauthorized,
    UntrustedServer,
)
from ..security import DEFAULT_PORT, Access, Credentials, is_join_string, parse_address, parse_join_string
from ..security.access import write_address
from ..security.joining import sign_join
from ..security.tls import PinnedConnection, explain, pinning_context
from ..types import (
    Answer,
    AskNonce,
    Control,
    FromMember,
    GetPart,
    GetPartAnswer,
    Join,
    JoinAnswer,
    NonceAnswer,
    Offer,
    Poll,
    PutPart,
    Request,
)
from ..versions import PROTOCOL_VERSION, highest_common
from .answers import WATCH, AnswerTooLong, Incoming, bytes_due, read_answer, send_request
from .messages import (
    BYTES_TYPE,
    CARRIED_HEADER,
    HASH_HEADER,
    JSON_TYPE,
    PAGE_LINK_PATH,
    PROBE_PATH,
    PROTOCOL_HEADER,
    PROTOCOLS_HEADER,
    RELAY_PATH,
    SESSION_HEADER,
    STATUS_PATH,
    AnyAnswer,
    AnyRequest,
    PageCode,
    ProbeAnswer,
    address_of,
    decode_error,
    decode_json,
    encode_json,
    written_in,
)
from .peers import HeldAnswer, PeerAnswer, PeerRequest
from .pipeline import IN_A_ROW, Pipeline, PipelineEnded
from .relay import AskRelay, RelayTicket, open_tunnel

log = logging.getLogger(__name__)

NOTHING = memoryview(b"")
WAY_TIMEOUT_S = 5.0  # for a connection to one of several addresses
DOUBTS = 2  # connections on which nothing came to a request that was sent before the answer to another
OUTDATED = (BadRequest, NotFound, MethodNotAllowed, ProtocolMismatch)  # what an end says to what it does not know yet


class _NotModified(Exception):
    """What was asked for is still what is known here."""


class HttpTransport:
    """Thread-safe: each call borrows a connection, and returns it if the server keeps it open. At most
    `kept_connections` stay open between calls. Parts follow each other on a few connections if `spread` says so.

    `server` is host:port, whose token and certificate are looked up in `credentials` (None = the user's own folder); or
    a join string; or http://host:port for a server without either. When a token or a certificate is refused, both are
    looked up again: after `outerstep join` a running worker continues. `tls`: this context, no look-up and no token.
    `relay`: through the server there, which passes the bytes on (relay.py); it sees TLS and nothing else. A join string
    with several addresses: the first that answers with the right certificate, and another one if that one is gone.

    `protocol`: the highest that both ends speak, as far as is known; ours, before the first answer. Each answer names
    it again, because the other end may be restarted as another version.
    """

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float = 30.0,
        kept_connections: int = 8,
        tls: ssl.SSLContext | None = None,
        credentials: str | os.PathLike[str] | None = None,
        relay: HttpTransport | None = None,
    ) -> None:
        self._server, self._credentials, self._relay = server, credentials, relay
        self.cluster = ""  # whose server this is, if it relays and has said so
        if is_join_string(server):
            access = parse_join_string(server)
            self._host, self._port = access.host, access.port
        else:
            self._host, self._port = parse_address(server)
        self._given = tls
        self._pinning = pinning_context()
        self._system: ssl.SSLContext | None = None  # reads all the authorities: made if it is needed
        self._access = Access(self._host, self._port) if tls is not None else self._find()
        self._places = [(self._host, self._port), *(self._access.others if self._access is not None else ())]
        self._has_succeeded = False
        self.protocol = PROTOCOL_VERSION
        self._shown: str | None = ""  # what the other end has said last of the protocols that it speaks
        self._timeout_s = timeout_s
        self._kept_connections = kept_connections
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._spread: dict[type, int] = {PutPart: 0, GetPart: 0}  # connections that they share; 0 = one for each
        self._pipelines: dict[type, list[Pipeline]] = {PutPart: [], GetPart: []}
        self._doubts: int | None = 0  # whether one request may follow another here; None = it may, it was seen
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by worker id

    @property
    def address(self) -> str:
        return write_address(self._host, self._port)

    @property
    def relay_cluster(self) -> str:
        """The cluster that relays, as it calls itself; "" = none does, or it has not said yet."""
        return self._relay.cluster if self._relay is not None else ""

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        if isinstance(request, Join):
            return self._join(request, timeout_s)
        return cast(Answer, self._call(request, body, into, timeout_s))

    def spread(self, connections: int, *, up: bool) -> None:
        """From now on parts follow each other on so many connections that way; 0 = each on one of its own."""
        self._spread[PutPart if up else GetPart] = connections

    def show_session(self, worker_id: str, session: str) -> None:
        self._sessions[worker_id] = session

    def ask(
        self, request: PeerRequest, *, into: memoryview | None = None, timeout_s: float | None = None
    ) -> PeerAnswer:
        """The same among peers; the bytes of a GetHeld are written to `into`."""
        return cast(PeerAnswer, self._call(request, None, into, timeout_s))

    def ask_nonce(self, worker_id: str, timeout_s: float | None = None) -> NonceAnswer:
        """As a join begins. Refused if the token may not join, or not as this worker; ProtocolMismatch if the server
        knows no keys."""
        return cast(NonceAnswer, self._call(AskNonce(worker_id=worker_id), None, None, timeout_s))

    def _join(self, join: Join, timeout_s: float | None) -> JoinAnswer:
        """Signed with the worker's key, which the server knows it by from then on; unless it is too old for keys."""
        with suppress(ProtocolMismatch):
            offered = self.ask_nonce(join.worker_id, timeout_s)
            key = Credentials(self._credentials).worker_key(join.worker_id)
            join = sign_join(join, key, offered.nonce, self._token(admin=False))
        answer = cast(JoinAnswer, self._call(join, None, None, timeout_s))
        if answer.session is not UNSET:
            self._sessions[join.worker_id] = answer.session
        return answer

    def _call(
        self, request: AnyRequest, body: memoryview | None, into: memoryview | None, timeout_s: float | None
    ) -> AnyAnswer:
        """In the agreed protocol. If the other end does not understand, and shows that it speaks another: in that."""
        protocol = self.protocol
        try:
            return self._say(written_in(request, protocol), protocol, body, into, timeout_s)
        except OUTDATED:
            if self.protocol == protocol:
                raise
        return self._say(written_in(request, self.protocol), self.protocol, body, into, timeout_s)

    def _say(
        self,
        request: AnyRequest,
        protocol: int,
        body: memoryview | None,
        into: memoryview | None,
        timeout_s: float | None,
    ) -> AnyAnswer:
        method, target, answer_type = address_of(request)
        wait_s = request.wait_s or 0.0 if isinstance(request, Poll | Offer) else 0.0
        limit_s = (timeout_s or self._timeout_s) + wait_s
        payload = body if body is not None else memoryview(b"" if method == "GET" else encode_json(request))
        kind = JSON_TYPE if body is None else BYTES_TYPE
        admin = isinstance(request, Control)
        session = self._sessions.get(request.worker_id) if isinstance(request, FromMember | Join) else None
        straight = None if isinstance(request, Poll) else into
        headers, data = self._ask(
            method, target, payload, kind, straight, limit_s, protocol, admin=admin, session=session, way=type(request)
        )
        if isinstance(request, Poll) and CARRIED_HEADER in headers:
            data = self._take_carried(headers[CARRIED_HEADER], data, into)
        if answer_type is GetPartAnswer:
            return GetPartAnswer(hash=headers.get(HASH_HEADER, ""))
        if answer_type is HeldAnswer:
            return HeldAnswer(hash=headers.get(HASH_HEADER, ""))
        try:
            return msgspec.json.decode(data, type=answer_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"{self.address} answered {target} with something else: {error}") from error

    def _take_carried(self, named: str, data: bytes, into: memoryview | None) -> bytes:
        """The JSON alone; the bytes behind it go to their place."""
        count = int(named) if re.fullmatch("[0-9]{1,9}", named) else -1
        if into is None or not 0 <= count <= min(len(data), len(into)):
            room = len(into) if into is not None else 0
            raise TransportError(
                f"{self.address} carries {named[:32]!r} bytes in {len(data)}; there is room for {room}"
            )
        json_bytes = len(data) - count
        into[:count] = memoryview(data)[json_bytes:]
        return data[:json_bytes]

    def read(
        self, path: str, into: memoryview | Incoming | None = None, *, known: str = ""
    ) -> tuple[http.client.HTTPMessage, bytes] | None:
        """The answer's headers and its bytes, which go to `into` if that is given. `known`: the ETag of what is here
        already; None = it is still the newest."""
        extra = {"If-None-Match": known} if known else {}
        try:
            return self._ask("GET", path, into=into, extra=extra)
        except _NotModified:
            return None

    def status(self) -> dict[str, object]:
        _, data = self._ask("GET", STATUS_PATH)
        try:
            return decode_json(data, dict)
        except BadRequest as error:
            raise decode_error(data, 200) from error  # somebody else's page: it says what came instead

    def probe_up(self, data: memoryview) -> ProbeAnswer:
        """Send bytes that are thrown away."""
        return decode_json(self._ask("PUT", PROBE_PATH, data, BYTES_TYPE)[1], ProbeAnswer)

    def probe_down(self, into: memoryview) -> None:
        """Fetch bytes that mean nothing."""
        self._ask("GET", f"{PROBE_PATH}?bytes={len(into)}", kind=BYTES_TYPE, into=into)

    def page_link(self) -> PageCode:
        """What logs a browser in to the page of this server or peer."""
        return decode_json(self._ask("POST", PAGE_LINK_PATH, memoryview(b"{}"))[1], PageCode)

    @property
    def is_plain(self) -> bool:
        """Neither encryption nor tokens."""
        return self._known().plain

    def open_line(self) -> socket.socket:
        """A connection of its own, with the server's certificate checked, for somebody else's requests."""
        connection = self._new_connection(self._timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise TransportError(f"no answer from {self.address}: {error}") from error
        assert connection.sock is not None
        return connection.sock

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _agree(self, shown: str | None) -> None:
        """If there is none that both speak, the refusal says so."""
        self._shown, protocol = shown, highest_common(shown)
        if protocol is None or protocol == self.protocol:
            return
        log.info("%s speaks protocol %d, this end up to %d", self.address, protocol, PROTOCOL_VERSION)
        self.protocol = protocol

    # --- who we are, and who they are -----------------------------------------------------------------------------

    def _find(self) -> Access | None:
        return Credentials(self._credentials).find(self._server)

    def _known(self) -> Access:
        if self._access is None:  # this user's own server, which was not there when we began
            self._access = self._find()
        if self._access is None:
            raise TransportError(
                f"no answer from {self.address}: this user has not started a server on this machine yet. (One "
                "elsewhere, say through a tunnel: give its join string to `outerstep join -`. One that was started "
                f"with --insecure: write http://{self.address})"
            )
        return self._access

    def _token(self, *, admin: bool) -> str:
        access = self._access or self._known()
        if admin and not access.admin and access.token:
            raise Forbidden(
                f"no admin token of {self.address} is known here",
                hint="run this on the server's machine as the user who runs it, or give `outerstep join -` the string "
                "that `outerstep token show --admin` prints there",
            )
        return access.admin if admin else access.token or access.admin

    def _has_news(self) -> bool:
        """What we know of the server was refused. Has somebody told us something else meanwhile?"""
        before, found = self._access, None if self._given is not None else self._find()
        if found is None or found == before:
            return False
        self._access = found
        self.close()  # those connections are the old ones'
        return True

    def _doubt(self, error: Exception) -> Exception:
        """A server that we have spoken with may come to its senses, or its operator to us: worth another try, and
        meanwhile training continues. One that never knew us is an error at once."""
        return TransportError(str(error)) if self._has_succeeded else error

    # --- one exchange ---------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        target: str,
        payload: memoryview = NOTHING,
        kind: str = JSON_TYPE,
        into: memoryview | Incoming | None = None,
        timeout_s: float | None = None,
        protocol: int | None = None,
        *,
        admin: bool = False,
        session: str | None = None,
        extra: Mapping[str, str] | None = None,
        way: type | None = None,
    ) -> tuple[http.client.HTTPMessage, bytes]:
        """Headers and body of the answer, or what was refused. `extra`: headers of the request; `way`: its type."""
        headers = {"Content-Type": kind, PROTOCOL_HEADER: str(protocol or self.protocol), **(extra or {})}
        if session is not None:
            headers[SESSION_HEADER] = session
        if method != "GET":
            headers["Content-Length"] = str(len(payload))
        may_ask_again = True
        while True:
            if token := self._token(admin=admin):
                headers["Authorization"] = f"Bearer {token}"
            try:
                status, said, data = self._exchange(
                    method, target, payload, headers, into, timeout_s or self._timeout_s, way
                )
                if status == 401:
                    raise decode_error(data, status)
            except (UntrustedServer, Unauthorized) as error:
                if may_ask_again and self._has_news():
                    may_ask_again = False
                    continue
                raise self._doubt(error) from error
            if status == 304 and extra:
                raise _NotModified
            refusal = decode_error(data, status) if status != 200 else None
            shown = said[PROTOCOLS_HEADER]
            if shown != self._shown and (shown is not None or refusal is None or isinstance(refusal, OUTDATED)):
                self._agree(shown)
            if refusal is not None:
                raise refusal
            self._has_succeeded = True
            return said, data

    def _exchange(
        self,
        method: str,
        target: str,
        payload: memoryview,
        headers: dict[str, str],
        into: memoryview | Incoming | None,
        timeout_s: float,
        way: type | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A kept-alive connection may have been closed by the server meanwhile: then once more, on a new one. Every
        request of this protocol may be repeated."""
        if way is not None and way in self._spread and (pipeline := self._pipeline(way, timeout_s)) is not None:
            try:
                return pipeline.ask(method, target, payload, headers, into, timeout_s)
            except PipelineEnded as error:
                log.debug("asked again, alone: %s", error.__cause__)
            except (OSError, http.client.HTTPException) as error:
                raise self._no_answer(error, method, target) from error
            finally:
                self._leave(pipeline)
        while True:
            connection, reused = self._connection(timeout_s)
            if reused:
                assert connection.sock is not None
                connection.sock.settimeout(timeout_s)
            try:
                return self._talk(connection, method, target, payload, headers, into)
            except OuterstepError:  # what comes is not what it says: nobody reads it to its end
                connection.close()
                raise
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if reused and not isinstance(error, (TimeoutError, AnswerTooLong)):
                    continue
                raise self._no_answer(error, method, target) from error

    def _no_answer(self, error: Exception, method: str, target: str) -> OuterstepError:
        if isinstance(error, ssl.SSLError) and (untrusted := explain(error, self.address)) is not None:
            return untrusted
        what = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return TransportError(f"no answer from {self.address} to {method} {target.split('?')[0]}: {what}")

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """One that is idle, else a new one; and whether it was used before."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.sock is not None:
            return connection, True
        return self._new_connection(timeout_s) if len(self._places) == 1 else self._find_way(timeout_s), False

    def _pipeline(self, way: type, timeout_s: float) -> Pipeline | None:
        """Of those that are open, the one with the fewest requests; a new one, if there may be more. To be left."""
        with self._lock:
            if not (most := self._spread[way]):
                return None
            pipelines = [pipeline for pipeline in self._pipelines[way] if not pipeline.is_over]
            pipeline = min(pipelines, key=lambda one: one.callers, default=None)
            if pipeline is None or (pipeline.callers and len(pipelines) < most):
                in_a_row = IN_A_ROW if self._doubts is None or self._doubts < DOUBTS else 1
                pipeline = Pipeline(functools.partial(self._connection, timeout_s), in_a_row)
                self._pipelines[way].append(pipeline)
            pipeline.callers += 1
            return pipeline

    def _leave(self, pipeline: Pipeline) -> None:
        with self._lock:
            pipeline.callers -= 1
            if pipeline.has_followed:
                self._doubts = None
            if pipeline.callers:
                return
            for pipelines in self._pipelines.values():
                if pipeline in pipelines:
                    pipelines.remove(pipeline)
            if pipeline.has_failed_behind and self._doubts is not None:
                self._doubts += 1
            connection = pipeline.connection
            keeps = connection is not None and not pipeline.is_over and len(self._idle) < self._kept_connections
            if keeps and connection is not None:
                self._idle.append(connection)
        if not keeps and connection is not None:
            connection.close()

    def _find_way(self, timeout_s: float) -> http.client.HTTPConnection:
        """Connected to the first of several addresses that is the server's, in turn from the one that last was. An
        address of a private network may be somebody else's here: that is an error only if all of them are."""
        wrong: list[Exception] = []
        for place in (places := self._places):
            connection = self._new_connection(min(timeout_s, WAY_TIMEOUT_S), place)
            try:
                connection.connect()
            except (OSError, http.client.HTTPException, UntrustedServer) as error:
                connection.close()
                explained = explain(error, write_address(*place)) if isinstance(error, ssl.SSLError) else None
                wrong.append(explained or error)
                continue
            assert connection.sock is not None
            connection.sock.settimeout(timeout_s)
            with self._lock:
                self._host, self._port = place
                self._places = [place, *(other for other in places if other != place)]
            return connection
        untrusted = [error for error in wrong if isinstance(error, UntrustedServer)]
        if len(untrusted) == len(wrong):
            raise untrusted[0]
        tried = "; ".join(f"{write_address(*place)}: {error}" for place, error in zip(places, wrong, strict=True))
        raise TransportError(f"no answer from any of the server's addresses ({tried})")

    def _new_connection(self, timeout_s: float, place: tuple[str, int] | None = None) -> http.client.HTTPConnection:
        connection = self._straight_connection(timeout_s, place or (self._host, self._port))
        if self._relay is not None:
            opener = functools.partial(self._relay.open_tunnel, self.address, timeout_s)
            setattr(connection, "_create_connection", opener)  # noqa: B010 - http.client's own tunnels read without end
        return connection

    def _straight_connection(self, timeout_s: float, place: tuple[str, int]) -> http.client.HTTPConnection:
        (host, port), access, given = place, self._known(), self._given
        if access.plain:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        if given is None and access.fingerprint is not None:
            return PinnedConnection(
                host, port, timeout=timeout_s, context=self._pinning, fingerprint=access.fingerprint
            )
        if given is None:
            given = self._system = self._system or ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=given)

    def open_tunnel(self, target: str, timeout_s: float, *_: object) -> socket.socket:
        """A connection to the server at `target` through this one, which must relay."""
        return open_tunnel((self._host, self._port), target, self.ask_relay(target), timeout_s)

    def ask_relay(self, target: str) -> str:
        """A ticket for one tunnel through this server to the one at `target`. Whatever is wrong with the relay, the
        server behind it has said nothing: that is a TransportError."""
        try:
            data = self._ask("POST", RELAY_PATH, memoryview(encode_json(AskRelay(target=target))))[1]
            given = decode_json(data, RelayTicket)
            self.cluster = given.cluster or ""
            return given.ticket
        except (Refused, UntrustedServer, ConfigError) as error:
            raise TransportError(f"no way to {target} through {self.address}: {error}") from error

    def _talk(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        payload: memoryview,
        headers: dict[str, str],
        into: memoryview | Incoming | None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        if connection.sock is None:
            connection.connect()
        assert connection.sock is not None
        sock, timeout_s = connection.sock, connection.sock.gettimeout() or 0.0
        with WATCH.over(sock, 2.0 * timeout_s, len(payload), bytes_due(into)):
            send_request(connection, method, target, payload, headers)
            response = connection.getresponse()
            data = read_answer(response, sock, into)
        with self._lock:  # one whose answer was not read to its end cannot be used again
            keeps = not response.will_close and response.isclosed() and len(self._idle) < self._kept_connections
            if keeps:
                self._idle.append(connection)
        if not keeps:
            connection.close()
        return response.status, response.headers, data


__all__ = ["DEFAULT_PORT", "HttpTransport", "parse_address"]
