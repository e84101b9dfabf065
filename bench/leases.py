"""What do leases cost?

The claims measured:

    a million units cost the server less than 100 MiB
    a lease costs it less than 1 ms of CPU
    a leased loader adds less than 1 % to the CPU time of a training step of the demo's model

The first two play the server's lease table (no sockets): 256 workers lease, contribute and finish an epoch. "in order":
they finish what they have. "torn": a tenth of the units, of which each costs more: each worker dies once in eight
rounds, with some of its units done and some not, so that the table has as many ranges as such a run can make. A lease
is one request and its answer, a round one contribution's acceptance and closing. Memory is by how much the process's
largest resident size grew.

The third runs PyTorch's DataLoader without shuffling, the leased loader with a table in the same process, and the
demo's training step, each by itself, several times in turn, by CPU time of this process, all threads; the ratio is
(leased − plain) / step, the median over the turns.

    python bench/leases.py                        # about two minutes
    python bench/leases.py --quick                # a tenth of it
    python bench/leases.py --json out.json        # with the machine and the commit
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from outerstep.coordination.leases import LeaseTable
from outerstep.coordination.worker.machine import Cycle, Metrics, Work, WorkerState
from outerstep.coordination.worker.units import LeaseRequest
from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.data.leased import LeasedData
from outerstep.demo.corpus import load_corpus
from outerstep.demo.model import GPTConfig, build_model
from outerstep.demo.training import TrainSettings, make_optimizer
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, Lease, LeaseAnswer
from provenance import provenance

WORKERS = 256
WANT = 40


def epoch(units: int, *, torn: bool) -> dict[str, Any]:
    """CPU seconds of each lease and of each round, and what the table came to."""
    table = LeaseTable(Dataset(name="train", samples=units, unit_samples=1))
    rng, names = random.Random(0), [f"worker-{i}" for i in range(WORKERS)]
    numbers, live, now, version = dict.fromkeys(names, 0), set(names), 0.0, 0
    leases: list[float] = []
    rounds: list[float] = []
    pieces = 0
    while table.done.total < units:
        now += 1.0
        for name in names:
            numbers[name] += 1
            held = table.held.get(name, NONE)
            message = Lease(
                run_id="run", worker_id=name, incarnation=1, dataset=table.dataset, number=numbers[name], want=WANT,
                holds=tuple(held), untrained=held.total, waits=not held, pace=float(WANT),
            )  # fmt: skip
            began = time.process_time()
            table.lease(message, now, live)
            leases.append(time.process_time() - began)
        for name in names:
            held, version = table.held.get(name, NONE), version + 1
            some = [place for place in held.numbers() if not torn or rng.random() < 0.7]
            began = time.process_time()
            table.accept(name, 0, version, tuple(Ranges((place, place + 1) for place in some)), now)
            table.closed(0, version, (), 1)
            rounds.append(time.process_time() - began)
            if torn and rng.random() < 1 / 8:
                table.gone(name)
        pieces = max(pieces, table.done.pieces + table.free.pieces)
    return {
        "leases": len(leases),
        "lease_ms": 1e3 * statistics.fmean(leases),
        "worst_hundredth_ms": 1e3 * sorted(leases)[int(0.99 * len(leases))],
        "round_ms": 1e3 * statistics.fmean(rounds),
        "most_ranges": pieces,
    }


class Table:
    """Leases without a server."""

    def __init__(self, dataset: Dataset) -> None:
        self._table = LeaseTable(dataset)

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        head: Any = {"run_id": "run", "worker_id": "w", "incarnation": 1}
        return self._table.lease(request.message(head), time.monotonic(), {"w"})


class Pieces:
    """Of the demo's corpus, at every byte."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self._text, self._context = text, context

    def __len__(self) -> int:
        return len(self._text) - self._context - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[index : index + self._context + 1].long()


def cpu_per_step(batches: Iterator[Any], steps: int, data: LeasedData | None = None) -> float:
    began = time.process_time()
    for _ in range(steps):
        next(batches)
        if data is not None:
            data.stepped()
    return (time.process_time() - began) / steps


def loader(turns: int, steps: int) -> dict[str, Any]:
    settings, pieces = TrainSettings(steps=1), Pieces(load_corpus().train, GPTConfig.context)
    model = build_model(0)
    optimizer = make_optimizer(model, settings)
    samples = torch.stack([pieces[i] for i in range(settings.batch_size)])

    def train() -> Iterator[None]:
        while True:
            _, loss = model(samples[:, :-1], samples[:, 1:])
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    of_plain, of_leased, of_step, ratios = [], [], [], []
    for _ in range(turns):
        plain = DataLoader(pieces, batch_size=settings.batch_size, shuffle=False)  # type: ignore[arg-type]
        sampler = LeasedSampler(pieces)
        data = LeasedData([sampler.spec])
        sampler.belongs_to(data)
        data.start(Table(sampler.spec), WorkerState(Work(), Cycle(0, 1, None), [], Metrics(), ()))
        leased = LeasedLoader(pieces, sampler, batch_size=settings.batch_size)  # type: ignore[arg-type]
        of_plain.append(cpu_per_step(iter(plain), steps))
        of_leased.append(cpu_per_step(iter(leased), steps, data))
        of_step.append(cpu_per_step(train(), max(steps // 20, 5)))
        ratios.append((of_leased[-1] - of_plain[-1]) / of_step[-1])
        data.end()
    return {
        "plain_loader_us": 1e6 * statistics.median(of_plain),
        "leased_loader_us": 1e6 * statistics.median(of_leased),
        "step_us": 1e6 * statistics.median(of_step),
        "added": statistics.median(ratios),
        "added_from_to": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the units, fewer turns")
    parser.add_argument("--json", type=Path, help="write the numbers, the machine and the commit to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    units, turns, steps = (100_000, 3, 200) if options.quick else (1_000_000, 7, 1000)
    found: dict[str, Any] = {"units": units}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, torn in (("in order", False), ("torn", True)):
        found[name] = epoch(units // 10 if torn else units, torn=torn)
        found[name]["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found["loader"] = loader(turns, steps)
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": provenance(), **found}, indent=2))


if __name__ == "__main__":
    main()
