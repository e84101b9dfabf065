"""Weights & Biases. Its own variables say where and how (WANDB_MODE=offline, WANDB_PROJECT). A script that has begun a
run of its own gets the numbers there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP = "outerstep/step"


class WandbWriter:
    def __init__(self, place: Path, run: str, who: str) -> None:
        import wandb

        self._run: Any = wandb.run
        self._own = self._run is None
        if self._own:
            place.mkdir(parents=True, exist_ok=True)
            project = os.environ.get("WANDB_PROJECT", "outerstep")
            self._run = wandb.init(project=project, name=who, group=run, dir=str(place))
        self._run.define_metric(STEP)
        self._run.define_metric("outerstep/*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})  # not as its step: a script's own counts otherwise

    def close(self) -> None:
        if self._own:
            self._run.finish()
