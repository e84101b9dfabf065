"""The worker's machine while it trains and waits: when a fragment is sent, and what is waited for."""

from __future__ import annotations

import pytest

from outerstep.coordination.worker.effects import Adopt, Finish, Keep, Note, Resume, Sight
from outerstep.coordination.worker.machine import LOOKS_IN_A_CIRCLE, Offline, Work
from outerstep.errors import BadTensors, ExchangeFailed, ServerFailed
from outerstep.types import Assignment
from unit.coordination.bench_worker import DONE, Bench, acts, kinds, make_plan, send

MISSED = Sight(done=True, missed=True)
FAILED = Sight(done=True, failed=True)
SILENT = Sight(done=False, silent_s=10.1)


def wants(*rounds: tuple[int, int]) -> Sight:
    return Sight(done=False, wanted=frozenset(rounds))


class TestBeginning:
    def test_it_adopts_the_newest_anchor_of_every_fragment(self) -> None:
        bench = Bench([3, 5])
        assert bench.begun == [Adopt(0), Adopt(1)]
        assert [(p.version, p.oldest_base, p.counted) for p in (bench[0], bench[1])] == [(3, 3, Work()), (5, 5, Work())]

    def test_a_healed_worker_counts_on_from_the_work_of_its_peer(self) -> None:
        bench = Bench(work=Work(7, 70, 700))
        assert bench.machine.state.work == Work(7, 70, 700)
        assert bench.unsent() == 0

    @pytest.mark.parametrize(
        ("versions", "step"), [([0, 0, 0], 0), ([1, 0, 0], 2), ([1, 1, 0], 4), ([2, 2, 2], 0), ([4], 0)]
    )
    def test_it_falls_in_where_the_others_are_in_their_cycle(self, versions: list[int], step: int) -> None:
        assert Bench(versions, sync_every=6).machine.state.cycle.step == step

    def test_it_falls_in_with_the_version_of_a_repaired_anchor(self) -> None:
        bench = Bench([1, 1])
        machine = bench.machine
        assert machine.joined([bench.came(0, 1), bench.came(1, 1)]) == [Adopt(0)]
        machine.confirmed(0, bench.came(0, 2))
        bench.do(machine.confirmed(0, None))
        assert bench[0].version == bench[0].oldest_base == 2
        assert machine.state.cycle.step == 2, "fragment 1 is the next"


class TestTheCycle:
    def test_a_fragment_is_sent_after_its_step_and_waited_for(self) -> None:
        bench = Bench()
        assert bench.train(3) == []
        assert bench.train() == [send(steps=4)]
        assert bench.machine.waiting == (0,)
        assert not bench.flight().kept

    def test_each_fragment_has_its_own_step(self) -> None:
        bench = Bench([0, 0])
        assert bench.train(2) == [send(0, steps=2)]
        bench.land(0)
        assert bench.train(2) == [send(1, steps=4)]
        bench.land(1)
        assert bench.train(2) == [send(0, base=1, steps=4)]

    def test_samples_and_tokens_go_with_the_steps(self) -> None:
        bench = Bench()
        bench.machine.count(3, 30)
        bench.train(2)
        bench.machine.count(4, 40)
        assert bench.train(2) == [send(samples=7, tokens=70)]
        bench.land()
        bench.machine.count(5, 50)
        assert bench.train(4) == [send(base=1, samples=5, tokens=50)]

    def test_an_assigned_h_holds_from_the_next_cycle_on(self) -> None:
        bench = Bench()
        bench.machine.state.cycle.assigned = 2
        bench.train(3)
        assert bench.train() == [send()]
        bench.land()
        assert bench.train(2) == [send(base=1, steps=2)]
        bench.land(version=2)
        bench.machine.state.cycle.assigned = None
        bench.train(2)
        bench.land(version=3)
        assert bench.train(3) == []

    def test_a_new_plan_holds_from_the_next_cycle_on(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        assert kinds(bench.land(0, plan=make_plan(2, sync_every=6, revision=1))) == ["plan", "agreed"]
        assert bench.machine.state.cycle.sync_every == 4
        assert bench.train(2) == [send(1)]
        assert bench.machine.state.cycle.sync_every == 6

    def test_a_new_plan_that_comes_with_the_end_of_a_cycle_holds_at_once(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(plan=make_plan(sync_every=2, revision=1))
        assert bench.train(2) == [send(base=1, steps=2)]

    def test_the_same_plan_of_a_restarted_server_is_no_news(self) -> None:
        bench = Bench(sync_every=4)
        bench.train(4)
        assert kinds(bench.land(plan=make_plan(revision=3))) == ["agreed"]
        assert bench.machine.plan.revision == 3

    def test_a_plan_of_the_same_revision_is_the_one_it_has(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(plan=make_plan(sync_every=2))
        assert bench.machine.plan == bench.plan

    def test_sync_all_sends_what_is_unsent_and_begins_a_cycle(self) -> None:
        bench = Bench([0, 0], sync_every=6)
        bench.train(3)
        bench.land(0)
        bench.train()
        assert bench.do(bench.machine.sync_all()) == [send(0, base=1, steps=1), send(1, steps=4)]
        assert bench.machine.state.cycle.step == 0
        bench.land(0, 2)
        assert bench.machine.waiting == (1,)
        bench.land(1)
        assert not bench.machine.waiting

    def test_sync_all_sends_nothing_twice(self) -> None:
        bench = Bench()
        assert bench.machine.sync_all() == []
        assert not bench.machine.waiting


class TestADelay:
    def test_the_agreement_is_adopted_so_many_steps_later(self) -> None:
        bench = Bench(delay=2)
        assert bench.train(4) == [send(keep=True)]
        assert not bench.machine.waiting
        assert (bench.flight().land_at, bench.flight().kept, bench.flight().work) == (6, True, Work(4))
        assert bench.train() == []
        assert not bench.machine.waiting
        bench.train()
        assert bench.machine.waiting == (0,)

    def test_it_is_shorter_than_the_cycle(self) -> None:
        bench = Bench(delay=9)
        bench.train(4)
        assert bench.flight().land_at == 7

    def test_a_fragment_lands_before_the_next_is_sent(self) -> None:
        bench = Bench([0, 0], delay=2)
        assert bench.train(2) == [send(0, steps=2, keep=True)]
        bench.train(2)
        assert bench.machine.waiting == (0,)
        done = bench.land(0)
        assert acts(done) == [Adopt(0), send(1, steps=4, keep=True)]
        assert bench.flight(1).land_at == 6
        assert not bench.machine.waiting

    def test_others_in_flight_are_in_sight_but_not_waited_for(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(5)
        assert bench.machine.waiting == (0,)
        assert bench.machine.in_sight == (0, 1)
        bench.flight(1).deferred = True
        assert bench.machine.in_sight == (0,)

    def test_what_was_deferred_is_settled_before_the_next_is_sent(self) -> None:
        bench = Bench(delay=2)
        bench.train(6)
        bench.look({0: SILENT})
        assert bench.train() == []
        assert bench.train() == [], "due, but in flight"
        assert bench.machine.waiting == (0,)
        done = bench.land(0, 1)
        assert done[-1] == send(base=1, oldest=0, steps=4, keep=True)
        assert bench.flight().land_at == 10

    def test_what_stays_deferred_is_not_sent_again(self) -> None:
        bench = Bench(delay=2)
        bench.train(6)
        bench.look({0: SILENT})
        bench.train(2)
        assert kinds(bench.look({0: SILENT})) == ["deferred"]
        assert not bench.machine.waiting
        assert bench.flight().land_at == 6


class TestMissedRounds:
    def test_the_only_fragment_is_sent_again_at_once_and_only_once(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.miss(0, 1)[-1] == send(base=1, oldest=0)
        assert bench.machine.waiting == (0,)
        bench.miss(0, 2)
        assert not bench.machine.waiting
        assert bench.train(4) == [send(base=2, oldest=0, steps=8)]
        assert bench.metrics.missed_rounds == 2

    def test_one_of_several_fragments_waits_for_its_turn(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.miss(0, 1)
        assert not bench.machine.waiting

    def test_what_was_deferred_is_settled_first_which_is_no_try(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.look({0: SILENT})
        bench.train(2)
        bench.land(1)
        bench.train(2)
        assert bench.machine.waiting == (0,)
        assert bench.land(0, 1)[-1] == send(base=1, oldest=0, steps=4)
        bench.miss(0, 2)
        assert not bench.machine.waiting


class TestNobodyAnswers:
    def test_it_trains_on_and_keeps_what_it_sent(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.look({0: Sight(done=False, silent_s=10.0)}) == []
        assert bench.look({0: SILENT}) == [Keep(0), Note("deferred", steps=1)]
        assert (bench.flight().deferred, bench.flight().kept) == (True, True)
        assert not bench.machine.waiting
        assert bench.metrics.offline_exchanges == 1

    def test_what_was_kept_is_kept_once(self) -> None:
        bench = Bench(delay=1)
        bench.train(5)
        assert acts(bench.look({0: SILENT})) == []

    def test_up_to_a_limit(self) -> None:
        bench = Bench()
        for _ in range(2):
            bench.train(4)
            assert kinds(bench.look({0: SILENT})) == ["deferred"]
        bench.train(4)
        assert bench.look({0: SILENT}) == []
        assert bench.machine.waiting == (0,)

    def test_an_answer_ends_the_count(self) -> None:
        bench = Bench(offline=Offline(10.0, 1))
        bench.train(4)
        bench.look({0: SILENT})
        bench.train(4)
        bench.land(0, 1)
        bench.land(0, 2)
        bench.train(4)
        assert kinds(bench.look({0: SILENT})) == ["deferred"]

    def test_one_answer_is_enough_to_wait_for_all(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.look({0: wants((1, 1))})
        assert bench.look({0: SILENT}) == []
        assert bench.machine.waiting == (0, 1)

    def test_a_sync_that_was_asked_for_is_waited_for(self) -> None:
        bench = Bench()
        bench.train(2)
        bench.machine.sync_all()
        assert bench.look({0: SILENT}) == []
        assert bench.machine.waiting == (0,)


class TestOthersWait:
    """While this worker stands still, rounds of other fragments may wait for it."""

    def stand(self, **plan: object) -> Bench:
        """Fragment 0 is waited for."""
        bench = Bench([0, 0, 0], sync_every=6, **plan)
        bench.train(2)
        assert bench.machine.waiting == (0,)
        return bench

    def test_it_contributes_there_and_waits_for_that_too(self) -> None:
        bench = self.stand()
        assert bench.look({0: wants((2, 1), (1, 1))}) == [send(1, steps=2), send(2, steps=2)]
        assert bench.machine.waiting == (0, 1, 2)

    def test_but_not_to_a_round_that_it_has_the_agreement_of(self) -> None:
        bench = self.stand()
        bench[1].version = 1
        assert bench.look({0: wants((1, 1))}) == []
        assert bench.look({0: wants((1, 2))}) == [send(1, base=1, oldest=0, steps=2)]

    def test_nor_twice(self) -> None:
        bench = self.stand()
        bench.look({0: wants((1, 1))})
        assert bench.look({0: wants((1, 1), (0, 1))}) == []

    def test_and_only_once_if_that_round_closes_without_it(self) -> None:
        bench = self.stand()
        bench.look({0: wants((1, 1))})
        bench.miss(1, 1)
        assert bench.machine.waiting == (0,)

    def under_way(self) -> Bench:
        """Fragment 0 is waited for, fragment 1 was sent and lands a step later."""
        bench = Bench([0, 0], delay=3)
        bench.train(5)
        assert bench.machine.waiting == (0,)
        assert bench.flight(1).land_at == 7
        return bench

    def test_what_is_on_its_way_there_lands_when_its_time_has_come(self) -> None:
        bench = self.under_way()
        for _ in range(2 * LOOKS_IN_A_CIRCLE):
            assert bench.look({0: wants((1, 1))}) == []
        assert bench.machine.waiting == (0,)

    def test_unless_its_round_closed_without_it(self) -> None:
        bench = self.under_way()
        assert bench.look({0: wants((1, 1)), 1: MISSED}) == []
        assert bench.machine.waiting == (0, 1)
        assert bench.look({1: MISSED}) == [Finish(1)]

    def test_an_agreement_that_is_here_already_waits_unless_they_may_stand_in_a_circle(self) -> None:
        bench = self.under_way()
        for _ in range(LOOKS_IN_A_CIRCLE):
            assert bench.look({0: wants((1, 1)), 1: DONE}) == []
            assert bench.machine.waiting == (0,)
        bench.look({0: wants((1, 1)), 1: DONE})
        assert bench.machine.waiting == (0, 1)

    def test_the_looks_are_counted_from_the_last_exchange_that_was_over(self) -> None:
        bench = Bench([0, 0, 0], sync_every=6, delay=5)
        bench.train(7)
        assert bench.machine.waiting == (0,)
        for _ in range(LOOKS_IN_A_CIRCLE):
            bench.look({0: wants((1, 1)), 1: DONE})
        bench.look({0: wants((2, 1)), 2: MISSED})
        bench.miss(2, 1)
        for _ in range(LOOKS_IN_A_CIRCLE):
            bench.look({0: wants((1, 1)), 1: DONE})
        assert bench.machine.waiting == (0,)

    def test_a_favour_that_was_over_is_none_of_those(self) -> None:
        bench = Bench([0, 0, 0], sync_every=6, delay=5)
        bench.train(7)
        bench[2].in_flight, bench[2].counted = (
            None,
            bench.machine.state.work,
        )  # nothing is under way there, nothing unsent
        for version in range(1, LOOKS_IN_A_CIRCLE // 2 + 1):  # each is looked at when it is wanted, and when it is over
            assert acts(bench.look({0: wants((1, 1), (2, version)), 1: DONE})) == [send(2, base=version - 1, steps=0)]
            assert bench.machine.waiting == (0, 2)
            bench.land(2, version)
        bench.look({0: wants((1, 1)), 1: DONE})
        assert bench.machine.waiting == (0, 1)

    def test_what_was_deferred_there_is_settled(self) -> None:
        bench = self.under_way()
        bench.flight(1).deferred = True
        assert bench.look({0: wants((1, 1))}) == []
        assert bench.machine.waiting == (0, 1)


class TestFailures:
    def test_an_exchange_that_failed_in_the_background_is_resumed_once(self) -> None:
        bench = Bench(delay=2)
        bench.train(6)
        assert bench.look({0: FAILED}) == [Resume(0)]
        assert bench.machine.waiting == (0,)
        assert bench.look({0: FAILED}) == [Finish(0)], "whose failure is raised"

    def test_one_that_fails_while_it_is_waited_for_is_not(self) -> None:
        bench = Bench(delay=2)
        bench.train(6)
        bench.look()
        assert bench.look({0: FAILED}) == [Finish(0)]
        fresh = Bench()
        fresh.train(4)
        assert fresh.look({0: FAILED}) == [Finish(0)]

    def test_what_was_refused_is_in_doubt_no_more(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.machine.failed(0, BadTensors("a tensor is missing"))
        assert bench[0].in_flight is None
        assert bench.unsent() == 4

    @pytest.mark.parametrize("cause", [None, ServerFailed("a bug"), ValueError("here")])
    def test_whatever_else_went_wrong_it_may_count(self, cause: Exception | None) -> None:
        bench = Bench()
        bench.train(4)
        bench.machine.failed(0, cause)
        assert bench[0].in_flight is not None

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), ExchangeFailed("no"), ValueError("here")])
    def test_an_interrupted_wait_leaves_all_in_flight(self, error: BaseException) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(5)
        bench.flight(1).kept = False
        assert bench.machine.interrupted(error) == [Keep(1)]
        assert bench.flight(0).deferred
        assert bench.flight(1).deferred
        assert not bench.machine.waiting
        assert not bench.machine.has_left

    def test_what_goes_wrong_while_nothing_is_waited_for_changes_nothing(self) -> None:
        bench = Bench(delay=2)
        bench.train(4)
        assert bench.machine.interrupted(KeyboardInterrupt()) == []
        assert not bench.flight().deferred

    def test_an_interrupted_wait_is_not_continued(self) -> None:
        bench = Bench([0, 0], delay=2)
        bench.train(4)  # fragment 0 lands, then fragment 1 is sent
        bench.machine.interrupted(KeyboardInterrupt())
        assert bench.train() == []
        assert bench[1].in_flight is None

    def test_nor_is_a_landing(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.look({0: DONE})
        bench.machine.outcome(bench.came(0, 1, also=(bench.came(1, 1),)))
        assert bench[1].version == 1
        bench.machine.interrupted(KeyboardInterrupt())
        assert bench.flight(0).deferred, "its agreement is still to be adopted"
        bench.do(bench.machine.sync_all())
        assert acts(bench.land(0, 1)) == [Adopt(0)]
        assert bench.machine.waiting == (1,)

    def test_what_was_not_sent_after_all_is_unsent(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.machine.dropped(0)
        bench.machine.interrupted(ExchangeFailed("no"))
        assert bench.train(4) == [send(steps=8)]


class TestSignals:
    def test_a_worker_that_is_asked_to_go_does_not_wait(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.look(asked_to_leave=True) == [Keep(0)]
        assert bench.flight().deferred
        assert not bench.machine.waiting
        assert bench.metrics.offline_exchanges == 0

    def test_what_is_over_is_adopted_first(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.look({0: DONE}, asked_to_leave=True) == [Finish(0)]

    def test_what_was_to_follow_is_still_done(self) -> None:
        bench = Bench([0, 0], delay=2)
        bench.train(4)
        assert bench.look(asked_to_leave=True) == [send(1, steps=4, keep=True)]


class TestItsPartOfThePlan:
    """A plan may have a number of steps for each member."""

    SHARES = tuple(
        Assignment(cluster=name, leader="", sends_to="server", local_steps=steps, batch_size=1)
        for name, steps in {"w": 3, "another": 5}.items()
    )

    def test_it_takes_its_own_steps_from_the_beginning(self) -> None:
        bench = Bench(assignments=self.SHARES)
        assert bench.train(3) == [send(steps=3)]

    def test_and_when_the_plan_changes(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(plan=make_plan(assignments=self.SHARES, revision=1))
        assert bench.train(3) == [send(base=1, steps=3)]
