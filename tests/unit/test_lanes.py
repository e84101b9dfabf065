"""As many connections as a link needs, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.lanes import FEWEST, LONG_S, MOST, UNMEASURED, WINDOW_BYTES, in_whole_rows, lanes

MBIT = 1e6 / 8


@pytest.mark.parametrize("bytes_per_s", [0.0, 1.0, 1e9, 1e12])
def test_near_by_there_are_the_fewest_however_fast_it_is(bytes_per_s: float) -> None:
    assert lanes(bytes_per_s, 0.0) == lanes(bytes_per_s, 0.9 * LONG_S) == FEWEST


def test_far_away_and_never_measured_there_are_a_few_more() -> None:
    assert FEWEST < lanes(0.0, 0.1) == UNMEASURED < MOST


@pytest.mark.parametrize(("mbit", "round_trip_s"), [(10, 0.2), (100, 0.05), (1000, LONG_S)])
def test_a_link_that_four_connections_fill_gets_four(mbit: float, round_trip_s: float) -> None:
    assert lanes(mbit * MBIT, round_trip_s) == FEWEST


@given(mbit=st.floats(50, 1000), round_trip_s=st.floats(0.02, 0.1))
def test_measuring_again_and_again_ends_with_enough_to_fill_a_link_whose_connections_have_small_windows(
    mbit: float, round_trip_s: float
) -> None:
    link, count = mbit * MBIT, UNMEASURED
    for _ in range(8):
        carried = min(link, count * WINDOW_BYTES / round_trip_s)
        count = lanes(0.8 * carried, round_trip_s)  # an exchange loses some time to other things
    assert count in (MOST, FEWEST) or count * WINDOW_BYTES / round_trip_s >= link


@given(st.floats(0.0, allow_nan=False), st.floats(0.0, allow_nan=False))
def test_whatever_was_measured_the_number_is_bounded(bytes_per_s: float, round_trip_s: float) -> None:
    assert FEWEST <= lanes(bytes_per_s, round_trip_s) <= MOST


@given(count=st.integers(FEWEST, MOST), parts=st.integers(0, 2000))
def test_parts_travel_in_rows_that_are_all_about_full(count: int, parts: int) -> None:
    even = in_whole_rows(count, parts)
    assert count <= even <= min(2 * count, MOST)
    if parts >= count and even < MOST:
        assert -(-parts // even) <= parts // count, "no row more for those that are left over"
