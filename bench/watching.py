"""What do healthy rounds look like in the metrics, and what do typical mistakes?

Four trainers in one process agree every 20 steps on a small byte-level GPT (the demo's corpus, two layers of 64, AdamW,
warm-up and cosine), ten rounds. The cases differ in one thing each:

    healthy           η 1.0, μ 0.5, as for every run of so few rounds
    η 0.1             the outer step takes a tenth of what was learned
    η 3               and three times as much
    same data         everybody reads the same shard in the same order
    one flips         one of four contributes its Δ with the sign reversed, and there is no screen that sees it

Per case the medians over rounds 3 to 10, seen by a trainer that does everything right. `loss jump` is loss_after_sync −
loss_before_sync. One seed: this is to know the metrics by sight, not to compare losses.

    python bench/watching.py                      # about two minutes, one thread
    python bench/watching.py --quick              # four rounds
    python bench/watching.py --json out.json      # every round, the machine and the commit
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from outerstep import DiLoCoTrainer, RobustAggregator
from outerstep.demo.corpus import Corpus, load_corpus
from outerstep.demo.model import GPT, GPTConfig
from outerstep.demo.training import TrainSettings, evaluate, learning_rate_at, make_optimizer, make_stream
from provenance import provenance

WORKERS, INNER_STEPS, FIRST_ROUND = 4, 20, 3
SHAPE = GPTConfig(context=64, d_model=64, num_layers=2)
METRICS = ("inner_loss", "inner_grad_norm", "pseudo_grad_norm", "peer_grad_similarity", "aggregated_grad_norm")


@dataclass(frozen=True)
class Case:
    name: str
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    same_data: bool = False
    flips: bool = False


CASES = (
    Case("healthy"),
    Case("η 0.1", outer_lr=0.1, outer_momentum=0.9),
    Case("η 3", outer_lr=3.0, outer_momentum=0.9),
    Case("same data", same_data=True),
    Case("one flips", flips=True),
)


class Everybody:
    """A gossip that has heard from all."""

    def __init__(self, offered: Sequence[Mapping[str, Tensor]]) -> None:
        self._offered = offered

    async def gossip_round(self, local: dict[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
        return self._offered


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(*batch)[1]
    return loss


def run(case: Case, corpus: Corpus, rounds: int) -> dict[str, Any]:
    settings = TrainSettings(steps=rounds * INNER_STEPS, learning_rate=2e-3)
    models = []
    for _ in range(WORKERS):
        torch.manual_seed(0)
        models.append(GPT(SHAPE))
    optimizers = [make_optimizer(model, settings) for model in models]
    trainers = [
        DiLoCoTrainer(model, optimizer, INNER_STEPS, case.outer_lr, case.outer_momentum, loss_fn=loss_of)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    shards = [0 if case.same_data else shard for shard in range(WORKERS)]
    streams = [make_stream(corpus.train, shard, settings, context=SHAPE.context) for shard in shards]
    aggregators = [RobustAggregator("mean") for _ in trainers]
    seen: list[dict[str, Any]] = []
    for step in range(settings.steps):
        for trainer, optimizer, stream in zip(trainers, optimizers, streams, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, settings)
            trainer.train_step(stream.batch(step))
        if seen:
            seen[-1].update({name: trainers[1].sync_metrics[name] for name in ("loss_before_sync", "loss_after_sync")})
        if trainers[0].should_sync():
            agree(trainers, aggregators, flips=case.flips)
            seen.append(trainers[1].sync_metrics)
    held_out = make_stream(corpus.held_out, 0, TrainSettings(batch_size=32), context=SHAPE.context)
    return {"rounds": seen, "held_out": evaluate(models[0], [held_out.batch(step) for step in range(8)])}


def agree(trainers: Sequence[DiLoCoTrainer], aggregators: Sequence[RobustAggregator], *, flips: bool) -> None:
    offered = [trainer.compute_pseudo_gradient() for trainer in trainers]
    if flips:
        offered[0] = {name: -delta for name, delta in offered[0].items()}
    for trainer, aggregator in zip(trainers, aggregators, strict=True):
        assert asyncio.run(trainer.sync_with_peers(aggregator, Everybody(offered)))
    assert len({trainer.anchor_hash for trainer in trainers}) == 1


def summarize(found: Mapping[str, Any]) -> dict[str, float]:
    rounds = found["rounds"][FIRST_ROUND - 1 :]
    made = {name: statistics.median(one[name] for one in rounds) for name in METRICS}
    jumps = [one["loss_after_sync"] - one["loss_before_sync"] for one in rounds[:-1]]
    squares = [one["weight_divergence"] + one["aggregated_grad_norm"] ** 2 for one in rounds]
    shares = [one["weight_divergence"] / square for one, square in zip(rounds, squares, strict=True)]
    return {
        **made,
        "loss_jump": statistics.median(jumps),
        "weight_divergence": statistics.median(one["weight_divergence"] for one in rounds),
        "divergence_share": statistics.median(shares),
        "last_loss": rounds[-1]["inner_loss"],
        "held_out": found["held_out"],
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    made = Table(title=f"{WORKERS} trainers, H = {INNER_STEPS}; medians over the rounds", box=rich.box.SIMPLE)
    columns = {
        "last_loss": "loss at the end", "loss_jump": "loss jump", "inner_grad_norm": "‖∇‖", "pseudo_grad_norm": "‖Δ‖",
        "peer_grad_similarity": "similarity", "aggregated_grad_norm": "‖Δ̄‖", "weight_divergence": "divergence",
        "divergence_share": "its share", "held_out": "held out",
    }  # fmt: skip
    made.add_column("case")
    for title in columns.values():
        made.add_column(title, justify="right")
    for name, row in rows.items():
        made.add_row(name, *(f"{row[column]:.2f}" for column in columns))
    return made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show the metrics of healthy rounds and of typical mistakes.")
    parser.add_argument("--quick", action="store_true", help="four rounds instead of ten")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    about, log = provenance("torch"), Console(stderr=True)
    corpus = load_corpus()
    found = {}
    for case in CASES:
        found[case.name] = run(case, corpus, 4 if arguments.quick else 10)
        log.print(f"{case.name}: done")
    rows = {name: summarize(one) for name, one in found.items()}
    Console().print(table(rows))
    if arguments.json:
        report = {"machine": about, "summary": rows, "runs": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        log.print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
