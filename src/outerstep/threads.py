"""How many threads this process may use for arithmetic, and how they share the blocks of a fragment.

torch divides one operation among threads, which gains nothing for a block that fits a cache; and sums get other bits
with another number of threads. So here each thread has blocks of its own and takes every operation on them alone: any
number of threads gives the same bits, if what is summed over blocks is added in the order of the blocks (`seal`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

CPU_LIMIT_FILE = Path("/sys/fs/cgroup/cpu.max")
LEAST = 2  # one moves a block while the other hashes
HELPERS_KEPT = 64
PER_TURN = 2  # blocks that a thread takes at once, if there are many: each time costs a change of threads
AHEAD = 2  # turns per thread before the first that is not sealed: what is sealed is still in a cache

Block = TypeVar("Block")
Room = TypeVar("Room")
Made = TypeVar("Made")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or the container's limit if that is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_LIMIT_FILE.read_text().split()
        if quota != "max":
            cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def usable_threads() -> int:
    """One for each usable core; OMP_NUM_THREADS or `torch.set_num_threads`, if somebody set one of them; two at
    least."""
    cores = usable_cores()
    with contextlib.suppress(ValueError):
        # OMP_NUM_THREADS may be a list, of which the first is for the outermost level.
        return max(min(int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]), cores), LEAST)
    import torch  # here: commands without tensors ask for the number of cores

    chosen = torch.get_num_threads()
    # By itself torch takes the physical cores, so no less than half of all.
    return max(chosen if chosen < cores // 2 else cores, LEAST)


class ThreadTeam:
    """Threads that wait for blocks to work on; started when they are first needed."""

    def __init__(self, count: int | None = None, name: str = "outerstep-block") -> None:
        """`count`: None = as many as this process may use."""
        self.count = usable_threads() if count is None else count
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=name, initializer=_work_alone)
        self._beginning, self._has_begun = threading.Lock(), False

    def close(self) -> None:
        self._pool.shutdown()

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """One piece of work, by one of them. It must not wait for another."""
        return self._begun().submit(work, *arguments)

    def share(
        self,
        blocks: Sequence[Block],
        new_room: Callable[[], Room],
        work: Callable[[Block, Room], Made],
        seal: Callable[[Block, Made], None] = lambda block, made: None,
    ) -> None:
        """`work` for every block, by all threads at once; and `seal`, with what came of it, block by block in their
        order and never two at a time. Each thread has a room of its own to work in. What goes wrong in one of them ends
        the others too, and the first of it, in the blocks' order, is raised here. Not to be called by `work`."""
        if not blocks:
            return
        shared = _SharedBlocks(blocks, self.count, work, seal)
        for one in [self._begun().submit(shared.take_turns, new_room) for _ in range(shared.threads)]:
            one.result()
        if shared.errors:
            raise shared.errors[min(shared.errors)]

    def _begun(self) -> ThreadPoolExecutor:
        """All threads at once, when the first is needed: while one begins, torch's number of threads is another one for
        a moment (`_work_alone`), and that must not happen in the middle of somebody's training."""
        with self._beginning:
            if not self._has_begun:
                together = threading.Barrier(self.count)
                for one in [self._pool.submit(together.wait) for _ in range(self.count)]:
                    one.result()
                self._has_begun = True
        return self._pool


class _SharedBlocks:
    """The blocks of one call, in turns. No thread waits for one that has not begun, so any number of them finish."""

    def __init__(
        self,
        blocks: Sequence[Any],
        threads: int,
        work: Callable[[Any, Any], Any],
        seal: Callable[[Any, Any], None],
    ) -> None:
        size = PER_TURN if len(blocks) > 4 * PER_TURN * threads else 1
        self._turns = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        self.threads = min(threads, len(self._turns))
        self.errors: dict[int, BaseException] = {}  # by the number of a turn
        self._work, self._seal = work, seal
        self._changed = threading.Condition()
        self._taken = self._sealed = 0  # turns
        self._sealing = False
        self._done: dict[int, list[Any]] = {}  # what came of turns that are not sealed

    def take_turns(self, new_room: Callable[[], Any]) -> None:
        import torch

        number = 0
        try:
            with torch.no_grad():
                room = new_room()
                while (number := self._take()) >= 0:
                    made = [self._work(block, room) for block in self._turns[number]]
                    with self._changed:
                        self._done[number] = made
                    self._seal_ready()
        except BaseException as error:  # noqa: BLE001 - raised by `share`
            self._fail(number, error)

    def _take(self) -> int:
        """The number of the next turn; -1 if there is none for this thread."""
        with self._changed:
            while not self.errors and self._sealed + AHEAD * self.threads <= self._taken < len(self._turns):
                self._changed.wait()
            if self.errors or self._taken == len(self._turns):
                return -1
            self._taken += 1
            return self._taken - 1

    def _seal_ready(self) -> None:
        """Seal what is next in order and done, unless another thread is at it: that one will find it."""
        with self._changed:
            if self._sealing:
                return
            self._sealing = True
        while True:
            with self._changed:
                number = self._sealed
                if self.errors or number not in self._done:
                    self._sealing = False
                    return
                made = self._done.pop(number)
            try:
                for block, one in zip(self._turns[number], made, strict=True):
                    self._seal(block, one)
            except BaseException as error:  # noqa: BLE001 - raised by `share`
                self._fail(number, error)
                return
            with self._changed:
                self._sealed += 1
                self._changed.notify_all()

    def _fail(self, number: int, error: BaseException) -> None:
        with self._changed:
            self.errors[number] = error
            self._changed.notify_all()


@cache
def process_team() -> ThreadTeam:
    """The one of whoever has no other."""
    return ThreadTeam()


class Helpers:
    """Threads for what waits: for a socket, for a GPU. A helper that is done waits for more, and a new one is started
    only while none is idle: an exchange sends hundreds of requests. Nothing of them keeps the process alive."""

    def __init__(self, keep: int = HELPERS_KEPT) -> None:
        """`keep`: so many idle ones at most."""
        self.started = self.busy = 0
        self._keep = keep
        self._idle: list[queue.SimpleQueue[tuple[Callable[[], object], str]]] = []
        self._lock = threading.Lock()

    def run(self, work: Callable[..., object], *arguments: Any, name: str = "outerstep-helper") -> None:
        """Do it beside everything else. What goes wrong in it is reported as of any thread: `work` catches what
        somebody is to know. `name`: of the thread meanwhile."""
        with self._lock:
            self.busy += 1
            inbox = self._idle.pop() if self._idle else None
            self.started += inbox is None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._help, args=(inbox,), name=name, daemon=True).start()
        inbox.put((partial(work, *arguments), name))

    def _help(self, inbox: queue.SimpleQueue[tuple[Callable[[], object], str]]) -> None:
        thread, stays = threading.current_thread(), True
        while stays:
            work, thread.name = inbox.get()
            try:
                work()
            except BaseException:  # noqa: BLE001 - reported as if the thread had been its own
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
            del work  # and with it the memory of what it worked on
            with self._lock:
                self.busy -= 1
                stays = len(self._idle) < self._keep
                if stays:
                    self._idle.append(inbox)


@cache
def process_helpers() -> Helpers:
    """Those of the whole process."""
    return Helpers()


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=process_team.cache_clear)
    os.register_at_fork(after_in_child=process_helpers.cache_clear)


_beginning = threading.Lock()


def _work_alone() -> None:
    """torch's operations in this thread are not divided among others. The number is each thread's own; but to set it
    also sets that of threads to come, so a thread that ends at once sets that back."""
    import torch

    with _beginning:
        before = torch.get_num_threads()
        if before == 1:
            return
        torch.set_num_threads(1)
        back = threading.Thread(target=torch.set_num_threads, args=(before,))
        back.start()
        back.join()
