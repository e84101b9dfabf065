"""What the controller decides: a layer's plan, complete and numbered, with the reason for it.

A plan is one value. It holds everything that a member needs, for every member, so nobody completes it from what it
happens to know itself; `orders_for` reads it, and takes nothing else. Two members with the same layer and revision hold
the same bytes, therefore the same orders.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import json

from ...errors import ConfigError
from ...types import Assignment, Count, Label, LearningRate, Plain, Positive, Seconds

RouteKind = Literal["star", "tree"]
Cause = Literal[
    "first", "kept", "waiting", "bounds", "members", "route", "slower", "faster", "balance", "timeout", "policy"
]


class LayerPlan(Plain, frozen=True):
    """Holds from round `from_round` on. `sync_every` and `delay` are those of the cluster in the middle by speed; each
    has its own in `assignments`, which are sorted by name. `not_planned_for`: clusters whose links are so slow that it
    was made for the others."""

    SINCE: ClassVar[int] = 2

    layer: Label
    revision: Positive
    from_round: Count
    sync_every: Positive
    codec: Label
    down_codec: Label
    num_fragments: Positive
    delay: Count
    carry: bool
    outer_lr: LearningRate
    timeout_s: Seconds
    backend: Label
    route: RouteKind
    assignments: tuple[Assignment, ...]
    not_planned_for: tuple[Label, ...] = ()

    @property
    def parents(self) -> dict[str, str]:
        return {each.cluster: each.sends_to for each in self.assignments}


class ClusterOrders(Plain, frozen=True):
    """What one cluster does under a plan."""

    layer: Label
    revision: Positive
    from_round: Count
    assignment: Assignment
    relays_for: tuple[Label, ...]
    codec: Label
    down_codec: Label
    num_fragments: Positive
    carry: bool
    outer_lr: LearningRate
    timeout_s: Seconds
    backend: Label


class PlanChange(Plain, frozen=True):
    """One field of a plan, before and after, as text."""

    field: Label
    before: Label
    after: Label


class LayerDecision(Plain, frozen=True):
    """`changes` is empty if the plan stays. `utilization` is what the model of cost expects under the plan, from what
    was measured; None = nothing could be trusted. `meets_target`: whether that is enough. `not_believed`: what was left
    out, and why. `not_planned_for`: clusters whose links are so slow that the plan is made for the others; rounds close
    without them."""

    plan: LayerPlan
    cause: Cause
    reason: str
    changes: tuple[PlanChange, ...] = ()
    utilization: float | None = None
    meets_target: bool = False
    not_believed: tuple[str, ...] = ()
    not_planned_for: tuple[Label, ...] = ()


def orders_for(plan: LayerPlan, cluster: str) -> ClusterOrders:
    mine = next((each for each in plan.assignments if each.cluster == cluster), None)
    if mine is None:
        known = ", ".join(each.cluster for each in plan.assignments)
        raise ConfigError(
            f"revision {plan.revision} of layer {plan.layer!r} has no cluster {cluster!r}; it has {known}"
        )
    return ClusterOrders(
        layer=plan.layer,
        revision=plan.revision,
        from_round=plan.from_round,
        assignment=mine,
        relays_for=tuple(each.cluster for each in plan.assignments if each.sends_to == cluster),
        codec=plan.codec,
        down_codec=plan.down_codec,
        num_fragments=plan.num_fragments,
        carry=plan.carry,
        outer_lr=plan.outer_lr,
        timeout_s=plan.timeout_s,
        backend=plan.backend,
    )


def encode_plan(plan: LayerPlan) -> bytes:
    """The same bytes for equal plans."""
    return json.encode(plan)


def decode_plan(data: bytes) -> LayerPlan:
    return json.decode(data, type=LayerPlan)


def changes_between(before: LayerPlan | None, after: LayerPlan) -> tuple[PlanChange, ...]:
    """Field by field, without the plan's number and its round."""
    if before is None:
        return ()
    found: list[PlanChange] = []
    for name in LayerPlan.__struct_fields__:
        was, now = getattr(before, name), getattr(after, name)
        if name in ("revision", "from_round") or was == now:
            continue
        if name == "assignments":
            was, now = _in_words(before), _in_words(after)
        found.append(PlanChange(field=name, before=str(was)[:256], after=str(now)[:256]))
    return tuple(found)


def _in_words(plan: LayerPlan) -> str:
    return "; ".join(f"{a.cluster} {a.local_steps}×{a.batch_size} → {a.sends_to}" for a in plan.assignments)
