"""Leases: what a run gives out, takes back, and believes to be in the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outerstep.coordination.leases import HELD_PIECES, MOST_DATASETS_OF_ONE, RESERVE, Leases, LeaseTable
from outerstep.errors import BadRequest, PlanMismatch, Superseded
from outerstep.events import UnitsDone, UnitsReturned
from outerstep.ranges import NONE, Ranges
from outerstep.types import MOST_DATASETS, MOST_WANTED, Dataset, Lease, LeaseAnswer, Offer, Trained


def make_dataset(**changes: Any) -> Dataset:
    return Dataset(**{"name": "train", "samples": 100, "unit_samples": 10, "epochs": 1, **changes})


class Run:
    """Workers that ask one table; each counts its requests."""

    def __init__(self, fragments: int = 1, **changes: Any) -> None:
        self.fragments, self.dataset = fragments, make_dataset(**changes)
        self.table = LeaseTable(self.dataset)
        self.numbers: dict[str, int] = {}
        self.now = 0.0

    def ask(self, worker_id: str, want: int = 1, *, live: tuple[str, ...] = (), **said: Any) -> LeaseAnswer:
        number = self.numbers[worker_id] = self.numbers.get(worker_id, 0) + 1
        message = Lease(
            run_id="run", worker_id=worker_id, incarnation=1, dataset=self.dataset, number=number, want=want, **said
        )
        return self.table.lease(message, self.now, {worker_id, *live})

    def bring(self, worker_id: str, *places: tuple[int, int], version: int = 1, fragment: int = 0) -> None:
        self.table.accept(worker_id, fragment, version, places, self.now)

    def close(self, version: int = 1, *left_out: str, fragment: int = 0) -> list[Any]:
        return self.table.closed(fragment, version, left_out, self.fragments)


def test_what_is_leased_is_nobody_elses() -> None:
    run = Run()
    assert run.ask("a", 3).granted == ((0, 3),)
    assert run.ask("b", 3, live=("a",)).granted == ((3, 6),)
    assert run.table.held == {"a": Ranges([(0, 3)]), "b": Ranges([(3, 6)])}


def test_accepted_is_no_promise_and_a_closed_round_is() -> None:
    run = Run()
    run.ask("a", 3)
    run.bring("a", (0, 2))
    assert run.table.done == NONE
    assert run.close() == [UnitsDone("train", "a", 1, ((0, 2),))]
    assert run.table.done == Ranges([(0, 2)])
    assert run.table.held["a"] == Ranges([(2, 3)])


def test_a_place_is_done_when_every_fragment_has_it() -> None:
    run = Run(fragments=2)
    run.ask("a", 2)
    run.bring("a", (0, 2))
    assert run.close() == []
    run.bring("a", (0, 1), fragment=1)
    [told] = run.close(fragment=1)
    assert told.places == ((0, 1),)
    assert run.table.done == Ranges([(0, 1)])


def test_a_worker_that_is_gone_gives_back_what_no_open_round_holds() -> None:
    run = Run()
    run.ask("a", 4)
    run.bring("a", (0, 1))
    assert run.table.gone("a") == [UnitsReturned("train", "a", ((1, 4),), again=True)]
    assert run.ask("b", 9).granted == ((1, 10),), "the lowest first, and not what may still count"
    run.close()
    assert run.table.done == Ranges([(0, 1)])
    assert run.table.repeated == 0


def test_one_way_nothing_is_leased_twice() -> None:
    run = Run(again=False)
    run.ask("a", 4)
    run.table.gone("a")
    assert run.ask("b", 9).granted == ((4, 10),)
    assert run.table.lost == Ranges([(0, 4)])


def test_a_worker_that_comes_back_goes_on_with_what_nobody_has_taken() -> None:
    run = Run()
    run.ask("a", 4)
    run.table.gone("a")
    run.ask("b", 1)
    answer = run.ask("a", 0, holds=((0, 4),), untrained=4)
    assert answer.void == ((0, 1),), "that is b's now"
    assert run.table.held["a"] == Ranges([(1, 4)])


def test_what_it_brings_after_another_was_leased_it_counts_once_more() -> None:
    run = Run()
    run.ask("a", 1)
    run.table.gone("a")
    run.ask("b", 1)
    run.bring("a", (0, 1))
    run.close()
    assert (run.table.done, run.table.repeated) == (Ranges([(0, 1)]), 0)
    assert run.ask("b", 0, holds=((0, 1),), untrained=1).void == ((0, 1),), "b need not train it"
    run.bring("b", (0, 1), version=2)
    run.close(2)
    assert run.table.repeated == 1, "it had"


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_two_bring_to_the_same_round_is_in_the_model_once_more(first: str) -> None:
    """Whoever of them is taken first: one had it, was away, and brings it when another has been leased it."""
    run = Run(fragments=2)
    run.ask(first)
    run.table.gone(first)
    second = "b" if first == "a" else "a"
    assert run.ask(second).granted == ((0, 1),)
    for version, fragment in enumerate((1, 0), 1):
        for name in (first, second):
            run.bring(name, (0, 1), version=version, fragment=fragment)
        run.close(version, fragment=fragment)
    assert (run.table.done, run.table.repeated) == (Ranges([(0, 1)]), 1)
    assert not run.table.covered


def test_what_another_has_finished_meanwhile_is_counted_once_and_not_by_each_fragment() -> None:
    run = Run(fragments=2)
    run.ask("a")
    run.table.gone("a")
    run.ask("b")
    run.bring("b", (0, 1), fragment=1)
    run.close(fragment=1)
    for name in "ba":
        run.bring(name, (0, 1))
    run.close()
    assert (run.table.done, run.table.repeated) == (Ranges([(0, 1)]), 1)
    run.bring("a", (0, 1), version=2, fragment=1)
    run.close(2, fragment=1)
    assert run.table.repeated == 1
    assert not run.table.covered


def test_an_answer_that_got_lost_is_asked_for_again() -> None:
    run = Run()
    assert run.ask("a", 3).granted == ((0, 3),)
    assert run.ask("a", 3).granted == ((0, 3),), "another request: what it does not hold went back"
    assert run.table.held["a"] == Ranges([(0, 3)])


def test_a_request_that_is_repeated_gets_its_answer_and_an_older_one_none() -> None:
    run = Run()
    first = Lease(run_id="run", worker_id="a", incarnation=1, dataset=run.dataset, number=1, want=2)
    answer = run.table.lease(first, 0.0, {"a"})
    assert run.table.lease(first, 0.0, {"a"}) == answer
    run.numbers["a"] = 1
    run.ask("a", 1, holds=((0, 2),))
    with pytest.raises(Superseded):
        run.table.lease(first, 0.0, {"a"})
    run.table.started_again("a")
    assert run.table.lease(first, 0.0, {"a"}).state == "more", "a new start counts from one"


@pytest.mark.parametrize(("policy", "free", "spent"), [("spent", 0, 2), ("again", 2, 0)])
def test_what_a_round_leaves_out_is_spent_or_trained_again(policy: str, free: int, spent: int) -> None:
    run = Run(dropped=policy)
    run.ask("a", 2)
    run.bring("a", (0, 2))
    run.close(1, "a")
    assert (run.table.free.total, run.table.spent.total) == (free, spent)


@pytest.mark.parametrize(("policy", "free", "spent"), [("spent", 0, 1), ("again", 1, 0)])
def test_what_its_worker_gives_up_is_spent_or_trained_again(policy: str, free: int, spent: int) -> None:
    run = Run(dropped=policy)
    run.ask("a", 2)
    run.ask("a", 0, holds=((1, 2),), dropped=((0, 1),), untrained=1)
    assert (run.table.free.total, run.table.spent.total) == (free, spent)


def test_what_is_given_up_in_one_fragment_and_under_way_in_another_waits_for_that_round() -> None:
    run = Run(fragments=2, dropped="again")
    run.ask("a", 1)
    run.bring("a", (0, 1))
    run.ask("a", 0, dropped=((0, 1),))
    assert run.table.free == NONE
    run.close()
    assert run.table.free == Ranges([(0, 1)])
    assert run.table.repeated == 1, "one fragment holds it already"


def test_nobody_brings_what_it_was_never_leased() -> None:
    run = Run()
    run.ask("a", 2)
    run.ask("liar", 1, live=("a",))
    run.bring("liar", (0, 100))
    run.close()
    assert run.table.done == Ranges([(2, 3)])
    assert run.table.held["a"] == Ranges([(0, 2)])


def test_fast_workers_get_more_and_nobody_more_than_its_share() -> None:
    run = Run(samples=1000)  # 100 units
    for worker_id, pace in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        run.ask(worker_id, 1, live=("a", "b", "c"), pace=pace)
    shares = {
        name: run.ask(name, 1000, live=("a", "b", "c"), holds=tuple(run.table.held[name]), untrained=1, pace=pace)
        for name, pace in (("a", 1.0), ("b", 2.0), ("c", 4.0))
    }
    held = {name: run.table.held[name].total for name in shares}
    assert held == {"a": 14, "b": 29, "c": 57}


def test_the_last_units_go_to_whoever_is_idle_and_then_it_is_over() -> None:
    run = Run(samples=20)  # two units
    run.ask("slow", 1, pace=0.001)
    assert run.ask("fast", 5, live=("slow",), pace=10.0).granted == ((1, 2),)
    again = run.ask("slow", 5, live=("fast",), holds=((0, 1),), untrained=1, pace=0.001)
    assert (again.granted, again.state) == ((), "over")
    run.table.gone("fast")
    again = run.ask("slow", 5, holds=((0, 1),), untrained=1, pace=0.001)
    assert (again.granted, again.state) == (((1, 2),), "more"), "what was given back"


def test_a_worker_that_waits_to_fill_a_batch_gets_one() -> None:
    run = Run(samples=1000)
    for name in ("a", "b", "c"):
        run.ask(name, 1, live=("a", "b", "c"), pace=1.0)
    run.table.next = 99  # one is left, and nobody's share of it is half
    said = {"live": ("a", "b", "c"), "untrained": 1, "pace": 1.0}
    assert run.ask("a", 1, holds=((0, 1),), **said).granted == ()
    assert run.ask("b", 1, holds=((1, 2),), waits=True, **said).granted == ((99, 100),)


def test_a_dataset_without_end_never_ends() -> None:
    run = Run(epochs=0)
    assert run.ask("a", 1000).granted == ((0, 1000),)
    assert run.ask("b", 5).granted == ((1000, 1005),)


def test_a_worker_with_many_ranges_gets_no_more_of_them() -> None:
    run = Run(samples=100_000, epochs=0)
    run.ask("a", 10_000)
    holes = tuple((2 * i, 2 * i + 1) for i in range(HELD_PIECES))
    answer = run.ask("a", 100, holds=holes)
    assert answer.granted == ()
    assert len(run.ask("b", 10_000).granted) <= 17


# --- lies -------------------------------------------------------------------------------------------------------------


def greedy(run: Run, pace: float, *, live: tuple[str, ...] = ("a", "b"), times: int = 30) -> int:
    """How much somebody gets that says again and again that it is fast, and has trained all."""
    for _ in range(times):
        held = tuple(run.table.held.get("liar", NONE))
        run.ask("liar", MOST_WANTED, live=live, holds=held, pace=pace, untrained=0, waits=True)
    return run.table.held["liar"].total


def test_a_claimed_pace_counts_up_to_a_few_times_the_others() -> None:
    run = Run(samples=10_000)  # 1000 units
    for name in ("a", "b"):
        run.ask(name, 1, live=("a", "b"), pace=1.0)
    assert greedy(run, 1e9) <= 160, "forty seconds at four units"
    granted = run.ask("a", 1000, live=("b", "liar"), holds=tuple(run.table.held["a"]), untrained=1, pace=1.0).granted
    assert Ranges(granted).total >= 20, "others have theirs"


def test_who_says_that_all_is_trained_and_brings_nothing_gets_no_more() -> None:
    run = Run(samples=10_000)
    for name in ("a", "b"):
        run.ask(name, 4, live=("a", "b"), pace=1.0)
    run.now = 10.0
    for version, name in enumerate(("a", "b"), 1):
        run.bring(name, *run.table.held[name], version=version)
        run.close(version)
    assert greedy(run, 1.0) <= 1000 // 12 + 10, "a part of an epoch, and what it can have trained meanwhile"
    run.now = 11.0
    for name in ("a", "b"):
        run.ask(name, 1, live=("a", "b", "liar"), pace=1.0, waits=True)
    before = run.table.held["liar"].total
    assert greedy(run, 1.0) - before <= 2


def test_a_fast_worker_that_brings_what_it_has_trained_is_believed() -> None:
    run = Run(samples=100_000)  # ten thousand units
    run.ask("slow", 1, live=("fast",), pace=1.0)
    run.ask("fast", 1, live=("slow",), pace=100.0)
    assert run.table.shares.among({"slow", "fast"}, run.now).pace("fast") == 4.0
    for version in range(1, 5):
        held = tuple(run.table.held.get("fast", NONE))
        run.ask("fast", 2000, live=("slow",), holds=held, untrained=0, pace=100.0, waits=True)
        run.now += 1.0
        run.bring("fast", *run.table.held["fast"].first(100), version=version)
        run.close(version)
    assert run.table.shares.among({"slow", "fast"}, run.now).pace("fast") == 100.0


def test_a_slow_worker_with_long_rounds_is_not_starved() -> None:
    run = Run(samples=100_000)
    trained = {"a": 0, "b": 0, "slow": 0}
    for second in range(1, 400):
        run.now = float(second)
        for name, pace, every_s in (("a", 10.0, 10), ("b", 10.0, 10), ("slow", 1.0, 100)):
            held = run.table.held.get(name, NONE)
            untrained = max(held.total - trained[name], 0)
            said = {"holds": tuple(held), "untrained": untrained, "pace": pace, "waits": not untrained}
            run.ask(name, 20 * int(pace), live=tuple(trained), **said)
            held = run.table.held[name]
            assert held.total - trained[name] >= 1, f"{name} has nothing to train at {second} s"
            trained[name] = min(trained[name] + int(pace), held.total)
            if second % every_s == 0:
                run.bring(name, *held.first(trained[name]), version=second)
                run.close(second)
                trained[name] = 0


def test_what_a_lone_worker_took_too_much_of_goes_to_those_that_come_later() -> None:
    run = Run(samples=10_000)
    run.ask("liar", 1000, pace=1e9)
    assert run.table.held["liar"].total == 1000
    answer = run.ask("a", 20, live=("liar",), pace=0.0)
    assert answer.granted, "the others' loops do not end"
    said = run.ask("liar", 0, live=("a",), holds=((0, 1000),), untrained=1000, pace=1e9)
    assert Ranges(said.void) & Ranges(answer.granted)


def test_one_way_nothing_is_taken_from_somebody_that_has_too_much() -> None:
    run = Run(samples=10_000, again=False)
    run.ask("liar", 1000, pace=1e9)
    assert run.ask("a", 20, live=("liar",)).granted == ()
    assert run.table.held["liar"].total == 1000


# --- over a restart ---------------------------------------------------------------------------------------------------


def restarted(run: Run, *, until: float = 30.0, **how: Any) -> Run:
    resumed = Run(run.fragments)
    resumed.dataset = run.dataset
    resumed.table = LeaseTable.resumed(run.table.remembered(), until, **how)
    return resumed


def test_what_is_remembered_is_the_same_after_json() -> None:
    run = Run(fragments=2)
    run.ask("a", 4)
    run.bring("a", (0, 2))
    run.close()
    run.table.gone("a")
    run.ask("b", 1)
    remembered = run.table.remembered()
    assert json.loads(json.dumps(remembered)) == remembered
    again = restarted(run).table
    again.unclaimed, again.next = run.table.unclaimed, run.table.next  # what a restart adds
    again.reserved = run.table.reserved
    assert again.remembered() == remembered


def test_what_is_leased_below_the_mark_needs_no_record_and_the_rest_does() -> None:
    run = Run(epochs=0)
    run.ask("a", 1)
    assert run.table.to_note, "the mark was put"
    run.table.to_note = False
    run.ask("a", RESERVE // 2, holds=((0, 1),))
    assert not run.table.to_note
    run.table.gone("a")
    run.ask("b", 1)
    assert run.table.to_note, "it had been another's"


def test_after_a_restart_a_worker_keeps_what_the_record_does_not_know_of() -> None:
    run = Run(epochs=0)
    run.ask("a", 2)
    record = restarted(run)  # as of now
    again = record.ask("a", 1, holds=((0, 2), (5, 9)), untrained=6)
    assert again.void == ()
    assert again.granted == ((RESERVE + 2, RESERVE + 3),), "others may hold what is below"
    assert record.table.held["a"] == Ranges([(0, 2), (5, 9), (RESERVE + 2, RESERVE + 3)])


def test_after_a_restart_nobody_holds_what_lies_beyond_the_mark() -> None:
    run = Run(epochs=0)
    run.ask("a", 2)
    record = restarted(run)
    again = record.ask("liar", 1, holds=((10**9, 10**9 + 5),))
    assert again.void == ((10**9, 10**9 + 5),)
    assert record.table.next == RESERVE + 3, "the mark, and the one that it got"


def test_what_nobody_comes_for_is_free_in_the_end() -> None:
    run = Run(epochs=0)
    run.ask("a", 2)
    record = restarted(run)
    record.now = 31.0
    assert record.ask("b", 1).granted == ((2, 3),)


def test_one_way_every_lease_is_recorded() -> None:
    run = Run(again=False)
    run.ask("a", 1)
    run.table.to_note = False
    run.ask("a", 1, holds=((0, 1),), untrained=0)
    assert run.table.to_note
    assert restarted(run).table.unclaimed == NONE


def test_a_later_start_does_not_draw_what_an_earlier_one_has_sent() -> None:
    run = Run()
    run.ask("a", 3)
    run.bring("a", (0, 1))
    run.table.started_again("a")
    run.numbers["a"] = 0
    answer = run.ask("a", 0, holds=((0, 3),), untrained=3)
    assert answer.void == ((0, 1),)
    assert run.table.held["a"] == Ranges([(0, 3)]), "it is a's still, until the round has closed"


# --- all datasets -----------------------------------------------------------------------------------------------------


def lease_of(dataset: Dataset, number: int = 1, worker_id: str = "a") -> Lease:
    return Lease(run_id="run", worker_id=worker_id, incarnation=1, dataset=dataset, number=number, want=1)


def test_a_worker_that_means_another_dataset_by_the_same_name_is_refused_showing_both() -> None:
    leases = Leases()
    leases.lease(lease_of(make_dataset()), 0.0, {"a"})
    with pytest.raises(PlanMismatch, match="samples is 100 in this run, got 101"):
        leases.lease(lease_of(make_dataset(samples=101), 2), 0.0, {"a"})


def test_a_run_leases_few_datasets() -> None:
    leases = Leases()
    for i in range(MOST_DATASETS):
        leases.lease(lease_of(make_dataset(name=f"d{i}"), worker_id="ab"[i % 2]), 0.0, {"a", "b"})
    with pytest.raises(BadRequest, match="at most 16"):
        leases.lease(lease_of(make_dataset(name="more"), worker_id="c"), 0.0, {"a", "b", "c"})


def test_one_worker_cannot_take_all_names() -> None:
    leases = Leases()
    for i in range(MOST_DATASETS_OF_ONE):
        leases.lease(lease_of(make_dataset(name=f"d{i}"), worker_id="liar"), 0.0, {"liar"})
    with pytest.raises(BadRequest, match="was the first to ask for 8"):
        leases.lease(lease_of(make_dataset(name="more"), worker_id="liar"), 0.0, {"liar"})
    leases.lease(lease_of(make_dataset(name="more")), 0.0, {"liar", "a"})
    resumed = Leases()
    resumed.resume(leases.remembered(), 0.0, {"liar", "a"}, forgetful=False)
    with pytest.raises(BadRequest, match="was the first to ask for 8"):
        resumed.lease(lease_of(make_dataset(name="most"), 2, "liar"), 0.0, {"liar"})


def test_names_that_nobody_uses_make_room() -> None:
    leases = Leases()
    for i in range(MOST_DATASETS):
        leases.lease(lease_of(make_dataset(name=f"d{i}"), worker_id=f"liar{i % 2}"), 0.0, {"liar0", "liar1"})
    leases.gone("liar0")
    with pytest.raises(BadRequest, match="at most 16"):
        leases.lease(lease_of(make_dataset()), 0.0, {"a", "liar0", "liar1"})
    leases.lease(lease_of(make_dataset()), 0.0, {"a", "liar1"})
    assert "d0" not in leases.tables
    assert {"train", "d1"} <= leases.tables.keys()


def test_an_operator_forgets_a_dataset_and_the_next_worker_says_what_it_is() -> None:
    leases = Leases()
    leases.lease(lease_of(make_dataset(samples=1), worker_id="liar"), 0.0, {"liar"})
    with pytest.raises(PlanMismatch):
        leases.lease(lease_of(make_dataset()), 0.0, {"liar", "a"})
    assert leases.forget("train").owner == "liar"
    assert leases.lease(lease_of(make_dataset()), 0.0, {"liar", "a"}).granted == ((0, 1),)
    with pytest.raises(BadRequest, match="leases no dataset 'other'"):
        leases.forget("other")


def test_one_way_needs_a_server_that_records_each_round() -> None:
    leases = Leases()
    leases.is_durable = False
    with pytest.raises(BadRequest, match="durability round"):
        leases.lease(lease_of(make_dataset(again=False)), 0.0, {"a"})


def test_what_is_brought_of_a_dataset_that_nobody_knows_is_passed_over() -> None:
    offer = Offer(
        run_id="run", worker_id="a", incarnation=1, fragment=0, sequence=1, base_version=0, oldest_base=0, steps=1,
        codec="fp32", size_bytes=8, data=(Trained(dataset="other", places=((0, 5),)),),
    )  # fmt: skip
    leases = Leases()
    leases.accept(offer, 1, 0.0)
    assert leases.closed(0, 1, (), 1) == []


def test_a_million_units_take_little_memory_and_a_lease_little_work() -> None:
    table = LeaseTable(make_dataset(samples=10**6, unit_samples=1))
    for number in range(1, 200):
        message = Lease(
            run_id="run", worker_id=f"w{number % 100}", incarnation=1, dataset=table.dataset, number=number, want=500,
            holds=tuple(table.held.get(f"w{number % 100}", NONE)),
        )  # fmt: skip
        table.lease(message, 0.0, {"w1"})
    assert sum(held.pieces for held in table.held.values()) < 400
    assert len(str(table.remembered())) < 20_000
