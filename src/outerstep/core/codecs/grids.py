"""The levels to which a value can be rounded, in units of its block's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .dither import unit


class Grid(Protocol):
    @property
    def top(self) -> float:
        """The largest level. The block's largest magnitude maps to it, so scale = absmax/top."""

    def codes(self, t: Tensor, spare: Tensor, out: Tensor) -> None:
        """fp32 t = x/scale, |t| ≤ 1.004·top → int8 codes of the nearest levels. Overwrites t and spare (like t)."""

    def dithered_codes(self, t: Tensor, noise: Tensor, out: Tensor) -> None:
        """|t| ≤ top, noise int32 uniform in [0, 2¹⁶) → codes of one of the two levels around t, with expected value t
        (to 2⁻¹⁷ of their distance). A t that is a level is unchanged. Overwrites t."""

    def levels(self, codes: Tensor, out: Tensor) -> None:
        """Any sign-extended codes → fp32 levels. Overwrites codes."""


@dataclass(frozen=True)
class Integers:
    """−top … top, zero among them; ties to even. The code is the level."""

    top: float

    def codes(self, t: Tensor, spare: Tensor, out: Tensor) -> None:
        out.copy_(t.round_())

    def dithered_codes(self, t: Tensor, noise: Tensor, out: Tensor) -> None:
        out.copy_(t.add_(unit(noise)).floor_())

    def levels(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes)


@dataclass(frozen=True)
class HalfIntegers:
    """±½, ±1½, … ±top: an even number of levels, as many above zero as below, zero not among them. level = code + ½."""

    top: float

    def codes(self, t: Tensor, spare: Tensor, out: Tensor) -> None:
        out.copy_(t.floor_())

    def dithered_codes(self, t: Tensor, noise: Tensor, out: Tensor) -> None:
        out.copy_(t.sub_(0.5).add_(unit(noise)).floor_())

    def levels(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes).add_(0.5)


@dataclass(frozen=True)
class PowersOfTwo:
    """0, ±1, ±2, ±4, … ±64: sign and three exponent bits (E3M0). level = ±2^(m−1), or 0 for m = 0; code = m for +,
    m − 8 for −. Ties go to the larger magnitude.

    The nearest level changes at |t| = ½, 1½, 3, 6, 12, 24, 48. There g(t) = |t| + max(½, |t|/3) is 1, 2, 4, 8, 16, 32,
    64, so that m is g's binary exponent plus one: one read of g's bits instead of seven comparisons.
    """

    top: float = 64.0

    def codes(self, t: Tensor, spare: Tensor, out: Tensor) -> None:
        more = torch.mul(t, 1.0 / 3.0, out=spare).abs_().clamp_(min=0.5)
        g = torch.copysign(more, t, out=spare).add_(t).view(torch.int32)
        sign = torch.bitwise_right_shift(g, 28, out=t.view(torch.int32)).bitwise_and_(8)
        out.copy_(g.bitwise_right_shift_(23).sub_(126).bitwise_or_(sign))  # its low four bits

    def dithered_codes(self, t: Tensor, noise: Tensor, out: Tensor) -> None:
        """With y = max(|t| + 1, 2·|t|), m is y's binary exponent for t on a level; between two levels y's fraction says
        how far up t is, and adding noise to it carries into the exponent with that probability."""
        out.copy_(t.view(torch.int32) >> 31).bitwise_left_shift_(3)
        y = torch.maximum(t.abs_() + 1.0, t * 2.0)
        out.add_((((y.view(torch.int32) + (noise << 7)) >> 23) - 127).to(torch.int8))

    def levels(self, codes: Tensor, out: Tensor) -> None:
        n = codes.shape[-1]
        shift, magnitude = (
            out.view(torch.int8)[..., :n],
            out.view(torch.int8)[..., n : 2 * n],
        )  # room until the last line
        torch.bitwise_not(codes, out=shift).bitwise_and_(7)
        torch.bitwise_right_shift(magnitude.fill_(64), shift, out=magnitude)
        sign = codes.bitwise_right_shift_(3)  # −1 or 0
        out.copy_(torch.sub(magnitude.bitwise_xor_(sign), sign, out=codes))
