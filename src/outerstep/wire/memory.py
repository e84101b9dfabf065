"""The in-memory twin of the HTTP transport: the same messages through the same encoding, without sockets. For tests."""

from __future__ import annotations

from typing import cast

import msgspec
from msgspec import UNSET

from ..errors import BadRequest, Refused, ServerError, TransportError
from ..security import Caller
from ..security.joining import sign_join
from ..security.signing import SigningKey
from ..types import Answer, AskNonce, Join, JoinAnswer, NonceAnswer, Request
from ..versions import PROTOCOL_VERSION, as_spoken
from .messages import (
    AnyAnswer,
    AnyRequest,
    address_of,
    decode_error,
    decode_json,
    encode_error,
    encode_json,
    parse_query,
    written_in,
)
from .routes import (
    Carrying,
    DownloadRoute,
    MessageRoute,
    PlainRoute,
    Presented,
    Route,
    Service,
    TunnelRoute,
    UploadRoute,
    admit,
    no_route,
)


class MemoryBody:
    def __init__(self, data: memoryview) -> None:
        self.length = len(data)
        self._left = data

    def read_into(self, view: memoryview) -> None:
        if len(view) > len(self._left):
            raise BadRequest(f"the body has {len(self._left)} bytes left, {len(view)} expected")
        view[:] = self._left[: len(view)]
        self._left = self._left[len(view) :]

    def abort(self) -> None:
        """Memory is never slow."""


def _received(answer: object, into: memoryview | None) -> object:
    """The answer; what it carries is where the caller wants it."""
    if not isinstance(answer, Carrying):
        return answer
    if into is None or len(into) < answer.size_bytes:
        raise ServerError(f"the answer carries {answer.size_bytes} bytes, the place for them has {len(into or b'')}")
    into[: answer.size_bytes] = b"".join(answer.pieces)
    return answer.answer


class MemoryTransport:
    """`MemoryTransport(server.service)`. `drop_requests` / `drop_answers` lose that many of the next calls. `protocol`:
    that of an older worker, say. With a `key` its joins are signed."""

    def __init__(self, service: Service, protocol: int = PROTOCOL_VERSION, *, key: SigningKey | None = None) -> None:
        self._service, self.protocol, self._key = service, protocol, key
        self._sessions: dict[str, str] = {}
        self.drop_requests = 0
        self.drop_answers = 0

    @property
    def address(self) -> str:
        return "memory"

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        if isinstance(request, Join) and self._key is not None:
            offered = cast(NonceAnswer, self._call(AskNonce(worker_id=request.worker_id), None, None))
            request = sign_join(request, self._key, offered.nonce, "")
        answer = cast(Answer, self._call(request, body, into))
        if isinstance(request, Join) and isinstance(answer, JoinAnswer) and answer.session is not UNSET:
            self._sessions[request.worker_id] = answer.session
        return answer

    def show_session(self, worker_id: str, session: str) -> None:
        self._sessions[worker_id] = session

    def _call(self, request: AnyRequest, body: memoryview | None, into: memoryview | None) -> AnyAnswer:
        if self.drop_requests > 0:
            self.drop_requests -= 1
            raise TransportError("the request was lost (drop_requests)")
        said = written_in(request, self.protocol)
        shown = Presented(Caller("anybody"), self._sessions.get(getattr(request, "worker_id", None) or "", ""))
        method, target, answer_type = address_of(said)
        path, _, query = target.partition("?")
        try:
            route = self._service.routes.get((method, path))
            if route is None:
                raise no_route(self._service.routes, method, path)
            answer = _received(self._serve(route, query, encode_json(said), body, into, shown), into)
        except Refused as refusal:
            # Through the wire's own form, so that the twin refuses exactly as HTTP does.
            raise decode_error(encode_error(refusal, "memory", self.protocol), refusal.status) from refusal
        if self.drop_answers > 0:
            self.drop_answers -= 1
            raise TransportError("the answer was lost (drop_answers)")
        return msgspec.json.decode(encode_json(as_spoken(answer, self.protocol)), type=answer_type)

    def _serve(
        self, route: Route, query: str, data: bytes, body: memoryview | None, into: memoryview | None, shown: Presented
    ) -> object:
        if isinstance(route, PlainRoute | TunnelRoute):
            raise ServerError("this route has no message")
        is_json = isinstance(route, MessageRoute)
        message = decode_json(data, route.kind) if is_json else parse_query(query, route.kind)
        admit(route, message, shown, self.protocol)
        match route:
            case MessageRoute():
                return route.handler(message, shown) if route.sees_caller else route.handler(message)
            case UploadRoute():
                unread = MemoryBody(body if body is not None else memoryview(b""))
                return route.handler(message, unread, shown) if route.sees_caller else route.handler(message, unread)
            case DownloadRoute():
                answer, found = route.handler(message)
                if into is None or len(into) != len(found):
                    raise ServerError(f"the part has {len(found)} bytes, the place for it {len(into or b'')}")
                into[:] = found
                return answer

    def status(self) -> dict[str, object]:
        return cast("dict[str, object]", msgspec.to_builtins(self._service.status()))

    def close(self) -> None:
        """Nothing to close."""
