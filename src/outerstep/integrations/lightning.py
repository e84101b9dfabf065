"""`outerstep.lightning.OuterstepCallback`: a Lightning Trainer as a worker (docs/integrations/lightning.md).

Trainer(max_steps=1000, callbacks=[OuterstepCallback()]).fit(module, loader, ckpt_path=…)

load_state_dict    the worker's state in Lightning's checkpoint, before the start
on_train_start     everything is made and loaded: join
optimizer.step     the worker's own hook counts and exchanges; accumulated batches are no steps
state_dict         into each of Lightning's checkpoints
on_train_end       finish: the module holds the agreed weights
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..worker import DiLoCoWorker
from .extras import needing
from .trainer_worker import TrainerWorker

with needing("lightning", "lightning"):
    from lightning.pytorch import Callback

PREFIX = "outerstep/"  # of our metrics in Lightning's logs


class LightningCallback(Callback):  # type: ignore[misc]  # the library's class is not typed for us
    """Makes the Trainer a worker. Settings are those of `outerstep.attach`, from keywords, environment or file.

    `resume_worker=False`: join as a new worker even if `ckpt_path` holds the state of one."""

    def __init__(self, *, resume_worker: bool = True, **settings: Any) -> None:
        self._life = TrainerWorker(settings)
        self._resume_worker = resume_worker
        self._losses: list[Tensor] = []

    @property
    def worker(self) -> DiLoCoWorker | None:
        """Of the training that runs, or ran last."""
        return self._life.worker

    @property
    def state_key(self) -> str:
        return "OuterstepCallback"

    # --- Lightning's events ---------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"OuterstepCallback needs one optimizer, got {len(trainer.optimizers)}: a run counts the steps of one"
            )
        self._losses = []
        steps_left = trainer.estimated_stepping_batches - trainer.global_step  # inf: no end is known
        self._life.start(trainer.model, trainer.optimizers[0], steps_left)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._losses.append(loss.detach())  # its share of the loss, if batches are accumulated

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        losses, self._losses = self._losses, []
        if losses:
            self._life.report(torch.stack(losses).sum())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {name: float(value) for name, value in self._life.metrics(PREFIX).items()}
        self.log_dict(shown, on_step=True, on_epoch=False, batch_size=1)
        if self.worker is not None and self.worker.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._life.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._life.abandon(f"{type(exception).__name__}: {exception}".removesuffix(": "))

    # --- its checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._life.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._life.load(state_dict if self._resume_worker else None)
