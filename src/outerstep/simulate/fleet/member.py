"""A worker of a fleet: the real worker machine and the real exchange machine; its steps are counted, not played.

Between two steps that send or adopt something a worker only trains. The machine says how many such steps lie ahead
(`quiet_steps`), and they pass as one event. What it asks for is carried out on ranges of step numbers, as
worker/sync.py does it on tensors. A worker that dies comes back as another object.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...coordination.cost import Overheads
from ...coordination.worker.effects import (
    Adopt,
    Carry,
    Depart,
    Effect,
    Finish,
    Mix,
    Move,
    Note,
    Prove,
    Rebase,
    Recall,
    Reload,
    Resume,
    Send,
    Sight,
    StartOver,
)
from ...coordination.worker.exchange import Call, Exchange, Held, OrderInbox, Outcome, Patience, Sending, Session
from ...coordination.worker.machine import LOOK_EVERY_S, WorkerMachine
from ...digest import part_hash
from ...errors import Fenced, Kicked, OuterstepError, Refused, ServerError, UnknownWorker
from ...ranges import Ranges
from ...types import (
    PROTOCOL_VERSION,
    Answer,
    CompleteOffer,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    Offer,
    Participant,
    Plan,
    PutPart,
    Request,
)
from ..agenda import Agenda
from .booked_lines import BookedLine, book
from .ledger import NOTHING, LayerLedger, Parcel
from .server import LONGEST_POLL_S, FleetServer

CALM_LOOK_S = 15.0  # while nobody wants anything of a worker that waits
HASH = part_hash(b"a part")
PATIENCE = Patience(longest_backoff_s=8.0, give_up_after_s=1e9, poll_wait_s=LONGEST_POLL_S)
LAST_PATIENCE = Patience(
    longest_backoff_s=8.0,
    give_up_after_s=1e9,
    poll_wait_s=LONGEST_POLL_S,
    stuck_after_s=60.0,
    stay_for_own_round=True,
)
BOAST = 1000

Doing = Literal["training", "waiting", "joining", "down"]
DOINGS: tuple[Doing, ...] = ("training", "waiting", "joining", "down")


@dataclass
class Clocks:
    """How many workers do what, and for how many worker-seconds they did. `own_s`: of the training, the exchange's own
    arithmetic."""

    now: dict[Doing, int] = field(default_factory=lambda: dict.fromkeys(DOINGS, 0))
    seconds: dict[Doing, float] = field(default_factory=lambda: dict.fromkeys(DOINGS, 0.0))
    own_s: float = 0.0


@dataclass(frozen=True)
class Seat:
    """What stays when a worker is restarted: its machine, its lines and its ways."""

    number: int
    name: str
    step_s: float
    lines_up: tuple[BookedLine, ...]
    lines_down: tuple[BookedLine, ...]
    round_trip_s: float
    heartbeat_s: float
    overheads: Overheads
    lie: str = ""


@dataclass(frozen=True)
class FleetResult:
    """What an exchange came to, as the machine is told (`coordination.worker.effects.Result`)."""

    fragment: int
    version: int
    counted: bool
    counted_in: int
    too_old: bool
    unchanged: bool
    above: tuple[int, ...]
    steps_lost: int
    participants: tuple[Participant, ...]
    plan: Plan
    refused: str = ""
    also: Sequence[FleetResult] = ()


@dataclass(eq=False)
class Shipment:
    """A contribution, and the steps in it."""

    sending: Sending
    parcel: Parcel
    deferred: bool = False

    @property
    def offer(self) -> Offer:
        return self.sending.offer


@dataclass
class FleetFragment:
    """`unsent`: the steps in the local weights that are not in the anchor, up to step `until` (the later ones are,
    too). `in_flight`, `late`: as the machine has them."""

    sequence: int = 0
    held: Held | None = None
    unsent: Ranges = NOTHING
    until: int = 0
    in_flight: Shipment | None = None
    late: Shipment | None = None
    exchange: Exchange | None = None
    result: FleetResult | None = None
    refused: str = ""


class FleetMember:
    machine_type: type[WorkerMachine] = WorkerMachine

    def __init__(
        self,
        seat: Seat,
        start: int,
        server: FleetServer,
        agenda: Agenda,
        rng: random.Random,
        clocks: Clocks,
        *,
        name: str = "",
    ) -> None:
        self.seat, self.server, self._agenda, self._rng, self._clocks = seat, server, agenda, rng, clocks
        self.worker_id = name or seat.name
        self.ledger: LayerLedger = server.ledger
        self.life = self.ledger.begin(f"{self.worker_id}#{start}", seat.step_s)
        self.taken = 0  # steps of this life
        self.alive, self.is_leaving = True, False
        self.on_left: Callable[[], None] = lambda: None
        self.fragments = [FleetFragment() for _ in range(server.terms.setting.num_fragments)]
        self._session = Session(
            Join(
                protocol=PROTOCOL_VERSION,
                worker_id=self.worker_id,
                instance=f"{self.worker_id}-{start}",
                hostname=seat.name,
            )
        )
        self._machine: WorkerMachine | None = None
        self._inbox = OrderInbox()
        self._carrying: Counter[int] = Counter()  # parts on the lines, by fragment
        self._doing: Doing | None = None
        self._since = agenda.now
        self._began = self._own_until = agenda.now  # this stretch of training; and when its own arithmetic ends
        self._stretch = self._looks = 0
        self._is_training = self._is_stuck = False
        self._be("joining")
        self._soon(rng.uniform(0.0, seat.heartbeat_s), self._beat)
        self._fetch(0)

    # --- life ---------------------------------------------------------------------------------------------------------

    def _be(self, doing: Doing | None) -> None:
        """None: this life is over."""
        now, clocks = self._agenda.now, self._clocks
        if doing is self._doing:
            return
        if self._doing is not None:
            clocks.seconds[self._doing] += now - self._since
            clocks.now[self._doing] -= 1
        if doing is not None:
            clocks.now[doing] += 1
        self._doing, self._since = doing, now

    def kill(self) -> None:
        """The process dies: what is in its weights, or on its way, is lost with it unless the server has it whole."""
        self._count_steps()
        self.end()
        for index, fragment in enumerate(self.fragments):
            if self._carrying[index] and fragment.in_flight is not None:
                self.server.reading(fragment.in_flight.offer.key, -self._carrying[index])

    def end(self) -> None:
        """Its account is closed."""
        if not self.alive:
            return
        self.alive = False
        self._be(None)
        ledger = self.ledger.books[self.life]
        ledger.taken, ledger.is_over = self.taken, True
        if self._machine is not None:
            metrics = self._machine.state.metrics
            ledger.said = metrics.steps_discarded + metrics.steps_overwritten
        for index, fragment in enumerate(self.fragments):
            shipped = [one.parcel.steps for one in (fragment.in_flight, fragment.late) if one is not None]
            held = self.unsent(index)
            for steps in shipped:
                held = held | steps
            ledger.held[index] = held

    def leave_when_done(self) -> None:
        """As a signal asks for it."""
        self.is_leaving = True
        if self._is_training:
            self._count_steps()
            self._is_training = False
            self._drive(self.machine.finish)

    def _soon(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.alive:
                action()

        self._agenda.after(delay_s, act)

    @property
    def machine(self) -> WorkerMachine:
        assert self._machine is not None, "not joined yet"
        return self._machine

    def unsent(self, index: int) -> Ranges:
        fragment = self.fragments[index]
        if fragment.until < self.taken:
            fragment.unsent = fragment.unsent | Ranges([(fragment.until, self.taken)])
            fragment.until = self.taken
        return fragment.unsent

    # --- joining ------------------------------------------------------------------------------------------------------

    def _fetch(self, index: int) -> None:
        """The newest anchors, one after the other; then it begins."""
        if index < len(self.fragments):
            self._ask(index, after=-1, joined=lambda: self._fetch(index + 1))
            return
        for fragment, state in zip(self.fragments, self._session.joined.fragments, strict=True):
            fragment.sequence = state.last_sequence
        self._machine = self.machine_type(self.worker_id, self._session.joined.plan)
        self._drive(lambda: self.machine.joined([self._finish(i) for i in range(len(self.fragments))]))

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """On to the next step that sends or adopts something."""
        orders = self._inbox.take()
        machine, now = self.machine, self._agenda.now
        machine.state.cycle.assigned = orders.sync_every
        self.is_leaving = self.is_leaving or bool(orders.drain)
        if self.is_leaving:
            self._drive(machine.finish)
            return
        if orders.sync:
            self._drive(machine.sync_all)
            return
        self._be("training")
        quiet = machine.quiet_steps
        self._began = max(now, self._own_until)
        self._is_training = True
        self._stretch += 1
        number = self._stretch
        self._soon(self._began - now + (quiet + 1) * self.seat.step_s, lambda: self._step(number))

    def _count_steps(self) -> None:
        """Those of this stretch that were taken by now."""
        if not self._is_training:
            return
        elapsed_s = self._agenda.now - self._began
        steps = min(max(math.floor(elapsed_s / self.seat.step_s + 1e-9), 0), self.machine.quiet_steps)
        self.machine.trained(steps)
        self.taken += steps
        self._began += steps * self.seat.step_s
        self._stretch += 1

    def _step(self, number: int) -> None:
        if number != self._stretch or not self._is_training:
            return
        quiet = self.machine.quiet_steps
        self.machine.trained(quiet)
        self.taken += quiet + 1
        self._is_training = False
        self._drive(self.machine.stepped)

    def _drive(self, event: Callable[[], list[Effect]]) -> None:
        """An event, what comes of it, and what comes after that."""
        try:
            self._do(event())
        except OuterstepError as error:
            effects = self.machine.interrupted(error)
            self._do(effects)
            if not any(isinstance(effect, Depart) for effect in effects):
                self._die(error)
        if not self.alive or self.machine.has_left:
            return
        self._looks += 1
        if self.machine.waiting:
            self._be("waiting")
            self._look_again(self._looks)
        else:
            self._check()
            self._train()

    def _look_again(self, number: int) -> None:
        exchanges = (self.fragments[i].exchange for i in self.machine.waiting)
        is_wanted = any(one is not None and one.wanted for one in exchanges)
        self._soon(LOOK_EVERY_S if is_wanted else CALM_LOOK_S, lambda: self._look(number))

    def _look(self, number: int) -> None:
        """While it waits; once for each number."""
        if number != self._looks or not self.machine.waiting:
            return
        sights = {i: self._sight(i) for i in self.machine.in_sight}
        self._drive(lambda: self.machine.looked(sights, asked_to_leave=self.is_leaving))

    def _sight(self, index: int) -> Sight:
        """(Parts are on the lines: then somebody answers, part by part.)"""
        exchange = self.fragments[index].exchange
        assert exchange is not None
        return Sight(
            done=exchange.done,
            wanted=exchange.wanted,
            silent_s=0.0 if self._carrying[index] else exchange.silent_s(self._agenda.now),
            missed=exchange.outcome is not None and not exchange.outcome.counted,
            failed=exchange.failure is not None,
        )

    def _check(self) -> None:
        """State and weights change together: what the machine believes to be unsent is what the weights hold."""
        for i in range(len(self.fragments)):
            held, believed = self.unsent(i).total, self.machine.unsent(i).steps
            if held != believed:
                self.ledger.violated(f"{self.worker_id} holds {held} unsent steps, and believes in {believed}")

    def _die(self, error: OuterstepError) -> None:
        if self.alive:
            self.end()
            if not isinstance(error, Fenced | Kicked):
                self.ledger.violated(f"{self.worker_id} gave up: {type(error).__name__}: {error}")

    # --- what the machine asks for ------------------------------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Resume(index, last):
                    self._again(index, last=last)
                case Finish(index):
                    self._do(self.machine.outcome(self._finish(index)))
                case Adopt() | Rebase() | Carry() | Mix() | Prove():
                    self._move(effect)
                    self._do(self.machine.confirmed(effect.fragment, None))
                case Reload() | StartOver():
                    for index, fragment in enumerate(self.fragments):
                        shipped = fragment.in_flight.parcel.steps if fragment.in_flight is not None else NOTHING
                        self._give_up(index, self.unsent(index) - shipped)
                case Recall(index):
                    self.fragments[index].in_flight = self.fragments[index].late
                case Depart():
                    self._depart()
                case Note(kind):
                    self._is_stuck = self._is_stuck or kind in ("stuck", "unreachable", "out of time")
                case _:
                    pass  # Keep, PutOff: nothing is copied here

    def _move(self, move: Move) -> None:
        """Of the local weights and the anchor. What is lost must be said to be."""
        index = move.fragment
        fragment, unsent = self.fragments[index], self.unsent(index)
        result, sent = fragment.result, fragment.in_flight
        assert result is not None
        if isinstance(move, Adopt | Carry | Mix) and result.counted and sent is not None:
            fragment.unsent = unsent = unsent - sent.parcel.steps
        if isinstance(move, Adopt) and unsent:
            is_overwritten = result.counted and not result.refused
            self._give_up(index, unsent, overwritten=is_overwritten)
        if self.machine.state.fragments[index].in_flight is None:
            fragment.in_flight = fragment.exchange = None

    def _give_up(self, index: int, steps: Ranges, *, overwritten: bool = False) -> None:
        fragment = self.fragments[index]
        fragment.unsent = self.unsent(index) - steps
        self.ledger.given_up(self.life, index, steps, overwritten=overwritten)

    def _depart(self) -> None:
        request = Leave(**self._session.head, reason="done")

        def departed(answer: Answer | OuterstepError) -> None:
            book_ = self.ledger.books[self.life]
            book_.has_left = not self._is_stuck and not self.machine.state.metrics.steps_discarded
            self.end()
            self.on_left()

        self._request(request, None, departed)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        index = send.fragment
        fragment, terms, lie = self.fragments[index], self.server.terms, self.seat.lie
        fragment.sequence = self._session.next_sequence(index, fragment.sequence)
        offer = Offer(
            **self._session.head,
            fragment=index,
            sequence=fragment.sequence,
            base_version=send.base_version,
            oldest_base=send.oldest_base,
            steps=send.steps,
            codec=self.machine.plan.codec,
            size_bytes=self.server.up_bytes,
            tokens=send.steps * (BOAST if lie == "boast" else 1),
        )
        parcel = Parcel(self.life, self._contents(index))
        fragment.in_flight = Shipment(Sending(offer, {0: HASH}), parcel)
        own_s = self.seat.overheads.worker_s_per_parameter * terms.bytes_of(1.0)
        self._own_until = max(self._own_until, self._agenda.now) + own_s
        self._clocks.own_s += own_s
        self._ready(index, last=send.last)

    def _contents(self, index: int) -> Ranges:
        return self.unsent(index)

    def _ready(self, index: int, *, last: bool) -> None:
        """What is in flight may be offered."""
        self._again(index, last=last)

    def _again(self, index: int, *, last: bool = False) -> None:
        """Carry what is in flight, from the beginning, under the same key."""
        fragment = self.fragments[index]
        sent, late = fragment.in_flight, fragment.late
        assert sent is not None
        earlier = late if late is not None and late.offer.key != sent.offer.key else None
        exchange = self._ask(index, after=sent.offer.base_version, sent=sent, earlier=earlier, last=last)
        assert exchange.outbox.own is not None
        sent.sending = exchange.outbox.own

    def _ask(
        self,
        index: int,
        *,
        after: int,
        sent: Shipment | None = None,
        earlier: Shipment | None = None,
        last: bool = False,
        joined: Callable[[], None] | None = None,
    ) -> Exchange:
        exchange = Exchange(
            self._session,
            fragment=index,
            after=after,
            now=self._agenda.now,
            offer=sent.offer if sent is not None else None,
            part_hashes=(HASH,) if sent is not None else (),
            earlier=earlier.sending if earlier is not None else None,
            held=self.fragments[index].held,
            patience=LAST_PATIENCE if last else PATIENCE,
            rng=self._rng,
        )
        self.fragments[index].exchange = exchange
        self._carrying[index] = 0
        self._soon(0.0, lambda: self._carry(index, exchange, joined))
        return exchange

    def _carry(self, index: int, exchange: Exchange, joined: Callable[[], None] | None) -> None:
        """What the exchange asks for next; until it is over, or another one took its place."""
        if self.fragments[index].exchange is not exchange:
            return
        if exchange.done:
            self._arrived(index, exchange, joined)
            return
        now = self._agenda.now
        for call in exchange.calls(now):
            self._call(index, exchange, call, joined)
        if exchange.wake_at > now:
            self._soon(exchange.wake_at - now, lambda: self._carry(index, exchange, joined))

    def _call(self, index: int, exchange: Exchange, call: Call, joined: Callable[[], None] | None) -> None:
        request = call.request
        parcel = None
        is_bytes = isinstance(request, PutPart | CompleteOffer | GetPart)
        if isinstance(request, PutPart | CompleteOffer):
            fragment = self.fragments[index]
            shipments = (one for one in (fragment.in_flight, fragment.late) if one is not None)
            parcel = next(one.parcel for one in shipments if one.offer.sequence == request.sequence)
        self._carrying[index] += is_bytes

        def answered(answer: Answer | OuterstepError) -> None:
            self._carrying[index] -= is_bytes
            if self.fragments[index].exchange is not exchange or exchange.done:
                return
            if isinstance(answer, OuterstepError):
                exchange.failed(call, answer, self._agenda.now)
            else:
                received = answer.hash if isinstance(answer, GetPartAnswer) else None
                exchange.answered(call, answer, self._agenda.now, received_hash=received)
            self._carry(index, exchange, joined)
            if exchange.wanted and self._machine is not None and self.machine.waiting:
                self._look_again(self._looks)

        self._request(request, parcel, answered)

    def _request(
        self, request: Request, parcel: Parcel | None, on_answer: Callable[[Answer | OuterstepError], None]
    ) -> None:
        """There and back again, each way as long as the lines take."""
        seat, server, agenda = self.seat, self.server, self._agenda
        half_s, overheads = seat.round_trip_s / 2, seat.overheads
        arrives, size_bytes = agenda.now, 0
        if parcel is not None:
            size_bytes = server.up_bytes
            leaves = agenda.now + overheads.worker_s_per_byte * size_bytes
            lines = (*seat.lines_up, *server.lines_in)
            arrives = book(lines, leaves, size_bytes, seat.round_trip_s, overheads.connections)
            if isinstance(request, PutPart):
                server.reading(request.key, 1)

        def reply(answer: Answer | Refused, down_bytes: int) -> None:
            done = agenda.now
            if down_bytes:
                lines = (*server.lines_out, *seat.lines_down)
                done = book(lines, done, down_bytes, seat.round_trip_s, overheads.connections)
                done += overheads.worker_s_per_byte * down_bytes
            self._soon(done - agenda.now + half_s, lambda: on_answer(answer))

        def at_server() -> None:
            if isinstance(request, PutPart):
                server.reading(request.key, -1)
            server.handle(request, parcel, reply, lie=seat.lie)

        self._soon(arrives - agenda.now + half_s, at_server)

    def _arrived(self, index: int, exchange: Exchange, joined: Callable[[], None] | None) -> None:
        """An exchange is over: a worker that waits for it looks now."""
        failure, fragment = exchange.failure, self.fragments[index]
        is_refused = isinstance(failure, Refused) and not isinstance(failure, ServerError | Fenced | Kicked)
        if is_refused and joined is None and fragment.in_flight is not None and not fragment.refused:
            # Nobody has any use for it. What was agreed instead is fetched, as topology/server/exchange.py does.
            fragment.refused = str(failure)
            self._ask(index, after=-1)
        elif failure is not None and (joined is not None or isinstance(failure, Fenced | Kicked)):
            self._die(failure)
        elif joined is not None:
            joined()
        elif index in self.machine.waiting:
            self._look(self._looks)

    def _finish(self, index: int) -> FleetResult:
        """What the exchange came to; what went wrong is raised."""
        fragment = self.fragments[index]
        exchange, sent = fragment.exchange, fragment.in_flight
        assert exchange is not None
        outcome = exchange.outcome
        if outcome is None:
            assert exchange.failure is not None
            self.machine.failed(index, exchange.failure)
            raise exchange.failure
        made, lost, refused = outcome.agreement, NOTHING, fragment.refused
        fragment.refused = ""
        if sent is not None and not refused:
            lost = self._settle(fragment, sent, outcome)
            if lost:
                self.ledger.given_up(self.life, index, lost, overwritten=False)
        before = fragment.held.version if fragment.held is not None else 0
        self.ledger.adopted(self.worker_id, index, made.version, before)
        fragment.held = Held(made.version, made.anchor_hash)
        flight = self._machine.in_flight.get(index) if self._machine is not None else None
        if sent is not None and flight is not None:
            sent.deferred = flight.deferred
        fragment.result = FleetResult(
            fragment=index,
            version=made.version,
            counted=outcome.counted,
            counted_in=outcome.counted_in,
            too_old=outcome.too_old,
            unchanged=not made.payloads,
            above=made.above or (),
            steps_lost=lost.total,
            participants=made.participants,
            plan=self._session.joined.plan,
            refused=refused,
        )
        return fragment.result

    def _settle(self, fragment: FleetFragment, sent: Shipment, outcome: Outcome) -> Ranges:
        """What is known for good now: of the contribution before, and of this one unless it is late. Returns the steps
        of a late one that does not count after all."""
        late, fragment.late = fragment.late, None
        is_this = late is not None and late.offer.key == sent.offer.key
        if late is not None and not is_this:
            self.ledger.told(late.offer.key, late.parcel, counted=not outcome.earlier_lost)
        if outcome.counted_in > outcome.agreement.version:
            fragment.late = sent
        else:
            self.ledger.told(sent.offer.key, sent.parcel, counted=outcome.counted)
        return late.parcel.steps if late is not None and outcome.late_is_lost(is_own=is_this) else NOTHING

    # --- beside the exchanges -----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """One event for each heartbeat."""
        if not self.alive:
            return
        joined = self._session.answer
        if joined is not None:
            acknowledged = tuple(self._inbox.received)
            answer = self.server.beat(
                Heartbeat(
                    run_id=joined.run_id,
                    worker_id=self.worker_id,
                    incarnation=joined.incarnation,
                    step=self.taken,
                    steps_per_second=1.0 / self.seat.step_s,
                    acknowledged=acknowledged,
                )
            )
            if isinstance(answer, HeartbeatAnswer):
                if answer.commands or acknowledged:
                    self._inbox.heard(answer, acknowledged)
            elif isinstance(answer, UnknownWorker) and not self.is_leaving:
                self._request(self._session.join_request, None, self._rejoined)
        self._agenda.after(self.seat.heartbeat_s, self._beat)

    def _rejoined(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, JoinAnswer):
            self._session.answer = answer
