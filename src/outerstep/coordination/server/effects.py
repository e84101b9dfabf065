"""What comes out of the coordinator: what its driver is to do, and what there is to report.

The driver carries effects out in the order they were given. An event is a line of the event log: `kind` names it, and
`facts` are its fields, as docs/reference/status-and-events.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ...types import Agreement, ContributionKey, Participant
from .remembered import Remembered


@dataclass(frozen=True)
class Accumulate:
    """Decode this contribution, add it to the sum of the round that will make `version`, free its bytes. A rule that
    takes contributions one by one (Delayed Nesterov) scales it by `scale`, its weight relative to the usual one.
    `first`: of its round. `keep`: add it when its round closes, not before; it may still be left out."""

    key: ContributionKey
    version: int
    weight: float
    scale: float
    base_version: int
    sections: int = 1
    first: bool = False
    keep: bool = False


@dataclass(frozen=True)
class CloseRound:
    """Take the outer step over what was accumulated, make it durable, publish it, then report `Coordinator.published`.
    `left_out`: what was to be kept, and is not to be added after all. `turned_away`: workers that a rule counts among
    those offered, though nothing was taken from them. `remembered`: what goes to disk with it, if the coordinator was
    told to remember."""

    fragment: int
    version: int
    participants: tuple[Participant, ...]
    remembered: Remembered | None = None
    left_out: frozenset[ContributionKey] = frozenset()
    turned_away: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DropUpload:
    """Free the bytes of a contribution that will never be accepted."""

    key: ContributionKey


@dataclass(frozen=True)
class StopServer:
    """Everybody has left, or has had time enough to: end."""

    reason: str


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something an operator would want to know."""

    kind: ClassVar[str]

    @property
    def facts(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class WorkerJoined(Event):
    kind = "join"
    worker: str
    host: str
    incarnation: int


@dataclass(frozen=True)
class WorkerLeft(Event):
    kind = "leave"
    worker: str
    reason: str


@dataclass(frozen=True)
class WorkerDied(Event):
    kind = "death"
    worker: str
    silent_s: float


@dataclass(frozen=True)
class WorkerKicked(Event):
    kind = "kick"
    worker: str
    reason: str


@dataclass(frozen=True)
class OffenceNoted(Event):
    kind = "offence"
    worker: str
    code: str
    count: int


@dataclass(frozen=True)
class WorkerQuarantined(Event):
    kind = "quarantine"
    worker: str
    seconds: int
    reason: str


@dataclass(frozen=True)
class WorkerPardoned(Event):
    kind = "pardon"
    worker: str
    offences: int
    reason: str


# --- contributions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UploadDropped(Event):
    kind = "upload_dropped"
    worker: str
    fragment: int


@dataclass(frozen=True)
class ContributionRefused(Event):
    kind = "refused"
    worker: str
    fragment: int
    reason: str


@dataclass(frozen=True)
class ContributionLeftOut(Event):
    """`why`, or its norm and steps and how many times as large as usual it is."""

    kind = "left_out"
    worker: str
    fragment: int
    version: int
    found: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"worker": self.worker, "fragment": self.fragment, "version": self.version, **self.found}


@dataclass(frozen=True)
class ContributionsNotChosen(Event):
    kind = "not_chosen"
    fragment: int
    version: int
    workers: list[str]
    aggregation: str


@dataclass(frozen=True)
class ScreenForgotten(Event):
    kind = "screen_forgotten"
    fragment: int
    why: str


# --- rounds and the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted(Event):
    kind = "start"
    workers: list[str]


@dataclass(frozen=True)
class TooFewTrained(Event):
    kind = "too_few"
    fragment: int
    version: int
    trained: int
    needed: int
    aggregation: str


@dataclass(frozen=True)
class VersionPublished(Event):
    kind = "round"
    agreement: Agreement

    @property
    def facts(self) -> dict[str, Any]:
        taken, watched = self.agreement.participants, self.agreement.watched
        norms = {} if watched is None else {"norms": [float(f"{p.norm or 0.0:.6g}") for p in taken], **watched.known}
        return {
            "fragment": self.agreement.fragment,
            "version": self.agreement.version,
            "workers": [p.worker_id for p in taken],
            "sequences": [p.sequence for p in taken],
            "staleness": [p.staleness for p in taken],
            **norms,
        }


@dataclass(frozen=True)
class PlanChanged(Event):
    kind = "plan"
    revision: int
    stated: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"revision": self.revision, **self.stated}


@dataclass(frozen=True)
class BudgetSpent(Event):
    kind = "budget_spent"
    tokens: int
    limit: int | None


@dataclass(frozen=True)
class WorkersOrdered(Event):
    workers: list[str]
    reason: str


@dataclass(frozen=True)
class DrainOrdered(WorkersOrdered):
    kind = "drain"


@dataclass(frozen=True)
class SyncOrdered(WorkersOrdered):
    kind = "sync"


Effect = Accumulate | CloseRound | DropUpload | StopServer | Event


def is_news(effect: Effect) -> bool:
    """Does a waiting poll get another answer now? Hundreds may wait: to wake them all at every contribution would take
    longer than the contribution does. A round's first one matters, because from then on the round wants the workers
    that wait at other fragments; what a round made is announced when it is there."""
    match effect:
        case Accumulate():
            return effect.first
        case CloseRound() | DropUpload():
            return False
        case _:
            return True
