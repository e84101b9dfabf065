"""The port of a run that has no model yet: the first script is still on its way to its `outerstep.attach`.

It has the server's certificate and wants its tokens, so that a worker that comes early learns that it is at the right
place and has to wait. It holds nothing and takes nothing: whatever is asked for is `NotBegun`, which a worker repeats.
"""

from __future__ import annotations

from types import TracebackType

from ..errors import NotBegun
from ..security import Guard, ServerIdentity, TokenGuard
from ..types import AskNonce, Join
from ..wire.http_request import HttpRequest
from ..wire.http_server import HttpServer
from ..wire.messages import MAX_JOIN_BYTES, STATUS_PATH, place_of
from ..wire.routes import MessageRoute, PlainRoute, Reply, Routes

ASK_AGAIN_S = 1.0


class WaitingRoom:
    """Listens on `host:port` until it is closed; then the port is free for the server. `identity` None = insecure."""

    def __init__(self, host: str, port: int, identity: ServerIdentity | None, why: str) -> None:
        guard: Guard | None = None if identity is None else TokenGuard(identity.tokens)
        tls = None if identity is None else identity.context()
        self._why = why
        self._http = HttpServer(self._routes(), host, port, tls=tls, guard=guard)
        self.port = self._http.port

    def __enter__(self) -> WaitingRoom:
        self._http.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.stop()

    def _routes(self) -> Routes:
        return {
            place_of(AskNonce): MessageRoute(AskNonce, self._not_yet, is_quick=True),
            place_of(Join): MessageRoute(Join, self._not_yet, most_bytes=MAX_JOIN_BYTES),
            ("GET", STATUS_PATH): PlainRoute(self._no_status, reads=True),
        }

    def _not_yet(self, request: AskNonce | Join) -> object:
        raise NotBegun(self._why, retry_after_s=ASK_AGAIN_S)

    def _no_status(self, request: HttpRequest) -> Reply:
        raise NotBegun(self._why, retry_after_s=ASK_AGAIN_S)
