"""How much one author can have others keep and carry, in bytes: what it says more than that costs it alone.

Every limit is below what the wire takes (a statement 1 MiB, a message 32 MiB), so that nothing a peer makes of what it
was told is too large for the others.

    a statement   a beat has so many bytes for each fragment, a proposal what a block can hold
    a block       MOST_MEMBERS members; the beats of newcomers and the proofs in it by bytes: who finds no room waits
    a proof       its two statements are short. A longer one that contradicts itself counts for nothing, and proves
                  nothing; whoever makes such loses its own turns to propose, no more
    a message     what its author said comes first, then a statement of each other author in turn
    in memory     of each member's statements the newest; those of all strangers together count as one member's
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from ...statements import MOST_PEERS, AnyStatement, Beat, Change, Decision, Offered, Proof, Proposed, Signed

MOST_MEMBERS = MOST_PEERS  # of a run: what a block can hold
MOST_BEAT_BYTES, BEAT_BYTES_PER_FRAGMENT = 4 << 10, 64
MOST_OFFER_BYTES = 4 << 10
MOST_ROUND_BYTES = 288 << 10  # of offers with leased data; without, they are a tenth of that
MOST_APPLIED_BYTES = 128 << 10  # of beats, in a change
MOST_PROVEN_BYTES = MOST_ROUND_BYTES  # of a statement in a proof: who proposes two rounds can always be shown to have
MOST_PROOF_BYTES = 2 * MOST_PROVEN_BYTES  # of proofs, in a change; one fits, whatever it proves
MOST_CHANGE_BYTES = MOST_APPLIED_BYTES + MOST_PROOF_BYTES + (64 << 10)

MOST_PROOF_BYTES_TOLD = 2 << 20  # in a message
MOST_BYTES_TOLD = 8 << 20  # of statements
MOST_DECISION_BYTES = 8 << 20  # of decided blocks, in a message and in memory

KEPT_BYTES, KEPT_BYTES_PER_FRAGMENT = 512 << 10, 8 << 10  # of each member
ENTRY_BYTES = 1 << 10  # what keeping one costs beside its own bytes

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def is_within_bounds(statement: AnyStatement, size_bytes: int, fragments: int) -> bool:
    """Could it be somebody's who means it?"""
    if isinstance(statement, Beat):
        return size_bytes <= MOST_BEAT_BYTES + BEAT_BYTES_PER_FRAGMENT * fragments
    if isinstance(statement, Offered):
        return size_bytes <= MOST_OFFER_BYTES
    if not isinstance(statement, Proposed):
        return True  # all its fields are short
    block = statement.block
    if not isinstance(block, Change):
        return size_bytes <= MOST_ROUND_BYTES
    spare_bytes = BEAT_BYTES_PER_FRAGMENT * fragments
    return (
        size_bytes <= MOST_CHANGE_BYTES + spare_bytes
        and sum(map(size_of, block.applied)) <= MOST_APPLIED_BYTES + spare_bytes
        and sum(map(proof_bytes, block.proofs)) <= MOST_PROOF_BYTES
    )


def size_of(signed: Signed) -> int:
    return len(signed.body)


def proof_bytes(proof: Proof) -> int:
    return len(proof.first.body) + len(proof.second.body)


def is_short(proof: Proof) -> bool:
    return max(len(proof.first.body), len(proof.second.body)) <= MOST_PROVEN_BYTES


def decision_bytes(decision: Decision) -> int:
    return len(msgspec.msgpack.encode(decision))


def those_that_fit(things: Iterable[tuple[T, int]], most_bytes: int, most: int) -> list[T]:
    """Each is given with its size. One that does not fit is passed over."""
    chosen: list[T] = []
    for thing, size_bytes in things:
        if len(chosen) < most and size_bytes <= most_bytes:
            chosen.append(thing)
            most_bytes -= size_bytes
    return chosen


def in_turn(statements: Iterable[Signed], own: str) -> list[Signed]:
    """One's own first; then one of each author, and again: who says much keeps nobody else's from being told."""
    by_author: dict[str, list[Signed]] = defaultdict(list)
    for signed in statements:
        by_author[signed.author].append(signed)
    ordered = by_author.pop(own, [])
    rest = list(by_author.values())
    for i in range(max(map(len, rest), default=0)):
        ordered += [said[i] for said in rest if i < len(said)]
    return ordered


class Shares(Generic[K, V]):
    """Things by owner, the newest so many bytes of each."""

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._things: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        self._bytes: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    def get(self, owner: str, key: K) -> V | None:
        mine = self._things.get(owner)
        found = mine.get(key) if mine is not None else None
        return found[0] if found is not None else None

    def put(self, owner: str, key: K, value: V, size_bytes: int) -> None:
        """What is larger than a share is not kept."""
        cost = size_bytes + ENTRY_BYTES
        if cost > self._share_bytes:
            return
        mine = self._things.setdefault(owner, OrderedDict())
        if key in mine:
            self._bytes[owner] -= mine.pop(key)[1]
        mine[key] = (value, cost)
        self._bytes[owner] = self._bytes.get(owner, 0) + cost
        while self._bytes[owner] > self._share_bytes:
            self._bytes[owner] -= mine.popitem(last=False)[1][1]

    def keep_only(self, owners: set[str]) -> None:
        for owner in self._things.keys() - owners:
            del self._things[owner], self._bytes[owner]
