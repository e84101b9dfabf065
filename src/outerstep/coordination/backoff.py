"""How long to pause before the next attempt: twice as long each time, up to a limit, with jitter so that a crowd that
failed together does not come back together."""

from __future__ import annotations

import random
from dataclasses import dataclass

MOST_DOUBLINGS = 32


@dataclass(frozen=True)
class Backoff:
    """After n failures before this one: uniform(½, 1) · min(first · 2ⁿ, longest)."""

    first_s: float
    longest_s: float

    def longest_pause_s(self, failures_before: int) -> float:
        """Without the jitter."""
        return min(self.first_s * 2.0 ** min(failures_before, MOST_DOUBLINGS), self.longest_s)

    def pause_s(self, failures_before: int, rng: random.Random) -> float:
        return self.longest_pause_s(failures_before) * rng.uniform(0.5, 1.0)
