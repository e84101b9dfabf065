"""What any plan must keep to, whoever made it: the controller, or a policy of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

from .layer_plan import LayerPlan
from .members import backend_for, longest_delay
from .state import LayerState


def breaches(plan: LayerPlan, layer: LayerState) -> list[str]:
    """Each rule that the plan breaks in this layer as it is now, with the value. Empty: it can be carried out."""
    return [*_of_numbers(plan, layer), *_of_members(plan, layer)]


def outside(plan: LayerPlan, layer: LayerState) -> bool:
    """Whether what the link decides about is out of bounds."""
    return any(True for _ in _of_numbers(plan, layer))


def _of_numbers(plan: LayerPlan, layer: LayerState) -> Iterator[str]:
    bounds = layer.bounds
    if plan.layer != layer.name:
        yield f"layer must be {layer.name!r}, got {plan.layer!r}"
    if not bounds.least_sync_every <= plan.sync_every <= bounds.most_sync_every:
        wanted = f"from {bounds.least_sync_every} to {bounds.most_sync_every}"
        yield f"sync_every must be {wanted}, got {plan.sync_every}"
    if plan.codec not in bounds.codecs:
        yield f"codec must be one of {', '.join(bounds.codecs)}, got {plan.codec!r}"
    if bounds.down_codec and plan.down_codec != bounds.down_codec:
        yield f"down_codec must be {bounds.down_codec!r}, as the run has it, got {plan.down_codec!r}"
    if plan.num_fragments not in bounds.fragments or plan.num_fragments > plan.sync_every:
        yield f"num_fragments must be one of {bounds.fragments} and at most sync_every, got {plan.num_fragments}"
    if not 0 <= plan.delay <= bounds.longest_delay(plan.sync_every):
        yield f"delay must be from 0 to {bounds.longest_delay(plan.sync_every)}, got {plan.delay}"
    if bounds.fixed_outer_lr is not None and plan.outer_lr != bounds.fixed_outer_lr:
        yield f"outer_lr must be {bounds.fixed_outer_lr:g}, as the operator says, got {plan.outer_lr}"
    elif bounds.fixed_outer_lr is None and not 0.0 < plan.outer_lr <= bounds.most_outer_lr:
        yield f"outer_lr must be positive and at most {bounds.most_outer_lr:g}, got {plan.outer_lr}"
    if not 0.0 < plan.timeout_s <= 1e9:
        yield f"timeout_s must be from 0 to 1e9, got {plan.timeout_s}"


def _of_members(plan: LayerPlan, layer: LayerState) -> Iterator[str]:
    members = {cluster.name: cluster for cluster in layer.clusters}
    listed = [each.cluster for each in plan.assignments]
    if listed != sorted(members):
        yield f"assignments must be for {', '.join(sorted(members))}, in this order, got {', '.join(listed)}"
        return
    if plan.backend != backend_for(layer.clusters):
        yield f"backend must be {backend_for(layer.clusters)!r}, which all can speak, got {plan.backend!r}"
    parents = plan.parents
    for each in plan.assignments:
        can_lead = {candidate.name for candidate in members[each.cluster].candidates}
        if each.leader not in can_lead and (each.leader or can_lead):
            yield f"the leader of {each.cluster!r} must be one of its candidates, got {each.leader!r}"
        if each.sends_to != layer.centre and parents.get(each.sends_to) != layer.centre:
            yield f"{each.cluster!r} must send to the centre or to a cluster that does, got {each.sends_to!r}"
        if each.batch_size < 1 or not 0 <= each.larger_batches < each.local_steps:
            batches = f"{each.batch_size} and {each.larger_batches} larger ones"
            yield f"batches of {each.cluster!r} must have a sample, and fewer larger ones than steps, got {batches}"
        if not plan.num_fragments <= each.local_steps <= max(layer.bounds.most_sync_every, plan.sync_every):
            most = layer.bounds.most_sync_every
            yield f"local_steps of {each.cluster!r} must be from one per fragment to {most}, got {each.local_steps}"
        elif not 0 <= each.delay <= longest_delay(plan.num_fragments, each.local_steps):
            most = longest_delay(plan.num_fragments, each.local_steps)
            yield f"delay of {each.cluster!r} must be from 0 to {most} with {each.local_steps} steps, got {each.delay}"
    is_tree = any(to != layer.centre for to in parents.values())
    if is_tree != (plan.route == "tree"):
        yield f"route must be what the assignments are, got {plan.route!r}"
