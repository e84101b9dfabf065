"""Attacks: what a hostile or broken worker may send instead of its pseudo-gradient, for tests and measurements.

They are in the package so that users can test the settings of a run against them before they trust it. An attack is a
function of what the attacker knows: in the worst case everything that the honest workers send in this round.

| attack | sends | the idea |
|---|---|---|
| sign_flip | −Δ | climb instead of descend; its norm is honest |
| flip_10 | −10·Δ | the same, ten times |
| scale_1000 | 1000·Δ | one contribution dominates all others |
| gaussian | noise, 10 times as long as Δ | the plain mean survives it: noise averages out over the rounds |
| gaussian_1000 | noise, 1000 times as long | this it does not survive |
| gaussian_quiet | noise, as long as Δ | passes every norm check |
| alie | mean − 1.5·σ in every coordinate | "a little is enough" (Baruch et al. 2019): inside the honest scatter |
| ipm | −½·mean | inner product manipulation (Xie et al. 2019): short, so that no norm reveals it |
| ipm_10 | −10·mean | the same, long enough to reverse the mean |
| mimic | what the first honest worker sends | that one counts twice (Karimireddy et al. 2022) |
| nan, inf | one NaN, one Inf | |
| zero | 0 | a worker that does nothing but is counted |
| stale | its own pseudo-gradient of the first round, in every round | |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scene:
    """What an attacker sees, as flat fp32 tensors."""

    own: Tensor  # [m]: what it would send if it were honest
    honest: Tensor  # [h, m]: what the others send in this round
    past: Sequence[Tensor] = field(default_factory=tuple)  # its own of earlier rounds, oldest first
    seed: int = 0  # different in each round


Attack = Callable[[Scene], Tensor]


def scaled(factor: float) -> Attack:
    """factor·Δ"""
    return lambda scene: factor * scene.own


def gaussian(factor: float) -> Attack:
    """Noise that is `factor` times as long as Δ."""

    def attack(scene: Scene) -> Tensor:
        generator = torch.Generator(scene.own.device).manual_seed(scene.seed)
        noise = torch.randn(scene.own.shape, generator=generator, device=scene.own.device)
        length = torch.linalg.vector_norm(noise).clamp(min=1e-30)
        sent: Tensor = noise * (factor * torch.linalg.vector_norm(scene.own) / length)
        return sent

    return attack


def a_little_is_enough(z: float) -> Attack:
    """mean − z·σ of the honest contributions. (The published z follows from the number of attackers, and is 0 for one
    of eight; the paper's own experiments use 1 to 1.5.)"""
    return lambda scene: scene.honest.mean(0) - z * scene.honest.std(0, correction=0)


def against_the_mean(epsilon: float) -> Attack:
    """−ε·mean of the honest contributions"""
    return lambda scene: -epsilon * scene.honest.mean(0)


def spoiled_by(value: float) -> Attack:
    """Δ with one value replaced, in the middle."""

    def attack(scene: Scene) -> Tensor:
        sent = scene.own.clone()
        sent[len(sent) // 2 : len(sent) // 2 + 1] = value
        return sent

    return attack


ATTACKS: Mapping[str, Attack] = {
    "sign_flip": scaled(-1.0),
    "flip_10": scaled(-10.0),
    "scale_1000": scaled(1000.0),
    "gaussian": gaussian(10.0),
    "gaussian_1000": gaussian(1000.0),
    "gaussian_quiet": gaussian(1.0),
    "alie": a_little_is_enough(1.5),
    "ipm": against_the_mean(0.5),
    "ipm_10": against_the_mean(10.0),
    "mimic": lambda scene: scene.honest[0].clone(),
    "nan": spoiled_by(float("nan")),
    "inf": spoiled_by(float("inf")),
    "zero": lambda scene: torch.zeros_like(scene.own),
    "stale": lambda scene: (scene.past[0] if scene.past else scene.own).clone(),
}
