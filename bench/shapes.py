"""What a rank of a job needs beside the model that it holds: does it grow with its share, or with the model?

Each rank builds the part that it holds of a model of linear layers (nothing else), notes its memory, and then takes
part in some rounds of a server in a process of its own. Reported per shape, of the rank that needs most: the part of
the model that it holds, and the peak of its resident memory (VmHWM, reset when the model was built) above that, in
bytes per parameter *held* and per parameter of the *model*. If something gathered the model, the latter would not fall
with the number of ranks. Bytes over the server's connection are counted, too, of all ranks together, in models of fp32.

    python bench/shapes.py                    # about two minutes
    python bench/shapes.py --layers 4 --width 1024 --codec int4+feedback
    python bench/shapes.py --json shapes.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
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


def held(shape: str, layers: int, width: int) -> nn.Module:
    """What this rank holds: no more of it is ever here."""
    names, sizes = [f"layer{i}" for i in range(layers)], SHAPES[shape]
    if shape.startswith("pp"):
        names = names[dist.get_rank() :: sizes[0]]
    if not sizes or shape.startswith("pp"):
        return nn.ParameterDict({name: nn.Parameter(torch.zeros(width, width)) for name in names})
    mesh = init_device_mesh("cpu", sizes)
    made = {}
    for i, name in enumerate(names):
        placements = [Shard(1 - i % 2)] if len(sizes) == 1 else [Shard(0), Shard(1)]
        made[name] = nn.Parameter(zeros(width, width, device_mesh=mesh, placements=placements))
    return nn.ParameterDict(made)


def rank(shape: str, address: str, layers: int, width: int, rounds: int, file: Path) -> None:
    import outerstep

    torch.set_num_threads(1)
    if SHAPES[shape]:
        dist.init_process_group("gloo")
    model = held(shape, layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    here = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    for own in here:
        own.detach().normal_()  # its pages are there
    for param in model.parameters():
        param.grad = param.detach().clone()
    worker = outerstep.DiLoCoWorker(model, optimizer, address, worker_id="job", handle_signals=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes(os.getpid(), "VmRSS")
    with worker:
        for _ in range(SYNC_EVERY * rounds):
            optimizer.step()
    metrics = worker.sync_metrics
    peak = status_bytes(os.getpid(), "VmHWM")
    facts = {
        "values": sum(own.numel() for own in here),
        "more_bytes": peak - before,
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


def measure(shape: str, layers: int, width: int, codec: str, rounds: int, folder: Path) -> dict[str, Any]:
    ranks = max(1, int(torch.Size(SHAPES[shape]).numel()))
    common = [sys.executable, __file__, "--layers", str(layers), "--width", str(width), "--codec", codec]
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
    model, most = layers * width * width, max(found, key=lambda one: one["more_bytes"])
    return {
        "shape": shape,
        "ranks": ranks,
        "held": most["values"] / model,
        "peak_mib": most["more_bytes"] / 2**20,
        "bytes_per_held": most["more_bytes"] / most["values"],
        "bytes_per_parameter": most["more_bytes"] / model,
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
    parser.add_argument("--json", type=Path)
    for internal in ("--rank", "--address", "--file", "--serve"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(told.layers, told.width, told.codec, Path(told.serve))
        return
    if told.rank:
        rank(told.rank, told.address, told.layers, told.width, told.rounds, Path(told.file))
    about, rows = provenance("torch"), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in told.shapes.split(","):
            rows.append(measure(shape, told.layers, told.width, told.codec, told.rounds, Path(folder)))
            say(f"{shape}: {rows[-1]['peak_mib']:.0f} MiB above the model")
    head = ["shape", "holds", "peak MiB", "bytes per value held", "bytes per parameter", "sent", "received"]
    print_table(
        "what a rank needs beside its part of the model",
        head,
        [
            [
                row["shape"],
                f"{row['held']:.0%}",
                f"{row['peak_mib']:.0f}",
                f"{row['bytes_per_held']:.1f}",
                f"{row['bytes_per_parameter']:.1f}",
                f"{row['models_sent_per_round']:.2f}",
                f"{row['models_received_per_round']:.2f}",
            ]
            for row in rows
        ],
    )
    if told.json:
        settings = {"layers": told.layers, "width": told.width, "codec": told.codec, "rounds": told.rounds}
        write_json(told.json, {"provenance": about, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
