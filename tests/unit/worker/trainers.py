"""Trainers, batches for them, and a gossip in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from outerstep import DiLoCoTrainer, RobustAggregator
from support import tiny_model

Grads = dict[str, Tensor]


class Hub:
    """A gossip in memory: waits for all, gives everybody the same list."""

    def __init__(self, count: int) -> None:
        self._meeting, self.offered = asyncio.Barrier(count), [{} for _ in range(count)]

    def seat(self, i: int) -> SimpleNamespace:
        async def gossip_round(local: Grads) -> Sequence[Grads]:
            self.offered[i] = {name: tensor.clone() for name, tensor in local.items()}
            await self._meeting.wait()
            collected = list(self.offered)
            await self._meeting.wait()
            return collected

        return SimpleNamespace(gossip_round=gossip_round)

    def peers_of(self, i: int, order: int = 1) -> list[SimpleNamespace]:
        """The same asked one by one, in this rank's own order."""
        here = asyncio.Event()
        arrived: list[int] = []

        def peer(other: int) -> SimpleNamespace:
            async def exchange_gradients(local: Grads) -> Grads:
                if not arrived:
                    arrived.append(i)
                    self.offered[i] = local
                    await self._meeting.wait()
                    here.set()
                await here.wait()
                return self.offered[other]

            return SimpleNamespace(id=f"peer-{other}", exchange_gradients=exchange_gradients)

        return [peer(other) for other in range(len(self.offered))[::order] if other != i]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def make_trainer(model: nn.Module | None = None, lr: float = 0.05, **settings: Any) -> DiLoCoTrainer:
    model = model or tiny_model()
    settings = {"inner_steps": 4, "loss_fn": loss_of, **settings}
    return DiLoCoTrainer(model, torch.optim.SGD(model.parameters(), lr=lr), **settings)


def batches(seed: int, count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, generator=source) for _ in range(count)]


def train(trainer: DiLoCoTrainer, seed: int, count: int = 4) -> None:
    for batch in batches(seed, count):
        trainer.train_step(batch)


def together(trainers: list[DiLoCoTrainer], aggregators: list[RobustAggregator], peers: list[Any]) -> list[bool]:
    async def all_of_them() -> list[bool]:
        rounds = zip(trainers, aggregators, peers, strict=True)
        return await asyncio.gather(*(t.sync_with_peers(a, p) for t, a, p in rounds))

    return asyncio.run(all_of_them())


def gossip(trainers: list[DiLoCoTrainer], aggregators: list[RobustAggregator]) -> list[Grads]:
    """One round; what was contributed."""
    hub = Hub(len(trainers))
    assert all(together(trainers, aggregators, [hub.seat(i) for i in range(len(trainers))]))
    return hub.offered


# --- when it does not come to an agreement --------------------------------------------------------------------------


def sync(trainer: DiLoCoTrainer, aggregator: RobustAggregator, peers: Any) -> bool:
    return asyncio.run(trainer.sync_with_peers(aggregator, peers))
