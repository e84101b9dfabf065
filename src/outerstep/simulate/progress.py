"""What a simulated worker remembers about its exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from ..coordination.worker.exchange import Exchange, Outcome
from ..coordination.worker.fetch import Held
from ..coordination.worker.sending import Sending
from ..types import ContributionKey
from .history import StepName


@dataclass
class Sent:
    """A contribution, and what was in it."""

    sending: Sending
    steps: list[StepName]

    @property
    def key(self) -> ContributionKey:
        return self.sending.offer.key


@dataclass
class LocalFragment:
    """What a worker knows of one fragment: the version it holds, and its own steps that nobody has counted yet.
    `unconfirmed`: its last contribution, if that counts in a round after this version."""

    version: int
    sequence: int
    unsent: list[StepName]
    oldest_base: int
    held: Held | None = None
    unconfirmed: Sent | None = None


@dataclass
class SimFlight:
    """A contribution under way: its steps, when its agreement is to be taken over, and what has become of it."""

    key: ContributionKey
    steps: list[StepName]
    land_at: int
    exchange: Exchange | None = None
    outcome: Outcome | None = None
    parked: bool = False
