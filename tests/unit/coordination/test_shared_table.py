"""The lease table that all members hold, number by number: its answers, its decisions, and what it is like on paper."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outerstep.coordination.leases import ASK_AGAIN_S, NO_END
from outerstep.coordination.shared_leases import (
    LEAD_TURNS,
    MOST_OPENED,
    MOST_SAID,
    SharedLeases,
    SharedTable,
    covering,
    shortened,
    terms_of,
)
from outerstep.coordination.worker.units import LeaseRequest
from outerstep.digest import data_hash
from outerstep.errors import BadRequest
from outerstep.events import UnitsDone, UnitsReturned
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, LeaseAnswer, LeaseStatement, Places
from unit.coordination.test_shared_leases import UNITS, brings, held, made, word


def request(leases: SharedLeases, holds: Places) -> LeaseRequest:
    dataset = leases.tables["train"].dataset
    return LeaseRequest(dataset, 1, 1, holds=holds, dropped=(), untrained=0, waits=False, pace=1.0)


class TestAnswer:
    def test_a_member_gets_what_the_table_holds_for_it_and_loses_what_the_table_does_not(self) -> None:
        leases = made()
        leases.decide({"a": "1", "b": "1"}, {}, {})
        mine = tuple(held(leases, "a"))
        assert leases.answer("a", request(leases, ())) == LeaseAnswer(state="more", granted=mine)
        theirs = tuple(held(leases, "b"))
        found = leases.answer("a", request(leases, theirs))
        assert (found.granted, found.void) == (mine, theirs)

    def test_what_is_in_an_open_round_is_not_granted_again(self) -> None:
        leases = made()
        leases.decide({"a": "1"}, {}, {})
        first = tuple(held(leases, "a").first(5))
        leases.decide({"a": "1"}, {"a": word(leases, "a")}, {"a": brings(first)}, (0, 1), fragments=2)
        assert leases.answer("a", request(leases, ())).granted == tuple(Ranges([(0, UNITS)]) - Ranges(first))

    def test_it_is_over_when_nothing_is_granted_or_free_or_to_come(self) -> None:
        leases = made()
        leases.decide({"a": "1"}, {}, {})
        over = LeaseAnswer(state="over", granted=(), void=(), retry_after_s=0.0)
        assert leases.answer("a", request(leases, tuple(held(leases, "a")))) == over

    def test_it_asks_again_where_an_epoch_is_to_come(self) -> None:
        leases = made(epochs=2)
        leases.decide({"a": "1"}, {}, {})
        answer = leases.answer("a", request(leases, tuple(held(leases, "a"))))
        assert answer == LeaseAnswer(state="more", granted=(), void=(), retry_after_s=ASK_AGAIN_S)

    def test_it_asks_again_where_something_is_free(self) -> None:
        leases = made()
        leases.tables["train"].next = UNITS
        leases.tables["train"].free = Ranges([(3, 4)])
        assert leases.answer("a", request(leases, ())).state == "more"
        leases.tables["train"].free = NONE
        assert leases.answer("a", request(leases, ())).state == "over"


class TestDeciding:
    def test_decisions_are_counted_one_by_one(self) -> None:
        leases = made()
        assert leases.turn == 0
        for turn in (1, 2, 3):
            leases.decide({"a": "1"}, {}, {})
            assert leases.turn == turn
            assert leases.kept["turn"] == turn

    def test_everything_that_came_of_it_is_told_in_order(self) -> None:
        leases = made()
        leases.decide(dict.fromkeys("abc", "1"), {}, {})
        first = tuple(held(leases, "a").first(2))
        told = leases.decide({"a": "1"}, {"a": word(leases, "a")}, {"a": brings(first)}, (0, 1))
        assert [type(event) for event in told] == [UnitsReturned, UnitsReturned, UnitsDone]
        assert [event.worker for event in told[:2]] == ["b", "c"]  # type: ignore[attr-defined]

    def test_a_new_start_that_holds_nothing_gives_back_what_the_last_one_held(self) -> None:
        leases = made()
        leases.decide({"a": "1", "b": "1"}, {}, {})
        told = leases.decide({"a": "2", "b": "2"}, {}, {})
        assert [event.worker for event in told] == ["a", "b"]  # type: ignore[attr-defined]
        assert leases.decide({"a": "2", "b": "2"}, {}, {}) == [], "the same start again"

    def test_one_that_resumes_with_what_it_held_keeps_it(self) -> None:
        leases = made()
        leases.decide({"a": "1", "b": "1"}, {}, {})
        mine = held(leases, "a")
        said = {name: word(leases, name) for name in "ab"}
        assert leases.decide({"a": "2", "b": "1"}, said, {}) == []
        assert held(leases, "a") == mine

    def test_an_epoch_is_opened_before_somebody_runs_out_of_the_last(self) -> None:
        leases = made(samples=10, epochs=5)
        leases.decide({"a": "1"}, {}, {})
        assert (leases.tables["train"].next, held(leases, "a")) == (10, Ranges([(0, 10)]))
        leases.decide({"a": "1"}, {"a": word(leases, "a", pace=25.0 / LEAD_TURNS)}, {})
        assert (leases.tables["train"].next, held(leases, "a")) == (30, Ranges([(0, 30)]))

    def test_so_many_epochs_are_opened_at_one_decision_and_none_after_the_last(self) -> None:
        leases = made(samples=1, epochs=40)
        leases.decide({"a": "1"}, {}, {})
        for opened in (1 + MOST_OPENED, 1 + 2 * MOST_OPENED, 40, 40):
            leases.decide({"a": "1"}, {"a": word(leases, "a", pace=1000.0)}, {})
            assert leases.tables["train"].next == opened

    def test_what_is_left_over_goes_to_the_one_that_has_least_of_its_part(self) -> None:
        leases = made(samples=3, unit_samples=1)
        leases.decide(dict.fromkeys("ab", "1"), {}, {})
        assert sorted([held(leases, "a").total, held(leases, "b").total]) == [1, 2]


class TestProgress:
    def test_it_is_that_of_each_table_without_a_clock(self) -> None:
        leases = made()
        leases.decide({"a": "1"}, {"a": ()}, {})
        leases.decide({"a": "1"}, {"a": word(leases, "a")}, {"a": brings(tuple(held(leases, "a").first(7)))}, (0, 1))
        (progress,) = leases.progress()
        assert progress == {**leases.tables["train"].progress((), 0.0), "units_per_second": 0.0}
        assert (progress["done"], progress["leased_to"]) == (7, {"a": UNITS - 7})


def played() -> SharedLeases:
    """With something in each of its memories: b says that it has trained more than anybody believes."""
    leases, members = made(epochs=3), {"a": "1", "b": "1"}
    leases.decide(members, {}, {})
    brought = {name: brings(tuple(held(leases, name).first(units))) for name, units in (("a", 3), ("b", 55))}
    leases.decide(members, {name: word(leases, name) for name in members}, brought, (0, 1), may_lie=True)
    leases.tables["train"]._counted = {"a": Ranges([(0, 2)])}  # another brought them in another fragment
    leases._keep()
    return leases


class TestOnPaper:
    def test_everything_is_the_same_after_it_was_written_and_read(self) -> None:
        leases = played()
        again = SharedLeases.decode(leases.encode())
        one, other = leases.tables["train"], again.tables["train"]
        for memory in ("recent", "finished", "doubted", "_counted", "held", "done"):
            assert getattr(one, memory), f"{memory} is empty, so nothing is shown"
            assert getattr(other, memory) == getattr(one, memory)
        assert other._forgotten == NONE
        assert (again.turn, again._instances) == (leases.turn, leases._instances)
        assert other.shares.remembered() == one.shares.remembered()

    def test_it_is_written_in_one_order(self) -> None:
        leases = played()
        assert leases.digest == data_hash([leases.encode()])
        text = leases.encode().decode()

        def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            assert [name for name, _ in pairs] == sorted(name for name, _ in pairs)
            return dict(pairs)

        assert json.loads(text, object_pairs_hook=check)["turn"] == leases.turn

    def test_at_the_beginning_nobody_is_there_and_nothing_is_given(self) -> None:
        leases = played()
        leases.go_on_from(None)
        assert leases.encode() == made(epochs=3).encode()
        assert (leases.turn, leases._instances, held(leases, "a")) == (0, {}, NONE)

    def test_terms_are_the_whole_of_each_dataset(self) -> None:
        one, other = Dataset(name="b", samples=3, unit_samples=1), Dataset(name="a", samples=4, unit_samples=2)
        assert {name: json.loads(text)["samples"] for name, text in terms_of([one, other]).items()} == {
            "dataset 'a'": 4,
            "dataset 'b'": 3,
        }

    def test_a_table_remembers_who_said_what_it_is(self) -> None:
        dataset = Dataset(name="train", samples=3, unit_samples=1)
        assert (SharedTable(dataset).owner, SharedTable(dataset, "a").owner) == ("", "a")


@pytest.mark.parametrize(
    ("units", "epochs", "fits"),
    [(NO_END, 1, True), (NO_END // 2, 2, True), (NO_END, 0, True), (NO_END // 2 + 1, 2, False), (NO_END, 2, False)],
)
def test_a_dataset_has_no_more_units_than_numbers(units: int, epochs: int, fits: bool) -> None:
    if fits:
        assert made(samples=units, epochs=epochs).tables["train"].dataset.units == units
        return
    with pytest.raises(BadRequest, match="has too many units"):
        made(samples=units, epochs=epochs)


@pytest.mark.parametrize(
    ("places", "most", "cover"),
    [
        (((0, 1), (2, 3), (10, 11)), 2, ((0, 3), (10, 11))),
        (((0, 1), (8, 9), (10, 11)), 2, ((0, 1), (8, 11))),
        (((0, 1), (3, 20), (25, 26)), 2, ((0, 20), (25, 26))),
        (((0, 1), (10, 11), (12, 13)), 2, ((0, 1), (10, 13))),
        (((0, 9), (20, 21), (30, 31), (33, 34)), 3, ((0, 9), (20, 21), (30, 34))),
        (((0, 1), (2, 3)), 1, ((0, 3),)),
        (((0, 1), (2, 3)), 2, ((0, 1), (2, 3))),
        (((0, 1), (2, 3)), 9, ((0, 1), (2, 3))),
    ],
)
def test_the_smallest_gaps_are_filled(places: Places, most: int, cover: Places) -> None:
    assert covering(places, most) == cover


@pytest.mark.parametrize(
    ("statements", "ranges"), [(1, MOST_SAID), (2, MOST_SAID // 2), (MOST_SAID, 1), (MOST_SAID + 9, 1)]
)
def test_all_statements_share_the_ranges_that_an_offer_has_room_for(statements: int, ranges: int) -> None:
    places = tuple((2 * i, 2 * i + 1) for i in range(3 * MOST_SAID))
    said = [LeaseStatement(dataset=f"d{i}", holds=places, spare=places, dropped=places) for i in range(statements)]
    for one in shortened(said):
        assert (len(one.holds), one.spare, one.dropped) == (ranges, places[-ranges:], places[:ranges])
