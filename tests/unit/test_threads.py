"""Several threads at the blocks of a fragment, and how many there are."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outerstep import threads
from outerstep.threads import AHEAD, PER_TURN, Helpers, ThreadTeam, process_team, usable_cores, usable_threads
from support import wait_until

BLOCKS = range(41)
COUNTS = [1, 2, 3, 8]


@pytest.fixture(params=COUNTS)
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    made = ThreadTeam(request.param)
    yield made
    made.close()


class Work:
    """Notes who does what; each thread's room is the thread. Block number `slow` takes until another thread has worked
    on another one."""

    def __init__(self, slow: int = -1, fails_at: int = -1) -> None:
        self.by: dict[int, threading.Thread] = {}
        self._slow, self._fails_at = slow, fails_at
        self._changed = threading.Condition()

    def __call__(self, block: int, room: threading.Thread) -> int:
        assert room is threading.current_thread()
        assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 1
        if block == self._fails_at:
            raise FloatingPointError("not finite")
        with self._changed:
            if block == self._slow:
                assert self._changed.wait_for(lambda: any(who is not room for who in self.by.values()), 60.0)
            self.by[block] = room
            self._changed.notify_all()
        return -block


def run(team: ThreadTeam, work: Work, seal_fails_at: int = -1) -> list[int]:
    sealed: list[int] = []
    sealing = threading.Lock()

    def seal(block: int, made: int) -> None:
        assert sealing.acquire(blocking=False), "two blocks are sealed at the same time"
        try:
            assert made == -block
            if block == seal_fails_at:
                raise FloatingPointError("cannot be sealed")
            sealed.append(block)
        finally:
            sealing.release()

    team.share(BLOCKS, threading.current_thread, work, seal)
    return sealed


class TestATeam:
    def test_every_block_is_sealed_once_and_in_order(self, team: ThreadTeam) -> None:
        work = Work()
        for _ in range(3):
            assert run(team, work) == list(BLOCKS)
        assert sorted(work.by) == list(BLOCKS)

    @pytest.mark.parametrize("slow", [0, 1, 20])
    @pytest.mark.parametrize("count", [2, 3, 8])
    def test_a_slow_block_changes_no_order(self, count: int, slow: int) -> None:
        assert run(ThreadTeam(count), Work(slow)) == list(BLOCKS)

    def test_it_has_as_many_threads_as_it_was_told(self, team: ThreadTeam) -> None:
        """Each waits until all of them are at work."""
        met = threading.Barrier(team.count)

        def work(block: int, room: None) -> None:
            met.wait(60.0)

        team.share(range(team.count), lambda: None, work)

    def test_nobody_runs_far_ahead_of_what_is_sealed(self, team: ThreadTeam) -> None:
        """What is sealed should still be in a cache."""
        sealed: list[int] = []

        def work(block: int, room: None) -> None:
            assert block < len(sealed) + AHEAD * team.count * PER_TURN
            if block == 0:
                time.sleep(0.05)  # so that the others could

        team.share(range(1000), lambda: None, work, lambda block, made: sealed.append(block))
        assert sealed == list(range(1000))

    @pytest.mark.parametrize("at", [0, 1, 20, 40])
    def test_what_goes_wrong_in_any_thread_is_raised_and_ends_all(self, team: ThreadTeam, at: int) -> None:
        with pytest.raises(FloatingPointError, match="not finite"):
            run(team, Work(fails_at=at))
        work = Work()
        with pytest.raises(FloatingPointError, match="cannot be sealed"):
            run(team, work, seal_fails_at=at)
        assert max(work.by) <= at + (AHEAD + 1) * team.count * PER_TURN  # the others have not gone on for long
        assert run(team, Work()) == list(BLOCKS)  # and it can be used again

    def test_a_room_that_cannot_be_made_is_an_error(self, team: ThreadTeam) -> None:
        def no_room() -> None:
            raise MemoryError("no room")

        with pytest.raises(MemoryError, match="no room"):
            team.share(BLOCKS, no_room, lambda block, room: None)

    def test_of_several_mistakes_the_first_in_the_order_of_the_blocks_is_raised(self) -> None:
        both = threading.Barrier(2)

        def work(block: int, room: None) -> None:
            both.wait(60.0)  # each thread is at its first block
            if block == 0:
                time.sleep(0.02)
            raise FloatingPointError(f"block {block}")

        with pytest.raises(FloatingPointError, match="block 0"):
            ThreadTeam(2).share(range(2), lambda: None, work)

    def test_no_blocks(self, team: ThreadTeam) -> None:
        team.share([], lambda: None, lambda block, room: None)

    def test_several_callers_share_one_team(self, team: ThreadTeam) -> None:
        """Also more callers than threads: nobody waits for work that has not begun."""
        found: list[list[int]] = []
        callers = [threading.Thread(target=lambda: found.append(run(team, Work()))) for _ in range(10)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60.0)
        assert found == [list(BLOCKS)] * 10

    def test_torch_in_other_threads_keeps_its_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            run(ThreadTeam(4), Work())
            seen: list[int] = [torch.get_num_threads()]
            later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            later.start()
            later.join()
            assert seen == [3, 3]
        finally:
            torch.set_num_threads(before)


class TestHowMany:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """64 cores and no limits."""
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
        monkeypatch.setattr(threads, "CPU_LIMIT_FILE", tmp_path / "cpu.max")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)

    @pytest.mark.parametrize(("limit", "cores"), [("200000 100000", 2), ("max 100000", 64), ("50000 100000", 1)])
    def test_a_containers_limit_counts(self, tmp_path: Path, limit: str, cores: int) -> None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
        assert usable_cores() == cores
        assert usable_threads() == max(cores, 2)

    def test_by_default_every_core_has_one(self) -> None:
        assert usable_threads() == 64
        assert ThreadTeam().count == 64

    @pytest.mark.parametrize(
        ("given", "count"), [("1", 2), ("2", 2), ("6", 6), ("6,2", 6), ("500", 64), ("0", 2), ("many", 64), ("", 64)]
    )
    def test_a_users_number_counts(self, monkeypatch: pytest.MonkeyPatch, given: str, count: int) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert usable_threads() == count

    @pytest.mark.parametrize(("chosen", "count"), [(1, 2), (4, 4), (31, 31), (32, 64), (64, 64)])
    def test_a_number_set_in_torch_counts(self, monkeypatch: pytest.MonkeyPatch, chosen: int, count: int) -> None:
        """Half of the cores is what torch takes by itself where each has two threads."""
        monkeypatch.setattr(torch, "get_num_threads", lambda: chosen)
        assert usable_threads() == count

    def test_a_system_without_affinities_has_its_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.sched_getaffinity", raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: 12)
        assert usable_cores() == 12


def test_a_process_has_one_team() -> None:
    assert process_team() is process_team()


# --- helpers, which wait ---------------------------------------------------------------------------------------------


def test_a_helper_that_is_done_helps_again() -> None:
    helpers, heard = Helpers(), queue.SimpleQueue[str]()
    for i in range(20):
        helpers.run(lambda i=i: heard.put(f"{i} {threading.current_thread().name}"), name=f"errand-{i}")
        assert heard.get(timeout=60) == f"{i} errand-{i}"
        wait_until(lambda: helpers.busy == 0)
    assert helpers.started == 1


def test_helpers_work_at_once_and_so_many_stay() -> None:
    helpers, together = Helpers(keep=2), threading.Barrier(5)
    for _ in range(5):
        helpers.run(together.wait, 60)  # none of them ends alone
    wait_until(lambda: helpers.busy == 0)
    assert helpers.started == 5
    assert len(helpers._idle) == 2


def test_a_helper_outlives_an_error_which_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda given: reported.append(f"{given.exc_value} in {given.thread.name}")
    )
    helpers = Helpers()
    helpers.run(lambda: 1 // 0, name="errand")
    wait_until(lambda: helpers.busy == 0)
    helpers.run(lambda: None)
    wait_until(lambda: helpers.busy == 0)
    assert reported == ["integer division or modulo by zero in errand"]
    assert helpers.started == 1


def test_a_helper_keeps_nothing_of_what_it_worked_on() -> None:
    class Payload:
        pass

    helpers, payload = Helpers(), Payload()
    gone = weakref.ref(payload)
    helpers.run(lambda given: None, payload)
    wait_until(lambda: helpers.busy == 0)
    del payload
    assert gone() is None
