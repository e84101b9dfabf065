"""Frames that are served: who has bytes of them in hand, and who is in the middle of fetching one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from ..digest import part_count, part_hash, part_range, payload_hash
from ..errors import BadRequest
from ..types import Agreement, Payload
from ..wire.frames import Layout
from .pool import private_memory, watched

READING_S = 60.0  # who has not asked for a part for this long has stopped reading


class Frame:
    """A frame in memory. Bytes of it are lent to be sent; as long as a lent view or any slice of it lives, `is_lent`,
    and the memory must not change. Who sends needs no lock and tells nobody when it is done."""

    def __init__(self, of: Layout) -> None:
        self.view = private_memory(of.size_bytes)
        self.view[: of.data_begin] = of.prefix
        self._lent: set[object] = set()

    @property
    def is_lent(self) -> bool:
        return bool(self._lent)

    def lend(self, begin: int, end: int) -> memoryview:
        ticket = object()
        self._lent.add(ticket)
        return watched(self.view[begin:end], lambda: self._lent.discard(ticket)).toreadonly()

    def data(self, of: Layout, dtype: torch.dtype) -> Tensor:
        """Everything after the header, flat."""
        if len(self.view) == of.data_begin:  # frombuffer refuses to make nothing
            return torch.empty(0, dtype=dtype)
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


class Served:
    """A frame that workers fetch, and who is in the middle of it. (Under the lock of its downlink.)"""

    def __init__(self, frame: Frame, part_size_bytes: int) -> None:
        self.frame = frame
        self._part_size_bytes = part_size_bytes
        self._readers: dict[str, _Reading] = {}

    @property
    def size_bytes(self) -> int:
        return len(self.frame.view)

    @property
    def part_count(self) -> int:
        return part_count(self.size_bytes, self._part_size_bytes)

    def promised(self, worker_id: str, now: float) -> None:
        """This worker was told to fetch it, and will."""
        self._readers.setdefault(worker_id, _Reading(now)).asked_at = now

    def lend(self, worker_id: str, part: int, now: float) -> memoryview:
        """One part, to be sent."""
        if part >= self.part_count:
            raise BadRequest(f"part {part} is out of range: there are {self.part_count}")
        reading = self._readers.setdefault(worker_id, _Reading(now))
        reading.asked_at = now
        reading.parts.add(part)
        if len(reading.parts) == self.part_count:
            del self._readers[worker_id]  # it has all of it; the last bytes are on their way (`Frame.is_lent`)
        return self.frame.lend(*self._range(part))

    def last_asked_at(self, now: float) -> float | None:
        """When somebody last asked who is still in the middle of it; None = nobody is."""
        gone = [worker for worker, reading in self._readers.items() if now - reading.asked_at >= READING_S]
        for worker in gone:
            del self._readers[worker]
        return max((reading.asked_at for reading in self._readers.values()), default=None)

    def is_read(self, now: float) -> bool:
        return self.frame.is_lent or self.last_asked_at(now) is not None

    def _range(self, part: int) -> tuple[int, int]:
        return part_range(part, self.size_bytes, self._part_size_bytes)


class Published(Served):
    """One version of θ as a whole. The hashes of its parts are made when somebody first asks for it."""

    def __init__(self, agreement: Agreement, frame: Frame, part_size_bytes: int) -> None:
        super().__init__(frame, part_size_bytes)
        self.agreement = agreement
        self.range_hashes: dict[int, tuple[str, ...]] = {}  # by number of sections, as far as asked
        self._hashing = threading.Lock()
        self._part_hashes: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        return self.agreement.version

    def part_hashes(self) -> tuple[str, ...]:
        """Computed once, whoever asks first; the others wait for it. Only while a part of the frame is lent."""
        with self._hashing:
            if not self._part_hashes:
                parts = (self.frame.view[slice(*self._range(part))] for part in range(self.part_count))
                self._part_hashes = tuple(part_hash(part) for part in parts)
            return self._part_hashes

    def payload(self) -> Payload:
        hashes = self.part_hashes()
        return Payload(version=self.version, kind="full", size_bytes=self.size_bytes, hash=payload_hash(hashes))


class Update(Served):
    """The encoded step from the version before, whose anchor has `base_hash`, to `version`."""

    def __init__(
        self, version: int, base_hash: str, frame: Frame, part_hashes: tuple[str, ...], part_size_bytes: int
    ) -> None:
        super().__init__(frame, part_size_bytes)
        self.version, self.base_hash, self.part_hashes = version, base_hash, part_hashes
        self.payload = Payload(
            version=version, kind="update", size_bytes=self.size_bytes, hash=payload_hash(part_hashes)
        )
