"""A Hugging Face Trainer that trains leased samples, for tests: cell i of the model counts how often sample i is in it.

    python leased_trainer_job.py FOLDER SAMPLES BATCH DIE_AT LOADERS    # DIE_AT: SIGKILL before step DIE_AT + 1

It saves a checkpoint after each step, and resumes from the newest that is whole.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from outerstep.data import LeasedSampler
from outerstep.hf import OuterstepCallback

torch.set_num_threads(1)
folder, samples, batch_size, die_at, loaders = Path(sys.argv[1]), *map(int, sys.argv[2:])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(samples))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        with (folder / "drawn.log").open("a") as file:
            print(*rows.tolist(), file=file)
        return {"loss": -self.cells[rows].sum()}


class Dies(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if die_at and state.global_step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)


model = Cells()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
args = TrainingArguments(
    output_dir=str(folder / "out"), num_train_epochs=2, per_device_train_batch_size=batch_size, max_grad_norm=0.0,
    save_steps=1, save_total_limit=2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    dataloader_num_workers=loaders,
)  # fmt: skip
data = LeasedSampler(samples, unit_samples=4, seed=3, epochs=2)
trainer = Trainer(
    model=model, args=args, train_dataset=[{"rows": torch.tensor(i)} for i in range(samples)],  # type: ignore[arg-type]
    optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    callbacks=[OuterstepCallback(data=data), Dies()],
)  # fmt: skip
whole = [file.parent for file in (folder / "out").glob("checkpoint-*/outerstep.pt")]
newest = str(max(whole, key=lambda place: int(place.name.rpartition("-")[2]))) if whole else None
trainer.train(resume_from_checkpoint=newest)
