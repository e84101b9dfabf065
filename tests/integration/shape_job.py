"""One rank of a torchrun job of some shape: `torchrun … shape_job.py KIND ADDRESS FOLDER STEPS DIES_AT`, started
by test_shapes.py. The model's weights, inputs and gradients are small whole numbers: every sum of them is exact, in
whatever order it is made, so that a history does not depend on the shape."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from outerstep import DiLoCoWorker
from outerstep.topology.group.tiled import TiledTopology
from outerstep.worker.shards import place_held

SYNC_EVERY = 3
WIDTH, HIDDEN, VOCABULARY = 8, 12, 20
RANKS = {"plain": 1, "tp": 2, "fsdp_tp": 4, "fsdp": 4, "hsdp": 4, "pp": 2, "pp_fsdp": 4, "pp_tied": 2}
RANKS |= {"gpipe": 2, "1f1b": 2}  # these really train, by torch.distributed.pipelining


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden))


class Model(nn.Module):
    """A stage has only some of it, under the names of the whole."""

    def __init__(self, layers: range = range(2)) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH) if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        self.norm = nn.Linear(WIDTH, 3, bias=False) if 1 in layers else None
        self.last = nn.ParameterDict({"scale": torch.ones(1)} if 1 in layers else {})

    def forward(self, hidden: Tensor) -> Tensor:
        if self.table is not None:
            hidden = self.table(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.norm is None else self.norm(hidden) * self.last.scale


def make_model(layers: range = range(2)) -> Model:
    model = Model(layers)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(integers(f"init/{name}", param.shape))
    return model


def integers(what: str, shape: torch.Size) -> Tensor:
    """The same for the same text."""
    source = torch.Generator().manual_seed(int.from_bytes(what.encode()[-7:], "little"))
    return torch.randint(-8, 9, shape, generator=source).float()


def share_of(name: str, param: Tensor, whole: Tensor) -> Tensor:
    begin, size = place_held(name, param)
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: str, step: int) -> None:
    """The gradient of each parameter is a function of worker, step and name; of a shard, the same rows or columns."""
    for name, param in model.named_parameters():
        whole = integers(f"{worker}{step}{name}", param.shape)
        here = share_of(name, param, whole).clone()
        param.grad = (
            DTensor.from_local(
                here, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            if isinstance(param, DTensor)
            else here
        )
    optimizer.step()
    optimizer.zero_grad()


BATCH, MICROBATCHES = 8, 4


def batch(worker: str, step: int) -> tuple[Tensor, Tensor]:
    return integers(f"in{worker}{step}", torch.Size((BATCH, 2))).long().abs(), integers(
        f"out{worker}{step}", torch.Size((BATCH, 2, 3))
    ).sign()


def whole_loss(out: Tensor, wanted: Tensor) -> Tensor:
    return (out * wanted).sum()


def really_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, worker: str, step: int
) -> None:
    """Forward and backward, in a pipeline or in one process. The gradients are whole numbers, of which the optimizer
    gets the signs, so that the weights stay small and all is exact."""
    inputs, wanted = batch(worker, step)
    if schedule is None:
        whole_loss(model(inputs), wanted).backward()
    elif rank_here() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=wanted)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.sign_()
    optimizer.step()
    optimizer.zero_grad()


def make_schedule(kind: str, model: nn.Module) -> Any:
    stage = PipelineStage(model, rank_here(), 2, torch.device("cpu"))
    how = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    return how(stage, n_microbatches=MICROBATCHES, loss_fn=whole_loss, scale_grads=False)


def wrap(kind: str) -> nn.Module:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if kind == "plain":
        return make_model()
    if kind in ("tp", "fsdp_tp"):
        shape, names = ((2,), ("tp",)) if kind == "tp" else ((2, 2), ("dp", "tp"))
        mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), make_model()
        plan: dict[str, Any] = {"table": RowwiseParallel(input_layouts=Replicate()), "norm": ColwiseParallel()}
        for i in model.layers:
            plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if kind == "fsdp_tp":
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model
    if kind in ("fsdp", "hsdp"):
        shape, names = ((4,), ("dp",)) if kind == "fsdp" else ((2, 2), ("replicas", "dp"))
        mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), make_model()
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if kind in ("pp", "gpipe", "1f1b"):
        return make_model(range(rank, rank + 1))
    if kind == "pp_tied":
        model = make_model(range(rank, rank + 1))
        model.table = make_model().table  # the last stage says words with it, the first one reads them
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = make_model(range(stage, stage + 1))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def save(worker: DiLoCoWorker, model: nn.Module, folder: Path, kind: str) -> None:
    """The weights as torch saves them for any mesh; of the worker each rank's own."""
    dcp.save(model.state_dict(), checkpoint_id=folder / "weights")
    for old in folder.glob("state-*.pt") if rank_here() == 0 else ():
        old.unlink()
    (folder / "shape").write_text(kind)
    dist.barrier()
    torch.save(worker.state_dict(), folder / f"state-{rank_here()}.pt")
    dist.barrier()


def load(worker: DiLoCoWorker, model: nn.Module, folder: Path, kind: str) -> int:
    """Whatever the shape was in which it was saved. Says how many steps were taken."""
    files = sorted(folder.glob("state-*.pt"))
    if not files:
        return 0
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=folder / "weights")
    model.load_state_dict(weights)
    states = [torch.load(file, weights_only=True, mmap=True) for file in files]
    if (folder / "shape").read_text() == kind:
        worker.load_state_dict(states[rank_here()])
    else:
        worker.load_state_dicts(states)
    return int(states[0]["work"]["steps"])


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(kind: str, address: str, folder: Path, steps: int, dies_at: int) -> None:
    rank, name = rank_here(), kind
    if (folder / "name").exists():
        name = (folder / "name").read_text()
    (folder / f"{kind}-{rank}.pid").write_text(str(os.getpid()))
    model = wrap(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    history: list[tuple[int, int, dict[str, list[float]]]] = []
    worker = DiLoCoWorker(model, optimizer, address, worker_id=name)
    first = load(worker, model, folder, kind)
    schedule = make_schedule(kind, model) if kind in ("gpipe", "1f1b") else None
    with worker:
        plan, anchors = worker.plan, worker._replica.anchors
        known = [-1] * len(plan.fragments)

        def note() -> None:
            for fragment, version in enumerate(worker.sync_metrics["versions"]):
                if version != known[fragment]:
                    known[fragment] = version
                    here = {n: anchors[n].flatten().tolist() for n in plan.fragments[fragment] if n in anchors}
                    history.append((fragment, version, here))

        note()
        for step in range(first, steps):
            worker.count(samples=8)
            if schedule is None:
                train_step(model, optimizer, name, step)
            else:
                really_train_step(model, optimizer, schedule, name, step)
            note()
            if (folder / "slowly").exists():
                time.sleep(0.02)
            if worker.should_stop:
                break
            if step + 1 == dies_at:
                save(worker, model, folder, kind)
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    note()
    places = {n: place_held(n, p) for n, p in model.named_parameters()}
    final = {n: worker._replica.tensors[n].flatten().tolist() for n in places}
    facts = {"history": history, "places": places, "final": final, **worker.sync_metrics}
    owed = worker._topology.state_dict([]).get("feedback", {}).get("residuals", {}) if kind == "plain" else {}
    facts["owed"] = {n: left.tolist() for n, left in owed.items()}
    facts["is_tiled"] = isinstance(worker._topology, TiledTopology)
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)
