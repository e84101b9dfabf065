"""Leases, to the last place: what adds up over workers, rounds, datasets and restarts, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from outerstep.coordination.leases import ASK_AGAIN_S, NO_END, RESERVE, Leases, LeaseTable
from outerstep.coordination.shares import FEW
from outerstep.errors import BadRequest, Superseded
from outerstep.events import UnitsDone, UnitsReturned
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, Lease, LeaseAnswer, Offer, Trained


def make_dataset(**changes: Any) -> Dataset:
    return Dataset(**{"name": "train", "samples": 100, "unit_samples": 10, "epochs": 1, **changes})


def lease_of(dataset: Dataset, worker_id: str = "a", number: int = 1, want: int = 1, **said: Any) -> Lease:
    return Lease(run_id="run", worker_id=worker_id, incarnation=1, dataset=dataset, number=number, want=want, **said)


def offer_of(worker_id: str, *data: Trained, fragment: int = 0) -> Offer:
    return Offer(
        run_id="run", worker_id=worker_id, incarnation=1, fragment=fragment, sequence=1, base_version=0, oldest_base=0,
        steps=1, codec="fp32", size_bytes=8, data=data or UNSET,
    )  # fmt: skip


class Run:
    """Workers that ask one table; each counts its requests, and holds what the table says, unless it is told."""

    def __init__(self, fragments: int = 1, **changes: Any) -> None:
        self.fragments, self.dataset = fragments, make_dataset(**changes)
        self.table = LeaseTable(self.dataset)
        self.numbers: dict[str, int] = {}
        self.now = 0.0

    def ask(self, worker_id: str, want: int = 1, *, live: tuple[str, ...] = (), **said: Any) -> LeaseAnswer:
        number = self.numbers[worker_id] = self.numbers.get(worker_id, 0) + 1
        said.setdefault("holds", tuple(self.table.held.get(worker_id, NONE)))
        message = lease_of(self.dataset, worker_id, number, want, **said)
        return self.table.lease(message, self.now, {worker_id, *live})

    def bring(self, worker_id: str, *places: tuple[int, int], version: int = 1, fragment: int = 0) -> None:
        self.table.accept(worker_id, fragment, version, places, self.now)

    def close(self, version: int = 1, *left_out: str, fragment: int = 0) -> list[Any]:
        return self.table.closed(fragment, version, left_out, self.fragments)

    def restart(self, until: float = 30.0, *, forgetful: bool = False) -> LeaseTable:
        facts = json.loads(json.dumps(self.table.remembered()))
        self.table = LeaseTable.resumed(facts, until, forgetful=forgetful)
        return self.table


# --- one table --------------------------------------------------------------------------------------------------------


def test_a_repeated_request_gets_its_answer_again_and_an_older_one_none() -> None:
    run = Run()
    first = run.ask("a", 2)
    assert run.table.lease(lease_of(run.dataset, "a", 1, 2), 0.0, {"a"}) is first
    run.ask("a", 1)
    with pytest.raises(Superseded):
        run.table.lease(lease_of(run.dataset, "a", 1, 2), 0.0, {"a"})
    run.table.started_again("nobody")  # a worker that has not asked for anything yet


def test_a_worker_asks_again_soon_only_where_something_may_still_come() -> None:
    run = Run()
    assert (run.ask("a", 10).state, run.ask("a", 0).state) == ("more", "over")
    assert run.ask("b", 0).retry_after_s == 0.0, "it is over"
    later = Run(epochs=0)
    later.ask("a", 2)
    later.restart()
    later.numbers.clear()
    assert later.ask("b", 1).retry_after_s == 0.0, "it got one"
    none = later.ask("b", 0)
    assert (none.state, none.retry_after_s) == ("more", ASK_AGAIN_S)


def test_what_goes_back_of_several_workers_is_free_together() -> None:
    run = Run(epochs=0)
    for name in "abc":
        run.ask(name, 3)
    assert run.table.gone("a") == [UnitsReturned("train", "a", ((0, 3),), again=True)]
    assert run.table.gone("c") == [UnitsReturned("train", "c", ((6, 9),), again=True)]
    assert run.table.free == Ranges([(0, 3), (6, 9)])
    assert run.table.lapsed == {"a": Ranges([(0, 3)]), "c": Ranges([(6, 9)])}
    assert run.table.held == {"b": Ranges([(3, 6)])}


def test_one_way_what_goes_back_of_several_workers_is_lost_together() -> None:
    run = Run(again=False)
    for name in "abc":
        run.ask(name, 3)
    for name in "ac":
        run.table.gone(name)
    assert run.table.lost == Ranges([(0, 3), (6, 9)])
    assert run.table.free == NONE


def test_one_way_a_worker_that_comes_back_has_what_it_still_holds_and_nobody_elses() -> None:
    run = Run(again=False)
    for name in "ab":
        run.ask(name, 3)
        run.table.gone(name)
    answer = run.ask("a", 0, holds=((1, 5),))
    assert run.table.held == {"a": Ranges([(1, 3)])}
    assert answer.void == ((3, 5),), "these were b's"
    assert run.table.lost == Ranges([(0, 1), (3, 6)])
    assert run.table.lapsed == {"a": Ranges([(0, 1)]), "b": Ranges([(3, 6)])}


def test_what_a_worker_says_it_does_not_hold_it_may_not_bring_any_more() -> None:
    run = Run()
    run.ask("a", 3)
    run.ask("a", 0, holds=((0, 1),))
    assert run.table.free == Ranges([(1, 3)])
    assert run.table.lapsed == {}
    run.bring("a", (0, 3))
    run.close()
    assert run.table.done == Ranges([(0, 1)])


def test_a_worker_that_was_gone_and_brings_its_units_has_them_again() -> None:
    run = Run()
    run.ask("a", 3)
    run.table.gone("a")
    run.bring("a", (1, 2))
    assert run.table.held == {"a": Ranges([(1, 2)])}
    assert run.table.lapsed == {"a": Ranges([(0, 1), (2, 3)])}
    assert run.table.free == Ranges([(0, 1), (2, 3)])
    assert run.close() == [UnitsDone("train", "a", 1, ((1, 2),))]
    assert run.table.held == {}


def test_contributions_of_one_worker_to_one_round_add_up() -> None:
    run = Run()
    run.ask("a", 4)
    run.bring("a", (0, 1))
    run.bring("a", (2, 3))
    [told] = run.close()
    assert told.places == ((0, 1), (2, 3))
    assert run.table.held == {"a": Ranges([(1, 2), (3, 4)])}


def test_done_places_and_their_workers_add_up_over_rounds() -> None:
    run = Run()
    for name in "ab":
        run.ask(name, 4)
    for version, (name, place) in enumerate((("a", 0), ("b", 4), ("a", 2)), 1):
        run.bring(name, (place, place + 1), version=version)
        run.close(version)
    assert run.table.done == Ranges([(0, 1), (2, 3), (4, 5)])
    assert run.table.done_by == {"a": 2, "b": 1}


def test_spent_places_add_up_and_count_as_done() -> None:
    run = Run()
    for name in "ab":
        run.ask(name, 3)
    for version, (name, place) in enumerate((("a", 0), ("b", 4), ("a", 2)), 1):
        run.bring(name, (place, place + 1), version=version)
        assert run.close(version, name) == []
    assert run.table.spent == run.table.done == Ranges([(0, 1), (2, 3), (4, 5)])
    assert run.table.held == {"a": Ranges([(1, 2)]), "b": Ranges([(3, 4), (5, 6)])}
    assert run.table.done_by == {}


def test_steps_that_were_dropped_wait_for_every_open_round_that_has_them() -> None:
    run = Run(fragments=2)
    run.ask("a", 3)
    run.bring("a", (0, 1), fragment=0)
    run.bring("a", (1, 2), fragment=1)
    run.ask("a", 0, dropped=((0, 3),))
    assert run.table.dropped == {"a": Ranges([(0, 2)])}, "place 2 is in no round"
    assert run.table.spent == Ranges([(2, 3)])
    run.ask("a", 0)
    run.close(fragment=0)
    assert run.table.dropped == {"a": Ranges([(1, 2)])}
    run.close(fragment=1)
    assert run.table.dropped == {}
    assert run.table.spent == Ranges([(0, 3)])


@pytest.mark.parametrize("again", [True, False])
def test_what_is_trained_once_more_is_counted_each_time(again: bool) -> None:
    """By one worker, in one fragment of two, before the other has it."""
    run = Run(fragments=2, again=again, dropped="again" if again else "spent")
    run.ask("a", 4)
    for version in (1, 2, 3):
        run.bring("a", (0, 2), version=version)
        run.close(version)
    assert run.table.repeated == 4
    assert run.table.covered == {"a": {0: Ranges([(0, 2)])}}
    run.bring("a", (3, 4), version=4)
    run.close(4)
    assert run.table.covered == {"a": {0: Ranges([(0, 2), (3, 4)])}}
    assert run.table.repeated == 4


def test_of_a_worker_that_is_gone_what_agreements_have_in_part_is_repeated_and_free() -> None:
    run = Run(fragments=2)
    for name in "ab":
        run.ask(name, 2)
        run.bring(name, (0, 4))
    run.close()
    assert run.table.gone("a") + run.table.gone("b") == [
        UnitsReturned("train", "a", ((0, 2),), again=True),
        UnitsReturned("train", "b", ((2, 4),), again=True),
    ]
    assert run.table.repeated == 4
    assert run.table.free == Ranges([(0, 4)])
    assert run.table.covered == {}


def test_a_round_that_was_open_when_its_worker_left_settles_its_units() -> None:
    run = Run(dropped="again")
    run.ask("a", 3)
    run.bring("a", (0, 1), version=1)
    run.bring("a", (1, 2), version=2)
    run.table.gone("a")
    assert run.table.held == {"a": Ranges([(0, 2)])}
    run.close(1, "a")
    assert (run.table.free, run.table.held) == (Ranges([(0, 1), (2, 3)]), {"a": Ranges([(1, 2)])})
    run.close(2)
    assert run.table.done == Ranges([(1, 2)])
    assert run.table.held == {}


def test_a_worker_that_is_back_keeps_what_its_fragments_have_in_part() -> None:
    """Of one that is gone it goes back; one that asks again, or contributes, is not gone."""
    for come_back in ("ask", "bring"):
        run = Run(fragments=2)
        run.ask("a", 2)
        run.bring("a", (0, 1))
        run.bring("a", (0, 1), version=2, fragment=1)
        run.table.gone("a")
        if come_back == "ask":
            run.ask("a", 0)
        else:
            run.bring("a", (1, 2), version=3)
        run.close(1)
        assert run.table.covered == {"a": {0: Ranges([(0, 1)])}}, come_back
        assert run.close(2, fragment=1) == [UnitsDone("train", "a", 2, ((0, 1),))]


def test_who_is_here_says_how_fast_the_data_goes() -> None:
    run = Run(samples=10_000)
    for name, pace in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        run.ask(name, 1, pace=pace, live=("a", "b", "c"))
    assert run.table.pace({"a", "b"}, 0.0) < run.table.pace({"a", "b", "c"}, 0.0)
    assert run.table.pace((), 0.0) == 0.0


@pytest.mark.parametrize("use", ["done", "held", "pending", "covered"])
def test_a_dataset_is_in_use_while_anything_of_it_is_left(use: str) -> None:
    table = LeaseTable(make_dataset(), "a")
    assert not table.is_unused({"a"})
    assert table.is_unused({"b"})
    if use == "done":
        table.done = Ranges([(0, 1)])
    elif use == "held":
        table.held = {"b": Ranges([(0, 1)])}
    elif use == "pending":
        table.pending = {(0, 1): {"b": Ranges([(0, 1)])}}
    else:
        table.covered = {"b": {0: Ranges([(0, 1)])}}
    assert not table.is_unused({"b"})


def test_a_lease_up_to_the_mark_needs_no_record_and_one_beyond_it_does() -> None:
    run = Run(epochs=0)
    run.ask("a", 1)
    run.table.to_note = False
    run.ask("a", RESERVE)
    assert run.table.next == run.table.reserved == RESERVE + 1
    assert not run.table.to_note
    run.ask("a", 1)
    assert run.table.to_note
    assert run.table.reserved == 2 * RESERVE + 2


# --- over a restart ---------------------------------------------------------------------------------------------------


def test_everything_but_open_rounds_is_there_after_a_restart() -> None:
    run = Run(fragments=2)
    table = run.table
    table.next, table.reserved, table.repeated, table.done_by = 8, 10, 5, {"a": 2, "b": 3}
    table.free, table.done, table.lost, table.spent = (Ranges([(i, i + 1)]) for i in range(4))
    table.unclaimed = Ranges([(7, 8)])
    table.held = {"a": Ranges([(4, 5)]), "b": Ranges([(5, 6)])}
    table.lapsed = {"a": Ranges([(0, 1)])}
    table.dropped = {"a": Ranges([(4, 5)])}
    table.overtaken = {"b": Ranges([(1, 2)])}
    table.covered = {"a": {1: Ranges([(4, 5)])}, "b": {0: Ranges([(5, 6)])}}
    table.owner = "a"
    resumed = run.restart()
    for name in ("repeated", "done_by", "free", "done", "lost", "spent", "held", "lapsed", "dropped", "overtaken"):
        assert getattr(resumed, name) == getattr(table, name), name
    assert (resumed.covered, resumed.owner, resumed.dataset) == (table.covered, "a", run.dataset)
    assert resumed.unclaimed == Ranges([(7, 10)]), "and what may have been leased since"
    assert (resumed.next, resumed.reserved, resumed.claimable_until) == (10, 10, 30.0)
    assert not resumed.to_note


def test_records_of_earlier_releases_say_nothing_of_owners_and_of_overtaken_places() -> None:
    facts = LeaseTable(make_dataset(), "a").remembered()
    del facts["owner"], facts["overtaken"]
    resumed = LeaseTable.resumed(facts, 0.0)
    assert (resumed.owner, resumed.overtaken) == ("", {})


def test_where_not_every_record_was_written_more_may_have_been_leased() -> None:
    run = Run(epochs=0)
    run.ask("a", 1)
    reserved = run.table.reserved
    facts = run.table.remembered()
    assert LeaseTable.resumed(facts, 0.0).next == reserved
    assert LeaseTable.resumed(facts, 0.0, forgetful=True).next == reserved + RESERVE
    short = Run()
    short.ask("a", 1)
    assert LeaseTable.resumed(short.table.remembered(), 0.0, forgetful=True).next == 10, "there are no more"


def test_units_that_a_forgetful_server_hears_of_are_counted_once() -> None:
    """Of any worker, from the first place on: the table does not know whose they were."""
    run = Run()
    run.ask("a", 3)
    run.restart()
    run.table.gone("a")
    run.bring("b", (0, 2))
    run.bring("c", (1, 3))
    run.close()
    assert run.table.repeated == 3
    run.bring("b", (0, 3), version=2)
    run.close(2)
    assert run.table.repeated == 3, "not again and again"


@pytest.mark.parametrize("again", [True, False])
def test_what_nobody_has_claimed_in_time_joins_the_rest(again: bool) -> None:
    run = Run(again=again)
    run.table.next, run.table.reserved = 4, 6
    run.restart(until=30.0)
    run.table.free = run.table.lost = Ranges([(0, 1)])
    run.now = 29.9
    run.ask("a", 0)
    assert run.table.unclaimed == Ranges([(4, 6)])
    run.now = 30.0
    run.ask("a", 0)
    assert run.table.unclaimed == NONE
    kept, other = (run.table.free, run.table.lost) if again else (run.table.lost, run.table.free)
    assert (kept, other) == (Ranges([(0, 1), (4, 6)]), Ranges([(0, 1)]))


def test_a_resumed_run_takes_back_what_workers_held_that_are_not_expected() -> None:
    leases = Leases()
    for name in "ab":
        leases.lease(lease_of(make_dataset(epochs=0), name, want=2), 0.0, {"a", "b"})
    resumed = Leases()
    resumed.resume(json.loads(json.dumps(leases.remembered())), 30.0, {"a"}, forgetful=True)
    table = resumed.tables["train"]
    assert table.held == {"a": Ranges([(0, 2)])}
    assert table.free == Ranges([(2, 4)])
    assert (table.claimable_until, table.next) == (30.0, leases.tables["train"].reserved + RESERVE)
    plain = Leases()
    plain.resume(leases.remembered(), 30.0, {"a", "b"}, forgetful=False)
    assert plain.tables["train"].next == leases.tables["train"].reserved


# --- all datasets -----------------------------------------------------------------------------------------------------


def test_a_contribution_counts_in_each_dataset_that_it_is_from() -> None:
    leases, datasets = Leases(), [make_dataset(name=name) for name in ("one", "two")]
    for dataset in datasets:
        for name in "ab":
            leases.lease(lease_of(dataset, name, want=2), 0.0, {"a", "b"})
    leases.accept(offer_of("a"), 3, 0.0)
    data = (Trained(dataset="other", places=((0, 1),)), *(Trained(dataset=d.name, places=((0, 2),)) for d in datasets))
    leases.accept(offer_of("a", *data, fragment=1), 3, 0.0)
    leases.accept(offer_of("b", Trained(dataset="two", places=((2, 4),)), fragment=1), 3, 0.0)
    assert [table.pending for table in leases.tables.values()] == [
        {(1, 3): {"a": Ranges([(0, 2)])}},
        {(1, 3): {"a": Ranges([(0, 2)]), "b": Ranges([(2, 4)])}},
    ]
    assert leases.closed(0, 3, ["a"], 2) == []
    assert leases.closed(1, 3, iter(["a"]), 2) == [], "the other fragment has not got b's"
    assert leases.tables["one"].spent == leases.tables["two"].spent == Ranges([(0, 2)])
    assert leases.tables["two"].covered == {"b": {1: Ranges([(2, 4)])}}
    leases.accept(offer_of("b", Trained(dataset="two", places=((2, 4),))), 4, 0.0)
    assert leases.closed(0, 4, [], 2) == [UnitsDone("two", "b", 4, ((2, 4),))]
    assert leases.gone("b") == [UnitsReturned("one", "b", ((2, 4),), again=True)]


def test_a_new_start_of_a_worker_counts_its_requests_from_one_and_the_same_start_does_not() -> None:
    leases = Leases()
    leases.joined("a", "first")
    leases.lease(lease_of(make_dataset(), number=5), 0.0, {"a"})
    leases.joined("b", "another")
    leases.joined("a", "first")
    with pytest.raises(Superseded):
        leases.lease(lease_of(make_dataset(), number=4), 0.0, {"a"})
    leases.joined("a", "second")
    leases.joined("b", "another")
    leases.lease(lease_of(make_dataset(), number=1, holds=((0, 1),)), 0.0, {"a"})
    leases.joined("a", "second")
    with pytest.raises(Superseded):
        leases.lease(lease_of(make_dataset(), number=0), 0.0, {"a"})


def test_a_note_is_taken_once() -> None:
    leases = Leases()
    assert not leases.take_note()
    leases.lease(lease_of(make_dataset(name="one"), want=0), 0.0, {"a"})
    assert leases.take_note(), "there is a new dataset"
    assert not leases.take_note()
    leases.lease(lease_of(make_dataset(name="two"), want=0), 0.0, {"a"})
    assert leases.take_note()
    leases.lease(lease_of(make_dataset(name="one"), number=2, want=0), 0.0, {"a"})
    assert not leases.take_note()


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_dataset_has_as_many_units_as_numbers_are_exact_and_no_more(epochs: int) -> None:
    leases = Leases()
    whole = make_dataset(samples=NO_END, unit_samples=1, epochs=epochs)
    assert leases.lease(lease_of(whole), 0.0, {"a"}).granted == ((0, 1),)
    with pytest.raises(BadRequest, match="too many units"):
        leases.lease(lease_of(make_dataset(name="more", samples=NO_END + 1, unit_samples=1)), 0.0, {"a"})
    with pytest.raises(BadRequest, match="too many units"):
        leases.lease(lease_of(make_dataset(name="more", samples=NO_END // 2, unit_samples=1, epochs=3)), 0.0, {"a"})


def test_one_way_leases_need_records_and_others_do_not() -> None:
    leases = Leases()
    assert leases.is_durable
    assert leases.lease(lease_of(make_dataset(name="once", again=False)), 0.0, {"a"}).granted
    leases.is_durable = False
    assert leases.lease(lease_of(make_dataset(name="again")), 0.0, {"a"}).granted
    with pytest.raises(BadRequest, match="durability round"):
        leases.lease(lease_of(make_dataset(name="once more", again=False)), 0.0, {"a"})


def test_who_forgets_a_dataset_is_told_which_there_are() -> None:
    leases = Leases()
    with pytest.raises(BadRequest) as none:
        leases.forget("train")
    assert none.value.hint == "it leases: none"
    for name in ("two", "one"):
        leases.lease(lease_of(make_dataset(name=name)), 0.0, {"a"})
    with pytest.raises(BadRequest) as refusal:
        leases.forget("train")
    assert refusal.value.hint == "it leases: one, two"


# --- what two workers were leased -------------------------------------------------------------------------------------


def taken_over(fragments: int = 1, units: int = 4) -> Run:
    """The worker a has its units back too late: b was leased them meanwhile, and one more."""
    run = Run(fragments)
    run.table.repeated = 10
    run.ask("a", units - 1)
    run.table.gone("a")
    assert run.ask("b", units).granted == ((0, units),)
    return run


def test_what_another_has_finished_counts_once_more_when_it_is_brought() -> None:
    run = taken_over(units=5)
    run.bring("a", (0, 4), version=1)
    run.bring("b", (0, 2), version=2)
    run.close(1)
    assert run.table.held == {"b": Ranges([(4, 5)])}
    assert run.table.overtaken == {"b": Ranges([(0, 4)])}
    run.close(2)
    assert run.table.repeated == 12
    assert run.table.overtaken == {"b": Ranges([(2, 4)])}
    run.bring("b", (0, 3), version=3)
    assert run.table.overtaken == {"b": Ranges([(3, 4)])}
    run.close(3)
    assert run.table.repeated == 13, "the first two were counted before"
    assert run.table.done_by == {"a": 4}


def test_what_another_has_finished_is_looked_at_in_one_fragment_alone() -> None:
    run = taken_over(fragments=2)
    for fragment in (0, 1):
        run.bring("a", (0, 3), version=1, fragment=fragment)
        run.close(1, fragment=fragment)
    assert run.table.overtaken == {"b": Ranges([(0, 3)])}
    run.bring("b", (0, 3), version=2, fragment=1)
    run.close(2, fragment=1)
    assert (run.table.repeated, run.table.overtaken) == (10, {"b": Ranges([(0, 3)])})
    run.bring("b", (0, 3), version=2)
    run.close(2)
    assert (run.table.repeated, run.table.overtaken) == (13, {})


def test_what_another_has_in_part_of_the_model_is_repeated_when_this_one_is_done() -> None:
    run = taken_over(fragments=2)
    run.bring("a", (0, 3), fragment=1)
    run.bring("b", (0, 1), fragment=1)
    run.close(fragment=1)
    run.bring("a", (0, 2), version=2)
    run.close(2)
    assert run.table.repeated == 11, "place 0 alone was in the model twice"
    assert run.table.overtaken == {"b": Ranges([(1, 2)])}
    assert run.table.held == {"b": Ranges([(2, 4)])}
    run.bring("a", (2, 3), version=3)
    run.close(3)
    assert run.table.overtaken == {"b": Ranges([(1, 3)])}
    assert run.table.held == {"b": Ranges([(3, 4)])}
    assert (run.table.repeated, run.table.covered) == (11, {})


# --- what is under way ------------------------------------------------------------------------------------------------


def test_a_worker_need_not_train_what_some_fragments_have() -> None:
    run = Run(fragments=3)
    run.ask("a", 4)
    for fragment, place in enumerate((0, 2)):
        run.bring("a", (place, place + 1), fragment=fragment)
        run.close(fragment=fragment)
    assert run.ask("a", 0).void == ((0, 1), (2, 3))
    assert run.table.held == {"a": Ranges([(0, 4)])}


def test_steps_that_are_in_one_fragment_and_given_up_in_another_are_spent() -> None:
    run = Run(fragments=2)
    run.ask("a", 2)
    run.bring("a", (0, 2))
    run.close()
    run.ask("a", 0, dropped=((0, 1),))
    assert run.table.spent == Ranges([(0, 1)])
    assert run.table.covered == {"a": {0: Ranges([(1, 2)])}}
    assert run.table.held == {"a": Ranges([(1, 2)])}


def test_of_a_worker_that_is_gone_a_round_that_closes_makes_its_units_free_and_repeated() -> None:
    run = Run(fragments=2)
    run.table.repeated = 5
    run.ask("a", 2)
    run.bring("a", (0, 1))
    run.table.gone("a")
    run.close()
    assert (run.table.free, run.table.held, run.table.covered) == (Ranges([(0, 2)]), {}, {})
    assert run.table.repeated == 6
    assert run.table.lapsed == {"a": Ranges([(0, 2)])}


@pytest.mark.parametrize("come_back", ["ask", "bring"])
def test_a_worker_that_is_back_in_time_keeps_its_units(come_back: str) -> None:
    run = Run(fragments=2)
    run.ask("a", 2)
    run.bring("a", (0, 1))
    run.table.gone("a")
    if come_back == "ask":
        run.ask("a", 0)
    else:
        run.bring("a", (1, 2), version=2)
    run.close()
    assert run.table.covered == {"a": {0: Ranges([(0, 1)])}}
    assert run.table.repeated == 0


def test_after_a_restart_a_contribution_claims_its_units() -> None:
    run = Run()
    run.table.next, run.table.reserved = 4, 7
    run.restart()
    run.bring("a", (4, 5))
    assert run.table.held == {"a": Ranges([(4, 5)])}
    assert run.table.unclaimed == Ranges([(5, 7)])


def test_one_way_a_worker_claims_what_was_lost_and_what_nobody_has_claimed() -> None:
    run = Run(again=False)
    run.ask("a", 2)
    run.table.gone("a")
    run.table.next, run.table.reserved = 4, 7
    run.restart()
    run.ask("a", 0, holds=((0, 1), (4, 5)))
    assert run.table.held == {"a": Ranges([(0, 1), (4, 5)])}


def test_data_is_not_over_while_something_may_still_come_back() -> None:
    run = Run()
    run.table.next = run.table.reserved = run.table.end
    run.table.free, run.table.unclaimed, run.table.claimable_until = Ranges([(0, 1)]), Ranges([(1, 2)]), 99.0
    assert run.ask("a", 0).state == "more"


def test_all_epochs_are_leased() -> None:
    run = Run(epochs=3)
    assert run.ask("a", 100).granted == ((0, 30),)


# --- speeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paces", [(0.25,), (0.25, 0.25), (4.0,)])
def test_a_worker_of_unknown_speed_is_taken_to_be_as_fast_as_the_others(paces: tuple[float, ...]) -> None:
    units = FEW  # which each of them may hold at once
    run = Run(samples=units, unit_samples=1)
    names = tuple("abc"[: len(paces)])
    for name, pace in zip(names, paces, strict=True):
        run.ask(name, 0, pace=pace, live=names)
    granted = Ranges(run.ask("new", units, live=names).granted)
    assert granted.total == int(units / (len(paces) + 1) + 0.5)


def test_a_worker_that_is_gone_has_no_speed() -> None:
    run = Run()
    run.ask("a", 1, pace=2.0)
    assert run.table.pace({"a"}, 0.0) > 0.0
    run.table.gone("a")
    assert run.table.pace({"a"}, 0.0) == 0.0


# --- the end of an epoch ----------------------------------------------------------------------------------------------


def hoard(units: int) -> Run:
    """The worker a has asked for all the units of an epoch while it was alone."""
    run = Run(samples=units, unit_samples=1)
    assert run.ask("a", units).granted == ((0, units),)
    run.ask("a", 0, untrained=units)
    return run


@pytest.mark.parametrize("excess", [1, 8])
def test_what_a_worker_holds_beyond_its_part_goes_to_one_that_has_none(excess: int) -> None:
    run = hoard(FEW + excess)
    assert run.ask("b", FEW, live=("a",)).granted == ((FEW, FEW + excess),)
    assert run.table.held == {"a": Ranges([(0, FEW)]), "b": Ranges([(FEW, FEW + excess)])}


def test_what_a_worker_has_sent_is_not_taken_from_it() -> None:
    run = hoard(2 * FEW)
    run.bring("a", (2 * FEW - 2, 2 * FEW))
    run.ask("b", FEW, live=("a",))
    assert run.table.held["a"] == Ranges([(0, FEW), (2 * FEW - 2, 2 * FEW)])
    assert run.table.held["b"] | run.table.free == Ranges([(FEW, 2 * FEW - 2)])


def test_a_worker_that_asks_for_more_than_there_is_keeps_what_it_has() -> None:
    run = hoard(2 * FEW)
    run.ask("b", 0, live=("a",))
    assert run.ask("a", 1, live=("b",), untrained=2 * FEW).granted == ()
    assert run.table.held == {"a": Ranges([(0, 2 * FEW)])}


def test_steps_that_are_dropped_do_not_wait_for_rounds_of_others() -> None:
    run = Run()
    run.ask("a", 1)
    run.ask("b", 1)
    run.bring("b", (1, 2))
    run.ask("a", 0, dropped=((0, 1),))
    assert run.table.spent == Ranges([(0, 1)])


def test_what_was_counted_twice_in_part_is_not_counted_by_the_other_fragment_again() -> None:
    run = taken_over(fragments=2)
    for name in "ab":
        run.bring(name, (0, 2), fragment=1)
    run.close(fragment=1)
    run.bring("b", (0, 2), version=4)
    for version in (2, 3):
        run.bring("a", (version - 2, version - 1), version=version)
        run.close(version)
    run.close(4)
    assert (run.table.repeated, run.table.covered) == (12, {})
