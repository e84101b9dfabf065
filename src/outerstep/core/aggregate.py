"""How several pseudo-gradients become one.

    g = Σ w_i·Δ_i / Σ w_i

over the contributions that are present: a mean divides by the weights that came, not by those that were expected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The definition above, all at once."""
    mean = RunningMean(deltas[0].numel()) if deltas else RunningMean(0)
    for delta, weight in zip(deltas, weights, strict=True):
        mean.add(0, delta.reshape(-1), weight)
        mean.count(weight)
    return mean.result().reshape(deltas[0].shape)


class RunningMean:
    """The same, one contribution at a time and one block at a time: its memory does not grow with the contributions."""

    def __init__(self, numel: int) -> None:
        self.sum = torch.zeros(numel)
        self.weight = 0.0

    @torch.no_grad()
    def add(self, start: int, values: Tensor, weight: float) -> None:
        """Σ[start : start + n] += w·values (fp32)."""
        if weight == 1.0:  # the common case, exact and one rounding fewer
            self.sum[start : start + values.numel()].add_(values)
        else:
            self.sum[start : start + values.numel()].add_(values, alpha=weight)

    def count(self, weight: float) -> None:
        """All blocks of one contribution are in."""
        if not weight > 0.0:
            raise ConfigError(f"a contribution's weight must be > 0, got {weight}")
        self.weight += weight

    @torch.no_grad()
    def result(self) -> Tensor:
        """g, in the memory of the sum: nothing can be added afterwards."""
        if self.weight == 0.0:
            raise ConfigError("the mean of no contributions is not defined")
        return self.sum.div_(self.weight)
