"""What the controller decides, rule by rule."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig import (
    ControllerState,
    InnerSettings,
    LayerBounds,
    LayerState,
    LeaderCandidate,
    LinkMeter,
    LinkReport,
    controller,
    decide,
    orders_for,
    recommend,
    search,
    state,
    usual_bounds,
)
from outerstep.coordination.autoconfig.bounds import breaches
from outerstep.coordination.autoconfig.members import apportioned, backend_for, in_words
from outerstep.coordination.cost import Overheads
from outerstep.errors import ConfigError

from .layers import MBIT, both_ways, cluster, decided, following, layer, star_links

TWO = ("a", "b")
BLOCKING = LayerBounds(most_delay=0)


def two(mbit: float, **said: Any) -> LayerState:
    return layer(dict.fromkeys(TWO, mbit * MBIT), **said)


# --- interval, codec, delay -------------------------------------------------------------------------------------------


def test_a_fast_link_keeps_the_exact_codec_and_the_shortest_interval() -> None:
    made = decided(two(100_000, parameters=10_000_000))
    plan = made.plan
    assert (plan.sync_every, plan.codec, plan.delay, plan.route) == (10, "bf16", 0, "star")
    assert (plan.revision, plan.from_round, made.cause, made.changes) == (1, 0, "first", ())
    assert made.meets_target


def test_a_smaller_codec_comes_before_a_delay_and_a_delay_before_a_longer_interval() -> None:
    seen: list[tuple[int, str, bool]] = []
    for mbit in (20_000 * 0.8**power for power in range(36)):
        plan = decided(
            two(mbit, parameters=20_000_000, links=star_links(dict.fromkeys(TWO, mbit * MBIT), latency_s=0.0))
        ).plan
        seen.append((plan.sync_every, plan.codec, plan.delay > 0))
    for (longer, *_), (shorter, *_) in pairwise(reversed(seen)):
        assert shorter <= 1.25 * longer, "up to a quarter longer is taken for a gentler way"
    shortest = [(codec, delayed) for interval, codec, delayed in seen if interval == 10]
    order = [(codec, delayed) for delayed in (False, True) for codec in ("bf16", "int8", "int4")]
    assert [order.index(each) for each in shortest] == sorted(order.index(each) for each in shortest)
    assert {("bf16", False), ("int8", False)} <= set(shortest), "the codec goes first"
    assert seen[-1][0] > 100
    assert all(codec == "int4" for interval, codec, _ in seen if interval > 12), "before the interval grows"


def test_the_rule_of_thumb_for_blocking_exchanges() -> None:
    """H ≥ u/(1−u)·T/t: 19 times the exchange at 95 %, plus the room and the step to the next interval."""
    for mbit in (400, 1000, 2000):
        bounds = LayerBounds(most_delay=0, codecs=("bf16",), most_sync_every=10_000)
        made = decided(two(mbit, bounds=bounds), overheads=Overheads(0.0, 0.0, 0.0, 0.0, 5.0))
        exchange_s = 2 * 200e6 / (mbit * MBIT) + 5 * 0.04
        assert 19 * exchange_s * 1.25 < made.plan.sync_every < 19 * exchange_s * 1.25 * 1.25 * 1.3


def test_the_outer_learning_rate_grows_with_the_interval() -> None:
    rates = [decided(two(mbit, bounds=BLOCKING)).plan for mbit in (100_000, 3_000, 500, 300)]
    assert [p.sync_every for p in rates] == sorted({p.sync_every for p in rates})
    assert [p.outer_lr for p in rates] == sorted({p.outer_lr for p in rates})
    at = {h: controller.outer_lr(LayerBounds(), h) for h in (1, 50, 500, 10**6)}
    assert at[50] == 0.7
    assert at[1] < 0.7 < at[500] <= at[10**6] == 1.0


def test_a_target_out_of_reach_gives_the_best_there_is() -> None:
    made = decided(two(0.1))
    assert not made.meets_target
    assert (made.plan.sync_every, made.plan.codec) == (500, "int4")
    assert "no setting within bounds meets the target" in made.reason
    again = decided(following(two(0.1), made.plan))
    assert again.plan == made.plan, "and stays there"


def test_small_models_with_many_members_have_shorter_intervals() -> None:
    assert usual_bounds(10**7, 4).most_sync_every == 100
    assert usual_bounds(10**7, 3).most_sync_every == usual_bounds(10**9, 8).most_sync_every == 500


# --- hysteresis -------------------------------------------------------------------------------------------------------


def test_a_tenth_of_the_bandwidth_and_back() -> None:
    before = two(1_000)
    plan = decided(before).plan
    slow = decided(following(before, plan, links=star_links(dict.fromkeys(TWO, 100 * MBIT))))
    assert (slow.cause, slow.meets_target) == ("slower", True)
    assert slow.plan.sync_every > 2 * plan.sync_every
    assert {change.field for change in slow.changes} >= {"sync_every", "outer_lr"}
    assert "the target is missed" in slow.reason
    back = decided(following(following(before, plan), slow.plan))
    assert (back.cause, back.plan.revision) == ("faster", 3)
    assert back.plan.sync_every <= 1.6 * plan.sync_every
    assert "gentler" in back.reason


def test_a_small_change_of_the_link_changes_nothing() -> None:
    before = two(500)
    plan = decided(before).plan
    for factor in (0.81, 0.9, 1.1, 1.25):
        links = star_links(dict.fromkeys(TWO, factor * 500 * MBIT))
        made = decided(following(before, plan, links=links))
        assert made.plan is plan
        assert (made.cause, made.changes) == ("kept", ())


@pytest.mark.parametrize(
    ("rounds", "mbit", "cause"),
    [
        (2, 100, "waiting"),
        (3, 100, "slower"),
        (9, 300, "waiting"),
        (10, 300, "slower"),
        (9, 50_000, "waiting"),
        (10, 50_000, "faster"),
    ],
)
def test_after_a_change_a_plan_holds_for_ten_rounds_or_three(rounds: int, mbit: float, cause: str) -> None:
    """Three if the target is missed by far."""
    bounds = LayerBounds(most_delay=0, codecs=("int4",), most_sync_every=5000)
    before = two(500, bounds=bounds)
    plan = decided(before).plan
    made = decided(following(before, plan, rounds, links=star_links(dict.fromkeys(TWO, mbit * MBIT))))
    assert made.cause == cause
    assert (made.plan is plan) == (cause == "waiting")


def test_a_plan_that_must_change_anyway_changes_once() -> None:
    """So slow that the timeout is too short: the interval does not wait for its turn then."""
    before = two(500)
    plan = decided(before).plan
    made = decided(following(before, plan, 1, links=star_links(dict.fromkeys(TWO, 10 * MBIT))))
    assert (made.cause, made.plan.revision) == ("slower", 2)
    assert {"timeout_s", "sync_every"} <= {change.field for change in made.changes}


def changes_on_a_noisy_link(seed: int, rounds: int = 80) -> list[int]:
    """The rounds in which the plan changed; the bandwidth is always the same, what is measured of it is not."""
    rng = random.Random(f"noise {seed}")
    parameters, mbit = int(10 ** rng.uniform(6.5, 9.5)), 10 ** rng.uniform(1.5, 4.0)
    bounds = LayerBounds(fragments=(rng.choice([1, 4]),), most_delay=rng.choice([0, 5]))
    meter, plan, found = LinkMeter("server"), None, list[int]()
    for number in range(rounds):
        for name in TWO:
            for ends in ((name, "server"), ("server", name)):
                noisy = mbit * MBIT * rng.lognormvariate(0.0, 0.3)
                meter.transferred(*ends, 10**7, 10**7 / noisy, float(number))
                meter.answered(*ends, rng.uniform(0.01, 0.03))
        steps = tuple(cluster(name, rng.lognormvariate(0.0, 0.05)) for name in TWO)
        said = {"parameters": parameters, "clusters": steps, "links": meter.reports(float(number)), "bounds": bounds}
        made = decided(LayerState(name="top", round=number, plan=plan, **said))
        found += [number] if made.changes else []
        plan = made.plan
    return found


def check_steadiness(runs: int) -> None:
    changes = 0
    for seed in range(runs):
        found = changes_on_a_noisy_link(seed)
        assert all(later - earlier >= 10 for earlier, later in pairwise(found)), (seed, found)
        changes += len(found)
    assert changes < 2 * runs, f"{changes} changes in {runs} runs of 80 rounds"


def test_a_steady_noisy_link_changes_a_plan_once_in_ten_rounds_at_most() -> None:
    check_steadiness(25)


def no_hysteresis(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (controller, search, state):
        monkeypatch.setattr(module, "HYSTERESIS", 1.0)
    monkeypatch.setattr(controller, "FAR_BACK", 1.0)


def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_too_soon", lambda *given: False)
    no_hysteresis(monkeypatch)


def panic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every miss is urgent, however small."""
    no_hysteresis(monkeypatch)
    monkeypatch.setattr(search.Search, "misses_by_far", lambda self, cost: True)
    monkeypatch.setattr(controller, "URGENT_ROUNDS", 0)


@pytest.mark.parametrize("plant", [no_hysteresis, no_pause, panic])
def test_a_planted_restlessness_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_steadiness(25)


# --- members ----------------------------------------------------------------------------------------------------------


def test_a_cluster_that_comes_or_goes_changes_the_plan_at_once() -> None:
    before = two(1000)
    plan = decided(before).plan
    three = layer(dict.fromkeys("abc", 1000 * MBIT))
    joined = decided(replace(three, plan=plan, round=1))
    assert (joined.cause, joined.plan.revision, joined.plan.from_round) == ("members", 2, 1)
    assert [each.cluster for each in joined.plan.assignments] == ["a", "b", "c"]
    left = decided(following(two(1000), joined.plan, 2))
    assert [each.cluster for each in left.plan.assignments] == ["a", "b"]
    assert joined.reason == "c has joined"
    assert left.reason == "c has left"


def test_a_leader_that_is_gone_is_replaced_at_once_and_a_better_line_takes_over() -> None:
    before = two(1000)
    plan = decided(before).plan
    assert [each.leader for each in plan.assignments] == ["a-0", "b-0"]
    second = (LeaderCandidate(name="a-1"),)
    made = decided(following(before, plan, 1, clusters=(cluster("a", candidates=second), cluster("b"))))
    assert [each.leader for each in made.plan.assignments] == ["a-1", "b-0"]
    assert (made.plan.sync_every, made.plan.codec) == (plan.sync_every, plan.codec)
    both = (LeaderCandidate(name="a-0", bytes_per_s=100.0), LeaderCandidate(name="a-1", bytes_per_s=90.0))
    again = decided(following(before, made.plan, 1, clusters=(cluster("a", candidates=both), cluster("b"))))
    assert again.plan is made.plan, "not for a little"
    nobody = decided(following(before, made.plan, 1, clusters=(cluster("a", candidates=()), cluster("b"))))
    assert nobody.plan.assignments[0].leader == ""


def test_a_new_plan_is_led_by_whoever_has_the_better_line() -> None:
    for rates, leader in (((1.0, 1.5), "a-0"), ((1.0, 1.6), "a-1"), ((0.0, 9.0), "a-0"), ((1.0, float("nan")), "a-0")):
        candidates = tuple(LeaderCandidate(name=f"a-{i}", bytes_per_s=rate) for i, rate in enumerate(rates))
        made = decided(layer({"a": 1e9}, clusters=(cluster("a", candidates=candidates),)))
        assert made.plan.assignments[0].leader == leader


@pytest.mark.parametrize(
    ("accelerators", "backends", "chosen"),
    [
        (("nvidia-h100", "nvidia-a100"), (("nccl", "gloo"), ("gloo", "nccl")), "nccl"),
        (("nvidia-h100", "huawei-910b"), (("nccl", "gloo"), ("hccl", "gloo")), "gloo"),
        (("nvidia-h100", "amd-mi300"), (("nccl", "gloo"), ("nccl", "gloo")), "gloo"),
        (("huawei-910b", "huawei-910c"), (("hccl", "gloo"), ("hccl", "gloo")), "hccl"),
        (("nvidia-h100", "nvidia-h100"), (("nccl", "gloo"), ("gloo",)), "gloo"),
        (("nvidia-h100", "cpu"), (("nccl",), ("gloo",)), ""),
    ],
)
def test_the_backend_is_one_that_all_can_speak(accelerators: Any, backends: Any, chosen: str) -> None:
    members = tuple(
        cluster(name, accelerators=(kind,), backends=speaks)
        for name, kind, speaks in zip(TWO, accelerators, backends, strict=True)
    )
    assert backend_for(members) == chosen
    made = decided(two(1000, clusters=members))
    assert made.plan.backend == chosen
    assert ("no backend that all clusters can speak" in made.reason) == (not chosen)


def test_a_cluster_of_another_vendor_makes_its_group_fall_back_at_once() -> None:
    def of(kind: str, *backends: str) -> dict[str, Any]:
        return {"accelerators": (kind,), "backends": backends}

    nvidia = tuple(cluster(name, **of("nvidia-h100", "nccl", "gloo")) for name in TWO)
    plan = decided(two(1000, clusters=nvidia)).plan
    assert plan.backend == "nccl"
    mixed = (*nvidia, cluster("c", **of("huawei-910b", "hccl", "gloo")))
    made = decided(layer(dict.fromkeys("abc", 1000 * MBIT), clusters=mixed, round=1, plan=plan))
    assert made.plan.backend == "gloo"
    assert ("backend", "nccl", "gloo") in {(c.field, c.before, c.after) for c in made.changes}
    assert made.reason == "c has joined; c runs on huawei-910b and speaks hccl, gloo"


def test_who_came_and_who_left_is_told_in_words() -> None:
    old, new = cluster("a"), cluster("d", accelerators=(), backends=("gloo",))
    assert in_words(["a"], [old]) == ""
    assert in_words(["a", "b", "c"], [old]) == "b and c have left"
    assert in_words(["a", "b"], [old, new]) == "d has joined; b has left"
    vendors = [cluster(n, accelerators=("nvidia-h100",), backends=("nccl", "gloo")) for n in "ab"]
    assert in_words("ab", [*vendors, new]) == "d has joined; d has no accelerator and speaks gloo"


def test_slow_clusters_take_fewer_steps() -> None:
    members = (cluster("a", 1.0), cluster("b", 2.0), cluster("c", 4.0))
    plan = decided(layer(dict.fromkeys("abc", 1000 * MBIT), clusters=members)).plan
    steps = [orders_for(plan, name).assignment.local_steps for name in "abc"]
    assert steps == [2 * plan.sync_every, plan.sync_every, plan.sync_every // 2], (
        "the middle one's interval is the plan's"
    )


def test_shares_follow_speeds_that_changed_much_but_not_at_once() -> None:
    before = two(100_000)
    plan = decided(before).plan
    slower = (cluster("a", 1.0), cluster("b", 0.5))
    assert decided(following(before, plan, 9, clusters=slower)).plan is plan
    made = decided(following(before, plan, 10, clusters=slower))
    assert made.cause == "balance"
    assert [each.local_steps for each in made.plan.assignments] == [10, 20]
    little = (cluster("a", 1.0), cluster("b", 0.8))
    assert decided(following(before, plan, 10, clusters=little)).plan is plan


@pytest.mark.parametrize("asked", [1, 2, 97, 640, 6400, 99_991])
def test_the_samples_of_a_round_are_exactly_those_asked(asked: int) -> None:
    members = (cluster("a", 1.0, batch_size=32), cluster("b", 1.7, batch_size=8), cluster("c", 0.6, batch_size=20))
    plan = decided(layer(dict.fromkeys("abc", 1e9), clusters=members, global_batch=asked)).plan
    total = sum(each.local_steps * each.batch_size + each.larger_batches for each in plan.assignments)
    steps = sum(each.local_steps for each in plan.assignments)
    assert total == max(asked, steps)
    assert all(each.larger_batches < each.local_steps for each in plan.assignments)


def test_a_global_batch_fixes_the_interval_where_batches_stay_as_they_are() -> None:
    members = tuple(cluster(name, batch_size=16) for name in TWO)
    plan = decided(two(100, clusters=members, global_batch=2 * 16 * 70)).plan
    assert plan.sync_every == 70
    assert {(each.batch_size, each.larger_batches) for each in plan.assignments} == {(16, 0)}
    other = decided(following(two(100, clusters=members, global_batch=2 * 16 * 35), plan, 1))
    assert sum(each.samples for each in other.plan.assignments) == 2 * 16 * 35, "asked anew: at once"


def test_memory_bounds_a_share_and_the_others_take_the_rest() -> None:
    members = (cluster("a", batch_size=16, most_batch_size=16), cluster("b", batch_size=16, most_batch_size=64))
    bounds = LayerBounds(most_sync_every=50)
    plan = decided(two(1000, clusters=members, global_batch=2000, bounds=bounds)).plan
    assert [each.samples for each in plan.assignments] == [800, 1200]
    made = decided(two(1000, clusters=members, global_batch=10_000, bounds=bounds))
    assert [each.samples for each in made.plan.assignments] == [800, 3200]
    assert "of the global batch of 10000 the steps and memory allow 4000" in made.reason


def test_apportioning_adds_up_within_bounds() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        names = [f"n{i}" for i in range(rng.randint(1, 6))]
        weights = {name: rng.randint(1, 1000) for name in names}
        least = {name: rng.randint(0, 50) for name in names}
        most = {name: least[name] + rng.choice([0, 10, 10**6]) for name in names}
        total = rng.randint(0, 5000)
        shares = apportioned(total, weights, least, most)
        assert all(least[n] <= shares[n] <= most[n] for n in names)
        assert sum(shares.values()) == min(max(total, sum(least.values())), sum(most.values()))


# --- layers -----------------------------------------------------------------------------------------------------------


def test_an_inner_layer_times_out_before_its_outer_one() -> None:
    rng = random.Random(5)
    plans: dict[str, Any] = {}
    for number in range(0, 400, 7):
        inner = [
            replace(layer({"x": 10 ** rng.uniform(5, 9), "y": 10 ** rng.uniform(5, 9)}), name=name) for name in "ab"
        ]
        middle = replace(two(10 ** rng.uniform(1, 4)), name="site", inside=("a", "b"))
        top = replace(layer({"site": 1e9, "other": 1e9}), name="top", inside=("site",))
        layers = [replace(each, round=number, plan=plans.get(each.name)) for each in (top, *inner, middle)]
        rng.shuffle(layers)
        made = decide(ControllerState(layers=tuple(layers)))
        assert [d.plan.layer for d in made] == [each.name for each in layers]
        plans = {d.plan.layer: d.plan for d in made}
        assert 2 * max(plans["a"].timeout_s, plans["b"].timeout_s) <= plans["site"].timeout_s
        assert 2 * plans["site"].timeout_s <= plans["top"].timeout_s
        for each, decision in zip(layers, made, strict=True):
            assert not breaches(decision.plan, each)


def test_a_timeout_that_has_become_too_short_is_raised_at_once() -> None:
    before = two(1000, bounds=LayerBounds(least_sync_every=500, most_sync_every=500))
    plan = replace(decided(before).plan, timeout_s=1.0)
    made = decided(following(before, plan, 1))
    assert (made.cause, [change.field for change in made.changes]) == ("timeout", ["timeout_s"])
    assert decided(following(before, made.plan, 1)).plan is made.plan


# --- settings that contradict each other ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"target_utilization": 1.0}, "target_utilization must lie between 0 and 1, got 1.0"),
        ({"target_utilization": float("nan")}, "target_utilization must lie between"),
        ({"parameters": 0}, "parameters must be at least 1"),
        ({"global_batch": -1}, "global_batch must not be negative"),
        ({"clusters": ()}, "at least one cluster"),
        ({"clusters": (cluster("a"), cluster("a"))}, "different names"),
        ({"clusters": (cluster("server"),)}, "the centre must have a name of its own"),
        ({"centre_in_bytes_per_s": float("inf")}, "centre_in_bytes_per_s must be finite"),
        ({"bounds": LayerBounds(least_sync_every=9, most_sync_every=8)}, "the least first, got"),
        ({"bounds": LayerBounds(codecs=("int4", "bf16"))}, "codecs must go from large to small"),
        ({"bounds": LayerBounds(codecs=())}, "codecs must go from large to small"),
        ({"bounds": LayerBounds(codecs=("mine",))}, "size of codec 'mine' is not known"),
        ({"bounds": LayerBounds(fragments=(501,))}, "fragments must be from 1 to most_sync_every"),
        ({"bounds": LayerBounds(usual_outer_lr=2.0)}, "usual_outer_lr must be positive and at most"),
        ({"bounds": LayerBounds(stale_after_s=float("inf"))}, "stale_after_s must be positive and finite"),
        ({"bounds": LayerBounds(rounds_between_changes=0)}, "rounds_between_changes must be at least 1"),
    ],
)
def test_an_operators_contradiction_is_refused(said: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        decided(two(1000, **said))


def test_layers_have_names_of_their_own_and_no_circles() -> None:
    one = two(1000)
    with pytest.raises(ConfigError, match="layers must have different names, got top, top"):
        decide(ControllerState(layers=(one, one)))
    circle = tuple(replace(one, name=name, inside=(inner,)) for name, inner in (("x", "y"), ("y", "x")))
    with pytest.raises(ConfigError, match="no layer may be inside itself, got a circle among x, y"):
        decide(ControllerState(layers=circle))


def test_new_bounds_hold_at_once() -> None:
    plan = decided(two(100)).plan
    made = decided(following(two(100, bounds=LayerBounds(most_sync_every=20, codecs=("int8",))), plan, 1))
    assert made.cause == "bounds"
    assert (made.plan.codec, made.plan.sync_every) == ("int8", 20)


# --- the meter and the script -----------------------------------------------------------------------------------------


def test_the_meter_takes_the_middle_of_the_last_five() -> None:
    meter = LinkMeter("server")
    for at, rate in enumerate([1e6, 1e6, 1e6, 5.0, 1e12, 1e6]):
        meter.transferred("a", "server", 10**6, 10**6 / rate, float(at))
    for latency_s in (0.7, 0.5, 0.9):  # two have waited behind something
        meter.answered("a", "server", latency_s)
    (report,) = meter.reports(now=9.0)
    expected = LinkReport(source="a", target="server", measured_by="server", bytes_per_s=1e6, latency_s=0.5, age_s=4.0)
    assert report == expected
    for _ in range(3):
        meter.transferred("a", "server", 10**6, 10.0, 20.0)
    assert meter.reports(now=20.0)[0].bytes_per_s == pytest.approx(1e5), "slower is seen after three"
    meter.forget("a")
    assert meter.reports(now=20.0) == ()


def test_parts_side_by_side_share_the_link() -> None:
    """Four of a megabyte each, all of them under way for four seconds: a megabyte per second, not a quarter."""
    meter, now = LinkMeter("server"), [10.0]
    parts = [meter.part("a", "server", 10**6, lambda: now[0], nullcontext()) for _ in range(5)]
    for part in parts[:4]:
        part.__enter__()
    for number, part in enumerate(parts[:4]):
        now[0] += 1.0
        part.__exit__(None, None, None)
        assert len(meter.reports(20.0)) == (number == 3)
    assert meter.reports(20.0)[0].bytes_per_s == pytest.approx(1e6)
    now[0] = 40.0
    with suppress(ConnectionResetError), parts[4]:
        now[0] = 41.0
        raise ConnectionResetError
    assert meter.reports(41.0)[0].age_s == 27.0, "what was broken off says nothing"


def test_the_meter_notes_nothing_that_cannot_be_and_has_an_end() -> None:
    meter = LinkMeter("server")
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        meter.transferred("a", "b", 10**6, seconds, 0.0)
        meter.answered("a", "b", seconds - 1.0)
    meter.transferred("a", "b", 1000, 1.0, 0.0)
    assert meter.reports(0.0) == ()
    for number in range(10_100):
        meter.transferred(f"n{number}", "server", 10**6, 1.0, 0.0)
    assert len(meter.reports(0.0)) == 10_000 - 1 or len(meter.reports(0.0)) == 10_000


def test_a_larger_batch_recommends_a_larger_rate_and_the_rest_as_it_is() -> None:
    share = decided(two(1000, clusters=tuple(cluster(name, batch_size=32) for name in TWO))).plan.assignments[0]
    adam = InnerSettings(batch_size=8, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    advised = recommend(share, adam)
    assert advised.settings == replace(adam, batch_size=32, lr=2e-3)
    assert "a batch of 32 instead of 8; lr times 2" in advised.reason
    sgd = InnerSettings(batch_size=16, lr=0.1, momentum=0.9, nesterov=True)
    assert recommend(share, sgd).settings == replace(sgd, batch_size=32, lr=0.2)
    assert recommend(share, replace(sgd, batch_size=1)).settings.lr == pytest.approx(0.4), "four times at most"
    assert recommend(share, replace(adam, batch_size=32)).settings == replace(adam, batch_size=32)
    assert recommend(share, InnerSettings()).settings == InnerSettings(batch_size=32)
    assert recommend(share, replace(sgd, lr=float("nan"))).settings.lr is None


def test_a_link_that_is_cut_is_gone_around() -> None:
    rates = dict.fromkeys("abc", 4000 * MBIT)
    between = (*both_ways("a", "b", 4000 * MBIT), *both_ways("b", "c", 4000 * MBIT))
    before = layer(rates, links=(*star_links(rates), *between))
    plan = decided(before).plan
    assert plan.route == "star"
    cut = (*star_links({name: rates[name] for name in "bc"}), *between)
    made = decided(following(before, plan, 1, links=cut))
    assert (made.cause, made.plan.route) == ("route", "tree")
    assert made.plan.parents == {"a": "b", "b": "server", "c": "server"}
    assert orders_for(made.plan, "b").relays_for == ("a",)
    assert (made.plan.sync_every, made.plan.codec) == (plan.sync_every, plan.codec), "the rest still does"
    dead = decided(following(before, made.plan, 2, links=(), clusters=(cluster("a"), cluster("c"))))
    assert dead.plan.parents == {"a": "server", "c": "server"}, "the relay is gone, and nothing is measured"
    assert dead.cause == "members"
