"""The training script of a worker in the demo of leased data: an ordinary loop over a LeasedLoader.

    outerstep worker --worker-id left -- python -m outerstep.demo.leased_member --folder demo --samples 4096 …

Its dataset is windows of the corpus; which of them it trains, the server leases to it. It saves model, optimizer and
worker every few steps, and resumes from there if the file is there: at the exact sample. It appends its progress to a
file as JSON lines: the process ids of its loader, and the samples of each step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.demo.corpus import load_corpus
from outerstep.demo.member import BATCH_SIZE, LEARNING_RATE, SMALL, TEXT_BYTES
from outerstep.demo.model import build_model
from outerstep.demo.training import TrainSettings, make_optimizer
from outerstep.torch_file import read_torch_file

DATASET = "corpus"


class CorpusWindows(torch.utils.data.Dataset[Tensor]):
    """Windows of the corpus, at equal distances: its number, then the bytes."""

    def __init__(self, samples: int) -> None:
        self._text = load_corpus(max_bytes=TEXT_BYTES).train
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> Tensor:
        begin = sample * (len(self._text) - SMALL.context - 1) // max(self._samples - 1, 1)
        return torch.cat([torch.tensor([sample]), self._text[begin : begin + SMALL.context + 1].long()])


def main() -> None:
    options = parse_options()
    checkpoint = options.folder / f"{options.name}.pt"
    saved = read_torch_file(checkpoint) if checkpoint.exists() else None
    model = build_model(options.seed, SMALL)
    optimizer = make_optimizer(model, TrainSettings(steps=1, learning_rate=LEARNING_RATE))
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    windows = CorpusWindows(options.samples)
    data = LeasedSampler(windows, name=DATASET, unit_samples=options.unit, seed=options.seed)
    loader = LeasedLoader(windows, data, batch_size=BATCH_SIZE, num_workers=options.loaders)
    state = saved["worker"] if saved is not None else None
    step, began_at = 0, time.monotonic()
    with (
        options.progress.open("a", buffering=1) as progress,
        outerstep.attach(model, optimizer, data=data, state=state) as worker,
    ):
        for batch in loader:
            loss = model(batch[:, 1:-1], batch[:, 2:])[1]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, worker.last_loss = step + 1, loss.item()
            loaders = [child.pid for child in multiprocessing.active_children()]
            progress.write(
                json.dumps({"step": step, "loss": loss.item(), "loaders": loaders, "pid": os.getpid()}) + "\n"
            )
            if step % options.save_every == 0:
                everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**everything, "worker": worker.state_dict()}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            time.sleep(max(0.0, options.pace - (time.monotonic() - began_at)))
            began_at = time.monotonic()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where it saves its state")
    parser.add_argument("--name", required=True, help="of its state there")
    parser.add_argument("--samples", type=int, required=True, help="windows of the corpus in an epoch")
    parser.add_argument("--unit", type=int, required=True, help="samples in a unit")
    parser.add_argument("--loaders", type=int, default=2, help="processes that load")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one saved state to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--progress", type=Path, required=True, help="file for progress as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
