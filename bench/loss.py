"""What do the codecs cost in loss?

The claim measured: over 60 rounds and more the final loss with int8 and int4 is within 0.3 % of that with fp32, with
the codec in both directions and in one, without error feedback going up.

    up        each worker sends C(θ − l), or with error feedback C(β·e + θ − l)
    outer     T ← Nesterov(T, mean of what arrived): what the server knows exactly
    down      the server sends u = C(T − θ) once and applies what it sent, θ ← θ + decode(u): what the workers hold.
              What u leaves out stays in T − θ and is sent later. fp32 sends T itself, so there θ = T

The mathematics is the package's own (`core/`), the training true and in one process: byte-level GPTs on the source of
Python's standard library, k workers that take H local steps a round. The runs of one seed are paired: the same initial
weights, batches and schedule; they differ in the codec alone. All workers of all rows train at once, as one model whose
parameters are stacked, which is what makes the full table a matter of minutes on a GPU. (There the local steps are
taken under bf16 autocast; all else is fp32.)

The loss is that of θ on the held-out files. "fp32 again" starts from weights that are larger by 0.01 %: what *that*
changes is what two runs of the same thing differ by. The control has four levels and no error feedback, and
must be visibly worse. sparse64 runs without outer momentum, as it is meant to; "fp32, plain mean" is its fp32 twin.

    python bench/loss.py --quick                                                        # too short to judge by
    python bench/loss.py --device cuda --json loss.json                                 # all of it
    python bench/loss.py --device cuda --json loss.json --rows fp32 int4 --seeds 3 4    # a part, added to the file
    python bench/loss.py --table loss.json                                              # of what is in these files
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from outerstep.core.aggregate import weighted_mean
from outerstep.core.codecs import Codec, bytes_per_value, get_codec
from outerstep.core.feedback import ErrorFeedback
from outerstep.core.outer import Nesterov
from outerstep.core.pseudogradient import adopt, pseudo_gradient
from outerstep.demo.corpus import Corpus, evaluation_batches, load_corpus
from outerstep.demo.model import GPTConfig, build_model
from outerstep.demo.training import TrainSettings, learning_rate_at, make_stream
from provenance import provenance

Losses = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
Run = dict[str, Any]  # a row of one seed, as it is in the file
Report = dict[str, Any]  # the file: settings, the calls of this script (machine, commit, date), and runs
Batches = Sequence[tuple[Tensor, Tensor]]

BOUND = 0.3  # percent of the loss with fp32
MIN_SEEDS = 3  # with fewer, a difference is not judged


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    up: str = "fp32"
    down: str = "fp32"
    feedback: bool = False  # going up; going down T − θ does its work
    outer: tuple[float, float] | None = None  # η and μ, if not those of all
    nudge: float = 0.0  # the initial weights are larger by this factor
    meant_to: str = "hold"  # the bound; or "fail" it, or "show" what comes out


ROWS = [
    Row("fp32", meant_to="show"),
    Row("fp32 again", nudge=1e-4, meant_to="show"),
    Row("bf16", up="bf16", down="bf16"),
    Row("int8", up="int8", down="int8"),
    Row("int8 up", up="int8"),
    Row("int4", up="int4", down="int4"),
    Row("int4 up", up="int4"),
    Row("int4 up, feedback", up="int4", feedback=True),
    Row("e3m0", up="e3m0", down="e3m0"),
    Row("control-2bit up", up="control-2bit", meant_to="fail"),
    Row("fp32, plain mean", outer=(1.0, 0.0), meant_to="show"),
    Row("sparse64 up, feedback", up="sparse64", down="bf16", feedback=True, outer=(1.0, 0.0), meant_to="show"),
]


@dataclass(frozen=True)
class Settings:
    """The same for all rows and seeds."""

    workers: int = 4  # k
    sync_every: int = 30  # H
    rounds: int = 80
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    inner_lr: float = 2e-3
    final_fraction: float = 0.1  # of the inner learning rate, at the end of a cosine
    warmup: float = 0.05  # of the run
    batch_size: int = 32
    context: int = 128
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    held_out_batches: int = 26  # of 128 windows: the held-out files, from end to end
    evaluations: int = 5

    def shape(self) -> GPTConfig:
        return GPTConfig(
            context=self.context, d_model=self.d_model, num_layers=self.num_layers, num_heads=self.num_heads
        )

    def inner(self, seed: int) -> TrainSettings:
        steps = self.rounds * self.sync_every
        return TrainSettings(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=self.inner_lr,
            warmup_steps=round(steps * self.warmup),
            final_fraction=self.final_fraction,
            seed=seed,
        )


QUICK = Settings(
    workers=2,
    sync_every=10,
    rounds=12,
    batch_size=8,
    context=64,
    d_model=64,
    num_layers=2,
    num_heads=4,
    held_out_batches=1,
    evaluations=2,
)


# --- the inner loop: all workers of all rows at once ------------------------------------------------------------------


class Replicas:
    """The workers' models, [R·k, …] a parameter: R rows of k workers, each with its own AdamW state and shard."""

    def __init__(self, starts: Sequence[Mapping[str, Tensor]], settings: Settings, seed: int, corpus: Corpus) -> None:
        self.settings, self.inner = settings, settings.inner(seed)
        self.rows, self.step = len(starts), 0
        self.weights = {
            name: torch.stack([start[name] for start in starts for _ in range(settings.workers)]).requires_grad_()
            for name in starts[0]
        }
        self.device = next(iter(self.weights.values())).device
        self.streams = [
            make_stream(corpus.train, shard, self.inner, context=settings.context) for shard in range(settings.workers)
        ]
        self.losses = stacked_loss(settings.shape(), self.device, same_batch=False)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        """As the demo's: what is a matrix in each replica is decayed. AdamW goes by single values, so that a stack of
        models trains as each would by itself."""
        weights = self.weights.values()
        groups = [
            {"params": [w for w in weights if w.ndim - 1 >= 2], "weight_decay": self.inner.weight_decay},
            {"params": [w for w in weights if w.ndim - 1 < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.inner.betas, fused=self.device.type == "cuda")

    def train(self) -> None:
        """H local steps of every worker."""
        for inputs, targets in self._batches(self.settings.sync_every):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate_at(self.step, self.inner)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                losses = self.losses(self.weights, inputs, targets)
            losses.sum().backward()  # replicas share nothing: the gradient of each is its own
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def _batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """int64 [R·k, B, T], twice: a worker reads the same in every row. One copy to the device for all."""
        steps = range(self.step, self.step + count)
        drawn = [stream.batch(step) for step in steps for stream in self.streams]
        shape = (count, 1, len(self.streams), self.settings.batch_size, self.settings.context)
        inputs, targets = (torch.stack(part).view(shape).to(self.device) for part in zip(*drawn, strict=True))
        for x, y in zip(inputs, targets, strict=True):
            yield tuple(each.expand(self.rows, -1, -1, -1).flatten(0, 1) for each in (x, y))

    def _clip(self) -> None:
        """`clip_grad_norm_`, for each replica by itself."""
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        factors = (self.inner.max_gradient_norm / (norms + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(factors.view(-1, *[1] * (g.ndim - 1)))

    def of_row(self, row: int) -> dict[str, Tensor]:
        """[k, …], views."""
        k = self.settings.workers
        return {name: w.detach()[row * k : (row + 1) * k] for name, w in self.weights.items()}


def stacked_loss(shape: GPTConfig, device: torch.device, *, same_batch: bool) -> Losses:
    """(parameters [N, …], inputs, targets [N, B, T], or [B, T] for the `same_batch`) → loss [N], nats per byte."""
    model = build_model(0, shape).to(device)  # for its forward pass; the weights come with the call
    data = None if same_batch else 0
    over_models = vmap(lambda weights, x, y: functional_call(model, weights, (x, y))[1], in_dims=(0, data, data))

    def losses(weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        # The two kernels that can be stacked, and are not called N times over; the fast one knows no fp32.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION if torch.is_autocast_enabled("cuda") else SDPBackend.MATH]):
            out: Tensor = over_models(dict(weights), inputs, targets)
        return out

    return losses


# --- the outer loop: what travels in one row --------------------------------------------------------------------------


class Exchange:
    """The server of one row, and the way to it."""

    def __init__(self, row: Row, start: Mapping[str, Tensor], settings: Settings) -> None:
        lr, momentum = row.outer or (settings.outer_lr, settings.outer_momentum)
        self.up, self.down = get_codec(row.up), get_codec(row.down)
        self.feedback = ErrorFeedback(self.up) if row.feedback else None
        self.outer = Nesterov(lr, momentum)
        self.exact = {name: values.clone() for name, values in start.items()}  # T
        self.theta = {name: values.clone() for name, values in start.items()}  # θ

    @torch.no_grad()
    def round(self, local: Mapping[str, Tensor]) -> None:
        """One outer step from the workers' models [k, …]; they hold the new θ at its end."""
        deltas = {name: pseudo_gradient(self.theta[name].expand_as(ends), ends) for name, ends in local.items()}
        self.outer.step(self.exact, {name: mean_of(arrived) for name, arrived in self._upload(deltas).items()})
        for name, theta in self.theta.items():
            self._send_down(theta, self.exact[name])
            adopt(local[name], theta)

    def _upload(self, deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The workers' deltas [k, …] as they arrive."""
        parts = {key: part for name, delta in deltas.items() for key, part in one_by_one(name, delta, self.up)}
        if self.feedback is None:
            sent = {key: encode(self.up, part) for key, part in parts.items()}
        else:
            sent, pending = self.feedback.begin(parts)
            self.feedback.commit(pending)
        arrived = {key: decode(self.up, data, parts[key]) for key, data in sent.items()}
        return {
            name: arrived[name] if name in arrived else torch.stack([arrived[f"{name} {w}"] for w in range(len(delta))])
            for name, delta in deltas.items()
        }

    def _send_down(self, theta: Tensor, exact: Tensor) -> None:
        """θ ← θ + decode(C(T − θ))."""
        if self.down.name == "fp32":
            theta.copy_(exact)  # θ + (T − θ) is not always T
        else:
            update = exact - theta
            self.down.decode_add(encode(self.down, update), theta.view(-1))


def one_by_one(name: str, delta: Tensor, codec: Codec) -> Iterator[tuple[str, Tensor]]:
    """What is encoded by itself: one worker's part of [k, …]. Of whole blocks all k in one go give the same bytes,
    since blocks are independent, and are a k-th of the calls."""
    if delta[0].numel() % codec.block_values == 0:
        yield name, delta
    else:
        yield from ((f"{name} {worker}", part) for worker, part in enumerate(delta))


def encode(codec: Codec, values: Tensor) -> Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values.reshape(-1), data)
    return data


def decode(codec: Codec, data: Tensor, like: Tensor) -> Tensor:
    out = torch.empty(like.numel(), device=like.device)
    codec.decode(data, out)
    return out.view(like.shape)


def mean_of(arrived: Tensor) -> Tensor:
    """Over the workers [k, …]. The sum is made where new tensors are made: on a server that is the CPU, here not."""
    with arrived.device:
        return weighted_mean(list(arrived), [1.0] * len(arrived))


# --- one seed ---------------------------------------------------------------------------------------------------------


def carry_out(rows: list[Row], seed: int, settings: Settings, corpus: Corpus, device: torch.device) -> list[Run]:
    """Every row of one seed; → its results, row by row."""
    began_at, seconds = time.perf_counter(), 0.0
    model = build_model(seed, settings.shape())
    starts = [{n: p.data.to(device) * (1.0 + row.nudge) for n, p in model.named_parameters()} for row in rows]
    exchanges = [Exchange(row, start, settings) for row, start in zip(rows, starts, strict=True)]
    replicas = Replicas(starts, settings, seed, corpus)
    batches = evaluation_batches(corpus.held_out, settings.held_out_batches, batch_size=128, context=settings.context)
    evaluate = stacked_loss(settings.shape(), device, same_batch=True)
    curves: list[list[tuple[int, float]]] = [[] for _ in rows]
    for done in range(1, settings.rounds + 1):
        replicas.train()
        for index, exchange in enumerate(exchanges):
            exchange.round(replicas.of_row(index))
        if done * settings.evaluations // settings.rounds > (done - 1) * settings.evaluations // settings.rounds:
            losses = held_out_losses(evaluate, [exchange.theta for exchange in exchanges], batches, device)
            for curve, loss in zip(curves, losses, strict=True):
                curve.append((done, loss))
            seconds = time.perf_counter() - began_at
            say(f"seed {seed}, round {done}: {min(losses):.4f} to {max(losses):.4f} ({seconds:.0f} s)")
    return [
        {**asdict(row), "seed": seed, "loss": curve[-1][1], "seconds": seconds, "curve": curve}
        for row, curve in zip(rows, curves, strict=True)
    ]


@torch.no_grad()
def held_out_losses(
    evaluate: Losses, thetas: list[dict[str, Tensor]], batches: Batches, device: torch.device
) -> list[float]:
    """Mean nats per byte of each θ; all batches are of one size."""
    stacked = {name: torch.stack([theta[name] for theta in thetas]) for name in thetas[0]}
    total = torch.zeros(len(thetas), dtype=torch.float64, device=device)
    for inputs, targets in batches:
        total += evaluate(stacked, inputs.to(device), targets.to(device))
    return list((total / len(batches)).tolist())


# --- results ----------------------------------------------------------------------------------------------------------


def merged(old: Report, new: Report, name: object) -> Report:
    """Both in one; a row and seed that is in both is taken from the new one. `name`: of the old one's file."""
    if old["settings"] != new["settings"]:
        sys.exit(f"runs of one table share their settings; {name} has others: {old['settings']}. Name another file")
    there = {(run["name"], run["seed"]) for run in new["runs"]}
    kept = [run for run in old["runs"] if (run["name"], run["seed"]) not in there]
    added = [{**run, "call": run["call"] + len(old["calls"])} for run in new["runs"]]
    order = {row.name: index for index, row in enumerate(ROWS)}
    runs = sorted(kept + added, key=lambda run: (order[run["name"]], run["seed"]))
    return {"settings": new["settings"], "calls": old["calls"] + new["calls"], "runs": runs}


def read(file: Path) -> Report:
    report: Report = json.loads(file.read_text())
    return report


def differences(runs: list[Run], of: str) -> list[float]:
    """To fp32, in percent, of each seed that has both."""
    reference = {run["seed"]: run["loss"] for run in runs if run["name"] == "fp32"}
    return [
        100.0 * (run["loss"] / reference[run["seed"]] - 1.0)
        for run in runs
        if run["name"] == of and run["seed"] in reference
    ]


def verdict(row: Row, seeds: int, mean: float, error: float) -> str:
    """The bound is met if the mean is within it, or within it plus two standard errors and then marked so."""
    if row.meant_to == "show":
        return ""
    if seeds < MIN_SEEDS:
        return "too few seeds"
    if row.meant_to == "fail":
        return "worse, as it must be" if mean > BOUND + 2.0 * error else "not visibly worse"
    if mean <= BOUND:
        return "met"
    return "met, within noise" if mean <= BOUND + 2.0 * error else "**not met**"


def markdown(report: Report) -> str:
    """Losses in nats per byte; differences to fp32 of the same seed: the mean, and the standard error of it."""
    settings, runs = Settings(**report["settings"]), report["runs"]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"| row | up, down | bytes a value | η, μ | loss, seeds {', '.join(map(str, seeds))} "
        f"| difference to fp32, % | within {BOUND:g} % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        losses = {run["seed"]: run["loss"] for run in runs if run["name"] == row.name}
        if not losses:
            continue
        found = differences(runs, row.name)
        mean = statistics.fmean(found) if found else math.nan
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        lr, momentum = row.outer or (settings.outer_lr, settings.outer_momentum)
        cells = [
            row.name,
            f"{row.up}{' + e' if row.feedback else ''}, {row.down}",
            ", ".join(f"{bytes_per_value(get_codec(name)):.3g}" for name in (row.up, row.down)),
            f"{lr:g}, {momentum:g}",
            " / ".join(f"{losses[seed]:.4f}" if seed in losses else "–" for seed in seeds),
            "" if row.name == "fp32" else f"{mean:+.2f} ± {error:.2f}" if len(found) > 1 else f"{mean:+.2f}",
            verdict(row, len(found), mean, error),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    told = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    return "\n".join([*lines, "", f"Settings: {told}."])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The loss after training with each codec, against fp32.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a dozen rounds, one seed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2")
    parser.add_argument("--rounds", type=int, help="other than the default; the schedule is stretched with it")
    parser.add_argument("--outer", nargs=2, type=float, metavar=("LR", "MOMENTUM"), help="other than the defaults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="after each seed, add the runs to this file")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="instead: the table of these files' runs")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        report = read(arguments.table[0])
        for before, file in pairwise(arguments.table):
            report = merged(report, read(file), before)
    else:
        report = measure(arguments)
    print(markdown(report))


def measure(arguments: argparse.Namespace) -> Report:
    settings = QUICK if arguments.quick else Settings()
    lr, momentum = arguments.outer or (settings.outer_lr, settings.outer_momentum)
    settings = replace(settings, rounds=arguments.rounds or settings.rounds, outer_lr=lr, outer_momentum=momentum)
    rows = [row for row in ROWS if arguments.rows is None or row.name in arguments.rows]
    device = torch.device(arguments.device)
    about = {**provenance("torch"), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    if device.type == "cpu":
        torch.set_num_threads(1)  # more would be slower on a busy machine, and sums would round otherwise
    corpus = load_corpus()
    about |= {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)}
    old: Report = {"settings": asdict(settings), "calls": [], "runs": []}
    new: Report = {"settings": asdict(settings), "calls": [about], "runs": []}
    if arguments.json and arguments.json.exists():
        old = read(arguments.json)
    report = merged(old, new, arguments.json)  # before anything is computed: it may not fit
    for seed in arguments.seeds or ([0] if arguments.quick else [0, 1, 2]):
        new["runs"] += [{**run, "call": 0} for run in carry_out(rows, seed, settings, corpus, device)]
        report = merged(old, new, arguments.json)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
