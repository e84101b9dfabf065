"""Where contributions arrive: parts are read from their sockets straight to their places, and the whole is checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..config import ServerConfig
from ..coordination.coordinator import Coordinator
from ..digest import part_hash
from ..errors import BadRequest, HashMismatch, MissingParts
from ..types import ContributionKey, PutPart, PutPartAnswer
from ..wire.service import Body
from .pool import Pool, Room
from .store import FragmentStore


@dataclass
class _Writing:
    """A part whose bytes are being read from a socket right now."""

    body: Body
    done: threading.Event = field(default_factory=threading.Event)


class Intake:
    """The rooms of unfinished contributions. `lock` is the one that guards the coordinator."""

    def __init__(
        self,
        config: ServerConfig,
        coordinator: Coordinator,
        lock: threading.Condition,
        clock: Callable[[], float],
    ) -> None:
        self.pool = Pool(memory_bytes=config.pool_bytes, spool_bytes=config.spool_bytes, spool_dir=config.spool_dir)
        self.bytes_received = 0
        self._coordinator, self._lock, self._clock = coordinator, lock, clock
        self._rooms: dict[ContributionKey, Room] = {}
        self.writing: dict[tuple[ContributionKey, int], _Writing] = {}
        # Not in the connections' own threads: each that has worked on tensors keeps megabytes in its allocator's cache.
        self._checkers = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="outerstep-check")

    def payload(self, key: ContributionKey) -> memoryview:
        return self._rooms[key].view

    def free(self, key: ContributionKey) -> None:
        """With the lock held."""
        room = self._rooms.pop(key, None)
        if room is not None:
            self.pool.give_back(room)

    def check(self, store: FragmentStore, payload: memoryview, sections: int) -> float:
        """‖Δ‖ of a whole contribution; a Refused if it is not fit to be added."""
        return self._checkers.submit(store.check, payload, sections).result()

    def close(self) -> None:
        self._checkers.shutdown()

    def put(self, request: PutPart, body: Body) -> PutPartAnswer:
        """Read the part to its place. Only one connection at a time writes to a place, and none once the part is in:
        what was hashed is what will be added."""
        place = (request.key, request.part)
        while True:
            with self._lock:
                begun = self._coordinator.begin_part(request, self._clock())
                if isinstance(begun, PutPartAnswer):
                    return begun
                begin, end = begun.parts.range(request.part)
                if body.length != end - begin:
                    raise BadRequest(f"part {request.part} has {end - begin} bytes, got {body.length}")
                earlier = self.writing.get(place)
                if earlier is None:
                    room = self._rooms.get(request.key)
                    if room is None:
                        room = self._rooms[request.key] = self.pool.take(begun.offer.size_bytes)
                    writing = self.writing[place] = _Writing(body)
                    break
            # The sender gave up on an earlier connection and came back on this one.
            earlier.body.abort()
            earlier.done.wait()
        stored = False
        try:
            body.read_into(room.view[begin:end])
            got = part_hash(room.view[begin:end])
            if got != request.hash:
                raise HashMismatch(
                    f"part {request.part} of {request.key} arrived as {got}, it was sent as {request.hash}",
                    hint="send this part again",
                )
            stored = True
        finally:
            with self._lock:
                del self.writing[place]
                writing.done.set()
                if stored and self._rooms.get(request.key) is not room:
                    # The upload was dropped meanwhile (its worker left, died, came back): these bytes went nowhere.
                    raise MissingParts(f"contribution {request.key} is not on offer any more", hint="offer it again")
                if stored:
                    answer = self._coordinator.part_arrived(request, self._clock())
                    self.bytes_received += end - begin
        return answer
