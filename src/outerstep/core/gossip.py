"""Rounds of two: each peer exchanges with one other, and none with all.

**NoLoCo** (Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training"). Peer i has slow weights φ_i
(its anchor) and, after its local steps, fast weights θ_i. With its partner j, means over the two:

    m_i ← α·m_i + β·mean(θ − φ) − γ·(φ_i − mean(φ))              α 0.5, β 0.7, γ 0.7
    φ_i ← φ_i + m_i

In this project's terms θ − φ is −Δ, the negative pseudo-gradient; so β gets a minus sign. The last term pulls the two
slow weights together; nothing makes them equal, and the distance between them is a metric to watch.

**Who with whom**: a seeded random permutation, cut into pairs (with an odd number one sits out); or the one-peer
exponential graph (Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Learning"): in
round t peer i and i XOR 2^(t mod log2 n). For n a power of two the mean of all is exact after log2 n rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..defaults import OUTER_LR
from ..errors import ConfigError
from .outer import MomentumBuffers


@dataclass(frozen=True)
class NoLoCo:
    """α, β, γ of the rule above."""

    momentum: float = 0.5
    outer_lr: float = OUTER_LR
    pull: float = 0.7

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"outer momentum must be in [0, 1), got {self.momentum}")
        if not 0.0 < self.outer_lr < math.inf:
            raise ConfigError(f"outer lr must be a number > 0, got {self.outer_lr}")
        if not 0.0 <= self.pull <= 1.0:
            raise ConfigError(f"the pull towards the partner must be in [0, 1], got {self.pull}")


@torch.no_grad()
def noloco_step(
    phi: Tensor, m: Tensor, own_delta: Tensor, partner_phi: Tensor, partner_delta: Tensor, rule: NoLoCo
) -> None:
    """Move φ and m in place. All fp32 of one shape; Δ = φ − θ of each. Every product and sum is rounded by itself."""
    mean_delta = (own_delta + partner_delta) * 0.5
    apart = (phi - partner_phi) * 0.5  # φ_i − mean(φ)
    m.mul_(rule.momentum).sub_(mean_delta * rule.outer_lr).sub_(apart * rule.pull)
    phi.add_(m)


@torch.no_grad()
def average_step(phi: Tensor, own_delta: Tensor, partner_phi: Tensor, partner_delta: Tensor) -> None:
    """φ ← the mean of the two fast weights, θ = φ − Δ: what the exponential graph spreads."""
    phi.sub_(own_delta).add_(partner_phi - partner_delta).mul_(0.5)


class PairOuter:
    """The step of a peer in rounds of two, with its momentum m. `rule`: NoLoCo's, or None for the mean of the two."""

    def __init__(self, rule: NoLoCo | None) -> None:
        self.rule, self.momentum = rule, MomentumBuffers()

    def block(
        self,
        name: str,
        phi: Tensor,
        own_delta: Tensor,
        partner_phi: Tensor,
        partner_delta: Tensor,
        start: int,
        like: Tensor | None,
    ) -> None:
        """Move values from number `start` of a tensor, flat, in place. `like`: the whole anchor of a parameter; None:
        it is a statistic, of which both take the mean."""
        if self.rule is None or like is None:
            average_step(phi, own_delta, partner_phi, partner_delta)
            return
        kept = self.momentum.of(name, like)[start : start + phi.numel()]
        m = kept.to(phi.device)
        noloco_step(phi, m, own_delta, partner_phi, partner_delta, self.rule)
        if m is not kept:
            kept.copy_(m)


def random_partner(ids: Sequence[str], own: str, seed: str, turn: int) -> str | None:
    """The one that `own` exchanges with in this round; None: it sits out. The same for all who ask with the same ids,
    seed and round, on every machine."""
    drawn = sorted(sorted(ids), key=lambda each: hashlib.sha256(f"{seed}/{turn}/{each}".encode()).digest())
    place = drawn.index(own)
    other = place ^ 1
    return drawn[other] if other < len(drawn) else None


def exponential_partner(ids: Sequence[str], own: str, turn: int) -> str | None:
    """i XOR 2^(t mod ⌈log2 n⌉) in the order of the ids; None: there is nobody with that number, and it sits out."""
    ordered = sorted(ids)
    if len(ordered) < 2:
        return None
    levels = (len(ordered) - 1).bit_length()
    other = ordered.index(own) ^ (1 << turn % levels)
    return ordered[other] if other < len(ordered) else None
