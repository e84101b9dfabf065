"""The protocol of an aggregation rule: how the accepted contributions of a round become one.

A rule is called twice. `check`, before anything is read: is it defined for so many contributions with these weights?
`begin`, after the first pass: it gets the measurements and returns a function of blocks, [n, m] → [m].

Screens remove contributions between the two. A rule set up for n of them must work with fewer, or a worker could stop
the run by sending something that is refused: it lowers the number of attackers it withstands to what remains.

Sums run in the order of the worker ids, products and sums are rounded one after the other, and a factor that depends on
data is rounded to bf16 before it multiplies anything: every peer computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ...errors import ConfigError
from ..aggregate import add_weighted, divide, sum_in_order
from .products import Products

BlockFunction = Callable[[Tensor], Tensor]
"""fp32 [n, m], which it may overwrite, → fp32 [m]"""


@dataclass(frozen=True)
class Selection:
    """The result of a rule that chooses whole contributions: `combine`, and the indices it does not use."""

    combine: BlockFunction
    unused: tuple[int, ...]

    def __call__(self, values: Tensor) -> Tensor:
        return self.combine(values)


@dataclass(frozen=True)
class RuleInputs:
    """What a rule gets before values are combined: about the accepted contributions, in the order of worker ids."""

    offered: int  # contributions before the screens
    weights: tuple[float, ...]
    products: Products | None = None  # for a rule that needs them; if it needs a centre, that is row 0


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def fewest(self) -> int:
        """The smallest number of contributions it is defined for."""

    @property
    def needs_products(self) -> bool: ...

    @property
    def needs_centre(self) -> bool:
        """If true, row 0 of products and blocks is the previous aggregate."""

    def check(self, offered: int, weights: Sequence[float]) -> None:
        """Raise ConfigError if the rule is not defined for so many, or for these weights."""

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        """Works for one or more contributions, whatever `check` requires."""


def check_offered(rule: Rule, offered: int, weights: Sequence[float]) -> None:
    """The check of every rule: enough contributions, each with a valid weight."""
    if offered < rule.fewest:
        raise ConfigError(
            f"{rule.name} needs at least {rule.fewest} contributions, got {offered}; wait for more, or use another rule"
        )
    check_weights(weights)


def check_weights(weights: Sequence[float]) -> None:
    for weight in weights:
        if not 0.0 < weight < math.inf:
            raise ConfigError(f"a contribution's weight must be a number > 0, got {weight}")


def are_equal(weights: Sequence[float]) -> bool:
    return all(weight == weights[0] for weight in weights)


def weighted_sum(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Σ s_i·x_i over the rows, in their order. Overwrites them."""
    total = torch.zeros_like(values[0])
    for row, share in zip(values, shares, strict=True):
        if share != 0.0:
            add_weighted(total, row, share)
    return total


def weighted_mean_of(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Σ s_i·x_i / Σ s_i; of shares 1 and 0 the mean of some rows. Overwrites them."""
    total = weighted_sum(values, shares)
    divide(total, sum_in_order(shares))
    return total


def to_bf16(factor: float) -> float:
    """The nearest number with eight significant bits (ties to even), if it is neither huge nor tiny."""
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(mantissa * 256.0), exponent - 8)


@dataclass(frozen=True)
class Mean:
    """Σ w·x / Σ w: it withstands nobody. Behind the screens it is the default: it costs honest workers nothing."""

    name: ClassVar[str] = "mean"
    fewest: ClassVar[int] = 1
    needs_products: ClassVar[bool] = False
    needs_centre: ClassVar[bool] = False

    def check(self, offered: int, weights: Sequence[float]) -> None:
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        return lambda values: weighted_mean_of(values, inputs.weights)
