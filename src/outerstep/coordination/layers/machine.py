"""A cluster as a worker of the layer above, without I/O: what its leader does next, and what it must not do yet.

    machine.began(is_new=True)                       the layer below says what is trained
    while (task := machine.next()) is not None:      in the leader's thread
        carry it out, and report `done`, `failed`, or what the task says

The worker above is an ordinary worker, with a machine and exchanges of its own (coordination/worker). Here is what is
special about one whose steps are the rounds of others:

    ReadRecord ─▶ Restore ─▶ (MoveBelow ─▶ MarkMoved) ─▶ JoinAbove ─▶ SettleAbove ─▶ hand down ─▶ KeepRecord ─▶ idle
                                                             ▲  │
                                                             └──┴─ nobody answers: Rest, and read again

    (What has closed meanwhile is taken before that last KeepRecord.)

    idle ─▶ rounds have closed: FollowBelow ─▶ TakeRounds ─▶ hand down ─▶ ReleaseMembers ─▶ idle
                                     ▲                          │
                                     └────── more have closed ──┘
         ─▶ nobody is left:     ContributeRest ─▶ hand down ─▶ idle
         ─▶ stop:               LeaveAbove ─▶ hand down ─▶ over
         ─▶ told to finish:     EndBelow ─▶ nobody is left (or a minute later): as for stop

    hand down, where S ≠ B:     KeepRecord ─▶ MoveBelow ─▶ FollowBelow

In the middle of an exchange the worker has contributions ready (`sent`): KeepRecord ─▶ LetGo. So the record is in the
layer below before any offer can be in the layer above, and before T moves. Whoever leads next reads there what may have
been sent, joins (which fences whoever still speaks), and only then asks what became of it.

If the layer below cannot keep the record, nothing is offered and nothing moves until it can; a cluster that is stopped
meanwhile leaves without contributing.

Members wait for an exchange (`round_closed` says for how long) if it begins with the very round that they have closed.
They also wait if they close a round in the middle of an exchange that nobody waits for yet: the leader has fallen
behind them, and catches up before it releases them. Nobody waits while the layer above does not answer. Each wait has a
limit of its own, so that nobody waits in a circle: not even a leader that never comes back can hold them longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .cluster_life import ClusterLife
from .tasks import (
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

AGAIN_S = 5.0  # after the layer above, or what keeps the record, was not there
LOOK_S, LAST_LOOKS = 1.0, 60  # so often it is looked whether the last member has left, when the run above has ended


@dataclass(frozen=True)
class RecordFacts:
    """What decisions need of a record. `serial`: of the move that is under way in it, or of the next one; `moved`: by
    fragment, the last that was in T; `has_joined`: it has a worker's state."""

    serial: int
    moved: Mapping[int, int]
    has_joined: bool


class ClusterMachine:
    """`wait_s`: how long members wait for an exchange above, at most."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.serial = 1  # of the next move from above
        self.moved: dict[int, int] = {}  # by fragment of the layer below: the last that is in T
        self.has_joined = self.is_stopping = self.is_over = False
        self.failure = ""  # why the cluster is on its own
        self.life = ClusterLife()  # told of what happens; nothing is decided by it
        self._todo: deque[ClusterTask] = deque()
        self._current: ClusterTask | None = None
        self._offer: ClusterTask | None = None  # in the middle of the current one
        self._offer_begun: ClusterTask | None = None  # as the leader was told it: `lost` may have come in between
        self._sent = self._covered = 0  # contributions made ready; of those, in the record that is being kept
        self._record: RecordFacts | None = None
        self._rounds = 0  # closed below, and no steps of the worker above yet
        self._is_behind = False  # other fragments' rounds have closed since the last step of the worker above
        self._is_new = self._is_empty = self._is_told_to_end = self._has_left = False
        self._last_looks: int | None = None  # before it leaves for good; None = nobody wants it to
        self._deferred = 0
        self._is_heard = True  # the last exchange was answered
        self._is_exchanging = False  # a contribution is ready, and what becomes of it is not known yet
        self._is_awaited = False  # members were told to wait for that exchange, or for the next one
        self._owes_release = False  # members may wait for an exchange that is over
        self._owes_record = False  # that it has joined is in no record yet

    # --- what the leader is to do -----------------------------------------------------------------------------------

    def next(self) -> ClusterTask | None:
        """None: nothing, until something happens (or ever again: `is_over`)."""
        if self.is_over:
            return None
        if self._offer is not None:
            if isinstance(self._offer, KeepRecord):
                self._covered = self._sent
            self._offer_begun = self._offer
            return self._offer
        if not self._todo and not self.failure:
            self._decide()
        self._current = GoAlone(self.failure) if self.failure else self._todo[0] if self._todo else None
        if isinstance(self._current, FollowBelow) and isinstance(self._todo[-1], TakeRounds | TakeRest):
            self._is_behind = False
        return self._current

    def _decide(self) -> None:
        self.life.handed_down()
        if self._has_left or (self.is_stopping and not self.has_joined):
            self.is_over = True
            self.life.left()
        elif not self.has_joined:
            return
        elif self._owes_release and not self._catches_up:
            self._todo.append(ReleaseMembers())
            self._owes_release = False
        elif self._is_told_to_end and self._last_looks is None:
            self._todo.append(EndBelow())
            self._last_looks = LAST_LOOKS
        elif self._rounds:
            self._todo += (FollowBelow(), TakeRounds(self._rounds))
            self._rounds = 0
        elif self._owes_record:
            # Not before rounds that S has followed are steps of the worker: a successor that settled a contribution
            # first would give them up.
            self._todo.append(KeepRecord())
            self._owes_record = False
        elif self._last_looks and not (self._is_empty or self.is_stopping):
            self._todo.append(Rest(LOOK_S))  # members bring what they have, and leave
            self._last_looks -= 1
        elif self._is_behind and (self.is_stopping or self._is_told_to_end or self._is_empty):
            self._todo += (FollowBelow(), TakeRest())  # what came after the last round of the first goes up, too
        elif self.is_stopping or self._is_told_to_end:
            self._todo.append(LeaveAbove())
            self.life.drains()
        elif self._is_empty:
            self._is_empty = False
            self._todo.append(ContributeRest())

    @property
    def _catches_up(self) -> bool:
        """Are there rounds to take before members may go on? Released at once, they would be a round ahead for ever."""
        is_ending = self.is_stopping or self._is_told_to_end
        return self._rounds > 0 and self._is_heard and self.wait_s > 0.0 and not is_ending

    @property
    def rounds(self) -> int:
        """Closed below, and no steps of the worker above yet. (In S they may be: it follows T after each move.)"""
        return self._rounds

    @property
    def is_offering(self) -> bool:
        """Contributions wait to be let go, or withdrawn."""
        return self._offer is not None

    @property
    def is_idle(self) -> bool:
        is_busy = self._todo or self._rounds or self._owes_release or self._owes_record
        return self.has_joined and not (is_busy or self.failure or self.is_over)

    # --- what happens in the layer below: from any thread, in turn --------------------------------------------------

    def began(self, *, is_new: bool) -> None:
        """It is known what is trained. `is_new`: the layer's run begins now."""
        self._is_new = is_new
        self._todo.append(ReadRecord())

    def other_closed(self) -> None:
        """A round of another fragment than the first, with members in it. It is no step of the worker above."""
        self._is_behind = True

    def round_closed(self, *, exchanges_next: bool) -> float:
        """Of the first fragment, with members in it. `exchanges_next`: the worker above exchanges with its next step.
        Returns for how long the members wait for what comes of that: steps that are taken meanwhile would be steps from
        weights that are about to move. They are told so once for each exchange."""
        begins = exchanges_next and self.is_idle
        is_ahead = self._is_exchanging and isinstance(self._current, TakeRounds) and not self._is_awaited
        self._rounds += 1
        self._is_empty = False
        if not (begins or is_ahead) or not self._is_heard or self.is_stopping or self.failure:
            return 0.0
        self._is_awaited = True
        return self.wait_s

    def emptied(self) -> None:
        """The last member has left."""
        self._is_empty = True

    def stop(self) -> None:
        """Contribute what is left, and leave. A cluster that has not joined has nobody to leave."""
        self.is_stopping = True
        if not self.has_joined:
            self._todo.clear()

    def lost(self, why: str) -> None:
        """The cluster cannot have the layer above any more, or this process must not speak for it. What is in the
        record stays there for whoever leads next."""
        self.failure = self.failure or why
        self.life.lost()
        self._todo.clear()
        if self._offer is not None:
            self._offer = Withdraw(self.failure)

    def sent(self) -> None:
        """In the middle of an exchange: one more contribution is part of the worker's state, and held back."""
        self._sent += 1
        self._is_exchanging = True
        self.life.sent()
        if self._offer is None:
            self._offer = Withdraw(self.failure) if self.failure else KeepRecord()

    # --- what became of a task --------------------------------------------------------------------------------------

    def done(self) -> None:
        """The task is carried out."""
        if self._offer is not None:
            if self._offer is self._offer_begun:
                self._offer = self._after_offer(self._offer)
            return
        task = self._take()
        if isinstance(task, MoveBelow):
            self.life.moved_below()
            self.moved |= dict.fromkeys(task.fragments, task.serial)
            self.serial = task.serial + 1
        elif isinstance(task, GoAlone):
            self.is_over = True

    def _after_offer(self, task: ClusterTask) -> ClusterTask | None:
        if isinstance(task, KeepRecord):
            return KeepRecord() if self._covered < self._sent else LetGo()
        if isinstance(task, LetGo):
            self.life.let_go()
        return KeepRecord() if isinstance(task, Rest) else None

    def failed(self, why: str) -> None:
        """If it was to keep the record, or to join: again, after a while. A cluster that is stopped waits no longer: it
        leaves without what could not be kept."""
        if self._offer is not None:
            if self._offer is not self._offer_begun:
                return  # it was lost meanwhile: what is held back is withdrawn next
            if self.is_stopping:
                self.lost(why)
            else:
                self._offer = Rest(AGAIN_S)
            return
        task = self._take()
        if isinstance(task, GoAlone):
            self.is_over = True
        elif not self.has_joined and not isinstance(task, KeepRecord):
            self._todo = deque() if self.is_stopping else deque([Rest(AGAIN_S), ReadRecord()])
        elif isinstance(task, KeepRecord) and not self.is_stopping:
            self._todo.extendleft((task, Rest(AGAIN_S)))
        else:
            self.lost(why)

    def found(self, record: RecordFacts | None, known: Mapping[int, int]) -> None:
        """`known`: by fragment, the last move from above that is in T. A record that knows of later moves is of another
        past of the layer below."""
        self._take()
        self._record = record
        if record is not None and record.has_joined:
            self.life.was_here()
        self.serial, self.moved = max(known.values()) + 1, dict(known)
        if record is None:
            # What members learn from now on is not lost if this process dies before it has joined.
            self._todo += (KeepRecord(), JoinAbove(resumes=False)) if self._is_new else (JoinAbove(resumes=False),)
        elif any(known.get(fragment, 0) < serial for fragment, serial in record.moved.items()):
            self._todo.append(JoinAbove(resumes=False))
        else:
            self._todo.append(Restore(tuple(f for f, serial in known.items() if serial >= record.serial)))

    def restored(self, moving: Collection[int], *, rounds: int) -> None:
        """`moving`: where S ≠ B still: whoever led before died between the record and the move. `rounds`: that are no
        steps of the worker above in the record, and those since then."""
        self._take()
        assert self._record is not None
        self._rounds, self._is_behind = rounds, len(self.moved) > 1
        if moving:
            self._todo += (MoveBelow(self._record.serial, tuple(moving)), MarkMoved())
        self._todo.append(JoinAbove(resumes=self._record.has_joined))

    def joined(self, moving: Collection[int], *, unsettled: bool) -> None:
        """`moving`: where what the layer above has agreed on moved S. `unsettled`: contributions in the record may be
        counted, or not."""
        self._take()
        self.has_joined = True
        self.life.joined()
        if unsettled:  # S is still what was sent
            self._todo.append(SettleAbove())
        else:
            self._todo += self._hand_down(moving)
        self._owes_record = True

    def exchanged(self, moving: Collection[int], *, deferred: int, told_to_end: bool = False) -> None:
        """`deferred`: how many exchanges have found nobody, in all. With a delay, it is told as soon as a contribution
        is on its way: members need not wait for more."""
        task = self._take()
        self._is_exchanging = self._is_awaited = False
        self._is_heard, self._deferred = deferred == self._deferred, deferred
        self.life.exchanged(answered=self._is_heard, moved=bool(moving))
        self._is_told_to_end = self._is_told_to_end or told_to_end
        self._todo.extendleft(reversed(self._hand_down(moving)))
        if isinstance(task, TakeRounds | TakeRest):
            self._owes_release = True
        elif isinstance(task, LeaveAbove):
            self._has_left = True

    def _hand_down(self, moving: Collection[int]) -> list[ClusterTask]:
        """Where agreements from above have moved S, T moves as far, between two rounds: it is a version of its own."""
        return [KeepRecord(), MoveBelow(self.serial, tuple(moving)), FollowBelow()] if moving else []

    def _take(self) -> ClusterTask:
        task, self._current = self._current, None
        assert task is not None, "no task was asked for"
        if self._todo and self._todo[0] is task:
            self._todo.popleft()
        return task
