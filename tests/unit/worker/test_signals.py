"""Signals as the training thread learns of them: noted at once, acted on at a safe point."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from outerstep.worker.signals import LEAST_S, Interrupts
from support import in_threads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Whatever a test does to the handlers of this very process; and Ctrl-C as in a process of one's own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    monkeypatch.delattr(sys, "ps1", raising=False)
    made = Interrupts(20.0, clock)
    made.install()
    yield made
    made.restore()


def send(number: signal.Signals) -> None:
    """To ourselves: the handler has run when this returns."""
    os.kill(os.getpid(), number)


def test_nobody_asks_anything(interrupts: Interrupts) -> None:
    assert not interrupts.asked
    assert interrupts.reason == ""
    assert not interrupts.is_late
    interrupts.insist()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_is_noted_and_interrupts_nothing(interrupts: Interrupts, number: signal.Signals, name: str) -> None:
    send(number)
    assert interrupts.asked == number
    assert interrupts.reason == f"interrupted by {name}"


def test_patience_counts_from_the_first_signal(interrupts: Interrupts, clock: Clock) -> None:
    send(signal.SIGUSR1)
    clock.now += 19.0
    send(signal.SIGTERM)
    assert not interrupts.is_late
    clock.now += 1.5
    assert interrupts.is_late


def test_a_step_that_ends_late_leaves_a_little_time(interrupts: Interrupts, clock: Clock) -> None:
    send(signal.SIGTERM)
    clock.now += 60.0
    assert interrupts.is_late
    interrupts.at_safe_point()
    assert not interrupts.is_late
    clock.now += LEAST_S + 0.1
    assert interrupts.is_late


def test_sigterm_asks_for_more_than_a_notice_but_not_the_other_way_round(interrupts: Interrupts) -> None:
    send(signal.SIGUSR1)
    interrupts.insist()  # a loop may go on after a notice
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        interrupts.insist()
    assert ended.value.code == 143


def test_many_sigterms_are_one(interrupts: Interrupts) -> None:
    for _ in range(3):
        send(signal.SIGTERM)  # srun passes on what the job's own signal has brought already
    assert interrupts.asked == signal.SIGTERM


def test_the_first_ctrl_c_is_a_wish_and_the_second_an_interrupt(
    interrupts: Interrupts, capfd: pytest.CaptureFixture[str]
) -> None:
    send(signal.SIGINT)
    assert "Once more stops at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupts.insist()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_ctrl_c_twice_interrupts_also_after_sigterm(interrupts: Interrupts) -> None:
    send(signal.SIGTERM)
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_that_was_there_is_called_restored_and_decides_how_the_process_ends(clock: Clock) -> None:
    heard: list[int] = []

    def mine(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, mine)
    interrupts = Interrupts(20.0, clock)
    interrupts.install()
    send(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert interrupts.asked == signal.SIGTERM
    interrupts.insist()
    interrupts.restore()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_handler_that_came_later_stays_and_what_it_passes_on_reaches_the_one_before(clock: Clock) -> None:
    heard: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("first"))
    interrupts = Interrupts(20.0, clock)
    interrupts.install()
    ours = signal.getsignal(signal.SIGUSR1)
    assert callable(ours)

    def last(number: int, frame: object) -> None:
        heard.append("last")
        ours(number, None)

    signal.signal(signal.SIGUSR1, last)
    interrupts.restore()
    assert signal.getsignal(signal.SIGUSR1) is last
    send(signal.SIGUSR1)
    assert heard == ["last", "first"]
    assert not interrupts.asked  # it was not there any more


def test_two_workers_in_one_process_both_hear_of_it_and_may_end_in_any_order(clock: Clock) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second = Interrupts(20.0, clock), Interrupts(20.0, clock)
    first.install()
    second.install()
    send(signal.SIGTERM)
    assert first.asked == second.asked == signal.SIGTERM
    first.restore()
    second.restore()
    interrupts = Interrupts(20.0, clock)
    interrupts.install()
    send(signal.SIGTERM)  # the dead ones pass on, and do not come back to life
    assert interrupts.asked == signal.SIGTERM
    interrupts.restore()
    assert before == signal.SIG_DFL


def test_what_is_ignored_stays_ignored(clock: Clock) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script that was started with &
    interrupts = Interrupts(20.0, clock)
    interrupts.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    interrupts.restore()


def test_at_a_prompt_ctrl_c_keeps_its_meaning(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    interrupts = Interrupts(20.0, clock)
    interrupts.install()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == interrupts._note
    interrupts.restore()


def test_in_another_thread_nothing_is_installed(clock: Clock) -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts(20.0, clock)
    in_threads(interrupts.install)
    assert signal.getsignal(signal.SIGTERM) == before
    in_threads(interrupts.restore)
