"""Contributions on their way in: which parts have arrived, and which worker may send.

The bytes of unfinished contributions are held in a pool of bounded size. Room is granted for a whole contribution or
not at all, so that two half-sent ones can never wait for each other. A worker that finds no room joins a queue
(turns.py). When room is freed, the first in the queue gets it at once, whether or not it asks at this moment: it is
told when it asks, and a worker that has left its request open is told now.

A turn does not last for ever. While others wait, a worker loses its room if it does not come for it, sends nothing, or
sends less than LEAST_BYTES_PER_S. And newcomers have half of the room at most, once a worker that is none has asked:
however many ids a stranger has, those that contribute find room.

A small contribution comes along with its offer (`take_complete`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from msgspec.structs import asdict

from ...digest import Parts, payload_hash
from ...errors import BadRequest, MissingParts
from ...types import (
    Answer,
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    ContributionKey,
    OfContribution,
    Offer,
    OfferAnswer,
    PutPart,
)
from .turns import QUEUE_PATIENCE_S, PlaceInLine, Turns

ROOM_PATIENCE_S = 120.0
"""A worker that has room and neither asks nor sends for this long loses it to those that wait for some."""

TURN_S = 600.0
LEAST_BYTES_PER_S = 2048
"""While others wait, a worker keeps its room for so long, and for as long as its contribution takes at this rate: a
sixth of what a link of 100 kbit/s carries."""

NEWCOMERS_SHARE = 2  # they have one of so many parts of the room


@dataclass
class Upload:
    """One contribution that was offered and granted room."""

    offer: Offer
    part_size_bytes: InitVar[int]
    part_hashes: dict[int, str] = field(default_factory=dict)
    granted_at: float = 0.0
    heard_at: float = 0.0
    is_told: bool = False  # that it has room
    under_way: int = 0  # parts that are being read right now

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
        """The hash over all parts. Refused while some are missing."""
        missing = self.missing
        if missing:
            raise MissingParts(
                f"contribution {self.key} misses {len(missing)} of {self.parts.count} parts: {list(missing[:16])}",
                hint="send them, then commit again",
            )
        return payload_hash([self.part_hashes[i] for i in range(self.parts.count)])


@dataclass(frozen=True)
class HeldRoom:
    """Room that is in use until its bytes are freed."""

    size_bytes: int
    is_newcomer: bool


class Uploads:
    """All unfinished contributions, and the room they take."""

    def __init__(self, *, capacity_bytes: int, part_size_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.part_size_bytes = part_size_bytes
        self.by_key: dict[ContributionKey, Upload] = {}  # parts are taken for these
        self._by_worker: dict[str, dict[ContributionKey, Upload]] = {}  # the same
        self.held_bytes = 0
        self._newcomers_bytes = 0  # of these
        self._held: dict[ContributionKey, HeldRoom] = {}
        self._turns = Turns()
        self._has_regulars = False  # has a worker asked of which something was accepted?
        self._to_ask: list[ContributionKey] = []
        self._looked_at = 0.0  # for turns that have lapsed

    @property
    def queued(self) -> int:
        return self._turns.count

    def is_open(self, key: ContributionKey) -> bool:
        return key in self.by_key or self._turns.find(key) is not None

    def of(self, worker_id: str | None = None, fragment: int | None = None) -> list[Upload]:
        """The uploads of this worker, for this fragment; None = any."""
        uploads = self.by_key if worker_id is None else self._by_worker.get(worker_id, {})
        return [upload for key, upload in uploads.items() if fragment in (None, key.fragment)]

    def request(self, offer: Offer, now: float, *, is_newcomer: bool = False) -> Upload | None:
        """Grant room to this offer. None: there is none, and it has a place in the queue."""
        key = offer.key
        self._has_regulars = self._has_regulars or not is_newcomer
        if not self._turns.count and key not in self.by_key and self._has_room(offer, is_newcomer=is_newcomer):
            granted = self._grant(offer, now, now, is_newcomer=is_newcomer)
            granted.is_told = True
            return granted
        place = self._turns.find(key)
        if place is not None:
            place.asked_at = now
        elif key not in self.by_key:
            self.unqueue(key.worker_id, key.fragment)  # an older sequence of its own is not ahead of it
            self._turns.join(offer, now, is_newcomer=is_newcomer)
        self.call_up(now)
        upload = self.by_key.get(key)
        if upload is not None:
            upload.heard_at, upload.is_told = now, True
            if key in self._to_ask:  # it is answered now
                self._to_ask.remove(key)
        return upload

    def call_up(self, now: float) -> None:
        """Give room to those that wait, in their order, as far as it goes."""
        while (place := self._next(now)) is not None:
            self._turns.leave(place)
            self._grant(place.offer, now, place.asked_at, is_newcomer=place.is_newcomer)
            self._to_ask.append(place.offer.key)

    def take_to_ask(self) -> list[ContributionKey]:
        """Take the keys of those whose turn has come or whose place is lost. They are told to ask again."""
        keys, self._to_ask = self._to_ask, []
        return keys

    def wait_s(self, key: ContributionKey, now: float) -> float:
        """When a worker that waits is to ask again."""
        place = self._turns.find(key)
        assert place is not None
        return self._turns.wait_s(place, now, is_near=self.is_near(key))

    def take_lapsed(self, now: float) -> list[Upload]:
        """Uploads that hold room which others could use: nothing of them arrives, or too little, or their worker does
        not come. Looked for once a second."""
        if not self.queued or now - self._looked_at < 1.0:
            return []
        self._looked_at = now
        return [upload for upload in self.by_key.values() if _has_lapsed(upload, now)]

    def complete(self, key: ContributionKey) -> None:
        """No more parts are taken; its room is held until its bytes are gone."""
        if self.by_key.pop(key, None) is not None:
            of_worker = self._by_worker[key.worker_id]
            del of_worker[key]
            if not of_worker:
                del self._by_worker[key.worker_id]

    def drop(self, key: ContributionKey) -> None:
        """It will never be accepted, or its bytes are gone from memory."""
        self.complete(key)
        held = self._held.pop(key, None)
        if held is not None:
            self.held_bytes -= held.size_bytes
            self._newcomers_bytes -= held.size_bytes * held.is_newcomer

    def waiting(self, fragment: int) -> list[Offer]:
        """The offers in the queue for this fragment, of any worker."""
        return [place.offer for place in self._turns.of(fragment=fragment)]

    def unqueue(self, worker_id: str, fragment: int | None = None) -> None:
        """Take what this worker has in the queue (for this fragment) out of it."""
        for place in self._turns.of(worker_id, fragment):
            self._turns.leave(place)
            self._to_ask.append(place.offer.key)

    def is_near(self, key: ContributionKey) -> bool:
        """Will its turn come as soon as what is being sent now has been freed?"""
        place = self._turns.find(key)
        return place is not None and self._turns.ahead_bytes(place) + place.offer.size_bytes <= self.capacity_bytes

    def _next(self, now: float) -> PlaceInLine | None:
        """The place that gets room now; None = nobody waits, or there is no room for the next one."""
        regular, newcomer = self._first(now, is_newcomer=False), self._first(now, is_newcomer=True)
        if newcomer is not None and self._exceeds_share(newcomer.offer):
            newcomer = None
        first = min(filter(None, (regular, newcomer)), key=lambda place: place.number, default=None)
        return first if first is not None and self._has_room(first.offer, is_newcomer=first.is_newcomer) else None

    def _has_room(self, offer: Offer, *, is_newcomer: bool) -> bool:
        """A contribution larger than the whole pool gets in when it is alone: slow, but not stuck for ever."""
        if is_newcomer and self._exceeds_share(offer):
            return False
        return not self._held or self.held_bytes + offer.size_bytes <= self.capacity_bytes

    def _exceeds_share(self, offer: Offer) -> bool:
        """Would a newcomer's contribution take more than the share of all newcomers?"""
        most_bytes = self.capacity_bytes // NEWCOMERS_SHARE
        return (
            self._has_regulars and self._newcomers_bytes > 0 and self._newcomers_bytes + offer.size_bytes > most_bytes
        )

    def _grant(self, offer: Offer, now: float, asked_at: float, *, is_newcomer: bool) -> Upload:
        key = offer.key
        upload = Upload(offer, self.part_size_bytes, granted_at=now, heard_at=asked_at)
        self.by_key[key] = self._by_worker.setdefault(key.worker_id, {})[key] = upload
        self._held[key] = HeldRoom(offer.size_bytes, is_newcomer)
        self.held_bytes += offer.size_bytes
        self._newcomers_bytes += offer.size_bytes * is_newcomer
        return upload

    def _first(self, now: float, *, is_newcomer: bool) -> PlaceInLine | None:
        """Of those that still ask."""
        while (place := self._turns.first(is_newcomer=is_newcomer)) is not None:
            if now - place.asked_at <= QUEUE_PATIENCE_S:
                return place
            self._turns.leave(place)
            self._to_ask.append(place.offer.key)
        return None


def _has_lapsed(upload: Upload, now: float) -> bool:
    silent_s, since_s = now - upload.heard_at, now - upload.granted_at
    if not upload.is_told:
        return silent_s > QUEUE_PATIENCE_S
    if not upload.under_way and silent_s > ROOM_PATIENCE_S:
        return True
    return since_s > TURN_S + upload.offer.size_bytes / LEAST_BYTES_PER_S


# --- an offer that brings its contribution along --------------------------------------------------------------------


class ThreeInOne(NamedTuple):
    offer: Offer
    part: PutPart
    commit: Commit


def take_apart(message: CompleteOffer) -> ThreeInOne:
    """The offer, its only part, and the commit."""
    if message.section_bytes:
        raise BadRequest(
            f"contribution {message.key} has {message.sections} sections; one that comes with its offer has one part",
            hint="offer it, and let each process send its parts",
        )
    head = {name: getattr(message, name) for name in OfContribution.__struct_fields__}
    return ThreeInOne(
        Offer(**{name: getattr(message, name) for name in Offer.__struct_fields__}),
        PutPart(**head, part=0, hash=message.hash),
        Commit(**head, payload_hash=payload_hash([message.hash])),
    )


def take_complete(
    message: CompleteOffer,
    offer: Callable[[Offer], Answer],
    put: Callable[[PutPart], object],
    commit: Callable[[Commit], CommitAnswer],
) -> CompleteOfferAnswer:
    """An offer, its only part and a commit in one message. Each of the three is decided as if it came alone, so nothing
    new has to be refused, counted or recovered: a repeated one is a duplicate, and one that was cut off resumes where
    it stopped.

    The part is read only where that is worth it: not where there is no room, nor where the run cuts this contribution
    into several. A contribution that was accepted before is compared with what was accepted."""
    alone = take_apart(message)
    answer = offer(alone.offer)
    assert isinstance(answer, OfferAnswer)
    if answer.state == "wait" or (answer.state == "send" and answer.missing not in ((), (0,))):
        return CompleteOfferAnswer(**asdict(answer))
    if answer.missing:
        put(alone.part)
    return CompleteOfferAnswer(state="accepted", version=commit(alone.commit).version)
