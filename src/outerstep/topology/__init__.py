"""How contributions become an agreement. One protocol, one small file per way:

    joined = topology.join(manifest, wishes)
    ticket = topology.begin(contribution)      # returns at once, training may go on
    agreed = topology.finish(ticket)           # waits

`server.py` asks a parameter server. The worker knows nothing else of how its peers are reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..types import Manifest, Participant, Plan, Wishes


@dataclass(frozen=True)
class Contribution:
    """What a worker offers for one fragment. `oldest_base`: the version under its oldest unsent step."""

    fragment: int
    base_version: int
    oldest_base: int
    steps: int
    weight: float
    deltas: Mapping[str, Tensor]  # pseudo-gradients, fp32


@dataclass(frozen=True)
class Agreed:
    """What it gets back: the newest anchor, and whether the contribution counts in it or in a round still open."""

    fragment: int
    version: int
    counted: bool
    too_old: bool
    anchor: Mapping[str, Tensor]  # fp32, host memory
    anchor_hash: str
    participants: tuple[Participant, ...]
    bytes_sent: int
    bytes_received: int
    retries: int
    rejoins: int


@dataclass(frozen=True)
class Joined:
    worker_id: str
    plan: Plan
    anchors: tuple[Agreed, ...]  # per fragment


class Ticket(Protocol):
    """An exchange under way."""

    @property
    def fragment(self) -> int: ...

    @property
    def wanted(self) -> frozenset[tuple[int, int]]:
        """(fragment, version) of other rounds that wait for this worker."""

    @property
    def waiting_for(self) -> str:
        """What the round waits for, in words."""

    def wait(self, timeout_s: float) -> bool:
        """Is it over?"""

    def cancel(self) -> None: ...


class Topology(Protocol):
    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined: ...

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> Ticket:
        """`stuck_after_s`: give up when too few workers are alive for the round to close for so long."""

    def finish(self, ticket: Ticket) -> Agreed: ...

    def resume(self, ticket: Ticket) -> Ticket:
        """Carry an exchange that failed on, under the same key: whether it counted is settled by asking again."""

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None: ...

    def leave(self, reason: str) -> None: ...


__all__ = ["Agreed", "Contribution", "Joined", "Ticket", "Topology"]
