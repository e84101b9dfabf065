"""Contributions as streams: read block by block, so that they are never all in memory at once.

A rule sees the same block of every contribution, [n, m], and the memory in use is n·m values however large the model
is. Blocks of a tensor begin at multiples of 4096 values (the largest block of any codec); sums over a whole
contribution run leaf by leaf of 4096 values, so the bits do not depend on how many leaves a block has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ...errors import ConfigError

LEAF_VALUES = 4096
STACK_VALUES = 1 << 20  # of all contributions together: 4 MiB of fp32, and with what is made of it still in the cache


class Span(Protocol):
    """What a rule must know about a block: it begins at value `start` of its tensor and has `count` values."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...


B = TypeVar("B", bound=Span)
Room = TypeVar("Room")
Made = TypeVar("Made")
B_contra = TypeVar("B_contra", bound=Span, contravariant=True)


class ShareBlocks(Protocol):
    """Who goes through the blocks: one after the other, or several threads at once."""

    def __call__(
        self,
        blocks: Sequence[B],
        new_room: Callable[[], Room],
        work: Callable[[B, Room], Made],
        seal: Callable[[B, Made], None],
    ) -> None:
        """`work` for each block, in a room that no other block uses meanwhile; then `seal`, with what came of it, in
        the order of the blocks: what is added up over them has the same bits, whoever does it."""


def one_by_one(
    blocks: Sequence[B],
    new_room: Callable[[], Room],
    work: Callable[[B, Room], Made],
    seal: Callable[[B, Made], None],
) -> None:
    room = new_room()
    for block in blocks:
        seal(block, work(block, room))


class Reader(Protocol[B_contra]):
    """One contribution. It is read more than once: first to measure it, then to combine it; and different blocks of it
    at once, if several threads share them."""

    def read(self, block: B_contra, out: Tensor) -> None:
        """Write the values of this block to `out`, fp32 [count]."""


class Writer(Protocol[B_contra]):
    """Where the aggregate goes, block by block."""

    def write(self, block: B_contra, values: Tensor) -> None:
        """fp32 [count]; the memory is reused for the next block."""


@dataclass(frozen=True)
class TensorSpan:
    """Values [start, stop) of a tensor, in its flat form."""

    name: str
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def cut(sizes: Mapping[str, int], rows: int, *, stack_values: int = STACK_VALUES) -> list[TensorSpan]:
    """Blocks for tensors of these sizes, so that `rows` contributions have about `stack_values` in a block."""
    step = max(1, stack_values // (max(1, rows) * LEAF_VALUES)) * LEAF_VALUES
    return [
        TensorSpan(name, start, min(start + step, size))
        for name, size in sizes.items()
        for start in range(0, size, step)
    ]


def check_blocks(blocks: Sequence[Span]) -> None:
    """Leaves must align with the blocks as with the tensors, or sums would depend on the cut."""
    for block in blocks:
        if block.start % LEAF_VALUES:
            raise ConfigError(f"a block must begin at a multiple of {LEAF_VALUES} values, got {block.start}")
    for block, following in pairwise(blocks):
        if block.count % LEAF_VALUES and following.start != 0:
            raise ConfigError(
                f"only a tensor's last block may have a count that is no multiple of {LEAF_VALUES}, got {block.count} "
                f"before a block that begins at {following.start}"
            )


class Tensors:
    """A contribution (or an aggregate) in memory: tensors by name, of any shape."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}

    def read(self, block: TensorSpan, out: Tensor) -> None:
        out.copy_(self._flat[block.name][block.start : block.stop])

    def write(self, block: TensorSpan, values: Tensor) -> None:
        """For contiguous tensors only: `reshape` copies others."""
        self._flat[block.name][block.start : block.stop] = values


class Zeros:
    """A contribution of zeros."""

    def read(self, block: Span, out: Tensor) -> None:
        out.zero_()


class Stack:
    """A reusable buffer for one block of n contributions."""

    def __init__(self, rows: int, blocks: Sequence[Span], device: torch.device) -> None:
        self._room = torch.empty((rows, max((block.count for block in blocks), default=0)), device=device)

    def fill(self, readers: Sequence[Reader[B]], block: B) -> Tensor:
        """fp32 [n, count]; valid until the next call, and free to be overwritten."""
        values = self._room[:, : block.count]
        for row, reader in zip(values, readers, strict=True):
            reader.read(block, row)
        return values
