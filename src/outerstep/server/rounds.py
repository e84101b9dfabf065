"""The rounds thread: carries out the coordinator's heavy effects, in the order in which they were decided.

Contributions are added, rounds closed, records and checkpoints written by this one thread. So a sum never misses a
contribution that was accepted before its round closed, a round ends in one place, and between two rounds nothing moves:
what is written at a place in the queue holds exactly what was decided before it. It holds no lock while it works; only
the end of a round is announced under the lock that guards the coordinator.

What cannot be written is tried again until it can: the round has been computed, but nobody is told of it.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..coordination.backoff import Backoff
from ..coordination.server.aggregation import Aggregation
from ..coordination.server.effects import Accumulate, CloseRound
from ..coordination.server.remembered import Remembered
from ..core.delayed import DelayedNesterov
from ..core.robust import ScreenVerdict
from ..errors import Busy, ServerError, ServerFailed
from ..types import ContributionKey
from . import records
from .keeping import snapshot, with_settings
from .publish import NextVersion
from .store import Addend, FragmentStore

if TYPE_CHECKING:
    from .service import ParameterService

log = logging.getLogger(__name__)

DISK_RETRIES = Backoff(0.25, 5.0)  # how often a disk that is full or broken is tried again
GATHER_S = 0.1  # contributions that come within such a time are added in one pass
NOTE_PATIENCE_S = 5.0  # how long an answer waits for what it says to be on the disk


@dataclass(frozen=True)
class _Save:
    """Somebody asks for the state to be written, and waits to hear where. `remembered`: as of the decisions before."""

    reason: str
    remembered: Remembered
    done: queue.SimpleQueue[Path | ServerError] = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True)
class _Note:
    """Somebody joined, or an operator gave an order: to be written, though no round has closed."""

    remembered: Remembered


Job = Accumulate | CloseRound | _Note | _Save


class _GivenUp(Exception):
    """The server is to stop, and what was to be written could not be."""


def _without(effect: CloseRound, verdict: ScreenVerdict | None) -> CloseRound:
    """With weight 0 for whoever a screen refused or the rule did not choose."""
    out = {*verdict.refused, *verdict.unused} if verdict is not None else set()
    participants = tuple(replace(p, weight=0.0) if p.worker_id in out else p for p in effect.participants)
    return dataclasses.replace(effect, participants=participants)


class RoundsThread:
    def __init__(self, service: ParameterService) -> None:
        self._service = service
        self._pending: dict[int, list[Accumulate]] = {}  # accepted and not added yet, by fragment
        self._work: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name="outerstep-rounds", daemon=True)
        self._asked = 0  # records that were asked for, one after the other
        self._noted = 0  # the last of them that is a note
        self._written = 0  # records that are on the disk, or need not be
        self._progress = threading.Condition()  # guards `_written`
        self._stopping = threading.Event()
        self.gave_up = False  # a round was computed and could not be written: memory is ahead of the disk

    def start(self) -> None:
        self._thread.start()

    def put(self, effect: Accumulate | CloseRound) -> None:
        """With the service's lock held, as it orders the decisions."""
        if isinstance(effect, CloseRound):
            self._asked += 1
        self._work.put((self._asked, effect))

    def note(self) -> int:
        """With the lock held: write down who is here and what was ordered. Returns what to wait for."""
        if self._service.keeper.mode == "none":
            return 0
        self._asked += 1
        self._noted = self._asked
        job = _Note(self._service.coordinator.remember())
        if self._thread.ident is None:  # nobody works yet
            self._do(self._asked, job)
        else:
            self._work.put((self._asked, job))
        return self._noted

    @property
    def noted(self) -> int:
        """The last note that was asked for: who says something again that was noted waits for it again."""
        return self._noted

    def wait_for(self, number: int) -> None:
        """Until what was noted is on the disk. Not for ever: who asks is told why it takes so long, and asks again."""
        with self._progress:
            if self._progress.wait_for(lambda: self._written >= number, NOTE_PATIENCE_S):
                return
        why = self._service.trouble or self._service.failure or "it is being written"
        raise Busy(f"not on the server's disk yet: {why}", hint="ask again", retry_after_s=1.0)

    def stop(self) -> None:
        """Finish what was decided, then end; at once if the disk is in trouble."""
        self._stopping.set()
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def save(self, reason: str) -> Path | ServerError:
        """Write the state between two rounds; from any thread."""
        with self._service.changed:  # so that it takes its place among the decisions
            job = _Save(reason, self._service.coordinator.remember())
            if self._thread.is_alive():
                self._work.put((self._asked, job))
        if not self._thread.is_alive():
            return self._save(reason, job.remembered)
        while True:
            try:
                return job.done.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive():
                    return ServerFailed(f"the server has stopped: {self._service.failure or 'it was asked to'}")
                if self._service.trouble:
                    return ServerError(f"saving has to wait: {self._service.trouble}")

    # --- in the thread --------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while True:
            job: Job | None = None
            try:
                taken = self._next()
                if taken is None:
                    break
                number, job = taken
                self._do(number, job)
            except _GivenUp:
                log.warning(
                    "stopping although the disk is in trouble: what it holds is the state before the last round"
                )
                self._disappoint(job)
                return
            except Exception as error:  # the model may be half done: say so to everybody and do nothing more
                log.exception("the server cannot go on")
                what = type(job) if job is not None else Accumulate
                self._service.fail(f"{what.__name__} failed: {type(error).__name__}: {error}")
                self._disappoint(job)
                return
        self._disappoint(None)

    def _next(self) -> tuple[int, Job] | None:
        """What to do next. If nothing comes for a moment, contributions that wait are added first: those of machines
        near each other come almost together, and the end of their round right after them."""
        try:
            return self._work.get(timeout=GATHER_S)
        except queue.Empty:
            self._accumulate()
            return self._work.get()

    def _do(self, number: int, job: Job) -> None:
        match job:
            case Accumulate():
                self._pending.setdefault(job.key.fragment, []).append(job)
            case CloseRound():
                self._close(job, number)
            case _Note():
                # A later record says all that this one would; but the first is what all others build on.
                if number == self._asked or self._service.keeper.base is None:
                    self._write_note(job.remembered)
                    self._is_written(number)
            case _Save():
                job.done.put(self._save(job.reason, job.remembered))

    def _disappoint(self, last: Job | None) -> None:
        """This thread ends; nobody who asked for a save may go on waiting for it."""
        left = [last]
        while not self._work.empty():
            taken = self._work.get()
            left.append(taken[1] if taken is not None else None)
        for job in left:
            if isinstance(job, _Save):
                job.done.put(ServerFailed(f"the server is stopping: {self._service.failure or 'it was asked to'}"))

    def _accumulate(self) -> None:
        """Nothing else is to be done: add what has come, and free its bytes. Together, so that the sum goes through
        the processor once for all of it; what comes with the end of its round is added by the step itself."""
        if self._keeps_contributions:
            return
        for fragment, pending in self._pending.items():
            waiting = [accepted for accepted in pending if not accepted.keep]
            if not waiting:
                continue
            addends = [self._addend(accepted) for accepted in waiting]
            self._service.stores[fragment].accumulate(waiting[0].version, addends)
            for accepted in waiting:
                self._free(accepted.key)
            self._pending[fragment] = [accepted for accepted in pending if accepted.keep]

    @property
    def _keeps_contributions(self) -> bool:
        """Until their round closes. Delayed Nesterov: its momentum moves with every push, and between two rounds model
        and momentum must belong together. The deterministic mode: their order is known only then. A rule that compares
        contributions needs all of them."""
        return self._service.config.deterministic or self._takes_pushes or not self._aggregation.is_plain

    @property
    def _aggregation(self) -> Aggregation:
        return self._service.coordinator.rules.aggregation

    @property
    def _takes_pushes(self) -> bool:
        return isinstance(self._service.optimizer, DelayedNesterov)

    def _close(self, effect: CloseRound, number: int) -> None:
        service, waiting = self._service, self._pending.pop(effect.fragment, [])
        assert service.optimizer is not None
        if service.config.deterministic:
            waiting.sort(key=lambda accepted: (accepted.key.worker_id, accepted.key.sequence))
        store, verdict = service.stores[effect.fragment], None
        if self._aggregation.is_plain:
            taken = [accepted for accepted in waiting if accepted.key not in effect.left_out]
        else:
            taken, verdict = [], self._combine(store, effect, waiting)
            effect = _without(effect, verdict)
        addends = [self._addend(accepted) for accepted in taken]
        made = store.close(
            effect.version, service.optimizer, addends, service.clock(), keep_mean=service.keeper.journals
        )
        if service.keeper.journals:
            self._write_round(effect, made, addends)
        self._is_written(number)
        del addends  # their rooms can be used again
        for accepted in waiting:
            self._free(accepted.key)
        service.announce(store, made, effect.participants, verdict)
        if effect.remembered is not None and service.keeper.is_due(
            min(effect.remembered.versions), service.model_bytes
        ):
            self._save("periodic", effect.remembered)

    def _combine(self, store: FragmentStore, effect: CloseRound, waiting: Sequence[Accumulate]) -> ScreenVerdict | None:
        """By the run's rule, what everybody brought. None: nobody brought anything, or nothing of it is to be taken."""
        newest = {
            accepted.key.worker_id: accepted
            for accepted in sorted(waiting, key=lambda accepted: accepted.key.sequence)
            if accepted.weight > 0.0
        }
        if all(accepted.key in effect.left_out for accepted in newest.values()):
            return None
        # Nobody may know beforehand whom it will share a bucket with, unless the run is to be the same each time.
        seed = f"{effect.fragment}/{effect.version}" if self._service.config.deterministic else secrets.token_hex(16)
        contributions = {
            worker_id: None if accepted.key in effect.left_out else self._addend(accepted)
            for worker_id, accepted in newest.items()
        }
        turned_away = dict.fromkeys(effect.turned_away - contributions.keys())
        return store.combine(effect.version, self._aggregation, {**turned_away, **contributions}, seed)

    def _addend(self, accepted: Accumulate) -> Addend:
        weight = accepted.scale if self._takes_pushes else accepted.weight
        payload = self._service.intake.payload(accepted.key)
        return Addend(payload, weight, accepted.base_version, accepted.sections)

    def _free(self, key: ContributionKey) -> None:
        with self._service.changed:
            self._service.intake.free(key)
            self._service.coordinator.freed(key)

    # --- to the disk ----------------------------------------------------------------------------------------------

    def _write_round(self, effect: CloseRound, made: NextVersion, addends: list[Addend]) -> None:
        assert effect.remembered is not None
        pushes = [addend for addend in addends if addend.weight > 0.0] if self._takes_pushes else None
        remembered = with_settings(effect.remembered, self._service.config)
        head, payload = records.of_round(remembered, effect.fragment, made, effect.participants, pushes)
        self._until_written(lambda: self._service.keeper.append(head, payload))

    def _write_note(self, remembered: Remembered) -> None:
        """The first one is a checkpoint: nobody hears of a run that is not on the disk."""
        keeper, noted = self._service.keeper, with_settings(remembered, self._service.config)
        if keeper.base is None:
            state = snapshot(self._service, noted)
            self._until_written(lambda: keeper.checkpoint(state, "the run begins here"))
        elif keeper.journals:
            self._until_written(lambda: keeper.append(records.note(noted)))

    def _save(self, reason: str, remembered: Remembered) -> Path | ServerError:
        state = snapshot(self._service, with_settings(remembered, self._service.config))
        return self._service.keeper.keep(state, reason)

    def _until_written(self, write: Callable[[], object]) -> None:
        for failures in count():
            try:
                write()
                break
            except OSError as error:
                self._service.disk_fails(error)
                if self._stopping.wait(DISK_RETRIES.longest_pause_s(failures)):
                    self.gave_up = True
                    raise _GivenUp from error
        self._service.disk_works()

    def _is_written(self, number: int) -> None:
        with self._progress:
            self._written = number
            self._progress.notify_all()
