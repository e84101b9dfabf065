"""A Lightning Trainer on several machines: the script for one, and a callback.

    outerstep run -n 2 --sync-every 20 -- python examples/lightning_module.py

on the first PC, and the line that it prints on the second, with `--seed 1` at its end. Or with a server by itself:

    python examples/lightning_module.py --make-model model
    outerstep server -m model -n 2 --sync-every 20
    outerstep worker --server 127.0.0.1:8512 --worker-id a -- python examples/lightning_module.py --output a
    outerstep worker --server 127.0.0.1:8512 --worker-id b -- python examples/lightning_module.py --output b --seed 1

Kill a worker with any signal and start it again: it resumes from Lightning's last checkpoint, and the worker's state is
in it. Needs the extra lightning.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import outerstep
from outerstep.lightning import OuterstepCallback


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, wanted = batch
        loss = (self.net(inputs) - wanted).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Batches:
    """A loader with a position, which Lightning keeps in its checkpoints. (A plain DataLoader starts over when training
    resumes; torchdata's StatefulDataLoader does not.)"""

    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length, self.position = seed, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < self.length:
            source = torch.Generator().manual_seed(1_000_000 * self.seed + self.position)
            inputs = torch.randn(64, 32, generator=source)
            self.position += 1
            yield inputs, inputs[:, :8].sum(1, keepdim=True).sin()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    module = Regression()
    if options.make_model is not None:
        outerstep.save_model(module, options.make_model)
        return
    checkpoints = ModelCheckpoint(
        options.output, every_n_train_steps=options.save_every, save_last=True, enable_version_counter=False
    )
    trainer = Trainer(
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=[checkpoints, OuterstepCallback()],
        log_every_n_steps=5,
        accelerator="auto",
        devices=1,
        default_root_dir=options.output,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Batches(options.seed, options.steps * options.accumulate)
    last = options.output / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    outerstep.save_model(module, options.output / "agreed")


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
