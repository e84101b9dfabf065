"""When a fragment is sent: in each cycle of H local steps fragment p goes after step ⌊(p+1)·H/P⌋.

So some fragment travels every H/P steps and each of them once per cycle (Douillard et al. 2025, "Streaming DiLoCo").
With P = 1: everything, after H steps.
"""

from __future__ import annotations


def due_fragment(local_step: int, sync_every: int, num_fragments: int) -> int | None:
    """Fragment p if `local_step` ≡ ⌊(p+1)·H/P⌋ within its cycle, else None. H need not be divisible by P."""
    if local_step < 1:
        return None
    position = (local_step - 1) % sync_every + 1
    p = -(-position * num_fragments // sync_every) - 1  # the smallest p with (p+1)·H/P ≥ position
    return p if send_step(p, sync_every, num_fragments) == position else None


def send_step(fragment: int, sync_every: int, num_fragments: int) -> int:
    """⌊(p+1)·H/P⌋: the step of the cycle after which fragment p is sent. Fragment −1 is the cycle's beginning."""
    return (fragment + 1) * sync_every // num_fragments
