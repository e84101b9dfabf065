"""A policy of the user's own: a function from the state to the plans it wants, held to the same bounds.

    def policy(state: ControllerState) -> Mapping[str, LayerPlan]: …

It names the layers that it wants to change; the others keep their plan. Whatever it returns is checked like the
controller's own plans, layer by layer. A plan that breaks a rule changes nothing and says why; so does a policy that
raises. The revision and the round are not the policy's to choose. `examples/own_policy.py` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from ..cost import MEASURED, Overheads
from .bounds import breaches
from .controller import OUTER_TIMES_INNER, decide
from .layer_plan import LayerDecision, LayerPlan, changes_between
from .state import ControllerState, LayerState, inner_first

Policy = Callable[[ControllerState], Mapping[str, LayerPlan]]
CANNOT_WAIT: Final = ("bounds", "members", "route", "timeout")
LONGEST_REASON: Final = 1000


def decide_by(policy: Policy, state: ControllerState, overheads: Overheads = MEASURED) -> tuple[LayerDecision, ...]:
    """The controller's decisions, with the policy's plans where it has one that may be carried out. Changes that cannot
    wait (somebody left, a line is gone) are the controller's where the policy's plan does not cover them."""
    usual = {made.plan.layer: made for made in decide(state, overheads)}
    try:
        wanted = dict(policy(state))
    except Exception as error:  # noqa: BLE001 - it is the user's code: its mistakes must not stop the run
        wanted, failed = {}, f"the policy raised {type(error).__name__}: {error}"
    else:
        unknown = sorted(map(str, wanted.keys() - usual.keys()))
        failed = f"the policy names layers that do not exist: {', '.join(unknown)}" if unknown else ""
    made: dict[str, LayerDecision] = {}
    for layer in inner_first(state.layers):
        inner_s = max((made[name].plan.timeout_s for name in layer.inside if name in made), default=0.0)
        fallback = _fallback(layer, usual[layer.name])
        if layer.name in wanted:
            decision = _checked(layer, wanted[layer.name], inner_s, fallback)
        else:
            decision = replace(fallback, reason=failed[:LONGEST_REASON]) if failed else fallback
        made[layer.name] = _above_inner(layer, decision, inner_s)
    return tuple(made[layer.name] for layer in state.layers)


def _fallback(layer: LayerState, usual: LayerDecision) -> LayerDecision:
    """The plan in force; what the controller says where that one cannot stay."""
    if layer.plan is None or usual.plan is layer.plan or usual.cause in CANNOT_WAIT:
        return usual
    reason = "the policy leaves this layer as it is"
    return replace(
        usual, plan=layer.plan, cause="kept", reason=reason, changes=(), utilization=None, meets_target=False
    )


def _checked(layer: LayerState, plan: object, inner_timeout_s: float, fallback: LayerDecision) -> LayerDecision:
    refused = _refusal(layer, plan, inner_timeout_s)
    if refused or not isinstance(plan, LayerPlan):
        reason = f"the policy's plan is refused: {refused}"[:LONGEST_REASON]
        return replace(fallback, cause="policy", reason=reason)
    changes = changes_between(layer.plan, plan)
    if layer.plan is not None and not changes:
        return fallback
    return replace(
        fallback,
        plan=replace(plan, revision=layer.plan.revision + 1 if layer.plan else 1, from_round=layer.round),
        cause="policy",
        reason="the policy wants it",
        changes=changes,
        utilization=None,
        meets_target=False,
    )


def _refusal(layer: LayerState, plan: object, inner_timeout_s: float) -> str:
    """By type, then by meaning."""
    if not isinstance(plan, LayerPlan):
        return f"it must be a LayerPlan, got {type(plan).__name__}"
    try:
        read = msgspec.convert(msgspec.to_builtins(plan), LayerPlan)
    except (msgspec.ValidationError, TypeError) as error:
        return f"it must be a LayerPlan: {error}"
    if read.timeout_s <= inner_timeout_s:
        return f"timeout_s must be above that of the layers inside ({inner_timeout_s:g}), got {read.timeout_s:g}"
    return "; ".join(breaches(read, layer))


def _above_inner(layer: LayerState, made: LayerDecision, inner_timeout_s: float) -> LayerDecision:
    """An inner layer's new timeout may have overtaken the one that this layer keeps."""
    if made.plan.timeout_s > inner_timeout_s:
        return made
    now = layer.plan
    plan = replace(
        made.plan,
        timeout_s=OUTER_TIMES_INNER * inner_timeout_s,
        from_round=layer.round,
        revision=now.revision + 1 if now else 1,
    )
    reason = f"those inside it may take {inner_timeout_s:g} s"
    return replace(made, plan=plan, cause="timeout", reason=reason, changes=changes_between(now, plan))
