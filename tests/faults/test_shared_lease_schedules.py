"""Seeded schedules of members that hold the lease table together: they come, die, heal and miss decisions, and
afterwards every unit is accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from amounts import mostly_schedules
from outerstep.coordination.shared_leases import SharedLeases, SharedTable
from outerstep.events import Event
from outerstep.ranges import NONE, Ranges
from outerstep.simulate.gossip import run_gossip
from outerstep.simulate.gossip_data import DataWorld
from outerstep.simulate.gossip_scenario import GossipScenario
from outerstep.simulate.shared_data import SharedMember, SharedScenario, SharedWorld
from outerstep.types import LeaseStatement
from outerstep.versions import PROTOCOL_VERSION

QUICK, FULL, AT_ONCE, PLANTED = 40, 1_040, 50, 60
PEERS_QUICK, PEERS, PEERS_AT_ONCE = 12, 300, 48


def play_all(seeds: range, member_type: type[SharedMember] = SharedMember) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        history = SharedWorld(SharedScenario.drawn(seed), seed, member_type).play()
        assert not history.violations, f"seed {seed}: {history.violations[:3]}"
        found += history.faults
    return found


def test_every_unit_is_accounted_for() -> None:
    found = play_all(range(QUICK))
    for what in ("died", "new", "resumed", "came", "healed", "done", "repeated", "lost"):
        assert found[what] > 0, f"no schedule had {what}"
    assert found["repeated"] < found["done"] / 5


@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_a_thousand_schedules_account_for_every_unit(first: int) -> None:
    play_all(range(first, min(first + AT_ONCE, FULL)))


class DoneInOneFragment(SharedTable):
    def _cover(self, worker_id: str, fragment: int, places: Ranges, fragments: int) -> Ranges:
        super()._cover(worker_id, fragment, places, fragments)
        return places


class CountsNothingTwice(SharedTable):
    def _not_overtaken(self, worker_id: str, places: Ranges) -> Ranges:
        repeated = self.repeated
        kept = super()._not_overtaken(worker_id, places)
        self.repeated = repeated
        return kept


class LeasesAgainOneWay(SharedTable):
    def _take_back(self, worker_id: str, places: Ranges, *, may_bring: bool = True) -> None:
        super()._take_back(worker_id, places, may_bring=may_bring)
        self.free, self.lost = self.free | (self.lost & places), self.lost - places


class HealsInPart(SharedTable):
    @classmethod
    def resumed(cls, facts: Mapping[str, Any], claimable_until: float = 0.0, *, forgetful: bool = False) -> SharedTable:
        return super().resumed({**facts, "shares": {}}, claimable_until, forgetful=forgetful)


class KeepsTheDead(SharedTable):
    def gone(self, worker_id: str) -> list[Event]:
        return []


class GivesToNobody(SharedTable):
    def divide(self, said: Mapping[str, LeaseStatement], members: Collection[str], now: float) -> None:
        if self.free == NONE:
            super().divide(said, members, now)


def play_peers(seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        scenario = replace(GossipScenario.drawn(seed), protocol=PROTOCOL_VERSION)
        history = run_gossip(scenario, seed, world_type=DataWorld)
        assert not history.violations, f"seed {seed}: {history.violations[:3]}"
        found += history.faults
    return found


def test_peers_that_decide_block_by_block_hold_one_table_and_account_for_every_unit() -> None:
    found = play_peers(range(PEERS_QUICK))
    for what in ("crash", "disk_lost", "partition", "units_done", "units_repeated", "units_lost"):
        assert found[what] > 0, f"no schedule had {what}"


@pytest.mark.schedules
@pytest.mark.parametrize("first", range(PEERS_QUICK, PEERS, PEERS_AT_ONCE))
def test_three_hundred_schedules_of_peers_account_for_every_unit(first: int) -> None:
    play_peers(range(first, min(first + PEERS_AT_ONCE, PEERS)))


@pytest.mark.parametrize(
    ("table", "violation"),
    [
        (DoneInOneFragment, "is not in the model"),
        (CountsNothingTwice, "in the model once more"),
        (LeasesAgainOneWay, "leases nothing again"),
        (HealsInPart, "hold different tables"),
        (KeepsTheDead, "neither done nor lost"),
        (GivesToNobody, "neither done nor lost"),
    ],
)
def test_planted_bugs_are_caught(table: type[SharedTable], violation: str) -> None:
    class Leases(SharedLeases):
        table_type = table

    found: list[str] = []
    for seed in range(PLANTED):
        member = type("Member", (SharedMember,), {"leases_type": Leases})
        found += SharedWorld(SharedScenario.drawn(seed), seed, member).play().violations
        if any(violation in one for one in found):
            return
    pytest.fail(f"nobody noticed: {found[:3]}")
