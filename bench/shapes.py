"""What a rank of a job needs beside the model that it holds: does it grow with its share, or with the model?

Each rank builds the part that it holds of a model of linear layers (nothing else), notes its memory, and then joins a
server in a process of its own, takes part in some rounds, saves its state, leaves, and joins again with that state.
Reported per shape, of the rank that needs most: the part of the model that it holds, and for each of these phases the
peak of its resident memory above the model (VmHWM, reset at the phase's beginning). If something gathered the model,
that would not fall with the number of ranks. With `--device cuda` also the peak of what torch has allocated on the
device, above the model. Bytes over the server's connection are counted, too, of all ranks together, in models of fp32.

    python bench/shapes.py                    # some minutes
    python bench/shapes.py --layers 4 --width 1024 --codec int4+feedback
    python bench/shapes.py --device cuda      # each rank on a GPU of its own, or all on one
    python bench/shapes.py --json shapes.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from harness import print_table, say, status_bytes, write_json
from provenance import provenance

SHAPES = {"plain": (), "tp 2": (2,), "tp 4": (4,), "fsdp x tp 2x2": (2, 2), "pp 2": (2,), "pp 4": (4,)}
SYNC_EVERY = 2
PHASES = ("join", "rounds", "save", "join again")


class Phases:
    """The peaks of memory above the model, by phase."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.host, self.device = dict[str, int](), dict[str, int]()
        self._host_before = status_bytes(os.getpid(), "VmRSS")
        self._device_before = torch.cuda.memory_allocated() if self._on_gpu else 0

    @contextlib.contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        self.host[phase] = status_bytes(os.getpid(), "VmHWM") - self._host_before
        if self._on_gpu:
            self.device[phase] = torch.cuda.max_memory_allocated() - self._device_before


def held(shape: str, layers: int, width: int, device: str) -> nn.Module:
    """What this rank holds: no more of it is ever here."""
    names, sizes = [f"layer{i}" for i in range(layers)], SHAPES[shape]
    if shape.startswith("pp"):
        names = names[dist.get_rank() :: sizes[0]]
    if not sizes or shape.startswith("pp"):
        return nn.ParameterDict({name: nn.Parameter(torch.zeros(width, width, device=device)) for name in names})
    mesh = init_device_mesh(device, sizes)
    made = {}
    for i, name in enumerate(names):
        placements = [Shard(1 - i % 2)] if len(sizes) == 1 else [Shard(0), Shard(1)]
        made[name] = nn.Parameter(zeros(width, width, device_mesh=mesh, placements=placements))
    return nn.ParameterDict(made)


def rank(shape: str, address: str, layers: int, width: int, rounds: int, device: str, file: Path) -> None:
    import outerstep

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("RANK", "0")) % torch.cuda.device_count())
    if SHAPES[shape]:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model = held(shape, layers, width, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    here = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    for own in here:
        own.detach().normal_()  # its pages are there
    for param in model.parameters():
        param.grad = param.detach().clone()
    saved, phases = file.with_suffix(".pt"), Phases(device)

    def train(worker: outerstep.DiLoCoWorker) -> None:
        for _ in range(SYNC_EVERY * rounds):
            optimizer.step()

    with phases.measured("join"):
        worker = outerstep.DiLoCoWorker(model, optimizer, address, worker_id="job", handle_signals=False)
        worker.__enter__()
    with phases.measured("rounds"):
        train(worker)
    metrics = worker.sync_metrics
    with phases.measured("save"):
        torch.save(worker.state_dict(), saved)
    worker.__exit__(None, None, None)
    del worker
    with phases.measured("join again"):
        worker = outerstep.DiLoCoWorker(model, optimizer, address, worker_id="job", handle_signals=False)
        worker.load_state_dict(torch.load(saved, mmap=True, weights_only=True))
        worker.__enter__()
    worker.__exit__(None, None, None)
    facts = {
        "values": sum(own.numel() for own in here),
        "host": phases.host,
        "device": phases.device,
        "sent": metrics["bytes_sent"],
        "received": metrics["bytes_received"],
    }
    file.write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def serve(layers: int, width: int, codec: str, file: Path) -> None:
    from outerstep.server import DiLoCoServer

    state = {f"layer{i}": torch.zeros(width, width) for i in range(layers)}
    with DiLoCoServer(state, port=0, num_workers=1, sync_every=SYNC_EVERY, codec=codec) as server:
        file.write_text(server.address)
        sys.stdin.read()


def measure(shape: str, layers: int, width: int, codec: str, rounds: int, device: str, folder: Path) -> dict[str, Any]:
    ranks = max(1, int(torch.Size(SHAPES[shape]).numel()))
    common = [sys.executable, __file__, "--layers", str(layers), "--width", str(width), "--codec", codec]
    common += ["--device", device]
    address = folder / "address"
    address.unlink(missing_ok=True)
    server = subprocess.Popen([*common, "--serve", str(address)], stdin=subprocess.PIPE)
    try:
        while not address.exists() or not address.read_text():
            assert server.poll() is None, "the server ended"
            os.sched_yield()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        files = [folder / f"{shape}-{r}.json" for r in range(ranks)]
        each = []
        for r, file in enumerate(files):
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if ranks > 1:
                environ |= {"RANK": str(r), "WORLD_SIZE": str(ranks)}
            command = [*common, "--rank", shape, "--address", address.read_text(), "--rounds", str(rounds)]
            each.append(subprocess.Popen([*command, "--file", str(file)], env=environ))
        codes = [process.wait() for process in each]
        assert not any(codes), codes
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
    found = [json.loads(file.read_text()) for file in files]
    model, values = layers * width * width, max(one["values"] for one in found)
    return {
        "shape": shape,
        "ranks": ranks,
        "held": values / model,
        "host_mib": {phase: max(one["host"][phase] for one in found) / 2**20 for phase in PHASES},
        "device_mib": {phase: max(one["device"].get(phase, 0) for one in found) / 2**20 for phase in PHASES},
        "bytes_per_held": max(one["host"]["rounds"] for one in found) / values,
        "models_sent_per_round": sum(one["sent"] for one in found) / rounds / (4 * model),
        "models_received_per_round": sum(one["received"] for one in found) / rounds / (4 * model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    for internal in ("--rank", "--address", "--file", "--serve"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(told.layers, told.width, told.codec, Path(told.serve))
        return
    if told.rank:
        rank(told.rank, told.address, told.layers, told.width, told.rounds, told.device, Path(told.file))
    about, rows = provenance("torch"), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in told.shapes.split(","):
            rows.append(measure(shape, told.layers, told.width, told.codec, told.rounds, told.device, Path(folder)))
            say(f"{shape}: {rows[-1]['host_mib']['rounds']:.0f} MiB above the model")
    where = ("host", "device") if told.device == "cuda" else ("host",)
    for place in where:
        print_table(
            f"MiB of {place} memory that a rank needs beside its part of the model, at most",
            ["shape", "holds", *PHASES],
            [[r["shape"], f"{r['held']:.0%}", *(f"{r[f'{place}_mib'][phase]:.0f}" for phase in PHASES)] for r in rows],
        )
    print_table(
        "of all ranks, per round, in models of fp32; and the rounds' peak per value that a rank holds",
        ["shape", "sent", "received", "bytes"],
        [
            [
                r["shape"],
                f"{r['models_sent_per_round']:.2f}",
                f"{r['models_received_per_round']:.2f}",
                f"{r['bytes_per_held']:.1f}",
            ]
            for r in rows
        ],
    )
    if told.json:
        settings = {
            "layers": told.layers,
            "width": told.width,
            "codec": told.codec,
            "rounds": told.rounds,
            "device": told.device,
        }
        write_json(told.json, {"provenance": about, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
