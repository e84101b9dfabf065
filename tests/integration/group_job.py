"""One rank of a torchrun job: `torchrun … group_job.py KIND ADDRESS FOLDER STEPS [DIES_AT]`, started by test_groups.py.

With DIES_AT every rank saves its checkpoint after that step, and is gone; the next job of that kind goes on from it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial

from outerstep import DiLoCoWorker
from outerstep.errors import ModelError
from outerstep.topology.update import anchor_tree

SYNC_EVERY = 6


class Model(nn.Module):
    """Rows that two ranks cannot share evenly, fewer rows than ranks, and buffers, one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 37), nn.Linear(37, 6), nn.Linear(6, 5)])
        self.head = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs - self.mean
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def make_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, source: torch.Generator) -> None:
    inputs = torch.randn(8, 6, generator=source)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def shard(model: Model, mesh: Any, **how: Any) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return model


def wrap(kind: str, model: Model) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hsdp" else ((dist.get_world_size(),), ("shard",))
    return shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names))


def check_evaluation(worker: DiLoCoWorker, model: nn.Module) -> None:
    """Inside `global_weights` the model is another one, afterwards it is what it was; and neither is mixed up with
    parameters that FSDP2 still holds gathered from an evaluation before."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

    def gathered_anew() -> Tensor:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return model(inputs)

    with torch.no_grad():
        before = model(inputs)
        with worker.global_weights():
            inside = model(inputs)
            assert torch.equal(gathered_anew(), inside)
        after = model(inputs)
        assert torch.equal(after, before)
        assert torch.equal(gathered_anew(), before)
        assert not torch.equal(inside, before)


def train(kind: str, address: str, folder: Path, steps: int, dies_at: int) -> None:
    rank = dist.get_rank()
    (folder / f"{kind}-{rank}.pid").write_text(str(os.getpid()))
    model = wrap(kind, make_model(seed=100 + rank))  # whatever it begins with is replaced
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(rank)
    history: list[tuple[int, int, str]] = []
    worker = DiLoCoWorker(model, optimizer, address, worker_id=kind)
    checkpoint = folder / f"{kind}-{rank}.pt"
    first = load(checkpoint, worker, source) if checkpoint.exists() else 0
    with worker:
        plan, anchors = worker.plan, worker._replica.anchors
        known = [-1] * len(plan.fragments)

        def note() -> None:
            for fragment, version in enumerate(worker.sync_metrics["versions"]):
                if version != known[fragment]:
                    known[fragment] = version
                    found = anchor_tree(anchors[name] for name in plan.fragments[fragment])
                    history.append((fragment, version, found))

        note()
        for step in range(first, steps):
            if (folder / "loads").exists():
                load_far_off(model, step, rank)
            worker.count(samples=8)
            train_step(model, optimizer, source)
            note()
            if step == SYNC_EVERY + 1:
                check_evaluation(worker, model)
                worker.force_sync()
                note()
            if worker.should_stop:
                break
            if (folder / "slowly").exists():
                time.sleep(0.01)
            if step + 1 == dies_at:
                save(checkpoint, worker, source, dies_at)
                dist.barrier()
                os._exit(9)
    note()
    final = [p.to_local() if isinstance(p, DTensor) else p for p in optimizer.param_groups[0]["params"]]
    facts = {"history": history, "final": anchor_tree(p.detach() for p in final), **worker.sync_metrics}
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(facts))


def load_far_off(model: nn.Module, step: int, rank: int) -> None:
    """Before the first step, on every rank; in the midst of a cycle, on one."""
    if step == 0 or (step == 2 * SYNC_EVERY + 4 and rank == 1):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1000.0)


def save(file: Path, worker: DiLoCoWorker, source: torch.Generator, step: int) -> None:
    """What this rank holds: its rows, its state, and where it is in its data."""
    rows = {name: tensor.detach().clone() for name, tensor in worker._replica.tensors.items()}
    torch.save({"model": rows, "worker": worker.state_dict(), "source": source.get_state(), "step": step}, file)


def load(file: Path, worker: DiLoCoWorker, source: torch.Generator) -> int:
    saved = torch.load(file, weights_only=True)
    worker._replica.restore(saved["model"])
    worker.load_state_dict(saved["worker"])
    source.set_state(saved["source"])
    return int(saved["step"])


def refuse(address: str, folder: Path) -> None:
    """Everything that cannot be exchanged is refused by name, on every rank, before anything is sent."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    sharded, unsummed = shard(make_model(0), mesh), make_model(0)
    bias = unsummed.layers[0].bias.detach()
    unsummed.layers[0].bias = nn.Parameter(DTensor.from_local(bias, mesh, [Partial()]))
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "partial": (unsummed, {}),
        "fsdp1": (FullyShardedDataParallel(make_model(0), device_id=torch.device("cpu")), {}),
        "off": (sharded, {"group": "off"}),
        "pipeline": (make_model(0).layers[dist.get_rank()], {}),
    }
    said = {}
    for name, (model, settings) in cases.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            DiLoCoWorker(model, optimizer, address, **settings).start()
        except ModelError as error:
            said[name] = str(error)
    (folder / f"refuse-{dist.get_rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "refuse":
        refuse(sys.argv[2], Path(sys.argv[3]))
    else:
        train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    dist.destroy_process_group()
    # Not an ordinary exit: with gloo some versions of torch abort in it now and then ("terminate called without an
    # active exception"), in a script without outerstep too.
    sys.stdout.flush()
    os._exit(0)
