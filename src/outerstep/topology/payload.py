"""Frames on their way, in host memory: where they lie, and one that is sent while it is written.

To get fresh memory from the system costs as much as to fill it twice. So memory that is given back is kept for the next
frame; and what lies idle is offered to the system, which takes it when somebody else needs memory, and only then.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ..digest import part_range
from ..wire.frames import TENSOR_ALIGNMENT, Layout

KEPT = 3  # what one exchange needs: its contribution, an update, and a third for a fragment under way meanwhile
SMALL_BYTES = 1 << 20  # not worth keeping
WASTE = 2  # a frame is given at most so many times the memory it needs
NOTHING = torch.empty(0, dtype=torch.uint8)


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

    def recycle(self, frames: Sequence[memoryview], most_bytes: int) -> None:
        """Those up to this size: a whole anchor is not worth keeping memory for, if the next update will be an encoded
        difference."""
        for frame in frames:
            if len(frame) <= most_bytes:
                self.give_back(frame)

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


@dataclass(frozen=True)
class PartReady:
    """A part of the contribution is written."""

    part: int
    hash: str


Listener = Callable[[PartReady | BaseException], None]
"""Called from whichever thread writes; with an error: the rest will never be written."""


class OutgoingFrame:
    """A frame that is written from front to back. A listener hears of every part when it is complete, and of its hash,
    which is computed while the bytes are in the cache.

    `first_part` is the number of its first part, if others send the rest of the contribution; of their parts it only
    knows the hashes. It is kept until the agreement is there: a server that was restarted is sent it again."""

    def __init__(
        self,
        layout: Layout | None,
        part_size_bytes: int,
        first_part: int = 0,
        *,
        memory: Memory,
        pinned: bool = False,
        hashed: bool = True,
    ) -> None:
        """Not `hashed`: nobody will listen for its parts."""
        self._is_hashed = hashed
        self._memory = memory
        self._view = memory.take(layout.size_bytes if layout is not None else 0, pinned=pinned)
        self.data = torch.frombuffer(self._view, dtype=torch.uint8) if self._view else NOTHING
        self._readers = 0
        self._part_size_bytes = part_size_bytes
        self._first_part = first_part
        self._written = 0
        self._hash = xxhash.xxh3_64()
        self._hashes: dict[int, str] = {}
        self._error: BaseException | None = None
        self._listener: Listener | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if layout is not None:
            self._view[: layout.data_begin] = layout.prefix
            for entry in layout.entries:
                end = layout.data_begin + entry.end
                self._view[end : end + -end % TENSOR_ALIGNMENT] = bytes(-end % TENSOR_ALIGNMENT)

    def written(self, end: int) -> None:
        """Everything before byte number `end` is there, for good."""
        size = self._part_size_bytes
        while self._is_hashed and self._written < end:
            part, within = divmod(self._written, size)
            stop = min(self._written + size - within, end)
            self._hash.update(self._view[self._written : stop])
            self._written = stop
            if stop % size == 0 or stop == len(self._view):
                self.tell(self._first_part + part, self._hash.hexdigest())
                self._hash.reset()
        if end == len(self._view):
            self._ended.set()

    def tell(self, part: int, part_hash: str) -> None:
        """This part, of ours or of others, has this hash."""
        with self._lock:
            self._hashes[part] = part_hash
            if self._listener is not None:
                self._listener(PartReady(part, part_hash))

    def give_up(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._ended.set()
            if self._listener is not None:
                self._listener(error)

    def listen(self, listener: Listener) -> None:
        """From now on this one is told, also of what was before; and nobody else."""
        with self._lock:
            self._listener = listener
            for part, part_hash in self._hashes.items():
                listener(PartReady(part, part_hash))
            if self._error is not None:
                listener(self._error)

    def wait(self) -> None:
        """Until all of it is written."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    @property
    def known_hashes(self) -> dict[int, str]:
        """Of ours, and of what others have told of theirs."""
        with self._lock:
            return dict(self._hashes)

    def hashes(self, parts: range) -> tuple[str, ...]:
        return tuple(self._hashes[part] for part in parts)

    def read(self, number: int) -> memoryview:
        """A part, to be sent; say `done_reading` afterwards."""
        with self._lock:
            self._readers += 1
        begin, end = part_range(number - self._first_part, len(self._view), self._part_size_bytes)
        return self._view[begin:end]

    def done_reading(self) -> None:
        with self._lock:
            self._readers -= 1

    def release(self) -> None:
        """It will not be sent any more. If it is still being read (a call that nobody waits for), its memory goes when
        that is over."""
        with self._lock:
            if self._readers == 0:
                self._memory.give_back(self._view)
            self.data, self._view = NOTHING, memoryview(b"")
