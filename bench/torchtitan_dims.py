"""Do torchtitan's own parallel dimensions give a worker models that it can exchange?

Its debug Llama is cut by its own `ParallelDims`, `parallelize_llama` and `pipeline_llm`, on gloo and without a GPU, by
a torchrun job for each combination of degrees. The job is one worker of a server, and its optimizer takes some steps
with gradients that are made up: nothing runs forward, what is looked at is who holds what. At the end every rank
compares each parameter that it holds with the server's model, bit for bit. Said for each: how its contribution was cut,
and the bytes of all ranks per round, in models of fp32.

torchtitan is no dependency, and wants other libraries than ours. Install it beside them, in a folder:

    pip install --target titan --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata triton \\
        tyro docstring_parser shtab typeguard einops tokenizers
    PYTHONPATH=titan python bench/torchtitan_dims.py              # about two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import print_table, say, write_json
from provenance import provenance

SHORT = {
    "dp_shard": "data_parallel_shard_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
}
JOBS = ("dp_shard=2", "tp=2", "pp=2", "dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2", "pp=2 dp_shard=2", "pp=2 tp=2")
SYNC_EVERY, ROUNDS = 2, 3


def build(degrees: dict[str, int]) -> list[nn.Module]:
    """What torchtitan makes of its debug model on this rank."""
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks it where to be, as it is imported
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    settings: dict[str, Any] = {SHORT[name]: degree for name, degree in degrees.items()}
    parallelism = ParallelismConfig(**settings, pipeline_parallel_schedule="1F1B", spmd_backend="full_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    config.parallelism, config.training.seq_len, config.training.local_batch_size = parallelism, 64, 4
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    common = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": parallelism,
        "compile_config": config.compile,
        "ac_config": None,
        "dump_folder": "",
    }
    if not dims.pp_enabled:
        return [spec.parallelize_fn(model, **common)]
    _, parts, _, _ = spec.pipelining_fn(
        model,
        **common,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=nn.functional.cross_entropy,
    )
    return parts


def whole_model() -> dict[str, torch.Tensor]:
    """As one process has it; the debug model with some values."""
    from torchtitan.models.llama3 import model_registry

    with torch.device("meta"):
        model = model_registry("debugmodel").model.build()
    source = torch.Generator().manual_seed(0)
    return {name: torch.randn(param.shape, generator=source) for name, param in model.named_parameters()}


def rank(degrees: dict[str, int], address: str, file: Path) -> None:
    import outerstep
    from outerstep.topology.group.tiled import TiledTopology
    from outerstep.worker.shards import place_held

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (model,) = build(degrees)
    model.to_empty(device="cpu")
    here = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    for own in here:
        own.detach().zero_()  # the run's model is what the server was started with
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    worker = outerstep.DiLoCoWorker(model, optimizer, address, worker_id="job", handle_signals=False)
    with worker:
        for _ in range(SYNC_EVERY * ROUNDS):
            for param in model.parameters():
                param.grad = param.detach() * 0.1
            optimizer.step()
    newest = outerstep.DiLoCoClient(address).get_global_params()
    differ = []
    for (name, param), own in zip(model.named_parameters(), here, strict=True):
        begin, size = place_held(name, param)
        theirs = newest[name][tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        if not torch.equal(own.detach(), theirs):
            differ.append(name)
    metrics = worker.sync_metrics
    tiled = isinstance(worker._topology, TiledTopology)
    facts = {
        "differ": differ,
        "values": sum(own.numel() for own in here),
        "sent": metrics["bytes_sent"],
        "received": metrics["bytes_received"],
        "how": "boxes" if tiled else "rows",
    }
    file.write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def run(job: str, folder: Path) -> dict[str, Any]:
    from outerstep.server import DiLoCoServer

    degrees = {name: int(degree) for name, degree in (each.split("=") for each in job.split())}
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    model = whole_model()
    size = sum(value.numel() for value in model.values())
    settings: dict[str, Any] = {"num_workers": 1, "sync_every": SYNC_EVERY, "codec": "bf16", "down_codec": "bf16"}
    with DiLoCoServer(model, port=0, insecure=True, **settings) as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--rank", job, "--address", f"http://{server.address}", "--file", str(folder / "rank")]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rounds = server.sync_round
    found = [json.loads((folder / f"rank-{i}").read_text()) for i in range(ranks)]
    return {
        "job": job,
        "ranks": ranks,
        "how": found[0]["how"],
        "rounds": rounds,
        "equal": not any(one["differ"] for one in found),
        "most_held": max(one["values"] for one in found) / size,
        "sent": sum(one["sent"] for one in found) / rounds / (4 * size),
        "received": sum(one["received"] for one in found) / rounds / (4 * size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--json", type=Path)
    for internal in ("--rank", "--address", "--file"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.rank:
        degrees = {name: int(degree) for name, degree in (each.split("=") for each in told.rank.split())}
        rank(degrees, told.address, Path(f"{told.file}-{os.environ['RANK']}"))
        return
    about, rows = provenance("torch"), []
    with tempfile.TemporaryDirectory() as folder:
        for job in told.jobs.split(","):
            rows.append(run(job, Path(folder)))
            say(f"{job}: {'equal' if rows[-1]['equal'] else 'DIFFERENT'}")
    head = ["degrees", "ranks", "cut in", "every rank equal", "a rank holds", "sent", "received"]
    print_table(
        "torchtitan's parallel dimensions",
        head,
        [
            [
                row["job"],
                str(row["ranks"]),
                row["how"],
                "yes" if row["equal"] else "NO",
                f"{row['most_held']:.0%}",
                f"{row['sent']:.2f}",
                f"{row['received']:.2f}",
            ]
            for row in rows
        ],
    )
    if told.json:
        write_json(told.json, {"provenance": about, "rows": rows})
    if not all(row["equal"] for row in rows):
        sys.exit("some ranks do not hold what the server holds")


if __name__ == "__main__":
    main()
