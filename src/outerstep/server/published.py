"""Frames that are served: who has bytes of them in hand, and who is in the middle of fetching one."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..digest import part_count, part_hash, part_range, payload_hash
from ..types import Agreement, Payload
from ..wire.frames import Layout
from .pool import private_memory

READING_S = 60.0  # who has not asked for a part for this long has stopped reading


class Frame:
    """A frame in memory. Bytes of it are lent to be sent; as long as a lent view or any slice of it lives, `is_lent`,
    and the memory must not change. Who sends needs no lock and tells nobody when it is done."""

    def __init__(self, of: Layout) -> None:
        self.view = private_memory(of.size_bytes)
        self.view[: of.data_begin] = of.prefix
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def is_lent(self) -> bool:
        return bool(self._lent)

    def lend(self, begin: int, end: int) -> memoryview:
        held = np.frombuffer(self.view[begin:end], dtype=np.uint8)  # a memoryview cannot be watched, an array can
        key = id(held)
        self._lent[key] = weakref.ref(held, lambda _: self._lent.pop(key, None))
        return memoryview(held).toreadonly()  # type: ignore[arg-type]  # numpy's stubs say so from Python 3.12 on

    def data(self, of: Layout, dtype: torch.dtype) -> Tensor:
        """Everything after the header, flat."""
        return torch.frombuffer(self.view, dtype=dtype, offset=of.data_begin)


class PartHasher:
    """The hashes of a frame's parts, taken while its bytes are written: each while it is in the cache."""

    def __init__(self, frame: memoryview, part_size_bytes: int) -> None:
        self._frame, self._part_size_bytes = frame, part_size_bytes
        self._done = 0
        self._state = xxhash.xxh3_64()
        self.hashes: list[str] = []

    def advance(self, to: int) -> None:
        """The bytes before `to` are final."""
        while self._done < to:
            border = (self._done // self._part_size_bytes + 1) * self._part_size_bytes
            end = min(to, border)
            self._state.update(self._frame[self._done : end])
            self._done = end
            if end in (border, len(self._frame)):
                self.hashes.append(self._state.hexdigest())
                self._state.reset()


@dataclass
class _Reading:
    """One worker that fetches a frame part by part."""

    asked_at: float
    parts: set[int] = field(default_factory=set)


class Published:
    """One version of θ as a whole. The hashes of its parts are made when somebody first asks for it."""

    def __init__(self, agreement: Agreement, frame: Frame, part_size_bytes: int) -> None:
        self.agreement = agreement
        self.frame = frame
        self.range_hashes: dict[int, tuple[str, ...]] = {}  # by number of sections, as far as asked
        self._part_size_bytes = part_size_bytes
        self._hashing = threading.Lock()
        self._part_hashes: tuple[str, ...] = ()
        self._readers: dict[str, _Reading] = {}

    @property
    def version(self) -> int:
        return self.agreement.version

    @property
    def size_bytes(self) -> int:
        return len(self.frame.view)

    @property
    def part_count(self) -> int:
        return part_count(self.size_bytes, self._part_size_bytes)

    def part_hashes(self) -> tuple[str, ...]:
        """Computed once, whoever asks first; the others wait for it. Only while a part of the frame is lent."""
        with self._hashing:
            if not self._part_hashes:
                self._part_hashes = tuple(
                    part_hash(self.frame.view[slice(*self.range(i))]) for i in range(self.part_count)
                )
            return self._part_hashes

    def payload(self) -> Payload:
        hashes = self.part_hashes()
        return Payload(version=self.version, kind="full", size_bytes=self.size_bytes, hash=payload_hash(hashes))

    def range(self, part: int) -> tuple[int, int]:
        return part_range(part, self.size_bytes, self._part_size_bytes)

    # --- who reads it (under the lock of its downlink) ------------------------------------------------------------

    def promised(self, worker_id: str, now: float) -> None:
        """This worker was told to fetch it, and will."""
        self._readers.setdefault(worker_id, _Reading(now)).asked_at = now

    def asked(self, worker_id: str, part: int, now: float) -> None:
        reading = self._readers.setdefault(worker_id, _Reading(now))
        reading.asked_at = now
        reading.parts.add(part)
        if len(reading.parts) == self.part_count:
            del self._readers[worker_id]  # it has all of it; the last bytes are on their way (`Frame.is_lent`)

    def last_asked_at(self, now: float) -> float | None:
        """When somebody last asked who is still in the middle of it; None = nobody is."""
        gone = [worker for worker, reading in self._readers.items() if now - reading.asked_at >= READING_S]
        for worker in gone:
            del self._readers[worker]
        return max((reading.asked_at for reading in self._readers.values()), default=None)

    def is_read(self, now: float) -> bool:
        return self.frame.is_lent or self.last_asked_at(now) is not None
