"""Where contributions arrive: parts are read from their sockets straight to their places.

Every part is hashed and looked at when it is in: NaN, Inf, absurd values, bytes that mean nothing. What is wrong is
said when the contribution is complete; then there is nothing left to read but its headers, and the blocks across the
borders of parts. Values are looked at by a team of threads, not by the connections' own: each that has worked on
tensors keeps megabytes in its allocator's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..config import ServerConfig
from ..coordination.autoconfig.meter import LinkMeter
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.uploads import Upload
from ..digest import new_part_hash, part_hash
from ..errors import BadRequest, HashMismatch, MissingParts
from ..pool import Pool, Room, private_memory
from ..threads import ThreadTeam
from ..tiling import Cutting
from ..types import THE_SERVER, ContributionKey, PutPart, PutPartAnswer
from ..wire.routes import UnreadBody
from .decoding import Decoder, Findings

PIECE_BYTES = 1 << 20  # of a part that goes to a file

FindDecoder = Callable[[int, Cutting, str], Decoder]
"""(fragment, how it is cut into sections, codec) → how such a contribution is read."""


@dataclass
class _Writing:
    """A part whose bytes are being read from a socket right now."""

    body: UnreadBody
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _IncomingContribution:
    """One contribution on its way in: its room, and what was seen in the parts that are there."""

    making_room: threading.Lock = field(default_factory=threading.Lock)
    room: Room | None = None
    seen: dict[int, Findings] = field(default_factory=dict)


class Intake:
    """The rooms of unfinished contributions. `lock` is the one that guards the coordinator."""

    def __init__(
        self,
        config: ServerConfig,
        coordinator: Coordinator,
        lock: threading.Condition,
        clock: Callable[[], float],
        find_decoder: FindDecoder,
        memory_bytes: Callable[[], int],
        memory: Callable[[int], memoryview] = private_memory,
    ) -> None:
        """`memory_bytes`: for contributions, before they go to the spool file; `memory` makes it."""
        self.pool = Pool(
            memory_bytes=memory_bytes, spool_bytes=config.spool_bytes, spool_dir=config.spool_dir, memory=memory
        )
        self.bytes_received = 0
        self.meter = LinkMeter(THE_SERVER)  # guarded by the lock
        self._coordinator, self._lock, self._clock = coordinator, lock, clock
        self._find_decoder = find_decoder
        self._incoming: dict[ContributionKey, _IncomingContribution] = {}
        self.writing: dict[tuple[ContributionKey, int], _Writing] = {}
        self._lookers = ThreadTeam(config.threads, "outerstep-look")

    def close(self) -> None:
        self._lookers.close()

    def room(self, key: ContributionKey) -> Room:
        room = self._incoming[key].room
        assert room is not None
        return room

    def free(self, key: ContributionKey) -> None:
        """With the lock held. Whoever still has a view of it keeps its memory from being used again."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None and incoming.room is not None:
            self.pool.give_back(incoming.room)

    def conclude(self, upload: Upload) -> Callable[[], float]:
        """With the lock held, all parts being in: what checks the rest, outside of it. That returns ‖Δ‖ or refuses."""
        incoming = self._incoming[upload.key]
        payload, seen = self.room(upload.key).view, [incoming.seen[part] for part in sorted(incoming.seen)]
        cutting = self._coordinator.cutting(upload.offer)
        decoder = self._find_decoder(upload.offer.fragment, cutting, upload.offer.codec)
        return lambda: self._lookers.submit(decoder.check, payload, seen).result()

    def put(self, request: PutPart, body: UnreadBody) -> PutPartAnswer:
        """Read the part to its place. Only one connection at a time writes to a place, and none once the part is in:
        what was hashed is what will be added."""
        while True:
            with self._lock:
                begun = self._coordinator.begin_part(request, self._clock())
                if isinstance(begun, PutPartAnswer):
                    return begun
                begin, end = begun.parts.range(request.part)
                if body.length != end - begin:
                    refusal = BadRequest(f"part {request.part} has {end - begin} bytes, got {body.length}")
                    self._coordinator.turn_away(request.worker_id, [request.fragment], refusal, self._clock())
                    raise refusal
                place = (begun.key, request.part)
                earlier = self.writing.get(place)
                if earlier is None:
                    cutting = self._coordinator.cutting(begun.offer)
                    incoming = self._incoming.setdefault(begun.key, _IncomingContribution())
                    writing = self.writing[place] = _Writing(body)
                    begun.under_way += 1
                    break
            # The sender gave up on an earlier connection and came back on this one.
            earlier.body.abort()
            earlier.done.wait()
        findings: Findings | None = None
        try:
            room = self._room(begun.key, incoming, begun.offer.size_bytes)
            decoder = self._find_decoder(request.fragment, cutting, begun.offer.codec)
            findings = self._read(room, begin, end, request, body, decoder)
        finally:
            with self._lock:
                del self.writing[place]
                writing.done.set()
                begun.under_way, begun.heard_at = begun.under_way - 1, self._clock()
                if findings is not None:
                    self._check_wanted(begun.key, incoming)
                    incoming.seen[request.part] = findings
                    answer = self._coordinator.part_arrived(request, self._clock())
                    self.bytes_received += end - begin
        return answer

    def _room(self, key: ContributionKey, incoming: _IncomingContribution, size_bytes: int) -> Room:
        """The contribution's room, made by the first part. A file may take its time: not under the lock."""
        with incoming.making_room:
            if incoming.room is None:
                room = self.pool.take(size_bytes)
                with self._lock:
                    if self._incoming.get(key) is not incoming:
                        self.pool.give_back(room)
                    self._check_wanted(key, incoming)
                    incoming.room = room
            return incoming.room

    def _read(self, room: Room, begin: int, end: int, request: PutPart, body: UnreadBody, decoder: Decoder) -> Findings:
        """Fill [begin, end) of the payload; its hash must be the one announced. What the blocks inside it hold. (How
        long it takes is what is known of the link.)

        Each of the three in one call for the whole part: every call hands the interpreter over and wants it back, and
        with many connections that costs more than the caches save. Of files only so much is in memory at a time, so
        they are read and hashed in pieces."""
        payload, at_once, found = room.view, PIECE_BYTES if room.used is not None else end - begin, new_part_hash()
        with self.meter.part(request.worker_id, THE_SERVER, end - begin, self._clock, self._lock):
            for first in range(begin, end, at_once):
                piece = payload[first : min(first + at_once, end)]
                body.read_into(piece)
                if room.used is not None:
                    found.update(piece)
                    room.used(len(piece))
        got = part_hash(payload[begin:end]) if room.used is None else found.hexdigest()
        if got != request.hash:
            raise HashMismatch(
                f"part {request.part} of {request.key} arrived as {got}, it was sent as {request.hash}",
                hint="send this part again",
            )
        findings = self._lookers.submit(decoder.look, payload, decoder.blocks_inside(begin, end)).result()
        if room.used is not None:
            room.used(end - begin)
        return findings

    def _check_wanted(self, key: ContributionKey, incoming: _IncomingContribution) -> None:
        if self._incoming.get(key) is not incoming:
            # The upload was dropped meanwhile (its worker left, died, came back): these bytes went nowhere.
            raise MissingParts(f"contribution {key} is not on offer any more", hint="offer it again")
