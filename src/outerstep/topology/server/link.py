"""A worker's link to its server: the way there, who the worker is there, its signs of life and its orders."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

from msgspec import UNSET
from msgspec.structs import replace

from ...coordination.autoconfig.meter import LinkMeter
from ...coordination.worker.exchange import OrderInbox, Session, is_evicted
from ...coordination.worker.units import LeaseRequest
from ...errors import ConfigError, ExchangeFailed, OuterstepError, UnknownWorker
from ...lanes import LONG_S, in_whole_rows, lanes
from ...threads import process_helpers
from ...types import (
    MOST_REPORTED,
    THE_SERVER,
    Answer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    LeaseAnswer,
    Leave,
    MeasuredLink,
    MemberFacts,
    Offer,
    Plan,
    Poll,
    Request,
)
from ...wire.pipeline import CALLERS
from ...wire.transport import Transport
from ..forms import Form, forms_of
from ..protocol import Orders

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 3.0
PROBE_BYTES = 128 << 10
PROBE_EVERY_S = 30.0
MOST_BYTES_PER_S = 1e12  # a link within one machine may seem to have more


class ServerLink:
    """`introduced`: how the worker joins, before the server has answered; `forms`: how each fragment travels by the
    plan that it follows, known once it has. A worker that has left stays away: a link that `is_shut` lets no join
    through."""

    def __init__(self, transport: Transport, worker_id: str, facts: Callable[[], MemberFacts] = MemberFacts) -> None:
        """`facts`: what a heartbeat tells of this worker, beside what was measured of its link. (Links among them go
        before what is measured here, which is the way that is in use, whichever that is.)"""
        self.worker_id = worker_id
        self._facts = facts
        self.meter = LinkMeter(worker_id)
        self._next_probe_at = 0.0
        self.introduced: Session | None = None
        self.forms: list[Form] = []
        self._followed: Plan | None = None  # what they are of
        self.is_shut = False
        self.last_heard: HeartbeatAnswer | None = None
        self._transport = transport
        self._inbox = OrderInbox()  # written by the heartbeat's thread, read by the training's
        self._lock = threading.Lock()  # guards it, and the meter

    @property
    def protocol(self) -> int:
        """The highest that both ends speak, as far as is known."""
        return self._transport.protocol

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
        ends = (self.worker_id, THE_SERVER) if body is not None else (THE_SERVER, self.worker_id)
        # What tells how fast the link is. (A poll waits for others, whatever comes with its answer.)
        part = None if isinstance(request, Poll) else body if body is not None else into
        measured = nullcontext() if part is None else self.meter.part(*ends, len(part), time.monotonic, self._lock)
        began = time.monotonic()
        with measured:
            answer = self._transport.call(request, body=body, into=into, timeout_s=timeout_s)
        if isinstance(request, Offer | Heartbeat) and part is None:
            self._was_answered(request, (time.monotonic() - began) / 2)
        if isinstance(request, Join) and isinstance(answer, JoinAnswer) and self.is_shut:
            goodbye = Leave(
                run_id=answer.run_id, worker_id=request.worker_id, incarnation=answer.incarnation, reason="left"
            )
            with suppress(OuterstepError):  # its silence will be noticed
                self._transport.call(goodbye, timeout_s=LEAVE_TIMEOUT_S)
        return answer

    # --- the link itself ------------------------------------------------------------------------------------------

    def parts_at_a_time(self, *, up: bool, parts: int, connections: int | None) -> int:
        """Of so many. `connections`: so many; None = as the link needs. Over a long link parts follow each other on
        each. A way that was never measured is taken to be like the other."""
        out, back = (self.worker_id, THE_SERVER), (THE_SERVER, self.worker_id)
        ways = (out, back) if up else (back, out)
        with self._lock:
            found = [self.meter.best_bytes_per_s(*way) for way in ways]
            round_trip_s = self.meter.latency_s(*out) + self.meter.latency_s(*back)
        count = connections or lanes(found[0] or found[1], round_trip_s)
        spread, is_long = getattr(self._transport, "spread", None), round_trip_s >= LONG_S
        if is_long and connections is None:
            count = in_whole_rows(count, parts)
        if spread is None:
            return count
        spread(count if is_long else 0, up=up)
        return count * CALLERS if is_long else count

    def _was_answered(self, request: Offer | Heartbeat, latency_s: float) -> None:
        """An offer, which a layer below may hold back, tells nothing if it took longer than others."""
        with self._lock:
            known_s = self.meter.latency_s(self.worker_id, THE_SERVER)
            if isinstance(request, Heartbeat) or not known_s or latency_s < known_s:
                self.meter.answered(self.worker_id, THE_SERVER, latency_s)
                self.meter.answered(THE_SERVER, self.worker_id, latency_s)

    def _probe(self) -> None:
        """A few bytes each way, where no part has travelled. (Parts say more: a new connection is slow at first.)"""
        up, down = getattr(self._transport, "probe_up", None), getattr(self._transport, "probe_down", None)
        now = time.monotonic()
        if up is None or down is None or now < self._next_probe_at:
            return
        self._next_probe_at = now + PROBE_EVERY_S
        ways = ((self.worker_id, THE_SERVER, up), (THE_SERVER, self.worker_id, down))

        def measure() -> None:
            with suppress(OuterstepError):  # there is no link: that is known by other means
                for source, target, call in ways:
                    began = time.monotonic()
                    call(memoryview(bytearray(PROBE_BYTES)))
                    now = time.monotonic()
                    with self._lock:
                        seconds = now - began - 2 * self.meter.latency_s(source, target)
                        self.meter.transferred(source, target, PROBE_BYTES, max(seconds, 0.1 * (now - began)), now)

        process_helpers().run(measure, name="outerstep-probe")

    def _told(self) -> MemberFacts:
        with self._lock:
            reports = self.meter.reports(time.monotonic())
        facts = self._facts()
        told = {(link.source, link.target) for link in facts.links}
        links = facts.links + tuple(
            MeasuredLink(
                source=report.source,
                target=report.target,
                bytes_per_s=min(report.bytes_per_s, MOST_BYTES_PER_S),
                latency_s=report.latency_s,
                age_s=report.age_s,
            )
            for report in reports
            if (report.source, report.target) not in told
        )
        return replace(facts, links=links[:MOST_REPORTED])

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
        self._followed = None
        self.follow(answer.plan)
        return answer

    def follow(self, plan: Plan) -> None:
        """Encode as this plan says from now on. From the thread that trains: the ranks of a group must change at the
        same contribution, so not as soon as a poll brings it."""
        if self._followed is not None and plan.codec == self._followed.codec:
            return
        try:
            self.forms = forms_of(plan, self.session.joined.manifest)
        except ConfigError as error:  # of a codec that is not registered here: nobody is to wait for this worker
            self.leave(str(error))
            raise
        self._followed = plan

    def form_of(self, fragment: int, codec: str) -> Form:
        """How a contribution travels that was encoded with this codec, perhaps by an earlier plan."""
        form, joined = self.forms[fragment], self.session.joined
        if form.up.header.codec == codec:
            return form
        return forms_of(replace(joined.plan, codec=codec), joined.manifest)[fragment]

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
            **session.head,
            step=step,
            steps_per_second=steps_per_second,
            loss=loss,
            acknowledged=acknowledged,
            facts=self._told(),
        )
        try:
            answer = self.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
        except UnknownWorker as error:
            if not is_evicted(error, has_left=self.is_shut):
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
        if answer.measure_link is True:
            self._probe()

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        answer = self.call(request.message(self.session.head))
        assert isinstance(answer, LeaseAnswer)
        return answer

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
