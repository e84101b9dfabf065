"""Where every step went: applied once, given up by somebody who said so, lost with its process, or still under way.

A step has a name: the *life* of a worker (one start of its process) and its running number there. What a contribution
holds is a set of these numbers, a few ranges. So a day of ten thousand workers is counted exactly, and in little room.
(Above clusters, a step is one round of the cluster below; its number is the version that the round made.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ranges import Ranges
from ...types import ContributionKey, Participant

NOTHING = Ranges()
MOST_TOLD = 100  # violations that are kept in words; the others are counted


@dataclass
class Promises:
    """Which of them were broken, over all layers."""

    broken: list[str] = field(default_factory=list)
    count: int = 0

    def violated(self, rule: str) -> None:
        self.count += 1
        if len(self.broken) < MOST_TOLD:
            self.broken.append(rule)


@dataclass(frozen=True)
class Parcel:
    """What is in one contribution."""

    life: int
    steps: Ranges


@dataclass
class LifeBook:
    """The account of one life. By fragment: `applied` to the model of its server; `given_up`, as its machine said;
    `held` when it ended: in its weights, or on the way. `taken`: steps in all."""

    name: str
    step_s: float
    applied: list[Ranges]
    given_up: list[Ranges]
    held: list[Ranges]
    taken: int = 0
    is_over: bool = False
    has_left: bool = False
    discarded: int = 0  # of those given up: too old, or refused
    overwritten: int = 0  # by a delayed agreement
    left_out: int = 0  # by the server's screens; in `given_up`, too
    said: int | None = None  # so many steps its machine says that it gave up; None = nobody asked it


class LayerLedger:
    """Of one server. `keeps_versions`: what each version held can be asked for, of layers above clusters."""

    def __init__(self, name: str, fragments: int, floor: int, promises: Promises, *, keeps_versions: bool) -> None:
        self.name, self._floor, self.promises, self._keeps = name, floor, promises, keeps_versions
        self.books: list[LifeBook] = []
        self.versions = [0] * fragments
        self.rounds = 0
        self.participants = 0
        self.staleness = [0, 0]  # the sum over contributions, and the largest
        self.steps_of: list[dict[int, float]] = [{} for _ in range(fragments)]  # by version: worker-seconds in it
        self._last: dict[tuple[str, int], int] = {}  # by worker and fragment: the last sequence that was applied
        self._past: dict[tuple[int, int], list[tuple[int, Ranges]]] = {}

    def violated(self, rule: str) -> None:
        self.promises.violated(f"{self.name}: {rule}")

    def begin(self, name: str, step_s: float) -> int:
        """A life begins; its number."""
        empty = len(self.versions)
        self.books.append(LifeBook(name, step_s, [NOTHING] * empty, [NOTHING] * empty, [NOTHING] * empty))
        return len(self.books) - 1

    # --- the server -------------------------------------------------------------------------------------------------

    def version_made(
        self,
        fragment: int,
        version: int,
        participants: Sequence[Participant],
        contents: Sequence[tuple[ContributionKey, Parcel]],
        left_out: Sequence[tuple[ContributionKey, Parcel]] = (),
    ) -> None:
        """`left_out`: contributions that were there, and that the server's screens took nothing of."""
        if version != self.versions[fragment] + 1:
            self.violated(f"fragment {fragment} made version {version} after {self.versions[fragment]}")
        self.versions[fragment] = version
        if participants:
            self.rounds += 1
            self.participants += len(participants)
            stale = [one.staleness for one in participants]
            self.staleness = [self.staleness[0] + sum(stale), max(self.staleness[1], *stale)]
            if len({one.worker_id for one in participants}) < self._floor:
                self.violated(f"version {version} closed with {len(participants)} contributions")
        told = {(one.worker_id, one.sequence) for one in participants}
        seconds = 0.0
        for key, parcel in contents:
            book = self.books[parcel.life]
            if (key.worker_id, key.sequence) not in told:
                self.violated(f"version {version} holds {key}, and does not name it")
            twice = book.applied[fragment] & parcel.steps
            if twice:
                self.violated(f"steps {twice} of {book.name} were applied twice to fragment {fragment}")
            gone = book.given_up[fragment] & parcel.steps
            if gone:
                self.violated(f"steps {gone} of {book.name} were given up, and are applied to fragment {fragment}")
            book.applied[fragment] = book.applied[fragment] | parcel.steps
            self._last[key.worker_id, fragment] = key.sequence
            seconds += parcel.steps.total * book.step_s
            if self._keeps:
                self._past.setdefault((parcel.life, fragment), []).append((version, book.applied[fragment]))
        for key, parcel in left_out:
            self.given_up(parcel.life, fragment, parcel.steps, overwritten=False)
            self.books[parcel.life].left_out += parcel.steps.total
            self._last[key.worker_id, fragment] = key.sequence
        held = len(contents) + len(left_out)
        if held != len(participants):
            self.violated(f"version {version} names {len(participants)} contributions, and holds {held}")
        self.steps_of[fragment][version] = seconds

    def held_at(self, life: int, fragment: int, version: int) -> Ranges:
        """What this version holds of a life's steps."""
        past = self._past.get((life, fragment), [])
        at = bisect_right(past, version, key=lambda made: made[0])
        return past[at - 1][1] if at else NOTHING

    # --- the workers ------------------------------------------------------------------------------------------------

    def adopted(self, name: str, fragment: int, version: int, before: int) -> None:
        if version < before:
            self.violated(f"{name} went back from version {before} to {version} of fragment {fragment}")
        if version > self.versions[fragment]:
            self.violated(f"{name} holds version {version} of fragment {fragment}, which nobody has made")

    def told(self, key: ContributionKey, parcel: Parcel, *, counted: bool) -> None:
        """A worker knows for good what became of its contribution."""
        applied = self._last.get((key.worker_id, key.fragment)) == key.sequence
        book = self.books[parcel.life]
        missing = parcel.steps - book.applied[key.fragment] - book.given_up[key.fragment]
        if counted and missing:
            self.violated(f"{key} was reported as counted, but steps {missing} were not applied")
        if not counted and applied:
            self.violated(f"{key} was reported as missed, but its steps were applied")

    def given_up(self, life: int, fragment: int, steps: Ranges, *, overwritten: bool) -> None:
        """Its machine says so."""
        book = self.books[life]
        book.given_up[fragment] = book.given_up[fragment] | steps
        if fragment == 0:
            book.overwritten += overwritten * steps.total
            book.discarded += (not overwritten) * steps.total

    def settle(self) -> None:
        """The end: of every step it must be known where it is."""
        for book in self.books:
            everything = Ranges([(0, book.taken)])
            for fragment, applied in enumerate(book.applied):
                lost = everything - applied - book.given_up[fragment] - book.held[fragment]
                if lost:
                    self.violated(f"steps {lost} of {book.name} vanished from fragment {fragment}")
                dropped = book.given_up[fragment].total - book.left_out
                if book.said is not None and dropped > book.said:
                    self.violated(f"{book.name} dropped {dropped} steps, and said so of {book.said}")
                if book.has_left and book.held[fragment] - applied:
                    left = book.held[fragment] - applied
                    self.violated(f"{book.name} left cleanly, and its steps {left} are in no version")

    # --- for the report -----------------------------------------------------------------------------------------------

    def seconds(self, what: Sequence[Ranges], step_s: float) -> float:
        """Mean over the fragments."""
        return sum(one.total for one in what) * step_s / len(what)
