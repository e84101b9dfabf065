"""The values of a fragment, cut into blocks that fit a processor's cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from ..wire.frames import Layout

BLOCK_VALUES = 1 << 19  # 2 MiB of fp32: the calls cost little beside the arithmetic, and a handful of blocks is cached
GROUP = 2  # blocks that a thread takes at once: each time costs a change of threads

Room = TypeVar("Room")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor; in the flat fp32 memory of the fragment they begin at `place`."""

    name: str
    start: int
    stop: int
    place: int

    @cached_property
    def count(self) -> int:
        return self.stop - self.start

    @cached_property
    def end(self) -> int:
        return self.place + self.stop - self.start


def cut(of: Layout) -> Iterator[Block]:
    """All blocks of an fp32 frame, in its order."""
    for entry in of.entries:
        numel, first = math.prod(entry.shape), entry.begin // 4
        for start in range(0, numel, BLOCK_VALUES):
            yield Block(entry.name, start, min(start + BLOCK_VALUES, numel), first + start)


def hand_in_hand(
    blocks: Sequence[Block],
    new_room: Callable[[], Room],
    work: Callable[[Block, Room], Made],
    seal: Callable[[Block, Made], None],
) -> None:
    """`work` for every block, by two threads that take the next few each time; then `seal`, with what came of it, block
    by block in their order and never two at a time. Each thread has a room of its own to work in. What goes wrong in
    one of them ends the other too, and the first of it, in the blocks' order, is raised here."""
    groups = [blocks[start : start + GROUP] for start in range(0, len(blocks), GROUP)]
    changed, taken, sealed = threading.Condition(), 0, 0
    errors: dict[int, BaseException] = {}  # by the number of a group

    def run() -> None:
        nonlocal taken, sealed
        number = 0
        try:
            with torch.no_grad():
                room = new_room()
                while True:
                    with changed:
                        if errors or taken == len(groups):
                            return
                        number, taken = taken, taken + 1
                    made = [(block, work(block, room)) for block in groups[number]]
                    with changed:
                        while not errors and sealed != number:
                            changed.wait()
                        if errors:
                            return
                    for block, one in made:
                        seal(block, one)
                    with changed:
                        sealed += 1
                        changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised below
            with changed:
                errors[number] = error
                changed.notify_all()

    other = threading.Thread(target=run, name="outerstep-other-hand")
    other.start()
    run()
    other.join()
    if errors:
        raise errors[min(errors)]
