"""What does a step with nothing due cost?

The claim measured: the worker's hooks before and after `optimizer.step()` together take less than 20 µs of the
training thread's CPU time on a step that neither sends nor adopts anything, whatever the model's size, the number of
fragments and what is under way in the background.

    nothing     `optimizer.step()` of a tiny model, nobody attached
    tiny        3 tensors, one fragment
    large       400 tensors in 8 fragments, a heartbeat every 50 ms
    under way   the same while 7 exchanges are waiting to be taken over

For each, *hook* is what the worker registered with the optimizer (one before the step, one after it), called by itself
many thousand times; *step* is `optimizer.step()` with it. The server is a real one, in this process, over loopback. CPU
time of the calling thread (`time.thread_time`), in batches because reading the clock costs about as much as what is
measured; medians over the batches, of all the cases in turn. Wall-clock time is in the JSON: it has the other tenants
of the machine in it.

    python bench/overhead.py                      # a few seconds
    python bench/overhead.py --quick              # fewer batches
    python bench/overhead.py --json out.json      # every batch, the machine and the commit
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.hooks import RemovableHandle

from outerstep import DiLoCoServer, DiLoCoWorker
from provenance import provenance

LIMIT_US = 20.0
HOOKS_PER_BATCH = 100
STEPS_PER_BATCH = 20
NEVER = 1 << 40  # steps until something is due
FRAGMENTS = 8
SLOT_STEPS = 12_000  # between two sends of the case in which exchanges are under way


class RecordingSGD(torch.optim.SGD):
    """Remembers what was hooked into it, so that the hooks before and after a step can be called by themselves."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        self._before = hook
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        self._after = hook
        return super().register_step_post_hook(hook)

    def call_hooks(self) -> None:
        self._before(self, (), {})
        self._after(self, (), {})


@dataclass
class Case:
    """One optimizer, with or without a worker; seconds of CPU and wall-clock time per call, a number per batch."""

    name: str
    optimizer: RecordingSGD
    server: DiLoCoServer | None = None
    hook_s: list[float] = field(default_factory=list)
    hook_wall_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def measure(self) -> None:
        if self.server is not None:
            cpu_s, wall_s = per_call(self.optimizer.call_hooks, HOOKS_PER_BATCH)
            self.hook_s.append(cpu_s)
            self.hook_wall_s.append(wall_s)
        self.step_s.append(per_call(self.optimizer.step, STEPS_PER_BATCH)[0])


def per_call(work: Callable[[], object], calls: int) -> tuple[float, float]:
    """Seconds of this thread's CPU time and of wall-clock time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - cpu) / calls, (time.perf_counter() - wall) / calls


def make_optimizer(model: nn.Module) -> RecordingSGD:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return RecordingSGD(model.parameters(), lr=1e-3)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False))


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(200)))


@contextlib.contextmanager
def attached(name: str, model: nn.Module, **settings: Any) -> Iterator[Case]:
    """A worker beside its own server, its optimizer stepping. It leaves without contributing."""
    optimizer = make_optimizer(model)
    rhythm = settings["sync_every"]  # said by the server too: a worker alone may not wish for so long
    with DiLoCoServer(model.state_dict(), num_workers=1, port=0, insecure=True, sync_every=rhythm) as server:
        worker = DiLoCoWorker(model, optimizer, f"http://{server.address}", **settings).start()
        try:
            yield Case(name, optimizer, server)
        finally:
            worker.abandon("measured")


def launch(case: Case) -> None:
    """Step until all but one fragment are on their way; what is measured then fits before the last is due."""
    assert case.server is not None
    for _ in range(SLOT_STEPS * (FRAGMENTS - 1)):
        case.optimizer.call_hooks()
    give_up_at = time.monotonic() + 60.0
    while case.server.status()["total_submissions"] != FRAGMENTS - 1:
        assert time.monotonic() < give_up_at, "the fragments were not sent"
        time.sleep(0.05)


def measure_all(batches: int, log: Console) -> list[Case]:
    calls = batches * (HOOKS_PER_BATCH + STEPS_PER_BATCH)
    assert calls < SLOT_STEPS, f"{batches} batches are {calls} steps: something would be due after {SLOT_STEPS}"
    cycle = SLOT_STEPS * FRAGMENTS
    with contextlib.ExitStack() as stack:
        cases = [
            Case("nothing", make_optimizer(tiny())),
            stack.enter_context(attached("tiny", tiny(), sync_every=NEVER)),
            stack.enter_context(
                attached("large", large(), sync_every=NEVER, num_fragments=FRAGMENTS, heartbeat_interval=0.05)
            ),
            stack.enter_context(
                attached(
                    "under way",
                    large(),
                    sync_every=cycle,
                    num_fragments=FRAGMENTS,
                    fragment_delay=cycle - 1,
                    heartbeat_interval=0.05,
                )
            ),
        ]
        launch(cases[-1])
        for batch in range(batches):
            for case in cases:
                case.measure()
            if batch % 20 == 0:
                log.print(f"batch {batch} of {batches}", highlight=False)
    return cases


def summarize(cases: list[Case]) -> list[dict[str, Any]]:
    def us(seconds: list[float]) -> dict[str, float] | None:
        if not seconds:
            return None
        ordered = sorted(seconds)
        return {
            "median_us": statistics.median(ordered) * 1e6,
            "least_us": ordered[0] * 1e6,
            "p95_us": ordered[int(0.95 * (len(ordered) - 1))] * 1e6,
        }

    return [
        {
            "case": case.name,
            "tensors": sum(len(group["params"]) for group in case.optimizer.param_groups),
            "hook": us(case.hook_s),
            "hook_wall": us(case.hook_wall_s),
            "step": us(case.step_s),
        }
        for case in cases
    ]


def table(rows: list[dict[str, Any]], batches: int) -> Table:
    title = f"CPU time of a step on which nothing is due, median of {batches}; claim: hook < {LIMIT_US:g} µs"
    made = Table(title=title, box=rich.box.SIMPLE_HEAD)
    made.add_column("case")
    for column in ("tensors", "hook", "hook, 95 % below", "optimizer.step()"):
        made.add_column(column, justify="right")
    for row in rows:
        hook = row["hook"]
        made.add_row(
            row["case"],
            str(row["tensors"]),
            f"{hook['median_us']:.1f} µs" if hook else "",
            f"{hook['p95_us']:.1f} µs" if hook else "",
            f"{row['step']['median_us']:.0f} µs",
        )
    return made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the worker's hook on a step with nothing due.")
    parser.add_argument("--quick", action="store_true", help="20 batches instead of 90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every batch, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    about = provenance("torch")
    log = Console(stderr=True)
    batches = 20 if arguments.quick else 90
    cases = measure_all(batches, log)
    rows = summarize(cases)
    Console().print(table(rows, batches))
    if arguments.json:
        seconds = {c.name: {"hook": c.hook_s, "hook_wall": c.hook_wall_s, "step": c.step_s} for c in cases}
        report = {"machine": about, "limit_us": LIMIT_US, "summary": rows, "seconds_per_call": seconds}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        log.print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
