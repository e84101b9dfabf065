"""How much of the training does one hostile worker of eight spoil, and what does protection cost?

To be measured: with the recommended setting (the mean behind norm and cosine screen) the final perplexity stays within
5 % of that of eight honest workers, whatever one of them sends; and with nobody hostile the defaults cost at most 1 %.

The training is true and in one process: the demo's byte-level GPT on the source of Python's standard library, eight
workers that take H local steps a round (the machinery is loss.py's). The last worker trains like the others, and then
sends what an attack of `outerstep.core.robust.attacks` makes of it, knowing what all others send; in every round. The
runs of one seed are paired: the same initial weights, batches and schedule.

    clean              eight honest workers and their plain mean: what all is compared with
    clean, again       the same from weights larger by 0.01 %: what two runs of the same thing differ by
    seven alone        the eighth is not there: what is left if an attacker is found every time
    plain mean         nothing is screened; "loud" attacks are meant to ruin it
    everything else    finite check and norm screen, then the rule; "+ cosine" with the cosine screen too

Loud attacks (longer than honest work, or not finite) never reach a rule behind the norm screen, so only a few rules are
run with them. Runs are added to the file as they end, and those that are in it are not repeated: stop and start it as
you like.

    python bench/robustness.py --quick                                            # a minute; too short to judge by
    python bench/robustness.py --device cuda --json robustness.json               # all of it, or what is missing
    python bench/robustness.py --device cuda --json robustness.json --seeds 3 4   # more seeds
    python bench/robustness.py --table robustness.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from loss import Flat, Layout, Replicas, Settings, held_out_losses, say, stacked_loss
from loss_table import Report, Run, merged, read
from outerstep.core.aggregate import weighted_mean
from outerstep.core.outer import Nesterov
from outerstep.core.pseudogradient import adopt, pseudo_gradient
from outerstep.core.robust import RobustAggregator
from outerstep.core.robust.attacks import ATTACKS, Scene
from outerstep.demo.corpus import Corpus, evaluation_batches, load_corpus
from outerstep.demo.model import build_model
from provenance import provenance
from robustness_table import AGAIN, ALONE, CLEAN, PLAIN, RECOMMENDED, markdown

LOUD = ["flip_10", "scale_1000", "gaussian", "gaussian_1000", "ipm_10", "nan", "inf"]
QUIET = [attack for attack in ATTACKS if attack not in LOUD]

RULES: dict[str, Callable[[], RobustAggregator]] = {
    "mean": lambda: RobustAggregator("mean"),
    RECOMMENDED: lambda: RobustAggregator("mean", cosine_screen=True),
    "trimmed_mean": lambda: RobustAggregator(),
    "trimmed_mean + cosine": lambda: RobustAggregator(cosine_screen=True),
    "median": lambda: RobustAggregator("median"),
    "geometric_median": lambda: RobustAggregator("geometric_median"),
    "centered_clipping": lambda: RobustAggregator("centered_clipping"),
    "multi_krum": lambda: RobustAggregator("multi_krum"),
    "krum": lambda: RobustAggregator("krum"),
    "median of pairs": lambda: RobustAggregator("median", bucket_size=2),
}
COST_ONLY = ["krum", "median of pairs"]  # measured without an attacker, to show what they give up


@dataclass(frozen=True)
class Row:
    """One run of each seed."""

    rule: str
    attack: str = ""  # nobody attacks

    @property
    def name(self) -> str:
        return f"{self.rule} / {self.attack}" if self.attack else self.rule


def all_rows() -> Iterator[Row]:
    yield from (Row(rule) for rule in (CLEAN, AGAIN, ALONE, *RULES))
    for attack in QUIET:
        yield from (Row(rule, attack) for rule in (PLAIN, *RULES) if rule not in COST_ONLY)
    for attack in LOUD:
        yield from (Row(rule, attack) for rule in (PLAIN, "mean", RECOMMENDED, "trimmed_mean + cosine"))


def quick_rows() -> Iterator[Row]:
    yield from (Row(rule) for rule in (CLEAN, ALONE, RECOMMENDED, "trimmed_mean"))
    for attack in ("sign_flip", "alie", "scale_1000", "nan"):
        yield from (Row(rule, attack) for rule in (PLAIN, RECOMMENDED, "trimmed_mean"))


SETTINGS = replace(Settings(), workers=8, sync_every=20)
QUICK = replace(
    SETTINGS,
    sync_every=5,
    rounds=10,
    batch_size=4,
    context=32,
    d_model=32,
    num_layers=1,
    num_heads=2,
    held_out_batches=1,
    evaluations=2,
)


@dataclass
class Refusals:
    """In how many of the rounds somebody was refused: the attacker, and honest ones."""

    attacker: int = 0
    honest: int = 0


@dataclass
class Lane:
    """The outer loop of one row and seed."""

    row: Row
    theta: Flat
    settings: Settings
    refusals: Refusals = field(default_factory=Refusals)
    rounds: int = 0
    first: Tensor | None = None  # what the attacker would have sent in the first round

    def __post_init__(self) -> None:
        self.theta = {name: values.clone() for name, values in self.theta.items()}
        self.outer = Nesterov(self.settings.outer_lr, self.settings.outer_momentum)
        self.aggregator = RULES[self.row.rule]() if self.row.rule in RULES else None
        self.ids = [f"{i:02d}" for i in range(self.settings.workers)]

    @torch.no_grad()
    def round(self, local: Flat) -> None:
        """One outer step from the workers' models [k, n]; they hold the new θ at its end."""
        parts = [pseudo_gradient(self.theta[name].expand_as(ends), ends) for name, ends in local.items()]
        sent = torch.cat(parts, dim=1)
        if self.row.attack:
            sent[-1] = self._attack(sent)
        combined = self._combined(list(sent)).split([part.shape[1] for part in parts])
        self.outer.step(self.theta, dict(zip(local, combined, strict=True)))
        for name, theta in self.theta.items():
            adopt(local[name], theta)
        self.rounds += 1

    def _attack(self, deltas: Tensor) -> Tensor:
        own = deltas[-1].clone()
        self.first = own if self.first is None else self.first
        return ATTACKS[self.row.attack](Scene(own, deltas[:-1], [self.first], self.rounds))

    def _combined(self, sent: list[Tensor]) -> Tensor:
        if self.aggregator is None:
            counted = sent[:-1] if self.row.rule == ALONE else sent
            with counted[0].device:  # the sum is made where new tensors are made
                return weighted_mean(counted, [1.0] * len(counted))
        if not any(bool(torch.isfinite(each).all()) for each in sent):
            return sent[0]  # a run that is lost stays lost
        steps = [self.settings.sync_every] * len(sent)
        made = self.aggregator.aggregate(sent, worker_ids=self.ids, steps=steps, fragment=0, seed=str(self.rounds))
        assert self.aggregator.verdict is not None
        refused = self.aggregator.verdict.refused
        self.refusals.attacker += self.row.attack != "" and self.ids[-1] in refused
        self.refusals.honest += any(worker in refused for worker in (self.ids[:-1] if self.row.attack else self.ids))
        return made


def carry_out(rows: Sequence[Row], seed: int, settings: Settings, corpus: Corpus, device: torch.device) -> list[Run]:
    """These rows of one seed, all of them at once."""
    began_at, layout = time.perf_counter(), Layout(settings.shape())
    start = layout.flatten(dict(build_model(seed, settings.shape()).to(device).named_parameters()))
    starts = [{name: w.detach() * (1.0 + 1e-4 * (row.rule == AGAIN)) for name, w in start.items()} for row in rows]
    lanes = [Lane(row, theta, settings) for row, theta in zip(rows, starts, strict=True)]
    replicas = Replicas(starts, len(rows), [seed], settings, corpus)
    batches = evaluation_batches(corpus.held_out, settings.held_out_batches, batch_size=128, context=settings.context)
    evaluate = stacked_loss(settings.shape(), device, same_batch=True)
    curves: list[list[tuple[int, float | None]]] = [[] for _ in lanes]
    for done in range(1, settings.rounds + 1):
        replicas.train(settings.sync_every)
        for index, lane in enumerate(lanes):
            lane.round(replicas.of(index))
        if done * settings.evaluations // settings.rounds > (done - 1) * settings.evaluations // settings.rounds:
            thetas = {name: torch.stack([lane.theta[name] for lane in lanes]) for name in layout.shapes}
            losses = held_out_losses(evaluate, layout.named(thetas), batches, device)
            for curve, loss in zip(curves, losses, strict=True):
                curve.append((done, loss if math.isfinite(loss) else None))  # JSON knows no NaN
    seconds = time.perf_counter() - began_at
    say(f"seed {seed}: {rows[0].name} to {rows[-1].name} ({seconds:.0f} s)")
    return [
        {
            **asdict(lane.row),
            **{f"refused_{who}": count / settings.rounds for who, count in asdict(lane.refusals).items()},
            "name": lane.row.name,
            "seed": seed,
            "loss": curve[-1][1],
            "curve": curve,
        }
        for lane, curve in zip(lanes, curves, strict=True)
    ]


# --- the command line -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The perplexity with one hostile worker of eight, rule by rule.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, ten rounds, a few rows, one seed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rules", nargs="+", choices=[CLEAN, AGAIN, ALONE, PLAIN, *RULES], metavar="RULE")
    parser.add_argument("--attacks", nargs="+", choices=["none", *ATTACKS], metavar="ATTACK", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--at-once", type=int, default=24, metavar="N", help="rows trained together; default: 24")
    parser.add_argument("--rounds", type=int, help="other than the default; the schedule is stretched with it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to this file; those in it are kept")
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
    settings = QUICK if arguments.quick else SETTINGS
    settings = replace(settings, rounds=arguments.rounds or settings.rounds)
    device = torch.device(arguments.device)
    about = {**provenance("torch"), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    if device.type == "cpu":
        torch.set_num_threads(1)  # more would be slower on a busy machine
    corpus = load_corpus()
    about |= {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)}
    old: Report = {"settings": asdict(settings), "calls": [], "runs": []}
    new: Report = {"settings": asdict(settings), "calls": [about], "runs": []}
    if arguments.json and arguments.json.exists():
        old = read(arguments.json)
    report = merged(old, new)  # before anything is computed: it may not fit
    for seed in [0] if arguments.quick else arguments.seeds:
        rows = [row for row in wanted(arguments) if (row.name, seed) not in there(report)]
        for first in range(0, len(rows), arguments.at_once):
            together = rows[first : first + arguments.at_once]
            new["runs"] += [{**run, "call": 0} for run in carry_out(together, seed, settings, corpus, device)]
            report = merged(old, new)
            if arguments.json:
                save(report, arguments.json)
    return report


def wanted(arguments: argparse.Namespace) -> list[Row]:
    rows = quick_rows() if arguments.quick else all_rows()
    return [
        row
        for row in rows
        if (arguments.rules is None or row.rule in arguments.rules)
        and (arguments.attacks is None or (row.attack or "none") in arguments.attacks)
    ]


def there(report: Report) -> set[tuple[str, int]]:
    return {(run["name"], run["seed"]) for run in report["runs"]}


def save(report: Report, file: Path) -> None:
    """Whole or not at all: the run may be stopped at any moment."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(file)


if __name__ == "__main__":
    main()
