"""Contributions by digest: cut, kept, arriving in parts, given up."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.digest import digest_of_parts
from outerstep.topology.gossip.node.payloads import Holdings, cut
from outerstep.wire.peers import Parts


@given(data=st.binary(min_size=1, max_size=200), part_size=st.integers(1, 64))
def test_parts_put_together_are_the_payload_and_have_its_digest(data: bytes, part_size: int) -> None:
    holdings = Holdings(1 << 20)
    digest = holdings.put("about", memoryview(data), part_size)
    held = holdings.get(digest)
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
        Parts(size_bytes=31, part_size_bytes=16, digests=parts.digests).digest("contribution/r/0"),
    }
    assert len(digests) == 5


def test_too_few_or_too_many_parts_have_no_digest() -> None:
    parts = cut(memoryview(bytes(32)), 16)
    assert Parts(size_bytes=32, part_size_bytes=16, digests=parts.digests[:1]).digest("x") == ""
    assert Parts(size_bytes=16, part_size_bytes=16, digests=parts.digests).digest("x") == ""


def test_what_is_put_is_a_copy() -> None:
    data = bytearray(b"before")
    holdings = Holdings(1 << 20)
    digest = holdings.put("x", memoryview(data), 4)
    data[:] = b"after!"
    held = holdings.get(digest)
    assert held is not None
    assert bytes(held.data) == b"before"


def test_only_what_is_needed_or_just_put_is_kept() -> None:
    holdings = Holdings(1 << 20)
    first, second = (holdings.put("x", memoryview(data), 4) for data in (b"first", b"second"))
    holdings.unpin(first)
    holdings.keep_only(set())
    assert holdings.get(first) is None
    assert holdings.get(second) is not None
    assert holdings.memory_bytes == 6
    holdings.unpin(second)
    holdings.keep_only({second})
    assert holdings.get(second) is not None
    holdings.keep_only(set())
    assert holdings.memory_bytes == 0


def test_the_same_put_twice_is_held_once() -> None:
    holdings = Holdings(1 << 20)
    assert holdings.put("x", memoryview(b"same"), 4) == holdings.put("x", memoryview(b"same"), 4)
    assert holdings.memory_bytes == 4


def test_beyond_the_limit_bytes_lie_on_the_disk() -> None:
    holdings = Holdings(8)
    digests = [holdings.put("x", memoryview(bytes([i]) * 8), 4) for i in range(3)]
    assert (holdings.memory_bytes, holdings.spooled_bytes) == (8, 16)
    for i, digest in enumerate(digests):
        held = holdings.get(digest)
        assert held is not None
        assert bytes(held.data) == bytes([i]) * 8


@pytest.mark.parametrize("is_given_up", [False, True])
def test_an_arrival_is_held_when_it_is_whole_unless_it_was_given_up(is_given_up: bool) -> None:
    holdings = Holdings(1 << 20)
    parts = cut(memoryview(b"abcdef"), 4)
    arrival = holdings.expect("d" * 64, parts)
    assert holdings.arrival("d" * 64) is arrival
    assert holdings.get("d" * 64) is None
    for i, piece in enumerate((b"abcd", b"ef")):
        arrival.view(i)[:] = piece
    holdings.keep_only(set() if is_given_up else {"d" * 64})
    held = holdings.arrived("d" * 64)
    assert (held is None) == is_given_up
    assert holdings.memory_bytes == (0 if is_given_up else 6)
    if held is not None:
        assert bytes(held.data) == b"abcdef"
