"""What a peer has heard and no decided block holds: the contributions that were offered, and the members' beats.

`Offers` knows which of the contributions are here; `Acquaintances`, which peers there are and how long ago each was
last heard. Both are what the next block is made from (blocks.py).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...statements import Beat, Member, Offered, Round, Signed, statement_of

MOST_KEPT_PER_PEER = 3  # of one fragment: of this round, of the next, and one that is left over
STRANGERS = 64  # whose beats are kept, though they do not belong to the run

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


class Acquaintances:
    """By key. Everybody is given time from when it became a member, or from when this peer began to listen."""

    def __init__(self, members: Iterable[Member], now: float) -> None:
        self._known: dict[str, Acquaintance] = {}
        self._began_at = now
        self._member_since = {member.key: now for member in members}

    def greet(self, signed: Signed, beat: Beat, now: float) -> None:
        before = self._known.get(signed.author)
        if before is None:
            is_stranger = signed.author not in self._member_since
            if is_stranger and sum(key not in self._member_since for key in self._known) >= STRANGERS:
                return
        elif (beat.incarnation, beat.number) <= (before.beat.incarnation, before.beat.number):
            return
        self._known[signed.author] = Acquaintance(signed, beat, now)

    def changed(self, members: Iterable[Member], now: float) -> None:
        """These are the members from now on."""
        self._member_since = {member.key: self._member_since.get(member.key, now) for member in members}

    def silent_s(self, key: str, now: float) -> float:
        known = self._known.get(key)
        since = known.heard_at if known is not None else self._began_at
        return now - max(since, self._member_since.get(key, self._began_at))

    def get(self, key: str) -> Acquaintance | None:
        return self._known.get(key)

    def items(self) -> ItemsView[str, Acquaintance]:
        return self._known.items()

    def statements(self) -> list[Signed]:
        return [known.signed for known in self._known.values()]
