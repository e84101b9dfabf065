"""A worker at its server: who it is there, what it was told on joining, and its signs of life."""

from __future__ import annotations

import logging

from ...coordination.worker.session import Session
from ...errors import ExchangeFailed, OuterstepError, UnknownWorker
from ...types import Heartbeat, HeartbeatAnswer, Join, JoinAnswer, Leave
from ..forms import Form, forms_of
from .door import LEAVE_TIMEOUT_S, Door
from .orders import OrderBook

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0


class Member:
    """`forms`: how each fragment travels; known once it is `admitted`."""

    def __init__(self, door: Door, worker_id: str) -> None:
        self.worker_id = worker_id
        self.orders = OrderBook()
        self.forms: list[Form] = []
        self._door = door
        self._session: Session | None = None

    def introduce(self, join: Join, answer: JoinAnswer | None = None) -> None:
        """This is how we join; the first exchange does it, if there is no answer yet."""
        self._session = Session(join)
        self._session.answer = answer

    def admitted(self) -> JoinAnswer:
        """The server has answered: how the fragments travel is known from here on."""
        answer = self.session.joined
        self.forms = forms_of(answer.plan, answer.manifest)
        return answer

    @property
    def session(self) -> Session:
        if self._session is None or self._session.answer is None:
            raise ExchangeFailed("not joined yet: call join first")
        return self._session

    @property
    def introduced(self) -> Session:
        """The same, maybe before it is answered."""
        assert self._session is not None
        return self._session

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A stalled heartbeat must not keep the next one waiting, so it is not given long."""
        session, acknowledged = self.session, self.orders.acknowledged
        message = Heartbeat(
            **session.head, step=step, steps_per_second=steps_per_second, loss=loss, acknowledged=acknowledged
        )
        try:
            answer = self._door.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(answer, HeartbeatAnswer)
            self.orders.heard(answer, acknowledged)
        except UnknownWorker:
            if self._door.is_shut:  # it arrived after our own goodbye
                return
            log.warning("the server had given this worker up; joining again, local progress is kept")
            joined = self._door.call(session.join_request, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(joined, JoinAnswer)
            session.answer = joined

    def leave(self, reason: str) -> None:
        """Best effort, and short: a server that does not hear it finds out by itself."""
        self._door.is_shut = True
        if self._session is not None and self._session.answer is not None:
            printable = reason.encode("utf-8", "replace").decode("utf-8")[:256]
            try:
                self._door.call(Leave(**self._session.head, reason=printable), timeout_s=LEAVE_TIMEOUT_S)
            except OuterstepError as error:
                log.info("the server was not told that this worker leaves: %s", error)
