"""Host memory for frames on their way.

To get fresh memory from the system costs as much as to fill it twice. So what is given back is kept for the next frame;
and what lies idle is offered to the system, which takes it when somebody else needs memory, and only then.
"""

from __future__ import annotations

import mmap
import sys
import threading
from dataclasses import dataclass

import torch

KEPT = 3  # what one exchange needs: its contribution, an update, and a third for a fragment under way meanwhile
SMALL_BYTES = 1 << 20  # not worth keeping
WASTE = 2  # a frame is given at most so many times the memory it needs


@dataclass
class Spare:
    memory: mmap.mmap
    unused_for: int = 0  # calls of `rest`


class Memory:
    """`keep`: so many pieces at most that nobody uses. Thread-safe."""

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._spare: list[Spare] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int, *, pinned: bool = False) -> memoryview:
        """What it holds is not specified. `pinned` if a GPU is to read or write it; of that torch keeps a stock."""
        if pinned or size_bytes < SMALL_BYTES or sys.platform != "linux":
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).numpy().data
        with self._lock:
            fits = [one for one in self._spare if size_bytes <= len(one.memory) <= WASTE * size_bytes]
            found = min(fits, key=lambda one: len(one.memory), default=None)
            if found is not None:
                self._spare.remove(found)
        if found is not None:
            return memoryview(found.memory)[:size_bytes]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return memoryview(mmap.mmap(-1, size_bytes, flags=flags))

    def give_back(self, taken: memoryview) -> None:
        """Nobody reads or writes it any more."""
        if isinstance(taken.obj, mmap.mmap):
            with self._lock:
                self._spare.append(Spare(taken.obj))
                del self._spare[: -self._keep or None]

    def rest(self) -> None:
        """To be called now and then: what was not used since the last time may go to somebody else."""
        with self._lock:
            for one in self._spare:
                if one.unused_for == 1:
                    one.memory.madvise(mmap.MADV_FREE)
                one.unused_for += 1


class Rooms:
    """The same as tensors of bytes, on a device: host memory from `memory`, a GPU's from torch. `pinned`: a GPU is to
    read or write the former."""

    def __init__(self, device: torch.device, memory: Memory, *, pinned: bool = False) -> None:
        self.device, self.memory, self.pinned = device, memory, pinned
        self._taken: dict[int, memoryview] = {}  # by its address

    def take(self, size_bytes: int) -> torch.Tensor:
        """Not specified; `give_back` when nobody reads it any more."""
        if self.device.type != "cpu" or size_bytes == 0:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        view = self.memory.take(size_bytes, pinned=self.pinned)
        data = torch.frombuffer(view, dtype=torch.uint8)
        self._taken[data.data_ptr()] = view
        return data

    def give_back(self, data: torch.Tensor) -> None:
        view = self._taken.pop(data.data_ptr(), None) if data.numel() else None
        if view is not None:
            self.memory.give_back(view)
