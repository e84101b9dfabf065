"""A cluster of a fleet: a server with members, and the real machine of a cluster, which is a worker of the top.

    T    what the cluster's server has         S    Θ and the rounds that are not in it
    Θ    what the top had agreed on            B    T as it was when S last followed it

Each of them is two things: a version of the top, for all that others did, and the cluster's own rounds (by the version
that each made below). hierarchy/leader.py does the same on tensors, simulate/leader.py on named steps, with faults of
the leader itself, which a fleet does not have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...coordination.layers.machine import ClusterMachine, RecordFacts
from ...coordination.layers.tasks import (
    ClusterTask,
    ContributeRest,
    EndBelow,
    FollowBelow,
    GoAlone,
    JoinAbove,
    KeepRecord,
    LeaveAbove,
    LetGo,
    MarkMoved,
    MoveBelow,
    ReadRecord,
    ReleaseMembers,
    Rest,
    Restore,
    SettleAbove,
    TakeRest,
    TakeRounds,
    Withdraw,
)
from ...coordination.worker.effects import Send, Sight
from ...events import Event, VersionPublished
from ...ranges import Ranges
from ...schedule import due_fragment
from ..agenda import Agenda
from .ledger import NOTHING, LayerLedger
from .member import Clocks, FleetMember, Seat
from .server import RECORD_S, FleetServer

TAKES_S = 0.01  # whatever is not carried by a line


@dataclass(frozen=True)
class ClusterHolding:
    """Of one fragment: the version of the top that is in it, and the cluster's own rounds."""

    above: int = 0
    own: Ranges = NOTHING


class FleetUpward(FleetMember):
    """The cluster, to the top. Its steps are rounds."""

    def __init__(
        self, leader: FleetLeader, seat: Seat, top: FleetServer, agenda: Agenda, rng: random.Random, clocks: Clocks
    ) -> None:
        self._leader = leader
        self._readied: dict[int, bool] = {}  # contributions held back, by fragment: is it the last?
        self.begun = 0
        self.is_told_to_end = False
        super().__init__(seat, 1, top, agenda, rng, clocks)

    def take_round(self) -> None:
        self._drive(self.machine.stepped)

    def sync(self) -> None:
        self._drive(self.machine.sync_all)

    def let_go(self) -> None:
        readied, self._readied = self._readied, {}
        for index, last in readied.items():
            self._again(index, last=last)

    def agreed(self, index: int) -> ClusterHolding:
        """Θ."""
        held = self.fragments[index].held
        version = held.version if held is not None else 0
        return ClusterHolding(version, self.ledger.held_at(self.life, index, version))

    def follow(self, index: int, target: ClusterHolding) -> None:
        """S = T, so that what is unsent is what T has and Θ has not."""
        agreed = self.agreed(index)
        missing = agreed.own - target.own
        if missing or agreed.above != target.above:
            self.ledger.violated(f"{self.worker_id} would take rounds {missing} back: {target} follows {agreed}")
        fragment = self.fragments[index]
        fragment.unsent, fragment.until = target.own - agreed.own, 1 << 62

    @property
    def exchanges_next(self) -> bool:
        machine = self.machine
        cycle = machine.state.cycle
        is_due = due_fragment(cycle.step + 1, cycle.sync_every, len(self.fragments)) is not None
        return is_due and machine.plan.delay == 0 and not machine.in_flight

    # --- how it differs from one that trains --------------------------------------------------------------------------

    def _train(self) -> None:
        orders = self._inbox.take()
        self._be("training")
        self.machine.state.cycle.assigned = orders.sync_every
        self.is_told_to_end = self.is_told_to_end or bool(orders.drain)
        if orders.sync:
            self.sync()
        else:
            self._leader.rests()

    def _send(self, send: Send) -> None:
        super()._send(send)
        self.begun += 1

    def _ready(self, index: int, *, last: bool) -> None:
        """Held back until the leader lets it go."""
        self.fragments[index].exchange = None
        self._readied[index] = last
        self._leader.sent()

    def _sight(self, index: int) -> Sight:
        return super()._sight(index) if index not in self._readied else Sight(done=False)

    def _check(self) -> None:
        """Its steps are rounds; what is unsent are the rounds that T has and Θ has not."""


class FleetLeader:
    """Of one cluster. It lives as long as the run."""

    machine_type: type[ClusterMachine] = ClusterMachine

    def __init__(
        self,
        seat: Seat,
        below: FleetServer,
        top: FleetServer,
        agenda: Agenda,
        rng: random.Random,
        *,
        wait_s: float,
        record_s: float = RECORD_S,
    ) -> None:
        self.seat, self.below, self._top, self._agenda, self._rng = seat, below, top, agenda, rng
        self._record_s = record_s
        self._indices = range(top.terms.setting.num_fragments)
        self.machine = self.machine_type(wait_s)
        self.upward: FleetUpward | None = None
        self._joining: FleetUpward | None = None
        self.clocks = Clocks()
        self.t = [ClusterHolding() for _ in self._indices]
        self._made = [NOTHING for _ in self._indices]  # all of the cluster's own rounds
        self._before = list(self.t)  # B
        self._task: ClusterTask | None = None
        self._is_offering = self._is_resting = False
        self._rounds_left = self._begun = 0
        self._moving_now: dict[
            int, tuple[ClusterHolding, ClusterHolding]
        ] = {}  # by fragment: S and B of the move under way
        self._is_unclear = False
        below.heard = self._heard
        self.machine.began(is_new=True)
        self._work()

    # --- what happens below -------------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        if isinstance(event, VersionPublished):
            agreement = event.agreement
            if agreement.participants:
                self._round_closed(agreement.fragment, agreement.version)
            else:
                self._moved(agreement.fragment)
        elif not self.below.coordinator.members.live_ids:
            self.machine.emptied()
            self._work()

    def _round_closed(self, fragment: int, version: int) -> None:
        held, made = self.t[fragment], Ranges([(version, version + 1)])
        self.t[fragment] = ClusterHolding(held.above, held.own | made)
        self._made[fragment] = self._made[fragment] | made
        if fragment:
            self.machine.other_closed()
            return
        exchanges_next = self.machine.is_idle and self.upward is not None and self.upward.exchanges_next
        hold_s = self.machine.round_closed(exchanges_next=exchanges_next)
        if hold_s > 0.0:
            self.below.hold(hold_s)
        self._work()

    def _moved(self, fragment: int) -> None:
        """T′ = T + (S − B)."""
        s, b = self._moving_now.pop(fragment)
        held = self.t[fragment]
        if held.above != b.above:
            self.below.ledger.violated(f"a move from version {b.above} of the top was made on version {held.above}")
        self.t[fragment] = ClusterHolding(s.above, (held.own | (s.own - b.own)) - (b.own - s.own))
        if not self._moving_now:
            self._reported()

    # --- one task after the other -------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._task is not None:
            return
        task = self.machine.next()
        if self.machine.life.unclear and not self._is_unclear:
            self._is_unclear = True
            self.below.ledger.violated(f"the life of the cluster has no such edge: {self.machine.life.unclear}")
        if task is not None:
            self._task = task
            self._agenda.after(TAKES_S, lambda: self._carry_out(task))

    def _reported(self) -> None:
        """The task is carried out."""
        self._task = None
        self.machine.done()
        self._work()

    def _next(self) -> None:
        """The machine was told more than that."""
        self._task = None
        self._work()

    def _carry_out(self, task: ClusterTask) -> None:
        match task:
            case ReadRecord():
                known = {f: one.upper_version for f, one in enumerate(self.below.coordinator.fragments)}
                facts: RecordFacts | None = None
                self.machine.found(facts, known)
                self._next()
            case JoinAbove():
                self._joining = FleetUpward(self, self.seat, self._top, self._agenda, self._rng, self.clocks)
            case KeepRecord():
                self._agenda.after(self._record_s, self._reported)
            case FollowBelow():
                self._follow()
                self._reported()
            case TakeRounds(rounds):
                self._rounds_left, self._begun = rounds, self._up.begun
                self._take_one()
            case TakeRest():
                self._rounds_left = int(any(one.unsent for one in self._up.fragments))
                self._begun = self._up.begun
                self._take_one()
            case SettleAbove() | ContributeRest():
                self._up.sync()
            case MoveBelow(serial, fragments):
                self._moving_now = {f: (self._s(f), self._before[f]) for f in fragments}
                self.below.move(serial, fragments)
            case MarkMoved():
                self._before = [self._s(f) for f in self._indices]
                self._reported()
            case ReleaseMembers():
                self.below.release()
                self._reported()
            case Rest(seconds):
                self._agenda.after(seconds, self._reported)
            case LetGo() | Withdraw() | Restore() | LeaveAbove() | EndBelow() | GoAlone():
                raise AssertionError(f"a leader that lives as long as its run is not asked to {type(task).__name__}")

    @property
    def _up(self) -> FleetUpward:
        assert self.upward is not None, "not joined yet"
        return self.upward

    # --- in the middle of an exchange ---------------------------------------------------------------------------------

    def sent(self) -> None:
        self.machine.sent()
        if not self._is_offering:
            self._is_offering = True
            self._agenda.after(TAKES_S, self._offer)

    def _offer(self) -> None:
        if not self.machine.is_offering:
            self._is_offering = False
            if self._is_resting:
                self.rests()
            return
        task = self.machine.next()
        if isinstance(task, LetGo):
            self._up.let_go()
            self._offered()
        else:
            assert isinstance(task, KeepRecord), task
            self._agenda.after(self._record_s, self._offered)

    def _offered(self) -> None:
        self.machine.done()
        self._offer()

    # --- up -----------------------------------------------------------------------------------------------------------

    def rests(self) -> None:
        """The worker above waits for nothing. (A real one goes on only after what it sent is let go.)"""
        self._is_resting = self._is_offering
        if self._is_offering:
            return
        match self._task:
            case JoinAbove():
                self.upward = self._joining
                self.machine.joined(self._moving(), unsettled=False)
                self._next()
            case TakeRounds() | TakeRest():
                self._take_one()
            case SettleAbove() | ContributeRest():
                self._exchanged()
            case _:
                pass  # an order to exchange, while nothing is asked of it

    def _take_one(self) -> None:
        """So many rounds have closed. However many: what they did goes up at once."""
        if self._rounds_left and self._up.begun == self._begun:
            self._rounds_left -= 1
            self._up.take_round()
        else:
            self._exchanged()

    def _exchanged(self) -> None:
        deferred = self._up.machine.state.metrics.offline_exchanges
        self.machine.exchanged(self._moving(), deferred=deferred, told_to_end=self._up.is_told_to_end)
        self._next()

    # --- S and B ------------------------------------------------------------------------------------------------------

    def _s(self, fragment: int) -> ClusterHolding:
        if self.upward is None:
            if self._joining is None or self._joining.fragments[fragment].held is None:
                return self._before[fragment]
            return self._joining.agreed(fragment)
        agreed = self._up.agreed(fragment)
        return ClusterHolding(agreed.above, agreed.own | self._up.fragments[fragment].unsent)

    def _moving(self) -> list[int]:
        return [f for f in self._indices if self._s(f) != self._before[f]]

    def _follow(self) -> None:
        self._before = list(self.t)
        for fragment, target in enumerate(self._before):
            self._up.follow(fragment, target)

    def settle(self) -> None:
        """The end of the run: what the cluster holds back is said, so that every round is somewhere."""
        upward = self.upward or self._joining
        if upward is None:
            return
        ledger: LayerLedger = self._top.ledger
        book = ledger.books[upward.life]
        upward.end()
        for fragment, held in enumerate(self.t):
            book.held[fragment] = (book.held[fragment] | held.own) - book.applied[fragment]
            foreign = book.applied[fragment] - self._made[fragment]
            if foreign:
                ledger.violated(f"rounds {foreign} of {self.seat.name} are in the top, and were never made")
            vanished = self._made[fragment] - book.applied[fragment] - book.given_up[fragment] - held.own
            if vanished:
                ledger.violated(f"rounds {vanished} of {self.seat.name} vanished")
        book.taken, book.said = 0, None  # its rounds have the numbers of versions, of which some came from above
