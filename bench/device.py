"""How long does a GPU take to make a contribution ready?

The claim measured: with the anchor on the device, the pseudo-gradient and int4 encoding of a billion parameters can be
done in 10 ms, with no more memory on the way than one part (16 MiB) beside the encoded bytes themselves, and a worker
comes near it.

    Δ = anchor − local, encoded in int4        as a worker does it, or as one graph that torch compiles per chunk

fp32 anchor and bf16 or fp32 weights, chunk by chunk, each encoded straight into its place (a worker makes Δ first, in
scratch memory of a block); wall clock between synchronizations, median after warm-up. Extra memory is the peak of the
allocator above what is there before and stays afterwards: anchor, weights, encoded bytes.

    python bench/device.py                        # a GPU with about 16 GB
    python bench/device.py --millions 64 --repeats 3 --device cpu      # works, and says nothing
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outerstep.core.codecs import get_codec
from outerstep.core.pseudogradient import pseudo_gradient
from outerstep.topology.update import DEVICE_BLOCK_VALUES
from provenance import provenance

PART_BYTES = 16 << 20


def chunks(numel: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def encoder(codec_name: str, *, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], None]:
    codec = get_codec(codec_name)

    def encode(anchor: Tensor, local: Tensor, out: Tensor) -> None:
        codec.encode(pseudo_gradient(anchor, local), out)

    return torch.compile(encode, fullgraph=True, dynamic=False) if compiled else encode


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, dtype: torch.dtype, *, compiled: bool) -> dict[str, Any]:
    codec, device = get_codec(arguments.codec), arguments.device
    numel = int(arguments.millions * 1e6) // codec.block_values * codec.block_values
    anchor = torch.randn(numel, device=device)
    local = (anchor + 1e-3).to(dtype)
    data = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)
    encode = encoder(arguments.codec, compiled=compiled)
    pieces = [
        (anchor[a:b], local[a:b], data[codec.encoded_bytes(a) : codec.encoded_bytes(b)])
        for a, b in chunks(numel, arguments.chunk if compiled else arguments.block)
    ]

    def work() -> None:
        for piece in pieces:
            encode(*piece)

    for _ in range(3):  # compiles, and warms up
        work()
    synchronize(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(arguments.repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        taken.append((time.perf_counter() - begin) * 1e3)
    extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return {
        "codec": codec.name,
        "weights": str(dtype).removeprefix("torch."),
        "how": "one graph" if compiled else "worker",
        "values": numel,
        "median_ms": statistics.median(taken),
        "ms": taken,
        "extra_bytes": extra,
        "extra_parts": None if extra is None else extra / PART_BYTES,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Δ and its encoding on a GPU.")
    parser.add_argument("--millions", type=float, default=1000.0, help="millions of parameters")
    parser.add_argument("--chunk", type=int, default=1 << 25, help="values per compiled call: one part of int4")
    parser.add_argument("--block", type=int, default=DEVICE_BLOCK_VALUES, help="values that a worker encodes at once")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch") | {"gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else None}
    rows = [
        measure(arguments, dtype, compiled=compiled)
        for dtype in (torch.float32, torch.bfloat16)
        for compiled in (True, False)
    ]
    print(f"{rows[0]['values'] / 1e6:.0f}M parameters, {arguments.codec}, median of {arguments.repeats}")
    print(f"{'weights':10}{'how':10}{'ms':>10}{'extra parts of 16 MiB':>24}")
    for row in rows:
        extra = "" if row["extra_parts"] is None else f"{row['extra_parts']:.2f}"
        print(f"{row['weights']:10}{row['how']:10}{row['median_ms']:10.2f}{extra:>24}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
