"""What does an exchange without a server cost compared with gloo's own all_reduce?

The bound: an exchange of fp32 in at most 1.5 times what `torch.distributed.all_reduce` over gloo takes for the same
values in the same run. It is put to two things, and both verdicts are printed: to the part that all_reduce does as
well, from contributions to their mean; and to the whole as the training loop sees it, with the pseudo-gradient before
and the outer step, the new anchor and weights, their hash and its comparison after. The small codecs move fewer bytes,
which pays where the network is slower than this machine's loopback.

    exchange     from when the last rank had its contribution ready to when the last rank had the mean
    whole        force_sync(), the slowest rank
    CPU          of a rank's process, all threads

n processes, one thread each, a model of a few large tensors. Variants alternate, so that whatever else this machine
does meets all of them. Ratios are given of the medians and of the fastest runs: on a busy machine they differ a lot, as
arithmetic waits longer for a core than a socket does. Bytes are those handed to the process group.

    python bench/allreduce.py                      # about a minute, two ranks, 50M values
    python bench/allreduce.py --quick --json out.json
    python bench/allreduce.py --ranks 4 --codecs fp32 bf16 int8 int4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from harness import HOST, Actor, Span, together, wall_s
from provenance import provenance

BOUND = 1.5
TENSOR = 1 << 22


class Rank:
    """One process: gloo's all_reduce, and a worker for each codec."""

    def __init__(self, rank: int, port: int, ranks: int, numel: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        self._store = dist.TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
        self._rank, self._ranks, self._numel = rank, ranks, numel
        self._workers: dict[str, Any] = {}

    def port(self) -> int:
        return int(self._store.port)

    def join(self) -> None:
        self._dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._ranks)
        self._values = self._torch.randn(self._numel)

    def begin(self, codec: str) -> None:
        from outerstep import DiLoCoWorker

        torch = self._torch
        sizes = [TENSOR] * (self._numel // TENSOR) + [self._numel % TENSOR]
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes if size])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        worker = DiLoCoWorker(model, optimizer, "allreduce", sync_every=1 << 30, codec=codec, heartbeat_interval=0)
        worker.start()
        self._watch(worker)
        self._workers[codec] = (worker, model, optimizer)

    def _watch(self, worker: Any) -> None:
        """When the thread that carries exchanges had the last one in hand."""
        carry = worker._topology._exchange

        def timed(*args: Any) -> None:
            begin = time.monotonic()
            carry(*args)
            self._carried = begin, time.monotonic()

        worker._topology._exchange = timed

    def train(self, codec: str) -> None:
        """One step, which is not measured."""
        _, model, optimizer = self._workers[codec]
        for param in model.parameters():
            param.grad = self._torch.full_like(param, 1e-3 * (1 + self._rank))
        optimizer.step()
        optimizer.zero_grad()

    def exchange(self, codec: str) -> tuple[float, int, float, float]:
        """CPU seconds, bytes sent, and between when they were carried."""
        worker = self._workers[codec][0]
        cpu_s, before = time.process_time(), worker.sync_metrics["bytes_sent"]
        worker.force_sync()
        return time.process_time() - cpu_s, int(worker.sync_metrics["bytes_sent"] - before), *self._carried

    def all_reduce(self) -> tuple[float]:
        cpu_s = time.process_time()
        self._dist.all_reduce(self._values)
        self._values.div_(self._ranks)
        return (time.process_time() - cpu_s,)

    def close(self) -> None:
        os._exit(0)  # gloo may abort in an ordinary exit


@dataclass
class Variant:
    """Seconds of every run, and the bytes that a rank sent in each."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    bytes_sent: float = 0.0

    def note(self, wall_s: float, spans: Sequence[Span] = ()) -> None:
        self.wall_s.append(wall_s)
        self.cpu_s += [max(span.value[0] for span in spans)] if spans else []


def measure(ranks: int, numel: int, codecs: list[str], repeats: int) -> dict[str, Variant]:
    found = {"gloo all_reduce": Variant(bytes_sent=2 * (ranks - 1) / ranks * 4 * numel)}
    found |= {f"{codec}, {what}": Variant() for codec in codecs for what in ("exchange", "whole")}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Actor(Rank, 0, 0, ranks, numel))
        port = first.ask("port")
        actors = [first, *(stack.enter_context(Actor(Rank, r, port, ranks, numel)) for r in range(1, ranks))]
        together(actors, "join")
        for codec in codecs:
            together(actors, "begin", codec)
        for i in range(repeats + 1):
            spans = together(actors, "all_reduce")
            if i:  # the first is for fresh memory
                found["gloo all_reduce"].note(wall_s(spans), spans)
            for codec in codecs:
                together(actors, "train", codec)
                spans = together(actors, "exchange", codec)
                exchange, whole = found[f"{codec}, exchange"], found[f"{codec}, whole"]
                exchange.bytes_sent = whole.bytes_sent = max(span.value[1] for span in spans)
                if i:
                    exchange.note(max(span.value[3] for span in spans) - max(span.value[2] for span in spans))
                    whole.note(wall_s(spans), spans)
    return found


def summary(found: dict[str, Variant]) -> list[dict[str, Any]]:
    gloo = found["gloo all_reduce"]
    return [
        {
            "variant": name,
            "seconds": statistics.median(one.wall_s),
            "fastest_s": min(one.wall_s),
            "of_all_reduce": statistics.median(one.wall_s) / statistics.median(gloo.wall_s),
            "fastest_of_all_reduce": min(one.wall_s) / min(gloo.wall_s),
            "cpu_of_all_reduce": min(one.cpu_s) / min(gloo.cpu_s) if one.cpu_s else None,
            "of_ring_bytes": one.bytes_sent / gloo.bytes_sent,
        }
        for name, one in found.items()
    ]


def table(rows: list[dict[str, Any]], ranks: int, numel: int) -> Table:
    title = f"{ranks} ranks agree on {numel / 1e6:g}M values over gloo, one thread each"
    made = Table(title=title, box=rich.box.SIMPLE)
    for column in ("variant", "median s", "fastest s", "÷ all_reduce", "fastest", "CPU", "bytes ÷ fp32 ring"):
        made.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        name, *numbers = row.values()
        made.add_row(name, *("" if number is None else f"{number:.3f}" for number in numbers))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="An exchange without a server, beside gloo's own all_reduce.")
    parser.add_argument("--quick", action="store_true", help="4M values and 3 repeats instead of 50M and 7")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=["fp32", "bf16", "int8", "int4"], metavar="CODEC")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run, the summary and the machine here")
    options = parser.parse_args()
    about = provenance("torch")
    numel, repeats = (4_000_000, 3) if options.quick else (50_000_000, 7)
    found = measure(options.ranks, numel, options.codecs, repeats)
    rows = summary(found)
    Console(width=110).print(table(rows, options.ranks, numel))
    for row in rows:
        if row["variant"].startswith("fp32"):
            median, fastest = (row[name] for name in ("of_all_reduce", "fastest_of_all_reduce"))
            verdict = f"{row['variant']}: {median:.2f} times all_reduce (medians), {fastest:.2f} (fastest runs)"
            Console(width=110).print(f"{verdict}; the bound is {BOUND}", highlight=False)
    if options.json:
        runs = {name: asdict(one) for name, one in found.items()}
        report = {"machine": about, "ranks": options.ranks, "values": numel, "bound": BOUND, "summary": rows}
        options.json.write_text(json.dumps({**report, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
