"""Pauses before the next attempt: each twice as long as the last, up to a limit. Jitter keeps a crowd that failed
together from retrying together."""

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


def jittered_s(pause_s: float, rng: random.Random, *, least: float = 0.5) -> float:
    """uniform(least, 3/2) · pause: a pause that the other end has named, and may have named to a crowd. `least` = 1
    if it must not be shorter."""
    return pause_s * rng.uniform(least, 1.5)
