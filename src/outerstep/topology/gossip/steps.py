"""The update of an anchor that has moved by several outer steps since it was held; or by none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..stepped import Stepped
from ..update import AnchorProof, Kind


class Steps:
    """`steps`: the oldest first, each with the hash of the anchor that the others took it from."""

    def __init__(self, names: Sequence[str], steps: Sequence[tuple[str, Stepped]] = ()) -> None:
        self.names = tuple(names)
        self.kinds: tuple[Kind, ...] = tuple("update" for _ in steps)
        self.frames: tuple[memoryview, ...] = ()
        self._steps = steps
        self._held = AnchorProof("")

    @property
    def is_proven(self) -> bool:
        """Did each step but the first start where the one before it ended, for the others too? (Where the first starts
        is known before.)"""
        return all(base == before.digest for (_, before), (base, _) in pairwise(self._steps))

    @property
    def digest(self) -> str:
        """The new anchor's hash, when all blocks were asked for."""
        return self._steps[-1][1].digest if self._steps else self._held.digest

    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        if not self._steps:
            self._held.feed(held)
        theta = held
        for number, (_, step) in enumerate(self._steps):
            theta = step.apply(name, start, stop, theta, in_place=in_place or number > 0)
        return theta


__all__ = ["Steps"]
