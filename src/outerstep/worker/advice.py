"""What the run's controller recommends to the training script, which may ignore it.

worker.on_recommendation(lambda advice: print(advice.settings.batch_size, advice.reason))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..coordination.autoconfig.recommend import InnerSettings, Recommendation, recommend
from ..types import Plan, assignment_of

AdviceObserver = Callable[[Recommendation], object]


class Advice:
    """Remembers what was recommended last, so that the same is not said twice."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self.revision: int | None = None  # of the plan that was heard last
        self._last: Recommendation | None = None

    def heard(self, plan: Plan, optimizer: torch.optim.Optimizer, batch_size: int) -> Recommendation | None:
        """Of this plan. None: there is nothing new in it, or nothing to recommend: without a batch size of the script's
        own nobody knows what a share of samples means."""
        if plan.revision == self.revision:
            return None
        self.revision, mine = plan.revision, assignment_of(plan, self._worker_id)
        if mine is None or batch_size < 1:
            return None
        made = recommend(mine, settings_of(optimizer, batch_size))
        if made.settings.batch_size == batch_size or made == self._last:
            return None
        self._last = made
        return made


def settings_of(optimizer: torch.optim.Optimizer, batch_size: int) -> InnerSettings:
    """As the script uses them now, of its first group of parameters."""
    group: dict[str, Any] = optimizer.param_groups[0]
    betas = group.get("betas")
    return InnerSettings(
        batch_size=batch_size,
        lr=_number(group.get("lr")),
        momentum=_number(group.get("momentum")),
        weight_decay=_number(group.get("weight_decay")),
        betas=(float(betas[0]), float(betas[1])) if isinstance(betas, tuple | list) and len(betas) == 2 else None,
        nesterov=group["nesterov"] if isinstance(group.get("nesterov"), bool) else None,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) else None
