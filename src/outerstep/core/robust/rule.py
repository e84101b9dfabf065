"""What a rule is: how the accepted contributions of a round become one.

A rule is asked twice. `check` before anything is read: is it defined for so many contributions with such weights?
`begin` after the first pass: it gets what was measured and returns a function of blocks, [n, m] → [m].

Screens remove contributions between the two. A rule that was set up for n of them must go on with fewer, or whoever
sends something that is refused could stop the run: it lowers the number of attackers it withstands to what is left.

Sums go in the order of the worker ids, products and sums are rounded one after the other, and a factor that depends on
data is rounded to bf16 before it multiplies anything: every peer finds the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ConfigError
from ..aggregate import add_weighted, divide, sum_in_order
from .products import Products

BlockFunction = Callable[[Tensor], Tensor]
"""fp32 [n, m], which it may overwrite, → fp32 [m]"""


@dataclass(frozen=True)
class Selection:
    """What a rule returns that chooses whole contributions: `combine`, and of which it takes nothing."""

    combine: BlockFunction
    unused: tuple[int, ...]

    def __call__(self, values: Tensor) -> Tensor:
        return self.combine(values)


@dataclass(frozen=True)
class RuleInputs:
    """What is known before values are combined: about those accepted, in the order of their worker ids."""

    offered: int  # how many there were before the screens
    weights: tuple[float, ...]
    products: Products | None = None  # for a rule that needs them; if it needs a centre, that is row 0


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def fewest(self) -> int:
        """contributions that it is defined for"""

    @property
    def needs_products(self) -> bool: ...

    @property
    def needs_centre(self) -> bool:
        """Row 0 of products and blocks is then the previous aggregate."""

    def check(self, offered: int, weights: Sequence[float]) -> None:
        """ConfigError if it is not defined for so many, or cannot weigh them so."""

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        """For one or more contributions, whatever `check` asks for."""


def check_offered(rule: Rule, offered: int, weights: Sequence[float]) -> None:
    """What every rule asks for: enough contributions, each with a weight."""
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
