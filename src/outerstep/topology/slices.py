"""Which rank sums up what of a fragment.

A contribution and the mean are frames of the same tensors (forms.py). Each is cut into as many runs of bytes as there
are ranks, of about equal length and at the same values: rank r gets run r of everybody's contribution, and gives
everybody run r of the mean. A cut falls between blocks of both codecs, so every run can be decoded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..core.codecs import Codec
from ..wire.frames import Layout
from .forms import Form


@dataclass(frozen=True)
class Piece:
    """Values [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slice:
    """One rank's: bytes [begin, end) of a contribution's frame (`up`) and of the mean's (`down`)."""

    pieces: tuple[Piece, ...]
    up: tuple[int, int]
    down: tuple[int, int]


Cut = tuple[int, int]
"""(number of a tensor, number of its value): what lies before and what after."""


def slices_of(form: Form, count: int) -> list[Slice]:
    """By rank. The values of a slice are contiguous; with few values some slices are empty."""
    up_codecs = {name: rule.codec for name, rule in form.rules.items()}
    cuts = [(0, 0), *(_cut(form, up_codecs, rank / count) for rank in range(1, count)), (len(form.up.entries), 0)]
    up = [_offset(form.up, up_codecs, cut) for cut in cuts]
    down = [_offset(form.update, form.codecs, cut) for cut in cuts]
    pieces = [_pieces(form.up, begin, end) for begin, end in pairwise(cuts)]
    return [Slice(*one) for one in zip(pieces, pairwise(up), pairwise(down), strict=True)]


def _cut(form: Form, up_codecs: Mapping[str, Codec], part: float) -> Cut:
    """Where `part` of all bytes, there and back, lies behind: at the nearest border of both codecs' blocks."""
    sizes = [u.end - u.begin + d.end - d.begin for u, d in zip(form.up.entries, form.update.entries, strict=True)]
    left = part * sum(sizes)
    for number, (entry, size) in enumerate(zip(form.up.entries, sizes, strict=True)):
        if left < size:
            numel = math.prod(entry.shape)
            unit = math.lcm(up_codecs[entry.name].block_values, form.codecs[entry.name].block_values)
            value = min(round(left / size * numel / unit) * unit, numel)
            return (number, value) if value < numel else (number + 1, 0)
        left -= size
    return len(sizes), 0


def _offset(layout: Layout, codecs: Mapping[str, Codec], cut: Cut) -> int:
    number, value = cut
    if number == len(layout.entries):
        return layout.size_bytes
    entry = layout.entries[number]
    return layout.data_begin + entry.begin + codecs[entry.name].encoded_bytes(value)


def _pieces(layout: Layout, begin: Cut, end: Cut) -> tuple[Piece, ...]:
    found = []
    for number, entry in enumerate(layout.entries):
        start = begin[1] if number == begin[0] else 0
        stop = end[1] if number == end[0] else math.prod(entry.shape)
        if begin[0] <= number <= end[0] and start < stop:
            found.append(Piece(entry.name, start, stop))
    return tuple(found)


__all__ = ["Piece", "Slice", "slices_of"]
