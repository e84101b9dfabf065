"""What does a round cost the server, apart from the network?

The claim measured: with bf16 both ways a contribution is checked and added, and the outer step taken, encoded, applied,
hashed and checked, in little more than the time that the memory traffic takes: the step alone costs less than twice
what `torch.optim.SGD(fused=True)` does, which neither divides by the weights nor encodes, hashes or checks anything.

A fragment of about 112 tensors shaped like a small GPT; CPU time of all threads together, as the wall clock of a shared
machine measures its other tenants; the best of several repeats, per 100M parameters:

    check          all of a contribution at once (the server does it part by part, as they arrive)
    add first      the first contribution of a round to its sum
    add another    one more
    close          mean, Nesterov step, T − θ, encode, θ, hash, finite check; all contributions were added before
    close + 1      the same with one contribution that was not
    close, 4       four contributions that were not, and no sum: the deterministic mode
    step           Nesterov alone, block by block
    fused SGD      the same step by torch

    python bench/server_step.py                      # about half a minute
    python bench/server_step.py --quick --json out.json
    python bench/server_step.py --codecs bf16 int8 int4 --block 65536
    python bench/server_step.py --codecs int4 --threads 1 2 4 8         # does closing scale?
    python bench/server_step.py --codecs bf16 int4 --device cuda --layers 120     # as `outerstep server --device cuda`

The last columns are wall clocks. That of "close, 4" says with several numbers of threads how closing scales; on a GPU
only wall clocks say anything ("step" and "fused SGD" stay on the CPU).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table

import outerstep.server.blocks
from outerstep.core.codecs.recipe import Recipe
from outerstep.core.outer import Nesterov
from outerstep.threads import ThreadTeam
from outerstep.types import ParameterSpec
from provenance import provenance

Seconds = dict[str, list[float]]


def shapes(layers: int, width: int = 768) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"wte": (24576, width), "wpe": (1024, width)}
    for i in range(layers):
        for norm in ("ln1", "ln2"):
            found |= {f"h.{i}.{norm}.weight": (width,), f"h.{i}.{norm}.bias": (width,)}
        found |= {f"h.{i}.attn.weight": (3 * width, width), f"h.{i}.attn.bias": (3 * width,)}
        found |= {f"h.{i}.proj.weight": (width, width), f"h.{i}.fc.weight": (4 * width, width)}
        found |= {f"h.{i}.out.weight": (width, 4 * width)}
    return found


def cpu_seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


class Bench:
    """One fragment, and one contribution to it that comes again and again."""

    def __init__(self, codec: str, layers: int, threads: int | None = None, device: str = "cpu") -> None:
        from outerstep.server.places import pinned_memory
        from outerstep.server.store import Addend, FragmentStore  # after the block size is set

        up, source = Recipe.parse(codec), torch.Generator().manual_seed(0)
        specs = [ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes(layers).items()]
        state = {spec.name: torch.randn(spec.shape, generator=source).mul_(0.02) for spec in specs}
        self.numel = sum(spec.numel for spec in specs)
        self.team = ThreadTeam(threads)
        self.store = FragmentStore(0, specs, state, up, up.downlink(), 16 << 20, team=self.team)
        layout = self.store.uplink().layout
        payload = pinned_memory(layout.size_bytes) if device != "cpu" else memoryview(bytearray(layout.size_bytes))
        payload[: layout.data_begin] = layout.prefix
        for spec, entry in zip(specs, layout.entries, strict=True):
            place = layout.data_begin + entry.begin
            out = torch.frombuffer(payload, dtype=torch.uint8, offset=place, count=entry.end - entry.begin)
            up.codec(spec).encode(torch.randn(spec.numel, generator=source).mul_(1e-3), out)
        if device != "cpu":
            self.store.to_device(torch.device(device))
        self.payload = payload
        self.addend = Addend(self.payload, 1.0)
        self.rule, self.version = Nesterov(portable=device != "cpu"), 0
        self.params = {name: torch.nn.Parameter(value) for name, value in state.items()}
        for param in self.params.values():
            param.grad = torch.randn(param.shape, generator=source)
        self.fused = torch.optim.SGD(self.params.values(), lr=0.7, momentum=0.9, nesterov=True, fused=True)
        self.alone = Nesterov()

    def round(self, before: int, pending: int, seconds: Seconds, name: str) -> None:
        self.version += 1
        for i in range(before):
            taken = cpu_seconds(lambda: self.store.accumulate(self.version, [self.addend]))
            seconds.setdefault("add another" if i else "add first", []).append(taken)
        begin, began_at = time.process_time(), time.perf_counter()
        made = self.store.close(self.version, self.rule, [self.addend] * pending)
        seconds.setdefault(name, []).append(time.process_time() - begin)
        seconds.setdefault(f"{name}, wall", []).append(time.perf_counter() - began_at)
        self.store.publish(made, ())

    @torch.no_grad()
    def step(self) -> None:
        step = self.alone.begin(self.params)
        for block in self.store._blocks:
            param = self.params[block.name]
            assert param.grad is not None
            flat, g = param.data.view(-1), param.grad.view(-1)
            step.block(block.name, flat[block.start : block.stop], g[block.start : block.stop], block.start)

    def run(self, repeats: int) -> Seconds:
        for _ in range(2):  # fresh memory costs more than what is done with it
            self.round(2, 1, {}, "")
            self.step()
            self.fused.step()
        seconds: Seconds = {}
        for _ in range(repeats):
            seconds.setdefault("check", []).append(cpu_seconds(lambda: self.store.decoder(1).check(self.payload)))
            self.round(2, 0, seconds, "close")
            self.round(1, 1, seconds, "close + 1")
            self.round(0, 4, seconds, "close, 4")
            seconds.setdefault("step", []).append(cpu_seconds(self.step))
            seconds.setdefault("fused SGD", []).append(cpu_seconds(self.fused.step))
        wall = {name: taken for name, taken in seconds.items() if name.endswith("wall")}
        return {**{name: taken for name, taken in seconds.items() if name not in wall}, **wall}


def table(rows: list[dict[str, Any]], millions: float, block: int) -> Table:
    made = Table(
        title=f"{millions:.0f}M parameters, blocks of {block}: CPU seconds per 100M parameters, best run",
        box=rich.box.SIMPLE_HEAD,
    )
    for column in rows[0]:
        made.add_column(column, justify="left" if column == "codec" else "right")
    for row in rows:
        made.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    return made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a round costs the server, apart from the network.")
    parser.add_argument("--quick", action="store_true", help="2 layers and 2 repeats instead of 12 and 5")
    parser.add_argument("--codecs", nargs="+", default=["bf16"], metavar="CODEC", help="of contributions (and updates)")
    parser.add_argument("--block", type=int, default=outerstep.server.blocks.BLOCK_VALUES, help="values per block")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="where the server's store works")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="of a team (default: as a server has)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    outerstep.server.blocks.BLOCK_VALUES = arguments.block
    about = provenance("torch", "xxhash")
    rows, runs, numel = [], {}, 0
    for codec in arguments.codecs:
        for threads in arguments.threads or [None]:
            bench = Bench(codec, 2 if arguments.quick else arguments.layers, threads, arguments.device)
            found, numel = bench.run(2 if arguments.quick else 5), bench.numel
            runs[f"{codec}, {bench.team.count} threads"] = found
            each = {name: min(taken) * 1e8 / numel for name, taken in found.items()}
            rows.append({"codec": codec, "threads": bench.team.count, **each})
    Console(width=170).print(table(rows, numel / 1e6, arguments.block))
    if arguments.json:
        report = {"machine": about, "parameters": numel, "block": arguments.block, "summary": rows, "seconds": runs}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        Console(stderr=True).print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
