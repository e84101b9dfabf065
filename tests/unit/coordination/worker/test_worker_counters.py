"""What the worker's machine counts adds up over its exchanges, and one step counts as well as many."""

from __future__ import annotations

from outerstep.coordination.worker.effects import Carry, Depart, Note, Sight
from outerstep.coordination.worker.machine import REPAIRS, Metrics, Work, WorkerMachine
from outerstep.types import Participant
from unit.coordination.bench_worker import Bench, acts, make_plan, send

SILENT = Sight(done=False, silent_s=11.0)


class TestTheyAddUp:
    def test_exchanges_that_were_deferred(self) -> None:
        bench = Bench()
        for _ in range(2):
            bench.train(4)
            bench.look({0: SILENT})
        assert bench.metrics.offline_exchanges == 2

    def test_steps_of_late_contributions_that_are_lost_fragment_by_fragment(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.land(0, 1, steps_lost=5)
        bench.train(2)
        assert bench.land(1, 1, steps_lost=2)[0] == Note("lost", 1, steps=2)
        assert bench.metrics.steps_discarded == 7

    def test_steps_that_were_overwritten(self) -> None:
        bench = Bench(delay=3)
        bench.train(7)
        bench.land(0, 1)
        bench.train(4)
        bench.land(0, 2)
        assert bench.metrics.steps_overwritten == 6

    def test_steps_that_were_too_old(self) -> None:
        bench = Bench()
        for version in (1, 2):
            bench.train(4)
            bench.miss(0, version, too_old=True)
        assert bench.metrics.steps_discarded == 8

    def test_steps_that_somebody_else_overwrote(self) -> None:
        bench = Bench(sync_every=100)
        for _ in range(2):
            bench.train(2)
            bench.machine.stepped(changed=True)
        assert bench.metrics.steps_discarded == 6

    def test_what_counted_before_and_what_was_overwritten_while_a_contribution_was_in_flight(self) -> None:
        bench = Bench(delay=2, carry=True)
        bench.train(6)
        bench.land(0, 1)
        bench.train(2)
        assert bench[0].counted == Work(4)
        bench.machine.stepped(changed=True)
        assert bench[0].counted == Work(5)

    def test_contributions_that_were_refused(self) -> None:
        bench = Bench()
        for version in (1, 2):
            bench.train(4)
            bench.land(0, version, counted=False, refused="NaN")
        assert (bench.metrics.reloads, bench.metrics.steps_discarded) == (2, 8)

    def test_steps_that_find_no_round_at_the_end(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.miss(0, 1, too_old=True)
        bench.train(2)
        bench.machine.finish()
        assert bench.look(out_of_time=True)[-1] == Depart("as they are")
        assert bench.metrics.steps_discarded == 6

    def test_a_late_contribution_that_is_waited_for_is_counted_once(self) -> None:
        bench = Bench()
        for version in (1, 2, 3):
            bench.train(4)
            bench.land(0, version)
        bench[0].late_in = 4
        bench.do(bench.machine.finish())
        assert bench.metrics.sync_count == 2
        bench.land(0, 4, counted_in=4)
        assert bench.metrics == Metrics(sync_count=3)


class TestOneStep:
    def test_that_missed_its_round_is_sent_again(self) -> None:
        bench = Bench(sync_every=1)
        bench.train()
        assert bench.miss(0, 1)[-1] == send(base=1, oldest=0, steps=1)

    def test_taken_meanwhile_is_carried_along(self) -> None:
        bench = Bench(delay=1, carry=True)
        bench.train(5)
        assert acts(bench.land(0, 1)) == [Carry(0)]
        assert bench.unsent() == 1


class TestWhatIsInFlight:
    def test_is_to_be_adopted_where_the_worker_stands_unless_there_is_a_delay(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.flight().land_at == 4

    def test_and_so_is_a_late_contribution_that_is_waited_for_at_the_end(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.land(0, 1, counted_in=2)
        bench.machine.finish()
        assert (bench.flight().work, bench.flight().land_at) == (Work(4), 4)

    def test_a_restarted_worker_catches_up_from_where_it_was(self) -> None:
        bench = Bench()
        bench.train(3)
        machine = WorkerMachine("w", bench.plan)
        machine.resumed(bench.machine.state, ())
        assert machine.in_flight[0].work == Work(3)

    def test_nothing_is_before_the_worker_has_joined(self) -> None:
        machine = WorkerMachine("w", make_plan())
        assert (machine.in_flight, machine.in_sight, machine.has_left) == ({}, (), False)


def test_only_the_steps_of_this_contribution_were_left_out() -> None:
    bench = Bench()
    bench.train(4)
    bench.land(0, 1)
    bench.train(4)
    ours = Participant(worker_id="w", sequence=2, weight=0.0)
    assert bench.land(0, 2, participants=(ours,))[0] == Note("left out", 0, 2, 4)


def test_the_first_anchor_has_as_many_repairs_as_any_other() -> None:
    bench = Bench()
    machine = WorkerMachine("w", bench.plan)
    machine.joined([bench.came(0, 0)])
    for _ in range(REPAIRS - 1):
        machine.confirmed(0, bench.came(0, 0))
    assert machine.confirmed(0, None) == []
    machine.stepped()
    assert machine.state.metrics.anchor_repairs == REPAIRS - 1
