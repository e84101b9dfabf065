"""Small fleets: every step is accounted for, a seed fixes everything, and a planted bug is caught by the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outerstep.coordination.cost import NOMINAL, Line
from outerstep.coordination.failures import Failures
from outerstep.coordination.planning import Choice
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.effects import Accumulate
from outerstep.coordination.worker.effects import Effect, Result
from outerstep.coordination.worker.machine import InFlight, WorkerMachine
from outerstep.errors import ConfigError
from outerstep.simulate.fleet import FleetReport, FleetScenario, run_fleet
from outerstep.simulate.fleet.cluster import FleetLeader
from outerstep.simulate.fleet.member import FleetMember
from outerstep.simulate.fleet.scenario import (
    Churn,
    FleetClusters,
    LayerSetting,
    Liars,
    recommended,
)
from outerstep.simulate.fleet.server import FleetServer

MBIT = 1e6 / 8
WORKERS = FleetClusters("worker", 12, 1, 110 * MBIT, 500 * MBIT, 0.04, 1.0)
SITES = FleetClusters(
    "site", 3, 6, 110 * MBIT, 500 * MBIT, 0.04, 1.0, local=Line(1e9, 0.0001), server_local_bytes_per_s=1e10
)
QUORUM = LayerSetting(200, "int4", quorum=0.75, grace_s=10.0)


def fleet(**said: Any) -> FleetScenario:
    """A dozen workers of one server that fail often."""
    usual: dict[str, Any] = {
        "parameters": 100_000_000,
        "clusters": (WORKERS,),
        "topology": "server",
        "across": QUORUM,
        "hours": 3.0,
        "seed": 7,
        "failures": Failures(0.5, 300.0),
    }
    return FleetScenario(**{**usual, **said})


def clusters(**said: Any) -> FleetScenario:
    """Three clusters with a server each, whose workers fail often."""
    return fleet(
        **{"clusters": (SITES,), "topology": "hierarchy", "across": LayerSetting(2, "int4"), "inside": QUORUM, **said}
    )


def kept(report: FleetReport) -> FleetReport:
    assert not report.broken, report.broken[:3]
    return report


def accounted(report: FleetReport) -> None:
    """Nothing is counted twice or forgotten: neither time nor steps."""
    assert sum(report.seconds.values()) == pytest.approx(report.total_s)
    steps = report.steps
    assert steps.useful + steps.under_way + steps.lost == pytest.approx(steps.taken)
    assert steps.taken <= report.seconds["training"] + 1e-6 * report.total_s


class TestEveryStepIsSomewhere:
    @pytest.mark.parametrize(
        "setting",
        [
            LayerSetting(200, "int4"),
            QUORUM,
            LayerSetting(200, "int4", round_deadline_s=30.0),
            LayerSetting(200, "bf16", delay=50),
            LayerSetting(200, "int4", delay=5),
            LayerSetting(200, "int4", num_fragments=4, delay=5, quorum=0.75, grace_s=5.0),
        ],
        ids=["all", "quorum", "deadline", "carried", "overwritten", "fragments"],
    )
    def test_whatever_closes_a_round(self, setting: LayerSetting) -> None:
        hours = 3.0 if setting.num_fragments == 1 else 1.0  # fragments that want a worker are asked about often
        report = kept(run_fleet(fleet(across=setting, hours=hours)))
        accounted(report)
        assert report.failures > 1
        assert report.steps.useful > 0.4 * report.total_s

    @pytest.mark.parametrize("delay", [0, 1])
    def test_in_clusters_below_a_top(self, delay: int) -> None:
        report = kept(run_fleet(clusters(across=LayerSetting(3, "int4", delay=delay))))
        accounted(report)
        top, below = report.layers
        assert (top.servers, below.servers) == (1, 3)
        assert top.rounds > 5
        assert report.useful_share > 0.6

    def test_when_workers_leave_and_others_come(self) -> None:
        report = kept(run_fleet(fleet(churn=Churn(0.5, 120.0), failures=Failures())))
        accounted(report)
        assert report.leaves > 5
        assert report.steps.died == 0.0

    def test_when_speeds_differ(self) -> None:
        report = kept(run_fleet(fleet(clusters=(replace(WORKERS, spread=0.3),))))
        assert sum(report.seconds.values()) == pytest.approx(report.total_s)

    def test_when_workers_take_turns_for_room(self) -> None:
        """Room for two contributions of fifty megabytes: twelve workers wait for each other."""
        narrow, wide = (kept(run_fleet(fleet(pool_bytes=each, failures=Failures()))) for each in (1 << 20, 1 << 40))
        assert narrow.seconds["waiting"] > 1.2 * wide.seconds["waiting"]


class TestLiars:
    @pytest.mark.parametrize("lie", ["nan", "huge"])
    def test_what_they_send_is_refused_and_they_end_in_quarantine(self, lie: Any) -> None:
        report = kept(run_fleet(fleet(liars=Liars(0.2, lie), failures=Failures())))
        accounted(report)
        assert report.layers[0].quarantines > 0
        assert report.steps.discarded > 0.0

    def test_a_boast_is_bounded_and_costs_nobody_a_round(self) -> None:
        honest, boasting = (
            kept(run_fleet(fleet(liars=Liars(share, "boast"), failures=Failures()))) for share in (0.0, 0.2)
        )
        assert boasting.layers[0].rounds == honest.layers[0].rounds


def test_a_seed_fixes_everything_and_another_gives_another_run() -> None:
    first, again, other = (run_fleet(clusters(seed=seed)).as_plain() for seed in (1, 1, 2))
    assert first == again
    assert first["failures"] != other["failures"] or first["steps"] != other["steps"]


def test_the_time_of_an_exchange_is_that_of_the_planner() -> None:
    """No failures, one worker: utilization as coordination/cost.py says."""
    one = (replace(WORKERS, count=1),)
    scenario = fleet(clusters=one, across=LayerSetting(500, "int4"), failures=Failures(), hours=24.0, parameters=10**9)
    planned = recommended(
        10**9,
        one,
        Choice(500, "int4", 1, 0),
        scenario.overheads,
        server_in_bytes_per_s=0.0,
        server_out_bytes_per_s=0.0,
        target=0.95,
    )
    report = kept(run_fleet(scenario))
    trained = report.seconds["training"] - report.own_s
    assert trained / (trained + report.seconds["waiting"] + report.own_s) == pytest.approx(
        planned.utilization, abs=0.01
    )


@pytest.mark.parametrize(
    ("codec", "fragments", "delay", "mbit", "trip_ms"),
    [("bf16", 4, 5, 15, 100), ("bf16", 4, 5, 30, 50), ("int4", 1, 0, 15, 100)],
)
def test_fragments_that_follow_each_other_wait_as_planned(
    codec: str, fragments: int, delay: int, mbit: int, trip_ms: int
) -> None:
    """Of a part or two, over links on which slow starts and round trips are most of an exchange."""
    one = (FleetClusters("one", 1, 1, mbit * MBIT, mbit * MBIT, trip_ms / 1e3, 0.1),)
    how = LayerSetting(25, codec, fragments, delay)
    choice = Choice(25, codec, fragments, delay)
    scenario = fleet(clusters=one, across=how, failures=Failures(), hours=0.1, parameters=2_102_496)
    planned = recommended(
        2_102_496, one, choice, NOMINAL, server_in_bytes_per_s=0.0, server_out_bytes_per_s=0.0, target=0.95
    )
    report = kept(run_fleet(scenario))
    trained = report.seconds["training"] - report.own_s
    assert trained / (trained + report.seconds["waiting"] + report.own_s) == pytest.approx(planned.utilization, rel=0.1)


def test_faster_servers_wait_less() -> None:
    slow, fast = (run_fleet(fleet(server_speed=speed, parameters=10**9, hours=2.0)) for speed in (0.2, 20.0))
    assert slow.seconds["waiting"] > fast.seconds["waiting"]
    assert fleet().overheads.with_servers(2.0).worker_s_per_byte == fleet().overheads.worker_s_per_byte


# --- planted bugs: the ledger must catch each ------------------------------------------------------------------------


class Forgetful(Coordinator):
    """Closes a round without one of its contributions."""

    def take_effects(self) -> list[Any]:
        effects = super().take_effects()
        first = next((one for one in effects if isinstance(one, Accumulate)), None)
        return [one for one in effects if one is not first or self.total_accepted % 7]


class Dropping(WorkerMachine):
    """Believes that what it sent is in the model, whatever came of it."""

    def outcome(self, result: Result) -> list[Effect]:
        if not result.counted:
            progress = self.state.fragments[result.fragment]
            progress.counted = self.state.work
        return super().outcome(result)


class Sloppy(WorkerMachine):
    """Counts a quiet step too few."""

    def trained(self, steps: int) -> None:
        super().trained(max(steps - 1, 0))


class Resending(WorkerMachine):
    """Keeps what was agreed as if it had not been sent."""

    def _adopt(self, flight: InFlight, result: Result) -> list[Effect]:
        effects = super()._adopt(flight, result)
        self.state.fragments[result.fragment].counted -= type(flight.work)(1)
        return effects


class Repeating(FleetServer):
    """Puts what a round took in into the next one, too."""

    _again: Any = None

    def _step(self, task: Any) -> None:
        super()._step(task)
        taken, left_out = self._stepped
        self._stepped = [*taken, *(self._again or [])[:1]], left_out
        self._again = taken


class Leaking(FleetLeader):
    """Loses its cluster's last round when something comes from above."""

    def _moved(self, fragment: int) -> None:
        held = self.t[fragment]
        cut = type(held.own)([(held.own.end - 1, held.own.end)]) if held.own else held.own
        self.t[fragment] = replace(held, own=held.own - cut)
        super()._moved(fragment)


def test_a_coordinator_that_loses_a_contribution_is_caught() -> None:
    class Planted(FleetServer):
        coordinator_type = Forgetful

    assert_broken(run_or_stop(fleet(), server_type=Planted), "not applied|holds")


@pytest.mark.parametrize(
    ("bug", "rule"), [(Dropping, "unsent|vanished"), (Sloppy, "unsent|vanished"), (Resending, "unsent|twice")]
)
def test_a_planted_bug_of_the_worker_is_caught(bug: type[WorkerMachine], rule: str) -> None:
    class Planted(FleetMember):
        machine_type = bug

    setting = LayerSetting(200, "int4", round_deadline_s=1.0)
    assert_broken(
        run_or_stop(fleet(across=setting, clusters=(replace(WORKERS, spread=0.2),)), member_type=Planted), rule
    )


def test_a_contribution_that_is_applied_twice_is_caught() -> None:
    assert_broken(run_or_stop(fleet(), server_type=Repeating), "twice")


def test_a_cluster_that_loses_a_round_is_caught() -> None:
    assert_broken(run_or_stop(clusters(), leader_type=Leaking), "vanished|take rounds")


def run_or_stop(scenario: FleetScenario, **planted: Any) -> list[str]:
    return list(run_fleet(scenario, **planted).broken)


def assert_broken(broken: list[str], rule: str) -> None:
    assert broken, "nothing was noticed"
    assert any(part in each for each in broken for part in rule.split("|")), broken[:5]


# --- what a scenario may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"parameters": 10}, "params must be from 1M to 10T, got 10"),
        ({"hours": 1e9}, "hours must be above 0"),
        ({"hours": float("nan")}, "hours must be above 0"),
        ({"heartbeat_timeout_s": 31.0}, "heartbeat_timeout must be at least twice the heartbeat"),
        ({"clusters": ()}, "at least one table"),
        ({"clusters": (WORKERS, WORKERS)}, "different names"),
        (
            {"clusters": (replace(WORKERS, count=1000),), "hours": 500.0, "across": LayerSetting(30, "int4")},
            "may exchange 5e",
        ),
        ({"across": LayerSetting(200, "int5")}, "codec 'int5' is not known"),
        ({"across": LayerSetting(200, "int4", delay=200)}, "delay must be below sync_every"),
        ({"topology": "ring"}, "topology must be server or hierarchy, got 'ring'"),
        ({"topology": "hierarchy"}, "needs settings"),
        ({"server_speed": 0.0}, "speed must be from"),
    ],
)
def test_a_wrong_scenario_is_refused_by_rule_and_value(said: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule.replace("(", r"\(")):
        fleet(**said)
