"""A simulated leader: the real machine of a cluster, in virtual time, over sets of steps.

T, Θ, S and B (carried_leader.py) are sets of named steps: T is `SimBelow.model`, Θ the version that the worker above
holds. A leader dies, is fenced, hands over, and is followed by one that reads its record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..coordination.layers.machine import RecordFacts
from ..coordination.layers.tasks import JoinAbove
from ..coordination.worker.effects import Send
from ..coordination.worker.machine import Units
from ..coordination.worker.units import LeaseRequest
from ..errors import Fenced, Kicked, OuterstepError
from ..types import Answer, Trained
from .agenda import Agenda
from .carried_leader import CarriedLeader, CarriedUpward, Then
from .history import StepName
from .layer_history import LayerHistory, Model
from .leader_data import SimDataBelow, SimLeaseAsking
from .network import Network
from .scenario import Scenario
from .server import SimServer
from .worker import Named, SimSaved, SimWorker

JOIN_TIMEOUT_S = 60.0


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

    record_may_be_old: bool

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


class SimUpward(CarriedUpward[Named], SimWorker):
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
        self._led_by(leader)
        self.overtaken: list[int] = []  # fragments of which the server has more than the record knows of
        place = (above.scenario, agenda, above.network, above.server, above.history, rng)
        SimWorker.__init__(self, 0, instance, 0, *place, deepcopy(saved), name=leader.cluster, link=leader.link)

    # --- what the leader asks for -------------------------------------------------------------------------------------

    def take_round(self) -> None:
        self.steps_taken += 1
        super().take_round()

    @property
    def has_unsent(self) -> bool:
        return any(state.unsent for state in self.fragments)

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

    @property
    def contributed(self) -> list[int]:
        """The fragments of which the server has something from this cluster."""
        return [i for i, state in enumerate(self._session.joined.fragments) if state.last_sequence]

    def saved_now(self) -> SimSaved:
        self._save()
        assert self.saved is not None
        return self.saved

    def _resume(self, saved: SimSaved) -> None:
        self.overtaken = self._overtaken(saved)
        super()._resume(saved)

    def lease(self, request: LeaseRequest, then: Callable[[Answer | OuterstepError], None]) -> None:
        self._carrier.fire(request.message(self._session.head), then)

    def trained(self, units: Units) -> None:
        self.machine.count(0, 0, units)

    def _describe(self, send: Send) -> tuple[Trained, ...]:
        return self._leader.describe(send.units)

    # --- how it differs from one that trains -----------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        """The steps of a round are as old as the worker's step that it is: T may have been followed before that."""
        state = self.fragments[send.fragment]
        state.unsent = {step: max(on, send.oldest_base) for step, on in state.unsent.items()}
        super()._send(send)

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


class SimLeader(CarriedLeader[Model]):
    """Of one process. `link`: its way to the server above."""

    worker: SimUpward | None
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
        super().__init__(cluster, agenda, [below.model(f) for f in range(above.scenario.fragments)], wait_s)
        self.link, self._instance = link, instance
        self._below, self._above, self._rng = below, above, rng
        self.workers: list[SimUpward] = []  # tries to join, and the one that did
        self._shadow: list[Model] = list(self._before)  # S, while there is no worker
        self._saved: SimLeaderRecord | None = None
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

    def _violated(self, rule: str) -> None:
        self._above.history.violated(rule)

    # --- data ---------------------------------------------------------------------------------------------------------

    def _ask(self, request: LeaseRequest, then: Callable[[Answer | OuterstepError], None]) -> None:
        if self.worker is not None and self.worker.alive:
            self.worker.lease(request, then)

    def describe(self, units: Units) -> tuple[Trained, ...]:
        return self.asking.machine.describe(units) if self.asking is not None else ()

    def _settle_data(self) -> None:
        if self.asking is not None and self.worker is not None:
            self.asking.machine.exchanged(self.worker.machine.state)

    # --- the layer below ----------------------------------------------------------------------------------------------

    def _read(self) -> tuple[RecordFacts | None, Mapping[int, int]]:
        self._saved = saved = self._below.kept()
        facts = RecordFacts(saved.serial, saved.moved, saved.worker is not None) if saved is not None else None
        return facts, self._below.moves_known()

    def _keep(self, then: Then) -> None:
        record = self._record()
        versions = dict(self.asking.machine.versions) if self.asking is not None else {}

        def kept(why: str) -> None:
            if not why and self.asking is not None and self.alive:
                self.asking.machine.kept(versions)
            then(why)

        self._below.keep(record, kept)

    def _move(self, serial: int, fragments: tuple[int, ...], then: Then) -> None:
        self._below.move(serial, fragments, self._change, then)

    def _hold(self, limit_s: float) -> None:
        self._above.history.faults["held"] += 1
        self._below.hold(limit_s)

    def _release(self) -> None:
        self._below.release()

    def _end_below(self) -> None:
        self._below.end()

    # --- up -----------------------------------------------------------------------------------------------------------

    def _join(self, task: JoinAbove) -> None:
        saved = self._saved.worker if task.resumes and self._saved is not None else None
        has_left_a_worker = self._saved.worker is not None if self._saved is not None else not self._is_new
        if has_left_a_worker and not task.resumes and self.asking is not None:
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

    def _joined(self, task: JoinAbove) -> None:
        self.worker = self.workers[-1]
        if self._below.record_may_be_old and self._saved is not None and self._saved.worker is None:
            self.worker.overtaken = self.worker.contributed  # whoever led when it joined has died, with its record
        if self.worker.overtaken and self.asking is not None:
            self.asking.machine.begin(self._below.versions(), gives_up=True)
        self._settle_data()
        if self.asking is not None:
            self.asking.look()
        if self.worker.overtaken and self._below.has_newest():
            self._above.history.violated(f"{self.cluster} sent what the newest record does not know of")
        for fragment in self.worker.overtaken:
            self._before[fragment] = self._below.model(fragment)
            self.worker.discarded |= {(fragment, step) for step in self._change(fragment)[1]}
        saved = self._saved.worker if task.resumes and self._saved is not None else None
        under_way = [f for f in saved.fragments if f.in_flight or f.late] if saved is not None else []
        self._above.history.faults["successor"] += saved is not None
        self._above.history.faults["unsettled"] += bool(under_way)
        self.machine.joined(self._moving(), unsettled=bool(under_way))

    def _exchanged(self) -> None:
        self._settle_data()
        super()._exchanged()

    def _end_above(self) -> None:
        for worker in self.workers:
            worker.kill()

    # --- S and B --------------------------------------------------------------------------------------------------

    def _s(self, fragment: int) -> Model:
        if self.worker is None:
            return self._shadow[fragment]
        return self.worker.agreed(fragment) | self.worker.fragments[fragment].unsent.keys()

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
