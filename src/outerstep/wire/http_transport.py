"""The worker's end of HTTP: `http.client`, a few kept-alive connections, bodies from and to the caller's own memory."""

from __future__ import annotations

import http.client
import logging
import os
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
    Forbidden,
    MethodNotAllowed,
    NotFound,
    OuterstepError,
    ProtocolMismatch,
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
    GetPartAnswer,
    Join,
    JoinAnswer,
    NonceAnswer,
    Poll,
    Request,
)
from ..versions import PROTOCOL_VERSION, highest_common
from . import sockets
from .answers import WATCH, AnswerTooLong, Incoming, read_bytes, read_incoming, read_message
from .messages import (
    BYTES_TYPE,
    HASH_HEADER,
    JSON_TYPE,
    PROBE_PATH,
    PROTOCOL_HEADER,
    PROTOCOLS_HEADER,
    SESSION_HEADER,
    STATUS_PATH,
    AnyAnswer,
    AnyRequest,
    ProbeAnswer,
    address_of,
    decode_error,
    decode_json,
    encode_json,
    written_in,
)
from .peers import HeldAnswer, PeerAnswer, PeerRequest

log = logging.getLogger(__name__)

NOTHING = memoryview(b"")
ANY_LENGTH = 1 << 62
LARGE_BYTES = 64 << 10  # bodies that are moved apart from their heads
OUTDATED = (BadRequest, NotFound, MethodNotAllowed, ProtocolMismatch)  # what an end says to what it does not know yet


class _NotModified(Exception):
    """What was asked for is still what is known here."""


class HttpTransport:
    """Thread-safe: each call borrows a connection, and returns it if the server keeps it open. At most
    `kept_connections` stay open between calls.

    `server` is host:port, whose token and certificate are looked up in `credentials` (None = the user's own folder); or
    a join string; or http://host:port for a server without either. When a token or a certificate is refused, both are
    looked up again: after `outerstep join` a running worker continues. `tls`: this context, no look-up and no token.

    `protocol`: the highest that both ends speak, as far as is known; ours, before the first answer. Each answer says it
    anew, for the other end may be restarted as another version.
    """

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float = 30.0,
        kept_connections: int = 8,
        tls: ssl.SSLContext | None = None,
        credentials: str | os.PathLike[str] | None = None,
    ) -> None:
        self._server, self._credentials = server, credentials
        if is_join_string(server):
            access = parse_join_string(server)
            self._host, self._port = access.host, access.port
        else:
            self._host, self._port = parse_address(server)
        self._given = tls
        self._pinning = pinning_context()
        self._system: ssl.SSLContext | None = None  # reads all the authorities: made if it is needed
        self._access = Access(self._host, self._port) if tls is not None else self._find()
        self._has_succeeded = False
        self.protocol = PROTOCOL_VERSION
        self._timeout_s = timeout_s
        self._kept_connections = kept_connections
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by worker id

    @property
    def address(self) -> str:
        return write_address(self._host, self._port)

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
        limit_s = (timeout_s or self._timeout_s) + (request.wait_s if isinstance(request, Poll) else 0.0)
        payload = body if body is not None else memoryview(b"" if method == "GET" else encode_json(request))
        kind = JSON_TYPE if body is None else BYTES_TYPE
        admin = isinstance(request, Control)
        session = self._sessions.get(request.worker_id) if isinstance(request, FromMember | Join) else None
        headers, data = self._ask(method, target, payload, kind, into, limit_s, protocol, admin=admin, session=session)
        if answer_type is GetPartAnswer:
            return GetPartAnswer(hash=headers.get(HASH_HEADER, ""))
        if answer_type is HeldAnswer:
            return HeldAnswer(hash=headers.get(HASH_HEADER, ""))
        try:
            return msgspec.json.decode(data, type=answer_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"{self.address} answered {target} with something else: {error}") from error

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

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _agree(self, protocol: int | None) -> None:
        """None: there is none that both speak, and the refusal says so."""
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
        access = self._known()
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
    ) -> tuple[http.client.HTTPMessage, bytes]:
        """Headers and body of the answer, or what was refused. `extra`: headers of the request."""
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
                    method, target, payload, headers, into, timeout_s or self._timeout_s
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
            if PROTOCOLS_HEADER in said or refusal is None or isinstance(refusal, OUTDATED):
                self._agree(highest_common(said[PROTOCOLS_HEADER]))
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
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A kept-alive connection may have been closed by the server meanwhile: then once more, on a new one. Every
        request of this protocol may be repeated."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            reused = connection is not None and connection.sock is not None
            if connection is None or connection.sock is None:
                connection = self._new_connection(timeout_s)
            else:
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
                if isinstance(error, ssl.SSLError) and (untrusted := explain(error, self.address)) is not None:
                    raise untrusted from error
                what = str(error) or type(error).__name__
                raise TransportError(
                    f"no answer from {self.address} to {method} {target.split('?')[0]}: {what}"
                ) from error

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        access, given = self._known(), self._given
        if access.plain:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        if given is None and access.fingerprint is not None:
            return PinnedConnection(
                self._host, self._port, timeout=timeout_s, context=self._pinning, fingerprint=access.fingerprint
            )
        if given is None:
            given = self._system = self._system or ssl.create_default_context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=given)

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
        due = len(into) if isinstance(into, memoryview) else None if into is None else ANY_LENGTH
        with WATCH.over(sock, 2.0 * timeout_s, len(payload), due):
            if len(payload) < LARGE_BYTES:
                connection.request(method, target, body=bytes(payload) or None, headers=headers)
            else:
                connection.request(method, target, headers=headers)
                sockets.block(sock, timeout_s)
                sockets.send(sock, payload)
                sock.settimeout(timeout_s)
            response = connection.getresponse()
            data = b""
            if into is not None and response.status == 200:
                sockets.block(sock, timeout_s)
                if isinstance(into, memoryview):
                    read_bytes(response, sock, into)
                else:
                    read_incoming(response, sock, into)
                sock.settimeout(timeout_s)
            else:
                data = read_message(response)
        self._keep_or_close(connection, response)
        return response.status, response.headers, data

    def _keep_or_close(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """One whose answer was not read to its end cannot be used again."""
        with self._lock:
            keeps = not response.will_close and response.isclosed() and len(self._idle) < self._kept_connections
            if keeps:
                self._idle.append(connection)
        if not keeps:
            connection.close()


__all__ = ["DEFAULT_PORT", "HttpTransport", "parse_address"]
