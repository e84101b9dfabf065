"""What is proposed, against the published tables, the controller, and a search of everything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from outerstep.coordination.autoconfig.controller import decide_layer
from outerstep.coordination.cost import MEASURED, NONE, Line, allreduce_route, mesh_route, ring_s
from outerstep.coordination.planning import Choice, Option, PlannedSite, Situation, propose
from outerstep.coordination.planning.guide import loss_ratio
from outerstep.coordination.planning.planner import utilization_by_interval
from outerstep.coordination.planning.situation import layer_of
from outerstep.errors import ConfigError

GBIT = 1e9 / 8
MBIT = GBIT / 1000


def sites(
    count: int, rate: float, *, step_s: float = 1.0, latency_s: float = 0.02, workers: int = 1
) -> tuple[PlannedSite, ...]:
    return tuple(PlannedSite(f"site{i}", rate, rate, latency_s, step_s, workers) for i in range(count))


RUNS = json.loads((Path(__file__).parents[4] / "bench/results/planner.json").read_text())


@pytest.mark.parametrize(
    "run", RUNS["points"], ids=lambda run: f"{run['link']}, {', '.join(map(str, run['setting'].values()))}"
)
def test_what_was_measured_is_planned_within_ten_percent(run: dict[str, Any]) -> None:
    """Two workers, each over an emulated link of its own (docs/results/planner.md)."""
    mbit, trip_ms = (float(part.split()[0]) for part in run["link"].split(", "))
    there = sites(2, mbit * MBIT, step_s=max(run["step_s"]), latency_s=trip_ms / 1e3)
    choice = Choice(*run["setting"].values())
    found = propose(Situation(RUNS["parameters"], there, weights="fp32", choice=choice)).recommended
    assert run["measured"] == pytest.approx(found.utilization, rel=0.1)


@pytest.mark.parametrize(("parameters", "percent", "digits"), [(150e6, 99.5, 1), (1e9, 97, 0), (7e9, 82, 0)])
def test_the_published_table_of_utilizations_comes_out(parameters: float, percent: float, digits: int) -> None:
    """H = 500, one second a step, bf16, 1 Gbit/s, one direction: as published. A line down that is as fast as we allow
    is no direction at all."""
    there = PlannedSite("a", GBIT, 1e12, 0.0, 1.0)
    found = propose(Situation(int(parameters), (there,), choice=Choice(500, "bf16", 1, 0), overheads=NONE)).recommended
    assert round(100 * found.utilization, digits) == percent
    assert (found.sync_every, found.codec, found.num_fragments, found.delay) == (500, "bf16", 1, 0)


@pytest.mark.parametrize(("parameters", "fragments"), [(150e6, 3), (1e9, 7), (7e9, 7)])
def test_the_published_table_of_hidden_fragments_comes_out(parameters: float, fragments: int) -> None:
    """Streaming at H = 500 hides everything, if the delay may be as long as the way to the next fragment."""
    choice = Choice(500, "bf16", fragments, 500 // fragments)
    found = propose(
        Situation(int(parameters), (PlannedSite("a", GBIT, 1e12, 0.0, 1.0),), choice=choice, overheads=NONE)
    ).recommended
    assert found.utilization == pytest.approx(1.0)
    assert found.waiting_s == pytest.approx(0.0)


@pytest.mark.parametrize("parameters", [10**7, 10**8, 10**9])
@pytest.mark.parametrize("rate", [50 * MBIT, 200 * MBIT, GBIT, 10 * GBIT])
def test_what_is_recommended_for_one_fragment_is_what_the_controller_would_choose(parameters: int, rate: float) -> None:
    situation = Situation(parameters, sites(2, rate), choice=Choice(num_fragments=1), overheads=MEASURED)
    decided = decide_layer(layer_of(situation, "x", situation.sites, situation.bounds(2), grouped=False))
    best = propose(situation).recommended if not decided.meets_target else _server(situation)
    assert best.utilization == pytest.approx(decided.utilization or 0.0, abs=0.02)
    assert best.meets_target == decided.meets_target
    assert best.outer_lr == pytest.approx(decided.plan.outer_lr, abs=0.05)


def _server(situation: Situation) -> Option:
    return next(each for each in propose(situation).options if each.topology == "server")


def test_a_recommendation_that_meets_the_target_has_about_the_shortest_interval_of_its_topology() -> None:
    proposal = propose(Situation(10**8, sites(2, 200 * MBIT)))
    good = [each for each in proposal.options if each.topology == "server" and each.meets_target]
    assert proposal.recommended.meets_target
    assert proposal.recommended.sync_every <= 1.25 * min(each.sync_every for each in good)


def test_a_target_out_of_reach_is_said_and_the_best_is_recommended() -> None:
    proposal = propose(Situation(7 * 10**9, sites(2, 10 * MBIT)))
    assert not proposal.recommended.meets_target
    assert proposal.recommended.utilization == max(o.utilization for o in proposal.options if o.topology == "server")
    assert "nothing within bounds leaves 95 %" in proposal.reasons[0]


def test_more_workers_at_a_site_share_its_line() -> None:
    choice = Choice(100, "bf16", 1, 0)
    one, four = (_server(Situation(10**8, sites(2, GBIT, workers=n), choice=choice, overheads=NONE)) for n in (1, 4))
    assert four.waiting_s == pytest.approx(4 * one.waiting_s)


def test_the_servers_own_line_is_shared_by_all() -> None:
    choice = Choice(100, "bf16", 1, 0)
    free, shared = (
        _server(
            Situation(
                10**8,
                sites(8, GBIT, latency_s=0.0),
                server_in_bytes_per_s=rate,
                server_out_bytes_per_s=rate,
                choice=choice,
                overheads=NONE,
            )
        )
        for rate in (0.0, GBIT)
    )
    assert shared.waiting_s == pytest.approx(8 * free.waiting_s)


def test_sites_of_many_workers_are_recommended_a_hierarchy_where_one_server_would_not_do() -> None:
    proposal = propose(Situation(10**9, sites(4, 200 * MBIT, workers=32, step_s=5.0)))
    best = proposal.recommended
    assert best.topology == "hierarchy"
    assert best.inside is not None
    assert best.sync_every == best.inside.sync_every * best.inside.above_every
    assert best.members == 4
    flat = max(each.utilization for each in proposal.options if each.topology == "server")
    assert best.utilization > flat
    assert any("one contribution per site" in reason for reason in proposal.reasons)


def test_the_utilizations_of_two_levels_multiply() -> None:
    best = propose(Situation(10**9, sites(4, 200 * MBIT, workers=32, step_s=5.0))).recommended
    assert best.inside is not None
    assert best.utilization < best.inside.utilization
    assert best.compute_s == pytest.approx(best.sync_every * 5.0)


def test_without_a_server_the_lines_carry_what_the_topology_sends() -> None:
    situation = Situation(10**8, sites(4, GBIT, latency_s=0.0), choice=Choice(100, "bf16", 1, 0), overheads=NONE)
    by_name = {each.topology: each for each in propose(situation).options}
    assert by_name["all-reduce"].waiting_s == pytest.approx(ring_s(2e8, 4, Line(GBIT)))
    assert by_name["gossip"].waiting_s == pytest.approx(3 * 2e8 / GBIT)
    assert by_name["gossip"].up_bytes == 3 * 2e8
    assert by_name["all-reduce"].server is None


def test_an_all_reduce_is_no_option_for_machines_of_unequal_speed() -> None:
    unequal = (PlannedSite("a", GBIT, GBIT, 0.0, 1.0), PlannedSite("b", GBIT, GBIT, 0.0, 2.0))
    proposal = propose(Situation(10**8, unequal))
    assert {each.topology for each in proposal.options} == {"server", "gossip"}
    assert any("--dylu" in reason for reason in proposal.reasons)


def test_the_fastest_worker_keeps_within_the_bounds_of_an_interval_too() -> None:
    unequal = (PlannedSite("a", MBIT, MBIT, 0.0, 1.0), PlannedSite("b", MBIT, MBIT, 0.0, 2.0))
    best = propose(Situation(10**8, unequal)).recommended
    assert best.sync_every == 250  # steps of 2 s; the other takes 500


def test_a_delay_that_is_asked_for_leaves_only_what_streams() -> None:
    for workers in (1, 4):
        proposal = propose(Situation(10**8, sites(4, GBIT, workers=workers), choice=Choice(delay=3)))
        assert {(each.topology, each.delay) for each in proposal.options} == {("server", 3)}


def test_a_site_that_is_too_slow_for_the_others_is_named() -> None:
    four = (*sites(3, GBIT), PlannedSite("far", MBIT, MBIT, 0.02, 1.0))
    proposal = propose(Situation(10**8, four))
    assert proposal.recommended.not_planned_for == ("far",)
    assert any("far" in reason for reason in proposal.reasons)


def test_routes_among_peers_count_both_directions_at_once() -> None:
    assert allreduce_route(4, GBIT, 2 * GBIT, 0.1).transfer_s(1e9, 1e9, 1.0) == pytest.approx(1.5 * 8 + 0.1)
    assert mesh_route(4, 2 * GBIT, GBIT, 0.1).transfer_s(1e9, 1e9, 3.0) == pytest.approx(3 * 8 + 0.3)


def test_a_curve_goes_up_with_the_interval_and_through_the_option() -> None:
    situation = Situation(10**8, sites(2, 200 * MBIT), choice=Choice(delay=0))
    option = propose(situation).recommended
    curve = dict(utilization_by_interval(situation, option))
    assert sorted(curve.values()) == list(curve.values())
    assert curve[option.sync_every] == pytest.approx(option.utilization)


def test_the_guide_gives_what_was_measured_and_nothing_beyond() -> None:
    assert loss_ratio(50, "int4") == pytest.approx(1.006)
    assert loss_ratio(500, "bf16") == pytest.approx(1.141)
    assert 1.039 < (loss_ratio(150, "int8") or 0.0) < 1.094
    assert loss_ratio(50, "bf16", 5) == pytest.approx(1.006 * 1.002)
    assert loss_ratio(501, "bf16") is None
    assert loss_ratio(50, "sparse64") is None
    assert loss_ratio(50, "bf16", 40) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": 0}, "at least one parameter"),
        ({"sites": ()}, "at least one site"),
        ({"sites": sites(1, GBIT) * 2}, "different names"),
        ({"sites": (PlannedSite("the server", GBIT, GBIT, 0.0, 1.0),)}, "no site may be called"),
        ({"sites": sites(1, GBIT, workers=30_000)}, "at most 20000 workers"),
        ({"weights": "int3"}, "one of fp32, bf16, fp16"),
        ({"target_utilization": 1.0}, "between 0 and 1"),
        ({"choice": Choice(codec="mine")}, "size of codec 'mine' is not known"),
        ({"choice": Choice(sync_every=10, delay=10)}, "shorter than the interval"),
        ({"sites": sites(1, 0.5)}, "line up, .* must be from 1 to"),
        ({"sites": sites(1, GBIT, step_s=1e9)}, "step, .* must be from"),
        ({"sites": sites(1, GBIT, step_s=float("nan"))}, "step, .* must be from"),
        ({"sites": sites(1, GBIT, latency_s=-1.0)}, "round trip, .* must be from"),
    ],
)
def test_nonsense_is_refused_with_its_rule(changes: dict[str, object], said: str) -> None:
    good = Situation(10**8, sites(2, GBIT))
    with pytest.raises(ConfigError, match=said):
        propose(dataclasses.replace(good, **changes))  # type: ignore[arg-type]
