"""When a fragment is sent: in each cycle of H local steps fragment p goes after step ⌊(p+1)·H/P⌋.

So some fragment travels every H/P steps and each of them once per cycle (Douillard et al. 2025, "Streaming DiLoCo").
With P = 1: everything, after H steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType


def due_fragment(local_step: int, sync_every: int, num_fragments: int) -> int | None:
    """Fragment p if `local_step` ≡ ⌊(p+1)·H/P⌋ within its cycle, else None. H need not be divisible by P."""
    return None if local_step < 1 else due_by_step(sync_every, num_fragments).get((local_step - 1) % sync_every + 1)


@lru_cache(maxsize=64)  # of a run: the plan's H, and under dynamic local updates this worker's own ones
def due_by_step(sync_every: int, num_fragments: int) -> Mapping[int, int]:
    """{⌊(p+1)·H/P⌋: p}, the fragment that is due after each step of a cycle; of several the first."""
    backwards = range(num_fragments - 1, -1, -1)
    return MappingProxyType({send_step(p, sync_every, num_fragments): p for p in backwards})


def send_step(fragment: int, sync_every: int, num_fragments: int) -> int:
    """⌊(p+1)·H/P⌋: the step of the cycle after which fragment p is sent. Fragment −1 is the cycle's beginning."""
    return (fragment + 1) * sync_every // num_fragments
