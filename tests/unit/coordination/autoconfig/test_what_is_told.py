"""What the controller is told by operators, meters and clusters, at the edges."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig import ClusterState, LayerBounds, LayerState, LeaderCandidate, LinkMeter
from outerstep.coordination.autoconfig.members import backend_for, leader_for, longest_delay
from outerstep.coordination.autoconfig.meter import MOST_LINKS, SMALLEST_BYTES
from outerstep.coordination.autoconfig.recommend import InnerSettings, recommend
from outerstep.coordination.autoconfig.state import SMALL_MODEL, usual_bounds
from outerstep.coordination.autoconfig.trust import (
    FAR,
    LARGEST_BATCH,
    LONGEST_LATENCY_S,
    LONGEST_STEP_S,
    MOST_DOUBTS,
    SHORTEST_STEP_S,
    SLOWEST_BYTES_PER_S,
    view_of,
)
from outerstep.coordination.cost import (
    Overheads,
    RouteCost,
    bytes_per_value,
    down_recipe,
    exchange_s,
    fragment_s,
    split_target,
)
from outerstep.errors import ConfigError

from .layers import both_ways, cluster, decided, following, layer, star_links

INF = math.inf
RATES = dict.fromkeys("ab", 1e8)


def bounded(**said: Any) -> LayerState:
    return layer(RATES, bounds=LayerBounds(**said))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (layer(RATES, clusters=()), "it must have at least one cluster, got none"),
        (layer(RATES, clusters=(cluster("a"), cluster("a"))), "clusters must have different names, got a, a"),
        (layer(RATES, centre="a"), "the centre must have a name of its own, got a"),
        (layer(RATES, parameters=0), "parameters must be at least 1, got 0"),
        (layer(RATES, round=-1), "round must not be negative, got -1"),
        (layer(RATES, global_batch=-1), "global_batch must not be negative, got -1"),
        (layer(RATES, target_utilization=0.0), "target_utilization must lie between 0 and 1, got 0.0"),
        (layer(RATES, centre_out_bytes_per_s=-1.0), "centre_out_bytes_per_s must be finite and not negative, got -1.0"),
        (bounded(least_sync_every=5, most_sync_every=4), "the least first, got (5, 4)"),
        (bounded(codecs=("int8", "bf16")), "codecs must go from large to small, got ('int8', 'bf16')"),
        (bounded(fragments=(0,)), "fragments must be from 1 to most_sync_every, got (0,)"),
        (bounded(most_delay=-1), "most_delay must not be negative, got -1"),
        (bounded(usual_sync_every=0), "usual_sync_every must be at least 1, got 0"),
        (bounded(usual_outer_lr=0.0), "usual_outer_lr must be positive and at most most_outer_lr, got (0.0, 1.0)"),
        (bounded(most_outer_lr=INF), "at most most_outer_lr, got ("),
        (bounded(stale_after_s=0.0), "stale_after_s must be positive and finite, got 0.0"),
        (bounded(rounds_between_changes=0), "rounds_between_changes must be at least 1, got 0"),
    ],
)
def test_an_operators_contradiction_is_refused_with_what_was_said(state: LayerState, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decided(state)
    assert "layer 'top': " in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "state",
    [
        layer(RATES, parameters=1),
        bounded(least_sync_every=1),
        bounded(usual_sync_every=1),
        bounded(rounds_between_changes=1),
        bounded(fragments=(100,), most_sync_every=100),
        bounded(usual_outer_lr=0.9, most_outer_lr=0.9),
        bounded(stale_after_s=0.5),
    ],
)
def test_what_lies_on_a_limit_is_taken(state: LayerState) -> None:
    assert decided(state).cause == "first"


def test_long_intervals_are_for_models_from_a_size_on_or_for_few_members() -> None:
    assert usual_bounds(SMALL_MODEL - 1, 4).most_sync_every == 100
    assert usual_bounds(SMALL_MODEL, 4).most_sync_every == 500
    assert usual_bounds(1, 3).most_sync_every == 500


class TestMeter:
    def test_what_cannot_be_is_not_noted(self) -> None:
        meter = LinkMeter("a")
        for seconds in (0.0, -1.0, INF, math.nan):
            meter.transferred("a", "b", 1 << 20, seconds, 0.0)
        meter.transferred("a", "b", SMALLEST_BYTES - 1, 1.0, 0.0)
        assert meter.reports(0.0) == ()
        meter.transferred("a", "b", SMALLEST_BYTES, 1.0, 0.0)
        [report] = meter.reports(0.0)
        assert (report.measured_by, report.bytes_per_s, report.latency_s) == ("a", SMALLEST_BYTES, 0.0)

    def test_latencies_that_can_be_are_noted(self) -> None:
        meter = LinkMeter("a")
        meter.transferred("a", "b", 1 << 20, 1.0, 5.0)
        for latency_s in (INF, math.nan, -1.0):
            meter.answered("a", "b", latency_s)
        assert meter.reports(5.0)[0].latency_s == 0.0
        for latency_s, shortest in ((0.5, 0.5), (0.25, 0.25), (0.75, 0.25), (0.0, 0.0)):
            meter.answered("a", "b", latency_s)
            assert meter.reports(5.0)[0].latency_s == shortest

    def test_a_measurement_is_never_younger_than_new(self) -> None:
        meter = LinkMeter("a")
        meter.transferred("a", "b", 1 << 20, 1.0, 5.0)
        assert [meter.reports(now)[0].age_s for now in (4.0, 5.0, 5.5)] == [0.0, 0.0, 0.5]

    def test_so_many_links_are_measured_and_those_go_on(self) -> None:
        meter = LinkMeter("a")
        for i in range(MOST_LINKS + 1):
            meter.transferred("a", f"n{i}", 1 << 20, 1.0, 0.0)
        assert len(meter.reports(0.0)) == MOST_LINKS
        meter.transferred("a", "n0", 1 << 20, 1.0, 9.0)
        assert min(report.age_s for report in meter.reports(9.0)) == 0.0


class TestMembers:
    @pytest.mark.parametrize("other", ["NVIDIA-h100", "nvidia_a100", "nvidia a100", "nvidia"])
    def test_a_vendor_is_the_first_word_however_it_is_written(self, other: str) -> None:
        members = [
            cluster(name, accelerators=(kind,), backends=("nccl", "gloo"))
            for name, kind in (("a", "nvidia-h100"), ("b", other))
        ]
        assert backend_for(members) == "nccl"

    @staticmethod
    def led(now: str, **rates: float) -> str:
        candidates = tuple(LeaderCandidate(name=name, bytes_per_s=rate) for name, rate in rates.items())
        return leader_for(ClusterState(name="c", step_s=1.0, candidates=candidates), now)

    def test_whoever_leads_stays_unless_another_line_is_faster_by_the_hysteresis(self) -> None:
        assert self.led("b", a=156.0, b=100.0) == "b"
        assert self.led("b", a=157.0, b=100.0) == "a"
        assert self.led("b", a=0.5, b=0.2) == "a"
        assert self.led("gone", a=1.0, b=1.0) == "a"

    @pytest.mark.parametrize("absurd", [INF, -1.0, math.nan])
    def test_a_line_that_cannot_be_draws_nothing(self, absurd: float) -> None:
        assert self.led("b", a=absurd, b=100.0) == "b"
        assert self.led("a", a=absurd, b=100.0) == "a", "nothing is known of it"

    def test_a_plan_that_changes_keeps_its_leaders(self) -> None:
        state = layer(RATES)
        plan = decided(state).plan
        led = replace(plan, assignments=tuple(replace(one, leader=f"{one.cluster}-1") for one in plan.assignments))
        slow = layer(dict.fromkeys("ab", 1e6))
        made = decided(following(slow, led))
        assert made.changes
        assert [one.leader for one in made.plan.assignments] == ["a-1", "b-1"]

    def test_a_delay_is_a_whole_number_of_steps(self) -> None:
        assert [longest_delay(2, steps) for steps in (1, 2, 5, 9)] == [0, 1, 2, 4]
        assert all(isinstance(longest_delay(2, steps), int) for steps in (2, 5))


class TestTrust:
    def test_what_a_cluster_says_on_a_limit_is_believed(self) -> None:
        for step_s in (SHORTEST_STEP_S, LONGEST_STEP_S):
            state = layer(RATES, clusters=tuple(cluster(name, step_s, batch_size=LARGEST_BATCH) for name in "ab"))
            assert view_of(state).not_believed == ()

    @pytest.mark.parametrize(
        ("said", "names"),
        [({"step_s": 0.0}, "cluster 'b': step_s must be from"), ({"batch_size": 0}, "cluster 'b': batch_size must be")],
    )
    def test_what_is_not_is_named_with_the_cluster(self, said: dict[str, Any], names: str) -> None:
        state = layer(RATES, clusters=(cluster("a"), cluster("b", **said)))
        [doubt] = view_of(state).not_believed
        assert doubt.startswith(names)

    def test_links_on_a_limit_are_believed(self) -> None:
        links = (
            *both_ways("a", "server", SLOWEST_BYTES_PER_S, LONGEST_LATENCY_S, age_s=600.0),
            *both_ways("b", "server", 1e8),
        )
        view = view_of(layer(RATES, links=links))
        assert view.not_believed == ()
        assert view.lines["a", "server"].bytes_per_s == SLOWEST_BYTES_PER_S

    def test_of_two_reports_of_one_age_the_worse_counts_whichever_comes_first(self) -> None:
        better, worse = (both_ways("a", "server", 1e8, latency_s) for latency_s in (0.1, 0.2))
        for links in ((*better, *worse), (*worse, *better)):
            assert view_of(layer(RATES, links=links)).lines["a", "server"].latency_s == 0.2

    def test_without_a_believable_speed_nobody_is_counted(self) -> None:
        assert view_of(layer(RATES, clusters=(cluster("a", 0.0), cluster("b", INF)))).counted == ()
        view = view_of(layer(RATES, clusters=(cluster("a", 0.0), cluster("b", 2.0))))
        assert view.counted == ("a", "b")
        assert [one.step_s for one in view.clusters] == [2.0, 2.0], "what is missing is the median"

    def test_of_speeds_and_batches_that_nobody_says_one_is_taken(self) -> None:
        view = view_of(layer(RATES, clusters=tuple(cluster(name, 0.0, batch_size=0) for name in "ab")))
        assert [(one.step_s, one.batch_size) for one in view.clusters] == [(1.0, 1), (1.0, 1)]

    def test_samples_per_second_are_bounded_by_the_median(self) -> None:
        members = (cluster("a", 2.0, batch_size=4), cluster("b", 2.0, batch_size=4), cluster("c", 0.25, batch_size=64))
        view = view_of(layer(dict.fromkeys("abc", 1e8), clusters=members))
        assert [one.batch_size for one in view.clusters] == [4, 4, round(FAR * 2.0 * 0.25)]

    @pytest.mark.parametrize(
        ("said", "believed"), [(0, 0), (1, 1), (-1, 0), (LARGEST_BATCH, LARGEST_BATCH), (LARGEST_BATCH + 1, 0)]
    )
    def test_what_fits_is_believed_if_it_can_be(self, said: int, believed: int) -> None:
        [one] = view_of(layer({"a": 1e8}, clusters=(cluster("a", most_batch_size=said),))).clusters
        assert one.most_batch_size == believed

    def test_so_many_doubts_are_told_and_the_others_counted(self) -> None:
        odd = both_ways("a", "server", -1.0)[0]
        known = star_links(RATES)
        assert len(view_of(layer(RATES, links=(*known, *[odd] * MOST_DOUBTS))).not_believed) == MOST_DOUBTS
        told = view_of(layer(RATES, links=(*known, *[odd] * (MOST_DOUBTS + 1)))).not_believed
        assert told[-1] == "and 1 more"

    def test_of_three_clusters_one_that_is_far_too_slow_is_not_planned_for(self) -> None:
        for slower, planned in ((FAR, True), (FAR * 1.01, False)):
            rates = {"a": 1e8, "b": 1e8, "c": 1e8 / slower}
            assert (view_of(layer(rates)).not_planned_for == ()) == planned
        assert view_of(layer({"a": 1e8, "b": 1.0})).not_planned_for == ()

    def test_each_way_of_a_line_counts_once(self) -> None:
        there, back = 1e8 / 15, 1e8 / 15
        links = [*star_links(dict.fromkeys("abc", 1e8))]
        links[4:] = [replace(links[4], bytes_per_s=there), replace(links[5], bytes_per_s=1e8)]
        assert view_of(layer(dict.fromkeys("abc", 1e8), links=tuple(links))).not_planned_for == ()
        links[4:] = [replace(links[4], bytes_per_s=1e8 / 32), replace(links[5], bytes_per_s=back * 100)]
        assert view_of(layer(dict.fromkeys("abc", 1e8), links=tuple(links))).not_planned_for == ("c",)

    def test_three_rounds_are_young_enough_by_the_fastest_speed_that_can_be_believed(self) -> None:
        state = layer(RATES, clusters=(cluster("a", 10.0), cluster("b", 0.0)))
        plan = replace(decided(state).plan, sync_every=100, timeout_s=20.0)
        for age_s, young in ((3 * (100 * 10.0 + 20.0), True), (3 * (100 * 10.0 + 20.0) + 1.0, False)):
            aged = replace(following(state, plan), links=star_links(RATES, age_s=age_s))
            assert bool(view_of(aged).lines) == young

    def test_however_long_a_round_takes_it_has_an_end(self) -> None:
        state = layer(RATES, clusters=tuple(cluster(name, 1e6) for name in "ab"))
        plan = replace(decided(state).plan, sync_every=100, timeout_s=20.0)
        for age_s, young in ((60_000.0, True), (60_001.0, False)):
            aged = replace(following(state, plan), links=star_links(RATES, age_s=age_s))
            assert bool(view_of(aged).lines) == young

    def test_where_no_speed_is_known_the_timeout_alone_is(self) -> None:
        state = layer(RATES, clusters=tuple(cluster(name, 0.0) for name in "ab"))
        plan = replace(decided(state).plan, sync_every=100, timeout_s=1000.0)
        for age_s, young in ((3000.0, True), (3001.0, False)):
            aged = replace(following(state, plan), links=star_links(RATES, age_s=age_s))
            assert bool(view_of(aged).lines) == young


class TestRecommending:
    @staticmethod
    def share(batch_size: int) -> Any:
        return replace(decided(layer(RATES)).plan.assignments[0], batch_size=batch_size)

    def test_each_says_why(self) -> None:
        assert recommend(self.share(8), InnerSettings()).reason == "a batch of 8 is this share"
        assert recommend(self.share(8), InnerSettings(batch_size=8)).reason == "the batch is what it should be"
        assert recommend(self.share(8), InnerSettings(batch_size=4)).reason == "a batch of 8 instead of 4"
        said = recommend(self.share(8), InnerSettings(batch_size=4, lr=0.5)).reason
        assert said == "a batch of 8 instead of 4; lr times 2"

    def test_a_rate_shrinks_to_a_quarter_at_most(self) -> None:
        assert recommend(self.share(1), InnerSettings(batch_size=100, lr=1.0)).settings.lr == 0.25

    @pytest.mark.parametrize("lr", [0.0, INF, -1.0])
    def test_a_rate_that_cannot_be_is_left_out(self, lr: float) -> None:
        assert recommend(self.share(8), InnerSettings(batch_size=4, lr=lr)).settings.lr is None


class TestCost:
    def test_a_recipe_is_its_first_codec(self) -> None:
        assert bytes_per_value("bf16,norms=fp32") == bytes_per_value("bf16+feedback") == 2.0
        assert down_recipe("int8+feedback,norms=fp32") == "int8"
        assert down_recipe("int8,norms=fp32") == "int8"
        assert down_recipe("sparse64+feedback") == "bf16"

    def test_an_exchange_is_the_sum_of_what_each_end_and_the_line_take(self) -> None:
        ends = Overheads(0.0, 0.5, 0.25, 0.125, 5.0, carried_bytes=0.0)
        up, down = 40, 20
        moving = 2.0 * up + 3.0 * down + 0.5 * (up + down) + 3 * 0.125 * (up + down) + 0.25 * 10
        assert exchange_s(10, "fp32", "bf16", RouteCost(2.0, 3.0, 7.0), 3, ends) == moving
        assert fragment_s(10, "fp32", "bf16", RouteCost(2.0, 3.0, 7.0), 3, ends) == moving + 5.0 * 7.0

    def test_one_level_has_the_whole_target(self) -> None:
        assert split_target(0.81, 0) == split_target(0.81, 1) == 0.81
        assert split_target(0.81, 2) == pytest.approx(0.9)


def test_a_transfer_that_ends_after_its_member_has_left_is_not_remembered() -> None:
    """Else names that come and go would fill the meter, and nobody after them were measured."""
    meter = LinkMeter("server")
    with meter.part("a", "server", SMALLEST_BYTES, lambda: 1.0, nullcontext()):
        meter.forget("a")
    assert not meter._links
