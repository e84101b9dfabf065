"""How fast are the codecs?

The claim measured: one core encodes and decodes int8 and int4 at several GB/s, faster than a 10 Gbit/s link carries
the values as bf16, so that a smaller codec is never the bottleneck on the links it is made for.

For every codec, one tensor of fp32 values (normal, scale 1e-3), one thread:

    encode       values → bytes, into memory that is there already
    decode+add   bytes → added to an fp32 sum, as the server does (`Codec.decode_add`)

beside a plain copy of the values (and an addition of them) in the same run: variants are interleaved and repeated,
medians of the CPU time reported, because the wall clock of a shared machine measures its other tenants. GB/s count the
fp32 values, 4 bytes each, whatever the codec makes of them; GB = 1e9 bytes.

    python bench/codecs.py                        # about a minute
    python bench/codecs.py --quick                # a few seconds
    python bench/codecs.py --json out.json        # every single run, the machine and the commit
    python bench/codecs.py --device cuda --compile --millions 1000    # Δ = anchor − local and its encoding, one graph

Where numba is installed, codecs with compiled loops have columns of their own for their torch form, in the same run. On
a GPU times are wall-clock, between synchronizations.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outerstep.core.codecs import CODECS, Codec, bytes_per_value, compiled
from outerstep.core.codecs.cast import CastCodec
from outerstep.core.pseudogradient import pseudo_gradient
from provenance import cpu_model, git_commit

Work = Callable[[], object]


def variants(codec: Codec, values: Tensor, compile_it: bool) -> dict[str, Work]:
    """What is timed for a codec, by column."""
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values, data)
    total = torch.zeros_like(values)
    work: dict[str, Work] = {
        "encode": lambda: codec.encode(values, data),
        "decode+add": lambda: codec.decode_add(data, total),
    }
    if values.device.type == "cpu" and compiled.all_kernels() is not None and not isinstance(codec, CastCodec):
        work["encode, torch"] = lambda: in_torch(work["encode"])
        work["decode+add, torch"] = lambda: in_torch(work["decode+add"])
    if compile_it:
        anchor = torch.zeros_like(values)

        def whole(anchor: Tensor, local: Tensor, out: Tensor) -> None:
            codec.encode(pseudo_gradient(anchor, local), out)

        graph = torch.compile(whole, fullgraph=True, dynamic=False)
        work["Δ and encode, compiled"] = lambda: graph(anchor, values, data)
    return work


def in_torch(work: Work) -> None:
    """Without the compiled loops."""
    kept, compiled.all_kernels = compiled.all_kernels, lambda: None
    try:
        work()
    finally:
        compiled.all_kernels = kept


def seconds(work: Work, device: str) -> float:
    if device == "cpu":
        begin = time.thread_time()
        work()
        return time.thread_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(names: list[str], values: Tensor, repeats: int, compile_it: bool) -> dict[str, dict[str, list[float]]]:
    """name -> column -> seconds of every repeat; the copy and the codecs take turns."""
    target = torch.empty_like(values)
    plan: dict[str, dict[str, Work]] = {"copy": {"encode": lambda: target.copy_(values)}}
    plan["copy"]["decode+add"] = lambda: target.add_(values)
    plan |= {name: variants(CODECS[name], values, compile_it) for name in names}
    runs: dict[str, dict[str, list[float]]] = {name: {column: [] for column in work} for name, work in plan.items()}
    for repeat in range(-1, repeats):  # the first one warms up, and compiles
        for name, columns in plan.items():
            for column, work in columns.items():
                taken = seconds(work, values.device.type)
                if repeat >= 0:
                    runs[name][column].append(taken)
    return runs


def summarize(runs: dict[str, dict[str, list[float]]], numel: int) -> list[dict[str, Any]]:
    size = 4 * numel / 1e9
    rows = []
    for name, columns in runs.items():
        row: dict[str, Any] = {"codec": name}
        row["bytes_per_value"] = bytes_per_value(CODECS[name]) if name in CODECS else 4.0
        for column, taken in columns.items():
            row[column] = {
                "gb_per_s": size / statistics.median(taken),
                "best_gb_per_s": size / min(taken),
                "median_ms": statistics.median(taken) * 1e3,
                "ratio_to_copy": statistics.median(
                    ours / copied for ours, copied in zip(taken, runs["copy"]["encode"], strict=True)
                ),
            }
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], numel: int, repeats: int, device: str) -> Table:
    clock = "CPU time" if device == "cpu" else "wall clock"
    columns = list(dict.fromkeys(column for row in rows for column in row if isinstance(row[column], dict)))
    made = Table(
        title=f"{numel / 1e6:.0f}M values, {device}, {clock}, median of {repeats}: GB/s of fp32 (time / copy's time)",
        box=rich.box.SIMPLE_HEAD,
    )
    made.add_column("codec")
    made.add_column("bytes/value", justify="right")
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        cells = [row.get(column) for column in columns]
        made.add_row(
            row["codec"],
            f"{row['bytes_per_value']:.4g}",
            *(f"{cell['gb_per_s']:.2f} ({cell['ratio_to_copy']:.1f}×)" if cell else "" for cell in cells),
        )
    return made


def provenance(device: str) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": importlib.metadata.version("numba") if compiled.all_kernels() is not None else None,
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how fast the codecs encode, and decode and add.")
    parser.add_argument("--quick", action="store_true", help="8M values and 3 repeats instead of 64M and 7")
    parser.add_argument("--millions", type=float, help="millions of values (default 64)")
    parser.add_argument("--repeats", type=int, help="repeats of every run (default 7)")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS), metavar="CODEC")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true", help="also Δ and its encoding as one compiled graph")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    numel = int((arguments.millions or (8 if arguments.quick else 64)) * 1e6)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    about = provenance(arguments.device)  # before the run: the load of others, not ours
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(arguments.device)
    runs = measure(arguments.codecs, values, repeats, arguments.compile)
    rows = summarize(runs, numel)
    Console(width=130).print(table(rows, numel, repeats, arguments.device))
    if arguments.json:
        report = {"machine": about, "values": numel, "summary": rows, "seconds": runs}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        Console(stderr=True).print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
