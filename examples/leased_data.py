"""Leased data: each sample of an epoch is trained once, whoever comes and goes.

    outerstep run -n 2 --sync-every 50 -- python examples/leased_data.py
    outerstep run --join LINE --worker-id two -- python examples/leased_data.py    in a second folder, with that LINE
    outerstep data                                                                 how far it is, and who has done what

Kill the second: the first trains what it had not. Start it again: it resumes at the exact sample, from what it saved.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler

SAMPLES, FEATURES, SAVE_EVERY = 50_000, 16, 20


def main() -> None:
    torch.manual_seed(0)  # the same data everywhere
    inputs = torch.randn(SAMPLES, FEATURES)
    dataset = TensorDataset(inputs, inputs @ torch.randn(FEATURES, 1))
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    file = Path(f"leased-{os.environ.get('DILOCO_WORKER_ID', 'worker')}.pt")
    saved = torch.load(file) if file.exists() else None  # tensors and plain values: no code is run
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    data = LeasedSampler(dataset, unit_samples=64)
    loader = LeasedLoader(dataset, data, batch_size=32, num_workers=2)
    with outerstep.attach(model, optimizer, data=data, state=saved["worker"] if saved else None) as worker:
        for step, (batch, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                print(f"step {step}: loss {loss.item():.4f}")
                everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**everything, "worker": worker.state_dict()}, file)
            time.sleep(0.05)  # as if the model were larger
    file.unlink(missing_ok=True)  # the epoch is over


if __name__ == "__main__":
    main()
