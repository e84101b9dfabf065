"""What a cluster's machine asks its leader to do: one task at a time, each reported as done or failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadRecord:
    """What the layer below keeps of whoever led before, and which moves from above are in T. → `found`"""


@dataclass(frozen=True)
class Restore:
    """S and B become what the record says; then B = S in the fragments `is_in`, whose moves are in T. → `restored`"""

    is_in: tuple[int, ...]


@dataclass(frozen=True)
class KeepRecord:
    """The layer below is to hold the leader's state as it is now. → `done`, or `failed` if it cannot."""


@dataclass(frozen=True)
class JoinAbove:
    """Under the cluster's name, with a new instance: the layer above fences whoever spoke for it before. `resumes`:
    with the worker's state from the record. Where the layer above has later contributions than that knows of, B = T:
    the record of those died with all who held it, so nobody knows what of T is in them, and T is given up for what was
    agreed. → `joined`, or `failed`."""

    resumes: bool


@dataclass(frozen=True)
class SettleAbove:
    """Find out what became of the contributions in the record, and adopt that. → `exchanged`"""


@dataclass(frozen=True)
class FollowBelow:
    """S = B = T. → `done`"""


@dataclass(frozen=True)
class TakeRounds:
    """So many rounds have closed: as many steps of the worker above, up to the first that exchanges. → `exchanged`"""

    rounds: int


@dataclass(frozen=True)
class TakeRest:
    """One more step, if S holds anything that the layer above has not agreed on. → `exchanged`"""


@dataclass(frozen=True)
class ContributeRest:
    """Nobody trains here any more: exchange what there is. → `exchanged`"""


@dataclass(frozen=True)
class LetGo:
    """The contributions that were made ready may be offered. → `done`"""


@dataclass(frozen=True)
class Withdraw:
    """They must not be offered. → `done`"""

    why: str


@dataclass(frozen=True)
class MoveBelow:
    """T′ = T + (S − B) in these fragments, as a version of its own. → `done`, when that is durable below."""

    serial: int
    fragments: tuple[int, ...]


@dataclass(frozen=True)
class MarkMoved:
    """B = S: T has every move. (S stays what the worker's state belongs to.) → `done`"""


@dataclass(frozen=True)
class ReleaseMembers:
    """Nothing comes from above for now. → `done`"""


@dataclass(frozen=True)
class LeaveAbove:
    """Contribute what is left, wait for the agreement, leave. → `exchanged`"""


@dataclass(frozen=True)
class EndBelow:
    """The run above is to end: end the one below. What its members bring last goes up before the cluster leaves. →
    `done`"""


@dataclass(frozen=True)
class Rest:
    """Do nothing for so long, or until the machine is told to stop. → `done`"""

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
