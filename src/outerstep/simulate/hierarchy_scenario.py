"""What is to happen to clusters of clusters: how many there are, of which kind, and the faults, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ..coordination.server.rounds import RoundRules
from .scenario import Scenario

KINDS: tuple[str, ...] = (
    *("member_crash", "member_pause", "member_cut", "leader_crash", "leader_crash", "leader_pause", "leader_pause"),
    *("leader_cut", "cluster_crash", "top_crash", "top_power_cut", "top_disk", "power_cut", "disk", "disk", "pair"),
    *("cut", "cut_up", "cut_down", "slow", "bad_weather", "drain", "sync", "site_crash", "site_power_cut"),
)


@dataclass(frozen=True)
class LayerFault:
    """At `at_s`, for `lasts_s`, to a cluster or one of its members.

    member_crash, member_pause, member_cut (from its server). leader_crash, leader_pause, leader_cut (from the layer
    above): of a server that leads its cluster, or of the member that does. pair: the leader falls asleep, and its
    successor dies. cluster_crash: all of it. power_cut, disk: of the cluster's server. cut, cut_up, cut_down, slow: its
    way up. top_…, site_…: the server above it, or between. bad_weather: everywhere. drain, sync: an operator above;
    lead: names another member for the leader."""

    kind: str
    at_s: float
    lasts_s: float
    cluster: int = 0
    member: int = 0
    operation: int = 1


@dataclass(frozen=True)
class ClusterPlan:
    """`kind`: "server", or "group" of members alone. `wait_s`: how long its members wait for the layer above."""

    kind: str
    members: int
    wait_s: float
    site: int = 0


@dataclass(frozen=True)
class HierarchyScenario:
    """`sites`: servers between the clusters and the top; 0 = two levels. `every`: rounds between two exchanges above;
    `save_every`: steps between two saved states of a worker, from which a later start resumes (0 = none).
    `across`: of every server that has clusters for workers; `inside`: of one that has workers."""

    clusters: tuple[ClusterPlan, ...]
    across: RoundRules
    inside: RoundRules
    sites: int = 0
    fragments: int = 1
    every: int = 2
    delay: int = 0
    sync_every: int = 3
    failing: float = 0.0
    loss: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    checkpoint_every: int = 4
    restart_s: float = 5.0
    save_every: int = 0
    faults: tuple[LayerFault, ...] = ()
    calm_after_s: float = 60.0

    @staticmethod
    def drawn(seed: int) -> HierarchyScenario:
        rng = random.Random(f"hierarchy {seed}")
        sites = rng.choice([0, 0, 2])
        clusters = tuple(
            ClusterPlan(
                kind=rng.choice(["server", "group"]),
                members=rng.randint(1, 3),
                wait_s=rng.choice([0.0, 10.0, 60.0]),
                site=i % sites if sites else 0,
            )
            for i in range(rng.randint(2, 3))
        )
        asynchronous = rng.random() < 0.25
        storm_s = rng.uniform(20.0, 120.0)
        faults = tuple(
            LayerFault(
                rng.choice(KINDS),
                rng.uniform(2.0, storm_s),
                rng.uniform(1.0, 50.0),
                rng.randrange(len(clusters)),
                rng.randrange(3),
                rng.randint(1, 30),
            )
            for _ in range(rng.randint(1, 6))
        )
        orders = random.Random(f"who leads {seed}")
        faults += tuple(
            LayerFault("lead", orders.uniform(2.0, storm_s), 0.0, orders.randrange(len(clusters)), orders.randrange(3))
            for _ in range(orders.choice([0, 1, 3]))
        )
        fragments = rng.choice([1, 1, 2])
        every = rng.randint(fragments, 4)
        return HierarchyScenario(
            clusters=clusters,
            across=RoundRules(
                num_workers=1,
                quorum=1 if asynchronous else rng.choice([None, None, 1]),
                asynchronous=asynchronous,
                grace_s=rng.choice([0.0, 2.0]),
                round_deadline_s=rng.choice([None, 240.0]),
                start_deadline_s=60.0,
                max_staleness=rng.choice([4, 1000, 1000]) * (4 if asynchronous else 1),
            ),
            inside=RoundRules(
                num_workers=1,
                quorum=rng.choice([None, None, 1]),
                round_deadline_s=rng.choice([None, 20.0]),
                start_deadline_s=25.0,
                max_staleness=1000,
            ),
            sites=sites,
            fragments=fragments,
            every=every,
            delay=rng.choice([0, 0, 0, min(1, every - 1)]),
            sync_every=rng.randint(fragments, 4),
            failing=rng.choice([0.0, 0.0, 0.1, 0.3]),
            loss=rng.choice([0.0, 0.0, 0.05, 0.2]),
            repeat=rng.choice([0.0, 0.1, 0.5]),
            damage=rng.choice([0.0, 0.02]),
            checkpoint_every=rng.choice([1, 2, 8, 50]),
            restart_s=rng.choice([0.5, 5.0, 20.0]),
            faults=faults,
            calm_after_s=max(fault.at_s + fault.lasts_s for fault in faults),
        )

    def server(self, rules: RoundRules, workers: int, *, across: bool) -> Scenario:
        """The settings of one server, and of those that are its workers."""
        return Scenario(
            rules=replace(rules, num_workers=workers),
            workers=workers,
            fragments=self.fragments,
            sync_every=self.every if across else self.sync_every,
            delay=self.delay if across else 0,
            offline_after_s=15.0,
            offline_exchanges=1 << 30 if across else 4,
            step_s=(1.0, 1.5, 1.0),
            parts=1,
            heartbeat_timeout_s=20.0,
            checkpoint_every=self.checkpoint_every,
            restart_s=self.restart_s,
            save_every=0 if across else self.save_every,
            patient_exit_s=60.0,
        )
