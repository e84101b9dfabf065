"""Contributions on their way in: which parts have arrived, and which worker may send.

The bytes of unfinished contributions live in a pool of bounded size. Room is granted for a whole contribution or not at
all, so that two half-sent ones can never wait for each other. A worker that finds no room stands in a queue and keeps
its place by asking again. Nobody overtakes: a worker is let in only if there is room for it *and* for all that stand
before it. (Not only the first one: it may take half a second to ask again, and hundreds may stand behind it.)
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from itertools import takewhile

from ...digest import Parts, payload_hash
from ...errors import BadRequest, MissingParts
from ...types import ContributionKey, Offer

QUEUE_PATIENCE_S = 60.0
"""A worker that does not ask again for this long loses its place in the queue."""

ROOM_PATIENCE_S = 120.0
"""A worker that has room and neither asks nor sends for this long loses it to those that wait for some."""


@dataclass
class Upload:
    """One contribution that was offered and granted room."""

    offer: Offer
    part_size_bytes: InitVar[int]
    part_hashes: dict[int, str] = field(default_factory=dict)
    heard_at: float = 0.0
    under_way: int = 0  # parts that are being read right now, however long that takes

    def __post_init__(self, part_size_bytes: int) -> None:
        self.key, self.sections = self.offer.key, self.offer.sections
        self.parts = Parts(self.offer.section_bytes or (self.offer.size_bytes,), part_size_bytes)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.parts.count) if i not in self.part_hashes)

    def check_part(self, part: int) -> None:
        if part >= self.parts.count:
            raise BadRequest(f"part {part} is out of range: contribution {self.key} has {self.parts.count} parts")

    def payload_hash(self) -> str:
        """Over all parts; refuses while some are missing."""
        missing = self.missing
        if missing:
            raise MissingParts(
                f"contribution {self.key} misses {len(missing)} of {self.parts.count} parts: {list(missing[:16])}",
                hint="send them, then commit again",
            )
        return payload_hash([self.part_hashes[i] for i in range(self.parts.count)])


@dataclass
class Waiting:
    """A place in the queue, as large as what is to come, and when its holder last asked."""

    size_bytes: int
    asked_at: float


class Uploads:
    """All unfinished contributions, and the room they take."""

    def __init__(self, *, capacity_bytes: int, part_size_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.part_size_bytes = part_size_bytes
        self.by_key: dict[ContributionKey, Upload] = {}  # parts are taken for these
        self._held: dict[ContributionKey, int] = {}  # bytes of room per key, until the bytes are freed
        self._queue: dict[ContributionKey, Waiting] = {}  # a dict keeps the order of arrival

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @property
    def queued(self) -> int:
        return len(self._queue)

    def is_open(self, key: ContributionKey) -> bool:
        return key in self.by_key or key in self._queue

    def of(self, worker_id: str | None = None, fragment: int | None = None) -> list[Upload]:
        """Those of this worker, for this fragment. None = of any."""
        return [
            upload
            for key, upload in self.by_key.items()
            if worker_id in (None, key.worker_id) and fragment in (None, key.fragment)
        ]

    def request(self, offer: Offer, now: float) -> Upload | None:
        """Room for this offer, or None: it stands in the queue."""
        key, ahead_bytes = offer.key, 0
        if self._queue:
            for other, waiting in list(self._queue.items()):
                if now - waiting.asked_at > QUEUE_PATIENCE_S:
                    del self._queue[other]
            if key not in self._queue:
                self.unqueue(key.worker_id, key.fragment)  # an older sequence of its own does not stand before it
            ahead_bytes = self._ahead_bytes(key)
        # A contribution larger than the whole pool gets in when it is alone: slow, but not stuck for ever.
        is_alone = not self._held and not ahead_bytes
        if not is_alone and self.held_bytes + ahead_bytes + offer.size_bytes > self.capacity_bytes:
            self._queue[key] = Waiting(offer.size_bytes, now)
            return None
        self._queue.pop(key, None)
        upload = Upload(offer, self.part_size_bytes, heard_at=now)
        self.by_key[key] = upload
        self._held[key] = offer.size_bytes
        return upload

    def standing_still(self, now: float) -> list[Upload]:
        """Uploads that hold room which others could use, and of which nothing arrives."""
        return [u for u in self.by_key.values() if not u.under_way and now - u.heard_at > ROOM_PATIENCE_S]

    def drop(self, key: ContributionKey) -> None:
        """It will never be accepted, or its bytes are gone from memory."""
        self.by_key.pop(key, None)
        self._held.pop(key, None)

    def unqueue(self, worker_id: str, fragment: int | None = None) -> None:
        """Nothing of this worker (for this fragment) waits any more."""
        for key in [k for k in self._queue if k.worker_id == worker_id and fragment in (None, k.fragment)]:
            del self._queue[key]

    def is_near(self, key: ContributionKey) -> bool:
        """Will its turn come as soon as what is being sent now has gone?"""
        waiting = self._queue.get(key)
        return waiting is not None and self._ahead_bytes(key) + waiting.size_bytes <= self.capacity_bytes

    def _ahead_bytes(self, key: ContributionKey) -> int:
        """The room that those before it in the queue will need."""
        ahead = takewhile(lambda item: item[0] != key, self._queue.items())
        return sum(waiting.size_bytes for _, waiting in ahead)
