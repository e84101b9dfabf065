"""Steps that send and adopt nothing may pass at once: a machine that is told so is where one is that took each."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from outerstep.coordination.worker.effects import Send
from outerstep.coordination.worker.machine import Cycle, Progress, Work, WorkerMachine
from outerstep.types import Plan


def machine(plan: Plan) -> WorkerMachine:
    made = WorkerMachine("w", plan)
    made.state.fragments = [Progress(0, Work(), 0) for _ in plan.fragments]
    return made


@pytest.mark.parametrize("seed", range(50))
def test_quiet_steps_are_those_after_which_nothing_happens(seed: int) -> None:
    rng = random.Random(seed)
    fragments = rng.randint(1, 5)
    plan = Plan(
        sync_every=rng.randint(fragments, 40),
        codec="fp32",
        fragments=tuple((f"p{i}",) for i in range(fragments)),
        part_size_bytes=8,
        max_staleness=4,
        heartbeat_timeout_s=0.0,
    )
    plan = replace_delay(plan, rng.randint(0, plan.sync_every - 1))
    one_by_one, at_once = machine(plan), machine(plan)
    start = rng.randrange(plan.sync_every)
    one_by_one.state.cycle, at_once.state.cycle = (Cycle(start, plan.sync_every) for _ in range(2))
    for one in (one_by_one, at_once):
        one.count(3, 40, ((0, 2),))
    for _ in range(6):
        quiet = at_once.quiet_steps
        at_once.trained(quiet)
        assert [one_by_one.stepped() for _ in range(quiet)] == [[]] * quiet
        assert one_by_one.state == at_once.state
        effects = one_by_one.stepped()
        assert effects == at_once.stepped()
        assert effects or one_by_one.waiting, "the step after the quiet ones sends or adopts something"
        for one in (one_by_one, at_once):
            settle(one)


def replace_delay(plan: Plan, delay: int) -> Plan:
    return replace(plan, delay=delay)


def settle(one: WorkerMachine) -> None:
    """Whatever was waited for has come."""
    one._wait = None
    for progress in one.state.fragments:
        flight = progress.in_flight
        if flight is not None and flight.land_at <= one.state.work.steps:
            progress.in_flight, progress.counted = None, flight.work


def test_more_than_the_quiet_ones_must_be_told_one_by_one() -> None:
    plan = Plan(
        sync_every=3, codec="fp32", fragments=(("p",),), part_size_bytes=8, max_staleness=4, heartbeat_timeout_s=0.0
    )
    one = machine(plan)
    assert one.quiet_steps == 2
    with pytest.raises(AssertionError):
        one.trained(3)
    one.trained(2)
    assert any(isinstance(effect, Send) for effect in one.stepped())
