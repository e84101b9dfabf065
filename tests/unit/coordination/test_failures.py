"""What failures take: against dice, against the simulated fleet, and in what is planned."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from outerstep.config.server import ServerConfig
from outerstep.coordination.cost import NOMINAL, RoundCost, with_failures
from outerstep.coordination.failures import ALL, NEVER, Failures, Losses, RoundClosing
from outerstep.coordination.planning import Choice, PlannedSite, Situation, propose
from outerstep.coordination.planning.situation import HEARTBEAT_TIMEOUT_S
from outerstep.errors import ConfigError
from outerstep.simulate.fleet import FleetScenario, run_fleet
from outerstep.simulate.fleet.scenario import FleetClusters, LayerSetting, recommended

MBIT = 1e6 / 8
OFTEN = Failures(0.05, 600.0)
SITES = tuple(PlannedSite(f"site{i}", 110 * MBIT, 500 * MBIT, 0.04, 1.0, 100) for i in range(10))


def thrown(losses: Losses, round_s: float, rng: random.Random) -> float:
    """How long one round waits beyond its end: for the last of those that died in it."""
    per_s = losses.members * losses.failures.per_s
    at, last = rng.expovariate(per_s), -math.inf
    while at < round_s:
        at, last = at + rng.expovariate(per_s), at
    return max(0.0, last + losses.noticed_s - round_s)


@pytest.mark.parametrize(("members", "round_s"), [(8, 600.0), (100, 600.0), (100, 60.0), (2, 10.0)])
def test_waiting_for_all_is_what_dice_say(members: int, round_s: float) -> None:
    losses, rng = Losses(Failures(20.0 / members), members, 120.0, may_close_early=False), random.Random(1)
    seen = mean(thrown(losses, round_s, rng) for _ in range(20_000))
    assert losses.waiting_s(round_s) == pytest.approx(seen, rel=0.05)


def test_a_job_loses_with_each_death_what_a_worker_loses_with_its_own_a_hundred_times() -> None:
    alone, job = (Losses(OFTEN, 100, 120.0, is_one_job=one) for one in (False, True))
    assert job.lost_s(100.0) == pytest.approx(100 * alone.lost_s(100.0))
    assert job.waiting_s(100.0) == 0.0
    assert RoundCost(100.0, 0.0, 0.0, job.lost_s(100.0)).utilization < 0.55


def test_of_jobs_below_a_layer_only_the_waiting_counts_there() -> None:
    losses = Losses(OFTEN, 10, 120.0, ranks=100, may_close_early=False)
    assert losses.lost_s(600.0) == 0.0
    assert losses.waiting_s(600.0) == Losses(OFTEN, 1000, 120.0, may_close_early=False).waiting_s(600.0)


def test_a_quorum_is_a_majority_that_is_nearly_always_there_and_only_where_it_pays() -> None:
    closing = Losses(OFTEN, 100, 180.0).closing(550.0)
    assert closing.quorum is not None
    assert 90 <= closing.quorum < 99
    assert 1.0 <= closing.grace_s <= 60.0
    assert Losses(Failures(5.0), 3, 120.0).closing(550.0) == ALL  # one out of step would close rounds alone


def test_a_smaller_site_closes_with_the_same_share_of_its_members_or_with_all() -> None:
    planned = RoundClosing(quorum=90, grace_s=10.0)
    assert planned.of(100, 100) is planned
    assert planned.of(50, 100) == RoundClosing(quorum=45, grace_s=10.0)
    assert planned.of(3, 100) == ALL
    assert RoundClosing(quorum=51, grace_s=10.0).of(4, 100) == ALL  # two of four are no majority
    assert ALL.of(50, 100) is ALL
    assert Losses(Failures(0.001), 8, 120.0).closing(550.0) == ALL  # hardly anybody dies
    assert Losses(Failures(60.0, 3600.0), 100, 120.0).closing(550.0) == ALL  # hardly anybody is there
    assert Losses(OFTEN, 100, 120.0, is_one_job=True).closing(550.0) == ALL


def test_a_quorum_waits_less_than_all() -> None:
    losses = Losses(OFTEN, 100, 180.0)
    assert losses.waiting_s(550.0) < 0.2 * replace(losses, may_close_early=False).waiting_s(550.0)


def test_training_that_goes_on_hides_the_waiting_for_the_dead_too() -> None:
    losses, cost = Losses(OFTEN, 8, 120.0, may_close_early=False), RoundCost(500.0, 10.0, 1.0)
    blocking, streaming, hidden = (with_failures(cost, losses, hidden_s) for hidden_s in (0.0, 0.1, 1e6))
    assert blocking.waiting_s > streaming.waiting_s > hidden.waiting_s == cost.waiting_s
    assert hidden.lost_s > 0.0
    assert hidden.utilization < cost.utilization


@pytest.mark.parametrize("per_hour", [0.05, 0.5])
def test_it_agrees_with_the_simulated_fleet(per_hour: float) -> None:
    """Eight workers for a day, whose rounds wait for all."""
    there = (FleetClusters("worker", 8, 1, 110 * MBIT, 500 * MBIT, 0.04, 1.0),)
    failures = Failures(per_hour, 600.0)
    planned = recommended(
        10**9,
        there,
        Choice(500, "int4", 1, 0),
        NOMINAL,
        server_in_bytes_per_s=0.0,
        server_out_bytes_per_s=0.0,
        target=0.95,
        failures=failures,
        noticed_s=180.0,
    )
    scenario = FleetScenario(
        parameters=10**9,
        clusters=there,
        topology="server",
        across=LayerSetting(500, "int4"),
        hours=24.0,
        heartbeat_s=60.0,
        heartbeat_timeout_s=180.0,
        failures=failures,
    )
    report = run_fleet(scenario)
    assert report.failures > 5
    assert planned.utilization == pytest.approx(report.useful_share, rel=0.03)


class TestWhatIsPlanned:
    choice = Choice(500, "int4")

    def situation(self, failures: Failures) -> Situation:
        return Situation(
            10**9,
            SITES,
            server_local_bytes_per_s=100_000 * MBIT,
            choice=self.choice,
            overheads=NOMINAL.with_servers(16.0),
            failures=failures,
        )

    def test_a_site_is_one_job_only_if_nothing_fails(self) -> None:
        calm, failing = (propose(self.situation(failures)) for failures in (NEVER, OFTEN))
        assert calm.recommended.inside is not None
        assert failing.recommended.inside is not None
        assert calm.recommended.inside.engine == "allreduce"
        assert failing.recommended.inside.engine == "server"
        assert failing.recommended.inside.closing.quorum is not None
        assert any("as one job" in reason for reason in failing.reasons)

    def test_as_one_job_most_of_the_time_is_lost(self) -> None:
        forced = replace(self.situation(OFTEN), choice=replace(self.choice, engine="allreduce"))
        best = propose(forced).recommended
        assert best.inside is not None
        assert best.inside.engine == "allreduce"
        assert best.utilization < 0.55
        assert best.lost_share > 0.3

    def test_nothing_is_lost_where_nothing_fails(self) -> None:
        for option in propose(self.situation(NEVER)).options:
            assert option.lost_share == pytest.approx(0.0)
            assert option.closing == ALL

    def test_failures_never_make_a_setting_look_better(self) -> None:
        fixed = replace(self.choice, num_fragments=1, delay=0)
        calm, failing = (
            propose(replace(self.situation(failures), choice=fixed, sites=SITES[:1])) for failures in (NEVER, OFTEN)
        )
        for topology in ("server", "hierarchy"):
            best = [max(o.utilization for o in p.options if o.topology == topology) for p in (failing, calm)]
            assert best[0] < best[1], topology


def test_the_server_notices_after_as_long_as_is_planned_with() -> None:
    assert ServerConfig.heartbeat_timeout_s == HEARTBEAT_TIMEOUT_S


@pytest.mark.parametrize(
    ("per_hour", "restart_s", "rule"),
    [
        (-1.0, 600.0, "per_hour must be from 0 to 60, of each worker, got -1"),
        (float("nan"), 600.0, "per_hour must be from 0 to 60"),
        (0.05, 1e9, "restart must be at most a week"),
    ],
)
def test_nonsense_is_refused_by_rule_and_value(per_hour: float, restart_s: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Failures(per_hour, restart_s)
