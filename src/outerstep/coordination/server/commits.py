"""What follows a decision: the server's tasks, their order, and when their results may be told.

The coordinator decides in microseconds. Adding contributions, stepping, writing and announcing take longer; one driver
(the rounds thread of the server, or the simulator) carries them out, one task at a time:

    task = commits.next()                  # the same task until it is done or dropped
    commits.done() or commits.failed()     # a task that must not be dropped is retried

    a version  TakeStep → WriteRecord → AnnounceRound → WriteCheckpoint → CutJournal (these two if one is due)
    a note     WriteRecord: membership, an order or a quarantine changed, and no round closed. The first note is a
               checkpoint; so is one that makes the journal long (each holds the whole ledger)
    a save     WriteCheckpoint → CutJournal: an operator asked for it
    an end     WriteCheckpoint → CutJournal → ReportEnd: all workers have left. (No checkpoint if there is nothing new.)

Jobs are carried out in the order of the decisions. So a sum never misses a contribution that was accepted before its
round closed, and a record holds exactly what was decided before it. Nobody hears of a round, and no answer that must
outlive the server is given, before the record is durable.

    durability "round"         each round is in the journal before anybody hears of it
               "checkpoint"    checkpoints only: a killed server resumes from the last one
               "none"          nothing, unless an operator asks for a checkpoint

The journal is kept back to the checkpoint before the last: if the last one is damaged, nothing is lost. The first round
after each start is followed by a checkpoint, so that there are two.

A record can be made of a round's contributions if the bytes of all of them are still held when it closes. Contributions
that are added early are held until then, if they will be smaller than the mean and nobody needs their room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ...events import GroupStateChanged, GroupStateUnclear, WorkerQuarantined
from ...tiling import ModelTiling
from ...types import Answer, Control, Heartbeat, Join, Lease, Leave, Offer
from ..backoff import Backoff
from .coordinator import Coordinator
from .effects import Accumulate, AllLeft, AskAgain, CloseRound, DropUpload, Effect
from .journal_length import LEAST_JOURNAL_BYTES, MODELS_IN_JOURNAL, MOST_RECORDS
from .remembered import Remembered

DISK_RETRIES = Backoff(0.25, 5.0)  # of a disk that is full or broken
LEAST_OF_A_ROUND = 1 / 8  # of its fragment's bytes that a round counts for, however few its record has: it is replayed
OUTLIVE = ("kick", "pardon", "release", "plan", "budget", "forget", "shutdown")  # orders that hold after a restart

Durability = Literal["round", "checkpoint", "none"]


@dataclass(frozen=True)
class AddContributions:
    """Add these to the sum of the round that will make `version`; then free the bytes of `freed`, which are in it."""

    fragment: int
    version: int
    accepted: tuple[Accumulate, ...]
    freed: tuple[Accumulate, ...] = ()


@dataclass(frozen=True)
class TakeStep:
    """Take the outer step over the sum and `taken`. `accepted`: all contributions that were not added before, also
    those that were left out; `added`: those that are in the sum, and whose bytes are still there; `freed`: there were
    others. The bytes stay until the round is announced."""

    number: int
    closing: CloseRound
    accepted: tuple[Accumulate, ...]
    added: tuple[Accumulate, ...] = ()
    freed: bool = False

    @property
    def taken(self) -> list[Accumulate]:
        return [accepted for accepted in self.accepted if accepted.key not in self.closing.left_out]

    @property
    def held(self) -> tuple[Accumulate, ...]:
        """What is to be freed at the end."""
        return (*self.added, *self.accepted)


@dataclass(frozen=True)
class WriteRecord:
    """Append to the journal, durably: the round whose step was taken (`closing`), or a note."""

    number: int
    remembered: Remembered
    closing: CloseRound | None = None


@dataclass(frozen=True)
class AnnounceRound:
    """Free the bytes of its contributions, publish what the step made, report `Coordinator.published`."""

    step: TakeStep


@dataclass(frozen=True)
class WriteCheckpoint:
    """The whole state between two rounds. `includes`: the serial number of the last record that it makes unnecessary.
    `required`: the run starts here, and nobody may hear of it before this is durable; any other checkpoint may fail.
    `ticket`: of the save that asked for it. `place`: where to, if that is not the run's own folder; such a copy is no
    checkpoint of the run, and makes no record unnecessary."""

    number: int
    remembered: Remembered
    reason: str
    includes: int
    required: bool = False
    ticket: int = 0
    place: str = ""


@dataclass(frozen=True)
class CutJournal:
    """Delete the records up to this serial number."""

    up_to: int


@dataclass(frozen=True)
class ReportEnd:
    """All workers have left after this round: say where the model is."""

    left: AllLeft
    sync_round: int


Task = AddContributions | TakeStep | WriteRecord | AnnounceRound | WriteCheckpoint | CutJournal | ReportEnd


@dataclass(frozen=True)
class _NoteJob:
    remembered: Remembered


@dataclass(frozen=True)
class _SaveJob:
    remembered: Remembered
    reason: str
    ticket: int
    place: str


@dataclass(frozen=True)
class _EndJob:
    remembered: Remembered
    left: AllLeft


class Commits:
    """Guarded by the coordinator's lock, except that one driver alone carries out `next()`.

    `keeps_contributions`: until their round closes. Delayed Nesterov does, because its momentum moves with every push,
    and model and momentum must belong together between two rounds. `deterministic` does, because the order of the
    contributions is known only then. A rule that compares contributions needs all of them."""

    def __init__(
        self,
        coordinator: Coordinator,
        durability: Durability,
        *,
        save_every: int = 0,
        keeps_contributions: bool = False,
        deterministic: bool = False,
        last_record: int = 0,
    ) -> None:
        self.coordinator, self.durability = coordinator, durability
        self.journals = coordinator.leases.is_durable = durability == "round"
        coordinator.leases.goes_back = durability == "checkpoint"
        self._save_every, self._deterministic = save_every, deterministic
        self._keeps = keeps_contributions or deterministic or not coordinator.rules.aggregation.is_plain
        self._effects: list[Effect] = []
        self._accepted: dict[tuple[int, int], list[Accumulate]] = {}  # not added yet, by fragment and version
        self._added: dict[tuple[int, int], list[Accumulate]] = {}  # likewise, added early: their bytes are still there
        self._freed: set[tuple[int, int]] = set()  # and are not; of open rounds
        self._jobs: deque[tuple[int, CloseRound | _NoteJob | _SaveJob | _EndJob]] = deque()
        self._tasks: deque[Task] = deque()  # of the job that was begun last
        self._asked = 0  # records that were asked for
        self._noted = 0  # the last of them that is a note
        self.written = 0  # the last of them that is durable, or need not be
        self._tickets = 0
        self._failures = 0  # of the task at hand, in a row
        self._stopping = False
        self.gave_up = False  # a task could not be carried out: memory is ahead of the disk
        self.base: int | None = None  # the last record that the newest checkpoint includes; None = no checkpoint yet
        self._last_record = last_record
        self._journal_bytes = 0  # of the records behind `base`
        self._alone = True  # no checkpoint before the newest is known to be whole
        self._saved_round = 0
        self._saved_versions: tuple[int, ...] = ()

    def resume(self, base: int, sync_round: int, *, last_record: int = 0, journal_bytes: int = 0) -> None:
        """Resume from a checkpoint that includes the records up to `base`; `journal_bytes`: of later records."""
        self.base, self._saved_round, self._journal_bytes = base, sync_round, journal_bytes
        self._last_record = max(self._last_record, last_record, base)

    # --- decisions come in ------------------------------------------------------------------------------------------

    def answer(
        self,
        request: Join | Heartbeat | Leave | Lease | Offer | Control,
        now: float,
        *,
        vouched: bool = False,
        token: str = "",
        tiling: ModelTiling | None = None,
    ) -> tuple[Answer, int]:
        """The answer, and the record to wait for before it may be given; 0 = none. `vouched`, `token`, `tiling`: of a
        join.

        A join is durable before the worker hears of it: its incarnation must not be given away twice. A join that is
        repeated waits again. A leave is recorded, so that a restarted server does not wait for a worker that left; but
        the worker need not wait for that. A lease that a restarted server could not know of is durable, too."""
        moves = request.worker_id if isinstance(request, Join | Leave) else None  # whose coming or going it may be
        before = self._presence(moves) if moves is not None else None
        try:
            match request:
                case Join():
                    answer: Answer = self.coordinator.join(request, now, vouched=vouched, token=token, tiling=tiling)
                case Heartbeat():
                    answer = self.coordinator.heartbeat(request, now)
                case Leave():
                    answer = self.coordinator.leave(request, now)
                case Lease():
                    answer = self.coordinator.lease(request, now)
                case Offer():
                    answer = self.coordinator.offer(request, now)
                case Control():
                    answer = self.coordinator.control(request, now)
        finally:
            self._effects = self.take_effects()
        order = isinstance(request, Control) and request.kind in OUTLIVE and self.coordinator.plan is not None
        if order:
            self.note()
        elif moves is not None and self._presence(moves) != before:
            self.note()
            self.coordinator.charge_record(moves, now)
        if isinstance(request, Lease) and self.coordinator.leases.take_note():
            self.note()
            self.coordinator.charge_record(request.worker_id, now)
        # (A request that is repeated waits for the record of the first, if that is not written yet.)
        return answer, self._noted if order or isinstance(request, Join | Lease) else 0

    def _presence(self, worker_id: str) -> tuple[int, bool, tuple[str, ...]]:
        member = self.coordinator.members.find(worker_id)
        return (0, False, ()) if member is None else (member.incarnation, member.live, member.keys)

    def take_effects(self) -> list[Effect]:
        """The coordinator's effects, in its order. Contributions and rounds are queued here; the caller carries out
        the others. A quarantine is noted, unless the record of a round that closed after it says so."""
        new, to_be_noted = self.coordinator.take_effects(), False
        for effect in new:
            if isinstance(effect, Accumulate):
                self._accepted.setdefault((effect.key.fragment, effect.version), []).append(effect)
            elif isinstance(effect, CloseRound):
                self._asked += 1
                self._jobs.append((self._asked, effect))
                to_be_noted = False
            elif isinstance(effect, AllLeft):
                self._jobs.append((self._asked, _EndJob(self.coordinator.remember(), effect)))
            elif isinstance(effect, WorkerQuarantined):
                to_be_noted = True
        if to_be_noted:
            self.note()
        effects, self._effects = [*self._effects, *new], []
        return effects

    def note(self) -> None:
        """Membership, an order or the settings changed: to be written, though no round has closed."""
        if self.durability != "none":
            self._asked = self._noted = self._asked + 1
            self._jobs.append((self._asked, _NoteJob(self.coordinator.remember())))

    def save(self, reason: str, place: str = "") -> int:
        """A checkpoint as of now, or a copy of the state at `place`. Returns its ticket."""
        self._tickets += 1
        self._jobs.append((self._asked, _SaveJob(self.coordinator.remember(), reason, self._tickets, place)))
        return self._tickets

    def stop(self) -> None:
        """Finish what was decided; what cannot be written is not retried any more."""
        self._stopping = True

    def abandon(self) -> None:
        """Nothing more is carried out."""
        self.gave_up = True
        self._jobs.clear()
        self._tasks.clear()

    @property
    def is_saved(self) -> bool:
        """May a server stop without writing a checkpoint?"""
        published = tuple(fragment.published.version for fragment in self.coordinator.fragments)
        return self.durability == "none" or self.gave_up or published == self._saved_versions

    # --- tasks go out -----------------------------------------------------------------------------------------------

    def next(self) -> Task | None:
        """The task at hand; None = there is none."""
        while not self._tasks and self._jobs and not self.gave_up:
            number, job = self._jobs.popleft()
            match job:
                case CloseRound():
                    self._tasks.extend(self._tasks_of(number, job))
                case _NoteJob():
                    self._tasks.extend(self._tasks_of_note(number, job.remembered))
                case _SaveJob():
                    made = self._checkpoint(job.remembered, job.reason, ticket=job.ticket)
                    self._tasks.append(replace(made, place=job.place))
                case _EndJob():
                    self._tasks.extend(self._tasks_of_end(job))
        return self._tasks[0] if self._tasks else None

    @property
    def is_idle(self) -> bool:
        """Is all that was decided carried out?"""
        return not self._tasks and not self._jobs

    @property
    def has_ended(self) -> bool:
        """`next()` gave no task, and none will come."""
        return self.gave_up or (self._stopping and not self._jobs and not self._tasks)

    @property
    def can_gather(self) -> bool:
        if self.coordinator.uploads.queued and any(self._added.values()):
            return True  # somebody needs the room
        return not self._keeps and any(not one.keep for waiting in self._accepted.values() for one in waiting)

    @property
    def must_gather(self) -> bool:
        """Does somebody wait for the room of contributions that can be added now?"""
        return bool(self.coordinator.uploads.queued) and self.can_gather

    def gather(self) -> None:
        """Nothing has arrived for a moment: add contributions before their round closes. Contributions of machines near
        each other arrive almost together; added in one pass, the sum passes through the processor once for all of them.
        What arrives with the end of its round is added by the step itself."""
        if self._tasks or self._jobs or not self.can_gather:
            return
        for place, waiting in self._accepted.items():
            early = [one for one in waiting if not one.keep]
            added, freed = [*self._added.get(place, []), *early], list[Accumulate]()
            if added and (place in self._freed or not self._is_worth_keeping(place[0])):
                self._freed.add(place)
                added, freed = [], added
            if early or freed:
                self._added[place] = added
                self._tasks.append(AddContributions(*place, tuple(early), tuple(freed)))
                waiting[:] = [one for one in waiting if one.keep]

    def _is_worth_keeping(self, fragment: int) -> bool:
        """Will the contributions of the open round be smaller than its mean, and is there room for all of them? Those
        still to come are assumed to be as large as those that are here."""
        coordinator, uploads = self.coordinator, self.coordinator.uploads
        round_, mean_bytes = coordinator.fragments[fragment].round, coordinator.fragments[fragment].mean_bytes
        to_come = len(round_.expected - round_.contributors) * round_.size_bytes / max(len(round_.participants), 1)
        has_room = not uploads.queued and uploads.held_bytes + to_come <= uploads.capacity_bytes
        return self.journals and has_room and round_.size_bytes + to_come < mean_bytes

    def _tasks_of(self, number: int, closing: CloseRound) -> list[Task]:
        place = (closing.fragment, closing.version)
        accepted, added = self._accepted.pop(place, []), self._added.pop(place, [])
        if self._deterministic:
            accepted.sort(key=lambda one: (one.key.worker_id, one.key.sequence))
        step = TakeStep(number, closing, tuple(accepted), tuple(added), freed=place in self._freed)
        self._freed.discard(place)
        if not self.journals:
            return [step, AnnounceRound(step)]
        assert closing.remembered is not None
        return [step, WriteRecord(number, closing.remembered, closing), AnnounceRound(step)]

    def _tasks_of_note(self, number: int, remembered: Remembered) -> list[Task]:
        if self.base is None:  # nobody hears of a run that is not on the disk
            return [self._checkpoint(remembered, "the run begins here", number, required=True)]
        if number != self._asked:  # a later record says all that this one would
            return []
        if self.journals:
            return [WriteRecord(number, remembered)]
        self.written = number
        return []

    def _tasks_of_end(self, end: _EndJob) -> list[Task]:
        """Nobody trains any more: save what was agreed as a state, and not in the journal alone."""
        report = ReportEnd(end.left, min(end.remembered.versions))
        if self.durability == "none" or end.remembered.versions == self._saved_versions:
            return [report]
        return [self._checkpoint(end.remembered, "all workers have left"), report]

    def _checkpoint(
        self, remembered: Remembered, reason: str, number: int = 0, *, required: bool = False, ticket: int = 0
    ) -> WriteCheckpoint:
        includes = self._last_record
        if self.base is None and includes:
            # The records there were dropped. With a number left out, none of them follows this checkpoint.
            includes += 1
        return WriteCheckpoint(number, remembered, reason, includes, required, ticket)

    def done(self, size_bytes: int = 0) -> None:
        """The task at hand was carried out. `size_bytes`: of the record, if it was one."""
        task = self._tasks.popleft()
        self._failures = 0
        match task:
            case TakeStep():
                if not self.journals:
                    self.written = task.number
            case WriteRecord():
                self.written = task.number
                self._last_record += 1
                least_bytes = 0
                if task.closing is not None:  # a round counts for this much of what a restart may replay
                    mean_bytes = self.coordinator.fragments[task.closing.fragment].mean_bytes
                    least_bytes = int(LEAST_OF_A_ROUND * mean_bytes)
                self._journal_bytes += max(size_bytes, least_bytes)
                if task.closing is None and self._is_long:
                    self._tasks.append(self._checkpoint(task.remembered, "the journal is long"))
            case AnnounceRound():
                remembered = task.step.closing.remembered
                if remembered is not None and self._is_due(min(remembered.versions)):
                    self._tasks.append(self._checkpoint(remembered, "periodic"))
            case WriteCheckpoint() if not task.place:
                self._tasks.appendleft(self._include(task))

    def _include(self, made: WriteCheckpoint) -> CutJournal:
        """The older of two checkpoints must still be able to replay the journal up to now."""
        self.written = max(self.written, made.number)
        self._last_record = made.includes
        self._saved_round, self._saved_versions = min(made.remembered.versions), made.remembered.versions
        before, self.base, self._journal_bytes = self.base, made.includes, 0
        self._alone = before is None
        return CutJournal(made.includes if before is None else before)

    def failed(self) -> float | None:
        """The disk refused the task at hand. Returns the pause before the next attempt; None = it is dropped: the
        journal holds all that a checkpoint would, and may be longer than necessary."""
        task = self._tasks[0]
        if isinstance(task, CutJournal) or (isinstance(task, WriteCheckpoint) and not task.required):
            self._tasks.popleft()
            return None
        if self._stopping:
            self.abandon()
            return None
        self._failures += 1
        return DISK_RETRIES.longest_pause_s(self._failures - 1)

    def _is_due(self, sync_round: int) -> bool:
        if self.durability == "none" or self.base is None:
            return False
        if self._save_every and sync_round > self._saved_round and sync_round % self._save_every == 0:
            return True
        if not self.journals:
            return False
        return (self._alone and sync_round > self._saved_round) or self._is_long

    @property
    def _is_long(self) -> bool:
        """Would a restart have to replay too much of the journal?"""
        if self.base is None:
            return False
        enough_bytes = max(MODELS_IN_JOURNAL * self.coordinator.model_bytes, LEAST_JOURNAL_BYTES)
        return self._last_record - self.base >= MOST_RECORDS or self._journal_bytes > enough_bytes


def is_news(effect: Effect) -> bool:
    """Does a waiting poll get another answer now? Hundreds may wait: to wake them all at every contribution would take
    longer than the contribution does. A round's first one matters, because from then on the round wants the workers
    that wait at other fragments; what a round made is announced when it is there."""
    match effect:
        case Accumulate():
            return effect.first
        case CloseRound() | DropUpload() | AskAgain() | GroupStateChanged() | GroupStateUnclear():
            return False
        case _:
            return True


# --- of the checkpoints in a folder -----------------------------------------------------------------------------------

T = TypeVar("T")


def newest_first(serials: Mapping[T, int]) -> list[T]:
    """The order in which a starting server tries them: it resumes from the first that is whole."""
    return sorted(serials, key=lambda one: serials[one], reverse=True)


def superseded(serials: Mapping[T, int], keep: int) -> list[T]:
    """Those to delete when a newer one is written: all of these whole ones but the newest `keep`, oldest first."""
    return newest_first(serials)[keep:][::-1]
