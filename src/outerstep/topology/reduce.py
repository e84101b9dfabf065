"""From everybody's contribution to one mean, the same bytes on every rank: reduce-scatter and all-gather, by hand.

    1. rank r sends slice j of its encoded Δ to rank j                        (n−1)/n of a contribution
    2. rank j decodes slice j of everybody's, and sums in fp32 in the order of the ranks
                g = Σ w_r·Δ_r / Σ w_r
    3. it encodes that mean, once, and sends the bytes to all others          (n−1)/n of the mean
       with the sums of squares that tell how the round went (core/watch.py)

Steps 1 and 2 go run by run, so that of the others' contributions only some MiB lie here at a time.

What is applied is what was encoded, so the bits are equal on all ranks whatever a processor's vectors do to a sum. A
collective of torch would add bf16 in bf16 and could not add int4 at all; for fp32 it would move as many bytes as this
(times: bench/allreduce.py), but add in another order than a server does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..core.aggregate import divide
from ..core.codecs import FP32, Codec, Dither
from ..core.codecs.recipe import CodecRule, Recipe
from ..core.feedback import compensate, decay_of, send
from ..core.watch import sum_of_squares
from ..errors import WorkerError
from ..types import Manifest, Plan
from ..wire.frames import Layout
from .forms import Form
from .update import cuts

RUN_BYTES = 16 << 20  # of a contribution, from each rank at a time


class ByteCarrier(Protocol):
    """What bytes travel by (allreduce/peers.py)."""

    device: torch.device
    bytes_sent: int
    bytes_received: int

    def take(self, size_bytes: int) -> Tensor: ...

    def give_back(self, data: Tensor) -> None: ...

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None: ...


class Circle(Protocol):
    """Who reduces: how many, which of them this process is, and what to call each (allreduce/peers.py)."""

    rank: int
    size: int

    @property
    def labels(self) -> Sequence[str]: ...


@dataclass
class ReducedMean:
    """What was agreed on: the mean's frame, on the links' device. `bytes_*`: what it took. `norm` is the mean's,
    `norms` are those of the ranks' contributions."""

    frame: Tensor
    bytes_sent: int
    bytes_received: int
    norm: float
    norms: tuple[float, ...]


class Reducer:
    """One fragment's. Keeps what the mean's codec left out of this rank's slice, where the recipe wants feedback."""

    def __init__(
        self, fragment: int, form: Form, down_rules: Mapping[str, CodecRule], links: ByteCarrier, peers: Circle
    ) -> None:
        self.fragment, self.form = fragment, form
        self._down = down_rules
        self._links, self._peers = links, peers
        self._count = runs_of(form, peers.size)
        self._runs = slices_of(form, peers.size * self._count)  # the same cuts, and some between them
        self._own = self._runs[peers.rank * self._count : (peers.rank + 1) * self._count]
        self._starts, self._stops = _extents(piece for run in self._own for piece in run.pieces)
        self._up_begins = {entry.name: entry.begin for entry in form.up.entries}
        self._down_begins = {entry.name: entry.begin for entry in form.update.entries}
        self.left_out: dict[str, Tensor] = {}  # by tensor, this rank's piece of it

    def reduce(
        self, frame: Tensor, weights: Sequence[float], dither: Callable[[str], Dither], squares: float = 0.0
    ) -> ReducedMean:
        """`frame`: this rank's contribution, on the links' device; `squares`: Σ Δ² of it. `weights`: of all, in the
        order of the ranks."""
        links, rank = self._links, self._peers.rank
        sent, received = links.bytes_sent, links.bytes_received
        others = [r for r in range(self._peers.size) if r != rank]
        mean = links.take(self.form.update.size_bytes)
        sums = torch.zeros(self._peers.size, 2, dtype=torch.float64, device=links.device)  # per rank: Σ g², Σ Δ²
        sums[rank, 1] = squares
        for number, run in enumerate(self._own):
            room, rooms = self._rooms(run, others)
            outgoing = [(r, frame[slice(*self._runs[r * self._count + number].up)]) for r in others]
            links.swap(outgoing, list(rooms.items()))
            contributions = [frame[slice(*run.up)] if r == rank else rooms[r] for r in range(self._peers.size)]
            sums[rank, 0] += self._sum(run, contributions, weights, mean, dither)
            links.give_back(room)
        notes = sums.view(torch.uint8)
        links.swap(
            [(r, data) for r in others for data in (mean[self._down_of(rank)], notes[rank])],
            [(r, data) for r in others for data in (mean[self._down_of(r)], notes[r])],
        )
        if links.device.type == "cuda":
            torch.cuda.current_stream(links.device).synchronize()
        of_mean, of_each = sums.cpu().unbind(1)
        return ReducedMean(
            mean,
            links.bytes_sent - sent,
            links.bytes_received - received,
            norm=math.sqrt(of_mean.sum()),
            norms=tuple(of_each.sqrt().tolist()),
        )

    def _down_of(self, rank: int) -> slice:
        """The bytes of the mean that this rank makes."""
        first, last = self._runs[rank * self._count], self._runs[(rank + 1) * self._count - 1]
        return slice(first.down[0], last.down[1])

    def _rooms(self, own: Slice, others: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """For this rank's slice of everybody else's contribution: some memory, and by rank its part of that. Each is
        aligned as in its frame, so that it can be decoded as it lies."""
        begin, end = own.up
        stride = -(-(begin % 8 + end - begin) // 8) * 8
        room = self._links.take(stride * len(others))
        starts = {r: i * stride + begin % 8 for i, r in enumerate(others)}
        return room, {r: room[start : start + end - begin] for r, start in starts.items()}

    @torch.no_grad()
    def _sum(
        self,
        own: Slice,
        contributions: Sequence[Tensor],
        weights: Sequence[float],
        mean: Tensor,
        dither: Callable[[str], Dither],
    ) -> Tensor:
        """This rank's slice of the mean; returns Σ g² of it."""
        total = sum(weights)
        squares = torch.zeros((), dtype=torch.float64, device=mean.device)  # there, so that a GPU is asked once
        for piece in own.pieces:
            for start, stop in _blocks(piece, mean.device):
                encoded = mean[self._begin_down(piece.name, start) : self._begin_down(piece.name, stop)]
                exact = self._down[piece.name].codec is FP32
                g = encoded.view(torch.float32) if exact else torch.empty(stop - start, device=mean.device)
                self._gather(piece.name, start, stop, own.up[0], contributions, weights, g)
                divide(g, total)
                squares.add_(_sum_of_squares(g))
                if not exact:
                    self._encode(piece, start, stop, g, encoded, dither)
        if not bool(squares.isfinite()):
            raise self._not_finite(own, contributions)
        return squares

    def _gather(
        self,
        name: str,
        start: int,
        stop: int,
        first_byte: int,
        contributions: Sequence[Tensor],
        weights: Sequence[float],
        g: Tensor,
    ) -> None:
        """g = Σ w·Δ of these values, product by product and sum by sum in the order of the ranks."""
        codec = self.form.rules[name].codec
        begin, end = (self._begin_up(name, value) - first_byte for value in (start, stop))
        for r, (data, weight) in enumerate(zip(contributions, weights, strict=True)):
            if r > 0:
                codec.decode_add(data[begin:end], g, weight)
                continue
            codec.decode(data[begin:end], g)
            if weight != 1.0:
                g.mul_(weight)

    def _encode(
        self, piece: ValueRange, start: int, stop: int, g: Tensor, out: Tensor, dither: Callable[[str], Dither]
    ) -> None:
        """The mean, and what is owed of earlier ones."""
        name, rule = piece.name, self._down[piece.name]
        noise = dither(name).after(start) if rule.stochastic else None
        if not self.form.rules[name].feedback:
            rule.codec.encode(g, out, noise)
            return
        first = self._starts[name]
        if name not in self.left_out:
            self.left_out[name] = torch.zeros(self._stops[name] - first, device=g.device)
        owed = self.left_out[name][start - first : stop - first]
        compensate(owed, g, decay_of(rule.codec), owed)
        send(rule.codec, owed, out, noise)

    def _begin_up(self, name: str, value: int) -> int:
        """Where the bytes of this value begin in a contribution's frame."""
        return self.form.up.data_begin + self._up_begins[name] + self.form.rules[name].codec.encoded_bytes(value)

    def _begin_down(self, name: str, value: int) -> int:
        """The same in the mean's frame."""
        return self.form.update.data_begin + self._down_begins[name] + self._down[name].codec.encoded_bytes(value)

    def _not_finite(self, own: Slice, contributions: Sequence[Tensor]) -> WorkerError:
        """Who sent what."""
        for rank, data in enumerate(contributions):
            for piece in own.pieces:
                begin, end = (self._begin_up(piece.name, value) - own.up[0] for value in (piece.start, piece.stop))
                values = torch.empty(piece.stop - piece.start, device=data.device)
                self.form.rules[piece.name].codec.decode(data[begin:end], values)
                if not bool(values.isfinite().all()):
                    return WorkerError(
                        f"{self._peers.labels[rank]} contributed NaN or Inf in tensor {piece.name!r}: its training has "
                        "diverged, or its weights were damaged; lower the learning rate, or clip the gradients"
                    )
        return WorkerError(f"the mean of fragment {self.fragment} overflows fp32: the contributions are far too large")


def down_rules(plan: Plan, manifest: Manifest) -> dict[str, CodecRule]:
    """What the mean is encoded with, by tensor."""
    down = Recipe.parse(plan.down_codec)
    return {spec.name: down.rule(spec) for spec in manifest.parameters}


def runs_of(form: Form, size: int) -> int:
    """How many runs each rank's slice is cut into: so often contributions are swapped, before the mean is."""
    return max(math.ceil(form.up.size_bytes / size / RUN_BYTES), 1)


def _extents(pieces: Iterable[ValueRange]) -> tuple[dict[str, int], dict[str, int]]:
    """Where what is held of each tensor begins and ends; the pieces come in order."""
    starts: dict[str, int] = {}
    stops: dict[str, int] = {}
    for piece in pieces:
        starts.setdefault(piece.name, piece.start)
        stops[piece.name] = piece.stop
    return starts, stops


def _blocks(piece: ValueRange, device: torch.device) -> list[tuple[int, int]]:
    return [(piece.start + a, piece.start + b) for a, b in cuts(piece.stop - piece.start, device)]


def _sum_of_squares(values: Tensor) -> Tensor:
    """Finite if all of them are: many times cheaper than isfinite() on a CPU. Where that is in doubt, in fp64."""
    if values.device.type == "cpu":
        return torch.tensor(sum_of_squares(values), dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


# --- who sums up what ------------------------------------------------------------------------------------------------
#
# A contribution and the mean are frames of the same tensors (forms.py). Each is cut into as many runs of bytes as there
# are ranks, of about equal length and at the same values: rank r gets run r of everybody's contribution, and gives
# everybody run r of the mean. A cut falls between blocks of both codecs, so every run can be decoded by itself.


@dataclass(frozen=True)
class ValueRange:
    """Values [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slice:
    """One rank's: bytes [begin, end) of a contribution's frame (`up`) and of the mean's (`down`)."""

    pieces: tuple[ValueRange, ...]
    up: tuple[int, int]
    down: tuple[int, int]


Cut = tuple[int, int]
"""(number of a tensor, number of its value): what lies before and what after."""


def slices_of(form: Form, count: int) -> list[Slice]:
    """By rank. The values of a slice are contiguous; with few values some slices are empty."""
    up_codecs = {name: rule.codec for name, rule in form.rules.items()}
    borders = [(0, 0), *(_cut(form, up_codecs, rank / count) for rank in range(1, count)), (len(form.up.entries), 0)]
    up = [_offset(form.up, up_codecs, cut) for cut in borders]
    down = [_offset(form.update, form.codecs, cut) for cut in borders]
    pieces = [_pieces(form.up, begin, end) for begin, end in pairwise(borders)]
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


def _pieces(layout: Layout, begin: Cut, end: Cut) -> tuple[ValueRange, ...]:
    found = []
    for number, entry in enumerate(layout.entries):
        start = begin[1] if number == begin[0] else 0
        stop = end[1] if number == end[0] else math.prod(entry.shape)
        if begin[0] <= number <= end[0] and start < stop:
            found.append(ValueRange(entry.name, start, stop))
    return tuple(found)
