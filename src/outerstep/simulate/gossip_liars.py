"""A peer that lies. Its keys are its own: it can say what it likes, and nothing in anybody else's name. Whatever else
its lie is, it also talks nonsense, to everybody."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import msgspec

from ..statements import (
    AnyStatement,
    Change,
    Converse,
    Offered,
    Proof,
    Proposed,
    Signed,
    Voted,
    body_of,
    statement_of,
)
from .gossip import SimPeer
from .gossip_nonsense import Nonsense

LEAST_TO_BEAR_ONE = 4


class Liar(SimPeer):
    """To half of the others it says something else than to the rest."""

    @property
    def _is_at_it(self) -> bool:
        """Fewer than four can bear no liar, and nobody promised that they could."""
        return len(self.machine.state.members) >= LEAST_TO_BEAR_ONE

    def says(self, said: Converse, other: SimPeer) -> Converse:
        if not self._is_at_it:
            return said
        said = self._with_nonsense(said)
        if self.world.peers.index(other) % 2:
            return said
        twisted = tuple(self._twist(s) if s.author == self.machine.member.key else s for s in said.statements)
        return msgspec.structs.replace(said, statements=twisted, proofs=(*said.proofs, *self._frame_ups(said)))

    def _with_nonsense(self, said: Converse) -> Converse:
        """Before and between what it says otherwise."""
        self.world.history.faults["nonsense"] += 1
        nonsense, rng = self._nonsense, self.world.rng_of_nonsense
        return msgspec.structs.replace(
            said,
            statements=(*nonsense.statements(2), *said.statements, *nonsense.statements(1)),
            proofs=(*said.proofs, *(nonsense.proofs() if rng.random() < 0.2 else ())),
            decisions=said.decisions or (nonsense.decisions(self.machine.state) if rng.random() < 0.2 else ()),
        )

    @property
    def _nonsense(self) -> Nonsense:
        key, sign = self.world.registry.enter(f"{self.name}/{self.identities}")
        return Nonsense(self.machine.run_id, self.name, key, sign, self.world.rng_of_nonsense)

    def _twist(self, signed: Signed) -> Signed:
        statement = statement_of(signed.body)
        lie = self.world.scenario.lie
        other: AnyStatement | None = None
        if lie == "offers" and isinstance(statement, Offered):
            digest = sha256(statement.digest.encode()).hexdigest()
            other = msgspec.structs.replace(statement, digest=digest)
            self._held.add(digest)
        elif lie == "votes" and isinstance(statement, Voted):
            blocks = ["", *(d for d in self._known_blocks() if d)]
            other = msgspec.structs.replace(statement, block=next((b for b in blocks if b != statement.block), ""))
        elif lie == "proposals" and isinstance(statement, Proposed) and statement.block.height > 1:
            other = self._other_proposal(statement)
        elif lie == "rubbish" and isinstance(statement, Proposed):
            alone = tuple(m for m in self.machine.state.members if m.key == self.machine.member.key)
            coup = Change(height=statement.block.height, parent=statement.block.parent, members=alone)
            block = self.world.rng_of_nonsense.choice([coup, self._nonsense.block(self.machine.state)])
            other = msgspec.structs.replace(statement, block=block)
        if other is None or other == statement:
            return signed
        self.world.history.faults[f"lie: {lie}"] += 1
        body = body_of(other)
        _, sign = self.world.registry.enter(f"{self.name}/{self.identities}")
        return Signed(author=signed.author, body=body, signature=sign(body))

    def _known_blocks(self) -> list[str]:
        said = [statement_of(s.body) for s in self.machine.say_to(self.machine.state.height).statements]
        return [s.block for s in said if isinstance(s, Voted)]

    def _other_proposal(self, statement: Proposed) -> Proposed | None:
        block = statement.block
        if isinstance(block, Change) or len(block.offers) < 2:
            return None
        return msgspec.structs.replace(statement, block=msgspec.structs.replace(block, offers=block.offers[1:]))

    def _frame_ups(self, said: Converse) -> tuple[Proof, ...]:
        """Two honest statements that do not contradict each other, and one that its author never signed."""
        if self.world.scenario.lie != "frames":
            return ()
        honest = [s for s in said.statements if s.author != self.machine.member.key]
        pairs = [Proof(first=a, second=b) for a, b in pairwise(honest) if a.author == b.author]
        if honest:
            body = honest[0].body + b"\0"
            forged = Signed(author=honest[0].author, body=body, signature=honest[0].signature)
            pairs.append(Proof(first=honest[0], second=forged))
        self.world.history.faults["lie: frames"] += bool(pairs)
        return tuple(pairs[:8])

    def asked_for(self, asker: SimPeer, digest: str) -> None:
        if self._is_at_it and self.world.scenario.lie == "withholds" and self.world.peers.index(asker) % 2:
            self.world.history.faults["lie: withholds"] += 1
            return
        super().asked_for(asker, digest)

    def asked_for_whole(self, asker: SimPeer, fragment: int) -> None:
        if not self._is_at_it:
            super().asked_for_whole(asker, fragment)
        elif fragment in self._anchors:
            version = self._anchors[fragment][0]
            self.world.send(self, asker, lambda: asker.given_whole(self, fragment, version + 5, "f" * 32))
