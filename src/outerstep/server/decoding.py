"""From the bytes of a contribution to its values: where they are, and whether they can be taken, block by block.

payload   section 0: header, tensor 0, tensor 1, …;  section 1: header, tensor 0, …     (wire/frames.py)
run       the encoded values of one tensor in one section: rows of it, or a box (tiling.py)
block     up to BLOCK_VALUES values of a run: what is checked at once; numbered in the order of the payload
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ..core.codecs import Codec
from ..core.codecs.cast import CastCodec
from ..errors import BadFrame, NotFinite, Refused
from ..tiling import Cutout, Cutting, FragmentTiling, sections_of
from ..wire.frames import Layout, check_frame, rows_of, section_layout, tiled_layout
from .blocks import BLOCK_VALUES

KEPT_LAYOUTS = 8  # of sections
KEPT_RUNS = 1 << 20  # of all decoders that are kept, some 40 MB; but the one in use always is
KEPT_DECODERS = 256
PLAUSIBLE = 1e9  # the norm of a block whose squares are far from overflowing
ABSURD = 1e18  # no honest difference of weights; sums and momentum of values below it stay finite in fp32

Bring = Callable[[Tensor], Tensor]
"""Bytes in host memory → the same where they are decoded"""


@dataclass(frozen=True)
class UpTensor:
    name: str
    shape: tuple[int, ...]
    codec: Codec

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Findings:
    """What was seen in some blocks of a payload: Σ x², and why it cannot be taken, if it cannot."""

    blocks: range
    squares: float = 0.0
    refusal: Refused | None = None


class Decoder:
    """For contributions to one fragment that are cut into sections in the same way."""

    def __init__(self, codec_name: str, tensors: Sequence[UpTensor], cutting: Cutting = 1) -> None:
        self.sections = sections_of(cutting)
        self._cutting = cutting
        self._tensors = list(tensors)
        shares = [(tensor.name, tensor.shape, tensor.codec.encoded_bytes) for tensor in tensors]
        self._index = {tensor.name: i for i, tensor in enumerate(self._tensors)}

        def layout(section: int) -> Layout:
            if isinstance(cutting, int):
                return section_layout(codec_name, shares, cutting, section)
            return tiled_layout(codec_name, {name: size for name, _, size in shares}, cutting, section)

        # Not all of them are kept: a strange worker may name thousands of sections, of thousands of tensors.
        self._layout = lru_cache(KEPT_LAYOUTS)(layout)
        self._begins, self._first_blocks = array("q"), array("q")  # per run: its first byte, its first block
        self._counts = array("q")  # and how many values are in it
        self._whose, self._places = array("I"), array("H")  # and of which tensor, and section
        begin, blocks = 0, 0
        for section in range(self.sections):
            up = self._layout(section)
            for entry in up.entries:
                self._begins.append(begin + up.data_begin + entry.begin)
                self._first_blocks.append(blocks)
                self._counts.append(math.prod(entry.shape))
                self._whose.append(self._index[entry.name])
                self._places.append(section)
                blocks += -(-self._counts[-1] // BLOCK_VALUES)
            begin += up.size_bytes
        self.block_count = blocks
        if isinstance(cutting, FragmentTiling):
            whose = np.frombuffer(self._whose, np.uint32) if self._whose else np.zeros(0, np.uint32)
            self._runs = np.argsort(whose, kind="stable").astype(np.uint32)  # tensor by tensor
            self._patterns = dict(cutting.tensors)
            self._first_run = np.searchsorted(whose[self._runs], np.arange(len(self._tensors) + 1))

    @property
    def runs(self) -> int:
        """What it takes grows with them: some 40 bytes each."""
        return len(self._begins)

    def _boxes(self, name: str) -> Iterator[tuple[int, Cutout]]:
        """Of a tensor of a tiling: the run and the box that each section sends."""
        i, pattern = self._index[name], self._patterns[name]
        runs = self._runs[self._first_run[i] : self._first_run[i + 1]].tolist()
        for run, box in zip(runs, pattern.by_sender, strict=True):
            yield run, pattern.cutouts[box]

    # --- checking -------------------------------------------------------------------------------------------------

    def check(self, payload: memoryview, seen: Sequence[Findings] = ()) -> float:
        """Refuse a payload with the wrong tensors, with NaN or Inf, or with bytes that mean nothing, naming the tensor.
        `seen`: what was found while it arrived, in its order; only the rest is looked at. Returns ‖Δ‖."""
        begin, squares, done = 0, 0.0, 0
        for section in range(self.sections):
            up = self._layout(section)
            # What is left over goes to the last section, whose check will say so.
            end = begin + up.size_bytes if section < self.sections - 1 else len(payload)
            check_frame(payload[begin:end], up)
            begin = end
        for findings in [*seen, Findings(range(self.block_count, self.block_count))]:
            missed = self.look(payload, range(done, findings.blocks.start))
            done = findings.blocks.stop
            refusal = missed.refusal or findings.refusal
            if refusal is not None:
                raise refusal
            squares += missed.squares + findings.squares
        return math.sqrt(squares)

    def blocks_inside(self, begin: int, end: int) -> range:
        """The blocks that are between these bytes as a whole."""
        first = self._blocks_before(begin, ends=False)
        return range(first, max(self._blocks_before(end, ends=True), first))

    def _blocks_before(self, byte: int, *, ends: bool) -> int:
        """How many blocks end at `byte` or before, or begin before it."""
        run = bisect_right(self._begins, byte) - 1
        if run < 0:
            return 0
        codec, count = self._tensors[self._whose[run]].codec, self._counts[run]
        per_block = codec.encoded_bytes(min(BLOCK_VALUES, count)) or 1
        inside = byte - self._begins[run]
        blocks = -(-count // BLOCK_VALUES)
        if inside >= codec.encoded_bytes(count):
            return self._first_blocks[run] + blocks
        return self._first_blocks[run] + (inside // per_block if ends else -(-inside // per_block))

    def look(self, payload: memoryview, blocks: range) -> Findings:
        """What is in these blocks of a payload, up to the first that cannot be taken. What needs no decoding is looked
        at run by run."""
        data, scratch = torch.frombuffer(payload, dtype=torch.uint8), torch.empty(BLOCK_VALUES)
        squares, block, run = 0.0, blocks.start, bisect_right(self._first_blocks, blocks.start) - 1
        while block < blocks.stop:
            while run + 1 < len(self._first_blocks) and self._first_blocks[run + 1] <= block:
                run += 1
            codec = self._tensors[self._whose[run]].codec
            start = (block - self._first_blocks[run]) * BLOCK_VALUES
            at_once = blocks.stop - block if isinstance(codec, CastCodec) else 1
            stop = min(start + at_once * BLOCK_VALUES, self._counts[run])
            block += -(-(stop - start) // BLOCK_VALUES)
            first, last = codec.encoded_bytes(start), codec.encoded_bytes(stop)
            encoded = data[self._begins[run] + first : self._begins[run] + last]
            try:
                squares += _sum_of_squares(codec, encoded, stop - start, scratch)
            except Refused as refusal:
                return Findings(blocks, squares, self._named(refusal, run))
        return Findings(blocks, squares)

    def _named(self, refusal: Refused, run: int) -> Refused:
        where = f" in section {self._places[run]} of {self.sections}" if self.sections > 1 else ""
        return type(refusal)(
            f"tensor {self._tensors[self._whose[run]].name!r} {refusal.message}{where}", hint=refusal.hint
        )

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self, payload: Tensor, name: str, start: int, stop: int, out: Tensor, bring: Bring | None = None) -> None:
        """Values [start, stop) of a tensor, from a payload (uint8) that was checked, to fp32. `bring`: its bytes to
        where `out` is, if that is not the host."""
        i = self._index[name]
        tensor = self._tensors[i]
        if not isinstance(self._cutting, int):
            self._read_boxes(payload, name, start, stop, out, bring)
            return
        if self.sections == 1:
            _decode(payload, tensor.codec, self._begins[i], tensor.numel, start, stop, out, bring)
            return
        each = rows_of(tensor.shape, self.sections, 0).numel  # every section but the last ones has so many
        for section in range(start // each, -(-stop // each)):
            run, first = section * len(self._tensors) + i, section * each
            count = self._counts[run]
            begin, end = max(start - first, 0), min(stop - first, count)
            place = out[first + begin - start : first + end - start]
            _decode(payload, tensor.codec, self._begins[run], count, begin, end, place, bring)

    def _read_boxes(self, payload: Tensor, name: str, start: int, stop: int, out: Tensor, bring: Bring | None) -> None:
        """In the order of the tensor's values those of a box are in the box's own order: so of each box it is one range
        that is decoded, and then laid out in stretches."""
        codec = self._tensors[self._index[name]].codec
        for run, box in self._boxes(name):
            if box.last < start or box.first >= stop:
                continue
            first, last = box.before(start), box.before(stop)
            if first == last:
                continue
            values = torch.empty(last - first, device=out.device)
            _decode(payload, codec, self._begins[run], box.numel, first, last, values, bring)
            for part in box.stretches(first, last):
                here = values[part.at - first : part.at - first + part.count * part.length]
                there = out.as_strided(
                    (part.count, part.length), (part.stride, 1), out.storage_offset() + part.place - start
                )
                there.copy_(here.view(part.count, part.length))


class Decoders:
    """The decoders of a run that were used lately, of all its fragments. There may be any number of ways to cut a
    contribution, and workers choose them: what is kept has one bound for all. What was dropped is made again."""

    def __init__(self, most_runs: int = KEPT_RUNS) -> None:
        self._most_runs, self._lock = most_runs, threading.Lock()
        self._kept: OrderedDict[Hashable, Decoder] = OrderedDict()
        self._runs = 0  # of those

    def find(self, key: Hashable, make: Callable[[], Decoder]) -> Decoder:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()  # it may take a second, and nobody waits for it
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._runs += made.runs
            while len(self._kept) > 1 and (self._runs > self._most_runs or len(self._kept) > KEPT_DECODERS):
                _, dropped = self._kept.popitem(last=False)
                self._runs -= dropped.runs
        return made


def _decode(
    payload: Tensor, codec: Codec, at: int, count: int, start: int, stop: int, out: Tensor, bring: Bring | None
) -> None:
    """Values [start, stop) of `count` encoded ones that begin at byte `at`; what the codec cannot take apart is decoded
    with its neighbours."""
    first, last = start - start % codec.block_values, min(stop + -stop % codec.block_values, count)
    encoded = payload[at + codec.encoded_bytes(first) : at + codec.encoded_bytes(last)]
    if bring is not None:
        encoded = bring(encoded)
    if first == start and last == stop:
        codec.decode(encoded, out)
        return
    values = torch.empty(last - first, device=out.device)
    codec.decode(encoded, values)
    out.copy_(values[start - first : stop - first])


def _sum_of_squares(codec: Codec, encoded: Tensor, count: int, room: Tensor) -> float:
    """Σ x² of `count` values; `room` is for a block of them, if they must be decoded. Many times cheaper than
    isfinite(), and finite only if all are."""
    wrong = codec.check(encoded, count)
    if wrong:
        raise BadFrame(f"cannot be decoded: {wrong}")
    if isinstance(codec, CastCodec):
        values = encoded.view(codec.dtype)  # numbers already; a norm of bf16 has three digits
    else:
        values = room[:count]
        codec.decode(encoded, values)
    norm = float(torch.linalg.vector_norm(values))
    if not norm <= PLAUSIBLE:
        # In fp32 the square of an honest number can be infinite: look again, exactly.
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    if norm <= ABSURD:
        return norm * norm
    what = f"values of about {norm:.0e}, which is absurd" if math.isfinite(norm) else "NaN or Inf"
    raise NotFinite(
        f"holds {what}", hint="the contribution was not applied; lower the learning rate, or reload the model"
    )
