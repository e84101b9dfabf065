"""Memory of frames is used again when nobody reads or writes it any more, and not before."""

from __future__ import annotations

import sys

import pytest
import torch

from outerstep.core.codecs import BF16, Dither
from outerstep.core.codecs.recipe import CodecRule
from outerstep.core.feedback import ErrorFeedback
from outerstep.topology.encode import ReadyDeltas, Sender, write_frame
from outerstep.topology.payload import SMALL_BYTES, Memory, OutgoingFrame
from outerstep.wire.frames import layout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is kept")
LARGE = 4 * SMALL_BYTES


def test_what_is_given_back_is_taken_next() -> None:
    memory = Memory(keep=2)
    first = memory.take(LARGE)
    assert len(first) == LARGE
    base = first.obj
    memory.give_back(first)
    second = memory.take(LARGE - 64)
    assert second.obj is base
    assert len(second) == LARGE - 64
    assert memory.take(LARGE).obj is not base


def test_a_small_frame_does_not_take_a_large_piece_away_nor_a_small_piece_hold_a_large_frame() -> None:
    memory = Memory(keep=2)
    large = memory.take(8 * LARGE)
    memory.give_back(large)
    assert memory.take(LARGE).obj is not large.obj
    assert memory.take(9 * LARGE).obj is not large.obj
    assert memory.take(8 * LARGE).obj is large.obj


def test_so_many_are_kept_and_no_more() -> None:
    memory = Memory(keep=2)
    pieces = [memory.take(LARGE) for _ in range(3)]
    for piece in pieces:
        memory.give_back(piece)
    found = {id(memory.take(LARGE).obj) for _ in range(3)}
    assert len(found & {id(piece.obj) for piece in pieces}) == 2
    none = Memory()
    piece = none.take(LARGE)
    none.give_back(piece)
    assert none.take(LARGE).obj is not piece.obj


def test_what_lies_idle_can_still_be_used() -> None:
    memory = Memory(keep=1)
    piece = memory.take(LARGE)
    piece[:] = bytes([7]) * LARGE
    memory.give_back(piece)
    for _ in range(3):
        memory.rest()
    again = memory.take(LARGE)
    assert again.obj is piece.obj
    again[:] = bytes([8]) * LARGE
    memory.rest()
    assert bytes(again[:9]) == bytes([8]) * 9


def test_small_ones_and_none_are_not_kept() -> None:
    memory = Memory(keep=2)
    for size in (0, 64):
        piece = memory.take(size)
        assert len(piece) == size
        memory.give_back(piece)


def test_a_payload_that_is_still_read_keeps_its_memory() -> None:
    """A call that nobody waits for any more may still be sending."""
    memory, values = Memory(keep=1), torch.randn(LARGE)
    up = layout("bf16", [("w", (LARGE,), BF16.encoded_bytes(LARGE))])

    def make() -> OutgoingFrame:
        payload = OutgoingFrame(up, 1 << 20, memory=memory)
        sender = Sender(0, ReadyDeltas({"w": values}), {"w": CodecRule(BF16)}, ErrorFeedback(), lambda _: Dither(0), {})
        write_frame(payload, up, sender)
        return payload

    payload = make()
    part = payload.read(1)
    before = bytes(part)
    payload.release()
    base = part.obj
    values.zero_()
    second = make()
    assert bytes(part) == before
    payload.done_reading()
    assert second.read(0).obj is not base
    second.done_reading()
    second.release()
    third = make()
    assert third.read(0).obj is not base
    third.release()
    third.release()  # once is enough
