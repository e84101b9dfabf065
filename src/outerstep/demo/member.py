"""The training script of a group in a demo of clusters: an ordinary loop over a very small model.

    outerstep worker --worker-id left -- python -m outerstep.demo.member --shard 0 --progress left.jsonl …

It joins, waits for the file `--go`, and trains until its cluster has taken over two more agreements from above than at
the version that the file `--until` names for it: so all can end with the same one. `--pace` is the least time of a
step: the stand-in for a larger model, and what makes several of these processes fit on one core. It appends its
progress to a file as JSON lines, and what its cluster's controller recommends, which it does not follow: its batch
stays as it is, so that what it counts for can be seen. The last line has the hash of the weights it ended with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import outerstep
from outerstep.demo.corpus import evaluation_batches, load_corpus
from outerstep.demo.model import GPTConfig, build_model
from outerstep.demo.training import TrainSettings, evaluate, make_optimizer, make_stream, train
from outerstep.digest import data_hash
from outerstep.events import Event, RoundReport

SMALL = GPTConfig(context=64, d_model=64, num_layers=2)  # 119,104 parameters
LEARNING_RATE = 3e-3
BATCH_SIZE = 8
REPORT_EVERY = 5  # steps
EVALUATIONS = 4  # batches
TEXT_BYTES = 4 << 20
MOST_STEPS = 100_000
LOOK_S = 0.05


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Of all values, in the order of the names."""
    return data_hash(weights[name].detach().cpu().float().numpy().tobytes() for name in sorted(weights))


def held_out_loss(weights: Mapping[str, Tensor]) -> float:
    """Nats per byte, of a model with these weights."""
    model = build_model(0, SMALL)
    model.load_state_dict(dict(weights))
    held_out = load_corpus(max_bytes=TEXT_BYTES).held_out
    return evaluate(model, evaluation_batches(held_out, EVALUATIONS, context=SMALL.context))


def main() -> None:
    options = parse_options()
    settings = TrainSettings(
        steps=MOST_STEPS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, warmup_steps=10, seed=options.seed
    )
    stream = make_stream(load_corpus(max_bytes=TEXT_BYTES).train, options.shard, settings, context=SMALL.context)
    model = build_model(options.seed, SMALL)
    optimizer = make_optimizer(model, settings)
    with options.progress.open("a", buffering=1) as progress:

        def report(**facts: Any) -> None:
            progress.write(json.dumps({"time": round(time.time(), 3), **facts}) + "\n")

        from_above = AgreementsFromAbove()
        with outerstep.attach(model, optimizer, event_sink=from_above) as worker:
            while not (options.go.exists() or worker.should_stop):
                time.sleep(LOOK_S)
            worker.count(samples=settings.batch_size)  # of the step that comes: it is weighed by them
            worker.on_recommendation(lambda advice: report(recommended=advice.settings.batch_size))
            began_at = time.monotonic()
            for done in train(model, optimizer, [stream], settings):
                worker.last_loss = done.loss
                step, metrics = done.step + 1, cast(dict[str, Any], worker.sync_metrics)
                if step % REPORT_EVERY == 0:
                    report(step=step, loss=done.loss, waited_s=metrics["seconds_waiting"])
                if worker.should_stop or is_over(options, from_above):
                    break
                worker.count(samples=settings.batch_size)
                time.sleep(max(0.0, options.pace - (time.monotonic() - began_at)))
                began_at = time.monotonic()
        report(step=step, hash=weights_hash(model.state_dict()), metrics=worker.sync_metrics)


class AgreementsFromAbove:
    """The versions that the layer above has made, as this member was told. (An event sink.) Its own version says
    nothing about them: it also jumps when a round closes without this member."""

    def __init__(self) -> None:
        self.versions: set[int] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundReport):
            self.versions.update(event.from_above)


def is_over(options: argparse.Namespace, from_above: AgreementsFromAbove) -> bool:
    if not options.until.exists():
        return False
    held: int = json.loads(options.until.read_text())[options.cluster]
    return sum(version > held for version in from_above.versions) >= 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", type=int, default=0, help="which shard of the data to read")
    parser.add_argument("--cluster", required=True, help="whose version ends it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--go", type=Path, required=True, help="begin when this file is there")
    parser.add_argument("--until", type=Path, required=True, help="file that says after which version to end")
    parser.add_argument("--progress", type=Path, required=True, help="file for progress as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
