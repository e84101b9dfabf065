"""What no honest peer says, and no peer may stop for: bytes that are no statement, and statements that cannot be meant.

Some of it is signed, some is not. None of it contradicts what the liar says otherwise under a key: that would expel it,
and end its other lies too early to see what comes of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from ..statements import (
    AnyStatement,
    Beat,
    Block,
    ChainState,
    Change,
    Decision,
    Member,
    Offered,
    Proof,
    Round,
    Signed,
    body_of,
)

NOWHERE = "nowhere"  # a place that cannot be called
NESTED = 3_000
FAR = 2**53
HASH, DIGEST = "0" * 32, "0" * 64
ODD: tuple[object, ...] = (
    None, True, -1, FAR + 1, 2**63, 1.5, float("nan"), float("inf"), "", "x" * 5_000, b"\xff", [], {}
)  # fmt: skip


def callable_place(beat: Beat) -> bool:
    return beat.address != NOWHERE


class Nonsense:
    """`sign`: as the liar does, with `key`."""

    def __init__(self, run_id: str, name: str, key: str, sign: Callable[[bytes], bytes], rng: random.Random) -> None:
        self._run_id, self._name, self._key, self._sign, self._rng = run_id, name, key, sign, rng

    def statements(self, count: int) -> tuple[Signed, ...]:
        return tuple(self._signed(self._body()) for _ in range(count))

    def proofs(self) -> tuple[Proof, ...]:
        first, second = self.statements(2)
        return (Proof(first=first, second=second),)

    def decisions(self, state: ChainState) -> tuple[Decision, ...]:
        return (Decision(block=self.block(state), votes=self.statements(3)),)

    def block(self, state: ChainState) -> Block:
        """One that nobody can carry out."""
        members, guest = state.members, Member(peer_id="zz", key="f" * 64)

        def round_of(*offers: Signed, fragment: int = 0) -> Round:
            height, version = state.height + 1, state.versions[0] + 1
            numbers = {"height": height, "fragment": fragment, "version": version}
            return Round(parent=state.tip, base_hash=HASH, offers=offers, **numbers)

        def change_to(*members: Member, applied: tuple[Signed, ...] = (), proofs: tuple[Proof, ...] = ()) -> Change:
            return Change(height=state.height + 1, parent=state.tip, members=members, applied=applied, proofs=proofs)

        choices: list[Callable[[], Block]] = [
            lambda: round_of(*self.statements(3)),
            lambda: round_of(*[self._signed(body_of(self._beat()))] * 3),
            lambda: round_of(self._signed(body_of(self._offer()))),
            lambda: round_of(*self.statements(1), fragment=FAR),
            lambda: change_to(*reversed(members)),
            lambda: change_to(*members, members[0]),
            lambda: change_to(*members, guest, applied=self.statements(2)),
            lambda: change_to(*members[1:], proofs=self.proofs()),
        ]
        return self._rng.choice(choices)()

    def _signed(self, body: bytes) -> Signed:
        is_signed = self._rng.random() < 0.5
        return Signed(author=self._key, body=body, signature=self._sign(body) if is_signed else bytes(64))

    def _body(self) -> bytes:
        rng = self._rng
        choices: list[Callable[[], bytes]] = [
            lambda: b"\x81\xa4says\xa4b\xff\xfet",
            lambda: b"\x82\xa1x" + b"\x91" * NESTED + b"\xc0\xa4says\xa4beat",
            lambda: rng.randbytes(rng.choice([0, 1, 30, 300])),
            lambda: b"\xdd\xff\xff\xff\xff",
            lambda: self._spoiled(self._beat(address="h")),
            lambda: self._spoiled(self._offer()),
            lambda: body_of(self._beat(address=NOWHERE)),
            lambda: body_of(self._beat(address="h", held=((0, HASH),) * 99)),
            lambda: body_of(self._beat(address="h", loss=float("nan"))),
            lambda: body_of(self._offer()),
        ]
        return rng.choice(choices)()

    def _beat(self, address: str = NOWHERE, **more: object) -> Beat:
        number = self._rng.randrange(FAR)
        facts = {"peer_id": self._name, "incarnation": FAR, "number": number, "address": address, **more}
        return Beat(run_id=self._run_id, **facts)  # type: ignore[arg-type]

    def _offer(self) -> Offered:
        """To a fragment that no run has."""
        numbers = {"fragment": FAR, "version": FAR, "sequence": FAR, "size_bytes": FAR, "steps": FAR}
        return Offered(run_id=self._run_id, digest=DIGEST, base_hash=HASH, **numbers)  # type: ignore[arg-type]

    def _spoiled(self, statement: AnyStatement) -> bytes:
        """One field is of another type, or beyond its bounds."""
        facts = msgspec.msgpack.decode(body_of(statement))
        name = self._rng.choice([name for name in sorted(facts) if name not in ("says", "loss")])
        odd = self._rng.choice([value for value in ODD if _is_odd_as(value, facts[name])])
        return msgspec.msgpack.encode({**facts, name: odd})


def _is_odd_as(value: object, right: object) -> bool:
    """(A text of any length may be somebody's name, and `true` is no number here.)"""
    return type(value) is not type(right) or isinstance(right, int)
