"""A user's own policy decides within the same bounds, and its mistakes change nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.autoconfig import (
    ControllerState,
    LayerDecision,
    LayerPlan,
    LayerState,
    decide,
    decide_by,
    decode_plan,
    encode_plan,
    orders_for,
)
from outerstep.coordination.autoconfig.policy import Policy
from outerstep.errors import ConfigError

from .layers import MBIT, cluster, decided, following, layer, star_links

ROOT = Path(__file__).parents[4]
RATES = dict.fromkeys(("a", "b"), 500 * MBIT)


def by(policy: Policy, state: LayerState) -> LayerDecision:
    (made,) = decide_by(policy, ControllerState(layers=(state,)))
    return made


def in_force(rounds: int = 20) -> tuple[LayerState, LayerPlan]:
    plan = decided(layer(RATES)).plan
    return following(layer(RATES), plan, rounds), plan


def test_a_policys_plan_is_carried_out_under_the_next_number() -> None:
    state, plan = in_force()
    made = by(lambda _: {"top": replace(plan, sync_every=77, revision=900, from_round=3)}, state)
    assert (made.cause, made.plan.sync_every) == ("policy", 77)
    assert (made.plan.revision, made.plan.from_round) == (2, state.round), "which is not the policy's to choose"
    assert [change.field for change in made.changes] == ["sync_every"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"sync_every": 501}, "sync_every must be from 10 to 500, got 501"),
        ({"codec": "sparse64"}, "codec must be one of bf16, int8, int4, got 'sparse64'"),
        ({"num_fragments": 2}, "num_fragments must be one of (1,)"),
        ({"delay": 6}, "delay must be from 0 to 3, got 6"),
        ({"delay": -1}, "it must be a LayerPlan"),
        ({"outer_lr": 1.5}, "outer_lr must be positive and at most 1, got 1.5"),
        ({"outer_lr": float("nan")}, "it must be a LayerPlan: Expected `float` > 0.0 - at `$.outer_lr`"),
        ({"timeout_s": 0.0}, "timeout_s must be above"),
        ({"timeout_s": float("nan")}, "it must be a LayerPlan: Expected `float` >= 0.0 - at `$.timeout_s`"),
        ({"backend": "nccl"}, "backend must be 'gloo'"),
        ({"route": "tree"}, "route must be what the assignments are, got 'tree'"),
        ({"layer": "other"}, "layer must be 'top', got 'other'"),
        ({"assignments": ()}, "assignments must be for a, b, in this order, got "),
        ({"sync_every": "many"}, "it must be a LayerPlan"),
    ],
)
def test_a_plan_out_of_bounds_changes_nothing_and_says_why(change: dict[str, Any], rule: str) -> None:
    state, plan = in_force()
    made = by(lambda _: {"top": replace(plan, **change)}, state)
    assert made.plan is plan
    assert (made.cause, made.changes) == ("policy", ())
    assert rule in made.reason


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"leader": "mallory"}, "the leader of 'a' must be one of its candidates, got 'mallory'"),
        ({"sends_to": "nowhere"}, "'a' must send to the centre or to a cluster that does, got 'nowhere'"),
        ({"sends_to": "a"}, "'a' must send to the centre or to a cluster that does, got 'a'"),
        ({"local_steps": 501}, "local_steps of 'a' must be from one per fragment to 500, got 501"),
        ({"delay": 12}, "delay of 'a' must be from 0 to 11 with 12 steps, got 12"),
        ({"local_steps": 1}, "delay of 'a' must be from 0 to 0 with 1 steps, got 3"),
        ({"larger_batches": 10**6}, "fewer larger ones than steps"),
    ],
)
def test_a_share_out_of_bounds_changes_nothing_either(change: dict[str, Any], rule: str) -> None:
    state, plan = in_force()
    first = replace(plan.assignments[0], **change)
    wanted = replace(plan, delay=1, assignments=(first, *plan.assignments[1:]))
    made = by(lambda _: {"top": wanted}, state)
    assert made.plan is plan
    assert rule in made.reason


def broken(state: ControllerState) -> dict[str, LayerPlan]:
    raise ZeroDivisionError("so it goes")


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (broken, "the policy raised ZeroDivisionError: so it goes"),
        (lambda _: None, "the policy raised TypeError"),
        (lambda _: {"bottom": None}, "the policy names layers that do not exist: bottom"),
        (lambda _: {"top": "faster!"}, "the policy's plan is refused: it must be a LayerPlan, got str"),
        (lambda _: {}, "the target is met"),
    ],
)
def test_a_policy_that_fails_stops_nothing(policy: Any, why: str) -> None:
    state, plan = in_force()
    made = by(policy, state)
    assert made.plan is plan
    assert why in made.reason


def test_what_cannot_wait_is_decided_without_it() -> None:
    """A cluster has left: the policy knows nothing of it, and the old plan cannot be carried out."""
    state, plan = in_force()
    left = replace(state, clusters=(cluster("a"),))
    made = by(lambda _: {}, left)
    assert [each.cluster for each in made.plan.assignments] == ["a"]
    assert by(lambda _: {"top": plan}, left).plan == made.plan


def test_a_policy_that_keeps_still_keeps_the_plan_where_the_controller_would_change_it() -> None:
    state, plan = in_force()
    slow = replace(state, links=star_links(dict.fromkeys(("a", "b"), 50 * MBIT)))
    assert decided(slow).cause == "slower"
    made = by(lambda _: {}, slow)
    assert made.plan is plan
    assert (made.reason, made.utilization) == ("the policy leaves this layer as it is", None)


def test_under_a_policy_too_an_inner_layer_times_out_first() -> None:
    inner, plan = in_force()
    outer_plan = replace(plan, layer="outer", timeout_s=80.0)
    outer = replace(inner, name="outer", inside=("top",), plan=outer_plan)
    state = ControllerState(layers=(outer, inner))
    longer = decide_by(lambda _: {"top": replace(plan, timeout_s=200.0)}, state)
    assert [made.plan.timeout_s for made in longer] == [400.0, 200.0]
    assert [made.cause for made in longer] == ["timeout", "policy"]
    both = {"top": replace(plan, timeout_s=200.0), "outer": replace(outer_plan, timeout_s=150.0)}
    refused = decide_by(lambda _: both, state)
    assert [made.plan.timeout_s for made in refused] == [400.0, 200.0], "refused, and then raised as it must be"


def test_a_policy_that_returns_the_controllers_plans_is_the_controller() -> None:
    state = replace(layer(RATES), round=3)
    usual = decided(state)
    same = by(lambda given: {made.plan.layer: made.plan for made in decide(given)}, state)
    assert same.plan == usual.plan


def test_orders_come_from_the_plan_alone() -> None:
    _, plan = in_force()
    for name in ("a", "b"):
        assert orders_for(decode_plan(encode_plan(plan)), name) == orders_for(plan, name)
    with pytest.raises(ConfigError, match="revision 1 of layer 'top' has no cluster 'c'; it has a, b"):
        orders_for(plan, "c")


def test_the_example_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "own_policy.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    lines = done.stdout.splitlines()
    intervals = {line.split("every ")[1].split()[0] for line in lines}
    codecs = [line.split("steps, ")[1].split()[0] for line in lines]
    assert len(intervals) == 1, "never touched"
    assert codecs[3:6] == ["int4"] * 3, done.stdout
    assert codecs[-1] == codecs[2] != "int4", done.stdout
