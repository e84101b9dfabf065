"""Rules that sort one coordinate at a time: trimmed mean, median. (The plain mean is in rule.py.)

    trimmed mean   without the f smallest and the f largest          withstands f < n/2
    median         half of the weight is below it, half above        withstands any minority

(Yin et al. 2018, "Byzantine-Robust Distributed Learning".) Trimming goes by number, not by weight: claimed weights
do not decide how many are cut off. If honest values are skewed, their median is smaller than their mean: the last two
rules shorten the step slightly.

Values are added from the smallest to the largest. They are sorted by a fixed network of comparisons, so that with equal
values of different weight the same one is trimmed everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import ConfigError
from ..aggregate import divide, sum_in_order
from .rule import BlockFunction, RuleInputs, are_equal, check_offered, weighted_mean_of

DEFAULT_TRIM = 0.2
HAIR = 1e-9  # ⌊(1/49)·49⌋ is 0 in floating point


@dataclass(frozen=True)
class TrimmedMean:
    """The weighted mean without the f smallest and the f largest of each coordinate, f = ⌊fraction·n⌋.

    fraction None: a fifth, and at least one: f = max(1, ⌊n/5⌋).
    """

    fraction: float | None = None

    name: ClassVar[str] = "trimmed_mean"
    needs_products: ClassVar[bool] = False
    needs_centre: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0.0 < self.fraction < 0.5:
            raise ConfigError(
                f"trim_fraction must be above 0 and below 0.5 (it is cut off at both ends), got {self.fraction}"
            )

    @property
    def fewest(self) -> int:
        return 3 if self.fraction is None else max(3, math.ceil(1.0 / self.fraction - HAIR))

    def trimmed(self, n: int) -> int:
        """f"""
        if self.fraction is None:
            return max(1, math.floor(DEFAULT_TRIM * n + HAIR))
        return math.floor(self.fraction * n + HAIR)

    def check(self, offered: int, weights: Sequence[float]) -> None:
        if self.fraction is not None and offered >= 3 and self.trimmed(offered) < 1:
            raise ConfigError(
                f"trim_fraction {self.fraction:g} of {offered} contributions trims nothing "
                f"(⌊{self.fraction:g}·{offered}⌋ = 0); the smallest that trims one is "
                f"{math.ceil(1e4 / offered) / 1e4:g}, or wait for {self.fewest} contributions"
            )
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        weights = inputs.weights
        cut_off = min(self.trimmed(inputs.offered), (len(weights) - 1) // 2)
        return lambda values: trimmed_mean(values, weights, cut_off)


@dataclass(frozen=True)
class Median:
    """The weighted median of each coordinate; between two, their mean."""

    name: ClassVar[str] = "median"
    fewest: ClassVar[int] = 3
    needs_products: ClassVar[bool] = False
    needs_centre: ClassVar[bool] = False

    def check(self, offered: int, weights: Sequence[float]) -> None:
        check_offered(self, offered, weights)

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        return lambda values: median(values, inputs.weights)


def trimmed_mean(values: Tensor, weights: Sequence[float], cut_off: int) -> Tensor:
    """[n, m] → [m]: Σ w·x / Σ w over the ranks [f, n − f)."""
    kept = slice(cut_off, len(weights) - cut_off)
    if are_equal(weights):
        return weighted_mean_of(torch.stack(ascending(values)[kept]), [1.0] * len(weights[kept]))
    rows, each = ascending_weighted(values, weights, torch.float32)
    total, weight = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for x, w in zip(rows[kept], each[kept], strict=True):
        total.add_(x * w)
        weight.add_(w)
    return total.div_(weight)


def median(values: Tensor, weights: Sequence[float]) -> Tensor:
    """[n, m] → [m]: halfway between the first value that reaches half of the weight and the first that exceeds it."""
    n = len(weights)
    if are_equal(weights):
        ordered = ascending(values)
        low, high = ordered[(n - 1) // 2], ordered[n // 2]
    else:
        rows, each = ascending_weighted(values, weights, torch.float64)
        half, up_to = 0.5 * sum_in_order(weights), list(accumulate(each))  # the weight of all up to a rank
        low = high = rows[-1]
        for x, weight in zip(reversed(rows), reversed(up_to), strict=True):
            low, high = torch.where(weight >= half, x, low), torch.where(weight > half, x, high)
    middle = low + high
    divide(middle, 2.0)
    return middle.add_(0.0)  # −0 and 0 are equal, and either may be the median


def ascending(values: Tensor) -> list[Tensor]:
    """The rows of [n, m] with each column sorted. A network of minima and maxima: for a few rows many times faster than
    sorting each column, with the same bits."""
    rows = list(values)
    for i, j in comparators(len(rows)):
        rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])
    return rows


def ascending_weighted(
    values: Tensor, weights: Sequence[float], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The same with the weight of each value, [m] per row, which moves with its value."""
    rows, m = list(values), values.shape[1]
    each = [torch.full((m,), weight, dtype=dtype, device=values.device) for weight in weights]
    for i, j in comparators(len(rows)):
        swapped = rows[i] > rows[j]
        rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])
        each[i], each[j] = torch.where(swapped, each[j], each[i]), torch.where(swapped, each[i], each[j])
    return rows, each


@lru_cache(maxsize=64)
def comparators(n: int) -> tuple[tuple[int, int], ...]:
    """Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M), for any n."""
    return tuple(_merge_exchange(n))


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top if n > 1 else 0
    while p > 0:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
