"""The rounds that were decided: of each fragment the last two, which the topology takes over and others may ask for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ....statements import ChainState, Change, Decision, Member, Offered, Round, statement_of

KEPT_ROUNDS = 2


@dataclass(eq=False)
class Taken:
    """`offers`: (peer id, key, what it offered), in the order of the ids. `is_lost`: its bytes are not to be had."""

    block: Round
    offers: tuple[tuple[str, str, Offered], ...]
    is_released: bool = False
    is_lost: bool = False


class DecidedRounds:
    """Under the node's lock."""

    def __init__(self, state: ChainState) -> None:
        self.leap(state)

    def leap(self, state: ChainState) -> None:
        self._members: tuple[Member, ...] = state.members
        self.versions = list(state.versions)
        self._rounds: list[deque[Taken]] = [deque(maxlen=KEPT_ROUNDS) for _ in state.versions]

    def add(self, decision: Decision) -> None:
        block = decision.block
        if isinstance(block, Change):
            self._members = block.members
            return
        names = {member.key: member.peer_id for member in self._members}
        read = [(signed.author, statement_of(signed.body)) for signed in block.offers]
        offers = [(names.get(key, key), key, says) for key, says in read if isinstance(says, Offered)]
        self._rounds[block.fragment].append(Taken(block, tuple(offers)))
        self.versions[block.fragment] = block.version

    def find(self, fragment: int, version: int) -> Taken | None:
        return next((taken for taken in self._rounds[fragment] if taken.block.version == version), None)

    def is_lost(self, fragment: int, version: int) -> bool:
        """It was decided; but who has not taken it over by now cannot."""
        if version > self.versions[fragment]:
            return False
        taken = self.find(fragment, version)
        return taken is None or taken.is_lost

    def needed(self) -> set[str]:
        """Digests that this peer or another may ask for."""
        return {says.digest for rounds in self._rounds for taken in rounds for _, _, says in taken.offers}

    def wanted(self) -> dict[str, tuple[Offered, str]]:
        """Digest → what was offered, and whose it is; of rounds that are still to be taken over."""
        return {
            says.digest: (says, key)
            for rounds in self._rounds
            for taken in rounds
            if not taken.is_released and not taken.is_lost
            for _, key, says in taken.offers
        }

    def lose(self, digest: str) -> None:
        """Nobody has these bytes any more."""
        for rounds in self._rounds:
            for taken in rounds:
                if not taken.is_released and any(says.digest == digest for _, _, says in taken.offers):
                    taken.is_lost = True


__all__ = ["DecidedRounds"]
