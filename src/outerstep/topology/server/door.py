"""The way to the server, for a worker that may leave."""

from __future__ import annotations

from contextlib import suppress

from ...errors import ExchangeFailed, OuterstepError
from ...types import Answer, Join, JoinAnswer, Leave, Request
from ...wire.transport import Transport

LEAVE_TIMEOUT_S = 3.0


class Door:
    """A transport with one rule more: who has left stays away. A join that was on its way when the worker left may
    reach the server after the goodbye, and bring it back to life; then the goodbye is said again."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.is_shut = False

    @property
    def address(self) -> str:
        return self._transport.address

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        if isinstance(request, Join) and self.is_shut:
            raise ExchangeFailed("this worker has left")
        answer = self._transport.call(request, body=body, into=into, timeout_s=timeout_s)
        if isinstance(request, Join) and isinstance(answer, JoinAnswer) and self.is_shut:
            goodbye = Leave(
                run_id=answer.run_id, worker_id=request.worker_id, incarnation=answer.incarnation, reason="left"
            )
            with suppress(OuterstepError):  # its silence will be noticed
                self._transport.call(goodbye, timeout_s=LEAVE_TIMEOUT_S)
        return answer

    def status(self) -> dict[str, object]:
        return self._transport.status()

    def close(self) -> None:
        self._transport.close()
