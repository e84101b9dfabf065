"""One rank of a group that trains leased samples, for tests: cell i of the model counts how often sample i is in it.

    leased_group_job.py KIND ADDRESS FOLDER SAMPLES BATCH DIE_AT LOADERS    # KIND: ddp or fsdp2

Each rank saves its checkpoint after each step, and is gone after step DIE_AT (0 = never); the next job resumes from it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler

kind, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
samples, batch_size, die_at, loaders = map(int, sys.argv[4:])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(samples))

    def forward(self, rows: Tensor) -> Tensor:
        return -self.cells[rows].sum() * dist.get_world_size()  # what the ranks find is averaged


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoint = folder / f"rank-{rank}.pt"
net = Cells()
if kind == "ddp":
    model: nn.Module = nn.parallel.DistributedDataParallel(net)
else:
    model = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
saved = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
if saved is not None:
    net.load_state_dict(saved["model"])
data = LeasedSampler(samples, unit_samples=4, seed=3)
loader = LeasedLoader(list(range(samples)), data, batch_size=batch_size, num_workers=loaders)  # type: ignore[arg-type]
state = None if saved is None else saved["worker"]
with outerstep.attach(model, optimizer, server_addr=address, worker_id="group", data=data, state=state) as worker:
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        torch.save({"model": net.state_dict(), "worker": worker.state_dict()}, checkpoint)
        with (folder / f"rank-{rank}.log").open("a") as file:
            print(*batch.tolist(), file=file)
        if step + 1 == die_at:
            dist.barrier()
            os._exit(9)
