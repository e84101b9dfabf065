"""Hashes that prove that bytes arrived unchanged.

A payload travels in parts. Each part has its own hash, so that one flipped byte costs one part; the payload's hash is
the hash of its parts' hashes, so that the bytes are read only once:

    part_hash_i  = xxh3_64(part_i)
    payload_hash = xxh3_128(part_hash_0 ‖ part_hash_1 ‖ …)

An anchor is identified by a tree over its values, so that it can be hashed by many threads at once, on ranges, and on a
GPU. A leaf is 65,536 fp32 values of one tensor, the last of a tensor shorter; no leaf is of two tensors. The root is
over the leaves of all tensors in the fragment's order:

    leaf_i = xxh3_64(values_i)
    root   = "t" ‖ xxh3_128(leaf_0 ‖ leaf_1 ‖ …)

An end of protocol 1 knows another hash, over the values one after the other; the form of a hash tells which it is.

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

new_part_hash = xxhash.xxh3_64
"""For a part that comes piece by piece: `update` with each, then `hexdigest`."""


def payload_hash(part_hashes: Sequence[str]) -> str:
    """32 hex digits over the parts' hashes, in order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(part_hashes)))


def data_hash(pieces: Iterable[Buffer]) -> str:
    """32 hex digits over the concatenation of `pieces`: the identity of an anchor, whatever carried it."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


LEAF_VALUES = 65_536
LEAF_BYTES = 4 * LEAF_VALUES
TREE_MARK = "t"


def is_tree(anchor_hash: str) -> bool:
    """Or one over the values as they follow each other?"""
    return anchor_hash.startswith(TREE_MARK)


def leaf_count(size_bytes: int) -> int:
    """How many leaves a tensor has: ⌈size / leaf⌉."""
    return -(-size_bytes // LEAF_BYTES)


def leaves_of(data: Buffer) -> bytes:
    """8 bytes per leaf, of values of one tensor from a border between leaves on."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    digest = xxhash.xxh3_64_digest
    return b"".join(digest(view[begin : begin + LEAF_BYTES]) for begin in range(0, len(view), LEAF_BYTES))


def tree_root(leaves: Buffer) -> str:
    """The mark and 32 hex digits."""
    return TREE_MARK + xxhash.xxh3_128_hexdigest(leaves)


def tree_hash(tensors: Iterable[Buffer]) -> str:
    """Of tensors that lie in memory, each as one piece."""
    return tree_root(b"".join(map(leaves_of, tensors)))


def hash_like(told: str, tensors: Iterable[Buffer]) -> str:
    """By the rule that made `told`."""
    return tree_hash(tensors) if is_tree(told) else data_hash(tensors)


class TreeHasher:
    """The same, of values that come piece by piece; `next_tensor` between two tensors."""

    def __init__(self) -> None:
        self._leaves: list[bytes | Callable[[], bytes]] = []
        self._open, self._open_bytes = xxhash.xxh3_64(), 0

    def next_tensor(self) -> None:
        if self._open_bytes:
            self._close_leaf()

    def update(self, data: Buffer) -> None:
        view = memoryview(data)
        if self._open_bytes:
            missing = LEAF_BYTES - self._open_bytes
            self._extend(view[:missing])
            view = view[missing:]
        whole = len(view) - len(view) % LEAF_BYTES
        if whole:
            self._leaves.append(leaves_of(view[:whole]))
        if whole < len(view):
            self._extend(view[whole:])

    def promise(self, leaves: Callable[[], bytes]) -> None:
        """Leaves that follow, which something else is hashing: they are asked for when all are needed."""
        assert not self._open_bytes
        self._leaves.append(leaves)

    def hexdigest(self) -> str:
        """Of everything so far."""
        self._leaves = [each if isinstance(each, bytes) else each() for each in self._leaves]
        last = self._open.digest() if self._open_bytes else b""
        return tree_root(b"".join([*(each for each in self._leaves if isinstance(each, bytes)), last]))

    def _extend(self, data: memoryview) -> None:
        self._open.update(data)
        self._open_bytes += len(data)
        if self._open_bytes == LEAF_BYTES:
            self._close_leaf()

    def _close_leaf(self) -> None:
        self._leaves.append(self._open.digest())
        self._open.reset()
        self._open_bytes = 0


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
