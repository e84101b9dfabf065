"""Which units of its data a worker's machine believes to be sent, late, or given up: always those of the steps."""

from __future__ import annotations

import pytest

from outerstep.coordination.worker.effects import Finish, Send
from outerstep.coordination.worker.machine import Units, Work
from unit.coordination.bench_worker import DONE, WAITING, Bench
from unit.coordination.worker.test_worker_leaving_and_resuming import resume


def sent(effects: object) -> list[Units]:
    assert isinstance(effects, list)
    return [effect.units for effect in effects if isinstance(effect, Send)]


def unit(number: int) -> Units:
    return ((number, number + 1),)


@pytest.mark.parametrize(
    ("one", "other", "union", "difference"),
    [
        ((), (), (), ()),
        (((0, 3),), (), ((0, 3),), ((0, 3),)),
        ((), ((0, 3),), ((0, 3),), ()),
        (((0, 3),), ((1, 2),), ((0, 3),), ((0, 1), (2, 3))),
        (((0, 2),), ((1, 4),), ((0, 4),), ((0, 1),)),
        (((0, 1),), ((2, 3),), ((0, 1), (2, 3)), ((0, 1),)),
    ],
)
def test_units_are_a_set_of_which_sum_and_difference_are_union_and_difference(
    one: Units, other: Units, union: Units, difference: Units
) -> None:
    first, second = Work(5, 40, 300, one), Work(2, 10, 100, other)
    assert first + second == Work(7, 50, 400, union)
    assert first - second == Work(3, 30, 200, difference)


class TestSending:
    def test_a_contribution_names_the_units_of_its_steps_and_the_next_only_those_since(self) -> None:
        bench = Bench()
        bench.machine.count(8, 90, unit(0))
        bench.machine.count(8, 90, unit(2))
        assert sent(bench.train(4)) == [((0, 1), (2, 3))]
        bench.land(0, 1)
        bench.machine.count(8, 90, unit(3))
        assert sent(bench.train(4)) == [unit(3)]

    def test_a_late_contribution_keeps_its_own_units_until_it_is_confirmed(self) -> None:
        bench = Bench()
        bench.machine.count(8, 90, unit(0))
        bench.train(4)
        bench.land(0, 1)
        bench.machine.count(8, 90, unit(1))
        bench.train(4)
        bench.land(0, 2, counted_in=3)
        assert (bench[0].late_in, bench[0].late_units) == (3, unit(1))
        again, _ = resume(bench)
        again.land(0, 2, counted=False, unchanged=True)
        assert (again[0].late_in, again[0].late_units) == (3, unit(1))
        again.train(4)
        again.land(0, 4)
        assert (again[0].late_in, again[0].late_units) == (0, ())


class TestGivingUp:
    def test_units_whose_steps_somebody_else_overwrote_are_dropped_one_after_the_other(self) -> None:
        bench = Bench(sync_every=100)
        for number in (0, 4):
            bench.machine.count(8, 90, unit(number))
            bench.train(2)
            bench.machine.stepped(changed=True)
        assert bench.machine.state.dropped == ((0, 1), (4, 5))

    def test_what_is_in_flight_is_dropped_only_if_it_does_not_count(self) -> None:
        bench = Bench(delay=3)
        bench.machine.count(8, 90, unit(0))
        bench.train(4)
        bench.machine.count(8, 90, unit(1))
        bench.train(3)
        bench.land(0, 1)
        assert bench.machine.state.dropped == unit(1), "overwritten by the agreement, which came later"
        bench.machine.count(8, 90, unit(4))
        bench.train(1)
        bench.machine.count(8, 90, unit(6))
        bench.machine.stepped(changed=True)
        assert bench.machine.state.dropped == ((1, 2), (6, 7)), "unit 4 was sent before"
        bench.train(2)
        bench.miss(0, 2)
        assert bench.machine.state.dropped == ((1, 2), (4, 5), (6, 7))


def test_a_favour_is_settled_before_the_workers_own() -> None:
    """A worker that leaves is gone when the last of its own has landed."""
    bench = Bench([0, 0, 0], sync_every=6, delay=5)
    bench.train(7)
    bench[2].in_flight, bench[2].counted = None, bench.machine.state.work  # nothing is under way there, nothing unsent
    assert bench.machine.waiting == (0,)
    wants = WAITING.__class__(done=False, wanted=frozenset({(2, 1)}))
    bench.look({0: wants})
    assert bench.machine.waiting == (0, 2)
    assert bench.look({0: DONE, 2: DONE}) == [Finish(2), Finish(0)]
