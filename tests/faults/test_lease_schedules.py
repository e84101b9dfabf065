"""Seeded fault schedules of runs that lease data: workers and server die, links break, disks fail, and afterwards every
unit is accounted for. (What the steps themselves promise is in test_schedules.py.)"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from amounts import mostly_schedules
from outerstep.coordination.leases import MOST_DATASETS_OF_ONE, Leases, LeaseTable
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.rounds import RoundRules
from outerstep.coordination.worker.units import LeasedWork
from outerstep.events import Event
from outerstep.ranges import NONE, Ranges
from outerstep.simulate.data import SimDataLiar, SimDataWorker, check_data
from outerstep.simulate.history import History
from outerstep.simulate.scenario import Scenario
from outerstep.simulate.server import SimServer
from outerstep.simulate.world import World
from outerstep.types import Control, Dataset, Places, Trained

QUICK, FULL, AT_ONCE, LIED = 150, 2_000, 370, 100


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


def unit_and_batch(seed: int) -> tuple[int, int]:
    """In half of the schedules a contribution may begin and end in the middle of a unit."""
    return ((1, 1), (3, 2), (1, 1), (5, 2))[seed % 4]


def play(seed: int, *, server_type: type[SimServer] = SimServer, lies: bool = False, **of_workers: Any) -> History:
    dataset, scenario = dataset_of(seed), replace(Scenario.drawn(seed), liar="")
    if not dataset.again:  # a run that keeps no record of each round refuses it
        scenario = replace(scenario, durability="round")
    of_workers = {"dataset": dataset, "batch": unit_and_batch(seed)[1], **of_workers}
    world = World(scenario, seed, worker_type=type("Worker", (SimDataWorker,), of_workers), server_type=server_type)
    liar = SimDataLiar(scenario, world.agenda, world.server, dataset) if lies else None
    history = world.run()
    check_data(world.server, dataset, history, scenario.fragments)
    history.faults["units_for_the_liar"] += liar.granted if liar is not None else 0
    return history


def play_all(seeds: range, **how: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        history = play(seed, **how)
        assert not history.violations, f"seed {seed}: {history.violations[:3]}"
        found += history.faults
    return found


def test_every_unit_is_accounted_for() -> None:
    found = play_all(range(QUICK))
    kinds = ("units_done", "units_repeated", "units_in_part", "units_lost", "units_spent")
    for what in (*kinds, "server_died", "resumed", "overtaken", "crash"):
        assert found[what] > 0, f"no schedule had {what}"
    assert found["units_repeated"] < found["units_done"] / 4


@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_two_thousand_schedules_account_for_every_unit(first: int) -> None:
    play_all(range(first, min(first + AT_ONCE, FULL)))


def test_a_liar_among_them_misreports_its_own_units_alone() -> None:
    found = play_all(range(LIED), lies=True)
    for what in ("units_for_the_liar", "units_done", "units_repeated", "units_lost", "server_died", "resumed"):
        assert found[what] > 0, f"no schedule had {what}"


@pytest.mark.parametrize("seed", range(4))
def test_beside_a_liar_honest_workers_train_all_but_a_small_part_of_an_epoch(seed: int) -> None:
    dataset = structs.replace(replace_epochs(dataset_of(seed)), samples=400)
    drawn = calm(Scenario.drawn(seed), workers=3)
    world = World(drawn, seed, worker_type=type("Worker", (SimDataWorker,), {"dataset": dataset}))
    liar = SimDataLiar(drawn, world.agenda, world.server, dataset)
    coordinator = world.server.coordinator
    everything, table = Ranges([(0, dataset.units)]), LeaseTable(dataset)

    def is_over() -> bool:
        nonlocal table
        table = coordinator.leases.tables.get(dataset.name, table)
        return table.done | table.held.get("liar", NONE) == everything

    assert world.agenda.run_until(is_over, limit_s=2000.0), "everything else is done"
    held = table.held.get("liar", NONE)
    assert liar.granted > 0
    assert held.total <= dataset.units / 4
    assert len(coordinator.leases.tables) <= MOST_DATASETS_OF_ONE + 1
    world.server.handle(Control(kind="kick", worker_id="liar"), [], lambda answer: None)
    assert table.free == held, "and that is for whoever comes, when it is gone"


def test_without_faults_no_unit_is_trained_twice_and_none_is_missed() -> None:
    for seed in range(20):
        dataset, drawn = replace_epochs(dataset_of(seed)), Scenario.drawn(seed)
        still = calm(drawn)
        worker_type = type("Worker", (SimDataWorker,), {"dataset": dataset})
        world = World(still, seed, worker_type=worker_type)
        history = world.run()
        table = world.server.coordinator.leases.tables[dataset.name]
        check_data(world.server, dataset, history, still.fragments)
        assert not history.violations, f"seed {seed}: {history.violations[:3]}"
        assert table.done == Ranges([(0, dataset.units)]), f"seed {seed}"
        assert (table.repeated, table.spent, table.lost) == (0, NONE, NONE), f"seed {seed}"


@pytest.mark.parametrize("units", [140, 700])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_workers_of_speeds_1_2_4_finish_an_epoch_together(units: int, asynchronous: bool) -> None:
    """Nobody said how many there are. (Of a round that waits for all, each takes its own H: DyLU.)"""
    finished: dict[str, list[float]] = {}

    class Paced(SimDataWorker):
        dataset = structs.replace(replace_epochs(dataset_of(0)), samples=units)

        def _step(self) -> None:
            before = self.units.holdings["train"].untrained
            super()._step()
            if self.units.holdings["train"].untrained < before:
                finished.setdefault(self.worker_id, []).append(self._agenda.now)

    still = calm(Scenario.drawn(0), workers=3, step_s=(4.0, 2.0, 1.0), fragments=1, sync_every=20)
    quorum = 1 if asynchronous else None
    rules = RoundRules(num_workers=3, asynchronous=asynchronous, quorum=quorum, dylu=not asynchronous, max_staleness=16)
    world = World(replace(still, rules=rules), 0, worker_type=Paced)
    tables = world.server.coordinator.leases.tables
    assert world.agenda.run_until(lambda: "train" in tables and tables["train"].done.total == units, limit_s=3000.0)
    assert sum(map(len, finished.values())) == units
    assert len(finished["w0"]) < len(finished["w1"]) < len(finished["w2"])
    last = [times[-1] for times in finished.values()]
    assert max(last) - min(last) <= 4.0, "one unit of the slowest"


def calm(drawn: Scenario, **changes: Any) -> Scenario:
    """Without faults, and all are awaited."""
    return replace(
        drawn,
        **{
            "rules": RoundRules(num_workers=changes.get("workers", drawn.workers)),
            "faults": (),
            "liar": "",
            "loss": 0.0,
        }
        | {"repeat": 0.0, "damage": 0.0, "above_every_s": 0.0, "calm_after_s": 300.0, "delay": 0}
        | changes,
    )


def replace_epochs(dataset: Dataset) -> Dataset:
    return Dataset(name=dataset.name, samples=40, unit_samples=1, epochs=1)


# --- planted bugs -----------------------------------------------------------------------------------------------------


class BelievesAccepted(LeaseTable):
    """Calls a unit done when it was accepted, before its round has closed."""

    def accept(self, worker_id: str, fragment: int, version: int, places: Places, now: float) -> None:
        super().accept(worker_id, fragment, version, places, now)
        self.done |= Ranges(places) & self.held.get(worker_id, NONE)


class ForgetsWhatIsUnderWay(LeaseTable):
    """Gives a dead worker's units to others, though a round holds them."""

    def _under_way(self, worker_id: str) -> Ranges:
        return NONE


class NeverTakesBack(LeaseTable):
    """What a dead worker held stays with it."""

    def gone(self, worker_id: str) -> list[Event]:
        return []


class DoneInOneFragment(LeaseTable):
    """Is content with the first fragment."""

    def closed(self, fragment: int, version: int, left_out: Collection[str], fragments: int) -> list[Event]:
        return super().closed(fragment, version, left_out, min(fragments, 1))


class PutsNoMark(LeaseTable):
    """Forgets over a restart what it leased since the record."""

    @classmethod
    def resumed(cls, facts: Any, claimable_until: float, *, forgetful: bool = False) -> LeaseTable:
        return super().resumed({**facts, "reserved": facts["next"]}, 0.0)


class CountsWholeUnits(LeaseTable):
    """Does not count a unit of which a part is in the model once more."""

    def _note_again(self, worker_id: str, version: int, places: Ranges) -> list[Event]:
        before = self.repeated
        told = super()._note_again(worker_id, version, places)
        self.repeated = before
        return told


class TrustsEnds(LeaseTable):
    """Calls a unit done whose last step came, though it does not know the first."""

    def _known_parts(self, worker_id: str, fragment: int) -> Ranges:
        return Ranges([(0, self.next)])


def kept_by(bug: type[LeaseTable]) -> dict[str, Any]:
    leases = type("Leases", (Leases,), {"table_type": bug})
    coordinator = type("Coordinator", (Coordinator,), {"leases_type": leases})
    return {"server_type": type(bug.__name__, (SimServer,), {"coordinator_type": coordinator})}


class NamesAllItHolds(LeasedWork):
    """Says of each contribution that it has all that was ever trained."""

    def describe(self, units: Any) -> Any:
        return super().describe(((0, self._next),) if units else ())


class NamesNoParts(LeasedWork):
    """Says only which units end in a contribution."""

    def describe(self, units: Any) -> Any:
        return tuple(Trained(dataset=one.dataset, places=one.places) for one in super().describe(units))


class KeepsTornUnits(LeasedWork):
    """Does not see that a part of a unit was given up."""

    def _tear(self, dropped: Ranges, lost: Ranges) -> None:
        pass


@pytest.mark.parametrize(
    ("bug", "symptom", "first"),
    [
        (kept_by(BelievesAccepted), "is not in the model|and something else", 0),
        (kept_by(ForgetsWhatIsUnderWay), "in the model once more|trained twice|are nowhere", 0),
        (kept_by(NeverTakesBack), "stay with somebody", 0),
        (kept_by(DoneInOneFragment), "is not in the model", 0),
        (kept_by(PutsNoMark), "in the model once more|trained twice", 0),
        ({"work_type": NamesAllItHolds}, "is not in the model", 0),
        (kept_by(CountsWholeUnits), "in the model once more", 0),
        (kept_by(TrustsEnds), "is not in the model", 380),
        ({"work_type": NamesNoParts}, "in the model once more", 0),
        ({"work_type": KeepsTornUnits}, "is not in the model", 0),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_planted_bug_is_caught(bug: dict[str, Any], symptom: str, first: int) -> None:
    seen: list[str] = []
    for seed in range(first, first + QUICK):
        seen += play(seed, **bug).violations
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")
