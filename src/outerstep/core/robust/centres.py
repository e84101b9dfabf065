"""Rules that find a centre of whole contributions: geometric median and centered clipping.

Both iterate v ← Σ a_i·x_i with new a, and need only the distances of the contributions to v. Those follow from the
distances between them: for Σ a = 1

    ‖x_j − Σ a_i·x_i‖² = Σ_i a_i·d_ij² − ½·Σ_ik a_i·a_k·d_ik²

so that all iterations together need only the one pass that measures d; values are combined once, at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...errors import ConfigError
from ..aggregate import divide, sum_in_order
from .rule import BlockFunction, RuleInputs, check_offered, to_bf16, weighted_mean_of, weighted_sum


def distances_to(mixture: Sequence[float], distances2: Sequence[Sequence[float]]) -> list[float]:
    """‖x_j − Σ a_i·x_i‖ for each j, with Σ a = 1: the identity above."""
    across = [math.fsum(a * square for a, square in zip(mixture, row, strict=True)) for row in distances2]
    spread = 0.5 * math.fsum(a * each for a, each in zip(mixture, across, strict=True))
    return [math.sqrt(max(0.0, each - spread)) for each in across]


@dataclass(frozen=True)
class GeometricMedian:
    """The point with the least Σ w_i·‖x_i − v‖, by smoothed Weiszfeld iteration:

        v ← Σ β_i·x_i / Σ β_i,    β_i = w_i / max(ν, ‖x_i − v‖)

    (Pillutla et al. 2019, "Robust Aggregation for Federated Learning"). ν is `smoothing` times the median distance
    between two contributions. Withstands any minority of the weight.
    """

    iterations: int = 32  # they cost nothing here; it takes a few to reject one far outlier
    smoothing: float = 1e-6

    name: ClassVar[str] = "geometric_median"
    fewest: ClassVar[int] = 3
    needs_products: ClassVar[bool] = True
    needs_centre: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)
        if not 0.0 < self.smoothing < 1.0:
            raise ConfigError(f"smoothing must be above 0 and below 1, got {self.smoothing}")

    def check(self, offered: int, weights: Sequence[float]) -> None:
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        assert inputs.products is not None
        pulls = weiszfeld(inputs.products.distances2(), inputs.weights, self.iterations, self.smoothing)
        shares = [weight * pull for weight, pull in zip(inputs.weights, pulls, strict=True)]
        return lambda values: weighted_mean_of(values, shares)


def weiszfeld(
    distances2: Sequence[Sequence[float]], weights: Sequence[float], iterations: int, smoothing: float
) -> list[float]:
    """1 / max(ν, ‖x_i − v‖) after the last iteration, relative to the largest of them, each rounded to bf16."""
    n = len(weights)
    between = [math.sqrt(distances2[i][j]) for i in range(n) for j in range(i)]
    least = smoothing * statistics.median(between) if between else 0.0
    if least == 0.0:  # more than half are one point, or there is only one
        least = smoothing * max(between, default=0.0) or 1.0
    pulls = [1.0] * n
    for _ in range(iterations):
        betas = [weight * pull for weight, pull in zip(weights, pulls, strict=True)]
        total = math.fsum(betas)
        found = distances_to([beta / total for beta in betas], distances2)
        pulls = [1.0 / max(least, distance) for distance in found]
        strongest = max(pulls)
        pulls = [pull / strongest for pull in pulls]
    return [to_bf16(pull) for pull in pulls]


@dataclass(frozen=True)
class CenteredClipping:
    """From the previous aggregate towards the mean, with each pull limited to ρ:

        v ← v + Σ w_i·(x_i − v)·min(1, ρ/‖x_i − v‖) / Σ w

    (Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization"). Contributions within ρ count
    as in the mean. radius None: ρ is the median of the distances to the previous aggregate.
    """

    radius: float | None = None  # ρ
    iterations: int = 3

    name: ClassVar[str] = "centered_clipping"
    fewest: ClassVar[int] = 1
    needs_products: ClassVar[bool] = True
    needs_centre: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)
        if self.radius is not None and not 0.0 < self.radius < math.inf:
            raise ConfigError(f"radius must be a number > 0, got {self.radius}; None takes the median distance")

    def check(self, offered: int, weights: Sequence[float]) -> None:
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        assert inputs.products is not None
        weights, total = inputs.weights, sum_in_order(inputs.weights)
        kept = clipping(inputs.products.distances2(), weights, self.iterations, self.radius)
        shares = [weight * factor for weight, factor in zip(weights, kept, strict=True)]

        def combine(values: Tensor) -> Tensor:
            centre, others = values[0], values[1:]
            pull = weighted_sum(others.sub_(centre), shares)
            divide(pull, total)
            return pull.add_(centre)

        return combine


def clipping(
    distances2: Sequence[Sequence[float]], weights: Sequence[float], iterations: int, radius: float | None
) -> list[float]:
    """b with v = v₀ + Σ w_i·b_i·(x_i − v₀) / Σ w after the last iteration, each rounded to bf16; all 1 if none was
    clipped. `distances2`: v₀ first, then the contributions."""
    total = math.fsum(weights)
    parts = [weight / total for weight in weights]
    kept = [0.0] * len(weights)  # v so far
    for _ in range(iterations):
        inside = [part * each for part, each in zip(parts, kept, strict=True)]
        found = distances_to([1.0 - math.fsum(inside), *inside], distances2)[1:]
        if radius is None:
            radius = statistics.median(found)
        pulls = [1.0 if distance <= radius else radius / distance for distance in found]
        left = 1.0 - math.fsum(part * pull for part, pull in zip(parts, pulls, strict=True))
        kept = [left * each + pull for each, pull in zip(kept, pulls, strict=True)]
    return [to_bf16(each) for each in kept]


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ConfigError(f"iterations must be at least 1, got {iterations}")
