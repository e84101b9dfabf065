"""How fast a cluster seems to the layer above."""

from __future__ import annotations

from outerstep.coordination.layers.pace import KEPT, RoundPace


def test_rounds_per_second_are_those_of_members_that_train() -> None:
    pace = RoundPace()
    assert pace.per_s == 0.0
    now = 0.0
    for _ in range(4):  # two rounds of two seconds, then ten seconds of waiting for the layer above
        pace.closed(now, held=False)
        pace.closed(now + 2.0, held=True)
        pace.released(now + 12.0)
        now += 14.0
    assert pace.per_s == 0.5


def test_a_round_that_closes_although_members_are_held_says_nothing() -> None:
    """Their wait was over, and nobody knows since when they train."""
    pace = RoundPace()
    for now in (0.0, 2.0, 4.0):
        pace.closed(now, held=False)
    pace.closed(6.0, held=True)
    pace.closed(99.0, held=False)
    pace.closed(101.0, held=False)
    assert pace.per_s == 0.5


def test_a_few_rounds_that_were_stopped_by_something_else_change_nothing() -> None:
    pace, now = RoundPace(), 0.0
    for took_s in (1.0, 1.0, 60.0, 1.0, 0.001, 1.0):
        pace.closed(now, held=False)
        now += took_s
    pace.closed(now, held=False)
    assert pace.per_s == 1.0


def test_a_release_that_nobody_was_held_for_is_no_beginning() -> None:
    pace = RoundPace()
    pace.closed(0.0, held=False)
    pace.released(1.5)
    pace.closed(2.0, held=False)
    assert pace.per_s == 0.5


def test_only_the_last_rounds_count() -> None:
    pace = RoundPace()
    for number in range(KEPT + 1):
        pace.closed(10.0 * number, held=False)
    assert pace.per_s == 0.1
    now = 10.0 * KEPT
    for _ in range(KEPT // 2 + 1):
        now += 1.0
        pace.closed(now, held=False)
    assert pace.per_s == 1.0, "half of those that are kept, and one"


def test_a_second_release_says_nothing_new() -> None:
    pace = RoundPace()
    pace.closed(0.0, held=True)
    pace.released(10.0)
    pace.released(11.0)
    pace.closed(12.0, held=False)
    assert pace.per_s == 0.5
