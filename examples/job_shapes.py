"""One worker, a torchrun job of the shape you choose; workers of other shapes take part in the same run.

    python examples/job_shapes.py save MODEL_DIR                        # what all begin with, on the server's machine
    outerstep server -m MODEL_DIR --num-workers 2 --sync-every 10 --insecure --port 8512
    outerstep worker --server http://HOST:8512 -- torchrun --nproc-per-node 2 examples/job_shapes.py tp
    outerstep worker --server http://HOST:8512 -- torchrun --nproc-per-node 2 examples/job_shapes.py pp

    fsdp      FSDP2: rows of every matrix
    hsdp      two replicas, each of them by FSDP2 (--nproc-per-node 4)
    tp        tensor-parallel: columns of one matrix of each block, rows of the other
    fsdp_tp   FSDP2 on top of that, on a mesh of 2×2 (--nproc-per-node 4)
    pp        two stages of a pipeline (torch.distributed.pipelining)
    pp_fsdp   each of them by FSDP2 (--nproc-per-node 4)

All learn to say the next byte of this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import outerstep

WIDTH, LAYERS, CONTEXT, BATCH, STEPS = 64, 4, 32, 16, 60
MESHES = {
    "fsdp": ("dp",),
    "hsdp": ("replicas", "dp"),
    "tp": ("tp",),
    "fsdp_tp": ("dp", "tp"),
    "pp": ("pp",),
    "pp_fsdp": ("pp", "dp"),
}  # each dimension has two ranks
TEXT = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.long)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), dim=1)
        return hidden + self.down(torch.relu(self.up(self.norm(hidden + before))))


class Model(nn.Module):
    """Some layers of it, under the names that they have in the whole: that is all a stage needs."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.table = nn.Embedding(256, WIDTH) if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        self.head = nn.Linear(WIDTH, 256) if LAYERS - 1 in layers else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.table is not None:
            hidden = self.table(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None else self.head(hidden)


def shard(model: Model, mesh: object) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loss_of(predicted: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(predicted.flatten(0, 1), wanted.flatten())


def batch(source: torch.Generator) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH, 1), generator=source) + torch.arange(CONTEXT)
    return TEXT[begins], TEXT[begins + 1]


def main(shape: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    names = MESHES[shape]
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    stage, groups = 0, 1
    if shape.startswith("pp"):
        stage, groups = mesh.get_local_rank("pp"), 2
    model = Model(range(stage * LAYERS // groups, (stage + 1) * LAYERS // groups))
    if shape.endswith("tp"):
        plan = {
            "table": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for i in model.layers:
            plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if "dp" in names:  # FSDP2 over two dimensions is HSDP: it replicates over the first
        shard(model, mesh if shape == "hsdp" else mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = None
    if groups > 1:
        parts = PipelineStage(model, stage, groups, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(parts, n_microbatches=4, loss_fn=loss_of)

    # Ranks of one TP group or of one pipeline train on the same batches; those that FSDP2 adds, on others.
    source = torch.Generator().manual_seed(
        dist.get_rank() if shape == "hsdp" else mesh.get_local_rank("dp") if "dp" in names else 0
    )
    with outerstep.attach(model, optimizer) as worker:
        for step in range(STEPS):
            inputs, wanted = batch(source)
            optimizer.zero_grad()
            if schedule is None:
                loss = loss_of(model(inputs), wanted)
                loss.backward()
                worker.last_loss = float(loss)
            elif stage == 0:
                schedule.step(inputs)
            else:
                losses: list[Tensor] = []
                schedule.step(target=wanted, losses=losses)
                worker.last_loss = float(torch.stack(losses).mean())
            optimizer.step()
            if worker.last_loss is not None and step % 20 == 19 and dist.get_rank() == dist.get_world_size() - 1:
                print(f"{shape}: step {step + 1}, loss {worker.last_loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "save":
        torch.manual_seed(0)
        outerstep.save_model(Model(range(LAYERS)), sys.argv[2])
    else:
        main(sys.argv[1])
