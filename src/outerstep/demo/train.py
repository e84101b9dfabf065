"""The demo's training script: an ordinary loop, and the two lines that make it a worker.

    python -m outerstep.demo.train --alone …                                                  a lone worker
    python -m outerstep.demo.train --alone --shards 0 1 …                                     data-parallel, two shards
    OUTERSTEP_JOIN=… outerstep worker -- python -m outerstep.demo.train --shards 1 …        one of several workers

It appends its progress to a file as JSON lines, which the demo reads while it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import outerstep
from outerstep.demo.corpus import evaluation_batches, load_corpus
from outerstep.demo.model import build_model
from outerstep.demo.training import TrainSettings, evaluate, make_optimizer, make_stream, train

EVALUATIONS = 10
HELD_OUT_BATCHES = 8  # 32,768 bytes, the same for every run and every evaluation


def main() -> None:
    options = parse_options()
    settings = TrainSettings(steps=options.steps, learning_rate=options.learning_rate, seed=options.seed)
    corpus = load_corpus()
    streams = [make_stream(corpus.train, shard, settings) for shard in options.shards]
    held_out = evaluation_batches(corpus.held_out, HELD_OUT_BATCHES)
    model = build_model(options.seed)
    optimizer = make_optimizer(model, settings)
    every = max(5, settings.steps // EVALUATIONS)
    began_at = time.monotonic()

    with options.progress.open("a", buffering=1) as progress:

        def report(**facts: Any) -> None:
            progress.write(json.dumps({"seconds": round(time.monotonic() - began_at, 3), **facts}) + "\n")

        report(step=0, held_out=evaluate(model, held_out))
        # The two lines: attach(), and the `with` around the loop.
        worker = None if options.alone else outerstep.attach(model, optimizer)
        with worker or nullcontext():
            for done in train(model, optimizer, streams, settings):
                step = done.step + 1
                if worker is not None:
                    worker.last_loss = done.loss
                if step % every == 0:
                    with worker.global_weights() if worker is not None else nullcontext():
                        report(step=step, loss=done.loss, held_out=evaluate(model, held_out))
                elif step % 5 == 0:
                    report(step=step, loss=done.loss)
        metrics = {} if worker is None else worker.sync_metrics
        report(step=settings.steps, final=evaluate(model, held_out), metrics=metrics)
    if options.save is not None:
        outerstep.save_model(model, options.save)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="plain training, no server")
    parser.add_argument("--shards", type=int, nargs="+", default=[0], help="which shards of the data to read")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", type=Path, required=True, help="file for progress as JSON lines")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
