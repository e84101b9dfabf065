"""The in-memory twin of the HTTP transport: the same messages through the same encoding, without sockets. For tests."""

from __future__ import annotations

from typing import cast

import msgspec

from ..errors import BadRequest, Refused, ServerError, TransportError
from ..types import Answer, GetPart, PutPart, Request
from . import strict_json
from .messages import AnyAnswer, AnyRequest, address_of, decode_error, encode_error, find_route, parse_query
from .peers import GetHeld
from .service import Service


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


class MemoryTransport:
    """`MemoryTransport(server.service)`. `drop_requests` / `drop_answers` lose that many of the next calls."""

    def __init__(self, service: Service) -> None:
        self._service = service
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
        if self.drop_requests > 0:
            self.drop_requests -= 1
            raise TransportError("the request was lost (drop_requests)")
        method, target, answer_type = address_of(request)
        path, _, query = target.partition("?")
        try:
            kind = find_route(method, path)
            received = parse_query(query, kind) if query else strict_json.decode(strict_json.encode(request), kind)
            answer = self._serve(received, body, into)
        except Refused as refusal:
            # Through the wire's own form, so that the twin refuses exactly as HTTP does.
            raise decode_error(encode_error(refusal, "memory"), refusal.status) from refusal
        if self.drop_answers > 0:
            self.drop_answers -= 1
            raise TransportError("the answer was lost (drop_answers)")
        return cast(Answer, msgspec.json.decode(strict_json.encode(answer), type=answer_type))

    def _serve(self, request: AnyRequest, body: memoryview | None, into: memoryview | None) -> AnyAnswer:
        if isinstance(request, PutPart):
            return self._service.put_part(request, MemoryBody(body if body is not None else memoryview(b"")))
        if isinstance(request, GetPart | GetHeld):
            answer, data = self._service.get_part(request)
            if into is None or len(into) != len(data):
                raise ServerError(f"the part has {len(data)} bytes, the place for it {len(into or b'')}")
            into[:] = data
            return answer
        return self._service.answer(request)

    def status(self) -> dict[str, object]:
        return self._service.status()

    def close(self) -> None:
        """Nothing to close."""
