"""What a peer has heard and no decided block holds: the contributions that were offered, and the members' beats.

`Offers` knows which of the contributions are here; `Acquaintances`, which peers there are and how long ago each was
last heard. Both are what the next block is made from (blocks.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...statements import Beat, Member, Offered, Round, Signed, statement_of

MOST_KEPT_PER_PEER = 3  # of one fragment: of this round, of the next, and one that is left over
STRANGERS = 64  # whose beats are kept, though they do not belong to the run
FORGOTTEN_AFTER = 4.0  # timeouts of silence
MOST_LEFT = 1024  # former members of whom a number is remembered

Condition = Literal["missing", "good", "bad"]


@dataclass
class HeardOffer:
    signed: Signed
    says: Offered
    heard_at: float
    condition: Condition = "missing"
    tried_at: float = 0.0  # when bytes of it last came


@dataclass
class Offers:
    """By fragment and author, newest last. `sizes`: how many bytes a contribution to each fragment has."""

    sizes: tuple[int, ...]
    _offers: dict[tuple[int, str], list[HeardOffer]] = field(default_factory=dict)
    _conditions: dict[str, Condition] = field(default_factory=dict)  # of digests, also of those nobody offered yet

    def hear(self, signed: Signed, says: Offered, version: int, now: float) -> bool:
        """`version`: the fragment's newest. Is it news?"""
        if says.fragment >= len(self.sizes) or not version < says.version <= version + 2:
            return False
        kept = self._offers.setdefault((says.fragment, signed.author), [])
        if any(offer.signed.body == signed.body for offer in kept):
            return False
        right_size = says.size_bytes == self.sizes[says.fragment]
        condition = self._conditions.get(says.digest, "missing") if right_size else "bad"
        kept.append(HeardOffer(signed, says, now, condition, now))
        kept.sort(key=lambda offer: offer.says.sequence)
        del kept[:-MOST_KEPT_PER_PEER]
        return True

    def hold(self, digest: str, *, good: bool) -> None:
        """Its bytes are here, and can be used, or not."""
        condition: Condition = "good" if good else "bad"
        self._conditions[digest] = condition
        for offer in self:
            if offer.says.digest == digest:
                offer.condition = condition

    def progressed(self, digest: str, now: float) -> None:
        for offer in self:
            if offer.says.digest == digest:
                offer.tried_at = now

    def condition(self, digest: str) -> Condition:
        return self._conditions.get(digest, "missing")

    def of_round(self, fragment: int, version: int, members: Iterable[Member]) -> dict[str, HeardOffer]:
        """The newest of each member, by key."""
        found = {}
        for member in members:
            fitting = [o for o in self._offers.get((fragment, member.key), []) if o.says.version == version]
            if fitting:
                found[member.key] = fitting[-1]
        return found

    def prune(self, versions: tuple[int, ...], keys: set[str], rounds: Iterable[Round]) -> None:
        """Drop what no round can hold any more. `rounds`: decided ones whose contributions may still be needed."""
        for (fragment, key), kept in list(self._offers.items()):
            kept[:] = [o for o in kept if o.says.version > versions[fragment]]
            if not kept or key not in keys:
                del self._offers[fragment, key]
        alive = {offer.says.digest for offer in self} | {d for r in rounds for d in digests_of(r)}
        self._conditions = {d: c for d, c in self._conditions.items() if d in alive}

    def __iter__(self) -> Iterator[HeardOffer]:
        for kept in self._offers.values():
            yield from kept

    def statements(self) -> list[Signed]:
        return [offer.signed for offer in self]


def digests_of(block: Round) -> list[str]:
    """Of its contributions. (The peers that decided on it have read them.)"""
    return [says.digest for says in offered_in(block)]


def offered_in(block: Round) -> list[Offered]:
    return [says for _, says in signed_in(block)]


def signed_in(block: Round) -> list[tuple[Signed, Offered]]:
    read = [(signed, statement_of(signed.body)) for signed in block.offers]
    return [(signed, says) for signed, says in read if isinstance(says, Offered)]


@dataclass(frozen=True)
class Acquaintance:
    signed: Signed
    beat: Beat
    heard_at: float  # whether from itself or through others
    since: float  # when it was first heard

    @property
    def age(self) -> tuple[int, int]:
        return self.beat.incarnation, self.beat.number


class Acquaintances:
    """By key. Everybody is given time from when it became a member, or from when this peer began to listen.

    *Strangers*, who do not belong to the run, are known if they want to, and forgotten when they have been silent for
    long enough; those who have left are strangers. Of a silent stranger nobody is told: else two peers would remind
    each other of it for ever. Of a peer that has left, the number of its last beat is remembered, so that nobody can
    bring it back with what it said before."""

    def __init__(self, members: Iterable[Member], now: float, timeout_s: float) -> None:
        """`timeout_s`: of silence, until a stranger counts for nothing."""
        self._known: dict[str, Acquaintance] = {}
        self._began_at = self._now = now
        self._timeout_s = timeout_s
        self._member_since = {member.key: now for member in members}
        self._left: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def greet(self, signed: Signed, beat: Beat, now: float) -> None:
        self._now, key = now, signed.author
        before = self._known.get(key)
        if self.is_outdated(key, beat):
            return
        if before is None and key not in self._member_since and not self._has_room_for(beat):
            return
        self._known[key] = Acquaintance(signed, beat, now, now if before is None else before.since)

    def is_outdated(self, key: str, beat: Beat) -> bool:
        """Was one as new as this heard before?"""
        known = self._known.get(key)
        newest = known.age if known is not None else self._left.get(key)
        return newest is not None and (beat.incarnation, beat.number) <= newest

    def has_changed_its_mind(self, key: str, beat: Beat) -> bool:
        """Has it said since then that it does not want to belong?"""
        known = self._known.get(key)
        if known is not None:
            return known.age > (beat.incarnation, beat.number) and known.beat.wants != "belong"
        return self.is_outdated(key, beat)

    def _has_room_for(self, beat: Beat) -> bool:
        if beat.wants != "belong":
            return False
        strangers = [key for key in self._known if key not in self._member_since]
        if len(strangers) < STRANGERS:
            return True
        longest = min(strangers, key=lambda key: self._known[key].heard_at)
        if self._is_fresh(longest):
            return False
        self._forget(longest)
        return True

    def _is_fresh(self, key: str) -> bool:
        return self._now - self._known[key].heard_at <= self._timeout_s

    def _forget(self, key: str) -> None:
        known = self._known.pop(key)
        if key in self._left:
            self._left[key] = known.age

    def forget(self, now: float) -> None:
        """Strangers that have been silent for long."""
        self._now = now
        for key, known in list(self._known.items()):
            if key not in self._member_since and now - known.heard_at > FORGOTTEN_AFTER * self._timeout_s:
                self._forget(key)

    def changed(self, members: Iterable[Member], now: float) -> None:
        """These are the members from now on."""
        before = self._member_since
        self._member_since = {member.key: before.get(member.key, now) for member in members}
        for key in before.keys() - self._member_since.keys():
            self._left.pop(key, None)
            self._left[key] = self._known[key].age if key in self._known else (0, 0)
        while len(self._left) > MOST_LEFT:
            self._left.popitem(last=False)

    def silent_s(self, key: str, now: float) -> float:
        known = self._known.get(key)
        since = known.heard_at if known is not None else self._began_at
        return now - max(since, self._member_since.get(key, self._began_at))

    def get(self, key: str) -> Acquaintance | None:
        return self._known.get(key)

    def items(self) -> ItemsView[str, Acquaintance]:
        return self._known.items()

    def statements(self) -> list[Signed]:
        """Of the members, and of strangers that are there."""
        return [known.signed for key, known in self._known.items() if key in self._member_since or self._is_fresh(key)]
