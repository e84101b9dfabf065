"""When a fragment is due: a worker's place in its cycle of H steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.fragments import due_fragment, send_step
from ..types import Plan


@dataclass
class Cycle:
    """Step `step` of a cycle of `sync_every`. `assigned`: this worker's own H, from its next cycle on; None = the
    plan's."""

    step: int
    sync_every: int
    assigned: int | None = None

    def advance(self, plan: Plan) -> int | None:
        """One step more, and after the last a new cycle. The fragment that is due now, if one is."""
        self.step += 1
        due = due_fragment(self.step, self.sync_every, len(plan.fragments))
        if self.step >= self.sync_every:
            self.begin(plan)
        return due

    def begin(self, plan: Plan) -> None:
        self.step = 0
        self.sync_every = self.assigned or plan.sync_every

    def fall_in(self, plan: Plan, versions: Sequence[int]) -> None:
        """Go where the others are: the fragment with the lowest version is the next to be sent."""
        self.step = send_step(versions.index(min(versions)) - 1, plan.sync_every, len(versions))

    def delay(self, plan: Plan) -> int:
        """τ. A worker with few steps of its own must still land a fragment before it is sent again."""
        return min(plan.delay, self.sync_every - 1)
