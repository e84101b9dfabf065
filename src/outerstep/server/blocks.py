"""The values of a fragment, cut into blocks that fit a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..digest import LEAF_VALUES
from ..wire.frames import Layout

BLOCK_VALUES = 1 << 19  # 2 MiB of fp32: the calls cost little beside the arithmetic, and a handful of blocks is cached
assert BLOCK_VALUES % LEAF_VALUES == 0  # the leaves of an anchor's hash are made block by block


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor; in the flat fp32 memory of the fragment they begin at `place`."""

    name: str
    start: int
    stop: int
    place: int

    @cached_property
    def count(self) -> int:
        return self.stop - self.start

    @cached_property
    def end(self) -> int:
        return self.place + self.stop - self.start


def cut(of: Layout, size: int | None = None) -> Iterator[Block]:
    """All blocks of an fp32 frame, in its order. `size`: in values, a multiple of BLOCK_VALUES (None = that)."""
    for entry in of.entries:
        yield from pieces_of(Block(entry.name, 0, math.prod(entry.shape), entry.begin // 4), size or BLOCK_VALUES)


def pieces_of(block: Block, size: int) -> Iterator[Block]:
    """A block, cut once more."""
    for start in range(block.start, block.stop, size):
        yield Block(block.name, start, min(start + size, block.stop), block.place + start - block.start)
