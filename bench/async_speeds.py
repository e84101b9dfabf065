"""Four workers of unequal speed: does not waiting pay off?

The claim measured: with workers of speed 1, 1, 2 and 6 the asynchronous mode (Delayed Nesterov, local steps by speed)
reaches the held-out loss of the synchronous mode in less time.

The training is real, the time is not. One process trains the demo's model (a byte-level GPT of 837k parameters, on the
source of Python's standard library) for every worker in turn, with true gradients and a true held-out loss; a step of a
worker of speed v *costs* 1/v units of simulated time, so that the unit is a step of the slowest worker.

    synchronous    every worker takes H steps, all wait for the slowest, one Nesterov step on the mean
    asynchronous   a worker takes H_w = ⌊v_w/v_max·H⌋ steps, pushes, takes the newest weights and goes on; each push
                   goes through Delayed Nesterov with a buffer of four
    control        as before, but with a full Nesterov step on every push

The same for all: initial weights, the batches of each worker (batch t of its own shard is its t-th step), AdamW and its
settings, pseudo-gradients rounded to bf16, and the cost of an exchange (`EXCHANGE`), during which the worker waits.

The inner learning rate is a function of simulated time: warm-up for a twentieth of the run, then a cosine down to a
tenth at its end. By local steps the fast worker would have decayed when a sixth of the run is over; by time all workers
are at the same point of the schedule, and in the synchronous mode the two are the same thing. A run that is given half
the time decays twice as fast: it is a whole run, not the first half of one.

    python bench/async_speeds.py                                  # all of it: about twelve minutes on one core
    python bench/async_speeds.py --quick                          # a short run, too short to judge by
    python bench/async_speeds.py --json out.json --plot out.png   # curves, settings, machine and commit; the picture
    python bench/async_speeds.py --apart                          # what each half of the method does by itself
    python bench/async_speeds.py --grid sync                      # the settings that were tried (also: --grid async)
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from outerstep.coordination.server.membership import local_steps
from outerstep.core.aggregate import weighted_mean
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov
from outerstep.core.pseudogradient import adopt, pseudo_gradient
from outerstep.demo.corpus import Corpus, evaluation_batches, load_corpus
from outerstep.demo.model import GPT, build_model
from outerstep.demo.training import TrainSettings, evaluate, learning_rate_at, make_optimizer, make_stream
from provenance import provenance

SPEEDS = (1.0, 1.0, 2.0, 6.0)  # steps per unit of time
SECONDS_PER_UNIT = 0.45  # a step of the slowest worker, if the fastest is one core of the machine this was written on
LINK_BITS_PER_S = 100e6
BUDGET, QUICK_BUDGET = 360.0, 48.0  # units of time of the synchronous run
WARMUP = 1 / 20  # of the run


@dataclass(frozen=True)
class Run:
    """One row of the table. `budget` is in units of simulated time, and so is the inner schedule."""

    name: str
    budget: float
    sync_every: int  # H; by speed: of the fastest worker
    outer_lr: float
    outer_momentum: float
    buffer_size: int | None = None  # None: synchronous; 0: Nesterov on every push; else Delayed Nesterov
    inner_lr: float = 2e-3
    by_speed: bool = False  # local steps in proportion to the speed; else H for all
    stop_after: float = math.inf  # for the control, which need not be watched to its end
    evaluations: int = 36  # at equal distances in simulated time
    seed: int = 0

    def inner(self) -> TrainSettings:
        """`steps` and `warmup_steps` are units of time here: the slowest worker takes one step in each."""
        units = round(self.budget)
        return TrainSettings(
            steps=units, warmup_steps=round(units * WARMUP), learning_rate=self.inner_lr, seed=self.seed
        )

    def local_steps(self) -> list[int]:
        """Of each worker, between two exchanges."""
        if not self.by_speed:
            return [self.sync_every] * len(SPEEDS)
        return [local_steps(speed, max(SPEEDS), self.sync_every) for speed in SPEEDS]


@dataclass
class Outcome:
    run: Run
    exchange: float
    curve: list[tuple[float, float]] = field(default_factory=list)  # (time, held-out loss of the outer model)
    steps: list[int] = field(default_factory=lambda: [0] * len(SPEEDS))  # by worker
    outer_steps: int = 0  # rounds, or pushes
    seconds: float = 0.0  # of this machine's time

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    def reached(self, target: float) -> float | None:
        """The time of the first evaluation from which on the loss stays at or below `target`."""
        when = None
        for at, loss in self.curve:
            if loss > target:
                when = None
            elif when is None:
                when = at
        return when


class Worker:
    """A replica, its optimizer and its shard; where it stands in its own data."""

    def __init__(self, index: int, run: Run, corpus: Corpus) -> None:
        self.index, self.settings = index, run.inner()
        self.speed = SPEEDS[index]
        self.model = build_model(run.seed)
        self.optimizer = make_optimizer(self.model, self.settings)
        self.stream = make_stream(corpus.train, index, self.settings)
        self.step = 0

    def train(self, steps: int, now: float, pace: float) -> None:
        """Take `steps` local steps, the first one at time `now` and each `pace` later, on the next batches."""
        for i in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate_at(int(now + i * pace), self.settings)
            _, loss = self.model(*self.stream.batch(self.step))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_gradient_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def pseudo_gradient(self, anchor: dict[str, Tensor]) -> dict[str, Tensor]:
        """anchor − local, as it arrives: rounded to bf16."""
        local = dict(self.model.named_parameters())
        return {name: pseudo_gradient(theta, local[name]).bfloat16().float() for name, theta in anchor.items()}

    def adopt(self, theta: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            adopt(parameter.data, theta[name])


# --- the two modes: each yields the time at which θ has changed, and moves θ in place ---------------------------------


def synchronous(run: Run, workers: list[Worker], theta: dict[str, Tensor], outcome: Outcome) -> Iterator[float]:
    optimizer, steps, now = Nesterov(run.outer_lr, run.outer_momentum), run.local_steps(), 0.0
    together = max(count / speed for count, speed in zip(steps, SPEEDS, strict=True))
    while now + together + outcome.exchange <= run.budget:
        deltas = []
        for worker, count in zip(workers, steps, strict=True):
            worker.train(count, now, together / count)  # all are at the same place of the schedule
            deltas.append(worker.pseudo_gradient(theta))
        mean = {name: weighted_mean([delta[name] for delta in deltas], [1.0] * len(deltas)) for name in theta}
        optimizer.step(theta, mean)
        for worker in workers:
            worker.adopt(theta)
        now += together + outcome.exchange
        outcome.outer_steps += 1
        yield now


def asynchronous(run: Run, workers: list[Worker], theta: dict[str, Tensor], outcome: Outcome) -> Iterator[float]:
    """Pushes arrive in the order of simulated time. A worker's steps depend on nothing that happens while it takes
    them, so they are taken when its push arrives; the anchor is what it was given when it began."""
    steps, one_way = run.local_steps(), outcome.exchange / 2
    delayed = DelayedNesterov(run.buffer_size, run.outer_lr, run.outer_momentum) if run.buffer_size else None
    nesterov = Nesterov(run.outer_lr, run.outer_momentum)
    anchors = [{name: values.clone() for name, values in theta.items()} for _ in workers]
    arrivals = [(n / worker.speed + one_way, worker.index) for n, worker in zip(steps, workers, strict=True)]
    heapq.heapify(arrivals)
    while arrivals[0][0] + one_way <= min(run.budget, run.stop_after):
        now, index = heapq.heappop(arrivals)
        worker, anchor, count = workers[index], anchors[index], steps[index]
        worker.train(count, now - one_way - count / worker.speed, 1 / worker.speed)
        g = worker.pseudo_gradient(anchor)
        if delayed is not None:
            delayed.push(0, theta, g)
        else:
            nesterov.step(theta, g)
        for name, values in anchor.items():
            values.copy_(theta[name])
        worker.adopt(theta)
        heapq.heappush(arrivals, (now + outcome.exchange + count / worker.speed, index))
        outcome.outer_steps += 1
        yield now


def carry_out(run: Run, corpus: Corpus, log: Console) -> Outcome:
    started = time.perf_counter()
    model = build_model(run.seed)  # what is evaluated: the outer model
    theta = {name: parameter.data for name, parameter in model.named_parameters()}
    outcome = Outcome(run, exchange=exchange_time(model))
    workers = [Worker(index, run, corpus) for index in range(len(SPEEDS))]
    mode = synchronous if run.buffer_size is None else asynchronous
    batches = evaluation_batches(corpus.held_out, count=8)
    outcome.curve.append((0.0, evaluate(model, batches)))
    now = 0.0
    for now in mode(run, workers, theta, outcome):
        if now >= outcome.curve[-1][0] + run.budget / run.evaluations:
            outcome.curve.append((now, evaluate(model, batches)))
            log.print(f"{run.name}: {outcome.curve[-1][1]:.4f} at {now:.0f}", highlight=False)
    if now > outcome.curve[-1][0]:
        outcome.curve.append((now, evaluate(model, batches)))
    outcome.steps = [worker.step for worker in workers]
    outcome.seconds = time.perf_counter() - started
    log.print(f"{run.name}: {outcome.loss:.4f} at the end ({outcome.seconds:.0f} s)", highlight=False)
    return outcome


def exchange_time(model: GPT) -> float:
    """In units of simulated time: the model in bf16, up and down, over one worker's link."""
    bits = 2 * 16 * sum(parameter.numel() for parameter in model.parameters())
    return bits / LINK_BITS_PER_S / SECONDS_PER_UNIT


# --- what is run ------------------------------------------------------------------------------------------------------


# (H, outer lr, outer momentum, buffer size, inner lr): what was tried, best first
GRIDS: dict[str, list[tuple[int, float, float, int | None, float]]] = {
    "sync": [
        (12, 0.7, 0.5, None, 2e-3),
        (12, 1.0, 0.3, None, 2e-3),
        (12, 0.7, 0.8, None, 2e-3),
        (12, 1.0, 0.5, None, 2e-3),
        (6, 0.7, 0.5, None, 2e-3),
        (24, 1.0, 0.5, None, 2e-3),
        (24, 0.7, 0.8, None, 2e-3),
        (12, 0.5, 0.5, None, 2e-3),
        (12, 0.7, 0.9, None, 2e-3),
        (12, 1.0, 0.5, None, 3e-3),
        (6, 1.0, 0.5, None, 2e-3),
    ],
    "async": [
        (30, 1.0, 0.3, 4, 2e-3),
        (30, 0.7, 0.5, 4, 2e-3),
        (15, 0.7, 0.5, 4, 2e-3),
        (30, 1.0, 0.5, 4, 2e-3),
        (30, 0.5, 0.5, 4, 2e-3),
        (60, 0.7, 0.5, 4, 2e-3),
        (60, 1.0, 0.5, 4, 2e-3),
        (60, 1.0, 0.5, 4, 3e-3),
        (60, 0.7, 0.8, 4, 2e-3),
        (60, 0.4, 0.9, 4, 2e-3),
        (120, 1.0, 0.5, 4, 2e-3),
    ],
}


def planned(budget: float, seed: int) -> list[Run]:
    """The rows of one seed, both modes with the best of the settings in `GRIDS`. All are held to the first."""
    sync = Run("synchronous", budget, *GRIDS["sync"][0], seed=seed)
    half = Run("async, half the time", budget / 2, *GRIDS["async"][0], by_speed=True, seed=seed)
    if seed > 0:  # more seeds are for the claim; the rest is shown once
        return [sync, half]
    full = replace(half, name="async, the same time", budget=budget)
    control = replace(half, name="control, cut short", buffer_size=0, stop_after=budget / 6)
    return [sync, half, full, control]


def taken_apart(budget: float, seed: int) -> list[Run]:
    """Which half of it helps? Each without the other, otherwise as in `planned`; neither is tuned."""
    sync, half = planned(budget, seed)[:2]
    waiting = replace(half, name="sync, steps by speed", buffer_size=None)
    equal = replace(half, name="async, equal steps", sync_every=sync.sync_every, by_speed=False)
    return [sync, waiting, equal]


def tried(mode: str, budget: float) -> list[Run]:
    """The grid, in the time in which `planned` compares the modes."""
    given, by_speed = (budget, False) if mode == "sync" else (budget / 2, True)
    return [Run(f"{mode}, inner lr {row[-1]:g}", given, *row, by_speed=by_speed) for row in GRIDS[mode]]


# --- reporting --------------------------------------------------------------------------------------------------------


def describe(outcome: Outcome, target: Outcome) -> dict[str, Any]:
    """One row: the settings, the end, and when it was as good as the synchronous run of its seed at its end."""
    reached = outcome.reached(target.loss)
    return {
        **asdict(outcome.run),
        "stop_after": min(outcome.run.stop_after, outcome.run.budget),  # JSON has no infinity
        "loss": outcome.loss,
        "reached_target_at": reached,
        "times_faster": target.curve[-1][0] / reached if reached else None,
        "exchange_units": outcome.exchange,
        "steps_by_worker": outcome.steps,
        "outer_steps": outcome.outer_steps,
        "seconds": outcome.seconds,
        "curve": outcome.curve,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """`reached`: the time from which on it was as good as the synchronous run of its seed at the end of that."""
    title = "time in steps of the slowest worker; held-out loss, nats per byte"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("run", "seed", "H", "η, μ", "time", "steps", "loss", "reached", "faster"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for row in rows:
        at, faster = row["reached_target_at"], row["times_faster"]
        table.add_row(
            row["name"],
            str(row["seed"]),
            str(row["sync_every"]),
            f"{row['outer_lr']:g}, {row['outer_momentum']:g}",
            f"{row['curve'][-1][0]:.0f}",
            f"{sum(row['steps_by_worker']):,}",
            f"{row['loss']:.3f}",
            f"{at:.0f}" if at is not None else "–",
            f"{faster:.2f}×" if faster is not None else "–",
        )
    return table


def plot(rows: list[dict[str, Any]], file: Path) -> bool:
    """Held-out loss over simulated time, first seed; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["seed"] == 0]
    target = rows[0]["loss"]
    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    styles = [("#8a8f98", "--", 2.0), ("#1f6feb", "-", 2.6), ("#74a9f7", "-", 1.6), ("#cf4b3f", ":", 1.8)]
    for row, (color, line, width) in zip(rows, styles, strict=False):
        times, losses = zip(*row["curve"], strict=True)
        axes.plot(times, losses, line, color=color, linewidth=width, label=f"{row['name']}: {row['loss']:.3f}")
        if row["reached_target_at"] is not None:
            axes.plot(row["reached_target_at"], target, "o", color=color, markersize=7, zorder=5)
    if rows[-1]["buffer_size"] == 0:
        place = rows[-1]["curve"][-1]
        axes.annotate("Nesterov on every push", place, (6, 0), textcoords="offset points", fontsize=8, color="#cf4b3f")
    axes.axhline(target, color="#8a8f98", linewidth=0.8)
    axes.annotate(
        "the synchronous run's loss at its end", (0, target), (4, -11), textcoords="offset points", fontsize=8
    )
    axes.set_xlabel("simulated time, in steps of the slowest worker")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_xlim(left=0)
    axes.set_ylim(min(row["loss"] for row in rows) - 0.08, target + 2.0)
    axes.set_title("Workers of speed 1, 1, 2 and 6", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(title="loss at the end", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Synchronous against asynchronous with workers of unequal speed.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BUDGET:g} units of time instead of {BUDGET:g}")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds; each sets the weights and the batches")
    parser.add_argument("--apart", action="store_true", help="instead: each of the two halves of the method by itself")
    parser.add_argument("--grid", choices=["sync", "async"], help="instead: the settings that were tried, first seed")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every curve, the settings and the machine here"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves here (PNG; needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch")
    torch.set_num_threads(1)  # more would be slower on a busy machine, and sums would round otherwise
    log, out = Console(stderr=True), Console()
    corpus = load_corpus()
    budget = QUICK_BUDGET if arguments.quick else BUDGET
    rows: list[dict[str, Any]] = []
    for seed in range(1 if arguments.grid else arguments.seeds):
        of_seed = taken_apart if arguments.apart else planned
        runs = tried(arguments.grid, budget) if arguments.grid else of_seed(budget, seed)
        if arguments.quick:
            runs = [replace(run, evaluations=8) for run in runs]
        outcomes = [carry_out(run, corpus, log) for run in runs]
        rows += [describe(outcome, outcomes[0]) for outcome in outcomes]
    out.print(table_of(rows))
    if arguments.json:
        settings = {"speeds": SPEEDS, "seconds_per_unit": SECONDS_PER_UNIT, "link_bits_per_s": LINK_BITS_PER_S}
        report = {"machine": about, "settings": settings, "runs": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        log.print(f"wrote {arguments.json}")
    if arguments.plot:
        log.print(
            f"wrote {arguments.plot}" if plot(rows, arguments.plot) else "no picture: matplotlib is not installed"
        )


if __name__ == "__main__":
    main()
