"""Where the bytes of unfinished contributions lie: in memory up to a limit, beyond it in files on disk.

Both are mappings, so that a part is read from its socket straight into its place either way; how much there may be in
all is the coordinator's decision (coordination/uploads.py). A spool file has no name and is gone when nobody uses it
any more, also after a crash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for one contribution."""

    view: memoryview
    on_disk: bool


class Pool:
    def __init__(self, *, memory_bytes: int, spool_bytes: int, spool_dir: str | None = None) -> None:
        self._memory_limit_bytes = memory_bytes
        self._may_spool = spool_bytes > 0
        self._spool_dir = spool_dir or _roomy_folder()
        self._lock = threading.Lock()
        self.memory_bytes = 0
        self.spooled_bytes = 0

    def take(self, size_bytes: int) -> Room:
        """Memory if there is room for it, else a file. Raises OSError if neither is to be had."""
        with self._lock:
            on_disk = self._may_spool and self.memory_bytes + size_bytes > self._memory_limit_bytes
            room = Room(self._spool(size_bytes) if on_disk else private_memory(size_bytes), on_disk)
            self._count(room, size_bytes)
            return room

    def give_back(self, room: Room) -> None:
        """Not needed any more. (The mapping goes when the last reader lets go of it.)"""
        with self._lock:
            self._count(room, -len(room.view))

    def _count(self, room: Room, size_bytes: int) -> None:
        if room.on_disk:
            self.spooled_bytes += size_bytes
        else:
            self.memory_bytes += size_bytes

    def _spool(self, size_bytes: int) -> memoryview:
        with tempfile.TemporaryFile(dir=self._spool_dir, prefix="outerstep-spool-") as file:
            file.truncate(size_bytes)
            if hasattr(os, "posix_fallocate"):
                # Reserve the blocks now: a full disk is an error here, and not a SIGBUS in the middle of a write.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            return memoryview(mmap.mmap(file.fileno(), size_bytes))


class Shelf:
    """Flat fp32 memory that was used, kept for the next who needs some: one piece, the largest."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, numel: int) -> Tensor:
        """What it holds is not specified; gaps between tensors that nobody writes are finite."""
        kept, self._kept = self._kept, None
        if kept is None or kept.numel() < numel:
            kept = torch.frombuffer(private_memory(4 * numel), dtype=torch.float32)
        return kept[:numel]

    def give_back(self, memory: Tensor) -> None:
        whole = memory if memory._base is None else memory._base
        if self._kept is None or self._kept.numel() < whole.numel():
            self._kept = whole


def private_memory(size_bytes: int) -> memoryview:
    """Zeroed memory that goes back to the system when the last reader lets go of it. In large pages where the system
    has them: to get fresh memory page by page takes several times longer than to fill it."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _roomy_folder() -> str:
    """/tmp is often memory itself; /var/tmp is a disk."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()
