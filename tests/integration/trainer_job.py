"""A script of examples/ as it is, with a witness: what its weights and its loss were after each optimizer step.

    python trainer_job.py WITNESS DIE_AT SCRIPT ARGUMENTS…

The process kills itself by SIGKILL right after step DIE_AT of its own; 0 = never.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from outerstep.topology.update import anchor_hash
from outerstep.worker import DiLoCoWorker

torch.set_num_threads(1)
witness, die_at, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
workers: list[DiLoCoWorker] = []
steps = 0
start = DiLoCoWorker.start


def remember(worker: DiLoCoWorker) -> DiLoCoWorker:
    workers.append(worker)
    return start(worker)


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Called after the worker's own hook: a round that this step closed has been adopted."""
    global steps
    steps += 1
    params = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    seen = {
        "hash": anchor_hash(params),
        "norm": float(torch.stack([param.norm() for param in params]).norm()),
        "loss": workers[-1].last_loss,
        **{name: workers[-1].sync_metrics[name] for name in ("local_step", "samples", "tokens", "outside_changes")},
    }
    with witness.open("a") as file:
        print(json.dumps(seen), file=file)
    if steps == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


DiLoCoWorker.start = remember  # type: ignore[method-assign]
register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
