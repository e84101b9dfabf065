"""trackio: a local data base (TRACKIO_DIR), or whatever its own variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TrackioWriter:
    def __init__(self, place: Path, run: str, who: str) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "outerstep"), name=f"{who}-{run}", embed=False
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
