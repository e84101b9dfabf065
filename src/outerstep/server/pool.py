"""Memory that the server's tensors lie in, beside that of contributions (outerstep/pool.py)."""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor

from ..pool import Pool, Room, private_memory, watched


class Shelf:
    """Flat fp32 memory that was used, kept for the next who needs some: one piece, the largest."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, numel: int) -> Tensor:
        """What it holds is not specified; gaps between tensors that nobody writes are finite."""
        kept, self._kept = self._kept, None
        if kept is None or kept.numel() < numel:
            kept = torch.frombuffer(private_memory(max(4 * numel, 4)), dtype=torch.float32)
        return kept[:numel]

    def give_back(self, memory: Tensor) -> None:
        whole = memory if memory._base is None else memory._base
        if self._kept is None or self._kept.numel() < whole.numel():
            self._kept = whole


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a tensor that has all its values in a row, as bytes."""
    return memoryview(values.numpy()).cast("B")  # type: ignore[arg-type]  # as in outerstep/pool.py


def return_free_memory() -> None:
    """What was freed stays with the process, for the thread that had it: after the model was copied to where it will
    live, that may be as much as the model. (With the C library of Linux; elsewhere nothing happens.)"""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


__all__ = ["Pool", "Room", "Shelf", "bytes_of", "private_memory", "return_free_memory", "watched"]
