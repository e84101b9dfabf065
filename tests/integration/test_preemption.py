"""A worker that is told to go, in every mode: each of its steps is in the model once, however the signal hits it."""

from __future__ import annotations

import signal
import threading

import pytest

from amounts import mostly_slow
from integration.test_exit import EXACT, Mode, Two, every_mode
from support import in_threads, wait_until

BARRIERS = [
    Mode("sync"),
    Mode("sync with fragments", {"num_fragments": 2, "fragment_delay": 0}),
    Mode("streaming, carry", {"num_fragments": 2, "fragment_delay": 1, "fragment_carry": True}),
]
behind_a_barrier = pytest.mark.parametrize("mode", BARRIERS, ids=lambda mode: mode.name)


def ask(two: Two) -> None:
    """As a signal to the first worker would, if it were a process of its own."""
    two.workers[0]._interrupts.ask(signal.SIGTERM)


def audit(two: Two, mode: Mode, steps: list[int], lost: int = 0) -> None:
    """Whatever the mode does not overwrite is in the model; but for `lost` steps of the first worker."""
    held = two.books.audit(mode.buffer_size)
    overwritten = [worker.sync_metrics["steps_overwritten"] for worker in two.workers]
    expected = [n * len(held["w0"]) for n in steps]
    assert [sum(held[f"w{i}"]) + overwritten[i] for i in range(2)] == [expected[0] - lost, expected[1]]


@pytest.mark.row("F10")
@every_mode
@pytest.mark.parametrize("steps", [8, 9, 11])
def test_after_its_step_it_contributes_everything_and_leaves(mode: Mode, steps: int) -> None:
    """The last step is one that exchanges, one after it, and one before the next."""
    two = Two(mode.server(2), preempt_patience_s=60.0)
    both_here = threading.Barrier(2)

    def preempted() -> None:
        with two.workers[0] as worker:
            both_here.wait(30.0)
            two.count(0, steps - 1)
            ask(two)
            assert not worker.should_stop
            two.count(0, 1)
            assert worker.should_stop
            with pytest.raises(SystemExit) as ended:
                two.count(0, 1)
            assert ended.value.code == 143

    def other() -> None:
        with two.workers[1]:
            both_here.wait(30.0)
            two.count(1, 9)

    in_threads(preempted, other)
    assert two.server.status()["workers"] == {}
    if mode in EXACT:
        audit(two, mode, [steps, 9])


@pytest.mark.row("F10")
@behind_a_barrier
@pytest.mark.parametrize("patience_s", mostly_slow([0.0, 60.0], [60.0]), ids=["out of time", "in time"])
def test_while_it_waits_for_a_round_it_still_contributes_every_fragment(mode: Mode, patience_s: float) -> None:
    two = Two(mode.server(2), preempt_patience_s=patience_s).start()
    worker, ended = two.workers[0], threading.Event()

    def preempted() -> None:
        for _ in range(4):
            if not worker.should_stop:
                two.count(0, 1)  # the second worker trains nothing: the first to be sent stays without an answer
        worker.stop()
        ended.set()

    def signalled() -> None:
        wait_until(lambda: two.server.status()["pending_submissions"] == ["w0"])
        ask(two)
        if patience_s == 0.0:
            assert ended.wait(30.0)  # without the other's help
        two.count(1, 4)
        two.workers[1].stop()

    in_threads(preempted, signalled)
    assert worker.should_stop
    steps = int(worker.sync_metrics["local_step"])
    assert 1 <= steps <= 4
    # What a fragment learned after it was sent can only be sent when its round has closed.
    after = int(mode.settings.get("fragment_delay", 0)) if patience_s == 0.0 else 0  # type: ignore[call-overload]
    audit(two, mode, [steps, 4], lost=after)
    assert "w0" not in two.server.status()["workers"]  # type: ignore[operator]
