"""Sets of whole numbers as ranges, beside Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outerstep.ranges import NONE, Ranges

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def plain(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for begin, end in ranges for number in range(begin, end)}


def assert_is(found: Ranges, expected: set[int]) -> None:
    assert set(found.numbers()) == expected
    assert found.total == len(expected)
    assert found == Ranges((number, number + 1) for number in expected)
    assert all(end < begin for (_, end), (begin, _) in zip(list(found), list(found)[1:], strict=False)), "they touch"


@given(pairs, pairs)
def test_union_intersection_and_difference_are_those_of_sets(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    assert_is(Ranges(a) | Ranges(b), plain(a) | plain(b))
    assert_is(Ranges(a) & Ranges(b), plain(a) & plain(b))
    assert_is(Ranges(a) - Ranges(b), plain(a) - plain(b))


@given(pairs, st.integers(0, 30))
def test_the_first_numbers_are_the_smallest(a: list[tuple[int, int]], count: int) -> None:
    assert list(Ranges(a).first(count).numbers()) == sorted(plain(a))[:count]


@given(pairs)
def test_membership_end_and_truth_are_those_of_a_set(a: list[tuple[int, int]]) -> None:
    ranges, numbers = Ranges(a), plain(a)
    assert {number for number in range(50) if number in ranges} == numbers
    assert bool(ranges) == bool(numbers)
    assert ranges.end == max(numbers, default=-1) + 1


def test_a_run_of_a_million_is_one_piece() -> None:
    whole = Ranges([(0, 500_000)]) | Ranges([(500_000, 1_000_000)])
    assert (whole.pieces, whole.total) == (1, 1_000_000)
    assert (whole - Ranges([(3, 4)])).pieces == 2
    assert NONE.pieces == 0
