"""Seeded fault schedules of two and three levels that lease data: the top to clusters, clusters to their workers.

The clusters and the storms are those of test_hierarchy_schedules.py, with a server in each cluster, and some workers
that resume from saved states. In others most clusters have no server: their members hold one table, and whoever leads
them passes on what it hears above. Each step trains a unit and has a name, so it can be read off the model of the top
which units are in it, and how often: what is said to be done is there, and what is there twice was counted. (What the
steps themselves promise is in test_hierarchy_schedules.py.)
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from amounts import mostly_schedules
from outerstep.coordination.layers.sub_leasing import SubLeasing
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.rounds import RoundRules
from outerstep.coordination.shared_sub_leases import HeardLeases, HeardTable, LeaseNews, SharedSubLeases, SharedSubTable
from outerstep.coordination.sub_leases import LayerLeases, SubLeaseTable
from outerstep.coordination.worker.machine import Units
from outerstep.ranges import NONE, Ranges
from outerstep.simulate.data import SimDataWorker
from outerstep.simulate.group_data import LeasingBelow, LeasingGroup
from outerstep.simulate.hierarchy_data import LeasingWorld
from outerstep.simulate.hierarchy_scenario import ClusterPlan, HierarchyScenario
from outerstep.simulate.layer_server import LayerServer
from outerstep.simulate.leader import SimLeader
from outerstep.simulate.leader_data import SimLeaseAsking
from outerstep.simulate.network import Conditions
from outerstep.types import Dataset, Trained

QUICK, FULL, AT_ONCE = 50, 600, 110
MEMBERS_QUICK, MEMBERS, MEMBERS_AT_ONCE = 40, 600, 112
FIRED = {
    *("member_crash", "leader_crash", "cluster_crash", "top_crash", "power_cut", "disk", "cut", "drain", "site_crash"),
    *("successor", "unsettled", "resumed", "units_done", "units_repeated", "units_lost", "units_free"),
}


def unit_and_batch(seed: int) -> tuple[int, int]:
    """In half of the schedules a contribution may begin and end in the middle of a unit."""
    return ((1, 1), (3, 2), (1, 1), (5, 2))[seed // 2 % 4]


def dataset_of(seed: int) -> Dataset:
    rng, size = random.Random(f"data {seed}"), unit_and_batch(seed)[0]
    return Dataset(
        name="train",
        samples=rng.choice([40, 200, 100_000]) * size,
        unit_samples=size,
        epochs=rng.choice([0, 1, 1, 2]),
        again=rng.random() < 0.7,
        dropped=rng.choice(["spent", "again"]),
    )


def scenario_of(seed: int) -> HierarchyScenario:
    drawn, rng = HierarchyScenario.drawn(seed), random.Random(f"data above {seed}")
    clusters = tuple(replace(plan, kind="server") for plan in drawn.clusters)
    drained = {fault.cluster for fault in drawn.faults if fault.kind == "drain"}
    # (A member that sleeps through the end of its cluster finds that its server has stopped. A simulated one has not.)
    asleep = ("member_pause", "member_cut")
    faults = tuple(one for one in drawn.faults if one.kind not in asleep or one.cluster not in drained)
    return replace(drawn, clusters=clusters, faults=faults, save_every=rng.choice([0, 0, 1, 4]))


def members_scenario_of(seed: int) -> HierarchyScenario:
    rng, usual = random.Random(f"members {seed}"), scenario_of(seed)
    kinds = ["server" if rng.random() < 0.3 else "group" for _ in usual.clusters]
    kinds[rng.randrange(len(kinds))] = "group"
    clusters = tuple(replace(plan, kind=kind) for plan, kind in zip(usual.clusters, kinds, strict=True))
    # (A top that loses the beginning of its run waits for all its clusters anew: also for one that was told to leave.)
    begins_anew = any(fault.kind == "top_power_cut" for fault in usual.faults)
    faults = tuple(one for one in usual.faults if one.kind != "drain" or not begins_anew)
    return replace(usual, clusters=clusters, faults=faults)


def play(seed: int, scenario: HierarchyScenario | None = None, **options: Any) -> list[str]:
    return world_of(seed, scenario, **options).run().violations


def world_of(seed: int, scenario: HierarchyScenario | None = None, **options: Any) -> LeasingWorld:
    batch = unit_and_batch(seed)[1]
    return LeasingWorld(scenario or scenario_of(seed), seed, dataset_of(seed), batch=batch, **options)


def check_seeds(seeds: range, scenario_of: Callable[[int], HierarchyScenario] = scenario_of) -> Counter[str]:
    violations: list[str] = []
    faults: Counter[str] = Counter()
    for seed in seeds:
        history = world_of(seed, scenario_of(seed)).run()
        violations += [f"seed {seed}: {line}" for line in history.violations]
        faults += history.faults
    assert not violations, "\n".join(violations[:10])
    return faults


def test_every_unit_is_accounted_for_at_the_top() -> None:
    faults = check_seeds(range(QUICK))
    assert faults.keys() >= FIRED, f"never fired: {FIRED - faults.keys()}"
    assert faults["units_repeated"] < faults["units_done"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_six_hundred_schedules_account_for_every_unit_at_the_top(first: int) -> None:
    check_seeds(range(first, min(first + AT_ONCE, FULL)))


MEMBERS_FIRED = {
    *("member_crash", "leader_crash", "cluster_crash", "top_crash", "cut", "drain", "pair", "vote_failed", "healed"),
    *("new_leader", "successor", "unsettled", "table_lost", "all_holders_died", "news"),
    *("units_done", "units_repeated", "units_again", "units_lost", "units_free"),
}


def test_every_unit_of_members_that_hold_one_table_below_a_top_is_accounted_for() -> None:
    faults = check_seeds(range(MEMBERS_QUICK), members_scenario_of)
    assert faults.keys() >= MEMBERS_FIRED, f"never fired: {MEMBERS_FIRED - faults.keys()}"
    assert faults["units_repeated"] < faults["units_done"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_schedules(range(MEMBERS_QUICK, MEMBERS, MEMBERS_AT_ONCE)))
def test_six_hundred_schedules_of_members_account_for_every_unit_at_the_top(first: int) -> None:
    check_seeds(range(first, min(first + MEMBERS_AT_ONCE, MEMBERS)), members_scenario_of)


@pytest.mark.parametrize(
    "seed",
    [
        493,  # a fragment's part of a unit went up before the unit was named, and a site gave it up in between
    ],
)
def test_what_was_found_once_stays_mended(seed: int) -> None:
    assert not play(seed)


@pytest.mark.parametrize("kind", ["server", "group"])
@pytest.mark.parametrize("sites", [0, 2])
@pytest.mark.parametrize("fragments", [1, 2])
def test_without_faults_no_unit_is_trained_twice_and_none_is_missed(kind: str, sites: int, fragments: int) -> None:
    plans = tuple(ClusterPlan(kind, 2, 60.0, site=i % 2 if sites else 0) for i in range(2))
    rules = RoundRules(num_workers=1, max_staleness=1000)
    calm = HierarchyScenario(
        clusters=plans, across=rules, inside=rules, sites=sites, fragments=fragments, sync_every=4, calm_after_s=300.0
    )
    dataset = Dataset(name="train", samples=80, unit_samples=1, epochs=2)
    world = LeasingWorld(calm, 1, dataset)
    assert not world.run().violations
    table = world.table(world.top)
    assert table is not None
    assert table.done == Ranges([(0, 160)])
    assert (table.repeated, table.spent, table.lost) == (0, NONE, NONE)
    assert len(table.done_by) == 2, "both had their part"


@pytest.mark.parametrize("delay_s", [0.1, 1.5])
def test_nobody_waits_for_the_way_to_the_layer_above(delay_s: float) -> None:
    """What a cluster leases ahead outlasts it. (A step without a unit is one for which none was there.)"""
    dry: list[float] = []

    class Watched(SimDataWorker):
        def _step(self) -> None:
            before = self.units.holdings["train"].queue
            if not before and self._agenda.now > 60.0:
                dry.append(self._agenda.now)
            super()._step()

    plans = tuple(ClusterPlan("server", 2, 0.0) for _ in range(2))
    rules = RoundRules(num_workers=1, max_staleness=1000)
    calm = HierarchyScenario(clusters=plans, across=rules, inside=rules, every=8, sync_every=4, calm_after_s=300.0)
    world = LeasingWorld(calm, 1, Dataset(name="train", samples=100_000, unit_samples=1), worker_type=Watched)
    world.top.network.conditions = Conditions(delay_s=delay_s)
    assert world.agenda.run_until(lambda: False, limit_s=300.0) is False
    table = world.table(world.top)
    assert table is not None
    assert table.done.total > 100
    assert not dry


def test_a_seed_replays_exactly() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        world_of(3, log=log).run()
    assert logs[0] == logs[1]


# --- planted bugs: the schedules must notice -------------------------------------------------------------------------


class NamesTheFirstPart(SubLeaseTable):
    """Takes a unit for done when the first fragment of the cluster has its part of it."""

    def _cover(self, worker_id: str, fragment: int, places: Ranges, fragments: int) -> Ranges:
        whole = super()._cover(worker_id, fragment, places, fragments)
        if fragments > 1 and fragment == 0 and self._closing is not None:
            self.to_tell[self._closing] = self.to_tell.get(self._closing, NONE) | (places - self.done)
        return whole


class ForgetsBeforeItIsKept(SubLeasing):
    """Takes what it has numbered out of the table, before the leader's record has it."""

    def followed(self, versions: Mapping[int, int]) -> Units:
        units = super().followed(versions)
        self.kept(versions)
        return units


class BeginsWithNothing(SubLeasing):
    """A successor does not know what its predecessor has named."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.begin({int(fragment): int(version) for fragment, version in state["versions"]})


class NamesNoParts(SubLeasing):
    """Does not say which units it may have brought a part of."""

    def describe(self, units: Units) -> tuple[Trained, ...]:
        return self.work.describe(units)


class KeepsTornUnits(SubLeaseTable):
    """Takes a unit for whole whose first part was given up."""

    def give_up_parts(self, versions: Mapping[int, int]) -> None:
        pass


class TakesItsOwn(LayerLeases):
    """Leases as if it were alone."""

    def _kind(self, facts: Any) -> Any:
        return self.table_type


def asked_by(bug: type[SubLeasing]) -> dict[str, Any]:
    asking = type("Asking", (SimLeaseAsking,), {"machine_type": bug})
    return {"leader_type": type(bug.__name__, (SimLeader,), {"asking_type": asking})}


def kept_by(bug: type[SubLeaseTable] | type[LayerLeases]) -> dict[str, Any]:
    leases = bug if issubclass(bug, LayerLeases) else type("Leases", (LayerLeases,), {"sub_table_type": bug})
    coordinator = type("Coordinator", (Coordinator,), {"leases_type": leases})
    return {"server_type": type(bug.__name__, (LayerServer,), {"coordinator_type": coordinator})}


@pytest.mark.parametrize(
    ("bug", "symptom", "first"),
    [
        (kept_by(NamesTheFirstPart), "is not in the top's model yet", 0),
        (asked_by(ForgetsBeforeItIsKept), "once more|trained twice", 0),
        (asked_by(BeginsWithNothing), "once more|trained twice", 0),
        (asked_by(NamesNoParts), "is not in the top's model", 493),
        (kept_by(KeepsTornUnits), "is not in the top's model", 376),
        (kept_by(TakesItsOwn), "nobody has granted", 0),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_planted_bug_is_caught(bug: dict[str, Any], symptom: str, first: int) -> None:
    seen: list[str] = []
    for seed in range(first, first + QUICK):
        seen += play(seed, **bug)
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")


# Of members that hold one table.


class ForgetsWhatNobodyDecided(HeardTable):
    """A leader does not count among the cluster's what its members have not heard of."""

    def _as_decided(self, table: SharedSubTable) -> None:
        super()._as_decided(table)
        self._known = table.granted

    @property
    def granted(self) -> Ranges:
        return self._known


class HealsWithoutTheLayerAbove(SharedSubTable):
    """A member that heals does not hear what is still to be told above."""

    @classmethod
    def resumed(
        cls, facts: Mapping[str, Any], claimable_until: float = 0.0, *, forgetful: bool = False
    ) -> SharedSubTable:
        made = super().resumed(facts, claimable_until)
        made.to_tell = {}
        return made


class HearsAgainAndAgain(SharedSubTable):
    """Does not remember which news is in it."""

    def hear_above(self, news: Iterable[LeaseNews]) -> None:
        for one in news:
            self._hear_one(one)


class TakesWhatNobodyGranted(SharedSubTable):
    """Opens its own epochs."""

    def _open_epochs(self, weights: Mapping[str, float], needs: Mapping[str, float], now: float) -> None:
        self.free |= Ranges([(0, min(self.end, 64))]) - self.done - self._in_hands

    @property
    def _in_hands(self) -> Ranges:
        return Ranges(each for theirs in self.held.values() for each in theirs)


def held_by(bug: type[SharedSubTable]) -> dict[str, Any]:
    leases = type("Leases", (SharedSubLeases,), {"table_type": bug})
    return {"group_type": type(bug.__name__, (LeasingGroup,), {"leases_type": leases})}


def heard_by(bug: type[HeardTable]) -> dict[str, Any]:
    heard = type("Heard", (HeardLeases,), {"table_type": bug})
    below = type("Below", (LeasingBelow,), {"heard_type": heard})
    return {"group_type": type(bug.__name__, (LeasingGroup,), {"below_type": below})}


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (heard_by(ForgetsWhatNobodyDecided), "once more|trained twice"),
        (held_by(HealsWithoutTheLayerAbove), "different tables"),
        (held_by(HearsAgainAndAgain), "once more|trained twice"),
        (held_by(TakesWhatNobodyGranted), "are nowhere|once more|too many"),
        (asked_by(ForgetsBeforeItIsKept), "once more|trained twice"),
        (asked_by(BeginsWithNothing), "once more|trained twice"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_bug_planted_in_members_that_hold_one_table_is_caught(bug: dict[str, Any], symptom: str) -> None:
    seen: list[str] = []
    for seed in range(QUICK):
        seen += play(seed, members_scenario_of(seed), **bug)
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")
