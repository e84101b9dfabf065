"""Two threads at the blocks of a fragment: one ahead, one behind."""

from __future__ import annotations

import threading

import pytest

from outerstep.server.blocks import GROUP, LEAD, Block, ahead

BLOCKS = [Block("t", i, i + 1, i) for i in range(10 * GROUP + 1)]


def test_every_block_comes_in_its_order_and_after_its_work() -> None:
    done: list[Block] = []
    came = []
    for block in ahead(BLOCKS, done.append):
        assert block in done
        came.append(block)
    assert came == done == BLOCKS


def test_the_work_is_done_by_another_thread_and_is_only_a_little_ahead() -> None:
    threads: set[int] = set()
    done: list[Block] = []

    def work(block: Block) -> None:
        threads.add(threading.get_ident())
        done.append(block)

    for behind, _ in enumerate(ahead(BLOCKS, work)):
        assert len(done) <= behind + (LEAD + 1) * GROUP
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_goes_wrong_ahead_is_raised_where_the_blocks_are_taken() -> None:
    def work(block: Block) -> None:
        if block.place == 2 * GROUP + 1:
            raise FloatingPointError("not finite")

    came: list[Block] = []
    with pytest.raises(FloatingPointError, match="not finite"):
        came.extend(ahead(BLOCKS, work))
    assert came == BLOCKS[: 2 * GROUP]


def test_nothing_is_worked_on_any_more_when_whoever_takes_the_blocks_has_failed() -> None:
    done: list[Block] = []

    def take() -> None:
        for _ in ahead(BLOCKS, done.append):
            raise FloatingPointError("not finite")

    with pytest.raises(FloatingPointError):
        take()
    assert len(done) <= (LEAD + 1) * GROUP
    assert not any(thread.name.startswith("outerstep-ahead") for thread in threading.enumerate())


def test_no_blocks() -> None:
    assert list(ahead([], lambda _: None)) == []
