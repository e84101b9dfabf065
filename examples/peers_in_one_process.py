"""Four trainers that agree without a server, one of them broken: `python examples/peers_in_one_process.py`.

A real run has one process per trainer and a gossip between them. Here they are coroutines, and the gossip a list. Its
task is the same: give every trainer the same contributions in the same order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from outerstep import DiLoCoTrainer, RobustAggregator

PEERS, ROUNDS, INNER_STEPS = 4, 6, 25


class Meeting:
    """A gossip of coroutines. A trainer needs only `gossip_round`."""

    def __init__(self, size: int) -> None:
        self._offered: dict[int, Mapping[str, Tensor]] = {}
        self._all_here = asyncio.Barrier(size)

    async def gossip_round(self, seat: int, local: Mapping[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
        self._offered[seat] = {name: 1000 * delta if seat == 3 else delta for name, delta in local.items()}
        await self._all_here.wait()
        collected = [self._offered[seat] for seat in sorted(self._offered)]
        await self._all_here.wait()
        return collected


class Seat:
    def __init__(self, meeting: Meeting, number: int) -> None:
        self._meeting, self._number = meeting, number

    async def gossip_round(self, local: dict[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
        return await self._meeting.gossip_round(self._number, local)


async def train(number: int, meeting: Meeting) -> DiLoCoTrainer:
    torch.manual_seed(0)  # all start with the same weights
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    trainer = DiLoCoTrainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        inner_steps=INNER_STEPS,
        outer_lr=1.0,  # for a run of so few rounds; 0.7 and 0.9 for a long one
        outer_momentum=0.5,
        loss_fn=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
    )
    aggregator = RobustAggregator("mean")  # non-finite or far too long contributions are refused before the mean
    data = torch.Generator().manual_seed(number)  # and train on their own data
    while trainer.sync_metrics["sync_count"] < ROUNDS:
        trainer.train_step(torch.randn(16, 8, generator=data))
        if trainer.should_sync():
            await trainer.sync_with_peers(aggregator, Seat(meeting, number))
            if number == 0:
                show(trainer, aggregator)
    return trainer


def show(trainer: DiLoCoTrainer, aggregator: RobustAggregator) -> None:
    seen, verdict = trainer.sync_metrics, aggregator.verdict
    assert verdict is not None
    print(
        f"round {seen['sync_count']}: loss {seen['inner_loss']:.3f}  ‖Δ‖ {seen['pseudo_grad_norm']:.3f}"
        f"  similarity {seen['peer_grad_similarity']:.2f}  ‖aggregate‖ {seen['aggregated_grad_norm']:.3f}"
        f"  divergence {seen['weight_divergence']:.4f}  refused {len(verdict.refused)} of {PEERS}"
    )


async def main() -> None:
    logging.getLogger("outerstep").setLevel(logging.ERROR)  # each of the four would log whom it refuses
    meeting = Meeting(PEERS)
    trainers = await asyncio.gather(*(train(number, meeting) for number in range(PEERS)))
    print("anchors:", *sorted({trainer.anchor_hash for trainer in trainers}))


if __name__ == "__main__":
    asyncio.run(main())
