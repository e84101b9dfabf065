"""Ten thousand random link matrices and changes, against a search of everything, written plainly and apart.

The search below shares no code with the controller: formulas and numbers are typed again, from
docs/concepts/autoconfig.md. It tries every interval, codec, number of fragments, delay and route within the bounds.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination import cost
from outerstep.coordination.autoconfig import (
    ClusterState,
    LayerBounds,
    LayerDecision,
    LayerPlan,
    LayerState,
    LinkReport,
    controller,
    decode_plan,
    encode_plan,
    orders_for,
    routes,
    search,
)
from outerstep.coordination.autoconfig.bounds import breaches

from .layers import decided

QUICK, CASES, CHAIN = 1_000, 10_000, 4
SIZE = {"bf16": 2.0, "int8": 1.0 + 2 / 4096, "int4": 0.5 + 2 / 256}


# --- the plain search -------------------------------------------------------------------------------------------------


@cache
def routes_of(names: tuple[str, ...]) -> list[dict[str, str]]:
    """Each cluster sends to the server or to a cluster that does."""
    every = (
        dict(zip(names, targets, strict=True)) for targets in itertools.product(["server", *names], repeat=len(names))
    )
    return [
        route
        for route in every
        if all(to == "server" or (to != name and route[to] == "server") for name, to in route.items())
    ]


def rates_of(layer: LayerState) -> dict[tuple[str, str], tuple[float, float]]:
    return {(r.source, r.target): (r.bytes_per_s, r.latency_s) for r in layer.links}


def line_costs(
    layer: LayerState, route: dict[str, str], rate: dict[tuple[str, str], tuple[float, float]]
) -> tuple[float, float, float] | None:
    """Seconds per byte up and down, seconds of latency; None if a link is missing."""
    up = down = latency = 0.0
    for name, to in route.items():
        if (name, to) not in rate or (to, name) not in rate:
            return None
        passing = 1 + sum(other == name for other in route.values())
        up = max(up, passing / rate[name, to][0])
        down = max(down, passing / rate[to, name][0])
        way = rate[name, to][1] + rate[to, name][1]
        if to != "server":
            way += rate[to, "server"][1] + rate["server", to][1]
        latency = max(latency, way)
    if layer.centre_in_bytes_per_s:
        up = max(up, len(route) / layer.centre_in_bytes_per_s)
    if layer.centre_out_bytes_per_s:
        down = max(down, len(route) / layer.centre_out_bytes_per_s)
    return up, down, latency


def exchange_seconds(layer: LayerState, lines: tuple[float, float, float], codec: str, fragments: int) -> float:
    """Of one fragment. Up to a mebibyte, it travels with the offer and with the answer to a poll."""
    up, down, latency = lines
    size, count = layer.parameters * SIZE[codec], len(layer.clusters)
    moving = size * up + size * down + 2 * size * (0.25e-9 + count * 0.6e-9) + layer.parameters * 1.8e-9
    return moving / fragments + (2 if size / fragments <= 1 << 20 else 5) * latency


def middle_step_s(layer: LayerState) -> float:
    return sorted(c.step_s for c in layer.clusters)[len(layer.clusters) // 2]


def utilization(
    layer: LayerState, step_s: float, interval: int, fragments: int, delay: int, fragment_s: float
) -> float:
    training_s = interval * step_s
    waiting_s = fragments * max(0.0, fragment_s - min(delay, interval / fragments) * step_s)
    return training_s / (training_s + waiting_s + layer.parameters * 2.0e-9)


def delays_of(layer: LayerState, interval: int, fragments: int) -> range:
    return range(min(layer.bounds.most_delay, interval // 4, interval // fragments) + 1)


def intervals_of(layer: LayerState, step_s: float, fragments: int) -> range:
    """A global batch leaves one: as long as all together take for it."""
    bounds = layer.bounds
    least = max(bounds.least_sync_every, fragments)
    if not layer.global_batch:
        return range(least, bounds.most_sync_every + 1)
    seconds = layer.global_batch / sum(c.batch_size / c.step_s for c in layer.clusters)
    fixed = min(max(round(seconds / step_s), least), bounds.most_sync_every)
    return range(fixed, fixed + 1)


def can_be_met(layer: LayerState) -> bool:
    names, step_s, rate = tuple(c.name for c in layer.clusters), middle_step_s(layer), rates_of(layer)
    known = [lines for route in routes_of(names) if (lines := line_costs(layer, route, rate)) is not None]
    wanted = layer.target_utilization * (1 + 1e-9)
    for codec, fragments in itertools.product(layer.bounds.codecs, layer.bounds.fragments):
        fragment_s = min(exchange_seconds(layer, lines, codec, fragments) for lines in known)
        for interval in intervals_of(layer, step_s, fragments):
            for delay in delays_of(layer, interval, fragments):
                if utilization(layer, step_s, interval, fragments, delay, fragment_s) >= wanted:
                    return True
    return False


def plan_utilization(layer: LayerState, plan: LayerPlan) -> float:
    route = {each.cluster: each.sends_to for each in plan.assignments}
    lines = line_costs(layer, route, rates_of(layer))
    assert lines is not None, "a line that nobody measured"
    fragment_s = exchange_seconds(layer, lines, plan.codec, plan.num_fragments)
    return utilization(layer, middle_step_s(layer), plan.sync_every, plan.num_fragments, plan.delay, fragment_s)


# --- random layers ----------------------------------------------------------------------------------------------------


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def random_links(rng: random.Random, names: list[str]) -> tuple[LinkReport, ...]:
    """Around one rate, within a factor of ten, so that nobody is so far off that the plan is made without it. Between
    clusters some links are not known; both ends agree about the others."""
    usual = log_uniform(rng, 3e6, 1e9)
    found: list[LinkReport] = []
    for one, other in itertools.permutations([*names, "server"], 2):
        if "server" not in (one, other) and rng.random() < 0.2:
            continue
        rate, latency_s = usual * log_uniform(rng, 0.3, 3.0), rng.uniform(0.0, 0.1)
        for end in ("server",) if "server" in (one, other) else (one, other):
            said = {"bytes_per_s": rate, "latency_s": latency_s, "age_s": rng.uniform(0.0, 500.0)}
            found.append(LinkReport(source=one, target=other, measured_by=end, **said))
    rng.shuffle(found)
    return tuple(found)


def random_layer(rng: random.Random) -> LayerState:
    names = [f"c{i}" for i in range(rng.choice([1, 2, 2, 2, 3, 3, 3, 4]))]
    usual_s = log_uniform(rng, 0.05, 5.0)
    least = rng.choice([1, 4, 10, 50])
    bounds = LayerBounds(
        least_sync_every=least,
        most_sync_every=least * rng.choice([1, 2, 10, 10]),
        codecs=rng.choice([("bf16", "int8", "int4"), ("bf16",), ("int8", "int4")]),
        fragments=rng.choice([(1,), (1,), (least,) if least < 9 else (4,), (1, 4) if least >= 4 else (1,)]),
        most_delay=rng.choice([0, 1, 5, 5]),
    )
    return LayerState(
        name="top",
        round=rng.randrange(1000),
        parameters=int(log_uniform(rng, 1e6, 1e9)),
        clusters=tuple(
            ClusterState(name=n, step_s=usual_s * log_uniform(rng, 0.5, 2.0), batch_size=rng.randint(16, 64))
            for n in names
        ),
        links=random_links(rng, names),
        centre_in_bytes_per_s=rng.choice([0.0, 0.0, 1e8]),
        centre_out_bytes_per_s=rng.choice([0.0, 0.0, 1e8]),
        bounds=bounds,
        target_utilization=rng.choice([0.5, 0.8, 0.9, 0.95, 0.99]),
        global_batch=rng.choice([0, 0, 0, int(log_uniform(rng, 1, 1e5))]),
    )


def changed(rng: random.Random, layer: LayerState, plan: LayerPlan) -> LayerState:
    """Later: other links, sometimes other speeds or one cluster less."""
    clusters = layer.clusters
    if rng.random() < 0.3:
        clusters = tuple(replace(c, step_s=c.step_s * log_uniform(rng, 0.7, 1.4)) for c in clusters)
    if rng.random() < 0.2 and len(clusters) > 1:
        clusters = clusters[1:]
    links = random_links(rng, [c.name for c in clusters])
    return replace(layer, round=layer.round + 10, plan=plan, clusters=clusters, links=links)


def check(layer: LayerState, made: LayerDecision) -> bool:
    """Whether the target could be met at all."""
    plan = made.plan
    assert not breaches(plan, layer), breaches(plan, layer)
    assert not made.not_planned_for
    got, possible = plan_utilization(layer, plan), can_be_met(layer)
    assert made.utilization == pytest.approx(got, rel=1e-9), "the controller expects something else"
    if possible:
        assert got >= layer.target_utilization * (1 - 1e-9), f"{got} of {layer.target_utilization}: {made.reason}"
        assert made.meets_target
    check_readings(layer, plan)
    if made.cause in ("first", "slower", "faster", "route", "bounds"):
        middle = next(c.name for c in layer.clusters if c.step_s == middle_step_s(layer))
        assert orders_for(plan, middle).assignment.local_steps == plan.sync_every
    if layer.plan is not None:
        assert (plan == layer.plan) == (not made.changes) == (plan.revision == layer.plan.revision)
        assert plan.revision <= layer.plan.revision + 1
    return possible


def check_readings(layer: LayerState, plan: LayerPlan) -> None:
    """Two members that hold the plan's bytes hold the same orders; all orders together fit."""
    read = decode_plan(encode_plan(plan))
    assert read == plan
    assert encode_plan(read) == encode_plan(plan)
    orders = [orders_for(read, c.name) for c in layer.clusters]
    assert orders == [orders_for(plan, c.name) for c in layer.clusters]
    assert len({(o.revision, o.from_round, o.codec, o.down_codec, o.num_fragments, o.timeout_s) for o in orders}) == 1
    relayed = [name for o in orders for name in o.relays_for]
    assert len(relayed) == len(set(relayed)) == sum(o.assignment.sends_to != "server" for o in orders)
    if layer.global_batch:
        total = sum(o.assignment.samples for o in orders)
        steps = sum(o.assignment.local_steps for o in orders)
        assert total == max(layer.global_batch, steps), "a step has one sample at least"


def run_cases(seeds: range) -> int:
    met = 0
    for seed in seeds:
        rng = random.Random(f"links {seed}")
        layer = random_layer(rng)
        for _ in range(CHAIN):
            made = decided(layer)
            met += check(layer, made)
            layer = changed(rng, layer, made.plan)
    return met


@pytest.mark.parametrize(
    "cases",
    [range(QUICK), pytest.param(range(QUICK, CASES), marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_the_target_is_met_where_anything_within_bounds_meets_it(cases: range) -> None:
    met = run_cases(range(cases.start // CHAIN, cases.stop // CHAIN))
    assert 0.3 * len(cases) < met < 0.9 * len(cases), "both kinds must be among them"


def test_the_order_in_which_things_are_told_does_not_matter() -> None:
    for seed in range(200):
        rng = random.Random(f"order {seed}")
        layer = random_layer(rng)
        layer = changed(rng, layer, decided(layer).plan)
        clusters, links = list(layer.clusters), list(layer.links)
        rng.shuffle(clusters)
        rng.shuffle(links)
        assert decided(layer) == decided(replace(layer, clusters=tuple(clusters), links=tuple(links)))


# --- planted bugs -----------------------------------------------------------------------------------------------------


def bits_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of 100 Mbit/s taken for one of 100 MB/s."""

    def wrong(*args: Any, **options: Any) -> cost.RouteCost:
        right = cost.route_cost(*args, **options)
        return cost.RouteCost(right.up_s_per_byte / 8, right.down_s_per_byte / 8, right.latency_s)

    monkeypatch.setattr(routes, "route_cost", wrong)


def one_way_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> cost.RouteCost:
        return replace_down(cost.route_cost(*args, **options))

    def replace_down(right: cost.RouteCost) -> cost.RouteCost:
        return cost.RouteCost(right.up_s_per_byte, 0.0, right.latency_s)

    monkeypatch.setattr(routes, "route_cost", wrong)


def never_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_every_tree", lambda names, centre: [cost.star(names, centre)])


def delay_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "hidden_s", lambda interval, fragments, delay, step_s: delay * interval * step_s)


def content_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead band below the target instead of room above it."""
    monkeypatch.setattr(
        search.Search, "meets", lambda self, made: made.utilization >= 0.9 * self._layer.target_utilization
    )


def the_last_interval_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = search._a_quarter_apart
    monkeypatch.setattr(search, "_a_quarter_apart", lambda least, most: right(least, most)[:-1] or [least])


def same_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans that differ under one number."""
    monkeypatch.setattr(controller, "_numbered", lambda now, made: made)


def shares_are_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    right = controller.assignments_for
    monkeypatch.setattr(
        controller, "assignments_for", lambda *given: tuple(replace(a, larger_batches=0) for a in right(*given))
    )


@pytest.mark.parametrize(
    "plant",
    [
        bits_for_bytes,
        one_way_only,
        never_a_tree,
        delay_is_free,
        content_with_less,
        the_last_interval_is_missing,
        same_revision,
        shares_are_rounded_down,
    ],
)
def test_a_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_cases(range(400))
