"""The worker's machine at the end of training, and when it resumes from a saved state."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import pytest

from outerstep.coordination.worker.effects import (
    Adopt,
    CatchUp,
    Depart,
    Effect,
    Finish,
    Keep,
    Note,
    Prove,
    Rebase,
    Recall,
    Reopen,
    Resume,
    Sight,
)
from outerstep.coordination.worker.machine import EXIT_TRIES, LOOKS_IN_A_CIRCLE, Cycle, Metrics, WorkerMachine
from outerstep.errors import ExchangeFailed, RoundStuck, ServerUnreachable
from unit.coordination.bench_worker import DONE, Bench, acts, send

SILENT = Sight(done=False, silent_s=11.0)


class TestLeaving:
    def test_the_remaining_steps_are_contributed_and_the_agreed_weights_kept(self) -> None:
        bench = Bench()
        bench.train(2)
        assert bench.do(bench.machine.finish()) == [Note("leaving"), send(steps=2, last=True)]
        assert bench.machine.waiting == (0,)
        assert bench.land(0, 1)[-1] == Depart("agreed")
        assert bench.machine.has_left
        assert (bench.metrics.steps_discarded, bench.metrics.sync_count) == (0, 1)

    def test_without_any_there_is_nothing_to_wait_for(self) -> None:
        bench = Bench()
        assert bench.machine.finish() == [Depart("agreed")]
        assert not bench.machine.waiting

    def test_the_local_weights_are_kept_if_that_is_asked_for(self) -> None:
        bench = Bench()
        bench.train(2)
        bench.machine.finish(keep_local=True)
        assert bench.land(0, 1)[-1] == Depart("own")

    def test_what_is_in_flight_is_resumed_as_the_last(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(4)
        effects = bench.do(bench.machine.finish())
        assert acts(effects) == [Resume(0, last=True), Resume(1, last=True)]
        assert bench.machine.waiting == (0, 1)

    def test_others_who_want_something_empty_of_it_do_not_keep_it(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1)
        bench.train(1)
        bench.machine.state.fragments[0].counted = bench.machine.state.work  # only fragment 1 has something unsent
        bench.do(bench.machine.finish())
        wants = Sight(done=False, wanted=frozenset({(0, 2)}))
        assert acts(bench.look({1: wants})) == [send(0, base=1, steps=0, last=True)]
        assert bench.machine.waiting == (1, 0)
        assert bench.land(1, 1)[-1] == Depart("agreed"), "nothing of its own is left"

    def test_what_is_over_with_the_last_of_its_own_is_finished_before(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1)
        bench.train(1)
        bench.machine.state.fragments[0].counted = bench.machine.state.work
        bench.do(bench.machine.finish())
        bench.look({1: Sight(done=False, wanted=frozenset({(0, 2)}))})
        assert bench.machine.waiting == (1, 0)
        assert acts(bench.look({0: DONE, 1: DONE})) == [Finish(0), Finish(1)]

    def helping(self) -> Bench:
        """It waits at fragment 1 for the sake of others alone."""
        bench = Bench([0, 0])
        bench.train(2)
        bench[1].counted = bench.machine.state.work
        bench.look({0: Sight(done=False, wanted=frozenset({(1, 1)}))})
        bench.land(0, 1)
        assert bench.machine.waiting == (1,)
        return bench

    def test_while_it_trains_on_they_do(self) -> None:
        bench = self.helping()
        for _ in range(LOOKS_IN_A_CIRCLE):
            assert bench.look({}) == []
        assert bench.machine.waiting == (1,)

    def test_but_not_for_ever(self) -> None:
        bench = self.helping()
        for _ in range(LOOKS_IN_A_CIRCLE):
            bench.look({})
        assert bench.look({}) == [Keep(1)], "what it sent there is settled when that fragment is due"
        assert bench.machine.waiting == ()
        assert bench[1].in_flight is not None
        assert bench[1].in_flight.deferred

    def test_a_round_that_closed_without_it_is_tried_again_but_not_for_ever(self) -> None:
        bench = Bench(max_staleness=99)
        bench.train(2)
        bench.do(bench.machine.finish())
        for version in range(1, EXIT_TRIES):
            assert bench.miss(0, version)[-1] == send(base=version, oldest=0, steps=2, last=True)
        assert bench.miss(0, EXIT_TRIES)[-1] == Depart("agreed")
        assert bench.metrics.steps_discarded == 2

    def test_unless_others_wait_for_it_there_for_then_its_steps_may_count_after_all(self) -> None:
        bench = Bench([0, 0], max_staleness=99)
        bench.train(1)
        bench.do(bench.machine.finish())
        for version in range(1, EXIT_TRIES + 1):
            bench.miss(0, version)
        assert (bench.machine.waiting, bench.unsent(0)) == ((1,), 1)
        bench.look({1: Sight(done=False, wanted=frozenset({(0, EXIT_TRIES + 1)}))})
        bench.land(1, 1)
        assert bench.machine.waiting == (0,), "no favour: it brings steps of its own"

    def test_a_late_contribution_is_waited_for_where_nothing_more_is_to_be_sent(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1, counted_in=2)
        bench.do(bench.machine.sync_all())
        bench.land(1, 1)
        effects = bench.do(bench.machine.finish())
        assert effects == [Recall(0), Note("leaving"), Resume(0, last=True)]
        assert bench.metrics.sync_count == 1, "it is counted again when it lands"
        assert bench.land(0, 2, counted_in=2)[-1] == Depart("agreed")
        assert (bench.metrics.sync_count, bench.metrics.steps_overwritten) == (2, 0)

    def test_else_it_goes_along_with_what_is_sent(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(0, 1, counted_in=2)
        bench.train()
        assert acts(bench.machine.finish()) == [send(base=1, steps=1, last=True)]
        assert bench.metrics.sync_count == 1

    def test_nor_is_it_recalled_while_another_is_in_flight(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1, counted_in=2)
        bench.do(bench.machine.sync_all())
        bench.look({1: Sight(done=False, wanted=frozenset({(0, 2)}))})
        bench.look(asked_to_leave=True)
        assert bench.unsent(0) == 0
        effects = bench.do(bench.machine.finish())
        assert acts(effects) == [Resume(0, last=True), Resume(1, last=True)]

    def test_a_silent_server_is_waited_for(self) -> None:
        bench = Bench()
        bench.train(2)
        bench.machine.finish()
        assert bench.look({0: SILENT}, asked_to_leave=True) == []
        assert bench.machine.waiting == (0,)

    def test_others_that_wait_for_it_get_what_there_is(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1)
        bench.do(bench.machine.finish())
        assert bench.machine.waiting == (1,)
        wants = Sight(done=False, wanted=frozenset({(0, 2)}))
        assert bench.look({1: wants}) == [send(0, base=1, steps=0, last=True)]

    def test_a_round_that_cannot_close_is_no_error(self) -> None:
        bench = Bench([0, 0])
        bench.train(1)
        bench.do(bench.machine.finish())
        effects = bench.machine.interrupted(RoundStuck("it waits for v"))
        assert effects == [Keep(0), Keep(1), Note("stuck", why="it waits for v"), Depart("agreed")]
        assert bench.metrics.steps_discarded == 1
        assert bench.machine.has_left
        assert not bench.machine.waiting

    def test_without_a_server_it_keeps_the_weights_that_it_has(self) -> None:
        bench = Bench()
        bench.train(3)
        bench.do(bench.machine.finish())
        effects = bench.machine.interrupted(ServerUnreachable("for 90 s"))
        assert effects == [Keep(0), Note("unreachable", why="for 90 s"), Depart("as they are")]
        assert bench.metrics.steps_discarded == 3

    def test_or_its_own_if_those_were_asked_for(self) -> None:
        bench = Bench()
        bench.train(3)
        bench.machine.finish(keep_local=True)
        assert bench.machine.interrupted(ServerUnreachable("for 90 s"))[-1] == Depart("own")

    @pytest.mark.parametrize("error", [ExchangeFailed("no"), KeyboardInterrupt()])
    def test_whatever_else_goes_wrong_is_an_error(self, error: BaseException) -> None:
        bench = Bench()
        bench.train(3)
        bench.machine.finish()
        assert bench.machine.interrupted(error) == [Keep(0)]
        assert not bench.machine.has_left

    @pytest.mark.parametrize("error", [RoundStuck("it waits"), ServerUnreachable("for 90 s")])
    def test_before_the_end_so_are_these(self, error: Exception) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.machine.interrupted(error) == [Keep(0)]
        assert not bench.machine.has_left

    def test_a_worker_that_is_out_of_time_leaves_as_it_is(self) -> None:
        bench = Bench()
        bench.train(3)
        bench.machine.finish()
        assert bench.look(asked_to_leave=True) == []
        effects = bench.look(asked_to_leave=True, out_of_time=True)
        assert effects == [Keep(0), Note("out of time"), Depart("as they are")]
        assert (bench.machine.waiting, bench.metrics.steps_discarded) == ((), 3)

    def test_what_is_over_by_then_is_adopted(self) -> None:
        bench = Bench()
        bench.train(3)
        bench.machine.finish()
        assert bench.look({0: DONE}, asked_to_leave=True, out_of_time=True) == [Finish(0)]


def resume(
    bench: Bench, overtaken: Collection[int] = (), forgotten: Collection[int] = (), **plan: object
) -> tuple[Bench, list[Effect]]:
    """Another process, from the state of this one."""
    again = Bench([0] * len(bench.machine.state.fragments), **plan)  # type: ignore[arg-type]
    again.machine = WorkerMachine("w", bench.plan)
    again.plan = bench.plan
    return again, again.do(again.machine.resumed(deepcopy(bench.machine.state), overtaken, forgotten))


class TestResuming:
    def test_it_goes_on_where_it_was(self) -> None:
        bench = Bench([0, 0])
        bench.machine.state.cycle.assigned = 3
        bench.train(2)
        bench.land(0, 1)
        bench.train(1)
        again, effects = resume(bench)
        assert effects == [CatchUp(0), CatchUp(1)]
        assert again.machine.waiting == (0, 1)
        assert acts(again.land(0, 1, counted=False, unchanged=True)) == [Prove(0)]
        assert acts(again.land(1, 0, counted=False, unchanged=True)) == [Prove(1)]
        assert again.machine.state == bench.machine.state
        assert again.machine.state.cycle == Cycle(3, 4, 3)
        assert again.train() == bench.train() == [send(1, steps=4)]

    def test_it_changes_nothing_of_what_was_saved(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(3)
        saved, before = bench.machine.state, deepcopy(bench.machine.state)
        machine = WorkerMachine("w", bench.plan)
        machine.resumed(saved, [1])
        machine.stepped()
        assert saved == before

    def test_what_is_in_flight_is_reopened_and_lands_when_its_time_has_come(self) -> None:
        bench = Bench(delay=3, carry=True)
        bench.train(5)
        again, effects = resume(bench)
        assert effects == [Reopen(0)]
        assert not again.machine.waiting
        assert again.flight() == bench.flight()
        assert again.flight() is not bench.flight()
        again.train(2)
        assert again.machine.waiting == (0,)

    def test_what_never_will_count_is_unsent(self) -> None:
        bench = Bench(delay=3, carry=True)
        bench.train(5)
        again, _ = resume(bench)
        again.machine.dropped(0)
        assert again.unsent() == 5
        assert again.train(3) == [send(steps=8, keep=True)]

    def test_a_late_contribution_goes_along_unless_it_is_in_the_anchor_by_now(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(0, 1, counted_in=2)
        again, effects = resume(bench)
        assert effects == [CatchUp(0)]
        assert again[0].late_in == 0, "not before it has caught up"
        assert acts(again.land(0, 1, counted=False, unchanged=True)) == [Prove(0), Reopen(0, late=True)]
        assert again[0].late_in == 2
        again.machine.dropped(0, late=True)
        assert again[0].late_in == 0
        later, _ = resume(bench)
        assert acts(later.land(0, 2, counted=False)) == [Rebase(0)]
        assert later[0].late_in == 0
        killed, _ = resume(bench, forgotten=[0])  # a server that was killed has closed that round without it
        assert acts(killed.land(0, 2, counted=False)) == [Rebase(0), Reopen(0, late=True)]
        assert killed[0].late_in == 3

    def test_a_late_one_is_reopened_before_the_one_after_it(self) -> None:
        bench = Bench(delay=3)
        bench.train(7)
        bench.land(0, 1, counted_in=2)
        bench.train(1)
        _, effects = resume(bench)
        assert effects == [Reopen(0, late=True), Reopen(0)]

    def test_dropping_one_leaves_the_other(self) -> None:
        bench = Bench(delay=3)
        bench.train(7)
        bench.land(0, 1, counted_in=2)
        bench.train(1)
        again, _ = resume(bench)
        again.machine.dropped(0, late=True)
        assert again[0].in_flight is not None
        other, _ = resume(bench)
        other.machine.dropped(0)
        assert other[0].late_in == 2

    def test_the_counters_go_on(self) -> None:
        bench = Bench()
        bench.machine.state.metrics = Metrics(sync_count=3, steps_overwritten=7)
        again, _ = resume(bench)
        assert again.metrics == Metrics(sync_count=3, steps_overwritten=7)

    def test_a_catch_up_that_failed_at_once_is_tried_again(self) -> None:
        again, _ = resume(Bench())
        assert again.look({0: Sight(done=True, failed=True)}) == [Resume(0)]


class TestRoundsClosedMeanwhile:
    def behind(self, steps: int = 2, **plan: object) -> Bench:
        bench = Bench([3], **plan)  # type: ignore[arg-type]
        bench.train(steps)
        return resume(bench)[0]

    def test_the_unsent_steps_are_kept(self) -> None:
        bench = self.behind()
        assert bench.land(0, 5, counted=False) == [Note("caught up", 0, 5, 2), Rebase(0)]
        assert (bench[0].version, bench[0].oldest_base, bench.unsent()) == (5, 3, 2)
        assert bench.metrics.missed_rounds == 0
        assert bench.train(2) == [send(base=5, oldest=3)]

    def test_unless_they_are_too_old(self) -> None:
        bench = self.behind()
        assert bench.land(0, 6, counted=False) == [Note("discarded", 0, 6, 2), Adopt(0)]
        assert (bench.metrics.steps_discarded, bench.unsent(), bench[0].oldest_base) == (2, 0, 6)

    def test_without_any_there_is_nothing_to_be_too_old(self) -> None:
        bench = self.behind(0)
        assert bench.land(0, 9, counted=False) == [Note("caught up", 0, 9, 0), Rebase(0)]
        assert (bench[0].version, bench[0].oldest_base) == (9, 9)

    def test_a_server_that_lost_rounds_is_followed(self) -> None:
        bench = self.behind()
        bench.land(0, 1, counted=False)
        assert (bench[0].version, bench[0].oldest_base) == (1, 1)

    def test_an_anchor_that_is_not_proven_is_mended(self) -> None:
        bench = self.behind()
        bench.look({0: DONE})
        assert bench.machine.outcome(bench.came(0, 3, counted=False, unchanged=True)) == [Prove(0)]
        assert bench.machine.confirmed(0, bench.came(0, 4)) == [Note("mended", 0, 3), Rebase(0)]


class TestOvertaken:
    """The server has later contributions of this worker than its saved state knows of."""

    def test_the_saved_steps_are_in_the_model_and_dropped(self) -> None:
        bench = Bench([0, 0], sync_every=8)
        bench.train(3)
        again, effects = resume(bench, overtaken=[1])
        assert effects == [CatchUp(0), CatchUp(1)]
        again.land(0, 1, counted=False)
        assert again.land(1, 2) == [Note("overtaken", 1, 2, 3), Adopt(1)]
        assert [again.unsent(i) for i in range(2)] == [3, 0]
        assert (again[1].version, again[1].oldest_base, again[1].late_in) == (2, 2, 0)
        assert again.metrics.sync_count == 0

    def test_so_it_falls_in_where_the_others_are(self) -> None:
        bench = Bench([0, 0], sync_every=8)
        bench.train(3)
        again, _ = resume(bench, overtaken=[0])
        again.machine.state.cycle.assigned = 6
        again.land(0, 2)
        again.land(1, 1, counted=False)
        assert again.machine.state.cycle == Cycle(4, 6, 6)

    def test_what_was_in_flight_goes_with_them(self) -> None:
        bench = Bench(delay=3)
        bench.train(5)
        again, effects = resume(bench, overtaken=[0])
        assert effects == [CatchUp(0)]
        assert acts(again.land(0, 2)) == [Adopt(0)]
        assert again[0].in_flight is None

    def test_unless_the_server_was_restarted_and_has_forgotten_it(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(3)
        again, effects = resume(bench, overtaken=[0])
        assert effects == [CatchUp(0), CatchUp(1)]
        again.land(1, 0, counted=False, unchanged=True)
        assert acts(again.land(0, 0, counted=False, unchanged=True)) == [Prove(0), Reopen(0)]
        assert again.machine.state == bench.machine.state

    def test_a_wait_for_nobody_ends_at_once(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(4)
        again, effects = resume(bench)
        assert effects == [Reopen(0), Reopen(1)]
        assert again.machine.in_sight == (0, 1)
