"""Hashes that prove that bytes arrived unchanged.

A payload travels in parts. Each part has its own hash, so that one flipped byte costs one part; the payload's hash is
the hash of its parts' hashes, so that the bytes are read only once:

    part_hash_i  = xxh3_64(part_i)
    payload_hash = xxh3_128(part_hash_0 ‖ part_hash_1 ‖ …)

xxh3 detects accidents, not forgery: authentication happens elsewhere. Among peers without a server, bytes come from any
peer that has them, and some peers may lie. There a payload is identified by its *digest*, which withstands forgery:

    part_digest_i = sha256(part_i)
    digest        = sha256(about ‖ 0 ‖ size ‖ part_size ‖ part_digest_0 ‖ part_digest_1 ‖ …)

The sizes are uint64, big-endian. `about` says what the payload is, so that one cannot be passed off as another. A peer
that gets the parts' digests can check them against the payload's, and then each part against its own.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import accumulate

import xxhash

Buffer = bytes | bytearray | memoryview


part_hash: Callable[[Buffer], str] = xxhash.xxh3_64_hexdigest
"""16 hex digits."""


def payload_hash(part_hashes: Sequence[str]) -> str:
    """32 hex digits over the parts' hashes, in order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(part_hashes)))


def data_hash(pieces: Iterable[Buffer]) -> str:
    """32 hex digits over the concatenation of `pieces`: the identity of an anchor, whatever carried it."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def part_digest(data: Buffer) -> bytes:
    """32 bytes."""
    return sha256(data).digest()


def digest_of_parts(about: str, size_bytes: int, part_size_bytes: int, part_digests: Iterable[bytes]) -> str:
    """64 hex digits: the identity, among peers, of a payload of `size_bytes` in parts of `part_size_bytes`."""
    state = sha256(about.encode() + b"\0" + struct.pack(">QQ", size_bytes, part_size_bytes))
    for digest in part_digests:
        state.update(digest)
    return state.hexdigest()


def file_hash(file: str | os.PathLike[str]) -> str:
    """`data_hash` of a file's bytes, read a MiB at a time."""
    with open(file, "rb", buffering=0) as source:
        return data_hash(iter(lambda: source.read(1 << 20), b""))


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """How many parts a payload has: ⌈size / part_size⌉."""
    return -(-size_bytes // part_size_bytes)


def part_range(part: int, size_bytes: int, part_size_bytes: int) -> tuple[int, int]:
    """Where part number `part` begins and ends."""
    begin = part * part_size_bytes
    return begin, min(begin + part_size_bytes, size_bytes)


class Parts:
    """How a payload of several sections is cut into parts. Each section has its own parts, the last one shorter; parts
    are numbered across all sections in order. For one section: `part_count` and `part_range`."""

    def __init__(self, section_bytes: Sequence[int], part_size_bytes: int) -> None:
        self.section_bytes, self.part_size_bytes = section_bytes, part_size_bytes
        self._first_parts = list(accumulate((part_count(size, part_size_bytes) for size in section_bytes), initial=0))
        self._first_bytes = list(accumulate(section_bytes, initial=0))
        self.count = self._first_parts[-1]

    def of_section(self, section: int) -> range:
        """The numbers of its parts."""
        return range(self._first_parts[section], self._first_parts[section + 1])

    def range(self, part: int) -> tuple[int, int]:
        """Where part number `part` begins and ends in the payload."""
        section = bisect_right(self._first_parts, part) - 1
        offset = self._first_bytes[section]
        begin, end = part_range(part - self._first_parts[section], self.section_bytes[section], self.part_size_bytes)
        return offset + begin, offset + end
