"""The rounds thread: carries out what follows a decision, one task at a time, on tensors and on the disk.

Which task comes next, and what happens if the disk refuses it: coordination/server/commits.py. The thread holds no lock
while it works; only the end of a round is announced under the lock that guards the coordinator.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from ..coordination.server.commits import (
    AddContributions,
    AnnounceRound,
    Commits,
    CutJournal,
    ReportEnd,
    TakeStep,
    Task,
    WriteCheckpoint,
    WriteRecord,
)
from ..coordination.server.effects import Accumulate
from ..core.robust import ScreenVerdict
from ..core.watch import watched
from ..errors import ModelError, ServerError
from ..types import Participant, Watched
from .intake import Intake
from .outer_state import with_lr
from .persistence import RunWriter, SteppedRound, smaller_than_mean
from .run import Run
from .store import Addend, FragmentStore

log = logging.getLogger(__name__)

GATHER_S = 0.1  # contributions that come within such a time are added in one pass


class RoundsThread:
    """`lock` guards the coordinator and the commits. `on_disk` is told what the disk refused, and with None that it
    works again; `on_failure` that the model may be half done; `flush` that the coordinator has new effects."""

    def __init__(
        self,
        run: Run,
        commits: Commits,
        intake: Intake,
        writer: RunWriter,
        lock: threading.RLock,
        clock: Callable[[], float],
        *,
        flush: Callable[[], None],
        on_disk: Callable[[OSError | None], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._run, self._commits, self._intake, self._writer = run, commits, intake, writer
        self._clock, self._flush, self._on_disk, self._on_failure = clock, flush, on_disk, on_failure
        self.progress = threading.Condition(lock)  # something was written
        self.saves: dict[int, Path | ServerError] = {}  # what became of each save, by its ticket
        self.work = threading.Condition(lock)  # there may be something to do
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._carry_out_all, name="outerstep-rounds", daemon=True)
        self._looks: list[Callable[[], None]] = []  # what is to be done between two tasks
        self._stepped: SteppedRound | None = None  # the round that is being closed
        self._in_trouble = False
        self._takes_pushes = run.config.delayed_nesterov > 0

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def catch_up(self) -> None:
        """Carry out what there is in this thread, if the other has not started or has ended."""
        while not self._thread.is_alive():
            with self.work:
                task = self._commits.next()
            if task is None:
                return
            self._attempt(task)

    def look(self, look: Callable[[], None]) -> None:
        """Call `look` where nothing moves the model meanwhile; returns after that."""
        if not self._thread.is_alive():
            look()
            return
        seen = threading.Event()

        def looking() -> None:
            try:
                look()
            finally:
                seen.set()

        with self.work:
            self._looks.append(looking)
            self.work.notify()
        seen.wait()

    def stop(self) -> None:
        """Finish what was decided, then end; at once if the disk is in trouble."""
        with self.work:
            self._commits.stop()
            self.work.notify()
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- in the thread --------------------------------------------------------------------------------------------

    def _carry_out_all(self) -> None:
        task: Task | None = None
        try:
            while True:
                with self.work:
                    while not self._looks and (task := self._commits.next()) is None and not self._commits.has_ended:
                        self.progress.notify_all()  # a note may not have been needed
                        # If nothing comes for a moment, or somebody waits for their room, contributions that wait are
                        # added first.
                        patience_s = GATHER_S if self._commits.can_gather else None
                        if self._commits.must_gather or not self.work.wait(patience_s):
                            self._commits.gather()
                    looks, self._looks = self._looks, []
                for look in looks:
                    look()
                if looks:
                    continue
                if task is None:
                    break
                self._attempt(task)
        except Exception as error:  # the model may be half done: say so to everybody and do nothing more
            log.exception("the server cannot continue")
            self._on_failure(f"{type(task).__name__} failed: {type(error).__name__}: {error}")
        if self._commits.gave_up:
            log.warning("stopping although the disk is in trouble: it holds the state before the last round")
        with self.progress:
            if task is not None:
                self._commits.abandon()
            self.progress.notify_all()

    def _attempt(self, task: Task) -> None:
        size_bytes, pause_s, refused = 0, None, None
        try:
            size_bytes = self._carry_out(task)
        except OSError as error:
            refused = error
        with self.progress:
            if refused is None:
                self._commits.done(size_bytes)
            else:
                pause_s = self._commits.failed()
            self.progress.notify_all()
        if pause_s is not None:
            self._in_trouble = True
            self._on_disk(refused)
            self._stopping.wait(pause_s)
        elif self._in_trouble and refused is None:
            self._in_trouble = False
            self._on_disk(None)

    def _carry_out(self, task: Task) -> int:
        """Returns the bytes that a record has."""
        match task:
            case AddContributions():
                store = self._run.stores[task.fragment]
                store.accumulate(task.version, [self._addend(accepted) for accepted in task.accepted])
                with self.work:
                    self._free(task.freed)
                    self._flush()  # those whose turn it is now
            case TakeStep():
                self._stepped = self._step(task)
            case WriteRecord():
                return self._writer.append(task.remembered, self._stepped if task.closing is not None else None)
            case AnnounceRound():
                self._announce(task)
            case WriteCheckpoint():
                self._checkpoint(task)
            case CutJournal():
                self._writer.cut(task.up_to)
            case ReportEnd():
                self._writer.report_end(task)
        return 0

    def _step(self, task: TakeStep) -> SteppedRound:
        run, closing, verdict, participants = self._run, task.closing, None, task.closing.participants
        assert run.optimizer is not None
        store, addends, recorded = run.stores[closing.fragment], list[Addend](), list[Addend]()
        if closing.from_above:
            moved = run.from_above[closing.fragment].move(store.targets_on_host())
            return SteppedRound(store, store.move_to(closing.version, moved, self._clock()), (), [], None)
        if closing.outer_lr is not None:
            run.optimizer = with_lr(run.optimizer, closing.outer_lr)
        if run.coordinator.rules.aggregation.is_plain:
            addends = [self._addend(accepted) for accepted in task.taken]
            recorded = self._recorded(task, addends, store.numel)
        else:
            verdict = self._combine(store, task)
            # Weight 0 for a worker that a screen refused or the rule did not choose.
            out = {*verdict.refused, *verdict.unused} if verdict is not None else set()
            participants = tuple(replace(p, weight=0.0) if p.worker_id in out else p for p in participants)
        keep_mean = self._commits.journals and not recorded
        made = store.close(closing.version, run.optimizer, addends, self._clock(), keep_mean=keep_mean)
        made.seen = _seen(verdict, closing.participants) if verdict is not None else None
        return SteppedRound(store, made, participants, recorded, verdict, closing.outer_lr)

    def _recorded(self, task: TakeStep, addends: list[Addend], numel: int) -> list[Addend]:
        """The contributions, in the order in which they are added, if the round's record is to be made of them."""
        if self._takes_pushes:
            return addends
        everything = [*map(self._addend, task.added), *addends]
        is_possible = self._commits.journals and not task.freed
        return everything if is_possible and smaller_than_mean(everything, numel) else []

    def _combine(self, store: FragmentStore, task: TakeStep) -> ScreenVerdict | None:
        """All contributions, by the run's rule. None: there is none, or none is to be taken."""
        closing = task.closing
        newest = {
            accepted.key.worker_id: accepted
            for accepted in sorted(task.accepted, key=lambda accepted: accepted.key.sequence)
            if accepted.weight > 0.0
        }
        if all(accepted.key in closing.left_out for accepted in newest.values()):
            return None
        # Nobody may know beforehand whom it will share a bucket with, unless the run is to be the same each time.
        seed = f"{closing.fragment}/{closing.version}" if self._run.config.deterministic else secrets.token_hex(16)
        contributions = {
            worker_id: None if accepted.key in closing.left_out else self._addend(accepted)
            for worker_id, accepted in newest.items()
        }
        turned_away = dict.fromkeys(closing.turned_away - contributions.keys())
        rule = self._run.coordinator.rules.aggregation
        return store.combine(closing.version, rule, {**turned_away, **contributions}, seed)

    def _addend(self, accepted: Accumulate) -> Addend:
        weight = accepted.scale if self._takes_pushes else accepted.weight
        room = self._intake.room(accepted.key)
        return Addend(room.view, weight, accepted.base_version, accepted.sections, accepted.codec, room.used)

    def _free(self, accepted: Iterable[Accumulate]) -> None:
        for one in accepted:
            self._intake.free(one.key)
            self._run.coordinator.uploads.drop(one.key)

    def _announce(self, task: AnnounceRound) -> None:
        """Both ends of a version at once: a worker that is told of it finds it."""
        stepped, self._stepped = self._stepped, None
        assert stepped is not None
        stepped.addends.clear()  # their memory can be used again
        coordinator, store, verdict = self._run.coordinator, stepped.store, stepped.verdict
        with self.work:
            now = self._clock()
            self._free(task.step.held)
            if verdict is not None:
                coordinator.note_verdict(store.index, stepped.made.version, verdict.refused, verdict.unused)
            coordinator.published(store.publish(stepped.made, stepped.participants, now).agreement, now)
            self._run.on_published(store)
            if stepped.made.from_above:
                self._run.from_above.pop(store.index).published.set()
            self._flush()

    def _checkpoint(self, task: WriteCheckpoint) -> None:
        made: Path | ServerError
        refused: Exception | None = None
        try:
            made = self._writer.checkpoint(task)
        except (OSError, ModelError) as error:
            if task.required:
                raise
            made, refused = self._writer.checkpoint_failed(task, error), None if task.place else error
        if task.ticket:
            self.saves[task.ticket] = made
        if refused is not None:
            raise OSError(str(refused)) from refused


def _seen(verdict: ScreenVerdict, participants: Iterable[Participant]) -> Watched | None:
    """How similar the accepted contributions were, whatever the rule made of them. None: a norm is not known, or the
    aggregate is their mean, which tells it by itself."""
    by_id = {p.worker_id: p for p in sorted(participants, key=lambda p: p.sequence) if p.weight > 0.0}
    accepted = [by_id[worker_id] for worker_id in verdict.accepted if worker_id in by_id]
    norms = [p.norm for p in accepted if p.norm is not None]
    if verdict.mean_norm is None or len(norms) < len(verdict.accepted):
        return None
    return watched(None, norms, [p.weight for p in accepted], verdict.mean_norm)
