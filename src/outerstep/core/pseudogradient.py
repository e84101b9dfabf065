"""The pseudo-gradient and its sign.

A worker starts from the anchor θ, trains, and ends at its local weights l. What it learned is

    Δ = θ − l                    (the pseudo-gradient, in the place of a gradient)

so that the outer optimizer *descends*: θ − η·Δ moves towards l, and with η = 1 and no momentum it arrives there.
The sign is taken only here (docs/adr/0001-sign-convention.md).

Arithmetic is fp32 whatever the model's dtype. A bf16 or fp16 model cannot hold θ itself, only θ rounded to its dtype,
and that is where its training began; so Δ is measured from there, and a model that has not moved has Δ = 0 exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor | None = None) -> Tensor:
    """Δ = θ − l, fp32, on the anchor's device, in `out` if given. All of one shape."""
    local = local.detach().to(anchor.device)
    return torch.sub(_held(anchor, local), local.float(), out=out)


@torch.no_grad()
def adopt(local: Tensor, agreed: Tensor) -> None:
    """l ← θ′: our steps are in the agreement, so the agreement replaces them."""
    local.copy_(agreed)


@torch.no_grad()
def carry(local: Tensor, anchor: Tensor, agreed: Tensor, sent: Tensor) -> None:
    """l ← l + (θ′ − θ) + Δ_sent: what was sent is in the agreement, the steps taken since are not, and stay ours.
    (With l as it was when Δ_sent = θ − l was taken, this is l ← θ′.)"""
    moved = local.to(anchor.device).float() + (_held(agreed.to(anchor.device), local) - _held(anchor, local)) + sent
    local.copy_(moved)


@torch.no_grad()
def mix(local: Tensor, agreed: Tensor, alpha: float) -> None:
    """l ← α·l + (1−α)·θ′: what was sent τ steps ago is in the agreement; of the steps since then, α stays."""
    local.copy_(alpha * local.to(agreed.device).float() + (1.0 - alpha) * agreed)


@torch.no_grad()
def rebase(local: Tensor, anchor: Tensor, agreed: Tensor) -> None:
    """l ← l + (θ′ − θ): the round closed without us. We gain what the others did and keep our own unsent steps, so that
    the next pseudo-gradient θ′ − l holds exactly those: no work is undone, and none is sent twice."""
    moved = local.to(anchor.device).float() + (_held(agreed.to(anchor.device), local) - _held(anchor, local))
    local.copy_(moved)


def _held(theta: Tensor, local: Tensor) -> Tensor:
    """θ rounded to the model's dtype, back in fp32."""
    return theta.to(local.dtype).float()
