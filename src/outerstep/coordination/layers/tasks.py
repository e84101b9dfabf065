"""The tasks that a cluster's machine gives its leader: one at a time, each reported as done or failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadRecord:
    """Read the last leader's record from the layer below, and which moves from above T contains. → `found`"""


@dataclass(frozen=True)
class Restore:
    """Set S and B from the record; then set B = S in the fragments `is_in`, whose moves T contains. → `restored`"""

    is_in: tuple[int, ...]


@dataclass(frozen=True)
class KeepRecord:
    """Store the leader's current state in the layer below. → `done`, or `failed` if that is impossible."""


@dataclass(frozen=True)
class JoinAbove:
    """Join under the cluster's name, with a new instance: the layer above fences the old one. `resumes`: use the
    worker's state from the record. If the layer above has later contributions than the record shows, set B = T: their
    record died with its holders, nobody knows which part of T they contain, and the agreement replaces T.
    → `joined`, or `failed`."""

    resumes: bool


@dataclass(frozen=True)
class SettleAbove:
    """Find out what became of the contributions in the record, and adopt the result. → `exchanged`"""


@dataclass(frozen=True)
class FollowBelow:
    """Set S = B = T. → `done`"""


@dataclass(frozen=True)
class TakeRounds:
    """Take one step of the worker above per closed round, up to the first step that exchanges. → `exchanged`"""

    rounds: int


@dataclass(frozen=True)
class TakeRest:
    """Take one more step if S contains anything beyond the last agreement of the layer above. → `exchanged`"""


@dataclass(frozen=True)
class ContributeRest:
    """Exchange what there is: nobody trains here any more. → `exchanged`"""


@dataclass(frozen=True)
class LetGo:
    """Let the contributions that are ready be offered. → `done`"""


@dataclass(frozen=True)
class Withdraw:
    """Drop the contributions that are ready, without an offer. → `done`"""

    why: str


@dataclass(frozen=True)
class MoveBelow:
    """Set T′ = T + (S − B) in these fragments, as a version of its own. → `done`, when that is durable below."""

    serial: int
    fragments: tuple[int, ...]


@dataclass(frozen=True)
class MarkMoved:
    """Set B = S: T contains every move. (S still matches the worker's state.) → `done`"""


@dataclass(frozen=True)
class ReleaseMembers:
    """Release the members: no version from above is coming for now. → `done`"""


@dataclass(frozen=True)
class LeaveAbove:
    """Contribute the rest, wait for the agreement, leave. → `exchanged`"""


@dataclass(frozen=True)
class EndBelow:
    """End the run below, because the run above ends. The members' last contributions still go up before the cluster
    leaves. → `done`"""


@dataclass(frozen=True)
class Rest:
    """Pause for this long, or until the machine is told to stop. → `done`"""

    seconds: float


@dataclass(frozen=True)
class GoAlone:
    """Leave the layer above at once, without contributing. → `done`"""

    why: str


Offering = LetGo | Withdraw
ClusterTask = (
    ReadRecord
    | Restore
    | KeepRecord
    | JoinAbove
    | SettleAbove
    | FollowBelow
    | TakeRounds
    | TakeRest
    | ContributeRest
    | Offering
    | MoveBelow
    | MarkMoved
    | ReleaseMembers
    | LeaveAbove
    | EndBelow
    | Rest
    | GoAlone
)
