"""Contributions by digest: cut, kept, arriving in parts, given up."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.digest import digest_of_parts
from outerstep.topology.gossip.node.contributions import Payloads, cut
from outerstep.wire.peers import PartList


@given(data=st.binary(min_size=1, max_size=200), part_size=st.integers(1, 64))
def test_parts_put_together_are_the_payload_and_have_its_digest(data: bytes, part_size: int) -> None:
    payloads = Payloads(1 << 20)
    digest = payloads.put("about", memoryview(data), part_size)
    held = payloads.get(digest)
    assert held is not None
    parts = [held.part(i) for i in range(len(held.parts.digests))]
    assert b"".join(bytes(view) for _, view in parts) == data
    assert [sha256(view).hexdigest() for _, view in parts] == [named for named, _ in parts]
    expected = digest_of_parts("about", len(data), part_size, [sha256(view).digest() for _, view in parts])
    assert held.parts.digest("about") == digest == expected


def test_a_digest_says_what_the_payload_is_and_how_it_is_cut() -> None:
    data = memoryview(bytes(32))
    parts = cut(data, 16)
    digests = {
        parts.digest("contribution/r/0"),
        parts.digest("contribution/r/1"),
        cut(data, 32).digest("contribution/r/0"),
        cut(data[:16], 16).digest("contribution/r/0"),
        PartList(size_bytes=31, part_size_bytes=16, digests=parts.digests).digest("contribution/r/0"),
    }
    assert len(digests) == 5


def test_too_few_or_too_many_parts_have_no_digest() -> None:
    parts = cut(memoryview(bytes(32)), 16)
    assert PartList(size_bytes=32, part_size_bytes=16, digests=parts.digests[:1]).digest("x") == ""
    assert PartList(size_bytes=16, part_size_bytes=16, digests=parts.digests).digest("x") == ""


def test_what_is_put_is_a_copy() -> None:
    data = bytearray(b"before")
    payloads = Payloads(1 << 20)
    digest = payloads.put("x", memoryview(data), 4)
    data[:] = b"after!"
    held = payloads.get(digest)
    assert held is not None
    assert bytes(held.data) == b"before"


def test_only_what_is_needed_or_just_put_is_kept() -> None:
    payloads = Payloads(1 << 20)
    first, second = (payloads.put("x", memoryview(data), 4) for data in (b"first", b"second"))
    payloads.unpin(first)
    payloads.keep_only(set())
    assert payloads.get(first) is None
    assert payloads.get(second) is not None
    assert payloads.memory_bytes == 6
    payloads.unpin(second)
    payloads.keep_only({second})
    assert payloads.get(second) is not None
    payloads.keep_only(set())
    assert payloads.memory_bytes == 0


def test_the_same_put_twice_is_held_once() -> None:
    payloads = Payloads(1 << 20)
    assert payloads.put("x", memoryview(b"same"), 4) == payloads.put("x", memoryview(b"same"), 4)
    assert payloads.memory_bytes == 4


def test_beyond_the_limit_bytes_lie_on_the_disk() -> None:
    payloads = Payloads(8)
    digests = [payloads.put("x", memoryview(bytes([i]) * 8), 4) for i in range(3)]
    assert (payloads.memory_bytes, payloads.spooled_bytes) == (8, 16)
    for i, digest in enumerate(digests):
        held = payloads.get(digest)
        assert held is not None
        assert bytes(held.data) == bytes([i]) * 8


@pytest.mark.parametrize("is_given_up", [False, True])
def test_an_arrival_is_held_when_it_is_whole_unless_it_was_given_up(is_given_up: bool) -> None:
    payloads = Payloads(1 << 20)
    parts = cut(memoryview(b"abcdef"), 4)
    arrival = payloads.expect("d" * 64, parts)
    assert payloads.arrival("d" * 64) is arrival
    assert payloads.get("d" * 64) is None
    for i, piece in enumerate((b"abcd", b"ef")):
        arrival.view(i)[:] = piece
    payloads.keep_only(set() if is_given_up else {"d" * 64})
    held = payloads.arrived("d" * 64)
    assert (held is None) == is_given_up
    assert payloads.memory_bytes == (0 if is_given_up else 6)
    if held is not None:
        assert bytes(held.data) == b"abcdef"
