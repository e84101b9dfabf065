"""A worker's link to its server: the way there, who the worker is there, its signs of life and its orders."""

from __future__ import annotations

import dataclasses
import logging
import threading
from contextlib import suppress

from msgspec import UNSET

from ...coordination.worker.exchange import OrderInbox, Session
from ...errors import ConfigError, ExchangeFailed, OuterstepError, UnknownWorker
from ...types import Answer, Heartbeat, HeartbeatAnswer, Join, JoinAnswer, Leave, Request
from ...wire.transport import Transport
from ..forms import Form, forms_of
from ..protocol import Orders

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 3.0


class ServerLink:
    """`introduced`: how the worker joins, before the server has answered; `forms`: how each fragment travels, known
    once it has. A worker that has left stays away: a link that `is_shut` lets no join through."""

    def __init__(self, transport: Transport, worker_id: str) -> None:
        self.worker_id = worker_id
        self.introduced: Session | None = None
        self.forms: list[Form] = []
        self.is_shut = False
        self.last_heard: HeartbeatAnswer | None = None
        self._transport = transport
        self._inbox = OrderInbox()  # written by the heartbeat's thread, read by the training's
        self._lock = threading.Lock()  # guards it

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """A join that was on its way when the worker left may reach the server after the goodbye, and bring the worker
        back to life; then the goodbye is said again."""
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

    # --- membership -----------------------------------------------------------------------------------------------

    def introduce(self, join: Join, answer: JoinAnswer | None = None) -> None:
        """This is how the worker joins; the first exchange does it, if there is no answer yet."""
        self.introduced = Session(join)
        self.introduced.answer = answer
        if answer is not None and answer.session is not UNSET:
            self._transport.show_session(join.worker_id, answer.session)

    def resume(self, worker_id: str, session: str) -> None:
        """This link is a saved worker's from now on. Its session vouches for it where its key is not at hand."""
        self.worker_id = worker_id
        if session:
            self._transport.show_session(worker_id, session)

    def admitted(self) -> JoinAnswer:
        """The server has answered: how the fragments travel is known from here on."""
        answer = self.session.joined
        try:
            self.forms = forms_of(answer.plan, answer.manifest)
        except ConfigError as error:  # of a codec that is not registered here: nobody is to wait for this worker
            self.leave(str(error))
            raise
        return answer

    @property
    def session(self) -> Session:
        if self.introduced is None or self.introduced.answer is None:
            raise ExchangeFailed("not joined yet: call join first")
        return self.introduced

    def leave(self, reason: str) -> None:
        """Best effort, and short: a server that does not hear it finds out by itself."""
        self.is_shut = True
        if self.introduced is not None and self.introduced.answer is not None:
            printable = reason.encode("utf-8", "replace").decode("utf-8")[:256]
            try:
                self.call(Leave(**self.introduced.head, reason=printable), timeout_s=LEAVE_TIMEOUT_S)
            except OuterstepError as error:
                log.info("the server was not told that this worker leaves: %s", error)
        self._transport.close()

    def close(self) -> None:
        """Without a word to the server: another process speaks for this worker."""
        self.is_shut = True
        self._transport.close()

    # --- signs of life, and what comes back -----------------------------------------------------------------------

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A stalled heartbeat must not keep the next one waiting, so it is not given long."""
        session, acknowledged = self.session, tuple(sorted(self._inbox.received))
        message = Heartbeat(
            **session.head, step=step, steps_per_second=steps_per_second, loss=loss, acknowledged=acknowledged
        )
        try:
            answer = self.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
        except UnknownWorker:
            if self.is_shut:  # it arrived after our own goodbye
                return
            log.warning("the server had evicted this worker; rejoining, local progress is kept")
            joined = self.call(session.join_request, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(joined, JoinAnswer)
            session.answer = joined
            return
        assert isinstance(answer, HeartbeatAnswer)
        with self._lock:
            self.last_heard = answer
            self._inbox.heard(answer, acknowledged)

    def orders(self, *, at_exchange: bool) -> Orders:
        with self._lock:
            return self._inbox.take()

    @property
    def sync_every(self) -> int | None:
        """This worker's own H, as the server assigned it."""
        return self._inbox.asked.sync_every

    @sync_every.setter
    def sync_every(self, assigned: int | None) -> None:
        with self._lock:
            self._inbox.asked = dataclasses.replace(self._inbox.asked, sync_every=assigned)
