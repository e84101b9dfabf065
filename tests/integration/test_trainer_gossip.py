"""Trainers that agree over real peers: DiLoCoTrainer and GradientGossip together."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import nn

from outerstep import DiLoCoTrainer, GradientGossip, RobustAggregator

ALONE: dict[str, Any] = {"listen": "127.0.0.1:0", "insecure": True, "beat_every_s": 0.5}
ROUNDS, INNER_STEPS = 3, 4


def make_trainer() -> DiLoCoTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return DiLoCoTrainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        inner_steps=INNER_STEPS,
        loss_fn=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
    )


async def train(number: int, gossip: GradientGossip) -> tuple[DiLoCoTrainer, list[str]]:
    trainer, data, hashes = make_trainer(), torch.Generator().manual_seed(number), []
    while len(hashes) < ROUNDS:
        trainer.train_step(torch.randn(8, 6, generator=data))
        if trainer.should_sync():
            assert await trainer.sync_with_peers(RobustAggregator("mean"), gossip)
            hashes.append(trainer.anchor_hash)
    return trainer, hashes


def test_trainers_over_real_peers_hold_the_same_anchor_after_every_round() -> None:
    async def together() -> list[tuple[DiLoCoTrainer, list[str]]]:
        async with GradientGossip("anna", codec="fp32", min_peers=3, **ALONE) as anna:
            others = [GradientGossip(name, [anna.join_string], **ALONE) for name in ("ben", "cleo")]
            found = await asyncio.gather(*(train(i, gossip) for i, gossip in enumerate([anna, *others])))
            await asyncio.gather(*(other.close() for other in others))
            return list(found)

    found = asyncio.run(asyncio.wait_for(together(), 200))
    histories = [hashes for _, hashes in found]
    assert histories[0] == histories[1] == histories[2]
    assert len(set(histories[0])) == ROUNDS  # it moved
    for trainer, _ in found:
        seen = trainer.sync_metrics
        assert seen["sync_count"] == ROUNDS
        assert seen["pseudo_grad_norm"] > 0.0  # type: ignore[operator]
