"""The values of a fragment, cut into blocks that fit a processor's cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ..wire.frames import Layout

BLOCK_VALUES = 1 << 19  # 2 MiB of fp32: the calls cost little beside the arithmetic, and a handful of blocks is cached
GROUP = 2  # blocks that a thread takes at once: each time costs a change of threads

Room = TypeVar("Room")
Made = TypeVar("Made")
Seal = Callable[["Block", Made], None]


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor; in the flat fp32 memory of the fragment they begin at `place`."""

    name: str
    start: int
    stop: int
    place: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        return self.place + self.stop - self.start


def cut(of: Layout) -> Iterator[Block]:
    """All blocks of an fp32 frame, in its order."""
    for entry in of.entries:
        numel, first = math.prod(entry.shape), entry.begin // 4
        for start in range(0, numel, BLOCK_VALUES):
            yield Block(entry.name, start, min(start + BLOCK_VALUES, numel), first + start)


def hand_in_hand(
    blocks: Sequence[Block], new_room: Callable[[], Room], work: Callable[[Block, Room], Made], seal: Seal[Made]
) -> None:
    """`work` for every block, by two threads that take the next few each time; then `seal`, with what came of it, block
    by block in their order and never two at a time. Each thread has a room of its own to work in. What goes wrong in
    one of them ends the other too, and the first of it, in the blocks' order, is raised here."""
    hands = _Hands(blocks, new_room, work, seal)
    other = threading.Thread(target=hands.run, name="outerstep-other-hand")
    other.start()
    hands.run()
    other.join()
    if hands.errors:
        raise hands.errors[min(hands.errors)]


class _Hands(Generic[Room, Made]):
    def __init__(
        self,
        blocks: Sequence[Block],
        new_room: Callable[[], Room],
        work: Callable[[Block, Room], Made],
        seal: Seal[Made],
    ) -> None:
        self._groups = [blocks[start : start + GROUP] for start in range(0, len(blocks), GROUP)]
        self._new_room, self._work, self._seal = new_room, work, seal
        self._taken = self._sealed = 0
        self._changed = threading.Condition()
        self.errors: dict[int, BaseException] = {}  # by the number of a group

    def run(self) -> None:
        number: int | None = 0
        try:
            with torch.no_grad():
                room = self._new_room()
                while (number := self._next()) is not None:
                    group = self._groups[number]
                    made = [self._work(block, room) for block in group]
                    if not self._is_our_turn(number):
                        return
                    for block, one in zip(group, made, strict=True):
                        self._seal(block, one)
                    with self._changed:
                        self._sealed += 1
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asked for the work
            with self._changed:
                self.errors[number or 0] = error
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            if self.errors or self._taken == len(self._groups):
                return None
            self._taken += 1
            return self._taken - 1

    def _is_our_turn(self, number: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: bool(self.errors) or self._sealed == number)
            return not self.errors
