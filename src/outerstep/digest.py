"""Hashes that prove bytes arrived as they left.

A payload travels in parts. Each part has a hash of its own, so that one flipped byte costs one part; the payload's hash
is the hash of its parts' hashes, so that nobody reads the bytes a second time:

    part_hash_i  = xxh3_64(part_i)
    payload_hash = xxh3_128(part_hash_0 ‖ part_hash_1 ‖ …)

xxh3 finds accidents, not forgers: who may speak at all is decided elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import xxhash

Buffer = bytes | bytearray | memoryview


def part_hash(data: Buffer) -> str:
    """16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def payload_hash(part_hashes: Sequence[str]) -> str:
    """32 hex digits over the parts' hashes, in order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(part_hashes)))


def data_hash(pieces: Iterable[Buffer]) -> str:
    """32 hex digits over the concatenation of `pieces`: the identity of an anchor, whatever carried it."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
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
