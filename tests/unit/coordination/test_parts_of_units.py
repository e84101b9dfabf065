"""Units of which a contribution holds a part: gone on with, trained once more and counted, or given up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outerstep.coordination.leases import Leases, LeaseTable
from outerstep.events import UnitsDone, UnitsRepeated
from outerstep.ranges import Range, Ranges
from outerstep.types import Dataset, Lease, LeaseAnswer, Offer, Trained

ONE = (0, 1)


class Run:
    """Workers that ask a server's table and contribute, each in a round of its own."""

    def __init__(self, fragments: int = 1, **changes: Any) -> None:
        self.dataset = Dataset(**{"name": "train", "samples": 100, "unit_samples": 10, "epochs": 1, **changes})
        self.leases, self.fragments = Leases(), fragments
        self.numbers: dict[str, int] = {}
        self.version = 0

    @property
    def table(self) -> LeaseTable:
        return self.leases.tables["train"]

    def ask(self, worker_id: str, want: int = 1, *holds: Range, **said: Any) -> LeaseAnswer:
        number = self.numbers[worker_id] = self.numbers.get(worker_id, 0) + 1
        head = {"run_id": "run", "worker_id": worker_id, "incarnation": 1}
        message = Lease(**head, dataset=self.dataset, number=number, want=want, holds=holds, **said)
        return self.leases.lease(message, 0.0, {worker_id})

    def accept(self, worker_id: str, *places: Range, fragment: int = 0, version: int = 0, **parts: Any) -> None:
        offer = Offer(
            run_id="run", worker_id=worker_id, incarnation=1, fragment=fragment, sequence=1, base_version=0,
            oldest_base=0, steps=1, codec="fp32", size_bytes=8,
            data=(Trained(dataset="train", places=places, **parts),),
        )  # fmt: skip
        self.leases.accept(offer, version, 0.0)

    def bring(self, worker_id: str, *places: Range, fragment: int = 0, left_out: str = "", **parts: Any) -> list[Any]:
        self.version += 1
        self.accept(worker_id, *places, fragment=fragment, version=self.version, **parts)
        return self.leases.closed(fragment, self.version, [left_out], self.fragments)

    def restart(self) -> None:
        facts, self.leases = json.loads(json.dumps(self.leases.remembered())), Leases()
        self.leases.resume(facts, 30.0, set(), forgetful=False)


@pytest.fixture
def run() -> Run:
    made = Run()
    made.ask("a")
    return made


def test_a_unit_that_goes_on_in_the_next_contribution_is_done_and_nothing_is_repeated(run: Run) -> None:
    assert run.bring("a", begun=(ONE,)) == []
    assert run.bring("a", begun=(ONE,), continued=(ONE,)) == []
    assert run.bring("a", ONE, continued=(ONE,)) == [UnitsDone("train", "a", 3, (ONE,))]
    assert run.table.repeated == 0
    assert (run.table.in_parts.begun, run.table.in_parts.halves) == ({}, {})


@pytest.mark.parametrize("restarts", [False, True])
def test_what_another_trains_from_its_start_after_a_death_is_counted_and_told(run: Run, restarts: bool) -> None:
    run.bring("a", begun=(ONE,))
    run.leases.gone("a")
    if restarts:
        run.restart()
    assert run.ask("b").granted == (ONE,)
    assert run.table.repeated == 0, "nobody has trained it yet"
    assert run.bring("b", ONE) == [UnitsRepeated("train", "b", 2, (ONE,)), UnitsDone("train", "b", 2, (ONE,))]
    assert run.table.repeated == 1


def test_it_is_counted_once_however_many_contributions_hold_it(run: Run) -> None:
    run.bring("a", begun=(ONE,))
    run.leases.gone("a")
    run.ask("b")
    run.bring("b", begun=(ONE,))
    run.bring("b", begun=(ONE,), continued=(ONE,))
    run.bring("b", ONE, continued=(ONE,))
    assert (run.table.repeated, run.table.done.total) == (1, 1)


def test_it_is_counted_once_and_not_by_each_fragment() -> None:
    run = Run(fragments=2)
    run.ask("a")
    for fragment in range(2):
        run.bring("a", begun=(ONE,), fragment=fragment)
    run.leases.gone("a")
    run.ask("b")
    for fragment in range(2):
        run.bring("b", ONE, fragment=fragment)
    assert (run.table.repeated, run.table.done.total) == (1, 1)


def test_a_worker_that_comes_back_and_goes_on_repeats_nothing(run: Run) -> None:
    run.bring("a", begun=(ONE,))
    run.leases.gone("a")
    assert run.ask("a", 0, ONE).void == ()
    run.bring("a", ONE, continued=(ONE,))
    assert (run.table.repeated, run.table.done.total) == (0, 1)


def test_a_worker_that_has_lost_its_memory_begins_anew_and_that_is_counted(run: Run) -> None:
    run.bring("a", begun=(ONE,))
    assert run.ask("a").granted == (ONE,)
    run.bring("a", ONE)
    assert (run.table.repeated, run.table.done.total) == (1, 1)


@pytest.mark.parametrize("closes", ["before", "after"])
def test_a_worker_that_resumes_from_before_what_it_had_sent_is_counted(run: Run, closes: str) -> None:
    """It holds the unit, and goes on with it from a sample that is in the model already."""
    run.bring("a", begun=(ONE,))
    run.accept("a", begun=(ONE,), continued=(ONE,), version=2)
    if closes == "before":
        run.leases.closed(0, 2, [], 1)
    assert run.ask("a", 0, ONE, goes_back=True).void == ()
    if closes == "after":
        run.leases.closed(0, 2, [], 1)
    run.version = 2
    assert run.bring("a", begun=(ONE,), continued=(ONE,)) == [UnitsRepeated("train", "a", 3, (ONE,))]
    assert run.bring("a", ONE, continued=(ONE,)) == [UnitsDone("train", "a", 4, (ONE,))]
    assert run.table.repeated == 1


def test_one_way_such_a_worker_does_not_train_it_and_it_is_lost() -> None:
    run = Run(again=False)
    run.ask("a", 2)
    run.bring("a", begun=(ONE,))
    assert run.ask("a", 0, (0, 2), goes_back=True).void == (ONE,)
    assert run.table.lost == Ranges([ONE])
    assert run.table.held == {"a": Ranges([(1, 2)])}


def test_one_that_goes_back_takes_nothing_that_was_taken_from_it(run: Run) -> None:
    """Nobody knows of which of its starts it was."""
    run.leases.gone("a")
    assert run.ask("a", 0, ONE, goes_back=True).void == (ONE,)


@pytest.mark.parametrize(("dropped", "spent", "free"), [("spent", 1, 0), ("again", 0, 1)])
def test_a_unit_whose_first_part_a_round_left_out_is_given_up(dropped: str, spent: int, free: int) -> None:
    run = Run(dropped=dropped)
    run.ask("a")
    run.bring("a", begun=(ONE,), left_out="a")
    assert run.bring("a", ONE, continued=(ONE,)) == []
    assert (run.table.spent.total, run.table.free.total) == (spent, free)
    if dropped == "again":
        run.ask("b")
        assert run.bring("b", ONE) == [UnitsRepeated("train", "b", 3, (ONE,)), UnitsDone("train", "b", 3, (ONE,))]


def test_a_unit_whose_first_part_a_killed_server_had_accepted_is_not_done(run: Run) -> None:
    run.accept("a", begun=(ONE,), version=1)
    run.restart()
    run.ask("a", 0, ONE)
    assert run.bring("a", ONE, continued=(ONE,)) == []
    assert run.table.spent == Ranges([ONE])


def test_what_its_worker_calls_torn_is_counted_when_somebody_trains_it() -> None:
    run = Run(dropped="again")
    run.ask("a")
    run.bring("a", torn=(ONE,))
    run.ask("a", 0, dropped=(ONE,))
    run.ask("b")
    run.bring("b", ONE)
    assert run.table.repeated == 1


def test_a_second_torn_part_is_counted_too() -> None:
    run = Run(dropped="again")
    run.ask("a")
    run.bring("a", torn=(ONE,))
    run.ask("a", 1, dropped=(ONE,))
    run.bring("a", torn=(ONE,))
    run.ask("a", 1, dropped=(ONE,))
    run.bring("a", ONE)
    assert (run.table.repeated, run.table.done.total) == (2, 1)


def test_a_unit_with_its_end_in_one_fragment_and_a_part_in_another_is_counted_once() -> None:
    run = Run(fragments=2)
    run.ask("a")
    run.bring("a", ONE, fragment=0)
    run.bring("a", begun=(ONE,), fragment=1)
    run.leases.gone("a")
    run.ask("b")
    for fragment in range(2):
        run.bring("b", ONE, fragment=fragment)
    assert (run.table.repeated, run.table.done.total) == (1, 1)


def test_what_is_brought_by_one_that_lost_it_meanwhile_is_counted_and_takes_nothing_from_the_other(run: Run) -> None:
    """A liar that was leased a unit once cannot break what its next holder goes on with."""
    run.leases.gone("a")
    run.ask("b")
    run.bring("b", begun=(ONE,))
    assert run.bring("a", begun=(ONE,)) == [UnitsRepeated("train", "a", 2, (ONE,))]
    assert run.bring("b", ONE, continued=(ONE,))[-1] == UnitsDone("train", "b", 3, (ONE,))


def test_nobody_names_parts_of_what_it_was_never_leased(run: Run) -> None:
    run.bring("a", begun=(ONE,))
    assert run.bring("liar", begun=(ONE,), torn=(ONE,), continued=(ONE,)) == []
    assert run.bring("a", ONE, continued=(ONE,)) == [UnitsDone("train", "a", 3, (ONE,))]
    assert run.table.repeated == 0


def test_without_parts_a_table_remembers_what_it_did(run: Run) -> None:
    assert run.table.remembered().keys() & {"begun", "resumed", "halves"} == set()
    run.bring("a", begun=(ONE,))
    before = run.table.remembered()
    run.restart()
    assert run.table.remembered()["begun"] == before["begun"] == {"a": {"0": [[0, 1]]}}
    assert run.table.in_parts.halves == {}
