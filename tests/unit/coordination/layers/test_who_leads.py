"""Who speaks for a cluster of equals, where lines are compared."""

from __future__ import annotations

import math

import pytest

from outerstep.coordination.layers.leadership import FAST_ENOUGH, FASTER_BY_FAR, MemberInSight, who_leads


def members(**bytes_per_s: float) -> list[MemberInSight]:
    return [MemberInSight(name, bytes_per_s=rate) for name, rate in bytes_per_s.items()]


@pytest.mark.parametrize(
    ("leading", "other", "leader"),
    [
        (1.0, 1.0, "b"),
        (1.0, FASTER_BY_FAR, "b"),  # as much is not more
        (1.0, FASTER_BY_FAR + 0.1, "a"),
        (0.5, 1.0, "a"),  # slow lines are compared, too
        (0.0, 1e9, "b"),  # the leader's has not been measured
        (1e6, FAST_ENOUGH, "a"),
        (FAST_ENOUGH, 100 * FAST_ENOUGH, "b"),
        (1.0, math.inf, "b"),  # nobody can have measured that
        (1.0, math.nan, "b"),
        (1.0, -5.0, "b"),
        (math.inf, 5.0, "b"),
    ],
)
def test_a_leader_gives_way_to_a_line_that_is_faster_by_far(leading: float, other: float, leader: str) -> None:
    assert who_leads(members(a=other, b=leading), leading="b") == leader
    assert who_leads(members(a=other, b=leading), leading="b", compares_lines=False) == "b"


def test_of_equals_the_first_by_name_takes_over() -> None:
    assert who_leads(members(c=9.0, a=9.0, b=1.0), leading="b") == "a"


def test_a_name_that_nobody_has_is_no_order_and_no_leader() -> None:
    odd = members(XXXX=1.0, b=1.0)
    assert who_leads([*odd, MemberInSight("a")]) == "XXXX", "the lowest, because nobody is named and nobody leads"
    assert who_leads(members(b=1.0, XXXX=1.0, A=1.0)) == "A"
    assert who_leads(members(b=1.0, a=1.0), named="z", leading="y") == "a"
