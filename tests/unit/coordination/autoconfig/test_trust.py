"""What a cluster may say, and how far it gets with a lie."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig import ClusterState, LayerBounds, LayerState, LeaderCandidate, LinkReport, trust
from outerstep.coordination.autoconfig.bounds import breaches
from outerstep.coordination.autoconfig.routes import EXACT, Routes
from outerstep.coordination.autoconfig.trust import FAR, view_of

from .layers import MBIT, both_ways, cluster, decided, following, layer, star_links

NAMES = ("a", "b", "c", "d")
RATES = dict.fromkeys(NAMES, 1000 * MBIT)
NAN, INF = math.nan, math.inf
NUMBERS = [NAN, INF, -INF, -1.0, 0.0, 1e-300, 1e300, 5e-324]


@pytest.mark.parametrize("field", ["bytes_per_s", "latency_s", "age_s"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, 1e300])
def test_an_absurd_measurement_is_refused_by_name(field: str, value: float) -> None:
    reports = list(star_links(RATES))
    reports[0] = replace(reports[0], **{field: value})
    made = decided(layer(RATES, links=tuple(reports)))
    assert any("link 'a' → 'server'" in line and str(value) in line for line in made.not_believed)
    assert made.plan.sync_every == decided(layer({name: RATES[name] for name in "bcd"})).plan.sync_every


def test_what_nobody_of_the_layer_can_have_measured_is_refused() -> None:
    said = {"bytes_per_s": 1e9, "latency_s": 0.0}
    odd = (
        LinkReport(source="a", target="server", measured_by="b", **said),
        LinkReport(source="a", target="a", measured_by="a", **said),
        LinkReport(source="a", target="nobody", measured_by="a", **said),
    )
    view = view_of(layer(RATES, links=odd))
    assert view.lines == {}
    assert [line.split(": ")[1] for line in view.not_believed[:3]] == [
        "one of its ends must have measured it, got 'b'",
        "a link joins two members of the layer",
        "a link joins two members of the layer",
    ]


def test_the_centres_own_measurement_goes_before_a_clusters() -> None:
    lies = both_ways("a", "server", 1e11, by=("a",))
    honest = both_ways("a", "server", 1e6)
    for order in ((*lies, *honest), (*honest, *lies)):
        assert view_of(layer(RATES, links=order)).lines["a", "server"].bytes_per_s == 1e6


def test_between_clusters_both_ends_must_say_it_and_the_worse_counts() -> None:
    alone = view_of(layer(RATES, links=both_ways("a", "b", 1e11, by=("a",))))
    assert alone.lines == {}
    assert "both ends must report it, got 'a' alone" in alone.not_believed[0]
    two = (*both_ways("a", "b", 1e11, 0.0, by=("a",)), *both_ways("a", "b", 1e6, 0.5, by=("b",)))
    line = view_of(layer(RATES, links=two)).lines["a", "b"]
    assert (line.bytes_per_s, line.latency_s) == (1e6, 0.5)


def test_of_a_line_to_a_relay_the_word_of_whoever_sends_through_it_is_enough() -> None:
    """A slow line of its own, and a fast one to a cluster that relays: its traffic goes there, and nobody else's."""
    rates = {"a": 1e6, "b": 1e8, "c": 1e6}
    relays = tuple(cluster(name, relays=name == "b") for name in rates)
    by_a = both_ways("a", "b", 1e8, by=("a",))
    made = decided(layer(rates, clusters=relays, links=(*star_links(rates), *by_a)))
    assert made.plan.parents == {"a": "b", "b": "server", "c": "server"}
    praise = tuple(r for name in "ac" for r in both_ways(name, "b", 1e12, 0.0, by=("b",)))
    assert decided(layer(rates, clusters=relays, links=(*star_links(rates), *praise))).plan.route == "star"
    unasked = tuple(cluster(name) for name in rates)
    assert decided(layer(rates, clusters=unasked, links=(*star_links(rates), *by_a))).plan.route == "star"


def test_a_flood_of_nonsense_is_told_in_few_words() -> None:
    flood = tuple(replace(report, bytes_per_s=NAN) for report in star_links(RATES) for _ in range(100))
    made = decided(layer(RATES, links=(*star_links(RATES), *flood)))
    assert len(made.not_believed) == trust.MOST_DOUBTS + 1
    assert made.not_believed[-1] == "and 768 more"
    assert made.meets_target


def test_nobody_draws_others_traffic_by_praising_its_own_line() -> None:
    """With slow links to the server a fast relay would be worth it, if it existed."""
    rates = {"a": 1e6, "b": 1e6, "liar": 1e7}
    praise = tuple(r for name in "ab" for r in both_ways(name, "liar", 1e12, 0.0, by=("liar",)))
    assert decided(layer(rates, links=(*star_links(rates), *praise))).plan.route == "star"
    agreed = tuple(r for name in "ab" for r in both_ways(name, "liar", 1e12, 0.0))
    assert decided(layer(rates, links=(*star_links(rates), *agreed))).plan.route == "tree", "the others see it, too"


def test_an_old_measurement_is_not_trusted() -> None:
    before = layer(RATES)
    plan = decided(before).plan
    slow = star_links(dict.fromkeys(NAMES, 1 * MBIT), age_s=601.0)
    kept = decided(following(before, plan, links=slow))
    assert kept.plan is plan
    assert kept.reason == "nothing that can be believed was measured"
    assert (kept.utilization, kept.meets_target) == (None, False)
    assert "must be at most 600 s old, got 601.0" in kept.not_believed[0]
    fresh = star_links(dict.fromkeys(NAMES, 1 * MBIT), age_s=599.0)
    assert decided(following(before, plan, links=fresh)).plan != plan


def test_where_a_round_takes_longer_than_the_limit_three_rounds_are_young_enough() -> None:
    slow = tuple(cluster(name, 60.0) for name in NAMES)
    before = layer(RATES, clusters=slow, bounds=LayerBounds(least_sync_every=100))
    plan = decided(before).plan
    assert plan.sync_every * 60.0 >= 6000.0
    old = star_links(RATES, age_s=10_000.0)
    assert not decided(following(before, plan, links=old)).not_believed
    assert decided(following(before, plan, links=star_links(RATES, age_s=70_000.0))).not_believed


def test_without_any_measurement_the_first_plan_is_the_usual_one() -> None:
    plan = decided(layer(RATES, links=())).plan
    assert (plan.sync_every, plan.codec, plan.delay, plan.route, plan.outer_lr) == (50, "bf16", 0, "star", 0.7)


def test_a_cluster_with_a_hopeless_link_is_not_planned_for() -> None:
    usual = decided(layer(RATES))
    made = decided(layer(RATES | {"d": 0.01 * MBIT}))
    assert made.not_planned_for == ("d",)
    assert (made.plan.sync_every, made.plan.codec) == (usual.plan.sync_every, usual.plan.codec)
    assert [each.cluster for each in made.plan.assignments] == list(NAMES), "it trains, and comes when it can"
    slow = decided(layer(RATES | {"d": 1000 * MBIT / FAR * 1.1}))
    assert slow.not_planned_for == ()
    assert slow.plan.sync_every > usual.plan.sync_every, "one that is only slow is waited for"


@pytest.mark.parametrize("step_s", [NAN, INF, -1.0, 0.0, 1e-6, 1e-3, 1e3, 1e7, 1e300])
def test_one_cluster_that_lies_about_its_speed_moves_nobody_elses_interval(step_s: float) -> None:
    honest = tuple(cluster(name, 1.0) for name in "abc")
    usual = decided(layer(RATES, clusters=(*honest, cluster("d", 1.0)))).plan
    plan = decided(layer(RATES, clusters=(*honest, cluster("d", step_s)))).plan
    for mine, before in zip(plan.assignments[:3], usual.assignments[:3], strict=True):
        assert 0.8 <= mine.local_steps / before.local_steps <= 1.25
    assert 1 <= plan.assignments[3].local_steps <= LayerBounds().most_sync_every


@pytest.mark.parametrize("batch", [-5, 0, 10**9, 10**30])
def test_one_cluster_that_lies_about_its_batch_takes_a_bounded_share(batch: int) -> None:
    honest = tuple(cluster(name, batch_size=32) for name in "abc")
    made = decided(layer(RATES, clusters=(*honest, cluster("d", batch_size=batch)), global_batch=100_000))
    shares = [each.samples for each in made.plan.assignments]
    assert sum(shares) == 100_000
    assert min(shares[:3]) >= 100_000 / (3 + FAR) * 0.9


def hostile(rng: random.Random, name: str, others: list[str]) -> tuple[ClusterState, tuple[LinkReport, ...]]:
    """Says whatever it likes, about itself and about every link."""

    def number() -> float:
        return rng.choice([*NUMBERS, 10 ** rng.uniform(-12, 15)])

    def whole() -> int:
        return rng.choice([-(10**30), -1, 0, 1, 10**30, rng.randrange(10**6)])

    said: dict[str, Any] = {
        "step_s": rng.choice([number(), 10 ** rng.uniform(-6.0, 7.0)]),  # nonsense, or a lie that could be true
        "batch_size": rng.choice([whole(), 10 ** rng.randint(0, 9)]),
        "most_batch_size": whole(),
        "size": whole(),
        "accelerators": rng.choice([(), ("",), ("nvidia-h100", "amd"), ("☃" * 200,)]),
        "backends": rng.choice([("gloo",), ("nccl", "gloo"), (), ("☃",)]),
        "candidates": tuple(LeaderCandidate(name=f"x{i}", bytes_per_s=number()) for i in range(rng.randrange(3))),
    }
    ends = [name, "server", "nobody", *others]
    reports = tuple(
        LinkReport(
            source=rng.choice(ends),
            target=rng.choice(ends),
            measured_by=rng.choice([name, name, name, "nobody"]),
            bytes_per_s=number(),
            latency_s=number(),
            age_s=number(),
        )
        for _ in range(rng.randrange(30))
    )
    return ClusterState(name=name, **said), reports


def run_liars(cases: range) -> None:
    """One of four lies, about everything, at every round. The server measures for itself."""
    for seed in cases:
        rng = random.Random(f"liar {seed}")
        rates = {name: 10 ** rng.uniform(7.0, 8.0) for name in ("a", "b", "c")}
        honest = tuple(cluster(name, rng.uniform(0.9, 1.1), batch_size=16) for name in rates)
        alone = layer(rates, clusters=honest, global_batch=rng.choice([0, 60_000]))
        plan = None
        for number in range(0, 60, 12):
            liar, lies = hostile(rng, "liar", list(rates))
            links = (*star_links({**rates, "liar": 10**7.5}), *lies)
            state = replace(alone, round=number, clusters=(*honest, liar), links=links, plan=plan)
            made = decided(state)
            assert not breaches(made.plan, state), breaches(made.plan, state)
            best = decided(replace(alone, round=number)).plan
            assert made.plan.sync_every <= 2.0 * best.sync_every, (seed, made.reason)
            assert made.plan.parents == dict.fromkeys([*rates, "liar"], "server")
            for mine in made.plan.assignments[:3]:
                assert 0.5 * made.plan.sync_every <= mine.local_steps <= 2.0 * made.plan.sync_every
                assert not alone.global_batch or mine.samples >= 0.7 * 60_000 / (3 + FAR)
            plan = made.plan


def test_whatever_one_of_four_says_has_a_bounded_effect() -> None:
    run_liars(range(150))


def everybody_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_near", lambda value, usual: value)


def any_end_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    right = trust._lines

    def wrong(state: LayerState, doubts: list[str]) -> Any:
        return right(replace(state, links=tuple(replace(r, measured_by="server") for r in state.links)), doubts)

    monkeypatch.setattr(trust, "_report_rule", lambda report, names, stale_s: "")
    monkeypatch.setattr(trust, "_lines", wrong)


@pytest.mark.parametrize("plant", [everybody_is_believed, any_end_will_do])
def test_a_planted_credulity_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ZeroDivisionError, ValueError, OverflowError, KeyError)):
        run_liars(range(150))


def test_everybody_lies_and_nothing_breaks() -> None:
    for seed in range(150):
        rng = random.Random(f"liars {seed}")
        names = [f"c{i}" for i in range(rng.randint(1, 7))]
        said = [hostile(rng, name, names) for name in names]
        state = layer(
            {},
            clusters=tuple(who for who, _ in said),
            links=tuple(report for _, lies in said for report in lies),
            global_batch=rng.choice([0, 1000]),
        )
        for number in range(3):
            made = decided(state)
            assert not breaches(made.plan, state), breaches(made.plan, state)
            state = replace(state, round=10 * number + 10, plan=made.plan)


# --- routes of many clusters ------------------------------------------------------------------------------------------


def test_many_clusters_find_relays_move_by_move() -> None:
    """Twelve, eight of them behind thin lines to the server but near one of four with thick ones."""
    near = {f"n{i}": f"hub{i % 4}" for i in range(8)}
    rates = {**dict.fromkeys(near, 1e6), **{f"hub{i}": 1e9 for i in range(4)}}
    between = tuple(r for name, hub in near.items() for r in both_ways(name, hub, 1e9))
    assert len(rates) > EXACT
    made = decided(layer(rates, links=(*star_links(rates), *between)))
    assert made.plan.parents == {**near, **{f"hub{i}": "server" for i in range(4)}}
    assert decided(layer(rates)).plan.route == "star"


def test_improving_moves_never_end_above_the_star() -> None:
    for seed in range(40):
        rng = random.Random(f"moves {seed}")
        rates = {f"c{i}": 10 ** rng.uniform(6.5, 7.5) for i in range(rng.randint(5, 9))}
        between = tuple(
            r for one in rates for other in rates if one < other for r in both_ways(one, other, 10 ** rng.uniform(6, 8))
        )
        state = layer(rates, links=(*star_links(rates), *between))
        direct, all_links = layer(rates), state
        with_relays = Routes(all_links, view_of(all_links)).best(1e8, 1e8, 5.0, strict=True).cost
        without = Routes(direct, view_of(direct)).best(1e8, 1e8, 5.0, strict=True).cost
        assert with_relays.transfer_s(1e8, 1e8, 5.0) <= without.transfer_s(1e8, 1e8, 5.0)


def test_a_line_at_the_limit_is_given_up_once_and_taken_back_when_it_is_far_from_it() -> None:
    """Noise there would change the plan back and forth."""
    rates = {"a": 160e6, "b": 160e6, "c": 160e6, "d": 9.9e6}
    before = layer(rates)
    plan = decided(before).plan
    assert plan.not_planned_for == ("d",)
    for rate, is_planned_for in ((10.1e6, False), (15e6, False), (16e6, True)):
        now = following(before, plan, links=star_links({**rates, "d": rate}))
        assert (view_of(now).not_planned_for == ()) is is_planned_for, rate
