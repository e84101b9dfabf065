"""Sections: the shares of a fragment that the ranks of a sharded group hold.

A group of n processes that shard their parameters by rows contributes in n sections. Section r holds, of *every* tensor
of the fragment, the rows that torch's Shard(0) gives rank r:

    c = ⌈d₀ / n⌉        rows [r·c, min((r+1)·c, d₀)), possibly none

A tensor without dimensions counts as one row. Each section is a frame of its own, and the payload is the frames one
after the other; so both ends derive every place from the plan, n and r alone, and no row numbers travel. With n = 1 the
only section is the frame of the whole fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .frames import DATA_ALIGNMENT, TENSOR_ALIGNMENT, Entry, Layout, layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """One section's share of a tensor: its rows begin at `first_row`, its values at `first_value` of the flat tensor.
    (An empty share of a tensor without dimensions has the shape [0]: the shape [] would hold one value.)"""

    first_row: int
    first_value: int
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def rows_of(shape: Shape, sections: int, section: int) -> Rows:
    """The rows of a tensor of this shape that belong to `section` of `sections`."""
    if not shape:
        return Rows(0, 0, ()) if section == 0 else Rows(1, 1, (0,))
    height = -(-shape[0] // sections)
    begin = min(section * height, shape[0])
    end = min(begin + height, shape[0])
    return Rows(begin, begin * math.prod(shape[1:]), (end - begin, *shape[1:]))


def section_layout(
    codec: str, tensors: Sequence[tuple[str, Shape, Callable[[int], int]]], sections: int, section: int
) -> Layout:
    """The frame of one section of these (name, shape, encoded bytes of so many values)."""
    shares = [(name, rows_of(shape, sections, section), encoded_bytes) for name, shape, encoded_bytes in tensors]
    return layout(codec, [(name, rows.shape, encoded_bytes(rows.numel)) for name, rows, encoded_bytes in shares])


def most_bytes(whole: Layout, tensors: Sequence[tuple[str, Shape, Callable[[int], int]]], sections: int) -> int:
    """How large a payload in so many sections can be, without laying them all out. Of every tensor some sections hold
    ⌈d₀ / n⌉ rows, one may hold the rest, the others none; what a codec needs for a block that is not full, it needs in
    each of them. In a section's header no number is longer than in the whole one's; only an empty share of a tensor
    without dimensions is written with one character more."""
    if sections == 1:
        return whole.size_bytes
    total = sections * _up(whole.data_begin + len(tensors), DATA_ALIGNMENT)
    for _, shape, encoded_bytes in tensors:
        rows, values = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        height = max(-(-rows // sections), 1)
        full, rest = divmod(rows, height)
        total += full * _up(encoded_bytes(height * values), TENSOR_ALIGNMENT)
        total += _up(encoded_bytes(rest * values), TENSOR_ALIGNMENT)
    return total


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def row_pieces(entries: Sequence[Entry], sections: int, section: int, value_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) in the data of the *whole* fragment's frame of the rows of one section, tensor by tensor."""
    for entry in entries:
        rows = rows_of(entry.shape, sections, section)
        begin = entry.begin + rows.first_value * value_bytes
        yield begin, begin + rows.numel * value_bytes


__all__ = ["Rows", "most_bytes", "row_pieces", "rows_of", "section_layout"]
