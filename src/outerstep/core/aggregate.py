"""How several pseudo-gradients become one.

    g = Σ w_i·Δ_i / Σ w_i

over the contributions that are present: a mean divides by the weights that arrived, not by those that were expected.

Products and sums are rounded one after the other (no fused multiply-add), so that the bits depend only on the order of
the contributions, not on the machine or on how a tensor is cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The definition above, all at once."""
    if not deltas:
        raise ConfigError("the mean of no contributions is not defined")
    total = torch.zeros(deltas[0].shape)
    for delta, weight in zip(deltas, weights, strict=True):
        if not weight > 0.0:
            raise ConfigError(f"a contribution's weight must be > 0, got {weight}")
        add_weighted(total, delta.to(torch.float32, copy=True), weight)
    divide(total, sum_in_order(weights))
    return total


def sum_in_order(weights: Sequence[float]) -> float:
    """Σ w, one after the other: the built-in `sum` of Python 3.12 rounds differently from that of 3.11."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


@torch.no_grad()
def add_weighted(total: Tensor, values: Tensor, weight: float) -> None:
    """total += w·values (both fp32), for callers that hold the total block by block. Overwrites `values`."""
    total.add_(values if weight == 1.0 else values.mul_(weight))


@torch.no_grad()
def divide(total: Tensor, weight: float) -> None:
    """total /= Σ w, likewise. For a power of two it multiplies, which gives the same bits and is faster."""
    if math.frexp(weight)[0] == 0.5:
        total.mul_(1.0 / weight)
    else:
        total.div_(divisor(weight, total.device))


def divisor(number: float, device: torch.device) -> Tensor | float:
    """What to divide fp32 values by on this device. A GPU multiplies by 1/n for a plain number n, which gives other
    bits; for a tensor it divides."""
    return torch.full((), number, device=device) if device.type == "cuda" else number
