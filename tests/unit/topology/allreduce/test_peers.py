"""Ranks that meet at a store: what they hear, and what they say of one that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from outerstep.errors import PeerLost, RoundStuck
from outerstep.topology.allreduce import peers as module
from outerstep.topology.allreduce.peers import Peers
from support import in_threads, wait_until


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULSE_S", 0.02)
    monkeypatch.setattr(module, "FAREWELL_S", 0.2)


def make(count: int, timeout_s: float = 30.0) -> list[Peers]:
    store = HashStore()
    return [Peers(store, rank, count, name="test", timeout_s=timeout_s) for rank in range(count)]


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(PeerLost) as caught:
        work()
    return str(caught.value)


def test_everybody_hears_all_in_the_order_of_the_ranks_meeting_after_meeting() -> None:
    ranks = make(3)

    def work(peers: Peers) -> list[list[bytes]]:
        return [peers.exchange("word", f"{peers.rank}.{i}".encode()) for i in range(20)]

    expected = [[f"{rank}.{i}".encode() for rank in range(3)] for i in range(20)]
    assert in_threads(*[lambda p=p: work(p) for p in ranks]) == [expected] * 3


def test_meetings_of_different_kinds_do_not_wait_for_each_other() -> None:
    first, second = make(2)
    ahead = threading.Event()

    def one() -> list[bytes]:
        early = in_threads(lambda: first.exchange("a", b"1"))[0]
        ahead.set()
        return early + first.exchange("b", b"2")

    def other() -> list[bytes]:
        waiting = threading.Thread(target=second.exchange, args=("b", b"4"), daemon=True)
        waiting.start()
        heard = second.exchange("a", b"3")
        ahead.wait(10)
        waiting.join(10)
        return heard

    assert in_threads(one, other) == [[b"1", b"3", b"2", b"4"], [b"1", b"3"]]


def test_what_was_heard_by_all_does_not_stay_in_the_store() -> None:
    ranks = make(2)
    for i in range(5):
        in_threads(*[lambda p=p, i=i: p.exchange("word", bytes(i)) for p in ranks])
    assert not ranks[0]._store.check(["word/3/0"])
    assert ranks[0]._store.check(["word/4/0"])


def test_a_rank_whose_pulse_stands_still_has_died() -> None:
    first, second = make(2, timeout_s=0.4)
    second._over.set()  # as if killed: nothing more is said
    assert "rank 1 has died, or hangs: no sign of life for" in error_of(lambda: first.exchange("word", b""))


def test_a_rank_that_lives_and_does_not_come_is_given_up_at_the_limit() -> None:
    first, _second = make(2, timeout_s=0.5)
    first._silent_s = 30.0
    assert error_of(lambda: first.exchange("word", b"")).startswith("rank 1 did not come to the word within 0.5 s")


def test_at_the_end_of_training_its_absence_is_no_failure_but_a_round_that_cannot_close() -> None:
    first, _second = make(2)
    with pytest.raises(RoundStuck, match=r"rank 1 did not come to the word within 0\.1 s"):
        first.exchange("word", b"", stuck_after_s=0.1)


def test_who_failed_or_left_is_not_waited_for_and_its_reason_is_told() -> None:
    first, second, third = make(3)
    second.leave("done")
    assert error_of(lambda: first.exchange("word", b"")).startswith("rank 1 has left the run (done)")
    third.fail(ValueError("no more"))
    third.fail(ValueError("a consequence"))
    assert error_of(lambda: first.exchange("word", b"")) == "rank 2 failed: ValueError: no more"


def test_who_left_after_it_had_come_is_not_missed() -> None:
    first, second, third = make(3)
    in_threads(lambda: second._store.set("word/0/1", b"two"))
    second.leave("done")
    late = threading.Timer(0.3, lambda: third.exchange("word", b"three"))
    late.start()
    assert first.exchange("word", b"one") == [b"one", b"two", b"three"]
    late.join(10)


def test_a_broken_connection_is_blamed_on_what_its_rank_said_last() -> None:
    first, second = make(2)
    reset = RuntimeError("Connection closed by peer")
    assert "rank 1 has died: its connection broke" in str(first.lost(1, reset))
    second.fail(ValueError("no more"))
    wait_until(lambda: "failed: ValueError: no more" in str(first.lost(1, reset)))


def test_a_store_that_is_gone_is_said_to_be_gone() -> None:
    first, _ = make(2)

    class Gone:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Broken pipe")

    first._store = Gone()  # type: ignore[assignment]
    assert "the store at which the ranks meet is gone" in error_of(lambda: first.exchange("word", b""))
