"""A frame: the tensors of one fragment as bytes.

    offset  size  what
    0       4     magic "OSF1"
    4       4     N, the header's length, uint32 little-endian
    8       N     header: JSON, padded with spaces so that the data begins at a multiple of 64
    8+N     …     data

    header = {"codec": name, "tensors": [[name, [shape…], begin, end], …]}

begin and end count from the start of the data. The first tensor begins at 0, each other one at the next multiple of 8
after the end of the one before; the gaps are zero; the frame ends at the multiple of 8 after the last end. So there is
exactly one frame for given tensors: overlaps, holes and trailing bytes are not a matter of judgement.

**Sections** are the shares of a fragment that the ranks of a sharded group hold.

A group of n processes that shard their parameters by rows contributes in n sections. Section r holds, of *every* tensor
of the fragment, the rows that torch's Shard(0) gives rank r:

    c = ⌈d₀ / n⌉        rows [r·c, min((r+1)·c, d₀)), possibly none

A tensor without dimensions counts as one row. Each section is a frame of its own, and the payload is the frames one
after the other; so both ends derive every place from the plan, n and r alone, and no row numbers travel. With n = 1 the
only section is the frame of the whole fragment.

A job of another shape (tensor-parallel, pipeline stages) says in its `Join` which boxes its sections hold (tiling.py).
The frame of a section then has the tensors of which it sends a box, each in the box's shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import BadFrame, BadRequest, BadTensors, UnsupportedMedia
from ..tiling import FragmentTiling
from ..types import Count, Label, TensorName
from .messages import decode_json, encode_json

MAGIC = b"OSF1"
DATA_ALIGNMENT = 64
TENSOR_ALIGNMENT = 8
HEADER_SLACK = 16  # how many times longer than right a header may be and still be read, to say what is wrong with it
_PREFIX = struct.Struct("<4sI")
_PICKLE_OR_ZIP = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor in a frame."""

    name: TensorName
    shape: tuple[Count, ...]
    begin: Count
    end: Count


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    codec: Label
    tensors: Annotated[tuple[Entry, ...], Meta(max_length=1_000_000)]


@dataclass(frozen=True)
class Layout:
    """Where everything is in the frame of given tensors. Both ends compute it from the plan; the frame says it too."""

    header: Header
    prefix: bytes
    size_bytes: int

    @cached_property
    def data_begin(self) -> int:
        return len(self.prefix)

    @property
    def places(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(name, shape, offset in the data) of each tensor."""
        return [(entry.name, entry.shape, entry.begin) for entry in self.entries]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return self.header.tensors


def layout(codec: str, tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> Layout:
    """Lay out (name, shape, encoded bytes) one after the other."""
    entries: list[Entry] = []
    offset = 0
    for name, shape, size in tensors:
        entries.append(Entry(name, shape, offset, offset + size))
        offset = _align(offset + size, TENSOR_ALIGNMENT)
    header = Header(codec=codec, tensors=tuple(entries))
    text = encode_json(header)
    text += b" " * (_align(_PREFIX.size + len(text), DATA_ALIGNMENT) - _PREFIX.size - len(text))
    prefix = _PREFIX.pack(MAGIC, len(text)) + text
    return Layout(header, prefix, len(prefix) + offset)


def check_frame(frame: memoryview, expected: Layout) -> None:
    """Is this a frame, and is it the frame of these tensors? The common case is one comparison."""
    if frame[: expected.data_begin] != expected.prefix or len(frame) != expected.size_bytes:
        header = parse_frame(frame, max_header_bytes=HEADER_SLACK * expected.data_begin)
        differences = _differences(header, expected.header)
        if differences:
            raise BadTensors("the tensors are not this fragment's: " + _first(differences))
        raise BadFrame("the header says the right things, but not as the format writes them: compact JSON, then spaces")
    for entry in expected.entries:
        end = expected.data_begin + entry.end
        if any(frame[end : _align(end, TENSOR_ALIGNMENT)]):
            raise BadFrame(f"the padding after tensor {entry.name!r} is not zero")


def parse_frame(frame: memoryview, *, max_header_bytes: int) -> Header:
    """The header, checked for its own consistency and against the frame's size."""
    if len(frame) < _PREFIX.size:
        raise BadFrame(f"a frame has at least {_PREFIX.size} bytes, got {len(frame)}")
    magic, length = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        start = bytes(frame[:4])
        if start.startswith(_PICKLE_OR_ZIP):
            raise UnsupportedMedia(
                "the payload looks like a pickle or a torch.save file",
                hint="send a frame: magic 'OSF1', header, tensors",
            )
        raise BadFrame(f"a frame begins with {MAGIC!r}, got {start!r}")
    if length > max_header_bytes:
        raise BadFrame(f"the header says {length} bytes; at most {max_header_bytes} make sense here")
    data_begin = _PREFIX.size + length
    if data_begin > len(frame):
        raise BadFrame(f"the header says {length} bytes, but the frame has only {len(frame)}")
    if data_begin % DATA_ALIGNMENT:
        raise BadFrame(f"the data must begin at a multiple of {DATA_ALIGNMENT}, got {data_begin}")
    try:
        header = decode_json(frame[_PREFIX.size : data_begin], Header)
    except BadRequest as error:
        raise BadFrame(f"frame header: {error.message}") from error
    _check_offsets(header, len(frame) - data_begin)
    return header


def _check_offsets(header: Header, data_bytes: int) -> None:
    offset = 0
    seen: set[str] = set()
    for entry in header.tensors:
        if entry.name in seen:
            raise BadFrame(f"tensor {entry.name!r} appears twice")
        seen.add(entry.name)
        if entry.begin != offset or entry.end < entry.begin:
            what = "overlaps the one before it" if entry.begin < offset else "leaves a hole before it"
            raise BadFrame(f"tensor {entry.name!r} at [{entry.begin}, {entry.end}) {what}: it must begin at {offset}")
        offset = _align(entry.end, TENSOR_ALIGNMENT)
    if offset != data_bytes:
        what = "trailing bytes" if offset < data_bytes else "too few bytes"
        raise BadFrame(f"{what}: the tensors take {offset} bytes, the frame has {data_bytes}")


def _differences(got: Header, expected: Header) -> list[str]:
    if got.codec != expected.codec:
        return [f"encoded as {got.codec!r}, run has {expected.codec!r}"]
    ours = {e.name: e for e in expected.tensors}
    theirs = {e.name: e for e in got.tensors}
    found = [f"{name!r} is missing" for name in ours if name not in theirs]
    found += [f"{name!r} is unknown" for name in theirs if name not in ours]
    for name, entry in theirs.items():
        if name in ours and entry.shape != ours[name].shape:
            found.append(f"{name!r}: got {list(entry.shape)}, run has {list(ours[name].shape)}")
        elif name in ours and entry.end - entry.begin != ours[name].end - ours[name].begin:
            want = ours[name].end - ours[name].begin
            found.append(f"{name!r}: got {entry.end - entry.begin} bytes, {expected.codec} takes {want}")
    if not found and [e.name for e in got.tensors] != [e.name for e in expected.tensors]:
        found.append("the tensors are in another order")
    return found


def _first(lines: list[str], count: int = 3) -> str:
    return "; ".join(lines[:count]) + (f"; and {len(lines) - count} more" if len(lines) > count else "")


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


# --- sections ------------------------------------------------------------------------------------------------------

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


def tiled_layout(
    codec: str, encoded_bytes: Mapping[str, Callable[[int], int]], tiling: FragmentTiling, section: int
) -> Layout:
    """The same for a job that holds boxes. `encoded_bytes`: by tensor, of so many values."""
    boxes = tiling.sent[section]
    return layout(codec, [(name, box.size, encoded_bytes[name](box.numel)) for name, box in boxes])


def most_bytes(whole: Layout, tensors: Sequence[tuple[str, Shape, Callable[[int], int]]], sections: int) -> int:
    """How large a payload in so many sections can be, without laying them all out. Of every tensor some sections hold
    ⌈d₀ / n⌉ rows, one may hold the rest, the others none; what a codec needs for a block that is not full, it needs in
    each of them. In a section's header no number is longer than in the whole one's; only an empty share of a tensor
    without dimensions is written with one character more."""
    if sections == 1:
        return whole.size_bytes
    total = sections * _align(whole.data_begin + len(tensors), DATA_ALIGNMENT)
    for _, shape, encoded_bytes in tensors:
        rows, values = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        height = max(-(-rows // sections), 1)
        full, rest = divmod(rows, height)
        total += full * _align(encoded_bytes(height * values), TENSOR_ALIGNMENT)
        total += _align(encoded_bytes(rest * values), TENSOR_ALIGNMENT)
    return total


def row_pieces(entries: Sequence[Entry], sections: int, section: int, value_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) in the data of the *whole* fragment's frame of the rows of one section, tensor by tensor."""
    for entry in entries:
        rows = rows_of(entry.shape, sections, section)
        begin = entry.begin + rows.first_value * value_bytes
        yield begin, begin + rows.numel * value_bytes
