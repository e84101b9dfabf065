"""What does a hierarchy cost in loss, and what does it save on the slow link?

The claims measured, with four workers behind the same emulated link (bench/links.py):

1. Two clusters of two send half as much over the slow link as four workers of one server do.
2. Their final loss is that of the flat run, within 0.5 %: paired by seed, plus two standard errors.
3. Momentum belongs to one level: with the same momentum inside and across the loss is visibly worse.

    flat             four workers of one server, H steps; the link is between each of them and the server
    hierarchy        two clusters of two: inside they average every H/5 steps, across every H; the link is across
    no waiting       the same, and members train on while their cluster exchanges (`--above-wait 0`)
    both momenta     as no waiting, with the outer momentum of the top server inside as well

Real servers, clusters and processes: each worker is the demo's training script. The runs of one seed are paired: same
initial weights, batches and learning rates. The loss is that of the top server's weights on the held-out files.

    python bench/hierarchy.py                       # three seeds; about half an hour on sixteen cores
    python bench/hierarchy.py --quick               # too short to judge by
    python bench/hierarchy.py --json out.json       # every run, the machine and the commit
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from links import Link, emulated
from outerstep import DiLoCoServer
from outerstep.demo.corpus import evaluation_batches, load_corpus
from outerstep.demo.model import build_model
from outerstep.demo.training import evaluate
from outerstep.hierarchy import Cluster
from provenance import provenance

WORKERS, CLUSTERS, INSIDE_PER_ACROSS = 4, 2, 5
ROWS = ("flat", "hierarchy", "no waiting", "both momenta")
HELD_OUT_BATCHES = 16


@dataclass(frozen=True)
class Outcome:
    row: str
    seed: int
    loss: float
    rounds: int
    across_bytes: int  # to and from the top server
    wall_s: float


def measure(row: str, seed: int, options: argparse.Namespace) -> Outcome:
    began = time.monotonic()
    with ExitStack() as around:
        folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
        shared: dict[str, Any] = {"port": 0, "insecure": True, "codec": "bf16", "heartbeat_timeout_s": 600.0}
        outer = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum}
        weights = build_model(seed).state_dict()
        flat = row == "flat"
        top = DiLoCoServer(weights, WORKERS if flat else CLUSTERS, **shared, **outer, **_every(flat, options))
        around.enter_context(top)
        slow = f"http://{around.enter_context(emulated(Link(options.mbit, options.rtt_ms), top.address))}"
        near, clusters = [slow], list[Cluster]()
        if not flat:
            inside = outer if row == "both momenta" else {"outer_lr": 1.0, "outer_momentum": 0.0}
            steps = options.sync_every // INSIDE_PER_ACROSS
            size = WORKERS // CLUSTERS
            rooms = [DiLoCoServer(weights, size, **shared, **inside, sync_every=steps) for _ in range(CLUSTERS)]
            for i, room in enumerate(rooms):
                around.enter_context(room)
                said: dict[str, Any] = {} if row == "hierarchy" else {"wait_s": 0.0}
                said |= {"inner_momentum": True} if row == "both momenta" else {}
                clusters.append(Cluster(room, slow, f"cluster-{i}", every=INSIDE_PER_ACROSS, **said).start())
            near = [f"http://{room.address}" for room in rooms]
        workers = [_start(i, near[i * len(near) // WORKERS], seed, folder, options) for i in range(WORKERS)]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise RuntimeError(f"{row}, seed {seed}: a worker ended with {codes}; see its log\n{_logs(folder)}")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda cluster: cluster.stop(), clusters))
        status = top.typed_status()
        model = build_model(seed)
        model.load_state_dict(top.get_global_params())
        held_out = evaluation_batches(load_corpus().held_out, HELD_OUT_BATCHES)
        across = status.bytes_received + status.bytes_sent
        return Outcome(row, seed, evaluate(model, held_out), top.sync_round, across, time.monotonic() - began)


def _every(flat: bool, options: argparse.Namespace) -> dict[str, int]:
    """Of a cluster a step is a round."""
    return {"sync_every": options.sync_every if flat else INSIDE_PER_ACROSS}


def _start(i: int, address: str, seed: int, folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    words = ["-m", "outerstep.demo.train", "--shards", str(i), "--seed", str(seed), "--steps", str(options.steps)]
    environ = {**os.environ, "DILOCO_SERVER": address, "DILOCO_WORKER_ID": f"w{i}", "OMP_NUM_THREADS": "1"}
    with (folder / f"{i}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words, "--progress", str(folder / f"{i}.jsonl")],
            env=environ,
            stdout=log,
            stderr=log,
        )


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))


def show(outcomes: list[Outcome], console: Console) -> dict[str, Any]:
    """The table, and what it says by name: mean paired ratios to the flat run, with two standard errors."""
    flat = {one.seed: one for one in outcomes if one.row == "flat"}
    table = Table(title="beside the flat run of the same seed")
    for column in ("", "loss", "loss, ratio", "± 2 s.e.", "bytes across, ratio", "rounds"):
        table.add_column(column, justify="right" if column else "left")
    said: dict[str, Any] = {}
    for row in ROWS:
        ours = [one for one in outcomes if one.row == row and one.seed in flat]
        if not ours:
            continue
        ratios = [one.loss / flat[one.seed].loss for one in ours]
        error = 2 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else float("nan")
        sizes = statistics.mean(one.across_bytes / flat[one.seed].across_bytes for one in ours)
        loss = statistics.mean(one.loss for one in ours)
        said[row] = {"loss": loss, "ratio": statistics.mean(ratios), "two_se": error, "bytes_ratio": sizes}
        cells = [f"{loss:.4f}", f"{said[row]['ratio']:.4f}", f"{error:.4f}", f"{sizes:.3f}", str(ours[0].rounds)]
        table.add_row(row, *cells)
    console.print(table)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--sync-every", type=int, default=25, help="H across; inside a fifth of it")
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 5), help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = [0], 100
    torch.set_num_threads(1)
    console, facts = Console(), provenance("torch", "outerstep")
    jobs = [(row, seed) for seed in options.seeds for row in options.rows]
    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(lambda job: measure(*job, options), jobs))
    said = show(outcomes, console)
    if options.json is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        report = {"settings": settings, "machine": facts, "summary": said, "runs": [asdict(one) for one in outcomes]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
