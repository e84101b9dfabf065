"""One rank of a group that trains leased samples, for tests: cell i of the model counts how often sample i is in it.

    leased_group_job.py KIND ADDRESS FOLDER SAMPLES BATCH DIE_AT LOADERS    # KIND: ddp, fsdp2, tp, dp_tp, tp_unsaid

With tp each rank holds some of the cells, and both train the same samples; with dp_tp two such pairs share each unit.
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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


def tensor_parallel(rows: Tensor) -> None:
    """What the forward and backward pass of the others does: the gradient of the cells that are here, of all samples
    that were trained in this step."""
    counts = torch.zeros(samples).index_add_(0, rows, torch.ones(len(rows)))
    dist.all_reduce(counts, group=mesh["dp"].get_group())
    cells = net.cells
    assert isinstance(cells, DTensor)
    here = distribute_tensor(-counts, mesh["tp"], [Shard(0)]).to_local()
    cells.grad = DTensor.from_local(here, cells.device_mesh, cells.placements, run_check=False)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
part = None
checkpoint = folder / f"rank-{rank}.pt"
net = Cells()
model: nn.Module = net
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(net)
elif "tp" in kind:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net.cells = nn.Parameter(distribute_tensor(net.cells.detach(), mesh, [Replicate(), Shard(0)]))
    part = None if kind == "tp_unsaid" else (mesh["dp"].get_local_rank(), mesh["dp"].size())
else:
    model = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
saved = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
if saved is not None:
    net.load_state_dict(saved["model"])
data = LeasedSampler(samples, unit_samples=4, seed=3)
loader = LeasedLoader(list(range(samples)), data, batch_size=batch_size, num_workers=loaders)  # type: ignore[arg-type]
state = None if saved is None else saved["worker"]
facts = {"server_addr": address, "worker_id": "group", "data": data, "data_part": part, "state": state}
with outerstep.attach(model, optimizer, **facts) as worker:  # type: ignore[arg-type]
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        if "tp" in kind:
            tensor_parallel(batch)
        else:
            model(batch).backward()
        optimizer.step()
        torch.save({"model": net.state_dict(), "worker": worker.state_dict()}, checkpoint)
        with (folder / f"rank-{rank}.log").open("a") as file:
            print(*batch.tolist(), file=file)
        if step + 1 == die_at:
            dist.barrier()
            os._exit(9)
