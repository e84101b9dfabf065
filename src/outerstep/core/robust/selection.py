"""Rules that choose whole contributions by how close they are to their neighbours: Krum and multi-Krum.

    score_i = Σ over the n − f − 2 nearest j of ‖Δ_i − Δ_j‖²
    Krum: the one with the lowest score.    multi-Krum: the mean of the lowest n − f.

(Blanchard et al. 2017, "Machine Learning with Adversaries".) They withstand f attackers of n ≥ 2f + 3. Krum gives up
averaging, and with it most of the benefit of several workers when their pseudo-gradients are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigError
from .products import Products
from .rule import BlockFunction, RuleInputs, Selection, are_equal, check_offered, check_weights, weighted_mean_of


def krum_scores(products: Products, attackers: int) -> list[float]:
    """As above. With n ≤ f + 2 there are no neighbours, and all scores are equal."""
    nearest = max(0, len(products) - attackers - 2)
    return [
        math.fsum(sorted(square for j, square in enumerate(row) if j != i)[:nearest])
        for i, row in enumerate(products.distances2())
    ]


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """The indices of the lowest scores, ascending; between equal scores the first wins."""
    return sorted(sorted(range(len(scores)), key=lambda i: (scores[i], i))[:count])


def without(n: int, chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(n) if i not in chosen)


@dataclass(frozen=True)
class Krum:
    """One contribution, unchanged. Weights have no meaning here: unequal ones are refused."""

    attackers: int = 1  # f

    name: ClassVar[str] = "krum"
    needs_products: ClassVar[bool] = True
    needs_centre: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_attackers(self.attackers)

    @property
    def fewest(self) -> int:
        return 2 * self.attackers + 3

    def check(self, offered: int, weights: Sequence[float]) -> None:
        _check_enough(self.name, self.attackers, offered)
        check_weights(weights)
        if not are_equal(weights):
            raise ConfigError(
                f"krum takes one contribution as it is and cannot weigh them, got weights from {min(weights):g} to "
                f"{max(weights):g}; use multi_krum, or equal weights"
            )

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        (best,) = lowest(_scores(inputs, self.attackers), 1)
        return Selection(lambda values: values[best], without(len(inputs.weights), [best]))


@dataclass(frozen=True)
class MultiKrum:
    """The weighted mean of the best n − f, or of the best `keep`."""

    attackers: int = 1  # f
    keep: int | None = None

    name: ClassVar[str] = "multi_krum"
    needs_products: ClassVar[bool] = True
    needs_centre: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_attackers(self.attackers)
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep must be at least 1, got {self.keep}; None keeps all but the assumed attackers")

    @property
    def fewest(self) -> int:
        return max(2 * self.attackers + 3, (self.keep or 0) + self.attackers)

    def check(self, offered: int, weights: Sequence[float]) -> None:
        _check_enough(self.name, self.attackers, offered)
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        wanted = inputs.offered - self.attackers if self.keep is None else self.keep
        chosen = lowest(_scores(inputs, self.attackers), max(1, wanted))  # of fewer than that: all
        shares = [weight if i in chosen else 0.0 for i, weight in enumerate(inputs.weights)]
        return Selection(lambda values: weighted_mean_of(values, shares), without(len(shares), chosen))


def _scores(inputs: RuleInputs, attackers: int) -> list[float]:
    assert inputs.products is not None
    return krum_scores(inputs.products, min(attackers, max(0, (len(inputs.weights) - 3) // 2)))


def _check_attackers(attackers: int) -> None:
    if attackers < 1:
        raise ConfigError(f"attackers must be at least 1, got {attackers}; without any, use mean")


def _check_enough(name: str, attackers: int, offered: int) -> None:
    if offered < 2 * attackers + 3:
        most = (offered - 3) // 2
        remedy = f"assume {most} at most" if most >= 1 else "wait for five contributions at least"
        raise ConfigError(
            f"{name} against {attackers} attackers needs n ≥ 2f + 3 = {2 * attackers + 3} contributions, got "
            f"{offered}; {remedy}, or use trimmed_mean or median"
        )
