"""What comes out of the coordinator: what its driver is to do, and the events there are to report (events.py).

The driver carries effects out in the order they were given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...events import Event
from ...tiling import Cutting
from ...types import ContributionKey, Participant
from .remembered import Remembered


@dataclass(frozen=True)
class Accumulate:
    """Decode this contribution, add it to the sum of the round that will make `version`, free its bytes. A rule that
    takes contributions one by one (Delayed Nesterov) scales it by `scale`, its weight relative to the usual one.
    `codec`: what it is encoded with, which may be the one of an earlier plan.
    `first`: of its round. `keep`: add it when its round closes, not before; it may still be left out."""

    key: ContributionKey
    version: int
    weight: float
    scale: float
    base_version: int
    codec: str
    sections: Cutting = 1
    first: bool = False
    keep: bool = False


@dataclass(frozen=True)
class CloseRound:
    """Take the outer step over what was accumulated, make it durable, publish it, then report `Coordinator.published`.
    `left_out`: what was to be kept, and is not to be added after all. `turned_away`: workers that a rule counts among
    those offered, though nothing was taken from them. `remembered`: what goes to disk with it, if the coordinator was
    told to remember. `from_above`: no round at all, and no step; the version is what a layer above has agreed on.
    `outer_lr`: η of this step, by the plan that the round ended under; None = as the server was told."""

    fragment: int
    version: int
    participants: tuple[Participant, ...]
    remembered: Remembered | None = None
    left_out: frozenset[ContributionKey] = frozenset()
    turned_away: frozenset[str] = frozenset()
    from_above: bool = False
    outer_lr: float | None = None


@dataclass(frozen=True)
class DropUpload:
    """Free the bytes of a contribution that will never be accepted."""

    key: ContributionKey


@dataclass(frozen=True)
class AskAgain:
    """The worker that waits with this offer may ask again now: its turn has come, or its place in the queue is gone."""

    key: ContributionKey


@dataclass(frozen=True)
class AllLeft:
    """The last worker that was here has left, for this reason. (One that died may come back: then it has not.) `loss`:
    the mean of those that the workers last reported."""

    reason: str
    loss: float | None


@dataclass(frozen=True)
class StopServer:
    """Everybody has left, or has had time enough to: end."""

    reason: str


Effect = Accumulate | CloseRound | DropUpload | AskAgain | AllLeft | StopServer | Event
