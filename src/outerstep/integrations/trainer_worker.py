"""A worker inside somebody else's trainer: made when model and optimizer are there, in its checkpoints, ended once.

    start ──▶ report, metrics, state_dict ──▶ finish       the training is over: contribute the rest, leave
                                         └──▶ abandon      it failed: leave without contributing

What a checkpoint holds of it is `state_dict()`: the worker's own state, or None for one that had left by then, with
nothing unsent. A restart hands it to `load`, before `start`, when model and optimizer are of the same checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, OtherRun, OuterstepError
from ..torch_file import read_torch_file
from ..worker import DiLoCoWorker, attach

log = logging.getLogger(__name__)

FORMAT = 1
LOSS_EVERY_S = 1.0
SHOWN = (  # of the worker's `sync_metrics`
    "local_step",
    "seconds_waiting",
    "bytes_sent",
    "bytes_received",
    "pseudo_grad_norm",
    "peer_grad_similarity",
    "weight_divergence",
)
TROUBLE = ("missed_rounds", "steps_discarded", "outside_changes")  # shown from the first one on


class TrainerWorker:
    """`settings`: what `outerstep.attach` takes. `worker`: the one that was made last; `is_over`: it has left, or there
    is none."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._saved: Mapping[str, Any] | None = None
        self.is_over = True
        self._loss_read_at = 0.0
        self.worker: DiLoCoWorker | None = None

    @property
    def running(self) -> DiLoCoWorker | None:
        """The worker, while it belongs to the run."""
        return None if self.is_over or self.worker is None or self.worker.should_stop else self.worker

    # --- life -----------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any] | None) -> None:
        """What `state_dict` gave, for the next start; None = there is nothing to resume."""
        if state is not None and (state.get("format") != FORMAT or "worker" not in state):
            raise ConfigError(
                f"a checkpoint holds a worker's state of format {FORMAT}, got {state.get('format')!r}: it was written "
                "by another version, or by something else; resume without it"
            )
        self._saved = state["worker"] if state is not None else None

    def start(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps_left: float | None = None
    ) -> DiLoCoWorker:
        """Join. The model takes the agreed weights, or resumes from the state that was loaded. `steps_left`: optimizer
        steps that the trainer will still take, if it knows; they are shown, and nothing depends on them."""
        self.abandon("another training began")  # one that ended by an exception, of which its trainer told nobody
        saved, self._saved = self._saved, None
        told = {**_end_of(saved, steps_left), **self._settings}
        self.worker = worker = attach(model, optimizer, state=saved, **told)
        try:
            worker.start()
        except OtherRun as error:
            if saved is not None:
                error.add_note("the checkpoint holds a worker of another run: resume_worker=False joins as a new one")
            raise
        self.is_over = False
        atexit.register(self.abandon, "its script ended")
        return worker

    def finish(self) -> None:
        """Contribute what is left and leave; the model then holds the agreed weights. Once: later calls do nothing."""
        if self.is_over or self.worker is None:
            return
        try:
            self.worker.stop()
        finally:
            self._over()

    def abandon(self, reason: str) -> None:
        """Leave without contributing, if it has not left."""
        if self.is_over or self.worker is None:
            return
        try:
            self.worker.abandon(reason)
        except OuterstepError as error:  # the server will find out by itself
            log.warning("could not leave the run: %s", error)
        finally:
            self._over()

    def _over(self) -> None:
        self.is_over = True
        atexit.unregister(self.abandon)

    # --- what trainers save and show ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The live tensors: to be written before the next step."""
        worker = self.running
        return {"format": FORMAT, "worker": None if worker is None else worker.state_dict()}

    def report(self, loss: torch.Tensor | float) -> None:
        """Of the batch that the next step learns from, or the last one did. To read it from a GPU is to wait for it: so
        only once in a while, and before an exchange."""
        worker = self.running
        if worker is None:
            return
        now = time.monotonic()
        is_free = not isinstance(loss, torch.Tensor) or loss.device.type == "cpu"
        if is_free or worker.exchanges_next or now - self._loss_read_at >= LOSS_EVERY_S:
            self._loss_read_at = now
            worker.last_loss = loss

    def metrics(self, prefix: str) -> dict[str, float | int]:
        """How the exchanges went, for the trainer's own log; what is not known yet is left out."""
        if self.worker is None:
            return {}
        found = self.worker.sync_metrics
        versions = found["versions"]
        shown: dict[str, float | int] = {f"{prefix}round": min(versions) if isinstance(versions, list) else 0}
        for name in (*SHOWN, *(name for name in TROUBLE if found[name])):
            value = found[name]
            if isinstance(value, int | float):
                shown[prefix + name] = value
        return shown


def _end_of(saved: Mapping[str, Any] | None, steps_left: float | None) -> dict[str, int]:
    """`total_steps`, of this worker: it may have joined when its trainer was under way."""
    if steps_left is None or not 0 < steps_left < math.inf:
        return {}
    work = (saved or {}).get("work")  # not checked yet: what is wrong with the state is said where it is loaded
    done = work.get("steps") if isinstance(work, Mapping) else 0
    return {"total_steps": int(steps_left) + (done if isinstance(done, int) else 0)}


def write_state(state: Mapping[str, Any], file: Path) -> None:
    """Whole, or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as out:
        torch.save(dict(state), out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def read_state(file: Path) -> dict[str, Any]:
    state = read_torch_file(file)
    if not isinstance(state, dict):
        raise ConfigError(f"{file} must hold a worker's state, got {type(state).__name__}: resume without it")
    return state
