"""What do the codecs cost in loss?

The claim measured: over 60 rounds and more the final loss with int8 and int4 is within 0.3 % of that with fp32, with
the codec in both directions and in one, without error feedback going up.

    up        each worker sends C(θ − l), or with error feedback C(β·e + θ − l)
    outer     T ← Nesterov(T, mean of what arrived): what the server knows exactly
    down      the server sends u = C(T − θ) once and applies what it sent, θ ← θ + decode(u): what the workers hold.
              What u leaves out stays in T − θ and is sent later. fp32 sends T itself, so there θ = T

The mathematics is the package's own (`core/`), the training true and in one process: the demo's byte-level GPT on the
source of Python's standard library, k workers that take H local steps a round. The runs of one seed are paired: the
same initial weights, batches and schedule; they differ in the codec alone. The workers of all rows and of several seeds
train at once, as one model whose parameters are stacked: that makes many seeds a matter of minutes on a GPU. (There the
local steps are taken under bf16 autocast; all else is fp32.)

The loss is that of θ on the held-out files. "fp32 again" starts from weights that are larger by 0.01 %: what *that*
changes is what two runs of the same thing differ by. The control has four levels and no error feedback, and must be
visibly worse. sparse64 runs without outer momentum, as it is meant to; "fp32, plain mean" is its fp32 twin.

    python bench/loss.py --quick                                                        # too short to judge by
    python bench/loss.py --device cuda --json loss.json                                 # all of it
    python bench/loss.py --device cuda --json loss.json --rows fp32 int4 --seeds 8 9    # a part, added to the file
    python bench/loss.py --table loss.json                                              # of what is in these files
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from loss_table import Report, Run, markdown, merged, read
from outerstep.core.aggregate import weighted_mean
from outerstep.core.codecs import Codec, get_codec
from outerstep.core.feedback import compensate, decay_of, send
from outerstep.core.outer import Nesterov
from outerstep.core.pseudogradient import adopt, pseudo_gradient
from outerstep.demo.corpus import Corpus, evaluation_batches, load_corpus
from outerstep.demo.model import GPTConfig, build_model
from outerstep.demo.training import TrainSettings, learning_rate_at, make_stream
from provenance import provenance

Losses = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


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
    rounds: int = 64
    outer_lr: float = 1.0  # the demo's: the better choice for so few rounds
    outer_momentum: float = 0.5
    inner_lr: float = 2e-3
    final_fraction: float = 0.1  # of the inner learning rate, at the end of a cosine
    warmup: float = 0.05  # of the run
    batch_size: int = 8
    context: int = 128
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
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


# --- parameters in two rows: what AdamW decays, and what it does not --------------------------------------------------

Flat = dict[str, Tensor]
""""matrices" and "gains", [n] of one model or [N, n] of a stack: a few long tensors instead of many short ones"""


class Layout:
    """Where a model's parameters lie in its `Flat`."""

    def __init__(self, shape: GPTConfig) -> None:
        parameters = [(name, p.shape) for name, p in build_model(0, shape).named_parameters()]
        self.shapes = {
            "matrices": [(name, shape) for name, shape in parameters if len(shape) >= 2],
            "gains": [(name, shape) for name, shape in parameters if len(shape) < 2],
        }
        self.sizes = {row: [shape.numel() for _, shape in shapes] for row, shapes in self.shapes.items()}

    def flatten(self, parameters: Mapping[str, Tensor]) -> Flat:
        return {
            row: torch.cat([parameters[name].reshape(-1) for name, _ in shapes]) for row, shapes in self.shapes.items()
        }

    def named(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[N, n] → [N, …] by name; views, through which gradients flow back."""
        return {
            name: part.unflatten(1, shape)
            for row, shapes in self.shapes.items()
            for (name, shape), part in zip(shapes, flat[row].split(self.sizes[row], dim=1), strict=True)
        }

    def encoded_alone(self, row: str, values: Tensor, codec: Codec) -> dict[str, Tensor]:
        """The views of [k, n] that are encoded by themselves: every tensor of every worker. Where tensors are whole
        blocks the bytes of all in one go are the same, since blocks are independent, and it takes one call."""
        if all(size % codec.block_values == 0 for size in self.sizes[row]):
            return {row: values.view(-1)}
        parts = [part for own in values for part in own.split(self.sizes[row])]
        return {f"{row} {index}": part for index, part in enumerate(parts)}


# --- the inner loop: all workers of all rows and seeds at once --------------------------------------------------------


class Replicas:
    """The workers' models, [S·R·k, n]: S seeds, R rows, k workers, each with its own AdamW state."""

    def __init__(self, starts: Sequence[Flat], rows: int, seeds: list[int], settings: Settings, corpus: Corpus) -> None:
        """`starts`: of each seed and row."""
        self.k, self.rows, self.step, self.inner = settings.workers, rows, 0, settings.inner(0)
        self.layout = Layout(settings.shape())
        self.weights = {
            row: torch.stack([start[row] for start in starts for _ in range(self.k)]).requires_grad_()
            for row in self.layout.shapes
        }
        self.device = self.weights["gains"].device
        self.streams = [
            make_stream(corpus.train, shard, settings.inner(seed), context=settings.context)
            for seed in seeds
            for shard in range(self.k)
        ]
        self.losses = stacked_loss(settings.shape(), self.device, same_batch=False)
        # AdamW looks at single values, so that a stack of models trains as each would by itself.
        decays = {"matrices": self.inner.weight_decay, "gains": 0.0}
        groups = [{"params": [self.weights[row]], "weight_decay": decay} for row, decay in decays.items()]
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=self.inner.betas, fused=on_gpu)

    def train(self, steps: int) -> None:
        """Local steps of every worker."""
        for inputs, targets in self._batches(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate_at(self.step, self.inner)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                losses = self.losses(self.layout.named(self.weights), inputs, targets)
            losses.sum().backward()  # replicas share nothing: the gradient of each is its own
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def _batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """int64 [S·R·k, B, T], twice: a worker reads the same in every row. One copy to the device for all steps."""
        drawn = [stream.batch(self.step + i) for i in range(steps) for stream in self.streams]
        inputs, targets = (torch.stack(part).to(self.device) for part in zip(*drawn, strict=True))
        shape = (steps, -1, 1, self.k, *inputs.shape[1:])
        for x, y in zip(inputs.view(shape), targets.view(shape), strict=True):
            yield self._for_every_row(x), self._for_every_row(y)

    def _for_every_row(self, batch: Tensor) -> Tensor:
        """[S, 1, k, B, T] → [S·R·k, B, T]."""
        return batch.expand(-1, self.rows, -1, -1, -1).flatten(0, 2)

    def _clip(self) -> None:
        """`clip_grad_norm_`, for each replica by itself."""
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        norms = sum(g.square().sum(1, keepdim=True) for g in grads).sqrt()  # type: ignore[union-attr]
        for g in grads:
            g.mul_((self.inner.max_gradient_norm / (norms + 1e-6)).clamp(max=1.0))

    def of(self, index: int) -> Flat:
        """[k, n], views: the workers of one seed and row."""
        return {row: w.detach()[index * self.k : (index + 1) * self.k] for row, w in self.weights.items()}


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
    """The server of one row and seed, and the way to it and back."""

    def __init__(self, row: Row, start: Flat, settings: Settings) -> None:
        self.layout = Layout(settings.shape())
        self.up, self.down = get_codec(row.up), get_codec(row.down)
        self.owed: dict[str, Tensor] | None = {} if row.feedback else None  # e, by part
        self.outer = Nesterov(*(row.outer or (settings.outer_lr, settings.outer_momentum)))
        # The gains are encoded in many short parts, each a handful of tiny calls: a GPU is no help with those.
        start = {"matrices": start["matrices"], "gains": start["gains"].cpu()}
        self.exact = {name: values.clone() for name, values in start.items()}  # T
        self.theta = {name: values.clone() for name, values in start.items()}  # θ

    @torch.no_grad()
    def round(self, local: Flat) -> None:
        """One outer step from the workers' models [k, n]; they hold the new θ at its end."""
        deltas = {name: pseudo_gradient(self.theta[name].expand_as(ends), ends) for name, ends in local.items()}
        self.outer.step(self.exact, {name: mean_of(self._upload(name, delta)) for name, delta in deltas.items()})
        for name, theta in self.theta.items():
            self._send_down(name, theta)
            adopt(local[name], theta)

    def _upload(self, name: str, delta: Tensor) -> Tensor:
        """The workers' [k, n] as they arrive."""
        parts = self.layout.encoded_alone(name, delta, self.up)
        sent = {key: self._send_up(key, part) for key, part in parts.items()}
        arrived = torch.empty_like(delta)
        for key, part in self.layout.encoded_alone(name, arrived, self.up).items():
            self.up.decode(sent[key], part)
        return arrived

    def _send_up(self, key: str, delta: Tensor) -> Tensor:
        """C(Δ), or with feedback C(β·e + Δ); every contribution counts."""
        if self.owed is None:
            return encode(self.up, delta)
        wanted = torch.empty_like(delta)
        compensate(self.owed.get(key), delta, decay_of(self.up), wanted)
        data = torch.empty(self.up.encoded_bytes(wanted.numel()), dtype=torch.uint8, device=wanted.device)
        send(self.up, wanted, data)
        self.owed[key] = wanted
        return data

    def _send_down(self, name: str, theta: Tensor) -> None:
        """θ ← θ + decode(C(T − θ))."""
        if self.down.name == "fp32":
            theta.copy_(self.exact[name])  # θ + (T − θ) is not always T
            return
        update = self.layout.encoded_alone(name, (self.exact[name] - theta).unsqueeze(0), self.down)
        for key, part in self.layout.encoded_alone(name, theta.unsqueeze(0), self.down).items():
            self.down.decode_add(encode(self.down, update[key]), part)


def encode(codec: Codec, values: Tensor) -> Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values, data)
    return data


def mean_of(arrived: Tensor) -> Tensor:
    """Over the workers [k, n]. The sum is made where new tensors are made: on a server that is the CPU, here not."""
    with arrived.device:
        return weighted_mean(list(arrived), [1.0] * len(arrived))


# --- a few seeds ------------------------------------------------------------------------------------------------------


def carry_out(rows: list[Row], seeds: list[int], settings: Settings, corpus: Corpus, device: torch.device) -> list[Run]:
    """Every row of these seeds."""
    began_at, seconds, layout = time.perf_counter(), 0.0, Layout(settings.shape())
    lanes = [(seed, row) for seed in seeds for row in rows]
    models = {seed: dict(build_model(seed, settings.shape()).to(device).named_parameters()) for seed in seeds}
    starts = [
        {name: w.detach() * (1.0 + row.nudge) for name, w in layout.flatten(models[seed]).items()}
        for seed, row in lanes
    ]
    exchanges = [Exchange(row, start, settings) for (_, row), start in zip(lanes, starts, strict=True)]
    replicas = Replicas(starts, len(rows), seeds, settings, corpus)
    batches = evaluation_batches(corpus.held_out, settings.held_out_batches, batch_size=128, context=settings.context)
    evaluate = stacked_loss(settings.shape(), device, same_batch=True)
    curves: list[list[tuple[int, float]]] = [[] for _ in lanes]
    for done in range(1, settings.rounds + 1):
        replicas.train(settings.sync_every)
        for index, exchange in enumerate(exchanges):
            exchange.round(replicas.of(index))
        if done * settings.evaluations // settings.rounds > (done - 1) * settings.evaluations // settings.rounds:
            thetas = {row: torch.stack([exchange.theta[row] for exchange in exchanges]) for row in layout.shapes}
            losses = held_out_losses(evaluate, layout.named(thetas), batches, device)
            for curve, loss in zip(curves, losses, strict=True):
                curve.append((done, loss))
            seconds = time.perf_counter() - began_at
            say(f"seeds {seeds}, round {done}: {min(losses):.4f} to {max(losses):.4f} ({seconds:.0f} s)")
    return [
        {**asdict(row), "seed": seed, "loss": curve[-1][1], "seconds_of_all": seconds, "curve": curve}
        for (seed, row), curve in zip(lanes, curves, strict=True)
    ]


@torch.no_grad()
def held_out_losses(
    evaluate: Losses, thetas: Mapping[str, Tensor], batches: Batches, device: torch.device
) -> list[float]:
    """Mean nats per byte of each θ in the stack; all batches are of one size."""
    thetas = {name: theta.to(device) for name, theta in thetas.items()}
    total = sum(evaluate(thetas, inputs.to(device), targets.to(device)).double() for inputs, targets in batches)
    assert isinstance(total, Tensor)
    return list((total / len(batches)).tolist())


# --- the command line -------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The loss after training with each codec, against fp32.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a dozen rounds, one seed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)), help="default: 0 to 7")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="seeds trained together; default: 4")
    parser.add_argument("--rounds", type=int, help="other than the default; the schedule is stretched with it")
    parser.add_argument("--outer", nargs=2, type=float, metavar=("LR", "MOMENTUM"), help="other than the defaults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to this file, a few seeds at a time")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="instead: the table of these files' runs")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        report = read(arguments.table[0])
        for file in arguments.table[1:]:
            report = merged(report, read(file))
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
    report = merged(old, new)  # before anything is computed: it may not fit
    seeds = [0] if arguments.quick else arguments.seeds
    for first in range(0, len(seeds), arguments.at_once):
        together = seeds[first : first + arguments.at_once]
        new["runs"] += [{**run, "call": 0} for run in carry_out(rows, together, settings, corpus, device)]
        report = merged(old, new)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
