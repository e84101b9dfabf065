"""The bytes of contributions, one's own and others', by digest.

They lie in a pool: in memory up to a limit, beyond it in a spool file (outerstep/pool.py). How many there are is
bounded by what the state machine asks for: of each member and fragment the contributions to the open round, which are
at most three, and those of the last two decided ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ....digest import part_count, part_digest, part_range
from ....pool import Pool, Room
from ....wire.peers import Parts

HASHING_THREADS = 4
SPOOL_BYTES = 1 << 50  # as large as the disk


@dataclass(eq=False)
class Held:
    """A payload, whole. `is_good`: it can be used, as far as that was looked at."""

    parts: Parts
    data: memoryview
    is_good: bool = True

    def part(self, index: int) -> tuple[str, memoryview]:
        begin, end = part_range(index, self.parts.size_bytes, self.parts.part_size_bytes)
        return self.parts.digests[index], self.data[begin:end]


@dataclass(eq=False)
class Arrival:
    """A payload on its way in: which parts are still missing."""

    room: Room
    parts: Parts
    missing: list[int] = field(default_factory=list)

    def view(self, index: int) -> memoryview:
        begin, end = part_range(index, self.parts.size_bytes, self.parts.part_size_bytes)
        return self.room.view[begin:end]


class Holdings:
    def __init__(self, memory_bytes: int) -> None:
        self._pool = Pool(memory_bytes=memory_bytes, spool_bytes=SPOOL_BYTES)
        self._lock = threading.Lock()
        self._held: dict[str, tuple[Held, Room]] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._pinned: dict[str, int] = {}

    @property
    def memory_bytes(self) -> int:
        return self._pool.memory_bytes

    @property
    def spooled_bytes(self) -> int:
        return self._pool.spooled_bytes

    def get(self, digest: str) -> Held | None:
        with self._lock:
            found = self._held.get(digest)
        return found[0] if found is not None else None

    def put(self, about: str, data: memoryview, part_size_bytes: int) -> str:
        """A copy of one's own, under the digest that is returned. It stays until it is let go (`unpin`)."""
        room = self._pool.take(len(data))
        room.view[:] = data
        parts = cut(room.view, part_size_bytes)
        digest = parts.digest(about)
        with self._lock:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1
            if digest in self._held:
                self._pool.give_back(room)
            else:
                self._held[digest] = (Held(parts, room.view), room)
        return digest

    def unpin(self, digest: str) -> None:
        with self._lock:
            self._pinned[digest] -= 1
            if not self._pinned[digest]:
                del self._pinned[digest]

    # --- those of others --------------------------------------------------------------------------------------------

    def arrival(self, digest: str) -> Arrival | None:
        """What has come so far: who goes on with it needs only the rest."""
        with self._lock:
            return self._arrivals.get(digest)

    def expect(self, digest: str, parts: Parts) -> Arrival:
        """Raises OSError if there is no room in memory or on the disk."""
        room = self._pool.take(parts.size_bytes)
        arrival = Arrival(room, parts, list(range(len(parts.digests))))
        with self._lock:
            return self._arrivals.setdefault(digest, arrival)

    def arrived(self, digest: str) -> Held | None:
        """All of it; None: it has been given up meanwhile."""
        with self._lock:
            arrival = self._arrivals.pop(digest, None)
            if arrival is None:
                return None
            held = Held(arrival.parts, arrival.room.view)
            self._held[digest] = (held, arrival.room)
            return held

    def keep_only(self, needed: Iterable[str]) -> None:
        """Whoever still has a view of another keeps its memory from being used again."""
        keep = set(needed)
        with self._lock:
            keep |= self._pinned.keys()
            rooms = [self._held.pop(d)[1] for d in list(self._held) if d not in keep]
            rooms += [self._arrivals.pop(d).room for d in list(self._arrivals) if d not in keep]
        for room in rooms:
            self._pool.give_back(room)


def cut(data: memoryview, part_size_bytes: int) -> Parts:
    """The digests of its parts, by as many threads as there are parts, up to a few."""
    size = len(data)
    places = [part_range(i, size, part_size_bytes) for i in range(part_count(size, part_size_bytes))]
    if len(places) == 1:
        digests = [part_digest(data)]
    else:
        with ThreadPoolExecutor(min(HASHING_THREADS, len(places)), thread_name_prefix="outerstep-hash") as hashing:
            digests = list(hashing.map(lambda place: part_digest(data[place[0] : place[1]]), places))
    return Parts(size_bytes=size, part_size_bytes=part_size_bytes, digests=tuple(d.hex() for d in digests))


__all__ = ["Arrival", "Held", "Holdings", "cut"]
