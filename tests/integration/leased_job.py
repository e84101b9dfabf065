"""A worker that trains leased samples, for tests: cell i of the model counts how often sample i is in it.

    python leased_job.py FOLDER SAMPLES BATCH DIE_AT LOADERS KIND [WHO]

DIE_AT: SIGKILL right after that step, 0 = never. KIND: samples, or shards of one to seven samples. WHO dies: the job
(default), or the first of its loader processes.

Model, optimizer and worker are saved after each step (SAVE_EVERY: each n-th), in one file; the job resumes from it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler, LeasedShards, LeasedStream

torch.set_num_threads(1)


def shards_of(samples: int) -> list[range]:
    found, begin = [], 0
    while begin < samples:
        end = min(begin + len(found) % 7 + 1, samples)
        found.append(range(begin, end))
        begin = end
    return found


folder, samples, batch_size, die_at, loaders = Path(sys.argv[1]), *map(int, sys.argv[2:6])
worker_id = os.environ["OUTERSTEP_WORKER_ID"]
checkpoint = folder / f"{worker_id}.pt"

model = nn.ParameterDict({"cells": nn.Parameter(torch.zeros(samples))})
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
saved = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

data: LeasedSampler
loader: Iterable[torch.Tensor]
if sys.argv[6] == "shards":
    shards = shards_of(samples)
    data = LeasedShards(shards, seed=3)
    loader = LeasedStream(shards, data, read=list, batch_size=batch_size, num_workers=loaders)
else:
    data = LeasedSampler(samples, unit_samples=4, seed=3)
    loader = LeasedLoader(list(range(samples)), data, batch_size=batch_size, num_workers=loaders)  # type: ignore[arg-type]
steps = 0
with outerstep.attach(model, optimizer, data=data, state=saved["worker"] if saved is not None else None) as worker:
    for batch in loader:
        grad = torch.zeros(samples)
        grad[batch] = -1.0
        model["cells"].grad = grad
        optimizer.step()
        steps += 1
        if steps % int(os.environ.get("SAVE_EVERY", "1")) == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "worker": worker.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
        with (folder / f"{worker_id}.log").open("a") as file:
            print(*batch.tolist(), file=file)
        if steps == die_at:
            dies = multiprocessing.active_children()[0].pid if sys.argv[7:] == ["loader"] else os.getpid()
            assert dies is not None
            print("SIGKILL for", "the job" if dies == os.getpid() else "a loader", flush=True)
            os.kill(dies, signal.SIGKILL)
