"""`outerstep.accelerate.OuterStep`: a loop of Hugging Face Accelerate as a worker, in the shape of its LocalSGD.

    outer = OuterStep(accelerator=accelerator, model=model, sync_every=100)
    if resuming:
        accelerator.load_state(folder)        # model, optimizer and worker, of the same moment
    with outer:
        for batch in loader:
            with accelerator.accumulate(model):
                …                             # forward, accelerator.backward(loss), optimizer.step()
                outer.step(loss)

The worker's hook is in the optimizer that Accelerate wraps, so accumulated batches are no steps
(docs/integrations/accelerate.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..worker import DiLoCoWorker
from .extras import needing
from .trainer_worker import TrainerWorker

with needing("accelerate", "accelerate"):
    from accelerate.utils import DistributedType

STEPS_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class OuterStep:
    """Joins at the beginning of the `with`, contributes the rest and leaves at its end; `model` then holds the agreed
    weights. `save_state` and `load_state` of the accelerator know the worker from here on.

    `optimizer`: needed if the accelerator has prepared several. `enabled=False`: does nothing at all. Settings are
    those of `outerstep.attach`."""

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        sync_every: int | None = None,
        enabled: bool = True,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        resume_worker: bool = True,
        **settings: Any,
    ) -> None:
        if sync_every is not None:
            settings["sync_every"] = sync_every
        if "local_sgd_steps" in settings:  # LocalSGD's name for it
            settings["sync_steps"] = settings.pop("local_sgd_steps")
        self.enabled, self.num_steps = enabled, 0
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._life, self._resume_worker = TrainerWorker(settings), resume_worker
        if enabled:
            if accelerator.distributed_type in STEPS_THEMSELVES:
                raise ConfigError(
                    f"OuterStep needs the optimizer's steps, which {accelerator.distributed_type.value} takes itself: "
                    "shard with FSDP2, or use one process per worker"
                )
            accelerator.register_for_checkpointing(self)

    @property
    def worker(self) -> DiLoCoWorker | None:
        """Of this `with`; None before it."""
        return self._life.worker

    @property
    def should_stop(self) -> bool:
        """The run wants this worker to end, and it has left: end the loop."""
        return self.worker is not None and self.worker.should_stop

    def __enter__(self) -> OuterStep:
        if self.enabled:
            self._life.start(self._model, self._find_optimizer())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._life.finish()
        else:
            self._life.abandon(f"{type(error).__name__}: {error}".removesuffix(": "))

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """After each `optimizer.step()`, as LocalSGD wants it. Nothing depends on it: it reports the loss."""
        self.num_steps += 1
        if loss is not None and self._accelerator.sync_gradients:
            self._life.report(loss)

    def metrics(self) -> dict[str, float | int]:
        """How the exchanges went, for `accelerator.log`."""
        return self._life.metrics("outerstep/")

    # --- for the accelerator's checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._life.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The accelerator has loaded model and optimizer before. Inside the `with`, the worker that has joined already
        leaves, and the one of the checkpoint takes its place."""
        self._life.load(state if self._resume_worker else None)
        if self._life.running is not None:
            self._life.abandon("a checkpoint was loaded")
            self._life.start(self._model, self._find_optimizer())

    def _find_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is not None:
            return self._optimizer
        prepared = self._accelerator._optimizers
        if len(prepared) != 1:
            raise ConfigError(
                f"the accelerator must have prepared one optimizer, got {len(prepared)}: prepare model and optimizer "
                "first, or say which one, OuterStep(…, optimizer=…)"
            )
        return prepared[0]  # type: ignore[no-any-return]
