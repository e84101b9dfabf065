"""A small training script for two PCs (docs/start.md).

    outerstep run -n 2 -- python examples/two_pcs.py        on the first PC
    (the line that it prints)                               on the second

It learns to tell three spirals apart. Each PC draws points of its own, and both end with the same weights.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import outerstep

ARMS = 3


def points(count: int) -> tuple[Tensor, Tensor]:
    """Places in the plane, and the arm of the spiral that each is on."""
    arm = torch.randint(ARMS, (count,))
    way = torch.rand(count)
    angle = 2 * math.pi * (arm / ARMS + way) + 0.1 * torch.randn(count)
    return torch.stack([way * angle.cos(), way * angle.sin()], 1), arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save", default="trained", help="folder for the agreed weights")
    options = parser.parse_args()

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ARMS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with outerstep.attach(model, optimizer, sync_every=20) as worker:
        for _ in range(options.steps):
            places, arm = points(64)
            loss = nn.functional.cross_entropy(model(places), arm)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            worker.last_loss = loss.item()
            if worker.should_stop:
                break

    places, arm = points(1000)
    right = (model(places).argmax(1) == arm).float().mean().item()
    file = outerstep.save_model(model, options.save)
    print(f"{right:.0%} of 1,000 new points are told apart; the agreed weights are in {file}")


if __name__ == "__main__":
    main()
