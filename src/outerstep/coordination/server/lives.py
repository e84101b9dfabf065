"""What a server's decisions mean for the life of each of its workers (layers/lifecycle.py has the table).

    worker.life.place                  # TRAINING (sync)

Nothing is decided here. The coordinator's effects say what happened: who came and went, whose contribution was taken,
which round closed. Each is fed to the lives that it concerns; a change of state is an event.

With a server there is no process group that another's fault, drain or join would break. So ROLLBACK is a worker's own:
what it had under way is dropped, and it stands idle, dead or in quarantine. RECEIVED_JOIN, and a drain that is only
noticed, are states of groups that share one (torchft).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...events import (
    DrainOrdered,
    DrainWithdrawn,
    GroupStateChanged,
    GroupStateUnclear,
    RunStarted,
    VersionPublished,
    WorkerDied,
    WorkerJoined,
    WorkerKicked,
    WorkerLeft,
    WorkerPardoned,
    WorkerQuarantined,
)
from ..layers.lifecycle import (
    BREAKS_DOWN,
    COMES_BACK,
    COMPUTING,
    EXIT,
    INIT,
    IS_TAKEN_IN,
    LEAVING,
    TARGETS,
    EdgeTable,
    GroupState,
    Happening,
    Lifecycle,
    NoSuchEdge,
    SubStep,
)
from .effects import Accumulate, CloseRound, Effect
from .membership import KnownWorker, Membership
from .rounds import Fragment

TO_SYNC: dict[SubStep, tuple[Happening, ...]] = {
    SubStep.COMPUTE: (Happening.STEP_DUE, Happening.QUORUM_DONE),
    SubStep.COMMIT: (Happening.NEXT_STEP, Happening.STEP_DUE, Happening.QUORUM_DONE),
    SubStep.FETCH_CHECKPOINT: (Happening.CHECKPOINT_RETURN,),
    SubStep.WAIT_BROADCAST: (Happening.GLOBAL_PUT_OFF, Happening.STEP_DUE, Happening.QUORUM_DONE),
    SubStep.FOLLOWER_COMMIT: (Happening.GLOBAL_COMMITTED, Happening.STEP_DUE, Happening.QUORUM_DONE),
}
"""By sub-step: what must have happened to a worker that trains when its contribution is taken. (In `sync` it has
contributed to another fragment: nothing more.)"""

FROM_ABOVE: dict[SubStep, tuple[Happening, ...]] = {
    SubStep.COMPUTE: (Happening.FOLLOW_GLOBAL, Happening.BROADCAST_RECEIVED),
    SubStep.WAIT_BROADCAST: (Happening.BROADCAST_RECEIVED,),
}
"""The same, when what a layer above has agreed on enters the run."""

PUBLISHED: dict[SubStep, tuple[Happening, ...]] = {
    SubStep.SYNC: (Happening.LOCAL_OK, Happening.GROUP_OK, Happening.NEXT_STEP),
    SubStep.COMMIT: (Happening.NEXT_STEP,),
}
"""The same, when all rounds that took its contributions are published."""

TAKES: dict[GroupState | None, tuple[Happening, ...]] = {
    GroupState.INIT: (Happening.FIRST_QUORUM,),
    GroupState.IDLE: (*COMES_BACK, *IS_TAKEN_IN),  # its quarantine is over
    GroupState.REJOIN: IS_TAKEN_IN,
}
"""By state: what must have happened to a worker that an open round waits for."""


class Lives:
    """Of everybody that the membership knows."""

    table: EdgeTable = TARGETS

    def __init__(self, members: Membership, *, asynchronous: bool) -> None:
        self._members, self._asynchronous = members, asynchronous
        self._waits_above = False
        self._before: dict[str, str] = {}  # state of those whose life has moved, before it did
        self._unclear: list[GroupStateUnclear] = []

    def heard(
        self, effects: Sequence[Effect], fragments: Sequence[Fragment], *, waits_above: bool
    ) -> list[GroupStateChanged | GroupStateUnclear]:
        """These have happened, in this order. `waits_above`: members wait for what a layer above agrees on."""
        for effect in effects:
            for worker in self._concerned(effect):
                self._happened(worker, effect)
        if waits_above is not self._waits_above:
            self._waits_above = waits_above
            self._follow_above()
        if any(isinstance(effect, WorkerJoined | RunStarted | CloseRound) for effect in effects):
            self._take_in(set().union(*(fragment.round.expected for fragment in fragments)))
        told: list[GroupStateChanged | GroupStateUnclear] = [*self._unclear]
        self._unclear.clear()
        moved, self._before = self._before, {}
        for worker_id, before in moved.items():
            moving = self._members.find(worker_id)
            if moving is not None and moving.life is not None and moving.life.place.state != before:
                told.append(GroupStateChanged(worker_id, str(moving.life.place.state), before))
        return told

    def resume(self, worker: KnownWorker, *, started: bool) -> None:
        """It was here before the server was restarted, and goes on: it trains, or waits for the run to start."""
        worker.life = Lifecycle(COMPUTING if started else INIT, self.table)

    def _feed(self, worker: KnownWorker, *happenings: Happening) -> None:
        """A happening that the table does not know is a bug of ours, which must not stop a server: it is told."""
        if worker.life is None:
            return
        self._before.setdefault(worker.worker_id, str(worker.life.place.state))
        try:
            worker.life.feed(*happenings)
        except NoSuchEdge as error:
            worker.life = None
            self._unclear.append(GroupStateUnclear(worker.worker_id, str(error)))

    # --- who is concerned, and how ----------------------------------------------------------------------------------

    def _concerned(self, effect: Effect) -> list[KnownWorker]:
        match effect:
            case CloseRound() | VersionPublished():
                return [worker for worker in self._members if worker.life is not None]
            case DrainOrdered() | DrainWithdrawn():
                ids = effect.workers
            case Accumulate():
                ids = [effect.key.worker_id]
            case WorkerJoined() | WorkerLeft() | WorkerDied() | WorkerKicked() | WorkerQuarantined() | WorkerPardoned():
                ids = [effect.worker]
            case _:
                return []
        return [worker for worker in map(self._members.find, ids) if worker is not None]

    def _happened(self, worker: KnownWorker, effect: Effect) -> None:
        if isinstance(effect, WorkerJoined):
            self._joined(worker)
        if worker.life is None or worker.life.place == EXIT:
            return
        match effect:
            case Accumulate():
                worker.unpublished[effect.key.fragment] = effect.version
                self._feed(worker, *TO_SYNC.get(worker.life.place.step, ()))
            case CloseRound():
                self._closed(worker, worker.life, effect)
            case VersionPublished():
                self._published(worker, worker.life, effect.agreement.fragment, effect.agreement.version)
            case DrainOrdered():
                self._feed(worker, Happening.DRAIN_SELF)
            case DrainWithdrawn() if worker.life.may(Happening.DRAIN_WITHDRAWN):
                self._feed(worker, Happening.DRAIN_WITHDRAWN)
            case WorkerDied() | WorkerQuarantined():
                self._break_down(worker, worker.life)
            case WorkerPardoned() if worker.live and worker.life.place.state is GroupState.IDLE:
                self._feed(worker, *COMES_BACK)
            case WorkerKicked():
                self._break_down(worker, worker.life)
                self._feed(worker, Happening.PREEMPTED)
            case WorkerLeft():
                self._left(worker, worker.life)

    # --- coming and going -------------------------------------------------------------------------------------------

    def _joined(self, worker: KnownWorker) -> None:
        life = worker.life
        if life is None or life.place == EXIT:  # a new life: what comes back under an old name has nothing of it
            self._before.setdefault(worker.worker_id, "")
            worker.life = Lifecycle(INIT, self.table)
            worker.unpublished.clear()
        else:
            self._break_down(worker, life)  # it was restarted, unless it was known to be dead
            self._feed(worker, *COMES_BACK)
        if any(command.kind == "drain" for command in worker.commands.values()):
            self._feed(worker, Happening.DRAIN_SELF)

    def _break_down(self, worker: KnownWorker, life: Lifecycle) -> None:
        if life.place.state is not GroupState.IDLE:
            self._feed(worker, *BREAKS_DOWN)

    def _left(self, worker: KnownWorker, life: Lifecycle) -> None:
        if life.place.state is GroupState.IDLE:
            self._feed(worker, Happening.PREEMPTED)
        elif life.place.state is GroupState.DRAINING:
            self._feed(worker, Happening.LEFT)
        else:
            self._feed(worker, Happening.DRAIN_SELF, Happening.LEFT)

    def _take_in(self, expected: set[str]) -> None:
        """Open rounds expect these workers now: those that have waited for that take part."""
        for worker in self._members:
            state = worker.life.place.state if worker.life is not None else None
            if state not in TAKES or not worker.live or worker.worker_id not in expected:
                continue
            self._feed(worker, *TAKES[state])
            if worker.unpublished and worker.life is not None:
                self._feed(worker, *TO_SYNC.get(worker.life.place.step, ()))

    # --- a round ----------------------------------------------------------------------------------------------------

    def _closed(self, worker: KnownWorker, life: Lifecycle, closed: CloseRound) -> None:
        if life.place.state is not GroupState.TRAINING:
            return
        if closed.from_above:
            self._feed(worker, *FROM_ABOVE.get(life.place.step, ()))
        elif closed.fragment not in worker.unpublished:
            if life.place.step is SubStep.COMPUTE and not self._asynchronous:  # there every round is another's
                self._feed(worker, Happening.NEED_HEAL)
        elif life.place.step is SubStep.SYNC and len(worker.unpublished) == 1:
            self._feed(worker, Happening.LOCAL_OK, Happening.GROUP_OK)

    def _published(self, worker: KnownWorker, life: Lifecycle, fragment: int, version: int) -> None:
        """Everybody may know it, so its contribution to it is settled, whether it was taken in or left out."""
        if life.place.step is SubStep.FOLLOWER_COMMIT:
            self._feed(worker, Happening.GLOBAL_COMMITTED)
        if worker.unpublished.get(fragment, version + 1) > version:
            return
        del worker.unpublished[fragment]
        if life.place == LEAVING:
            self._feed(worker, Happening.GROUP_OK)
        elif life.place.state is GroupState.TRAINING and not worker.unpublished:
            self._feed(worker, *PUBLISHED.get(life.place.step, ()))

    def _follow_above(self) -> None:
        """Members wait for the layer above, or do so no more."""
        for worker in self._members:
            step = worker.life.place.step if worker.life is not None else SubStep.NONE
            if self._waits_above and step is SubStep.COMPUTE:
                self._feed(worker, Happening.FOLLOW_GLOBAL)
            elif not self._waits_above and step is SubStep.WAIT_BROADCAST:
                self._feed(worker, Happening.GLOBAL_PUT_OFF)
