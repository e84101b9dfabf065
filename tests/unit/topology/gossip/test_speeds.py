"""Nobody is waited for without end, and a slow link is found out once."""

from __future__ import annotations

import pytest

from outerstep.topology.gossip.node.speeds import FASTEST, GRACE_S, MOST_AT_ONE, SLOWEST, Speeds

PART = 16 << 20


def tries_until(speeds: Speeds, key: str, bytes_per_s: float) -> int:
    """How often it is given up before it has the time that it needs."""
    for tries in range(30):
        needed_s = PART / bytes_per_s
        if needed_s <= speeds.limit_s(key, PART):
            speeds.note(key, PART, needed_s)
            return tries
        speeds.was_too_slow(key)
    return 30


def test_a_stranger_is_given_a_minute_and_the_time_of_a_slow_link() -> None:
    assert Speeds().limit_s("a", PART) == GRACE_S + PART / FASTEST


@pytest.mark.parametrize("bytes_per_s", [12_000, 1_000, 300])
def test_a_slow_link_is_found_out_once(bytes_per_s: float) -> None:
    speeds = Speeds()
    assert 0 < tries_until(speeds, "slow", bytes_per_s) < 9
    assert [tries_until(speeds, "slow", bytes_per_s) for _ in range(5)] == [0] * 5


def test_who_was_slow_is_asked_after_the_others_until_it_is_fast_again() -> None:
    speeds = Speeds()
    speeds.was_too_slow("a")
    assert speeds.expected("a") < speeds.expected("b")
    speeds.note("a", PART, 1.0)
    assert speeds.expected("a") == speeds.expected("b") == FASTEST


def test_the_time_has_an_end() -> None:
    speeds = Speeds()
    for _ in range(100):
        speeds.was_too_slow("a")
    assert speeds.expected("a") == SLOWEST
    speeds.note("a", PART, 1e9)
    assert speeds.limit_s("a", PART) == GRACE_S + PART / SLOWEST


def test_so_many_threads_fetch_from_one_peer_at_a_time() -> None:
    speeds = Speeds()
    with speeds.place_at("a") as first, speeds.place_at("a") as second, speeds.place_at("a") as third:
        assert (first, second, third) == (True, True, False)
        assert MOST_AT_ONE == 2
        with speeds.place_at("b") as other:
            assert other
    with speeds.place_at("a") as again:
        assert again


def test_those_that_are_gone_are_forgotten() -> None:
    speeds = Speeds()
    speeds.was_too_slow("a")
    speeds.keep_only({"b"})
    assert speeds.expected("a") == FASTEST
