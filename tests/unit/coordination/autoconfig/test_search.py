"""Which setting is taken, where several would do, and what the plan says of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig import (
    ClusterState,
    ControllerState,
    LayerBounds,
    LayerDecision,
    LayerPlan,
    LayerState,
    decide,
    decide_by,
    orders_for,
)
from outerstep.coordination.autoconfig.bounds import breaches
from outerstep.coordination.autoconfig.controller import (
    LONGEST_NEED_S,
    _needed_s,  # seconds that are too small, or too rare, to be seen from outside
    _samples_off,
    _timeout,
    _unbalanced,
    outer_lr,
)
from outerstep.coordination.autoconfig.layer_plan import Assignment, changes_between
from outerstep.coordination.autoconfig.routes import Routes
from outerstep.coordination.autoconfig.search import Core, Search
from outerstep.coordination.autoconfig.trust import view_of
from outerstep.coordination.cost import NONE, Overheads, RoundCost

from .layers import MBIT, both_ways, cluster, decided, following, layer, star_links

RATES = dict.fromkeys("ab", 500 * MBIT)
CENTRE = "server"
STAR = {"a": CENTRE, "b": CENTRE}


def search(state: LayerState, overheads: Overheads = NONE) -> Search:
    return Search(state, view_of(state), overheads)


def bounded(rate: float = 500 * MBIT, *, latency_s: float = 0.0, step_s: float = 1.0, **said: Any) -> LayerState:
    """Of two clusters, with a million parameters, and these bounds; other things said go to the layer."""
    ours = {name: said.pop(name) for name in list(said) if name in LayerState.__struct_fields__}
    rates = dict.fromkeys("ab", rate)
    clusters: tuple[ClusterState, ...] = tuple(cluster(name, step_s) for name in rates)
    facts = {"parameters": 1_000_000, "clusters": clusters, "links": star_links(rates, latency_s=latency_s)}
    return layer(rates, bounds=LayerBounds(**said), **{**facts, **ours})


class TestIntervals:
    @pytest.mark.parametrize(
        ("least", "most", "found"),
        [
            (10, 30, [10, 12, 15, 19, 24, 30]),
            (1, 6, [1, 2, 3, 4, 5, 6]),
            (5, 5, [5]),
            (8, 10, [8, 10]),
            (8, 12, [8, 10, 12]),
        ],
    )
    def test_they_are_a_quarter_apart_and_a_step_at_least(self, least: int, most: int, found: list[int]) -> None:
        state = bounded(least_sync_every=least, most_sync_every=most)
        assert search(state).intervals(1) == found

    def test_a_fragment_needs_a_step(self) -> None:
        assert search(bounded(least_sync_every=2, fragments=(4,), most_sync_every=5)).intervals(4) == [4, 5]

    def test_a_global_batch_takes_as_long_as_all_clusters_need_for_it(self) -> None:
        clusters = (cluster("a", 2.0, batch_size=8), cluster("b", 2.0, batch_size=4))
        state = bounded(clusters=clusters, global_batch=240)
        assert search(state).intervals(1) == [20], "6 samples a second; 40 seconds of 2-second steps"


class TestCost:
    def test_a_round_is_its_steps_and_what_the_exchange_adds(self) -> None:
        state = bounded(1e6, latency_s=0.5, step_s=2.0)
        ends = Overheads(1e-6, 0.0, 0.0, 0.0, 3.0)
        cost = search(state, ends).cost(Core(10, "bf16", 1, 0, STAR))
        assert cost == RoundCost(20.0, pytest.approx(2.0 + 2.0 + 3 * 1.0), pytest.approx(1.0))
        assert search(state, ends).exchange_s(Core(10, "bf16", 1, 0, STAR)) == pytest.approx(7.0)

    def test_each_fragment_has_its_part_of_the_bytes_and_its_own_round_trips(self) -> None:
        state = bounded(1e6, latency_s=0.5, fragments=(4,))
        ends = Overheads(0.0, 0.0, 0.0, 0.0, 3.0, carried_bytes=0.0)
        assert search(state, ends).exchange_s(Core(10, "bf16", 4, 0, STAR)) == pytest.approx(4.0 + 4 * 3.0)

    def test_the_target_itself_meets_it_and_twice_what_it_allows_misses_it_by_far(self) -> None:
        found = search(bounded(target_utilization=0.5))
        assert found.meets(RoundCost(10.0, 6.0, 4.0))
        assert not found.meets(RoundCost(10.0, 6.0, 4.1))
        assert not found.misses_by_far(RoundCost(10.0, 12.0, 8.0))
        assert found.misses_by_far(RoundCost(10.0, 12.0, 8.1))


class TestWays:
    def test_the_gentler_first_codec_then_delay(self) -> None:
        state = bounded(codecs=("bf16", "int8"), fragments=(2, 1))
        found = search(state)
        order = [
            found.order(Core(40, codec, fragments, delay, STAR))
            for delay in (0, 1)
            for fragments in (1, 2)
            for codec in ("bf16", "int8")
        ]
        assert order == [0, 1, 2, 3, 4, 5, 6, 7]
        assert found.order(Core(40, "int4", 1, 0, STAR)) == 8, "one that is no way comes last"

    def test_fragments_in_force_come_before_others(self) -> None:
        state = bounded(codecs=("bf16",), fragments=(1, 2))
        plan = replace(decided(state).plan, num_fragments=2)
        found = search(following(state, plan))
        assert found.order(Core(40, "bf16", 2, 0, STAR)) < found.order(Core(40, "bf16", 1, 0, STAR))

    def test_where_no_delay_is_allowed_nothing_is_streamed(self) -> None:
        still = search(bounded(codecs=("bf16",), most_delay=0))
        assert still.order(Core(40, "bf16", 1, 1, STAR)) == 1, "no way"
        assert search(bounded(codecs=("bf16",), most_delay=1)).order(Core(40, "bf16", 1, 1, STAR)) == 1

    def test_a_delay_is_as_long_as_a_fragment_travels(self) -> None:
        state = bounded(1e6, codecs=("bf16",), least_sync_every=100, most_sync_every=100, most_delay=50, fragments=(2,))
        core = search(replace(state, target_utilization=0.999)).gentlest()
        assert core is not None
        assert (core.delay, core.sync_every) == (math.ceil(1.25 * 2.0), 100), "with a quarter to spare"

    def test_and_no_longer_than_until_the_next_one_is_sent(self) -> None:
        state = bounded(1e5, codecs=("bf16",), least_sync_every=40, most_sync_every=40, most_delay=50, fragments=(8,))
        assert search(state).fastest().delay == 5
        assert isinstance(search(state).fastest().delay, int)

    def test_the_fastest_is_the_smallest_codec_over_the_longest_interval_streamed(self) -> None:
        core = search(bounded(1e4)).fastest()
        assert (core.codec, core.sync_every, core.delay) == ("int4", 500, 5)
        assert search(bounded(1e4, most_delay=0)).fastest().delay == 0

    def test_a_setting_without_room_is_taken_where_there_is_none_with_it(self) -> None:
        one = {"codecs": ("bf16",), "least_sync_every": 10, "most_sync_every": 10, "most_delay": 0}
        for target, met in ((0.70, True), (0.714, True), (0.72, False)):  # 10 s of training, 4 of waiting
            core = search(bounded(1e6, target_utilization=target, **one)).gentlest()
            assert (core is not None) == met


class TestWhichRoute:
    """a is a tenth faster by way of b, too little for a tree; one interval of 100 s, and 4 s of waiting."""

    @staticmethod
    def found(target: float, **said: Any) -> Search:
        rates = {"a": 1e6, "b": 1e9}
        lines = (*star_links(rates, latency_s=0.0), *both_ways("a", "b", 1.1e6, 0.0))
        one = {"codecs": ("bf16",), "least_sync_every": 100, "most_sync_every": 100, "most_delay": 0}
        return search(bounded(target_utilization=target, links=lines, **{**one, **said}))

    def test_a_tree_is_taken_where_nothing_else_meets_the_target(self) -> None:
        for target, parent in ((0.95, CENTRE), (0.96, CENTRE), (0.963, "b")):
            core = self.found(target).gentlest()
            assert core is not None
            assert core.parents["a"] == parent
        assert self.found(0.97).gentlest() is None

    def test_the_fastest_setting_takes_the_fastest_route(self) -> None:
        assert self.found(0.99).fastest().parents["a"] == "b"

    def test_round_trips_count_against_a_relay_and_bytes_for_it(self) -> None:
        rates = {"a": 1e6, "b": 1e9}
        lines = (*star_links(rates, latency_s=0.0), *both_ways("a", "b", 1e9, 1.0))
        ends = Overheads(0.0, 0.0, 0.0, 0.0, 1.0, carried_bytes=0.0)
        one = {"codecs": ("bf16",), "least_sync_every": 100, "most_sync_every": 100, "most_delay": 0}
        for parameters, parent in ((10_000, CENTRE), (10_000_000, "b")):
            state = bounded(links=lines, parameters=parameters, **one)
            assert search(state, ends).fastest().parents["a"] == parent

    def test_a_way_asks_for_its_route_once_however_many_intervals_it_tries(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Over a hundred clusters a route takes longer than everything else together."""
        asked: list[object] = []
        whole = Routes.routed

        def counted(self: Routes, parents: Any) -> Any:
            asked.append(parents)
            return whole(self, parents)

        monkeypatch.setattr(Routes, "routed", counted)
        found = search(bounded(1e5, codecs=("bf16",), most_delay=0, target_utilization=0.9))
        core = found.gentlest()
        assert core is not None
        assert core.sync_every > found.intervals(1)[5], "several were tried"
        assert len(asked) <= 2


class TestSeconds:
    def test_a_timeout_is_ten_seconds_doubled_as_often_as_it_takes(self) -> None:
        assert _timeout(0.0, 0.0, 0.0) == 10.0
        assert _timeout(0.0, 6.0, 0.0) == 10.0
        assert _timeout(0.0, 7.0, 0.0) == 20.0, "half as much again"
        assert _timeout(0.0, 0.0, 10.0) == 20.0, "twice the inner one"
        assert _timeout(0.0, 0.0, 11.0) == 40.0

    def test_it_is_kept_while_it_is_enough_and_not_far_too_long(self) -> None:
        assert _timeout(20.0, 20.0, 0.0) == 20.0
        assert _timeout(20.0, 20.1, 0.0) == 40.0
        assert _timeout(20.0, 1.0, 10.0) == 20.0
        assert _timeout(20.0, 1.0, 10.1) == 40.0
        assert _timeout(80.0, 1.0, 0.0) == 80.0
        assert _timeout(160.0, 1.0, 0.0) == 10.0
        assert _timeout(160.0, 0.0, 0.0) == 160.0, "nothing is known"
        assert _timeout(8.0, 1.0, 0.0) == 10.0

    def test_a_member_waits_for_a_slow_exchange_and_for_others_that_are_late(self) -> None:
        state = bounded(1e6, step_s=3.0)
        core = Core(10, "bf16", 1, 0, STAR)
        shares = tuple(
            Assignment(cluster=name, leader="", sends_to=CENTRE, local_steps=10, batch_size=1) for name in "ab"
        )
        assert _needed_s(view_of(state), search(state), core, shares) == pytest.approx(4 * 4.0 + 0.5 * 30.0)
        assert _needed_s(view_of(state), None, core, shares) == 0.0
        lost = Core(10, "bf16", 1, 0, {"a": CENTRE})
        assert _needed_s(view_of(state), search(state), lost, shares) == 0.0
        slow = bounded(2.0)
        assert _needed_s(view_of(slow), search(slow), core, shares) == LONGEST_NEED_S

    @pytest.mark.parametrize(("sync_every", "lr"), [(50, 0.7), (100, 0.76), (500, 0.93), (10, 0.57), (1, 0.43)])
    def test_the_outer_rate_has_two_digits(self, sync_every: int, lr: float) -> None:
        assert outer_lr(LayerBounds(usual_outer_lr=0.7), sync_every) == lr


class TestShares:
    @staticmethod
    def steps(*counts: int, batch_size: int = 1) -> tuple[Assignment, ...]:
        return tuple(
            Assignment(cluster=f"c{i}", leader="", sends_to=CENTRE, local_steps=count, batch_size=batch_size)
            for i, count in enumerate(counts)
        )

    @pytest.mark.parametrize(
        ("was", "fits", "far"),
        [(16, 25, False), (16, 26, True), (26, 16, True), (1, 2, False), (1, 3, True), (2, 4, True), (50, 52, False)],
    )
    def test_a_share_is_far_off_by_much_and_by_two_steps_at_least(self, was: int, fits: int, far: bool) -> None:
        assert _unbalanced(self.steps(10, was), self.steps(10, fits)) == far

    def test_samples_are_off_if_another_division_comes_nearer(self) -> None:
        state = layer(RATES, global_batch=100)
        assert _samples_off(state, self.steps(90), self.steps(95))
        assert _samples_off(state, self.steps(110), self.steps(95))
        assert not _samples_off(state, self.steps(95), self.steps(105))
        assert not _samples_off(state, self.steps(95), self.steps(90))
        assert not _samples_off(layer(RATES), self.steps(90), self.steps(95))


class TestWhatIsSaid:
    def test_a_first_plan_without_measurements_is_the_usual_one(self) -> None:
        made = decided(layer(RATES, links=(), bounds=LayerBounds(least_sync_every=60)))
        assert (made.cause, made.plan.sync_every, made.plan.parents) == ("first", 60, STAR)
        assert (made.utilization, made.meets_target) == (None, False)
        assert made.reason == "the first plan; nothing that can be believed was measured"
        many = decided(
            layer(RATES, links=(), bounds=LayerBounds(usual_sync_every=2, least_sync_every=1, fragments=(4,)))
        )
        assert many.plan.sync_every == 4

    def test_a_first_plan_that_misses_the_target_says_so(self) -> None:
        made = decided(layer(dict.fromkeys("ab", 1e3)))
        assert (made.cause, made.meets_target) == ("first", False)
        assert "no setting within bounds meets the target" in made.reason

    def test_what_is_expected_is_told_with_what_is_lost(self) -> None:
        made = decided(bounded(1e6, codecs=("bf16",), least_sync_every=100, most_sync_every=100, most_delay=0))
        assert made.utilization == pytest.approx(100 / 104, abs=0.001)
        assert "100 s of training, 4.0" in made.reason

    def test_a_plan_out_of_bounds_is_replaced_saying_which(self) -> None:
        state = layer(RATES)
        plan = replace(decided(state).plan, codec="fp32")
        for links, codec in ((state.links, decided(state).plan.codec), ((), "bf16")):
            made = decided(following(state, plan, rounds=0, links=links))
            assert made.cause == "bounds"
            assert "the plan in force is out of bounds: codec must be one of bf16" in made.reason
            assert made.plan.codec == codec
            assert made.plan.parents == STAR

    def test_a_change_that_waits_says_for_what(self) -> None:
        state = layer(RATES)
        plan = decided(state).plan
        made = decided(following(layer(dict.fromkeys("ab", 250 * MBIT)), plan, rounds=1))
        assert made.cause == "waiting"
        assert made.reason.endswith(f"; it changed in round {plan.from_round}")
        assert made.plan is plan

    def test_one_that_left_is_named_as_the_reason(self) -> None:
        rates = dict.fromkeys("abc", 500 * MBIT)
        plan = decided(layer(rates)).plan
        made = decided(following(layer(RATES), plan, rounds=1))
        assert made.cause == "members"
        assert made.reason == "c has left"

    def test_what_is_missing_is_added_to_the_reason(self) -> None:
        clusters = (cluster("a", backends=("x",), most_batch_size=1), cluster("b", backends=("y",), most_batch_size=1))
        made = decided(layer(RATES, clusters=clusters, global_batch=10**6))
        assert made.reason.startswith("the first plan; ")
        assert "; of the global batch of 1000000 the steps and memory allow " in made.reason
        assert made.reason.endswith("; there is no backend that all clusters can speak")

    def test_changes_are_told_in_words_and_briefly(self) -> None:
        plan = decided(layer(RATES)).plan
        moved = replace(plan, assignments=tuple(replace(one, local_steps=7) for one in plan.assignments))
        [change] = changes_between(plan, moved)
        was = plan.assignments[0].local_steps
        assert (change.field, change.before) == ("assignments", f"a {was}×1 → server; b {was}×1 → server")
        assert change.after == "a 7×1 → server; b 7×1 → server"
        long = replace(plan, codec="c" * 300)
        assert [(len(one.before), len(one.after)) for one in changes_between(long, replace(long, codec="d" * 300))] == [
            (256, 256)
        ]

    def test_orders_are_the_plan_as_one_cluster_carries_it_out(self) -> None:
        plan = decided(layer(RATES)).plan
        orders = orders_for(plan, "b")
        for name in type(orders).__struct_fields__:
            if name not in ("assignment", "relays_for"):
                assert getattr(orders, name) == getattr(plan, name), name
        assert (orders.assignment, orders.relays_for) == (plan.assignments[1], ())


class TestLayers:
    """One inside another."""

    @staticmethod
    def both(inner_plan: LayerPlan | None = None, outer_plan: LayerPlan | None = None) -> ControllerState:
        slow = tuple(cluster(name, 100.0) for name in "ab")
        inner = layer(RATES, name="inner", clusters=slow, round=30 if inner_plan else 0, plan=inner_plan)
        outer = layer(RATES, name="outer", inside=("inner", "unknown"), round=30 if outer_plan else 0, plan=outer_plan)
        return ControllerState(layers=(outer, inner))

    def test_an_outer_one_waits_twice_as_long_at_least(self) -> None:
        outer, inner = decide(self.both())
        assert inner.plan.timeout_s > 100.0
        assert outer.plan.timeout_s >= 2 * inner.plan.timeout_s
        alone = decided(layer(RATES, name="outer"))
        assert alone.plan.timeout_s < inner.plan.timeout_s

    def test_a_policys_short_timeout_is_raised_above_the_inner_one(self) -> None:
        outer, inner = (made.plan for made in decide(self.both()))
        state = self.both(inner, replace(outer, timeout_s=10.0, revision=4))
        usual = {made.plan.layer: made for made in decide(state)}
        assert usual["outer"].cause == "timeout"
        raised = replace(inner, timeout_s=2 * outer.timeout_s)
        kept, _ = decide_by(lambda _: {"inner": raised}, self.both(inner, outer))
        assert (kept.cause, kept.plan.timeout_s) == ("timeout", 2 * raised.timeout_s)
        assert (kept.plan.revision, kept.plan.from_round) == (outer.revision + 1, 30)
        assert [change.field for change in kept.changes] == ["timeout_s"]
        assert kept.reason == f"those inside it may take {raised.timeout_s:g} s"
        first, _ = decide_by(lambda _: {"inner": raised}, self.both())
        assert first.plan.timeout_s > raised.timeout_s
        assert first.plan.revision == 1


class TestPolicies:
    @staticmethod
    def by(policy: Any, state: LayerState) -> LayerDecision:
        [made] = decide_by(policy, ControllerState(layers=(state,)))
        return made

    def test_it_is_shown_the_whole_state(self) -> None:
        seen = []
        state = ControllerState(layers=(layer(RATES),))

        def policy(shown: ControllerState) -> dict[str, LayerPlan]:
            seen.append(shown)
            return {}

        decide_by(policy, state)
        assert seen == [state]

    def test_a_layer_that_it_leaves_alone_is_kept_and_nothing_is_claimed_of_it(self) -> None:
        plan = decided(layer(RATES)).plan
        state = following(layer(dict.fromkeys("ab", 5 * MBIT)), plan)
        assert decided(state).changes
        made = self.by(lambda _: {}, state)
        assert (made.plan, made.cause, made.changes) == (plan, "kept", ())
        assert (made.utilization, made.meets_target) == (None, False)

    def test_of_its_own_plan_nothing_is_claimed_either(self) -> None:
        plan = decided(layer(RATES)).plan
        state = following(layer(RATES), plan)
        assert decided(state).meets_target
        made = self.by(lambda _: {"top": replace(plan, sync_every=77)}, state)
        assert (made.cause, made.reason) == ("policy", "the policy wants it")
        assert (made.utilization, made.meets_target) == (None, False)
        same = self.by(lambda _: {"top": plan}, state)
        assert (same.plan, same.cause) == (plan, "kept")
        first = self.by(lambda _: {"top": plan}, layer(RATES))
        assert (first.cause, first.plan.revision) == ("policy", 1)

    def test_what_is_wrong_with_it_is_listed(self) -> None:
        plan = decided(layer(RATES)).plan
        made = self.by(lambda _: {"top": replace(plan, sync_every=501, codec="mine")}, following(layer(RATES), plan))
        assert "got 501; codec must be one of" in made.reason

    def test_the_costs_that_it_is_given_are_those_that_count(self) -> None:
        state = ControllerState(layers=(layer(RATES),))
        dear = Overheads(1e-6, 0.0, 0.0, 0.0, 0.0)
        assert decide_by(lambda _: {}, state, dear) == decide(state, dear) != decide(state)


class TestBounds:
    @staticmethod
    def wrong(share: dict[str, Any] | None = None, **changes: Any) -> list[str]:
        rates = dict.fromkeys("ab", 500 * MBIT)
        state = layer(
            rates, bounds=LayerBounds(least_sync_every=8, fragments=(8,), usual_outer_lr=0.5, most_outer_lr=0.5)
        )
        plan = decided(layer(rates, links=(), bounds=state.bounds)).plan
        first = replace(plan.assignments[0], **(share or {}))
        return breaches(replace(plan, **{"assignments": (first, *plan.assignments[1:]), **changes}), state)

    def test_what_lies_on_them_is_within(self) -> None:
        assert self.wrong() == []
        assert self.wrong({"local_steps": 8}, sync_every=8) == []
        assert self.wrong(outer_lr=0.5) == []
        assert self.wrong(timeout_s=1e9) == []
        assert self.wrong({"local_steps": 16, "delay": 2}) == []

    @pytest.mark.parametrize("changes", [{"outer_lr": 0.0}, {"timeout_s": 0.0}, {"timeout_s": 1e9 + 1}])
    def test_what_lies_beyond_is_not(self, changes: dict[str, float]) -> None:
        [rule] = self.wrong(**changes)
        assert rule.startswith(next(iter(changes)))

    def test_a_share_has_fewer_larger_batches_than_steps(self) -> None:
        assert self.wrong({"local_steps": 16, "larger_batches": 15}) == []
        [rule] = self.wrong({"local_steps": 16, "larger_batches": 16})
        assert rule.endswith("got 1 and 16 larger ones")

    def test_a_relay_that_sends_to_the_centre_may_be_sent_to(self) -> None:
        assert self.wrong({"sends_to": "b"}, route="tree") == []


class TestWhenNothingWillDo:
    """Whatever is chosen, the target is missed."""

    @staticmethod
    def state(rate: float, **said: Any) -> LayerState:
        return bounded(rate, codecs=("bf16",), most_delay=0, target_utilization=0.99, **said)

    def test_a_plan_that_is_about_the_best_is_kept_and_said_to_be(self) -> None:
        state = self.state(1e4, least_sync_every=400, most_sync_every=500)
        plan = replace(decided(state).plan, sync_every=500)
        made = decided(following(state, plan))
        assert (made.cause, made.plan.sync_every, made.meets_target) == ("kept", 500, False)
        assert made.reason.startswith("no setting within bounds meets the target; ")
        assert made.reason.endswith("is about the best")
        near = decided(following(state, replace(plan, sync_every=410)))
        assert (near.cause, near.plan.sync_every) == ("kept", 410), "less than a quarter would be gained"

    def test_one_that_is_far_from_it_is_changed(self) -> None:
        state = self.state(1e4, least_sync_every=100, most_sync_every=500)
        plan = replace(decided(state).plan, sync_every=300)
        made = decided(following(state, plan))
        assert (made.cause, made.plan.sync_every) == ("slower", 500)
        assert "no setting within bounds meets the target; the best is" in made.reason

    def test_one_s_own_arithmetic_counts_as_waiting_does(self) -> None:
        state = self.state(1e9, least_sync_every=10, most_sync_every=20)
        plan = replace(decided(state).plan, sync_every=10)
        dear = Overheads(1e-6, 0.0, 0.0, 0.0, 0.0)  # one second in every round
        [made] = decide(ControllerState(layers=(following(state, plan),)), dear)
        assert (made.cause, made.plan.sync_every) == ("slower", 20)
        assert "10 s of training, 1.00" not in made.reason
        assert "20 s of training, 1.0" in made.reason


class TestWhenALineIsGone:
    @staticmethod
    def tree() -> tuple[LayerState, LayerPlan]:
        rates = {"a": 1 * MBIT, "b": 1000 * MBIT}
        links = (*star_links(rates), *both_ways("a", "b", 1000 * MBIT))
        state = layer(rates, links=links)
        plan = decided(state).plan
        assert plan.parents == {"a": "b", "b": CENTRE}
        return state, plan

    def test_the_rest_of_the_plan_stays_if_it_still_does(self) -> None:
        state, plan = self.tree()
        fast = star_links({"a": 1000 * MBIT, "b": 1000 * MBIT})
        made = decided(following(state, plan, rounds=1, links=fast))
        assert (made.cause, made.plan.sync_every, made.plan.codec) == ("route", plan.sync_every, plan.codec)
        assert made.reason.startswith("a line of the route in force is gone")
        assert made.plan.parents == STAR

    def test_and_changes_if_it_does_not(self) -> None:
        state, plan = self.tree()
        for rate, meets in ((200 * MBIT, True), (0.1 * MBIT, False)):
            made = decided(following(state, plan, rounds=1, links=star_links({"a": rate, "b": rate})))
            assert (made.cause, made.meets_target) == ("route", meets)
            assert made.plan.sync_every > plan.sync_every


class TestHowSoon:
    def test_a_plan_of_a_late_round_is_as_new_as_one_of_an_early_round(self) -> None:
        late = layer(RATES, round=1000)
        plan = decided(late).plan
        slower = layer(dict.fromkeys("ab", 250 * MBIT), round=1000)
        assert decided(following(slower, plan, rounds=1)).cause == "waiting"
        assert decided(following(slower, plan, rounds=10)).cause == "slower"

    def test_a_timeout_that_is_far_too_long_is_shortened_after_a_while(self) -> None:
        state = layer(RATES, round=1000)
        plan = replace(decided(state).plan, timeout_s=81920.0)
        soon, later = (decided(following(state, plan, rounds=rounds)) for rounds in (1, 10))
        assert (soon.plan, soon.cause) == (plan, "kept")
        assert later.cause == "timeout"
        assert later.plan.timeout_s < 81920.0

    def test_another_global_batch_is_shared_out_at_once(self) -> None:
        clusters = tuple(cluster(name, batch_size=8, most_batch_size=10**6) for name in "ab")
        state = layer(RATES, clusters=clusters, global_batch=1600)
        plan = decided(state).plan
        bounds = LayerBounds(least_sync_every=plan.sync_every, most_sync_every=plan.sync_every)
        made = decided(following(state, plan, rounds=1, global_batch=1700, bounds=bounds))
        assert made.cause == "members"
        assert made.reason.startswith("the global batch that was asked is 1700 now")
        assert sum(one.samples for one in made.plan.assignments) == 1700


def test_a_delay_of_more_than_a_tenth_of_the_interval_carries_steps() -> None:
    facts = {"codecs": ("bf16",), "most_delay": 50, "target_utilization": 0.999}
    for interval, delay, carries in ((100, 3, False), (25, 3, True)):
        made = decided(bounded(2.1e6, least_sync_every=interval, most_sync_every=interval, **facts))
        assert (made.plan.delay, made.plan.carry) == (delay, carries)
