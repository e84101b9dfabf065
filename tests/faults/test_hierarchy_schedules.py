"""Thousands of seeded fault schedules of two- and three-level runs, through the machines of every layer that ship.

Each schedule draws clusters (a server with workers, or members alone with the lowest name for a leader), perhaps sites
between them and the top, and a storm of faults: members, leaders, servers, sites and whole clusters that die or fall
asleep, disks, links, an operator. When it has blown over, every cluster that lives must be counted in another round
above it, and end cleanly. Steps have names, so the ledger is exact: no step is in any model twice, each is in the top's
model in the end unless whoever gave it up has said so, and who leaves holds exactly what was agreed on.
A failure names its seed; `python -m outerstep.simulate --hierarchy SEED` replays it and tells what happens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from amounts import mostly_schedules
from outerstep.coordination.layers.lifecycle import (
    RESERVED,
    TARGETS,
    GroupPlace,
    GroupState,
    Happening,
    Lifecycle,
)
from outerstep.coordination.layers.machine import ClusterMachine, RecordFacts
from outerstep.coordination.layers.replica_life import ReplicaLife
from outerstep.coordination.layers.tasks import ClusterTask, LetGo, MoveBelow
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.rounds import RoundRules
from outerstep.simulate.hierarchy import run_hierarchy
from outerstep.simulate.hierarchy_scenario import KINDS, ClusterPlan, HierarchyScenario, LayerFault
from outerstep.simulate.leader import SimLeader, SimUpward
from outerstep.simulate.worker import SimSaved

QUICK, FULL, AT_ONCE = 200, 2_000, 300
FIRED = {
    *KINDS,
    "lead",
    "lost",
    "repeated",
    "deferred",
    "late",
    "held",
    "not_kept",
    "vote_failed",
    "healed",
    "new_leader",
}
FIRED |= {f"life_{state}" for state in ("TRAINING", "ROLLBACK", "RECEIVED_JOIN", "DRAINING", "EXIT")}  # of replicas
FIRED |= {"successor", "unsettled", "fenced_leader", "all_holders_died", "overtaken", "died_writing", "from_above"}


def check_seeds(seeds: range) -> Counter[str]:
    violations: list[str] = []
    faults: Counter[str] = Counter()
    for seed in seeds:
        history = run_hierarchy(HierarchyScenario.drawn(seed), seed)
        violations += [f"python -m outerstep.simulate --hierarchy {seed}: {line}" for line in history.violations]
        faults += history.faults
    assert not violations, "\n".join(violations[:10])
    return faults


def test_two_hundred_schedules_of_clusters_keep_every_promise() -> None:
    faults = check_seeds(range(QUICK))
    assert faults.keys() >= FIRED, f"never fired: {FIRED - faults.keys()}"


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_two_thousand_schedules_of_clusters_keep_every_promise(first: int) -> None:
    check_seeds(range(first, min(first + AT_ONCE, FULL)))


@pytest.mark.parametrize(
    "seed",
    [
        7,  # rounds of other fragments after the last round of the first did not go up at the end
        40,  # nor those that the copy had followed after a move
        110,  # a cluster that was told to finish left before its members had brought their last steps
        250,  # rounds that closed during an exchange were forgotten with the leader that had followed them
        1098,  # the first record after joining had rounds in S that were no steps yet: a successor gave them up
        303,  # all who held the newest record died: steps that counted already were added once more
    ],
)
def test_what_was_found_once_stays_mended(seed: int) -> None:
    assert not run_hierarchy(HierarchyScenario.drawn(seed), seed).violations


def test_the_schedules_cover_every_shape() -> None:
    drawn = [HierarchyScenario.drawn(seed) for seed in range(QUICK)]
    assert {(s.across.mode, s.sites > 0) for s in drawn} == {
        (mode, sites) for mode in ("sync", "quorum", "async") for sites in (False, True)
    }
    assert {(plan.kind, plan.members) for s in drawn for plan in s.clusters} == {
        (kind, members) for kind in ("server", "group") for members in (1, 2, 3)
    }
    assert {(s.fragments > 1, s.delay > 0) for s in drawn} == {(f, d) for f in (False, True) for d in (False, True)}


def test_a_seed_of_clusters_replays_exactly() -> None:
    for seed in range(5):
        first, second = list[str](), list[str]()
        one = run_hierarchy(HierarchyScenario.drawn(seed), seed, log=first)
        two = run_hierarchy(HierarchyScenario.drawn(seed), seed, log=second)
        assert (first, one.faults, one.virtual_s) == (second, two.faults, two.virtual_s)


@pytest.mark.parametrize("kind", ["server", "group"])
@pytest.mark.parametrize("sites", [0, 2])
def test_without_faults_all_end_with_the_same_steps(kind: str, sites: int) -> None:
    plans = tuple(ClusterPlan(kind, 2, 60.0, site=i % 2 if sites else 0) for i in range(2))
    rules = RoundRules(num_workers=1, max_staleness=1000)
    history = run_hierarchy(HierarchyScenario(clusters=plans, across=rules, inside=rules, sites=sites), 1)
    assert not history.violations
    models = {name: layer.model(0) for name, layer in history.layers.items()}
    assert len(models["top"]) > 50
    assert models["top"] in (models["c0"], models["c1"]), "the last one to leave has it all"


def who_wait_for_each_other() -> list[str]:
    """A member of one cluster returns while the others wait for the layer above, which waits for another cluster: what
    the newcomer sends is accepted first. Drawn schedules seldom come to that."""
    seen: list[str] = []
    for i in range(12, 22):
        clusters = ClusterPlan("server", 2, 60.0), ClusterPlan("server", 1, 60.0)
        faults = LayerFault("member_crash", 10.0, 30.0, 0, 1), LayerFault("cut_up", 33.0 + 0.2 * i, 14.0, 1)
        rules = RoundRules(num_workers=1)
        scenario = HierarchyScenario(clusters=clusters, across=rules, inside=rules, faults=faults)
        seen += run_hierarchy(scenario, i).violations
    return seen


def test_members_and_what_comes_from_above_never_wait_for_each_other() -> None:
    assert not who_wait_for_each_other()


def test_members_that_are_held_back_from_a_round_that_waits_for_them_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Coordinator, "_holds_back", lambda self, fragment, now: now < self.withheld_until)
    assert "waits for a version from above, which waits for a round that waits for it" in who_wait_for_each_other()[0]


# --- planted bugs: the schedules must notice -------------------------------------------------------------------------


class OffersFirst(ClusterMachine):
    """Lets a contribution go without a record of it; the next one will have it."""

    def sent(self) -> None:
        super().sent()
        self._offer = LetGo()


class MovesFirst(ClusterMachine):
    """Moves T, then writes down that it does."""

    def _hand_down(self, moving: Collection[int]) -> list[ClusterTask]:
        return sorted(super()._hand_down(moving), key=lambda task: not isinstance(task, MoveBelow))


class MovesAgain(ClusterMachine):
    """Makes the move in the record, whatever the layer below knows."""

    def found(self, record: RecordFacts | None, known: Any) -> None:
        super().found(record, known if record is None else dict.fromkeys(known, record.serial - 1))


class NeverReleases(ClusterMachine):
    """Holds its members until what comes from above is there, however long; and says when only if something came."""

    def round_closed(self, *, exchanges_next: bool) -> float:
        return 1e9 if super().round_closed(exchanges_next=exchanges_next) else 0.0

    def exchanged(self, moving: Collection[int], *, deferred: int, told_to_end: bool = False) -> None:
        super().exchanged(moving, deferred=deferred, told_to_end=told_to_end)
        if not moving:
            self._owes_release = False


class ForgetsWhatMembersBroughtLast(ClusterMachine):
    """Leaves with what it had followed."""

    def _decide(self) -> None:
        if self.is_stopping:
            self._rounds, self._is_behind = 0, False
        super()._decide()


class BeginsWithNothing(ClusterMachine):
    """A successor does not read what its predecessor wrote down."""

    def found(self, record: RecordFacts | None, known: Any) -> None:
        super().found(None, known)


class BelievesAccepted(SimUpward):
    """Takes "accepted" for counted: does not ask what became of the contribution in the record."""

    def __init__(self, leader: SimLeader, instance: int, above: Any, agenda: Any, rng: Any, saved: Any) -> None:
        for index, fragment in enumerate(saved.fragments if saved is not None else ()):
            sent, progress = fragment.in_flight, saved.state.fragments[index]
            if sent is not None and progress.in_flight is not None:
                fragment.unsent = {step: on for step, on in fragment.unsent.items() if step not in sent.steps}
                progress.counted, progress.in_flight, fragment.in_flight = progress.in_flight.work, None, None
        super().__init__(leader, instance, above, agenda, rng, saved)


class AsksBeforeItJoins(SimUpward):
    """Looks up what became of the last contribution, and joins then: meanwhile whoever led before is still heard."""

    def __init__(self, leader: SimLeader, instance: int, above: Any, agenda: Any, rng: Any, saved: Any) -> None:
        super().__init__(leader, instance, above, agenda, rng, _as_it_looks(saved, above))


def _as_it_looks(saved: SimSaved | None, above: Any) -> SimSaved | None:
    for index, fragment in enumerate(saved.fragments if saved is not None else ()):
        assert saved is not None
        sent = fragment.in_flight
        if sent is not None and not all((index, step) in above.history.applied for step in sent.steps):
            saved.state.fragments[index].in_flight = fragment.in_flight = None
    return saved


def led_by(bug: type[ClusterMachine] | type[SimUpward]) -> type[SimLeader]:
    attribute = "machine_type" if issubclass(bug, ClusterMachine) else "worker_type"
    return type(bug.__name__, (SimLeader,), {attribute: bug})


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (OffersFirst, "the newest record does not know of"),
        (MovesFirst, "applied twice|nobody gave it up|another model"),
        (MovesAgain, "applied twice"),
        (NeverReleases, "no progress|never ended"),
        (ForgetsWhatMembersBroughtLast, "nobody gave it up"),
        (BeginsWithNothing, "nobody gave it up"),
        (BelievesAccepted, "nobody gave it up"),
        (AsksBeforeItJoins, "applied twice"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_bug_in_a_cluster_is_caught(bug: type[Any], symptom: str) -> None:
    seen: list[str] = []
    for seed in range(QUICK):
        seen += run_hierarchy(HierarchyScenario.drawn(seed), seed, leader_type=led_by(bug)).violations
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")


class NeverRollsBack(ReplicaLife):
    """Takes a round whose vote has failed for one that is still open."""

    def failed(self) -> None:
        pass


class ReceivesNobody(ReplicaLife):
    """Goes on with its process group when another has come."""

    def met(self, replicas: int, *, healed: bool, heals: bool = False) -> None:
        super().met(min(replicas, self.replicas or replicas), healed=healed, heals=heals)
        self.replicas = replicas


class IsHealedTwice(ReplicaLife):
    """Is told of a healing after it has taken its place in the round."""

    def met(self, replicas: int, *, healed: bool, heals: bool = False) -> None:
        super().met(replicas, healed=healed, heals=heals)
        if healed:
            self._feed(Happening.NEED_HEAL)


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (NeverRollsBack, "a vote of .* failed, and it is in TRAINING"),
        (ReceivesNobody, "received no join"),
        (IsHealedTwice, "has no such edge: need_heal"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_bug_in_a_replicas_life_is_caught(bug: type[ReplicaLife], symptom: str) -> None:
    seen: list[str] = []
    for seed in range(QUICK):
        seen += run_hierarchy(HierarchyScenario.drawn(seed), seed, life_type=bug).violations
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")


def test_lives_take_every_edge_of_a_global_sync_that_is_not_reserved_and_no_reserved_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of members, replicas and clusters alike."""
    taken: set[tuple[GroupPlace, Happening]] = set()
    feed = Lifecycle.feed

    def noted(life: Lifecycle, *happenings: Happening) -> GroupPlace:
        for happening in happenings:
            taken.add((life.place, happening))
            feed(life, happening)
        return life.place

    monkeypatch.setattr(Lifecycle, "feed", noted)
    for seed in range(60):
        run_hierarchy(HierarchyScenario.drawn(seed), seed)
    assert not taken & RESERVED.keys()
    known = {key for key in TARGETS if key[0].state is GroupState.TRAINING and key[1] not in ANYWHERE}
    assert known - taken == RESERVED.keys() & known


ANYWHERE = {Happening.FAULT, Happening.RECEIVED_JOIN, Happening.DRAIN_SELF, Happening.DRAIN_NOTICED}
"""From each sub-step of TRAINING."""
