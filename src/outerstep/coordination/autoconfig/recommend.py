"""What the controller recommends to a training script. Nothing here is an order: the loop is the user's.

    advice = recommend(assignment, InnerSettings(batch_size=32, lr=3e-4, betas=(0.9, 0.95)))

A larger batch carries a larger learning rate: √ of the ratio where the optimizer scales by its own second moment (it
has `betas`), the ratio itself for plain SGD. Everything else stays as the script has it, and is repeated, so that a
recommendation is complete. A script that says nothing about a value gets nothing for it.
"""

from __future__ import annotations

import math
from typing import Final

from ...types import Assignment, Plain

MOST_AT_ONCE: Final = 4.0  # times: a larger jump of the learning rate is for a person to make


class InnerSettings(Plain, frozen=True):
    """As the script uses them. None = it did not say."""

    batch_size: int | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    nesterov: bool | None = None


class Recommendation(Plain, frozen=True):
    settings: InnerSettings
    reason: str


def recommend(assignment: Assignment, now: InnerSettings) -> Recommendation:
    wanted, has = assignment.batch_size, now.batch_size
    if has is None or has < 1:
        return Recommendation(settings=InnerSettings(batch_size=wanted), reason=f"a batch of {wanted} is this share")
    if has == wanted:
        return Recommendation(settings=now, reason="the batch is what it should be")
    ratio = wanted / has
    factor = min(max(math.sqrt(ratio) if now.betas is not None else ratio, 1.0 / MOST_AT_ONCE), MOST_AT_ONCE)
    lr = now.lr * factor if now.lr is not None and 0.0 < now.lr < math.inf else None
    return Recommendation(
        settings=InnerSettings(
            batch_size=wanted,
            lr=lr,
            momentum=now.momentum,
            weight_decay=now.weight_decay,
            betas=now.betas,
            nesterov=now.nesterov,
        ),
        reason=f"a batch of {wanted} instead of {has}" + ("" if lr is None else f"; lr times {factor:.3g}"),
    )
