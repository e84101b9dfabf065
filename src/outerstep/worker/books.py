"""A worker's books: what it has done, how much of that is agreed on, and what is under way."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..topology.protocol import Agreed, Joined
from ..types import Plan
from .cycle import Cycle
from .progress import Flight, Metrics, Progress, Work
from .watching import Watching

log = logging.getLogger(__name__)


@dataclass
class Books:
    """Who decides (sync.py), who takes over (landing.py) and who saves (saved.py) look at the same ones.

    `fragments`: what is known of each; `flights`: by fragment, the exchange under way. `left_open`: how many were left
    open since the server was last heard from."""

    plan: Plan
    cycle: Cycle
    work: Work
    fragments: list[Progress]
    watching: Watching
    metrics: Metrics = field(default_factory=Metrics)
    flights: dict[int, Flight] = field(default_factory=dict)
    left_open: int = 0

    @classmethod
    def of(cls, joined: Joined, versions: Iterable[int]) -> Books:
        """Of a worker that has just joined, and goes on from no state of its own."""
        plan, work = joined.plan, Work(*joined.work)
        fragments = [Progress(version, work, version) for version in versions]
        return cls(plan, Cycle(0, plan.sync_every), work, fragments, Watching(work.steps))

    def unsent(self, fragment: int) -> Work:
        """What was done and is in no agreement that we hold."""
        return self.work - self.fragments[fragment].counted

    def open_fragments(self) -> list[int]:
        """Those with steps that no agreement holds, or with an exchange still open."""
        behind = {i for i, progress in enumerate(self.fragments) if progress.counted.steps < self.work.steps}
        return sorted(behind | set(self.flights))

    def too_old(self, agreed: Agreed) -> bool:
        """Are our unsent steps?"""
        age = agreed.version - self.fragments[agreed.fragment].oldest_base
        return agreed.too_old or age > self.plan.max_staleness

    def begin_cycle(self) -> None:
        self.cycle.begin(self.plan)

    def fall_in(self) -> None:
        """To where the others are in their cycle."""
        self.cycle.fall_in(self.plan, [progress.version for progress in self.fragments])

    def note(self, agreed: Agreed) -> None:
        """What came with an agreement, whatever is made of it. A new H holds from the next cycle on."""
        self.left_open = 0
        self.metrics.note(agreed)
        self.watching.adopted(agreed.fragment, agreed.watched, self.work.steps)
        if agreed.plan.revision != self.plan.revision:
            if replace(agreed.plan, revision=self.plan.revision) != self.plan:  # else the server was started again
                log.info("the plan changed: sync_every=%d, delay=%d", agreed.plan.sync_every, agreed.plan.delay)
            self.plan = agreed.plan
            if self.cycle.step == 0:
                self.begin_cycle()
