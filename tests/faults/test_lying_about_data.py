"""Seeded schedules in which one member calls everything trained that it is given, at once. It can take its own units
from the model, and no more of an epoch than the fastest member that the others believe in."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.shared_leases import SharedLeases, SharedTable
from outerstep.coordination.weights import MAX_WEIGHT_RATIO
from outerstep.events import Event
from outerstep.ranges import Ranges
from outerstep.simulate.shared_data import SharedMember, SharedScenario, SharedWorld
from outerstep.types import Dataset

SEEDS, HONEST, SAMPLES = range(1, 4), 5, 4000
LIAR = "m0"
MOST = 0.85  # of an epoch: ten times the usual pace, beside five that come and go; without a bound it is 0.98
RATIO = MAX_WEIGHT_RATIO / (MAX_WEIGHT_RATIO + HONEST)


class WaryLeases(SharedLeases):
    """As in a run whose peers may lie."""

    def decide(self, *given: Any, **named: Any) -> list[Event]:
        return super().decide(*given, **named, may_lie=True)


class Lying(SharedMember):
    """Trains nothing, and calls all trained that it holds."""

    def train(self, steps: int, now: float) -> None:
        super().train(SAMPLES if steps else 0, now)


def world(seed: int, leases: type[SharedLeases], faults: float) -> SharedWorld:
    dataset = Dataset(name="train", samples=SAMPLES, unit_samples=1)
    scenario = SharedScenario(dataset, 1 + seed % 2, HONEST + 1, faults, 0)

    def start(scenario: SharedScenario, name: str, instance: str, speed: int) -> SharedMember:
        kind = type("Member", (Lying if name == LIAR else SharedMember,), {"leases_type": leases})
        made = kind(scenario, name, instance, speed)
        assert isinstance(made, SharedMember)
        return made

    return SharedWorld(scenario, seed, start)


def share_of_liar(seed: int, leases: type[SharedLeases], faults: float = 0.05) -> float:
    play = world(seed, leases, faults)
    history = play.play()
    assert not history.violations, f"seed {seed}: {history.violations[:3]}"
    assert faults == 0.0 or history.faults["died"] > 0
    done_by = next(iter(play.members.values())).leases.tables["train"].done_by
    return done_by.get(LIAR, 0) / sum(done_by.values())


@pytest.mark.slow
def test_a_liar_counts_for_ten_times_the_others_at_most_and_every_unit_is_accounted_for() -> None:
    shares = [share_of_liar(seed, WaryLeases) for seed in SEEDS]
    assert max(shares) <= MOST, shares
    assert max(shares) >= MOST / 2, "it lies, and is believed as far as that"


@pytest.mark.slow
def test_where_nobody_comes_or_goes_it_gets_no_more_than_its_ratio() -> None:
    assert max(share_of_liar(seed, WaryLeases, faults=0.0) for seed in range(2)) <= 1.1 * RATIO


class BelievesAll(SharedTable):
    def _believed(self, worker_id: str, places: Ranges) -> Ranges:
        self._credited[worker_id] = self._credited.get(worker_id, 0) + places.total
        return places


def test_a_table_that_believes_everything_is_caught() -> None:
    class Leases(SharedLeases):
        table_type = BelievesAll

    assert max(share_of_liar(seed, Leases) for seed in SEEDS) > MOST
