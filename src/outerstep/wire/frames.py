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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import BadFrame, BadRequest, BadTensors, UnsupportedMedia
from ..types import Count, Label, TensorName
from . import strict_json

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

    @property
    def data_begin(self) -> int:
        return len(self.prefix)

    @property
    def places(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(name, shape, offset in the data) of each tensor."""
        return [(entry.name, entry.shape, entry.begin) for entry in self.entries]

    @property
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
    text = strict_json.encode(header)
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
    _check_gaps(frame, expected)


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
        header = strict_json.decode(frame[_PREFIX.size : data_begin], Header)
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


def _check_gaps(frame: memoryview, of: Layout) -> None:
    for entry in of.entries:
        end = of.data_begin + entry.end
        if any(frame[end : _align(end, TENSOR_ALIGNMENT)]):
            raise BadFrame(f"the padding after tensor {entry.name!r} is not zero")


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
