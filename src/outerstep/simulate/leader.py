"""A simulated leader: the real machine of a cluster, in virtual time, over sets of steps.

    T    what the layer below has, by name of each step: `SimBelow.model`
    Θ    what the layer above had agreed on in the version that the worker above holds
    S    Θ and the worker's unsent steps
    B    T as it was when S last followed it

The worker above is the simulated worker of any server (worker.py), whose steps are rounds. hierarchy/leader.py does the
same on tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

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
from ..coordination.worker.effects import Send, Sight
from ..coordination.worker.machine import Units
from ..coordination.worker.units import LeaseRequest
from ..errors import Fenced, Kicked, OuterstepError
from ..schedule import due_fragment
from ..types import Answer, Trained
from .agenda import Agenda
from .history import StepName
from .layer_history import LayerHistory, Model
from .leader_data import SimDataBelow, SimLeaseAsking
from .network import Network
from .scenario import Scenario
from .server import SimServer
from .worker import SimSaved, SimWorker

JOIN_TIMEOUT_S = 60.0
TAKES_S = 0.01  # whatever is not carried by a network or a disk


@dataclass(frozen=True)
class SimLeaderRecord:
    """What the layer below keeps of its leader."""

    worker: SimSaved | None
    shadow: tuple[Model, ...]
    before: tuple[Model, ...]
    serial: int
    moved: Mapping[int, int]
    version: int
    rounds: int
    data: Mapping[str, Any] = field(default_factory=dict)


Change = Callable[[int], tuple[set[StepName], set[StepName]]]
"""Of a fragment: which steps a move adds to T, and which it takes back."""


class SimBelow(Protocol):
    """The layer below (hierarchy/below.py), where everything takes its time."""

    def model(self, fragment: int) -> Model: ...
    def version(self) -> int: ...
    def versions(self) -> dict[int, int]:
        """By fragment: what `model` is now."""

    def rounds_since(self, version: int) -> int: ...
    def moves_known(self) -> dict[int, int]: ...
    def keep(self, record: SimLeaderRecord, then: Callable[[str], None]) -> None:
        """`then` is told why not; "" = it is kept."""

    def kept(self) -> SimLeaderRecord | None: ...
    def has_newest(self) -> bool:
        """No record was kept after the one that `kept` returned. (Else all who held it have died.)"""

    def move(self, serial: int, fragments: tuple[int, ...], change: Change, then: Callable[[str], None]) -> None: ...
    def hold(self, limit_s: float) -> None: ...
    def release(self) -> None: ...
    def end(self) -> None: ...
    @property
    def data(self) -> SimDataBelow | None:
        """None: it leases none."""


@dataclass(frozen=True)
class SimAbove:
    """The server above, and the way there."""

    server: SimServer
    network: Network
    scenario: Scenario
    history: LayerHistory


class SimUpward(SimWorker):
    """A cluster, to the server above."""

    def __init__(
        self,
        leader: SimLeader,
        instance: int,
        above: SimAbove,
        agenda: Agenda,
        rng: random.Random,
        saved: SimSaved | None,
    ) -> None:
        self._leader = leader
        self._readied: dict[int, bool] = {}  # contributions held back, by fragment: is it the last?
        self.begun = 0
        self.overtaken: list[int] = []  # fragments of which the server has more than the record knows of
        self.is_told_to_end = False
        place = (above.scenario, agenda, above.network, above.server, above.history, rng)
        super().__init__(0, instance, 0, *place, deepcopy(saved), name=leader.cluster, link=leader.link)

    # --- what the leader asks for -------------------------------------------------------------------------------------

    def take_round(self) -> None:
        self.steps_taken += 1
        self._drive(self.machine.stepped)

    def sync(self) -> None:
        self._drive(self.machine.sync_all)

    def finish(self) -> None:
        self._drive(self.machine.finish)

    def let_go(self) -> None:
        readied, self._readied = self._readied, {}
        for index, last in readied.items():
            self._again(index, last=last)

    def follow(self, fragment: int, target: Model) -> None:
        """S = T, so that what is unsent is what T has and Θ has not."""
        state, agreed = self.fragments[fragment], self.agreed(fragment)
        missing = agreed - target
        if missing:
            self._history.violated(f"{self.worker_id} would take step {min(missing)} back: it is not in the cluster")
        on = state.held.version if state.held is not None else 0
        state.unsent = {step: state.unsent.get(step, on) for step in sorted(target - agreed)}

    def agreed(self, fragment: int) -> Model:
        """Θ."""
        held = self.fragments[fragment].held
        history = self._history
        assert isinstance(history, LayerHistory)
        return history.model(fragment, held.version if held is not None else 0)

    def saved_now(self) -> SimSaved:
        self._save()
        assert self.saved is not None
        return self.saved

    @property
    def exchanges_next(self) -> bool:
        machine = self.machine
        cycle = machine.state.cycle
        is_due = due_fragment(cycle.step + 1, cycle.sync_every, len(self.fragments)) is not None
        return is_due and machine.plan.delay == 0 and not machine.in_flight

    def _resume(self, saved: SimSaved) -> None:
        last = [state.last_sequence for state in self._session.joined.fragments]
        self.overtaken = [i for i, state in enumerate(saved.fragments) if last[i] > state.sequence]
        super()._resume(saved)

    def lease(self, request: LeaseRequest, then: Callable[[Answer | OuterstepError], None]) -> None:
        self._carrier.fire(request.message(self._session.head), then)

    def trained(self, units: Units) -> None:
        self.machine.count(0, 0, units)

    def _describe(self, send: Send) -> tuple[Trained, ...]:
        return self._leader.describe(send.units)

    # --- how it differs from one that trains -----------------------------------------------------------------------

    def _train(self) -> None:
        orders = self._inbox.take()
        self.machine.state.cycle.assigned = orders.sync_every
        self.is_told_to_end = self.is_told_to_end or bool(orders.drain)
        if orders.sync:
            self.sync()
        else:
            self._leader.rests()

    def _send(self, send: Send) -> None:
        """The steps of a round are as old as the worker's step that it is: T may have been followed before that."""
        state = self.fragments[send.fragment]
        state.unsent = {step: max(on, send.oldest_base) for step, on in state.unsent.items()}
        super()._send(send)

    def _ready(self, index: int, *, last: bool) -> None:
        """Held back until the leader lets it go."""
        if self.fragments[index].exchange is not None:
            self._carrier.drop(self.fragments[index].exchange)  # type: ignore[arg-type]
        self.fragments[index].exchange = None
        self._readied[index] = last
        self.begun += 1
        self._leader.sent()

    def _sight(self, index: int) -> Sight:
        return super()._sight(index) if index not in self._readied else Sight(done=False)

    def _check_weights(self) -> None:
        """Its steps are rounds, and what is unsent are the steps in them."""

    def _give_up(self, gone: Mapping[int, set[StepName]]) -> None:
        metrics = self.machine.state.metrics
        told, self._told = self._told, metrics.steps_discarded + metrics.steps_overwritten
        for index, steps in gone.items():
            if self._told > told:
                self.discarded |= {(index, step) for step in steps}
            state = self.fragments[index]
            state.unsent = {step: on for step, on in state.unsent.items() if step not in steps}

    def _keep_weights(self, weights: str) -> None:
        if weights == "agreed":
            gone = {i: set(state.unsent) for i, state in enumerate(self.fragments)}
            if self._may_abandon or self.machine.state.metrics.steps_discarded:
                self.abandoned |= {(i, step) for i, steps in gone.items() for step in steps}
            for state in self.fragments:
                state.unsent = {}

    def _departed(self, answer: Answer | OuterstepError) -> None:
        was_alive = self.alive
        super()._departed(answer)
        if was_alive and self.left:
            self._leader.rests()

    def _die(self, error: OuterstepError) -> None:
        super()._die(error)
        if isinstance(error, Fenced | Kicked):
            self._history.faults["fenced_leader"] += 1
        self._leader.lost(f"{type(error).__name__}: {error}")


class SimLeader:
    """Of one process. `link`: its way to the server above."""

    machine_type: type[ClusterMachine] = ClusterMachine
    worker_type: type[SimUpward] = SimUpward
    asking_type: type[SimLeaseAsking] = SimLeaseAsking

    def __init__(
        self,
        cluster: str,
        link: str,
        instance: int,
        below: SimBelow,
        above: SimAbove,
        agenda: Agenda,
        rng: random.Random,
        *,
        wait_s: float,
        is_new: bool,
    ) -> None:
        self.cluster, self.link, self._instance = cluster, link, instance
        self._below, self._above, self._agenda, self._rng = below, above, agenda, rng
        self._fragments = range(above.scenario.fragments)
        self.machine = self.machine_type(wait_s)
        self.alive = True
        self.worker: SimUpward | None = None
        self.workers: list[SimUpward] = []  # tries to join, and the one that did
        self._before: list[Model] = [below.model(f) for f in self._fragments]  # B
        self._shadow: list[Model] = list(self._before)  # S, while there is no worker
        self._saved: SimLeaderRecord | None = None
        self._task: ClusterTask | None = None
        self._is_offering = self._is_resting = self._is_unclear = False
        self._rounds_left = self._begun = 0
        self._paused_until = 0.0
        self.asking: SimLeaseAsking | None = None
        if below.data is not None:
            self.asking = self.asking_type(below.data, agenda, self.later, self._ask)
            self.asking.machine.begin(below.versions())
        self._versions, self._is_new = below.versions(), is_new  # of B, before it has followed anything
        self.machine.began(is_new=is_new)
        self.work()

    # --- life -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.alive = False
        for worker in self.workers:
            worker.kill()

    def pause(self, seconds: float) -> None:
        self._paused_until = self._agenda.now + seconds
        for worker in self.workers:
            worker.pause(seconds)

    def stop(self) -> None:
        self.machine.stop()
        self.work()

    def lost(self, why: str) -> None:
        """Fenced, or another member leads."""
        self.machine.lost(why)
        if self.worker is not None:
            self.worker.kill()
        if self._task is not None:  # nothing comes of it any more
            self._task = None
            if self._is_offering:
                self._is_offering = False
                self.machine.next()
                self.machine.done()
            self.machine.failed(why)
        self.work()

    @property
    def is_over(self) -> bool:
        return self.machine.is_over

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.alive:
                return
            if self._agenda.now < self._paused_until:
                self._agenda.at(self._paused_until, act)
                return
            action()

        self._agenda.after(delay_s, act)

    # --- what happens below ---------------------------------------------------------------------------------------

    def round_closed(self, fragment: int = 0) -> None:
        if fragment:
            self.machine.other_closed()
            return
        exchanges_next = self.machine.is_idle and self.worker is not None and self.worker.exchanges_next
        hold_s = self.machine.round_closed(exchanges_next=exchanges_next)
        if hold_s > 0.0:
            self._above.history.faults["held"] += 1
            self._below.hold(hold_s)
        self.work()

    def emptied(self) -> None:
        self.machine.emptied()
        self.work()

    # --- data -----------------------------------------------------------------------------------------------------

    def _ask(self, request: LeaseRequest, then: Callable[[Answer | OuterstepError], None]) -> None:
        if self.worker is not None and self.worker.alive:
            self.worker.lease(request, then)

    def describe(self, units: Units) -> tuple[Trained, ...]:
        return self.asking.machine.describe(units) if self.asking is not None else ()

    def _settle_data(self) -> None:
        if self.asking is not None and self.worker is not None:
            self.asking.machine.exchanged(self.worker.machine.state)

    def _keep(self, then: Callable[[str], None]) -> None:
        record = self._record()
        versions = dict(self.asking.machine.versions) if self.asking is not None else {}

        def kept(why: str) -> None:
            if not why and self.asking is not None and self.alive:
                self.asking.machine.kept(versions)
            then(why)

        self._below.keep(record, kept)

    # --- one task after the other -----------------------------------------------------------------------------------

    def work(self) -> None:
        if self._task is not None or not self.alive:
            return
        task = self.machine.next()
        if self.machine.life.unclear and not self._is_unclear:
            self._is_unclear = True
            self._above.history.violated(f"the life of {self.cluster} has no such edge: {self.machine.life.unclear}")
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

    def _carry_out(self, task: ClusterTask, then: Callable[..., None]) -> None:
        machine, below = self.machine, self._below
        match task:
            case ReadRecord():
                self._saved = saved = below.kept()
                facts = RecordFacts(saved.serial, saved.moved, saved.worker is not None) if saved is not None else None
                machine.found(facts, below.moves_known())
                self._next()
            case Restore(is_in):
                self._restore(is_in)
                self._next()
            case JoinAbove(resumes):
                self._join(task, resumes=resumes)
            case KeepRecord():
                self._keep(then)
            case FollowBelow():
                self._follow()
                then()
            case TakeRounds(rounds):
                assert self.worker is not None
                self._rounds_left, self._begun = rounds, self.worker.begun
                self._take_one()
            case TakeRest():
                assert self.worker is not None
                self._rounds_left = int(any(state.unsent for state in self.worker.fragments))
                self._begun = self.worker.begun
                self._take_one()
            case SettleAbove() | ContributeRest():
                assert self.worker is not None
                self.worker.sync()
            case LeaveAbove():
                assert self.worker is not None
                if self.worker.left:
                    self._exchanged()
                else:
                    self.worker.finish()
            case MoveBelow(serial, fragments):
                below.move(serial, fragments, self._change, then)
            case MarkMoved():
                self._before = [self._s(f) for f in self._fragments]
                then()
            case ReleaseMembers():
                below.release()
                then()
            case EndBelow():
                below.end()
                then()
            case Rest(seconds):
                self.later(seconds, then)
            case GoAlone():
                for worker in self.workers:
                    worker.kill()
                below.release()
                then()
            case LetGo() | Withdraw():
                raise AssertionError("nothing is offered")

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
                assert self.worker is not None
                self.worker.let_go()
                self._offered()
            case _:  # it is withdrawn: the exchange ends with an error, and so does what it was part of
                self.machine.done()
                self._is_offering = False
                if self.worker is not None:
                    self.worker.kill()
                self._reported_failure()

    def _offered(self, why: str = "") -> None:
        if not (self._is_offering and self.alive):
            return
        if why:
            self.machine.failed(why)
        else:
            self.machine.done()
        self._offer()

    def _reported_failure(self) -> None:
        task = self._task
        if task is not None:
            self._reported(task, self.machine.failure)

    # --- up -------------------------------------------------------------------------------------------------------

    def _join(self, task: JoinAbove, *, resumes: bool) -> None:
        saved = self._saved.worker if resumes and self._saved is not None else None
        gives_up = not resumes and (self._saved.worker is not None if self._saved is not None else not self._is_new)
        if gives_up and self.asking is not None:
            self.asking.machine.begin(self._versions, gives_up=True)
        self._instance += 1
        worker = self.worker_type(self, self._instance, self._above, self._agenda, self._rng, saved)
        self.workers.append(worker)

        def give_up() -> None:
            if self._task is task and self.worker is None:
                self._above.history.faults["join_failed"] += 1
                worker.kill()
                self._reported(task, "nobody answers")

        self.later(JOIN_TIMEOUT_S, give_up)

    def rests(self) -> None:
        """The worker above waits for nothing, or has left. (A real one goes on only after what it sent is let go.)"""
        self._is_resting = self._is_offering
        if self._is_offering:
            return
        task = self._task
        match task:
            case JoinAbove(resumes):
                self.worker = self.workers[-1]
                self._settle_data()
                if self.asking is not None:
                    self.asking.look()
                if self.worker.overtaken and self._below.has_newest():
                    self._above.history.violated(f"{self.cluster} sent what the newest record does not know of")
                for fragment in self.worker.overtaken:
                    self._before[fragment] = self._below.model(fragment)
                    self.worker.discarded |= {(fragment, step) for step in self._change(fragment)[1]}
                saved = self._saved.worker if resumes and self._saved is not None else None
                under_way = [f for f in saved.fragments if f.in_flight or f.late] if saved is not None else []
                self._above.history.faults["successor"] += saved is not None
                self._above.history.faults["unsettled"] += bool(under_way)
                self.machine.joined(self._moving(), unsettled=bool(under_way))
                self._next()
            case TakeRounds() | TakeRest():
                self._take_one()
            case SettleAbove() | ContributeRest() | LeaveAbove():
                self._exchanged()
            case _:
                pass  # an order to exchange, while nothing is asked of it

    def _take_one(self) -> None:
        """So many rounds have closed. However many: what they did goes up at once."""
        worker = self.worker
        assert worker is not None
        if self._rounds_left and worker.begun == self._begun and not worker.left:
            self._rounds_left -= 1
            worker.take_round()
        else:
            self._exchanged()

    def _exchanged(self) -> None:
        worker = self.worker
        assert worker is not None
        self._settle_data()
        deferred = worker.machine.state.metrics.offline_exchanges
        self.machine.exchanged(self._moving(), deferred=deferred, told_to_end=worker.is_told_to_end)
        self._next()

    # --- S and B --------------------------------------------------------------------------------------------------

    def _s(self, fragment: int) -> Model:
        if self.worker is None:
            return self._shadow[fragment]
        return self.worker.agreed(fragment) | self.worker.fragments[fragment].unsent.keys()

    def _moving(self) -> list[int]:
        return [f for f in self._fragments if self._s(f) != self._before[f]]

    def _change(self, fragment: int) -> tuple[set[StepName], set[StepName]]:
        s, b = self._s(fragment), self._before[fragment]
        return set(s - b), set(b - s)

    def _follow(self) -> None:
        assert self.worker is not None
        self._before = [self._below.model(f) for f in self._fragments]
        for fragment, target in enumerate(self._before):
            self.worker.follow(fragment, target)
        if self.asking is not None:
            self.worker.trained(self.asking.machine.followed(self._below.versions()))

    def _restore(self, is_in: tuple[int, ...]) -> None:
        saved = self._saved
        assert saved is not None
        self._shadow = list(saved.shadow)
        self._before = [saved.shadow[f] if f in is_in else saved.before[f] for f in self._fragments]
        if self.asking is not None:
            self.asking.machine.load_state(deepcopy(dict(saved.data)))
        self.machine.restored(self._moving(), rounds=saved.rounds + self._below.rounds_since(saved.version))

    def _record(self) -> SimLeaderRecord:
        machine, worker = self.machine, self.worker
        return SimLeaderRecord(
            worker=worker.saved_now() if worker is not None else None,
            shadow=tuple(self._s(f) for f in self._fragments),
            before=tuple(self._before),
            serial=machine.serial,
            moved=dict(machine.moved),
            version=self._below.version(),
            rounds=machine.rounds,
            data=deepcopy(self.asking.machine.state()) if self.asking is not None else {},
        )


def copied(record: SimLeaderRecord | None) -> SimLeaderRecord | None:
    """What one process keeps, another does not change."""
    return replace(record, worker=deepcopy(record.worker)) if record is not None else None
