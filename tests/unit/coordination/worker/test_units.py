"""The worker's half of leased data: drawn, delivered, trained, settled or given up, and over a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outerstep.coordination.worker.exchange import MemberFields
from outerstep.coordination.worker.machine import Cycle, Progress, Units, Work, WorkerState
from outerstep.coordination.worker.units import (
    LEAD_S,
    LEAST_AHEAD,
    PACE_MEMORY,
    PARTS,
    UNMEASURED,
    Holding,
    LeasedWork,
    LeaseRequest,
    unit_size,
)
from outerstep.errors import ConfigError
from outerstep.ranges import NONE, Ranges
from outerstep.types import MOST_RANGES, MOST_WANTED, Dataset, Lease, LeaseAnswer, Trained


def make_dataset(name: str = "train", **changes: Any) -> Dataset:
    """Ten units of ten samples in an epoch; the last one has five."""
    return Dataset(**{"name": name, "samples": 95, "unit_samples": 10, "epochs": 2, **changes})


class Reader:
    """One worker's leased work, and the fragments that its machine has."""

    def __init__(self, *datasets: Dataset, ranks: int = 1, fragments: int = 1) -> None:
        self.work = LeasedWork(datasets or (make_dataset(),), ranks)
        progress = [Progress(0, Work(), 0) for _ in range(fragments)]
        self.state = WorkerState(Work(), Cycle(0, 10), progress)
        self.now = 0.0
        self.numbers: Units = ()  # of the last step

    def holding(self, name: str = "train") -> Holding:
        return self.work.holdings[name]

    def grant(self, *places: tuple[int, int], name: str = "train", **said: Any) -> None:
        answer = LeaseAnswer(**{"state": "more", "granted": places, **said})
        self.work.answered(self.work.request(name), answer)

    def train(self, samples: int, name: str = "train") -> Units:
        """One step with so many samples."""
        self.work.deliver(name, samples)
        self.now += 1.0
        self.numbers = self.work.stepped(self.now)
        return tuple(Ranges(self.numbers) & Ranges([(0, PARTS)]))

    def part(self, samples: int, name: str = "train") -> Units:
        """Likewise: the numbers of parts of units that do not end with it."""
        self.train(samples, name)
        return tuple(Ranges(self.numbers) - Ranges([(0, PARTS)]))

    def draw(self, count: int, name: str = "train") -> list[int]:
        drawn = [self.work.draw(name) for _ in range(count)]
        return [one[0] for one in drawn if one is not None]

    def count(self, *numbers: tuple[int, int], late: Units = (), fragment: int = 0) -> None:
        """An agreement holds these numbers."""
        progress = self.state.fragments[fragment]
        progress.counted, progress.late_units = Work(units=numbers), late
        self.work.exchanged(self.state)

    def told(self, name: str = "train") -> LeaseRequest:
        return self.work.request(name)


class TestDrawing:
    def test_places_are_drawn_in_order_and_numbered_from_zero(self) -> None:
        reader = Reader()
        reader.grant((3, 5), (7, 8))
        assert [reader.work.draw("train") for _ in range(4)] == [(3, 0), (4, 0), (7, 0), None]
        assert reader.work.describe(((0, 2),)) == (Trained(dataset="train", places=((3, 5),)),)
        assert reader.work.describe(((2, 3),)) == (Trained(dataset="train", places=((7, 8),)),)

    def test_what_is_drawn_is_in_the_queue_no_more(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(2)
        assert (reader.holding().queue, reader.holding().drawn) == (Ranges([(2, 3)]), Ranges([(0, 2)]))
        assert reader.holding().untrained == 3
        assert reader.work.draws

    def test_nothing_is_drawn_before_something_is_leased(self) -> None:
        reader = Reader()
        assert reader.work.draw("train") is None
        assert not reader.work.draws

    def test_an_epoch_is_drawn_to_its_end_and_no_further(self) -> None:
        reader = Reader()
        reader.grant((9, 11))
        assert reader.work.draw("train", epoch=1) is None, "the next place is of the epoch before"
        assert reader.work.draw("train", epoch=0) == (9, 0)
        assert reader.work.draw("train", epoch=0) is None
        assert reader.work.draw("train", epoch=1) == (10, 0)

    def test_numbers_run_on_across_datasets(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((5, 7), name="a")
        reader.grant((1, 3), name="b")
        assert reader.draw(1, "a") + reader.draw(1, "b") + reader.draw(1, "a") + reader.draw(1, "b") == [5, 1, 6, 2]
        assert reader.work.describe(((0, 4),)) == (
            Trained(dataset="a", places=((5, 7),)),
            Trained(dataset="b", places=((1, 3),)),
        )
        assert reader.work.describe(((1, 3),)) == (
            Trained(dataset="a", places=((6, 7),)),
            Trained(dataset="b", places=((1, 2),)),
        )

    def test_two_datasets_of_one_name_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="same name"):
            LeasedWork((make_dataset(), make_dataset()))

    def test_the_last_unit_of_each_epoch_is_shorter(self) -> None:
        dataset = make_dataset()
        assert [unit_size(dataset, place) for place in (0, 8, 9, 10, 19)] == [10, 10, 5, 10, 5]

    def test_each_rank_of_a_group_trains_its_part_of_a_unit(self) -> None:
        reader = Reader(ranks=4)  # of ten samples three at most
        reader.grant((0, 1))
        reader.draw(1)
        assert reader.train(2) == ()
        assert reader.work.deliver("train", 9) == 1
        assert reader.work.stepped(9.0) == ((0, 1),)

    def test_a_rank_follows_what_rank_0_has_drawn(self) -> None:
        reader = Reader(ranks=2)
        reader.holding().is_confirmed = False
        reader.work.follow("train", 4, 2)
        assert reader.holding().drawn == Ranges([(4, 5)])
        assert not reader.holding().queue
        assert reader.train(2) == (), "three of its five are left"
        assert reader.train(1) == ((0, 1),)


class TestDelivering:
    def test_a_unit_is_trained_when_all_its_samples_are_in_steps(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        assert [reader.train(6) for _ in range(5)] == [(), ((0, 1),), (), ((1, 2),), ((2, 3),)]
        assert reader.holding().open == Ranges([(0, 3)])
        assert not reader.holding().drawn
        assert not reader.work.draws

    def test_several_units_may_end_in_one_step(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        assert reader.train(25) == ((0, 2),)
        assert reader.holding().delivered == 5

    def test_a_step_without_samples_trains_nothing(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        reader.draw(1)
        assert reader.work.stepped(1.0) == ()

    def test_no_more_is_delivered_than_was_drawn(self) -> None:
        reader = Reader()
        reader.grant((9, 11))
        reader.draw(1)
        assert reader.work.deliver("train", 4) == 4
        assert reader.work.deliver("train", 4) == 1
        reader.work.stepped(1.0)
        assert reader.work.deliver("train", 4) == 0

    def test_the_units_of_two_datasets_are_trained_in_the_order_in_which_they_were_drawn(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((0, 1), name="a")
        reader.grant((0, 1), name="b")
        reader.draw(1, "a")
        reader.draw(1, "b")
        assert reader.train(10, "b") == (), "that of a comes first"
        assert reader.train(10, "a") == ((0, 2),)
        assert reader.holding("a").open == reader.holding("b").open == Ranges([(0, 1)])

    def test_samples_of_one_dataset_do_not_count_for_another(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((0, 1), name="a")
        reader.grant((0, 1), name="b")
        reader.draw(1, "b")
        assert reader.work.deliver("a", 5) == 0
        assert reader.train(10, "b") == ((0, 1),)

    def test_a_shard_is_measured_when_it_has_been_read(self) -> None:
        reader = Reader(make_dataset(unit_samples=1, samples=10))
        reader.grant((0, 2))
        for _ in range(2):
            reader.work.draw("train", measured=False)
        assert reader.train(7) == (), "nobody knows yet how long it is"
        assert reader.work.measure("train", 7) == 0
        assert reader.work.stepped(2.0) == ((0, 1),)
        assert reader.work.deliver("train", 3) == 3
        assert reader.work.measure("train", 3) == 0, "the second one"
        assert reader.work.stepped(3.0) == ((1, 2),)

    def test_of_two_datasets_the_right_shard_is_measured(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((0, 1), name="a")
        reader.grant((0, 1), name="b")
        reader.work.draw("a", measured=False)
        reader.work.draw("b", measured=False)
        assert reader.work.measure("b", 3) == 0
        assert reader.work.deliver("b", 5) == 3
        assert reader.work.deliver("a", 5) == 5

    def test_a_shard_that_was_read_in_part_before_leaves_those_samples_out(self) -> None:
        reader = Reader(make_dataset(unit_samples=1, samples=10))
        reader.grant((0, 1))
        reader.holding().partly = (0, 4)
        assert reader.work.draw("train", measured=False) == (0, 4)
        assert reader.work.measure("train", 9) == 4
        assert reader.work.deliver("train", 20) == 5

    def test_a_shard_that_has_become_shorter_than_what_was_read_of_it_has_nothing_left(self) -> None:
        reader = Reader(make_dataset(unit_samples=1, samples=10))
        reader.grant((0, 1))
        reader.holding().partly = (0, 4)
        reader.work.draw("train", measured=False)
        assert reader.work.measure("train", 3) == 3
        assert reader.work.deliver("train", 5) == 0
        assert reader.work.stepped(1.0) == ((0, 1),)

    def test_what_was_not_measured_never_ends_by_itself(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        reader.work.draw("train", measured=False)
        assert reader.work.deliver("train", 10**9) == 10**9 < UNMEASURED
        assert reader.train(0) == ()


class TestLeavingALoaderEarly:
    def test_what_was_drawn_and_not_trained_is_drawn_again_from_the_next_sample(self) -> None:
        reader = Reader()
        reader.grant((0, 4))
        reader.draw(3)
        assert reader.train(14) == ((0, 1),)
        reader.work.draw_again("train")
        assert not reader.work.draws
        assert reader.holding().queue == Ranges([(1, 4)])
        assert (reader.holding().drawn, reader.holding().delivered) == (NONE, 0)
        assert [reader.work.draw("train") for _ in range(3)] == [(1, 4), (2, 0), (3, 0)]
        assert reader.train(6) == ((3, 4),), "ten less the four that were trained before"
        assert reader.train(10) == ((4, 5),)

    def test_left_twice_it_goes_on_where_it_was_left_last(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        for delivered, skipped in ((3, 0), (4, 3), (0, 7)):
            assert reader.work.draw("train") == (0, skipped)
            reader.work.deliver("train", delivered)
            reader.work.stepped(1.0)
            reader.work.draw_again("train")
        assert reader.work.draw("train") == (0, 7)

    def test_a_place_trained_in_part_says_nothing_about_another(self) -> None:
        reader = Reader()
        reader.grant((5, 6))
        reader.draw(1)
        reader.train(3)
        reader.work.draw_again("train")
        reader.grant((2, 3))
        assert reader.work.draw("train") == (2, 0)
        assert reader.work.draw("train") == (5, 3)

    def test_with_nothing_drawn_it_changes_nothing(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.holding().partly = (0, 5)
        reader.work.draw_again("train")
        assert reader.work.draw("train") == (0, 5)

    def test_other_datasets_keep_what_they_have_drawn(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((0, 1), name="a")
        reader.grant((0, 1), name="b")
        reader.draw(1, "a")
        reader.draw(1, "b")
        reader.work.draw_again("a")
        assert reader.holding("a").queue == Ranges([(0, 1)])
        assert reader.holding("b").drawn == Ranges([(0, 1)])
        assert reader.train(10, "b") == ((1, 2),)

    def test_numbers_that_were_put_back_are_waited_for_no_more(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.draw(2)
        reader.work.draw_again("train")  # numbers 0 and 1
        reader.draw(2)  # 2 and 3
        reader.train(20)
        reader.count((2, 4))
        assert not reader.holding().open
        assert reader.work.state()["numbers"] == []

    def test_whatever_was_put_back_before_stays_so(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        for _ in range(2):  # numbers 0 and 1
            reader.draw(1)
            reader.work.draw_again("train")
        reader.draw(1)
        reader.train(10)
        reader.count()
        assert reader.holding().open == Ranges([(0, 1)]), "number 2 is not put back"
        reader.count((2, 3))
        assert reader.work.state()["numbers"] == []


class TestSettling:
    def test_what_an_agreement_holds_is_open_no_more(self) -> None:
        reader = Reader()
        reader.grant((4, 7))
        reader.draw(3)
        reader.train(30)
        reader.count((0, 2))
        assert reader.holding().open == Ranges([(6, 7)])
        reader.count((0, 3))
        assert not reader.holding().open

    def test_every_fragment_must_hold_it(self) -> None:
        reader = Reader(fragments=2)
        reader.grant((0, 2))
        reader.draw(2)
        reader.train(20)
        reader.count((0, 2), fragment=1)
        assert reader.holding().open == Ranges([(0, 2)])
        reader.count((0, 1), fragment=0)
        assert reader.holding().open == Ranges([(1, 2)])

    def test_what_counts_in_a_round_to_come_is_still_open(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.draw(2)
        reader.train(20)
        reader.count((0, 2), late=((1, 2),))
        assert reader.holding().open == Ranges([(1, 2)])

    def test_what_was_given_up_is_told_until_it_was_heard(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        reader.train(30)
        reader.state.dropped = ((1, 2),)
        reader.count((0, 2))
        assert reader.state.dropped == ()
        request = reader.told()
        assert request.dropped == ((1, 2),)
        assert reader.holding().is_due
        reader.work.answered(request, LeaseAnswer(state="over"))
        assert reader.told().dropped == ()

    def test_what_was_given_up_before_is_told_with_it(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        reader.train(30)
        for dropped in ((0, 1), (2, 3)):
            reader.state.dropped = (dropped,)
            reader.count()
        assert reader.told().dropped == ((0, 1), (2, 3))

    def test_what_is_given_up_while_a_request_is_under_way_is_told_by_the_next(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        reader.train(30)
        reader.state.dropped = ((0, 1),)
        reader.count()
        request = reader.told()
        reader.state.dropped = ((2, 3),)
        reader.count()
        reader.work.answered(request, LeaseAnswer(state="more"))
        assert reader.told().dropped == ((2, 3),)

    def test_a_place_that_was_given_up_and_trained_once_more_is_open(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        reader.draw(1)
        reader.train(10)  # number 0
        reader.count((0, 1))
        reader.grant((0, 1))
        reader.draw(1)
        reader.train(10)  # number 1, of the same place
        reader.count((0, 1))
        assert reader.holding().open == Ranges([(0, 1)])

    def test_what_is_drawn_and_not_trained_is_not_open(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        reader.train(10)
        reader.count()
        assert (reader.holding().open, reader.holding().drawn) == (Ranges([(0, 1)]), Ranges([(1, 3)]))

    def test_numbers_are_forgotten_when_nobody_may_ask_for_them_any_more(self) -> None:
        reader = Reader()
        reader.grant((0, 1), (2, 3), (4, 5))
        reader.draw(3)
        reader.train(10)
        reader.count((0, 1))
        assert reader.work.state()["numbers"] == [[1, "train", 2, 3], [2, "train", 4, 5]]
        reader.train(20)
        reader.count((0, 2))
        assert reader.work.state()["numbers"] == [[2, "train", 4, 5]]
        reader.count((0, 3))
        assert reader.work.state()["numbers"] == []
        reader.grant((6, 7))
        assert reader.draw(1) == [6]
        assert reader.work.describe(((3, 4),)) == (Trained(dataset="train", places=((6, 7),)),)

    def test_an_offer_names_so_many_ranges_at_most(self) -> None:
        reader = Reader(make_dataset(samples=10**6, epochs=0))
        for place in range(0, 2 * MOST_RANGES + 2, 2):
            reader.grant((place, place + 1))
        reader.draw(MOST_RANGES + 1)
        (said,) = reader.work.describe(((0, MOST_RANGES + 1),))
        assert len(said.places) == MOST_RANGES
        reader.train(10 * (MOST_RANGES + 1))
        reader.state.dropped = ((0, MOST_RANGES + 1),)
        reader.count()
        told = reader.told()
        assert (len(told.holds), len(told.dropped)) == (MOST_RANGES, MOST_RANGES)
        statement = reader.work.statement("train", 10, 1)
        assert (len(statement.holds), len(statement.dropped)) == (MOST_RANGES, MOST_RANGES)

    def test_nothing_is_described_of_no_units(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        reader.draw(1)
        assert reader.work.describe(()) == ()


def named(begun: Any = (), continued: Any = (), torn: Any = (), places: Any = ()) -> tuple[Trained, ...]:
    return (Trained(dataset="train", places=places, begun=begun, continued=continued, torn=torn),)


class TestParts:
    """Units of ten samples that are trained by six, so that steps end in the middle of them."""

    def reader(self, fragments: int = 1) -> Reader:
        reader = Reader(fragments=fragments)
        reader.grant((0, 3))
        reader.draw(3)
        return reader

    def test_a_contribution_names_what_it_has_begun_and_what_earlier_ones_have(self) -> None:
        reader = self.reader()
        first = reader.part(6)
        assert reader.work.describe(first) == named(begun=((0, 1),))
        reader.train(6)
        assert reader.work.describe(reader.numbers) == named(places=((0, 1),), begun=((1, 2),), continued=((0, 1),))
        both = tuple(Ranges([*first, *reader.numbers]))
        assert reader.work.describe(both) == named(places=((0, 1),), begun=((1, 2),)), "all of unit 0 is in it"

    def test_a_unit_in_the_middle_is_begun_and_continued(self) -> None:
        reader = self.reader()
        reader.part(3)
        assert reader.work.describe(reader.part(3)) == named(begun=((0, 1),), continued=((0, 1),))

    @pytest.mark.parametrize("lost", [False, True])
    def test_a_unit_of_which_a_part_is_gone_is_torn_and_given_up_when_it_ends(self, lost: bool) -> None:
        reader = self.reader()
        part = reader.part(6)
        if lost:
            reader.state.lost = part
        else:
            reader.state.dropped = part
        reader.count()
        reader.train(6)
        assert reader.work.describe(reader.numbers) == named(begun=((1, 2),), torn=((0, 1),))
        told = reader.told()
        assert told.dropped == (() if lost else ((0, 1),)), "what the run has lost goes back: nobody gave it up"
        assert told.holds == ((1, 3),)

    def test_a_part_that_is_given_up_after_its_unit_ended_is_told_at_once(self) -> None:
        reader = self.reader()
        part = reader.part(6)
        reader.train(6)
        reader.state.dropped = part
        reader.count()
        assert reader.told().dropped == ((0, 1),)
        assert reader.work.describe(reader.numbers)[0].places == ()

    def test_what_is_torn_and_drawn_anew_is_whole_again(self) -> None:
        reader = self.reader()
        reader.state.dropped = reader.part(6)
        reader.count()
        reader.train(4)
        old = reader.numbers
        reader.grant((0, 1))
        reader.work.draw_again("train")
        reader.draw(1)
        reader.train(10)
        assert reader.work.describe(reader.numbers) == named(places=((0, 1),))
        assert reader.work.describe(old) == named(torn=((0, 1),))

    def test_a_unit_that_was_put_back_in_part_goes_on(self) -> None:
        reader = self.reader()
        part = reader.part(6)
        reader.work.draw_again("train")
        reader.draw(1)
        reader.train(4)
        assert reader.work.describe(reader.numbers) == named(places=((0, 1),), continued=((0, 1),))
        assert reader.work.describe(part) == named(begun=((0, 1),))

    def test_parts_are_remembered_over_a_restart_and_forgotten_when_settled(self) -> None:
        reader = self.reader()
        part = reader.part(6)
        again = Reader()
        again.work.load_state(msgspec.json.decode(msgspec.json.encode(reader.work.state())))
        again.holding().is_confirmed = True
        again.draw(1)
        again.train(4)
        assert again.work.describe(again.numbers) == named(places=((0, 1),), continued=((0, 1),))
        again.count(*part, *again.numbers)
        assert again.work.state()["in_parts"] == []

    def test_one_that_goes_back_says_so_until_it_is_heard_and_tears_nothing(self) -> None:
        reader = self.reader()
        reader.state.dropped = reader.part(6)
        reader.work.draw_again("train")
        reader.work.resumed(goes_back=True)
        reader.count()
        assert reader.told().goes_back
        reader.grant()
        assert not reader.told().goes_back
        reader.draw(1)
        reader.train(4)
        assert reader.work.describe(reader.numbers) == named(places=((0, 1),), continued=((0, 1),))

    def test_what_was_taken_away_in_part_is_drawn_from_its_beginning_if_it_comes_again(self) -> None:
        reader = self.reader()
        reader.train(6)
        reader.work.draw_again("train")
        reader.grant(void=((0, 1),))
        reader.grant((0, 1))
        assert reader.work.draw("train") == (0, 0)


class TestAsking:
    def test_a_request_says_what_is_held(self) -> None:
        reader = Reader()
        reader.grant((0, 4))
        reader.draw(2)
        reader.train(10)
        request = reader.told()
        assert (request.dataset, request.number) == (make_dataset(), 2)
        assert (request.holds, request.untrained, request.waits) == (((0, 4),), 3, False)
        assert reader.told().number == 3

    def test_at_first_it_wants_the_least_and_waits(self) -> None:
        request = Reader().told()
        assert (request.want, request.untrained, request.waits, request.pace) == (LEAST_AHEAD, 0, True, 0.0)

    def test_it_wants_as_much_as_it_trains_in_a_while(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.holding().pace = 1.5
        assert reader.holding().wanted == int(1.5 * LEAD_S) + 1 - 3
        reader.holding().pace = 1e12
        assert (reader.told().want, reader.told().pace) == (MOST_WANTED, 1e9)
        reader.holding().pace = 0.0
        assert reader.told().want == 0, "three are more than the least"

    def test_it_asks_when_half_of_that_is_used_up(self) -> None:
        reader = Reader()
        reader.holding().pace = 0.95  # 20 ahead
        reader.grant((0, 11))
        assert not reader.holding().is_due
        reader.draw(1)
        assert reader.holding().is_due

    def test_after_the_end_it_asks_only_while_it_still_trains(self) -> None:
        reader = Reader()
        reader.grant((0, 1), state="over")
        assert reader.holding().is_due, "others may give something back"
        assert not reader.holding().is_waiting
        reader.draw(1)
        assert reader.holding().is_due
        assert not reader.holding().is_waiting, "nothing will come"
        reader.train(10)
        assert not reader.holding().is_due

    def test_it_waits_when_there_is_nothing_to_draw_and_there_will_be(self) -> None:
        reader = Reader()
        reader.grant((0, 1))
        assert not reader.holding().is_waiting
        reader.draw(1)
        assert reader.holding().is_waiting
        assert reader.told().waits

    def test_the_message_says_what_the_request_does(self) -> None:
        request = LeaseRequest(make_dataset(), 3, 5, ((1, 2),), ((4, 6),), 7, True, 0.5)
        head = MemberFields(run_id="run", worker_id="w", incarnation=2)
        assert request.message(head) == Lease(
            run_id="run",
            worker_id="w",
            incarnation=2,
            dataset=make_dataset(),
            number=3,
            want=5,
            holds=((1, 2),),
            dropped=((4, 6),),
            untrained=7,
            waits=True,
            pace=0.5,
        )

    def test_what_is_void_and_was_not_drawn_is_given_up(self) -> None:
        reader = Reader()
        reader.grant((0, 4))
        reader.draw(1)
        reader.grant(void=((0, 2),))
        assert (reader.holding().queue, reader.holding().drawn) == (Ranges([(2, 4)]), Ranges([(0, 1)]))

    def test_what_it_has_is_never_drawn_once_more(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(2)
        reader.train(10)
        reader.grant((0, 4))  # by a server that heard an old request
        assert reader.holding().queue == Ranges([(2, 4)])

    def test_what_was_void_and_is_granted_again_is_drawn(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.grant((1, 2), void=((0, 2),))
        assert reader.holding().queue == Ranges([(1, 2)])


class TestPace:
    def test_it_is_known_from_the_second_finished_unit_on(self) -> None:
        reader = Reader()
        reader.grant((0, 8))
        reader.draw(8)
        reader.train(10)
        assert reader.holding().pace == 0.0
        reader.train(10)
        assert reader.holding().pace == 1.0

    def test_the_newest_moves_it_a_little(self) -> None:
        reader = Reader()
        reader.grant((0, 8))
        reader.draw(8)
        reader.train(10)
        reader.train(20)  # two units a second
        reader.train(30)  # three
        assert reader.holding().pace == pytest.approx(PACE_MEMORY * 2.0 + (1 - PACE_MEMORY) * 3.0)

    def test_a_step_in_no_time_says_nothing(self) -> None:
        reader = Reader()
        reader.grant((0, 8))
        reader.draw(8)
        reader.train(10)
        reader.now -= 1.0
        reader.train(10)
        assert reader.holding().pace == 0.0
        reader.train(20)
        assert reader.holding().pace == 2.0, "from the last finished unit on"

    def test_a_step_that_finishes_none_is_part_of_the_time_of_the_next(self) -> None:
        reader = Reader()
        reader.grant((0, 8))
        reader.draw(8)
        reader.train(10)
        reader.train(5)
        reader.train(5)
        assert reader.holding().pace == 0.5

    def test_it_is_divided_among_the_datasets(self) -> None:
        reader = Reader(make_dataset("a"), make_dataset("b"))
        reader.grant((0, 4), name="a")
        reader.draw(4, "a")
        reader.train(10, "a")
        reader.train(20, "a")
        assert reader.holding("a").pace == reader.holding("b").pace == 1.0


class TestStatements:
    """In a run without a server."""

    def test_it_says_what_is_held_and_what_is_spare(self) -> None:
        reader = Reader()
        reader.grant((0, 4))
        reader.draw(2)
        reader.train(10)
        said = reader.work.statement("train", 10, 7)
        assert (said.dataset, said.turn) == ("train", 7)
        assert (said.holds, said.spare, said.untrained) == (((0, 4),), ((2, 4),), 3)

    def test_its_pace_is_what_was_trained_since_the_last_one(self) -> None:
        reader = Reader()
        reader.grant((0, 8))
        reader.draw(8)
        reader.train(30)
        assert reader.work.statement("train", 10, 1).pace == 3.0
        assert reader.work.statement("train", 10, 2).pace == 3.0, "nothing was trained since: that of before"
        reader.train(10)
        assert reader.work.statement("train", 10, 3).pace == 1.0

    def test_before_anything_is_trained_it_is_what_the_loader_announces(self) -> None:
        reader = Reader(ranks=2)
        assert reader.work.statement("train", 10, 1).pace == 0.0
        reader.holding().step_samples = 4
        assert reader.work.statement("train", 10, 1).pace == 10 * 4 * 2 / 10
        reader.holding().step_samples = 10**12
        assert reader.work.statement("train", 10, 1).pace == 1e9

    def test_what_all_have_heard_is_told_no_more(self) -> None:
        reader = Reader()
        reader.grant((0, 3))
        reader.draw(3)
        reader.train(30)
        reader.state.dropped = ((0, 1),)
        reader.count()
        heard = reader.work.statement("train", 10, 1)
        reader.state.dropped = ((2, 3),)
        reader.count()
        reader.work.was_decided([heard])
        assert reader.work.statement("train", 10, 2).dropped == ((2, 3),)


class TestOverARestart:
    def restarted(self, reader: Reader, *datasets: Dataset) -> Reader:
        made = Reader(*(datasets or tuple(reader.work.datasets)), ranks=reader.work.ranks)
        made.work.load_state(msgspec.json.decode(msgspec.json.encode(reader.work.state())))
        return made

    def test_what_was_drawn_and_not_trained_is_drawn_again(self) -> None:
        reader = Reader()
        reader.grant((0, 4))
        reader.draw(3)
        reader.train(14)
        reader.holding().pace = 0.25
        again = self.restarted(reader)
        held = again.holding()
        assert (held.queue, held.open, held.drawn, held.pace) == (Ranges([(1, 4)]), Ranges([(0, 1)]), NONE, 0.25)
        assert not held.is_confirmed
        again.grant()
        assert [again.work.draw("train") for _ in range(3)] == [(1, 4), (2, 0), (3, 0)]
        assert again.train(6) == ((3, 4),), "numbers go on"

    def test_nothing_is_drawn_before_the_run_has_confirmed_it(self) -> None:
        reader = Reader()
        reader.grant((0, 9))
        again = self.restarted(reader)
        assert again.work.draw("train") is None
        assert again.holding().is_due
        assert again.holding().is_waiting
        again.grant(void=((0, 1),))
        assert again.draw(1) == [1]
        assert not again.holding().is_waiting

    def test_what_was_sent_by_then_is_described_and_settled_as_before(self) -> None:
        reader = Reader()
        reader.grant((4, 8))
        reader.draw(3)
        reader.train(20)
        again = self.restarted(reader)
        assert again.work.describe(((0, 2),)) == (Trained(dataset="train", places=((4, 6),)),)
        again.count((0, 1))
        assert again.holding().open == Ranges([(5, 6)])
        again.count((0, 2))
        assert not again.holding().open
        assert again.work.state()["numbers"] == [], "number 2 was drawn and never trained"

    def test_what_was_given_up_is_still_to_be_told(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.draw(2)
        reader.train(20)
        reader.state.dropped = ((0, 1),)
        reader.count()
        assert self.restarted(reader).told().dropped == ((0, 1),)

    def test_a_place_put_back_in_part_is_remembered_while_it_is_not_drawn(self) -> None:
        reader = Reader()
        reader.grant((0, 2))
        reader.draw(1)
        reader.train(3)
        reader.work.draw_again("train")
        again = self.restarted(self.restarted(reader))
        again.grant()
        assert again.work.draw("train") == (0, 3)

    def test_leases_of_a_dataset_that_is_not_trained_any_more_are_refused(self) -> None:
        reader = Reader(make_dataset("old"))
        with pytest.raises(ConfigError, match=r"'old', and this worker trains a, b$"):
            self.restarted(reader, make_dataset("b"), make_dataset("a"))
        with pytest.raises(ConfigError, match=r"trains none$"):
            LeasedWork(()).load_state(reader.work.state())

    def test_a_state_lists_plain_values(self) -> None:
        reader = Reader()
        reader.grant((2, 5))
        reader.draw(2)
        reader.train(12)
        assert reader.work.state() == {
            "numbers": [[0, "train", 2, 4]],
            "next": 2,
            "in_parts": [[1, "train", 3, [[PARTS, PARTS + 1]], False, False]],
            "next_part": PARTS + 1,
            "put_back": [[1, 2]],
            "datasets": {
                "train": {
                    "queue": [[3, 5]],
                    "open": [[2, 3]],
                    "dropped": [],
                    "partly": [3, 2],
                    "goes_back": False,
                    "pace": 0.0,
                }
            },
        }
