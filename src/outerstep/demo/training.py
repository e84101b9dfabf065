"""What every row of the demo's table shares: schedule, optimizer, loop and evaluation.

Rows differ only in the number of shards per replica and in who takes the outer step; nothing here depends on either.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outerstep.demo.corpus import BatchStream
from outerstep.demo.model import GPT, GPTConfig


@dataclass(frozen=True)
class TrainSettings:
    """How a replica trains. The default rate is the lone worker's best (2e-3 and 6e-3 are worse, 4e-3 is equal)."""

    steps: int = 600
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    final_fraction: float = 0.1  # of the learning rate, where the cosine ends
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class StepReport:
    """A step's number, from 0, and its loss before the update: the mean over its shards, in nats per byte."""

    step: int
    loss: float


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then half a cosine down to `final_fraction`; a function of the step alone.

        step < W:   γ·(step + 1)/W
        otherwise:  γ·(f + (1 − f)·(1 + cos(π·p))/2),   p = (step − W)/(steps − 1 − W), at most 1

    The last step, and any after it, runs at γ·f.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    decay_steps = max(1, settings.steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * (settings.final_fraction + (1 - settings.final_fraction) * cosine)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW that decays only matrices: pulling the gains of the norms towards zero would defeat their purpose."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def make_stream(text: Tensor, shard: int, settings: TrainSettings, *, context: int = GPTConfig.context) -> BatchStream:
    """The batches of one shard of `text` (uint8 [n]), at the seed and batch size that all rows share."""
    return BatchStream(text, shard=shard, seed=settings.seed, batch_size=settings.batch_size, context=context)


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    streams: Sequence[BatchStream],
    settings: TrainSettings,
    *,
    first_step: int = 0,
) -> Iterator[StepReport]:
    """Train to `settings.steps`, one report per step; the caller's loop body runs between steps.

    The gradient of a step is the mean over `streams`. One stream is a lone worker. k streams are k data-parallel
    workers computed one after the other: g = (1/k)·Σ g_s is what their all-reduce would give, clipped once afterwards,
    so the result is theirs up to rounding.

    Args:
        first_step: where to start, for a worker that joins mid-run; learning rate and batches follow from it.
    """
    if not streams:
        raise ValueError("train needs at least one stream of batches, got none; pass one per shard (make_stream)")
    model.train()
    for step in range(first_step, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, settings)
        mean_loss = 0.0
        for stream in streams:
            loss = _loss(model, *stream.batch(step)) / len(streams)
            loss.backward()  # type: ignore[no-untyped-call]
            mean_loss += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield StepReport(step, mean_loss)


@torch.no_grad()
def evaluate(model: GPT, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean nats per byte over `batches` (pairs of int64 [B, T]); the model's mode is restored."""
    was_training = model.training
    model.eval()
    try:
        total_nats = sum(_loss(model, inputs, targets).item() * targets.numel() for inputs, targets in batches)
        return total_nats / sum(targets.numel() for _, targets in batches)
    finally:
        model.train(was_training)


def _loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)[1]
    return loss
