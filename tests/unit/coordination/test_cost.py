"""The model of cost: bytes as the codecs write them, published and measured utilizations, routes, and levels."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from outerstep.coordination.cost import (
    BYTES_PER_VALUE,
    MEASURED,
    NOMINAL,
    NONE,
    Level,
    Line,
    Overheads,
    RouteCost,
    achieved_bytes_per_s,
    bytes_per_value,
    down_recipe,
    exchange_s,
    fragment_s,
    hidden_s,
    ring_s,
    round_cost,
    rounds_of,
    route_cost,
    split_target,
    star,
    total_utilization,
)
from outerstep.core import codecs
from outerstep.core.codecs.recipe import Recipe
from outerstep.errors import ConfigError
from outerstep.types import MOST_CARRIED_BYTES

GBIT = 1e9 / 8
MB = 1e6


@pytest.mark.parametrize("name", [*codecs.CODECS, "sparse1", "sparse7", "sparse512"])
def test_bytes_per_value_are_those_of_the_codecs(name: str) -> None:
    assert bytes_per_value(name) == pytest.approx(codecs.bytes_per_value(codecs.get_codec(name)), rel=1e-12)


def test_every_codec_that_ships_has_a_size() -> None:
    assert {name for name in codecs.CODECS if not name.startswith("sparse")} == BYTES_PER_VALUE.keys()


def test_a_recipe_is_as_large_as_its_first_codec() -> None:
    assert bytes_per_value("int8+feedback,norms=fp32") == bytes_per_value("int8")
    with pytest.raises(ConfigError, match="size of codec 'mine' is not known"):
        bytes_per_value("mine")


@pytest.mark.parametrize("name", codecs.CODECS)
def test_what_goes_down_is_what_the_recipes_say(name: str) -> None:
    assert down_recipe(name) == Recipe.parse(name).downlink().name


@pytest.mark.parametrize(
    ("parameters", "seconds", "percent", "both_ways"),
    [(150e6, 2.4, 99.5, 99.0), (1e9, 16.0, 97, 94), (7e9, 112.0, 82, 69)],
)
def test_the_published_table_of_utilizations(
    parameters: float, seconds: float, percent: float, both_ways: float
) -> None:
    """H = 500, one second a step, bf16, 1 Gbit/s. The published table counts one direction; with the way back the same
    model gives less."""
    one_way = RouteCost(1.0 / GBIT, 0.0, 0.0)
    travels_s = fragment_s(parameters, "bf16", "bf16", one_way, 1, NONE)
    made = round_cost(compute_s=500.0, hidden_s=0.0, num_fragments=1, fragment_s=travels_s)
    assert made.waiting_s == pytest.approx(seconds)
    assert round(100 * made.utilization, 1 if percent == 99.5 else 0) == percent
    there_and_back = RouteCost(1.0 / GBIT, 1.0 / GBIT, 0.0)
    travels_s = fragment_s(parameters, "bf16", "bf16", there_and_back, 1, NONE)
    made = round_cost(compute_s=500.0, hidden_s=0.0, num_fragments=1, fragment_s=travels_s)
    assert round(100 * made.utilization) == both_ways


def _waiting(num_fragments: int, delay: int, overheads: Overheads = MEASURED) -> float:
    """docs/concepts/streaming.md: 6.3M parameters, bf16 up and fp32 down, 50 ms a step, H = 240, 100 Mbit/s, 50 ms."""
    lines = {ends: Line(0.1 * GBIT, 0.025) for ends in (("a", "s"), ("s", "a"), ("b", "s"), ("s", "b"))}
    hidden = hidden_s(240, num_fragments, delay, 0.05)
    travels_s = fragment_s(
        6.3e6,
        "bf16",
        "fp32",
        route_cost(star("ab", "s"), lines, "s"),
        2,
        overheads,
        num_fragments=num_fragments,
        between_s=12.0 / num_fragments,
        hidden_s=hidden,
    )
    made = round_cost(compute_s=12.0, hidden_s=hidden, num_fragments=num_fragments, fragment_s=travels_s)
    return 1.0 - made.utilization


def test_what_was_measured_over_an_emulated_link() -> None:
    """Within the table's own precision for blocking and streaming; pieces that are waited for cost more than the whole
    (measured 30 %: each also begins slowly, which the model counts where rates are nominal, as they are here)."""
    assert _waiting(1, 0) == pytest.approx(0.21, abs=0.015)
    assert _waiting(4, 50) < 0.005
    assert _waiting(1, 0) + 0.02 < _waiting(4, 0) < 0.30
    assert _waiting(4, 0, NOMINAL) == pytest.approx(0.30, abs=0.015)
    assert _waiting(1, 0, NOMINAL) == pytest.approx(0.21, abs=0.025)
    assert _waiting(4, 50, NOMINAL) < 0.005


def test_a_small_fragment_takes_two_round_trips() -> None:
    """What travels with its offer, and with the answer to a poll, takes no requests of its own."""
    route, ends = RouteCost(0.0, 0.0, 1.0), replace(NONE, round_trips=5.0, carried_bytes=1000.0)
    trips = {n: fragment_s(n, "fp32", "bf16", route, 1, ends) for n in (250, 251, 500, 501)}
    assert trips == {250: 2.0, 251: 4.0, 500: 4.0, 501: 5.0}
    assert fragment_s(1000, "fp32", "bf16", route, 1, ends, num_fragments=4) == 2.0
    assert MEASURED.carried_bytes == MOST_CARRIED_BYTES


def test_nothing_slow_is_counted_of_rates_that_were_measured() -> None:
    route = RouteCost(1e-6, 1e-6, 0.1)
    bytes_s = exchange_s(1e6, "bf16", "bf16", route, 1, MEASURED)
    assert fragment_s(1e6, "bf16", "bf16", route, 1, MEASURED) == pytest.approx(bytes_s + 5 * 0.1)
    assert fragment_s(1e6, "bf16", "bf16", route, 1, NOMINAL) > bytes_s + 5 * 0.1 + 0.1


@pytest.mark.parametrize(("streams", "measured_mbit"), [(1, 25), (4, 101), (8, 171)])
def test_a_long_link_takes_several_connections(streams: int, measured_mbit: float) -> None:
    """docs/concepts/streaming.md: 400 Mbit/s, windows of 512 KiB. The window bounds it; not more than it."""
    achieved = achieved_bytes_per_s(0.4 * GBIT, 0.1, streams, 512 << 10)
    assert measured_mbit * 1e6 / 8 <= achieved <= 2 * measured_mbit * 1e6 / 8
    assert achieved_bytes_per_s(5.0, 0.0, 1, 1) == 5.0


def test_a_star_shares_the_centres_access() -> None:
    lines = {ends: Line(10.0, 0.5) for name in "abcd" for ends in ((name, "s"), ("s", name))}
    alone = route_cost(star("abcd", "s"), lines, "s")
    assert alone == RouteCost(0.1, 0.1, 1.0)
    shared = route_cost(star("abcd", "s"), lines, "s", centre_in_bytes_per_s=20.0, centre_out_bytes_per_s=8.0)
    assert shared == RouteCost(4 / 20.0, 4 / 8.0, 1.0)


def test_a_relay_carries_one_exchange_more_for_each_cluster_behind_it() -> None:
    fast, slow = Line(10.0, 0.1), Line(1.0, 0.3)
    lines = {("a", "s"): fast, ("s", "a"): slow, ("b", "a"): fast, ("a", "b"): slow}
    made = route_cost({"a": "s", "b": "a"}, lines, "s")
    assert made.up_s_per_byte == 2 / 10.0
    assert made.down_s_per_byte == 2 / 1.0
    assert made.latency_s == pytest.approx(0.1 + 0.3 + 0.1 + 0.3)
    shared = route_cost({"a": "s", "b": "a"}, lines, "s", centre_in_bytes_per_s=0.5, centre_out_bytes_per_s=0.25)
    assert (shared.up_s_per_byte, shared.down_s_per_byte) == (2 / 0.5, 2 / 0.25)


def test_a_circle_is_no_route() -> None:
    lines = {(one, other): Line(1.0) for one in "abs" for other in "abs"}
    with pytest.raises(ConfigError, match="must lead to 's', got the circle b → a"):
        route_cost({"a": "b", "b": "a"}, lines, "s")


def test_a_ring_needs_no_centre() -> None:
    assert ring_s(100.0, 4, Line(10.0, 0.1)) == pytest.approx(2 * 3 / 4 * 10.0 + 6 * 0.1)
    assert ring_s(100.0, 1, Line(10.0, 0.1)) == 0.0


def test_a_delay_hides_no_more_than_the_steps_between_two_fragments() -> None:
    assert hidden_s(100, 4, 5, 2.0) == 10.0
    assert hidden_s(100, 4, 60, 2.0) == 50.0
    made = round_cost(compute_s=200.0, hidden_s=10.0, num_fragments=4, fragment_s=12.0, own_s=2.0)
    assert (made.waiting_s, made.wall_s) == (8.0, 210.0)
    assert made.utilization == pytest.approx(200 / 210)


def test_rounds_of_rounds() -> None:
    """Ten steps of 1 s and 1 s of exchange; five such rounds and 5 s more."""
    inner, outer = rounds_of(1.0, [Level(10, 1.0), Level(5, 5.0)])
    assert (inner.wall_s, outer.compute_s, outer.wall_s) == (11.0, 55.0, 60.0)
    assert total_utilization([inner, outer]) == pytest.approx(50 / 60)
    assert split_target(0.81, 2) == pytest.approx(0.9)
    assert rounds_of(0.0, [Level(1, 0.0)])[0].utilization == 1.0


def test_levels_stream_too() -> None:
    (made,) = rounds_of(2.0, [Level(8, 5.0, num_fragments=2, delay=1, own_s=1.0)])
    assert (made.waiting_s, made.wall_s) == (6.0, 16.0 + 6.0 + 1.0)


def test_more_of_anything_never_makes_it_cheaper() -> None:
    rng = random.Random(1)
    for _ in range(300):
        route = RouteCost(rng.uniform(0, 1e-6), rng.uniform(0, 1e-6), rng.uniform(0, 0.2))
        small, members = rng.uniform(1, 1e9), rng.randint(1, 9)
        time = [fragment_s(n, "int8", "int8", route, members) for n in (small, 2 * small)]
        more = fragment_s(small, "int8", "int8", route, members + 1, MEASURED)
        assert 0.0 < time[0] < time[1] < math.inf
        assert time[0] < more
        sizes = [fragment_s(small, codec, codec, route, members) for codec in ("int4", "int8", "bf16", "fp32")]
        assert sizes == sorted(sizes)
