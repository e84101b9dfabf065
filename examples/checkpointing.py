"""A training script that can be killed at any moment and resumed with the same command.

    outerstep server -m model -n 2 --sync-every 50 --save-dir saves
    outerstep worker --server 127.0.0.1:8512 --worker-id left  -- python examples/checkpointing.py --checkpoint left.pt
    outerstep worker --server 127.0.0.1:8512 --worker-id right -- python examples/checkpointing.py --checkpoint right.pt

(`python examples/checkpointing.py --make-model model` writes the starting weights.) Kill a worker with any signal and
restart it: it resumes from its checkpoint, keeps the steps it had not contributed yet, and none counts twice. The one
rule: save model, optimizer and worker together, between the same two steps, and load them together before the worker
starts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import outerstep


def main() -> None:
    options = parse_options()
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    if options.make_model is not None:
        outerstep.save_model(model, options.make_model)
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worker = outerstep.attach(model, optimizer)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        worker.load_state_dict(saved["worker"])
        step = saved["step"]
        print(f"resuming after step {step}", flush=True)
    with worker:
        while step < options.steps and not worker.should_stop:
            inputs, wanted = batch(options.seed, step)
            loss = (model(inputs) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            worker.last_loss = loss
            step += 1
            if step % options.every == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "worker": worker.state_dict(),  # the live tensors: saved before the next step
                    "step": step,
                }
                write(state, options.checkpoint)
    print(f"done after step {step}", flush=True)
    if options.save is not None:
        outerstep.save_model(model, options.save)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The data depends only on the step, so that a restart continues where it was. (With your own loader, save its
    position in the checkpoint too.)"""
    source = torch.Generator().manual_seed(1_000_000 * seed + step)
    inputs = torch.randn(64, 32, generator=source)
    return inputs, inputs[:, :8].sum(1, keepdim=True).sin()


def write(state: dict[str, object], file: Path) -> None:
    """Atomically: if the machine dies midway, the previous checkpoint is intact."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoint.pt"), help="the file to write, and to resume from"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="which data to read; a different one on each worker")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    parser.add_argument("--make-model", type=Path, help="write the starting weights into this folder, and exit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
