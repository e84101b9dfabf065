"""Two threads at the blocks of a fragment."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from outerstep.server.blocks import GROUP, Block, hand_in_hand

BLOCKS = [Block("t", i, i + 1, i) for i in range(10 * GROUP + 1)]


class Work:
    """Notes who does what; each thread's room is the thread. Block number `slow` takes until the other thread has
    worked on another one."""

    def __init__(self, slow: int = -1, fails_at: int = -1) -> None:
        self.by: dict[int, threading.Thread] = {}
        self._slow, self._fails_at = slow, fails_at
        self._changed = threading.Condition()

    def __call__(self, block: Block, room: threading.Thread) -> int:
        assert room is threading.current_thread()
        assert not torch.is_grad_enabled()
        if block.place == self._fails_at:
            raise FloatingPointError("not finite")
        with self._changed:
            if block.place == self._slow:
                assert self._changed.wait_for(lambda: any(who is not room for who in self.by.values()), 60.0)
            self.by[block.place] = room
            self._changed.notify_all()
        return -block.place


def run(work: Work, seal_fails_at: int = -1) -> list[int]:
    sealed: list[int] = []
    sealing = threading.Lock()

    def seal(block: Block, made: int) -> None:
        assert sealing.acquire(blocking=False), "two blocks are sealed at the same time"
        try:
            assert made == -block.place
            if block.place == seal_fails_at:
                raise FloatingPointError("cannot be sealed")
            sealed.append(block.place)
        finally:
            sealing.release()

    try:
        hand_in_hand(BLOCKS, threading.current_thread, work, seal)
    finally:
        assert not any(thread.name == "outerstep-other-hand" for thread in threading.enumerate())
    return sealed


@pytest.mark.parametrize("slow", [-1, 0, GROUP, 5 * GROUP])
def test_every_block_is_sealed_once_in_its_order_however_slow_one_of_them_is(slow: int) -> None:
    work = Work(slow)
    assert run(work) == [block.place for block in BLOCKS]
    assert sorted(work.by) == [block.place for block in BLOCKS]


def test_both_threads_work() -> None:
    """While one of them is busy with its first block the other goes on with the next."""
    work = Work(slow=0)
    run(work)
    assert len(set(work.by.values())) == 2
    assert threading.current_thread() in work.by.values()


@pytest.mark.parametrize("at", [0, GROUP, 10 * GROUP])
def test_what_goes_wrong_in_either_thread_is_raised_and_ends_both(at: int) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        run(Work(fails_at=at))
    work = Work()
    with pytest.raises(FloatingPointError, match="cannot be sealed"):
        run(work, seal_fails_at=at)
    assert max(work.by) <= at + 3 * GROUP  # the other thread has not gone on for long


def test_of_several_mistakes_the_first_in_the_order_of_the_blocks_is_raised() -> None:
    both = threading.Barrier(2)

    def work(block: Block, room: None) -> None:
        if block.place in (0, GROUP):
            both.wait(60.0)  # each thread is at the first block of its group
            if block.place == 0:
                time.sleep(0.02)
            raise FloatingPointError(f"block {block.place}")

    with pytest.raises(FloatingPointError, match="block 0"):
        hand_in_hand(BLOCKS, lambda: None, work, lambda block, made: None)


def test_no_blocks() -> None:
    hand_in_hand([], lambda: None, lambda block, room: None, lambda block, made: None)
