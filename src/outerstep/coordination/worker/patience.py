"""How hard a worker tries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..backoff import Backoff


@dataclass(frozen=True)
class Patience:
    """How hard to try. A failed call is repeated after a pause (backoff.py)."""

    first_backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    give_up_after_s: float = 900.0  # without any answer at all
    poll_wait_s: float = 5.0
    calls_in_flight: int = 4
    stuck_after_s: float | None = None  # while too few workers are alive for the round to close at all; None = wait
    stay_for_own_round: bool = False  # even when late, wait for the agreement that holds the contribution
    damaged_parts: int = 16  # parts that may arrive with a wrong hash before we believe it is not the line

    def backoff_s(self, failures: int, rng: random.Random) -> float:
        return Backoff(self.first_backoff_s, self.longest_backoff_s).pause_s(failures - 1, rng)
