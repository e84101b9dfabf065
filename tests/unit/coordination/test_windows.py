"""Slow starts, of one transfer and of many that follow each other."""

from __future__ import annotations

import random

import pytest

from outerstep.coordination.windows import FIRST_WINDOW_BYTES, IDLE_S, Transfer, Windows, felt_s, slow_start_s
from outerstep.demo import link
from outerstep.lanes import SMALLEST_PART_BYTES

MB = 1e6


def test_a_slow_start_takes_as_long_as_a_line_that_fills_step_by_step() -> None:
    """Counted burst by burst: a window of w, then of 2w, … each after a round trip, until the line is full."""
    s_per_byte, trip_s, window = 1.0 / (50 * MB), 0.1, 4 * FIRST_WINDOW_BYTES
    now_s, left, size = 0.0, 210.0 * MB, 210.0 * MB
    while window * s_per_byte < trip_s:
        left -= window
        window *= 2
        now_s += trip_s
    slow_s = now_s + left * s_per_byte
    lost_s = slow_start_s(size, s_per_byte, trip_s, 4)
    assert lost_s == pytest.approx(slow_s - size * s_per_byte)
    assert 0.4 < lost_s < 0.7  # docs/results/speed.md: about half a second at 100 ms


def test_a_small_transfer_has_no_slow_start_and_none_is_counted_without_connections() -> None:
    assert slow_start_s(4.0 * FIRST_WINDOW_BYTES, 1e-8, 0.1, 4) == 0.0
    assert slow_start_s(1e9, 1e-8, 0.1, 0) == 0.0
    assert slow_start_s(1e9, 1e-8, 0.0, 4) == 0.0
    assert 0.0 < slow_start_s(20.0 * FIRST_WINDOW_BYTES, 1e-9, 0.1, 4) < slow_start_s(1e9, 1e-9, 0.1, 4)


def test_idle_connections_are_what_the_emulated_link_calls_so() -> None:
    assert (link.IDLE_S, link.FIRST_WINDOW_BYTES) == (IDLE_S, FIRST_WINDOW_BYTES)


@pytest.mark.parametrize(("parts", "connections"), [(0.5, 1), (1, 1), (1.5, 1.5), (2, 2), (4, 4), (9, 4)])
def test_a_transfer_has_as_many_connections_as_parts(parts: float, connections: float) -> None:
    size, s_per_byte, trip_s = parts * SMALLEST_PART_BYTES, 8 / 15e6, 0.1
    made = Transfer.of(size, s_per_byte, trip_s, 4.0, SMALLEST_PART_BYTES)
    assert made == Transfer(connections, size * s_per_byte, slow_start_s(size, s_per_byte, trip_s, connections))


class TestExchanges:
    UP = DOWN = Transfer(1.0, 0.14, 0.28)  # a quarter of a million bytes over 15 Mbit/s and 100 ms

    def felt(self, between_s: float, hidden_s: float = 0.0, plain_s: float = 0.5) -> float:
        return felt_s(plain_s, self.UP, self.DOWN, trip_s=0.1, between_s=between_s, hidden_s=hidden_s)

    def test_after_a_long_silence_all_begin_slowly(self) -> None:
        assert self.felt(0.91) == self.felt(1e9) == 0.5 + 2 * 0.28

    def test_soon_after_another_some_find_windows_open(self) -> None:
        """Of two connections one was filled; the other has been silent for the whole exchange, too."""
        assert 0.5 < self.felt(0.3) < 0.5 + 2 * 0.28
        assert self.felt(0.3) == pytest.approx(0.5 + 0.28, abs=0.1), "about every other one"

    def test_without_a_pause_all_do(self) -> None:
        quick = felt_s(0.1, Transfer(1.0, 0.01, 0.05), self.DOWN, trip_s=0.01, between_s=0.0, hidden_s=0.0)
        assert quick == pytest.approx(0.1, abs=0.01)

    def test_what_is_hidden_is_not_felt_and_what_is_felt_sometimes_is_counted(self) -> None:
        """On average a bit is waited for, though the average exchange would be hidden."""
        average = self.felt(0.6)
        assert self.felt(0.6, hidden_s=average) > average
        assert self.felt(0.8, hidden_s=0.8, plain_s=0.1) < 0.1 + 2 * 0.28 < 0.8

    def test_the_same_question_has_the_same_answer(self) -> None:
        assert self.felt(0.3, 0.2) == self.felt(0.3, 0.2)


class TestWindows:
    def test_they_close_in_silence_and_a_small_message_keeps_them_open(self) -> None:
        for silence, message_at, expected in ((0.9, None, 0.0), (1.1, None, 1.0), (1.8, 0.9, 0.0), (2.4, 1.2, 1.0)):
            windows = Windows(1.0, Always(0))
            assert windows.closed_share(0.0) == 1.0
            windows.ended(0.0)
            if message_at is not None:
                windows.touched(message_at)
            assert windows.closed_share(silence) == expected, (silence, message_at)

    def test_the_rest_of_a_part_opens_nothing(self) -> None:
        windows = Windows(1.25, Always(0))
        windows.closed_share(0.0)
        windows.ended(0.0)
        assert windows.closed_share(0.1) == pytest.approx(0.25 / 1.25)

    def test_one_connection_more_is_there_than_parts(self) -> None:
        rng = random.Random(1)
        windows = Windows(4.0, rng)
        windows.closed_share(0.0)
        shares = set()
        for _ in range(50):
            windows.ended(0.0)
            shares.add(windows.closed_share(0.1))
        assert shares == {0.0, 0.25}


class Always(random.Random):
    """Chooses this."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self._choice = choice

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return self._choice
