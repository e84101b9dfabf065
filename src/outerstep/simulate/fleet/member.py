"""A worker of a fleet: the real worker machine and the real exchange machine; its steps are counted, not played.

Between two steps that send or adopt something a worker only trains. The machine says how many such steps lie ahead
(`quiet_steps`), and they pass as one event. What it asks for is carried out on ranges of step numbers, as
worker/sync.py does it on tensors. A worker that dies comes back as another object.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...coordination.cost import Overheads
from ...coordination.worker.effects import Adopt, Carry, Keep, Mix, Move, Note, PutOff, Send
from ...coordination.worker.exchange import Call, Exchange, Patience, is_evicted
from ...coordination.worker.machine import LOOK_EVERY_S
from ...digest import part_hash
from ...errors import Fenced, Kicked, OuterstepError, Refused, ServerError
from ...ranges import Ranges
from ...types import (
    Agreement,
    Answer,
    CompleteOffer,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Leave,
    Offer,
    PutPart,
    Request,
)
from ..agenda import Agenda
from ..carried import CarriedFragment, CarriedWorker, Joined, SimResult, SimSent
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
Parcels = Mapping[int, Parcel]
"""What is sent under each sequence."""

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
class FleetHost:
    """The computer of a worker, which stays when its process is restarted: its speed, its lines and its ways."""

    number: int
    name: str
    step_s: float
    lines_up: tuple[BookedLine, ...]
    lines_down: tuple[BookedLine, ...]
    round_trip_s: float
    heartbeat_s: float
    overheads: Overheads
    lie: str = ""


@dataclass
class FleetFragment(CarriedFragment[Ranges]):
    """`unsent`: the steps in the local weights that are not in the anchor, up to step `until` (the later ones are,
    too)."""

    unsent: Ranges = NOTHING
    until: int = 0


class FleetMember(CarriedWorker[Ranges]):
    def __init__(
        self,
        host: FleetHost,
        start: int,
        server: FleetServer,
        agenda: Agenda,
        rng: random.Random,
        clocks: Clocks,
        *,
        name: str = "",
    ) -> None:
        name = name or host.name
        super().__init__(name, f"{name}-{start}", agenda, rng)
        self.host, self.server, self._clocks = host, server, clocks
        self.ledger: LayerLedger = server.ledger
        self.life = self.ledger.begin(f"{self.worker_id}#{start}", host.step_s)
        self.taken = 0  # steps of this life
        self.is_leaving = self._said_goodbye = False
        self.on_left: Callable[[], None] = lambda: None
        self.fragments: list[FleetFragment] = [FleetFragment() for _ in range(server.terms.setting.num_fragments)]
        self._carrying: Counter[int] = Counter()  # parts on the lines, by fragment
        self._up, self._down = server.windows_up(), server.windows_down()
        self._doing: Doing | None = None
        self._since = agenda.now
        self._began = self._own_until = agenda.now  # this stretch of training; and when its own arithmetic ends
        self._stretch = 0
        self._is_training = self._is_stuck = False
        self._be("joining")
        self._soon(rng.uniform(0.0, host.heartbeat_s), self._beat)
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
            shipped = [one.steps for one in (fragment.in_flight, fragment.late) if one is not None]
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

    def unsent(self, index: int) -> Ranges:
        fragment = self.fragments[index]
        if fragment.until < self.taken:
            fragment.unsent = fragment.unsent | Ranges([(fragment.until, self.taken)])
            fragment.until = self.taken
        return fragment.unsent

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
        self._soon(self._began - now + (quiet + 1) * self.host.step_s, lambda: self._step(number))

    def _count_steps(self) -> None:
        """Those of this stretch that were taken by now."""
        if not self._is_training:
            return
        elapsed_s = self._agenda.now - self._began
        steps = min(max(math.floor(elapsed_s / self.host.step_s + 1e-9), 0), self.machine.quiet_steps)
        self.machine.trained(steps)
        self.taken += steps
        self._began += steps * self.host.step_s
        self._stretch += 1

    def _step(self, number: int) -> None:
        if number != self._stretch or not self._is_training:
            return
        quiet = self.machine.quiet_steps
        self.machine.trained(quiet)
        self.taken += quiet + 1
        self._is_training = False
        self._drive(self.machine.stepped)

    def _wait(self, number: int) -> None:
        self._be("waiting")
        self._look_again(number)

    def _look_again(self, number: int) -> None:
        exchanges = (self.fragments[i].exchange for i in self.machine.waiting)
        is_wanted = any(one is not None and one.wanted for one in exchanges)
        self._soon(LOOK_EVERY_S if is_wanted else CALM_LOOK_S, lambda: self._look(number))

    @property
    def _hears_leave(self) -> bool:
        return self.is_leaving

    def _silent_s(self, index: int, exchange: Exchange) -> float:
        """(Parts are on the lines: then somebody answers, part by part.)"""
        return 0.0 if self._carrying[index] else super()._silent_s(index, exchange)

    def _check_weights(self) -> None:
        for i in range(len(self.fragments)):
            held, believed = self.unsent(i).total, self.machine.unsent(i).steps
            if held != believed:
                self.ledger.violated(f"{self.worker_id} holds {held} unsent steps, and believes in {believed}")

    def _violated(self, rule: str) -> None:
        self.ledger.violated(rule)

    # --- what the machine asks for ------------------------------------------------------------------------------------

    def _saw(self, effect: Keep | PutOff | Note) -> None:
        if isinstance(effect, Note):
            self._is_stuck = self._is_stuck or effect.kind in ("stuck", "unreachable", "out of time")

    def _start_over(self) -> None:
        for index, fragment in enumerate(self.fragments):
            shipped = fragment.in_flight.steps if fragment.in_flight is not None else NOTHING
            self._give_up(index, self.unsent(index) - shipped)

    def _moved(self, move: Move, fragment: FleetFragment, result: SimResult) -> None:
        unsent, sent = self.unsent(move.fragment), fragment.in_flight
        if isinstance(move, Adopt | Carry | Mix) and result.counted and sent is not None:
            fragment.unsent = unsent = unsent - sent.steps
        if isinstance(move, Adopt) and unsent:
            is_overwritten = result.counted and not result.refused
            self._give_up(move.fragment, unsent, overwritten=is_overwritten)

    def _give_up(self, index: int, steps: Ranges, *, overwritten: bool = False) -> None:
        fragment = self.fragments[index]
        fragment.unsent = self.unsent(index) - steps
        self.ledger.given_up(self.life, index, steps, overwritten=overwritten)

    def _depart(self, weights: str) -> None:
        request, self._said_goodbye = Leave(**self._session.head, reason="done"), True

        def departed(answer: Answer | OuterstepError) -> None:
            book_ = self.ledger.books[self.life]
            book_.has_left = not self._is_stuck and not self.machine.state.metrics.steps_discarded
            self.end()
            self.on_left()

        self._request(request, None, departed)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        own_s = self.host.overheads.worker_s_per_parameter * self.server.terms.bytes_of(1.0)
        self._own_until = max(self._own_until, self._agenda.now) + own_s
        self._clocks.own_s += own_s
        super()._send(send)

    def _contents(self, send: Send) -> Ranges:
        return self.unsent(send.fragment)

    def _described(self, send: Send, steps: Ranges) -> dict[str, Any]:
        boast = BOAST if self.host.lie == "boast" else 1
        return {"size_bytes": self.server.up_bytes, "tokens": send.steps * boast}

    def _part_hashes(self, offer: Offer, steps: Ranges) -> dict[int, str]:
        return {0: HASH}

    def _patience(self, *, last: bool) -> Patience:
        return LAST_PATIENCE if last else PATIENCE

    def _travel(
        self, index: int, exchange: Exchange, shipments: Sequence[SimSent[Ranges]], joined: Joined | None
    ) -> None:
        self._carrying[index] = 0
        parcels = {one.offer.sequence: Parcel(self.life, one.steps) for one in shipments}
        self._soon(0.0, lambda: self._carry(index, exchange, parcels, joined))

    def _carry(self, index: int, exchange: Exchange, parcels: Parcels, joined: Joined | None) -> None:
        """What the exchange asks for next; until it is over, or another one took its place."""
        if self.fragments[index].exchange is not exchange:
            return
        if exchange.done:
            self._arrived(index, exchange, joined)
            return
        now = self._agenda.now
        for call in exchange.calls(now):
            self._call(index, exchange, call, parcels, joined)
        if exchange.wake_at > now:
            self._soon(exchange.wake_at - now, lambda: self._carry(index, exchange, parcels, joined))

    def _call(self, index: int, exchange: Exchange, call: Call, parcels: Parcels, joined: Joined | None) -> None:
        request = call.request
        is_bytes = isinstance(request, PutPart | CompleteOffer | GetPart)
        parcel = parcels[request.sequence] if isinstance(request, PutPart | CompleteOffer) else None
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
            self._carry(index, exchange, parcels, joined)
            if exchange.wanted and self._machine is not None and self.machine.waiting:
                self._look_again(self._looks)

        self._request(request, parcel, answered)

    def _request(
        self, request: Request, parcel: Parcel | None, on_answer: Callable[[Answer | OuterstepError], None]
    ) -> None:
        """There and back again, each way as long as the lines take."""
        host, server, agenda = self.host, self.server, self._agenda
        half_s, overheads = host.round_trip_s / 2, host.overheads
        arrives, size_bytes, part_bytes = agenda.now, 0, server.part_bytes
        self._up.touched(agenda.now)
        if parcel is not None:
            size_bytes = server.up_bytes
            leaves = agenda.now + overheads.worker_s_per_byte * size_bytes
            lines = (*host.lines_up, *server.lines_in)
            arrives = book(lines, leaves, size_bytes, host.round_trip_s, overheads.connections, part_bytes, self._up)
            if isinstance(request, PutPart):
                server.reading(request.key, 1)

        def reply(answer: Answer | Refused, down_bytes: int) -> None:
            done = agenda.now
            self._down.touched(done)
            if down_bytes:
                lines = (*server.lines_out, *host.lines_down)
                done = book(lines, done, down_bytes, host.round_trip_s, overheads.connections, part_bytes, self._down)
                done += overheads.worker_s_per_byte * down_bytes
            self._soon(done - agenda.now + half_s, lambda: on_answer(answer))

        def at_server() -> None:
            if isinstance(request, PutPart):
                server.reading(request.key, -1)
            server.handle(request, parcel, reply, lie=host.lie)

        self._soon(arrives - agenda.now + half_s, at_server)

    def _arrived(self, index: int, exchange: Exchange, joined: Joined | None) -> None:
        failure, fragment = exchange.failure, self.fragments[index]
        is_refused = isinstance(failure, Refused) and not isinstance(failure, ServerError | Fenced | Kicked)
        if is_refused and joined is None and fragment.in_flight is not None and not fragment.refused:
            # Nobody has any use for it. What was agreed instead is fetched, as topology/server/exchange.py does.
            fragment.refused = str(failure)
            self._ask(index, after=-1)
        else:
            super()._arrived(index, exchange, joined)

    def _adopted(self, index: int, made: Agreement, before: int, steps_lost: int) -> None:
        self.ledger.adopted(self.worker_id, index, made.version, before)

    def _tell(self, sent: SimSent[Ranges], *, counted: bool) -> None:
        self.ledger.told(sent.offer.key, Parcel(self.life, sent.steps), counted=counted)

    def _lose(self, index: int, steps: Ranges) -> int:
        self.ledger.given_up(self.life, index, steps, overwritten=False)
        return steps.total

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
                    steps_per_second=1.0 / self.host.step_s,
                    acknowledged=acknowledged,
                )
            )
            if isinstance(answer, HeartbeatAnswer):
                if answer.commands or acknowledged:
                    self._inbox.heard(answer, acknowledged)
            elif is_evicted(answer, has_left=self._said_goodbye):
                self._request(self._session.join_request, None, self._rejoined)
        self._agenda.after(self.host.heartbeat_s, self._beat)
