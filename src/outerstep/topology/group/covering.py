"""Which bytes of a frame cover a box of a tensor, and how the values of the box come out of them.

    run       values that are neighbours in the tensor; a box has many of the same length
    block     what the codec can take apart; of a run's first and last block only some values are in the box
    dense     the blocks that the runs touch, one after the other, each once: the bytes that a rank needs of a tensor
    span      blocks that are neighbours in the frame: [begin, end) in bytes

A block stands alone, so the dense blocks decode as they would in the frame; and what a rank holds takes it no more
memory than its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.codecs import Codec
from ...tiling import Cutout
from ...wire.frames import Layout

Numbers = NDArray[np.int64]


class Covering:
    """Of one box, in a frame where the tensor begins at byte `offset`."""

    def __init__(self, box: Cutout, codec: Codec, offset: int) -> None:
        self._codec, self._block = codec, codec.block_values
        self._length = box.levels[-1][0]
        starts = np.array([box.first], dtype=np.int64)
        for count, apart in box.levels[:-1]:
            starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * apart).ravel()
        self._starts = starts
        self._first, last = starts // self._block, (starts + self._length - 1) // self._block
        new = self._first[1:] != last[:-1]  # else a run begins in the block in which the one before it ends
        self._dense = np.concatenate(([0], np.cumsum((last - self._first)[:-1] + new)))
        values = math.prod(box.shape)
        blocks = int(self._dense[-1] + last[-1] - self._first[-1] + 1)
        missing = max((int(last[-1]) + 1) * self._block - values, 0)  # of a block at the tensor's end
        self._values = blocks * self._block - missing
        self._bytes = codec.encoded_bytes(self._block)
        breaks = np.flatnonzero(self._first[1:] > last[:-1] + 1) + 1
        begins = self._first[np.concatenate(([0], breaks))]
        ends = last[np.concatenate((breaks - 1, [len(last) - 1]))] + 1
        self.begins: Numbers = offset + begins * self._bytes
        self.ends: Numbers = offset + np.minimum(ends * self._bytes, codec.encoded_bytes(values))
        self.size_bytes = int((self.ends - self.begins).sum())

    def decode(self, data: Tensor, start: int, stop: int, room: Tensor) -> Tensor:
        """Values [start, stop) of the box, from its dense blocks (uint8); in `room`, or in memory of its own."""
        runs = np.arange(start // self._length, (stop - 1) // self._length + 1)
        froms = np.maximum(start - runs * self._length, 0)
        counts = np.minimum(stop - runs * self._length, self._length) - froms
        begins = self._starts[runs] + froms
        places = (self._dense[runs] + begins // self._block - self._first[runs]) * self._block + begins % self._block
        first = int(places[0]) // self._block
        past = min((int(places[-1] + counts[-1] - 1) // self._block + 1) * self._block, self._values)
        encoded = data[
            first * self._bytes : first * self._bytes + self._codec.encoded_bytes(past - first * self._block)
        ]
        decoded = torch.empty(past - first * self._block, device=room.device)
        self._codec.decode(encoded.to(room.device, non_blocking=True), decoded)
        places -= first * self._block
        if len(runs) == 1 or (places[1:] == places[:-1] + counts[:-1]).all():
            return decoded[int(places[0]) : int(places[0]) + stop - start]
        at, out = 0, room[: stop - start]
        for begin, end in _alike(places, counts):
            n, length = end - begin, int(counts[begin])
            stride = int(places[begin + 1] - places[begin]) if n > 1 else 0
            there = decoded.as_strided((n, length), (stride, 1), int(places[begin]))
            out[at : at + n * length].view(n, length).copy_(there)
            at += n * length
        return out


class NeededBytes:
    """All bytes of a frame that one rank needs: of the boxes it holds, in the frame's order."""

    def __init__(self, boxes: Sequence[tuple[str, Cutout]], layout: Layout, codecs: dict[str, Codec]) -> None:
        places = {entry.name: layout.data_begin + entry.begin for entry in layout.entries}
        self.of = {name: Covering(box, codecs[name], places[name]) for name, box in boxes}
        each = sorted(self.of.items(), key=lambda item: places[item[0]])
        self.begins = np.concatenate([np.zeros(0, np.int64), *(covering.begins for _, covering in each)])
        self.ends = np.concatenate([np.zeros(0, np.int64), *(covering.ends for _, covering in each)])
        self._before: Numbers = np.concatenate(([0], np.cumsum(self.ends - self.begins)))
        sizes = np.cumsum([0, *(covering.size_bytes for _, covering in each)])
        self.places = {name: (int(sizes[i]), int(sizes[i + 1])) for i, (name, _) in enumerate(each)}

    @property
    def size_bytes(self) -> int:
        return int(self._before[-1])

    def before(self, byte: int) -> int:
        """How many of them come before this byte of the frame."""
        i = int(np.searchsorted(self.begins, byte))  # spans that begin before it; only the last may end after it
        if i == 0:
            return 0
        return int(self._before[i]) - max(int(self.ends[i - 1]) - byte, 0)

    def parts(self, count: int, part_size_bytes: int) -> NDArray[np.bool_]:
        """In which parts of the frame some of them are."""
        touched = np.zeros(count + 1, np.int64)
        np.add.at(touched, self.begins // part_size_bytes, 1)
        np.add.at(touched, (self.ends - 1) // part_size_bytes + 1, -1)
        return np.cumsum(touched[:-1]) > 0

    def collect(self, frame: Tensor, first: int, begin: int, end: int, out: Tensor) -> int:
        """Those in [begin, end) of a frame, of which `frame` has the bytes from number `first` on, one after the other
        into `out`; how many."""
        i, j = int(np.searchsorted(self.ends, begin, "right")), int(np.searchsorted(self.begins, end))
        begins = np.maximum(self.begins[i:j], begin)
        counts = np.minimum(self.ends[i:j], end) - begins
        at, begins = 0, begins - first
        for k, stop in _alike(begins, counts):
            n, length = stop - k, int(counts[k])
            stride = int(begins[k + 1] - begins[k]) if n > 1 else 0
            there = frame.as_strided((n, length), (stride, 1), frame.storage_offset() + int(begins[k]))
            out[at : at + n * length].view(n, length).copy_(there)
            at += n * length
        return at


def _alike(begins: Numbers, counts: Numbers) -> list[tuple[int, int]]:
    """[first, past) of neighbours that are equally long and equally far apart: each group is copied all at once."""
    if len(begins) == 0:
        return []
    apart = np.diff(begins)
    changes = (np.diff(counts) != 0) | (np.concatenate(([0], np.diff(apart) != 0))[: len(apart)] != 0)
    groups, first = list[tuple[int, int]](), 0
    for change in [*(np.flatnonzero(changes) + 1).tolist(), len(begins)]:
        if change > first:
            groups.append((first, change))
            first = change
    return groups
