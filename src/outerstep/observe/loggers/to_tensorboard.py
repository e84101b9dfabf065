"""TensorBoard: event files in FOLDER/tensorboard/WHO."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoardWriter:
    def __init__(self, place: Path, run: str, who: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(place / "tensorboard" / who))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
