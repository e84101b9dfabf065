"""How members without a server stand to the layer above that they are one worker of: the same on each of them.

It is compared with their anchors, healed with them and saved with them. A move from above that is in it by its serial
number is in T; the next leader repeats any other move (hierarchy/below.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

REMEMBERED_MOVES = 16  # more than any contribution may be rounds old


class ReportedWork(Protocol):
    """What a member says of its contribution to a round."""

    @property
    def steps(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class ClusterPart(msgspec.Struct, frozen=True):
    """Of members that are together one worker of a layer above. By fragment: how many versions came from there
    (`moves`), the serial number of the last (`serials`), and the latest of them (`above`). Of the first fragment: its
    rounds, and what those who took part had done for them."""

    moves: tuple[int, ...]
    serials: tuple[int, ...]
    above: tuple[tuple[int, ...], ...]
    rounds: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    @classmethod
    def fresh(cls, fragments: int) -> ClusterPart:
        return cls((0,) * fragments, (0,) * fragments, ((),) * fragments)

    def after_round(self, active: Iterable[ReportedWork]) -> ClusterPart:
        active = list(active)
        return msgspec.structs.replace(
            self,
            rounds=self.rounds + 1,
            steps=self.steps + sum(offer.steps for offer in active),
            samples=self.samples + sum(offer.samples for offer in active),
            tokens=self.tokens + sum(offer.tokens for offer in active),
        )

    def after_move(self, fragment: int, serial: int, version: int) -> ClusterPart:
        def put(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
            return (*values[:fragment], value, *values[fragment + 1 :])

        return msgspec.structs.replace(
            self,
            moves=put(self.moves, self.moves[fragment] + 1),
            serials=put(self.serials, serial),
            above=put(self.above, (*self.above[fragment], version)[-REMEMBERED_MOVES:]),
        )
