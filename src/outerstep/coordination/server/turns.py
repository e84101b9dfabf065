"""The queue of workers that wait for room: whose turn is next, and when to ask again.

A worker that finds no room takes a *place*, and keeps it by asking again, or by leaving its request open. Nobody
overtakes, with one exception: newcomers, workers that have had nothing accepted yet, may together hold so much room and
no more (uploads.py). A newcomer that waits for other newcomers delays nobody else. So a stranger with a thousand ids
cannot take all turns from the workers that a run has.

A worker is told when to ask again by how fast the queue has moved since it began: so many bytes are ahead of its place,
so many have left the queue per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...types import ContributionKey, Offer

QUEUE_PATIENCE_S = 60.0
"""A worker that does not ask again for this long loses its place in the queue, or the turn that came meanwhile."""

ASK_AGAIN_S = 0.5
ASK_AGAIN_SOON_S = 0.1  # by then there is room, or the worker has contributed to the round that wants it
LONGEST_WAIT_S = 5.0  # to be told at once: the queue may move faster than it did
EARLY = 0.8  # of the time that it should take


@dataclass
class PlaceInLine:
    """`before_bytes`: everything that had joined the queue before this one did, including what has left it since."""

    offer: Offer
    is_newcomer: bool
    asked_at: float
    before_bytes: int
    number: int = 0


@dataclass
class Turns:
    """The places, in the order of arrival. `count`: how many there are."""

    count: int = 0
    _lines: dict[bool, dict[tuple[str, int], PlaceInLine]] = field(default_factory=lambda: {False: {}, True: {}})
    _began_at: float = 0.0  # when the queue was last empty
    _came_bytes: int = 0  # since then
    _gone_bytes: int = 0
    _number: int = 0

    def find(self, key: ContributionKey) -> PlaceInLine | None:
        for line in self._lines.values():
            place = line.get((key.worker_id, key.fragment))
            if place is not None and place.offer.sequence == key.sequence:
                return place
        return None

    def of(self, worker_id: str | None = None, fragment: int | None = None) -> list[PlaceInLine]:
        """The places of this worker, for this fragment. None = any."""
        if worker_id is not None and fragment is not None:
            found = (line.get((worker_id, fragment)) for line in self._lines.values())
            return [place for place in found if place is not None]
        return [
            place
            for line in self._lines.values()
            for (worker, of_fragment), place in line.items()
            if worker_id in (None, worker) and fragment in (None, of_fragment)
        ]

    def join(self, offer: Offer, now: float, *, is_newcomer: bool) -> None:
        if not self.count:
            self._began_at, self._came_bytes, self._gone_bytes = now, 0, 0
        self.count += 1
        self._number += 1
        place = PlaceInLine(offer, is_newcomer, now, self._came_bytes, self._number)
        self._lines[is_newcomer][offer.worker_id, offer.fragment] = place
        self._came_bytes += offer.size_bytes

    def leave(self, place: PlaceInLine) -> None:
        del self._lines[place.is_newcomer][place.offer.worker_id, place.offer.fragment]
        self.count -= 1
        self._gone_bytes += place.offer.size_bytes

    def first(self, *, is_newcomer: bool) -> PlaceInLine | None:
        return next(iter(self._lines[is_newcomer].values()), None)

    def ahead_bytes(self, place: PlaceInLine) -> int:
        """What is still ahead of it. (If some behind it have left, this is an estimate, and too small.)"""
        return max(place.before_bytes - self._gone_bytes, 0)

    def wait_s(self, place: PlaceInLine, now: float, *, is_near: bool) -> float:
        """When to ask again. `is_near`: its turn comes as soon as what is being sent now has been freed."""
        if not self._gone_bytes or now <= self._began_at:
            return ASK_AGAIN_SOON_S if is_near else ASK_AGAIN_S
        per_s = self._gone_bytes / (now - self._began_at)
        expected_s = EARLY * (self.ahead_bytes(place) + place.offer.size_bytes) / per_s
        return min(max(expected_s, ASK_AGAIN_SOON_S), LONGEST_WAIT_S)
