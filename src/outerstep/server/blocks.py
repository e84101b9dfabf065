"""The values of a fragment, cut into blocks that fit a processor's cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..wire.frames import Layout

BLOCK_VALUES = 1 << 18  # 1 MiB of fp32: the calls cost little beside the arithmetic, and a handful of blocks is cached
GROUP = 4  # blocks that go from one thread to the other at once: each time costs a change of threads
LEAD = 2  # groups that one thread may be ahead of the other: what it has done is still in the cache they share


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


def ahead(blocks: Sequence[Block], work: Callable[[Block], None]) -> Iterator[Block]:
    """Every block in its order, after `work` was done for it: by a thread of its own, which is a few blocks ahead of
    whoever asks for them. What goes wrong there is raised here."""
    with ThreadPoolExecutor(1, thread_name_prefix="outerstep-ahead") as thread:
        under_way: deque[tuple[Sequence[Block], Future[None]]] = deque()
        for start in range(0, len(blocks), GROUP):
            group = blocks[start : start + GROUP]
            under_way.append((group, thread.submit(_each, work, group)))
            if len(under_way) > LEAD:
                group, done = under_way.popleft()
                done.result()
                yield from group
        for group, done in under_way:
            done.result()
            yield from group


def _each(work: Callable[[Block], None], blocks: Sequence[Block]) -> None:
    for block in blocks:
        work(block)
