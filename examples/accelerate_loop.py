"""A loop of Hugging Face Accelerate on several machines, in the shape of its LocalSGD.

    outerstep run -n 2 --sync-every 20 -- python examples/accelerate_loop.py

on the first PC, and the line that it prints on the second, with `--seed 1` at its end. Or with a server by itself:

    python examples/accelerate_loop.py --make-model model
    outerstep server -m model -n 2 --sync-every 20
    outerstep worker --server 127.0.0.1:8512 --worker-id a -- python examples/accelerate_loop.py --output a
    outerstep worker --server 127.0.0.1:8512 --worker-id b -- python examples/accelerate_loop.py --output b --seed 1

Kill a worker with any signal and start it again: `load_state` brings back model, optimizer, worker and position.
Needs the extra accelerate.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import outerstep
from outerstep.accelerate import OuterStep


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    if options.make_model is not None:
        outerstep.save_model(model, options.make_model)
        return
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=not torch.cuda.is_available())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    position = Position()
    accelerator.register_for_checkpointing(position)
    outer = OuterStep(accelerator=accelerator, model=model)
    saved = sorted(options.output.glob("step-*[0-9]"))
    if saved:
        accelerator.load_state(str(saved[-1]))  # before the `with`: model, optimizer, position and worker
    with outer:
        while position.batch < options.steps * options.accumulate and not outer.should_stop:
            inputs, wanted = (part.to(accelerator.device) for part in batch(options.seed, position.batch))
            with accelerator.accumulate(model):
                loss = (model(inputs) - wanted).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                outer.step(loss)
            position.batch += 1
            if position.batch % (options.save_every * options.accumulate) == 0:
                save(accelerator, options.output, position.batch // options.accumulate)
                print(f"{position.batch // options.accumulate} steps, loss {loss:.3f}", outer.metrics(), flush=True)
    outerstep.save_model(accelerator.unwrap_model(model), options.output / "agreed")


class Position:
    """How many batches were read: part of a checkpoint, like everything with these two methods."""

    def __init__(self) -> None:
        self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Under another name first: what is called step-N is whole."""
    partial, whole = folder / f"step-{step:06d}.partial", folder / f"step-{step:06d}"
    for place in (partial, whole):
        shutil.rmtree(place, ignore_errors=True)
    accelerator.save_state(str(partial))
    partial.rename(whole)


def batch(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """The data depends only on its number, so that a restart continues where it was."""
    source = torch.Generator().manual_seed(1_000_000 * seed + number)
    inputs = torch.randn(64, 32, generator=source)
    return inputs, inputs[:, :8].sum(1, keepdim=True).sin()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("trained"), help="folder of checkpoints; resumed if there")
    parser.add_argument("--steps", type=int, default=400, help="of the optimizer")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--seed", type=int, default=0, help="which data to read: other data on each worker")
    parser.add_argument("--make-model", type=Path, help="write the starting weights into this folder, and exit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
