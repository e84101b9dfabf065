"""Which way contributions take, line by line."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig.routes import (
    Routes,
    _load,  # what the moves of many clusters go by
    _moves,
    _nearest,
    _relief,
    whole_route,
)
from outerstep.coordination.autoconfig.state import LayerState
from outerstep.coordination.autoconfig.trust import view_of
from outerstep.coordination.cost import Line, Lines

from .layers import both_ways, cluster, decided, following, layer, star_links

CENTRE = "server"


def lines(**seconds: float) -> Lines:
    """`a_b=2`: from a to b a byte takes two seconds."""
    return {(name.split("_")[0], name.split("_")[1]): Line(1.0 / s) for name, s in seconds.items()}


def routes(state: LayerState) -> Routes:
    return Routes(state, view_of(state))


def test_a_line_up_carries_one_more_for_each_cluster_behind_it() -> None:
    assert _load({"a": "hub", "b": "hub", "hub": CENTRE, "c": CENTRE}) == {"a": 1, "b": 1, "hub": 3, "c": 1}


class TestRelief:
    """Σ of the eighth powers of the seconds per byte: before less after."""

    def test_from_the_centre_to_a_relay(self) -> None:
        known = lines(a_server=5, server_a=4, a_hub=2, hub_a=3, hub_server=0.5, server_hub=0.7)
        relief = _relief({"a": CENTRE, "hub": CENTRE}, "a", "hub", known, CENTRE)
        assert relief == pytest.approx((5**8 + 4**8 + 0.5**8 + 0.7**8) - (2**8 + 3**8 + 1.0**8 + 1.4**8))

    def test_from_a_relay_to_the_centre(self) -> None:
        known = lines(a_server=2, server_a=3, a_hub=5, hub_a=4, hub_server=0.5, server_hub=0.7)
        relief = _relief({"a": "hub", "hub": CENTRE}, "a", CENTRE, known, CENTRE)
        assert relief == pytest.approx((5**8 + 4**8 + 1.0**8 + 1.4**8) - (2**8 + 3**8 + 0.5**8 + 0.7**8))

    def test_from_one_relay_to_another(self) -> None:
        known = lines(a_one=5, one_a=4, one_server=2, a_two=1.5, two_a=2.5, two_server=1, server_one=3, server_two=1)
        relief = _relief({"a": "one", "one": CENTRE, "two": CENTRE}, "a", "two", known, CENTRE)
        before = 5**8 + 4**8 + (2 * 2) ** 8 + (2 * 3) ** 8 + 2 * 1**8
        after = 1.5**8 + 2.5**8 + 2**8 + 3**8 + 2 * (2 * 1) ** 8
        assert relief == pytest.approx(before - after)


class TestMoves:
    def test_those_on_the_slowest_line_up_or_down_may_go_where_lines_lead(self) -> None:
        known = lines(
            a_server=9,
            server_a=1,
            b_server=1,
            server_b=8,
            c_server=2,
            server_c=2,
            a_b=1,
            b_a=1,
            a_c=1,
            b_c=1,
            c_b=1,
            c_a=1,
        )
        moves = list(_moves({"a": CENTRE, "b": CENTRE, "c": CENTRE}, known, CENTRE))
        assert sorted(moves) == [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c")], "c is on no slow line"

    def test_there_must_be_a_line_both_ways(self) -> None:
        known = lines(a_server=9, server_a=9, b_server=1, server_b=1, a_b=1)
        assert list(_moves({"a": CENTRE, "b": CENTRE}, known, CENTRE)) == []

    def test_a_relay_waits_until_those_behind_it_have_moved(self) -> None:
        known = lines(
            hub_server=5,
            server_hub=9,
            a_hub=1,
            hub_a=1,
            a_server=2,
            server_a=2,
            b_server=1,
            server_b=1,
            hub_b=1,
            b_hub=1,
            a_b=1,
            b_a=1,
        )
        moves = list(_moves({"a": "hub", "hub": CENTRE, "b": CENTRE}, known, CENTRE))
        assert sorted(moves) == [("a", "b"), ("a", CENTRE)]

    def test_the_load_counts_where_a_relay_is_the_slowest(self) -> None:
        known = lines(
            hub_server=2,
            server_hub=1,
            a_hub=1,
            hub_a=1,
            a_server=2,
            server_a=2,
            z_server=3,
            server_z=3,
        )
        moves = list(_moves({"a": "hub", "hub": CENTRE, "z": CENTRE}, known, CENTRE))
        assert ("a", CENTRE) in moves, "two contributions over hub's line take longer than one over z's"


class TestNearest:
    def test_the_relay_with_the_faster_line_the_slower_way_counting(self) -> None:
        known = lines(x_a=1, a_x=9, x_b=3, b_x=3, x_c=1)
        assert _nearest("x", ["a", "b", "c"], known) == "b"

    def test_of_equal_ones_the_last_by_name(self) -> None:
        assert _nearest("x", ["a", "b"], lines(x_a=2, a_x=2, x_b=2, b_x=2)) == "b"

    def test_one_of_many_without_a_line_of_its_own_is_relayed_by_it(self) -> None:
        rates = {f"c{i}": 1e8 for i in range(5)}
        near = (*both_ways("x", "c1", 1e6), *both_ways("x", "c3", 1e8))
        members = tuple(map(cluster, (*rates, "x")))
        made = decided(layer(rates, clusters=members, links=(*star_links(rates), *near)))
        assert made.plan.parents["x"] == "c3"
        assert {made.plan.parents[name] for name in rates} == {CENTRE}


class TestChoosing:
    """a and b; a is a tenth faster by way of b."""

    @staticmethod
    def state() -> LayerState:
        rates = {"a": 1.0e6, "b": 1e9}
        return layer(rates, links=(*star_links(rates), *both_ways("a", "b", 1.1e6)))

    def test_a_star_is_preferred_unless_a_tree_is_much_faster(self) -> None:
        found = routes(self.state())
        assert found.best(1e8, 1e8, 0.0, strict=False).parents == {"a": CENTRE, "b": CENTRE}
        assert found.best(1e8, 1e8, 0.0, strict=True).parents == {"a": "b", "b": CENTRE}

    def test_the_route_in_force_is_kept_unless_another_is_much_faster(self) -> None:
        state = self.state()
        plan = decided(layer({"a": 1.0e6, "b": 1e9})).plan
        assert plan.route == "star"
        tree = replace(
            plan,
            assignments=tuple(replace(one, sends_to="b") if one.cluster == "a" else one for one in plan.assignments),
        )
        fast_star = replace(state, links=(*star_links({"a": 1.2e6, "b": 1e9}), *both_ways("a", "b", 1.1e6)))
        assert routes(following(fast_star, tree)).best(1e8, 1e8, 0.0, strict=False).parents["a"] == "b"
        faster = replace(state, links=(*star_links({"a": 1.5e6, "b": 1e9}), *both_ways("a", "b", 1.1e6)))
        assert routes(following(faster, tree)).best(1e8, 1e8, 0.0, strict=False).parents["a"] == CENTRE

    def test_a_route_leads_to_the_centre_over_one_relay_at_most(self) -> None:
        rates = dict.fromkeys("abc", 1e8)
        between = (*both_ways("a", "b", 1e8), *both_ways("b", "c", 1e8), *both_ways("a", "c", 1e8))
        found = routes(layer(rates, links=(*star_links(rates), *between)))
        assert found.knows({"a": "b", "b": CENTRE, "c": CENTRE})
        assert not found.knows({"a": "b", "b": "c", "c": CENTRE})
        assert not found.knows({"a": "b", "b": "a", "c": CENTRE})
        assert not found.knows({"a": CENTRE, "b": CENTRE}), "c is left out"

    def test_up_to_four_clusters_every_tree_is_looked_at(self) -> None:
        rates = {"a": 1e6, "b": 1e6, "c": 1e6, "hub": 1e9}
        between = tuple(r for name in "abc" for r in both_ways(name, "hub", 3e6))
        found = routes(layer(rates, links=(*star_links(rates), *between)))
        looked_at = [one.parents for one in found._found]
        for ways in product((CENTRE, "hub"), repeat=3):
            assert {"hub": CENTRE, **dict(zip("abc", ways, strict=True))} in looked_at

    def test_what_the_centre_carries_in_all_bounds_everybody(self) -> None:
        rates = dict.fromkeys("ab", 1e8)
        costs = {
            (within, out): routes(layer(rates, centre_in_bytes_per_s=within, centre_out_bytes_per_s=out))
            .best(1e8, 1e8, 0.0, strict=True)
            .cost.transfer_s(1e8, 1e8, 0.0)
            for within, out in ((0.0, 0.0), (1e7, 0.0), (0.0, 1e7))
        }
        assert costs == {(0.0, 0.0): 2.0, (1e7, 0.0): 21.0, (0.0, 1e7): 21.0}


class TestWholeRoute:
    def test_one_that_is_not_counted_goes_as_before(self) -> None:
        state = layer(dict.fromkeys("abc", 1e8))
        plan = decided(state).plan
        before = replace(
            plan,
            assignments=tuple(replace(one, sends_to="b") if one.cluster == "c" else one for one in plan.assignments),
        )
        counted = {"a": CENTRE, "b": CENTRE}
        assert whole_route(counted, following(state, before)) == {"a": CENTRE, "b": CENTRE, "c": "b"}
        assert whole_route(counted, state) == {"a": CENTRE, "b": CENTRE, "c": CENTRE}

    def test_a_relay_that_has_left_or_is_relayed_itself_is_none(self) -> None:
        state = layer(dict.fromkeys("abc", 1e8))
        assert whole_route({"a": "gone", "b": CENTRE, "c": CENTRE}, state)["a"] == CENTRE
        assert whole_route({"a": "b", "b": "c", "c": CENTRE}, state) == {"a": CENTRE, "b": "c", "c": CENTRE}
