"""Where the bytes of contributions lie: in memory up to a limit, beyond it in files on disk.

Both are mappings, so that a part is read from its socket straight into its place either way; how much there may be in
all is decided elsewhere (coordination/server/uploads.py, topology/gossip/node/contributions.py). A spool file has no
name and is gone when nothing uses it any more, also after a crash.

The pages of a file that were touched count as memory of the process until they are let go of; their bytes stay in the
file, and whoever reads them next gets them again. So those that touch a room on disk say how much (`Room.used`), and
once it is LET_GO_BYTES, all of it is let go of: what the files take is the same for any number of contributions.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LET_GO_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for one contribution. `used`: of a file, to be told how many of its bytes were just read or written."""

    view: memoryview
    on_disk: bool
    used: Callable[[int], None] | None = None


@dataclass(frozen=True, eq=False)
class _Mapping:
    memory: memoryview
    on_disk: bool


class Pool:
    """Rooms are used again: fresh memory has to be cleared and mapped page by page, which costs more than to fill it.
    In use and waiting to be used again, mappings never take more than the limits in all, except that one contribution
    which is larger gets in when it is alone (coordination/server/uploads.py)."""

    def __init__(
        self,
        *,
        memory_bytes: int | Callable[[], int],
        spool_bytes: int,
        spool_dir: str | None = None,
        memory: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`memory_bytes`: a function if the limit can change; it is asked each time. `memory`: makes the rooms that
        are not files; None = `private_memory`."""
        self._memory = memory or private_memory
        self._memory_bytes, self._spool_bytes = memory_bytes, spool_bytes
        # /tmp is often memory itself; /var/tmp is a disk.
        self._spool_dir = spool_dir or ("/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir())
        self._lock = threading.Lock()
        self._taken = {False: 0, True: 0}
        self._mapped = {False: 0, True: 0}
        self._idle: list[_Mapping] = []
        self._left: deque[_Mapping] = deque()  # mappings whose last view is gone
        self._files: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._used_bytes = 0  # of them, since they were let go of

    @property
    def memory_bytes(self) -> int:
        """Of rooms that were taken and not given back."""
        return self._taken[False]

    @property
    def spooled_bytes(self) -> int:
        return self._taken[True]

    @property
    def mapped_bytes(self) -> int:
        """Of all the memory that it holds, in use or not."""
        return self._mapped[False]

    def take(self, size_bytes: int) -> Room:
        """Memory if there is room for it, else a file. Raises OSError if neither is to be had."""
        with self._lock:
            while self._left:
                self._idle.append(self._left.popleft())
            found = self._find_idle(size_bytes, on_disk=False)
            on_disk = found is None and self._spool_bytes > 0 and self._make_way(size_bytes, on_disk=False) > 0
            if on_disk:
                found = self._find_idle(size_bytes, on_disk=True)
            self._taken[on_disk] += size_bytes
            if found is None:
                self._make_way(size_bytes, on_disk=on_disk)
                self._mapped[on_disk] += size_bytes
        try:
            mapping = found or _Mapping(self._spool(size_bytes) if on_disk else self._memory(size_bytes), on_disk)
        except BaseException:
            with self._lock:
                self._taken[on_disk] -= size_bytes
                self._mapped[on_disk] -= size_bytes
            raise
        view = watched(mapping.memory[:size_bytes], lambda: self._left.append(mapping))
        return Room(view, on_disk, self._used if on_disk else None)

    def give_back(self, room: Room) -> None:
        """Not needed any more. Its memory is used again when the last view of it is gone."""
        with self._lock:
            self._taken[room.on_disk] -= len(room.view)

    def _limit(self, *, on_disk: bool) -> int:
        if on_disk:
            return self._spool_bytes
        return self._memory_bytes() if callable(self._memory_bytes) else self._memory_bytes

    def _used(self, size_bytes: int) -> None:
        """Of any file. Whoever is in the middle of one meanwhile gets its pages again, from the file."""
        with self._lock:
            self._used_bytes += size_bytes
            if self._used_bytes < LET_GO_BYTES:
                return
            self._used_bytes, files = 0, list(self._files)
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in files:
                file.madvise(mmap.MADV_DONTNEED)

    def _find_idle(self, size_bytes: int, *, on_disk: bool) -> _Mapping | None:
        """The smallest that is large enough, and not so much larger that most of it would be wasted."""
        fitting = [m for m in self._idle if m.on_disk == on_disk and size_bytes <= len(m.memory) <= 2 * size_bytes]
        found = min(fitting, key=lambda mapping: len(mapping.memory), default=None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _make_way(self, size_bytes: int, *, on_disk: bool) -> int:
        """Let idle mappings go, the one that has waited longest first, until a new one fits beside the others. Returns
        how many bytes there are too few all the same."""
        missing = self._mapped[on_disk] + size_bytes - self._limit(on_disk=on_disk)
        for mapping in [mapping for mapping in self._idle if mapping.on_disk == on_disk]:
            if missing <= 0:
                break
            self._idle.remove(mapping)
            self._mapped[on_disk] -= len(mapping.memory)
            missing -= len(mapping.memory)
        return missing

    def _spool(self, size_bytes: int) -> memoryview:
        with tempfile.TemporaryFile(dir=self._spool_dir, prefix="outerstep-spool-") as file:
            file.truncate(size_bytes)
            if hasattr(os, "posix_fallocate"):
                # Reserve the blocks now: a full disk is an error here, and not a SIGBUS in the middle of a write.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            mapping = mmap.mmap(file.fileno(), size_bytes)
        with self._lock:
            self._files.add(mapping)
        return memoryview(mapping)


def watched(memory: memoryview, gone: Callable[[], object]) -> memoryview:
    """A view of `memory`; `gone()` is called, in whatever thread, when it and every slice of it are gone. (A memoryview
    cannot be watched, an array can.)"""
    held = np.frombuffer(memory, dtype=np.uint8)
    weakref.finalize(held, gone).atexit = False
    return memoryview(held)  # type: ignore[arg-type]  # numpy's stubs say that it can from Python 3.12 on


def private_memory(size_bytes: int) -> memoryview:
    """Zeroed memory that goes back to the system when the last reader lets go of it. In large pages where the system
    has them: to get fresh memory page by page takes several times longer than to fill it."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
