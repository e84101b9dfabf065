"""What a simulated leader does with the tasks of the real machine of a cluster, whatever rounds and steps are held in.

    T    what the layer below has                S    Θ and the unsent steps of the worker above
    Θ    what the layer above had agreed on      B    T as it was when S last followed it

The machine decides, and the worker above is a simulated worker of any server (carried.py), whose steps are rounds;
hierarchy/leader.py carries the same tasks out on tensors. In the schedules leaders die, are fenced and hand over
(leader.py); in a fleet they live as long as the run (fleet/cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ..coordination.layers.machine import ClusterMachine, RecordFacts
from ..coordination.layers.tasks import (
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
from ..coordination.worker.effects import Sight
from ..schedule import due_fragment
from .agenda import Agenda
from .carried import CarriedWorker, Steps

TAKES_S = 0.01  # whatever is not carried by a network, a line or a disk

Held = TypeVar("Held")
Then = Callable[..., None]
"""Told why not; nothing = it is done."""


class Leads(Protocol):
    """Whoever leads a worker above."""

    def sent(self) -> None: ...
    def rests(self) -> None: ...


class CarriedUpward(CarriedWorker[Steps]):
    """A cluster, to the server above. What it sends is held back until its leader lets it go."""

    left = False

    def _led_by(self, leader: Leads) -> None:
        """Before anything else."""
        self._leads = leader
        self._readied: dict[int, bool] = {}  # contributions held back, by fragment: is it the last?
        self.begun = 0
        self.is_told_to_end = False

    def take_round(self) -> None:
        self._drive(self.machine.stepped)

    def sync(self) -> None:
        self._drive(self.machine.sync_all)

    def finish(self) -> None:
        self._drive(self.machine.finish)

    def let_go(self) -> None:
        readied, self._readied = self._readied, {}
        for index, last in readied.items():
            self._again(index, last=last)

    @property
    def has_unsent(self) -> bool:
        raise NotImplementedError

    @property
    def exchanges_next(self) -> bool:
        machine = self.machine
        cycle = machine.state.cycle
        is_due = due_fragment(cycle.step + 1, cycle.sync_every, len(self.fragments)) is not None
        return is_due and machine.plan.delay == 0 and not machine.in_flight

    # --- how it differs from one that trains --------------------------------------------------------------------------

    def _train(self) -> None:
        orders = self._inbox.take()
        self.machine.state.cycle.assigned = orders.sync_every
        self.is_told_to_end = self.is_told_to_end or bool(orders.drain)
        if orders.sync:
            self.sync()
        else:
            self._leads.rests()

    def _ready(self, index: int, *, last: bool) -> None:
        """Held back until the leader lets it go."""
        fragment = self.fragments[index]
        if fragment.exchange is not None:
            self._drop(fragment.exchange)
        fragment.exchange = None
        self._readied[index] = last
        self.begun += 1
        self._leads.sent()

    def _sight(self, index: int) -> Sight:
        return super()._sight(index) if index not in self._readied else Sight(done=False)

    def _check_weights(self) -> None:
        """Its steps are rounds, and what is unsent are the steps in them."""


class CarriedLeader(Generic[Held]):
    """Of one process. `_before`: B, by fragment."""

    machine_type: type[ClusterMachine] = ClusterMachine

    def __init__(self, cluster: str, agenda: Agenda, before: list[Held], wait_s: float) -> None:
        self.cluster, self._agenda, self._before = cluster, agenda, before
        self._fragments = range(len(before))
        self.machine = self.machine_type(wait_s)
        self.alive = True
        self.worker: CarriedUpward[Any] | None = None
        self._task: ClusterTask | None = None
        self._is_offering = self._is_resting = self._is_unclear = False
        self._rounds_left = self._begun = 0

    # --- each kind's own ----------------------------------------------------------------------------------------------

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._agenda.after(delay_s, action)

    def _violated(self, rule: str) -> None:
        raise NotImplementedError

    def _read(self) -> tuple[RecordFacts | None, Mapping[int, int]]:
        """What the layer below keeps of its leader; by fragment, the last move that is in T."""
        raise NotImplementedError

    def _keep(self, then: Then) -> None:
        raise NotImplementedError

    def _restore(self, is_in: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _join(self, task: JoinAbove) -> None:
        """`rests` is called when it has."""
        raise NotImplementedError

    def _joined(self, task: JoinAbove) -> None:
        raise NotImplementedError

    def _move(self, serial: int, fragments: tuple[int, ...], then: Then) -> None:
        """T′ = T + (S − B)."""
        raise NotImplementedError

    def _follow(self) -> None:
        """S = B = T, so that what is unsent is what T has and Θ has not."""
        raise NotImplementedError

    def _s(self, fragment: int) -> Held:
        raise NotImplementedError

    def _hold(self, limit_s: float) -> None:
        """Members wait for what comes from above."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _end_below(self) -> None:
        raise NotImplementedError

    def _end_above(self) -> None:
        """Nobody speaks for the cluster any more."""
        raise NotImplementedError

    # --- what happens below -------------------------------------------------------------------------------------------

    def round_closed(self, fragment: int = 0) -> None:
        if fragment:
            self.machine.other_closed()
            return
        exchanges_next = self.machine.is_idle and self.worker is not None and self.worker.exchanges_next
        hold_s = self.machine.round_closed(exchanges_next=exchanges_next)
        if hold_s > 0.0:
            self._hold(hold_s)
        self.work()

    def emptied(self) -> None:
        self.machine.emptied()
        self.work()

    # --- one task after the other -------------------------------------------------------------------------------------

    def work(self) -> None:
        if self._task is not None or not self.alive:
            return
        task = self.machine.next()
        if self.machine.life.unclear and not self._is_unclear:
            self._is_unclear = True
            self._violated(f"the life of {self.cluster} has no such edge: {self.machine.life.unclear}")
        if task is not None:
            self._task = task
            self.later(TAKES_S, lambda: self._begin(task))

    def _begin(self, task: ClusterTask) -> None:
        if task is self._task:
            self._carry_out(task, partial(self._reported, task))

    def _reported(self, task: ClusterTask, why: str = "") -> None:
        """Done, or why not."""
        if task is not self._task or not self.alive:
            return
        self._task = None
        if why:
            self.machine.failed(why)
        else:
            self.machine.done()
        self.work()

    def _next(self) -> None:
        """The machine was told more than that it is done."""
        self._task = None
        self.work()

    def _carry_out(self, task: ClusterTask, then: Then) -> None:
        match task:
            case ReadRecord():
                self.machine.found(*self._read())
                self._next()
            case Restore(is_in):
                self._restore(is_in)
                self._next()
            case JoinAbove():
                self._join(task)
            case KeepRecord():
                self._keep(then)
            case FollowBelow():
                self._follow()
                then()
            case TakeRounds(rounds):
                self._rounds_left, self._begun = rounds, self._up.begun
                self._take_one()
            case TakeRest():
                self._rounds_left, self._begun = int(self._up.has_unsent), self._up.begun
                self._take_one()
            case SettleAbove() | ContributeRest():
                self._up.sync()
            case LeaveAbove():
                if self._up.left:
                    self._exchanged()
                else:
                    self._up.finish()
            case MoveBelow(serial, fragments):
                self._move(serial, fragments, then)
            case MarkMoved():
                self._before = [self._s(f) for f in self._fragments]
                then()
            case ReleaseMembers():
                self._release()
                then()
            case EndBelow():
                self._end_below()
                then()
            case Rest(seconds):
                self.later(seconds, then)
            case GoAlone():
                self._end_above()
                self._release()
                then()
            case LetGo() | Withdraw():
                raise AssertionError("nothing is offered")

    @property
    def _up(self) -> CarriedUpward[Any]:
        assert self.worker is not None, "not joined yet"
        return self.worker

    # --- in the middle of an exchange ---------------------------------------------------------------------------------

    def sent(self) -> None:
        self.machine.sent()
        if not self._is_offering:
            self._is_offering = True
            self.later(TAKES_S, self._offer)

    def _offer(self) -> None:
        if not self._is_offering:
            return
        if not self.machine.is_offering:
            self._is_offering = False
            if self._is_resting:
                self.rests()
            return
        task = self.machine.next()
        match task:
            case KeepRecord():
                self._keep(self._offered)
            case Rest(seconds):
                self.later(seconds, self._offered)
            case LetGo():
                self._up.let_go()
                self._offered()
            case _:  # it is withdrawn: the exchange ends with an error, and so does what it was part of
                self.machine.done()
                self._is_offering = False
                if self.worker is not None:
                    self.worker.kill()
                if self._task is not None:
                    self._reported(self._task, self.machine.failure)

    def _offered(self, why: str = "") -> None:
        if not (self._is_offering and self.alive):
            return
        if why:
            self.machine.failed(why)
        else:
            self.machine.done()
        self._offer()

    # --- up -----------------------------------------------------------------------------------------------------------

    def rests(self) -> None:
        """The worker above waits for nothing, or has left. (A real one goes on only after what it sent is let go.)"""
        self._is_resting = self._is_offering
        if self._is_offering:
            return
        match self._task:
            case JoinAbove() as task:
                self._joined(task)
                self._next()
            case TakeRounds() | TakeRest():
                self._take_one()
            case SettleAbove() | ContributeRest() | LeaveAbove():
                self._exchanged()
            case _:
                pass  # an order to exchange, while nothing is asked of it

    def _take_one(self) -> None:
        """So many rounds have closed. However many: what they did goes up at once."""
        if self._rounds_left and self._up.begun == self._begun and not self._up.left:
            self._rounds_left -= 1
            self._up.take_round()
        else:
            self._exchanged()

    def _exchanged(self) -> None:
        up = self._up
        deferred = up.machine.state.metrics.offline_exchanges
        self.machine.exchanged(self._moving(), deferred=deferred, told_to_end=up.is_told_to_end)
        self._next()

    def _moving(self) -> list[int]:
        return [f for f in self._fragments if self._s(f) != self._before[f]]
