"""One rank of a run without a server: `python allreduce_job.py SCENARIO FOLDER`, started by test_allreduce.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outerstep import DiLoCoWorker
from outerstep.errors import OuterstepError
from outerstep.topology.reduce import Reducer
from outerstep.topology.update import MeanStep, anchor_hash

SYNC_EVERY = 4
CODECS = ["fp32", "bf16", "int8", "int4", "e3m0", "int4+feedback", "int8+stochastic", "sparse64", "int4,norms=fp32"]
STREAMING = {"num_fragments": 3, "fragment_delay": 1, "fragment_carry": True}
TCP_INFO_BYTES_ACKED = 120  # offset in the kernel's struct tcp_info


class Model(nn.Module):
    """Enough values for every codec's blocks and a second thread of torch, and a buffer that is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 7)])
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs[0, :3]
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def make_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, source: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        loss = model(torch.randn(4, 300, generator=source)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_worker(rank: int, seed: int | None = None, **settings: Any) -> tuple[DiLoCoWorker, Model, torch.optim.SGD]:
    """Each rank begins with weights of its own; the run begins with rank 0's."""
    model = make_model(100 + rank if seed is None else seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return DiLoCoWorker(model, optimizer, "allreduce", sync_every=SYNC_EVERY, **settings), model, optimizer


def anchors_hash(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


def bytes_on_sockets() -> int:
    """What the kernel has sent for this process over TCP, and had acknowledged."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not os.path.realpath(entry).rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("<Q", info, TCP_INFO_BYTES_ACKED)[0]
    return total


def every_codec(rank: int) -> dict[str, Any]:
    """Several rounds with each codec, and streaming; of each, the hash after every step, and the bytes."""
    torch.set_num_threads(1 + rank % 2)
    told: dict[str, Any] = {"capability": torch.backends.cpu.get_cpu_capability()}
    for codec in [*CODECS, "streaming"]:
        settings = {"codec": "int8", **STREAMING} if codec == "streaming" else {"codec": codec}
        source = torch.Generator().manual_seed(rank)
        worker, model, optimizer = make_worker(rank, **settings)
        hashes = []
        with worker:
            before = bytes_on_sockets()
            for _ in range(3 * SYNC_EVERY):
                train(model, optimizer, source, 1)
                hashes.append(anchors_hash(worker))
            dist.barrier()
            on_sockets = bytes_on_sockets() - before
        hashes.append(anchor_hash(dict(model.named_parameters()).values()))
        told[codec] = {"hashes": hashes, "on_sockets": on_sockets, **worker.sync_metrics}
    return told


def trained(rank: int) -> dict[str, Any]:
    """For the comparison with a server: hashes of what each kind of run ended with, and the values."""
    told: dict[str, Any] = {}
    for name, settings in COMPARED.items():
        source = torch.Generator().manual_seed(rank)
        worker, model, optimizer = make_worker(rank, **settings)
        with worker:
            train(model, optimizer, source, 3 * SYNC_EVERY + 2)
        told[name] = {key: value.tolist() for key, value in model.state_dict().items()}
    return told


COMPARED: dict[str, dict[str, Any]] = {
    "powers of two": {"codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.5},
    "usual": {"codec": "fp32"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
}


def killed(rank: int, where: str) -> dict[str, Any]:
    """Rank 1 is killed: before it comes to an exchange, or in the middle of one."""
    worker, model, optimizer = make_worker(rank, peer_timeout_s=20.0)
    if where == "inside" and rank == 1:
        reduce, calls = Reducer._sum, []

        def die(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return reduce(*args)

        Reducer._sum = die  # type: ignore[method-assign]
    source = torch.Generator().manual_seed(rank)
    try:
        with worker:
            train(model, optimizer, source, SYNC_EVERY + 1)
            if where == "before" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, source, 10 * SYNC_EVERY)
    except OuterstepError as error:
        return {"kind": type(error).__name__, "said": str(error), "steps": worker.sync_metrics["local_step"]}
    return {}


def refused(rank: int) -> dict[str, Any]:
    """What ranks must not disagree on; each case is a worker of its own in the same process group."""
    told: dict[str, Any] = {}
    wrapped = nn.parallel.DistributedDataParallel(make_model(0))
    cases: dict[str, dict[str, Any]] = {
        "codec": {"codec": "int8" if rank else "bf16"},
        "outer": {"outer_lr": 0.5 + rank},
        "buffers": {"buffers": "local" if rank else "average"},
    }
    for name, settings in cases.items():
        told[name] = said_by(lambda settings=settings: make_worker(rank, **settings)[0].start())
    told["ddp"] = said_by(lambda: DiLoCoWorker(wrapped, torch.optim.SGD(wrapped.parameters()), "allreduce"))
    told["steps"] = said_by(lambda: run(rank, steps=2 + rank, then=DiLoCoWorker.force_sync))
    told["end"] = said_by(lambda: run(rank, steps=SYNC_EVERY + 4 * rank, exit_patience_s=2.0))
    told["nan"] = said_by(lambda: run(rank, steps=SYNC_EVERY, spoil=rank == 1))
    told["weights"] = said_by(lambda: run(rank, steps=SYNC_EVERY, weight_by="tokens"))
    told["loads"] = said_by(lambda: loads(rank))
    MeanStep.apply = crooked(rank)  # type: ignore[method-assign]
    told["crooked"] = said_by(lambda: run(rank, steps=SYNC_EVERY))
    told["repaired"] = said_by(lambda: run(rank, steps=2 * SYNC_EVERY, on_divergence="repair"))
    MeanStep.apply = straight  # type: ignore[method-assign]
    return told


straight = MeanStep.apply


def crooked(rank: int) -> Any:
    """Rank 1 gets one value of its first anchor wrong by the least bit."""
    done: list[int] = []

    def apply(update: MeanStep, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        block = straight(update, name, start, stop, held, in_place=in_place)
        if rank == 1 and len(done) < 2 and name == "layers.1.weight":
            done.append(1)
            block.view(torch.int32)[5] += 1
            update._proof._hasher.update(b"as it would have been")
        return block

    return apply


def run(rank: int, steps: int, then: Any = None, *, spoil: bool = False, **settings: Any) -> str:
    source = torch.Generator().manual_seed(rank)
    worker, model, optimizer = make_worker(rank, **settings)
    with worker:
        train(model, optimizer, source, steps - 1)
        if spoil:
            with torch.no_grad():
                model.layers[1].weight[2, 3] = float("nan")
        train(model, optimizer, source, 1)
        if then is not None:
            then(worker)
        found = anchors_hash(worker)
    return f"{found} {worker.sync_metrics['anchor_repairs']} repaired"


def loads(rank: int) -> str:
    """Rank 1 alone loads other weights: before the first step, before a forced exchange and at the end."""
    source = torch.Generator().manual_seed(rank)
    worker, model, optimizer = make_worker(rank, outer_lr=1.0, outer_momentum=0.0)

    def load() -> None:
        if rank == 1:
            model.load_state_dict({name: value + 1000.0 for name, value in model.state_dict().items()})

    with worker:
        load()
        train(model, optimizer, source, 2 * SYNC_EVERY + 1)
        load()
        worker.force_sync()
        train(model, optimizer, source, SYNC_EVERY + 1)
        load()
    largest = max(float(param.detach().abs().max()) for param in model.parameters())
    return f"{anchors_hash(worker)} {largest < 10.0} {worker.sync_metrics['outside_changes'] == 3 * rank}"


def said_by(make: Any) -> str:
    try:
        return str(make())
    except (OuterstepError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """Five rounds in one go, and in two goes with a state saved between them."""
    settings = {"codec": "int4+feedback", "seed": 7}
    told: dict[str, Any] = {}
    for name, goes in (("one go", [5]), ("two goes", [2, 3])):
        source = torch.Generator().manual_seed(rank)
        state, weights = None, None
        for rounds in goes:
            worker, model, optimizer = make_worker(rank, **settings)
            if state is not None:
                worker.load_state_dict(state)
                model.load_state_dict(weights)
            with worker:
                train(model, optimizer, source, rounds * SYNC_EVERY)
                torch.save(worker.state_dict(), folder / f"{rank}.state")
                weights = {key: value.clone() for key, value in model.state_dict().items()}
            state = torch.load(folder / f"{rank}.state", weights_only=True)
        told[name] = [anchors_hash(worker), worker.sync_metrics["versions"]]
    return told


def main() -> None:
    torch.set_num_threads(1)
    scenario, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    if scenario != "trained":  # there the worker does it
        dist.init_process_group("gloo")
    match scenario:
        case "every_codec":
            told = every_codec(rank)
        case "trained":
            told = trained(rank)
        case "refused":
            told = refused(rank)
        case "resumed":
            told = resumed(rank, folder)
        case _:
            told = killed(rank, scenario)
    (folder / f"{scenario}-{rank}.json").write_text(json.dumps(told))
    # Not an ordinary exit: with gloo some versions of torch abort in it, in a script without outerstep too.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
