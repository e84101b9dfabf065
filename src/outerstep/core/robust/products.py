"""Inner products of contributions: everything that rules and screens need to know about whole contributions.

    G_ij = ⟨Δ_i, Δ_j⟩:    ‖Δ_i‖² = G_ii,    ‖Δ_i − Δ_j‖² = G_ii + G_jj − 2·G_ij,    ⟨Δ_i, Σ_j Δ_j⟩ = Σ_j G_ij

They take one pass. Peers must compute the same numbers to the last bit, or they would disagree about who is refused;
but a floating-point sum of products depends on vector width, threads and device. An integer sum does not: in each leaf
of 4096 values a contribution is rounded to multiples of 2⁻²⁰ of its largest value (rounded up to a power of two). A
product then has 40 bits, a leaf's sum 52, and fp64 holds 53: every order of addition gives the same. Leaves are added
one after the other.

The rounding changes a norm by about a millionth, and even for adversarial values by at most one part in 30,000. It
hides a difference between two contributions only if that is below a millionth of the leaf's largest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .streams import LEAF_VALUES, B, Reader, ShareBlocks, Stack, one_by_one

BITS = 20  # 2·20 + log2(4096) = 52


@dataclass(frozen=True)
class Products:
    """G, by rows."""

    rows: tuple[tuple[float, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def norm(self, i: int) -> float:
        return math.sqrt(self.rows[i][i])

    def distances2(self) -> list[list[float]]:
        """‖Δ_i − Δ_j‖²; never below 0, and exactly 0 for equal ones."""
        g = self.rows
        return [[max(0.0, g[i][i] + g[j][j] - 2.0 * g[i][j]) for j in range(len(g))] for i in range(len(g))]

    def of(self, chosen: Sequence[int]) -> Products:
        """The products of some contributions, in this order."""
        return Products(tuple(tuple(self.rows[i][j] for j in chosen) for i in chosen))

    def mixed(self, mixtures: Sequence[Sequence[float]]) -> Products:
        """The products of Σ_i a_i·Δ_i for each mixture a: A·G·Aᵀ."""
        half = [[math.fsum(a * g for a, g in zip(mix, row, strict=True)) for row in self.rows] for mix in mixtures]
        return Products(
            tuple(tuple(math.fsum(a * h for a, h in zip(mix, row, strict=True)) for mix in mixtures) for row in half)
        )


@torch.no_grad()
def products(
    readers: Sequence[Reader[B]], blocks: Sequence[B], device: torch.device, share: ShareBlocks = one_by_one
) -> Products:
    """G of n contributions. One with NaN or Inf has a non-finite diagonal entry; the others are unaffected."""
    n = len(readers)
    total = torch.zeros(n, n, dtype=torch.float64)

    def multiply(block: B, stack: Stack) -> Tensor:
        whole, unit = _whole_numbers(stack.fill(readers, block))
        found = whole @ whole.transpose(1, 2)  # [L, n, n]
        return found * (unit[:, :, None] * unit[:, None, :])

    share(blocks, lambda: Stack(n, blocks, device), multiply, lambda _, leaves: _add_in_order(total, leaves))
    return Products(tuple(tuple(row) for row in total.tolist()))


@torch.no_grad()
def squares(
    readers: Sequence[Reader[B]], blocks: Sequence[B], device: torch.device, share: ShareBlocks = one_by_one
) -> list[float]:
    """G's diagonal only, with the same bits."""
    total = torch.zeros(len(readers), dtype=torch.float64)

    def square(block: B, stack: Stack) -> Tensor:
        whole, unit = _whole_numbers(stack.fill(readers, block))
        return whole.square_().sum(2) * unit.square()

    share(blocks, lambda: Stack(len(readers), blocks, device), square, lambda _, leaves: _add_in_order(total, leaves))
    return [float(each) for each in total]


def _whole_numbers(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] → q: whole numbers in fp64 [L, n, 4096], |q| ≤ 2²⁰, and u [L, n], powers of two, with values ≈ q·u."""
    n, m = values.shape
    leaves = -(-m // LEAF_VALUES)
    if m % LEAF_VALUES:
        values = torch.nn.functional.pad(values, (0, leaves * LEAF_VALUES - m))
    parts = values.view(n, leaves, LEAF_VALUES).transpose(0, 1)
    largest = parts.abs().amax(2)  # NaN if one is
    exponent = (largest.view(torch.int32) >> 23 & 0xFF) - 126  # the least with |value| < 2^exponent
    whole = parts.double().mul_(_power_of_two(BITS - exponent)[:, :, None]).round_()
    return whole, _power_of_two(exponent - BITS)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exactly: built from its bits, because exp2 and pow need not be exact."""
    return (exponent.to(torch.int64) + 1023 << 52).view(torch.float64)


def _add_in_order(total: Tensor, leaves: Tensor) -> None:
    """One leaf after the other: each of numpy's accumulated sums is the one before it and one leaf."""
    each = np.concatenate((total.numpy()[None], leaves.cpu().numpy()))
    total.copy_(torch.from_numpy(np.add.accumulate(each, axis=0)[-1]))
