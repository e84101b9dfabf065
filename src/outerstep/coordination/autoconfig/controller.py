"""From what is known to the next plan of each layer. A function of its argument: no clock, no memory, no chance.

    decisions = decide(ControllerState(layers=(…)))        # before a round begins

When a plan changes, and how soon:

| cause | when | at once? |
|---|---|---|
| bounds, members, route | it cannot be carried out any more: a cluster came or went, a line is gone | yes |
| slower | the target is missed | after ten rounds; after three if by far |
| faster | a gentler setting would do, even with exchanges 1.25² times as long | after ten rounds |
| balance | a cluster's share is 1.25² times off its speed | after ten rounds |
| timeout | an exchange might take longer than it is given, or an inner layer has more time than its outer one | yes |

A setting is chosen with room for exchanges that take 1.25 times as long. So a link that is steady, but noisy, changes
nothing: up to that the target is met, and the way back begins much lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace as replace_core
from typing import Final

from msgspec.structs import replace

from ...types import Assignment
from ..cost import MEASURED, Overheads, RoundCost, star
from ..server.plan import CARRY_BEYOND
from .bounds import breaches, outside
from .layer_plan import Cause, LayerDecision, LayerPlan, changes_between
from .members import assignments_for, backend_for, delay_of, in_words
from .routes import whole_route
from .search import Core, Search
from .state import HYSTERESIS, ControllerState, LayerBounds, LayerState, check_state, inner_first
from .trust import LayerView, view_of

FAR_BACK: Final = HYSTERESIS**2  # what must be gained, or be off, before a plan that works is changed
URGENT_ROUNDS: Final = 3  # after a change, until even a target that is missed by far changes the plan again
LR_EXPONENT: Final = 1.0 / 8.0  # of the interval: 0.6 at 30 steps becomes 0.8 at 300, as in published tunings
SHORTEST_TIMEOUT_S: Final = 10.0
LONGEST_NEED_S: Final = 1e6
OUTER_TIMES_INNER: Final = 2.0


@dataclass(frozen=True)
class _Wish:
    """What the link asks for."""

    core: Core
    cause: Cause
    reason: str
    at_once: bool = False


def decide(state: ControllerState, overheads: Overheads = MEASURED) -> tuple[LayerDecision, ...]:
    """One decision per layer, in the order of the state."""
    check_state(state)
    made: dict[str, LayerDecision] = {}
    for layer in inner_first(state.layers):
        inner_s = max((made[name].plan.timeout_s for name in layer.inside if name in made), default=0.0)
        made[layer.name] = decide_layer(layer, inner_timeout_s=inner_s, overheads=overheads)
    return tuple(made[layer.name] for layer in state.layers)


def decide_layer(layer: LayerState, *, inner_timeout_s: float = 0.0, overheads: Overheads = MEASURED) -> LayerDecision:
    view = view_of(layer)
    search = Search(layer, view, overheads) if view.counted else None
    wish = _wish(layer, search)
    plan, cause, reason = _plan(layer, view, search, wish, inner_timeout_s)
    if layer.plan is not None and _too_soon(layer, search, wish):
        waiting = _Wish(_core_of(layer.plan), "waiting", f"{wish.reason}; it changed in round {layer.plan.from_round}")
        kept = _plan(layer, view, search, waiting, inner_timeout_s)
        if kept[0] is layer.plan:  # else the plan changes anyway, and then once
            plan, cause, reason = kept
    cost = search.cost(_core_of(plan)) if search is not None and search.can_route(_core_of(plan)) else None
    return LayerDecision(
        plan=plan,
        cause=cause,
        reason=reason,
        changes=changes_between(layer.plan, plan),
        utilization=None if cost is None else cost.utilization,
        meets_target=search is not None and cost is not None and search.meets(cost),
        not_believed=view.not_believed,
        not_planned_for=view.not_planned_for,
    )


# --- what the link asks for -------------------------------------------------------------------------------------------


def _wish(layer: LayerState, search: Search | None) -> _Wish:
    now = layer.plan
    if now is None:
        return _first(layer, search)
    core = _core_of(now)
    if outside(now, layer):
        new = (search.gentlest() or search.fastest()) if search else _unmeasured(layer)
        return _Wish(new, "bounds", f"the plan in force is out of bounds: {breaches(now, layer)[0]}", at_once=True)
    if search is None:
        return _Wish(core, "kept", "nothing that can be believed was measured")
    if not search.can_route(core):
        return _rerouted(layer, core, search)
    cost = search.cost(core)
    if search.meets(cost):
        return _gentler(core, cost, search)
    return _faster_exchange(core, cost, search)


def _first(layer: LayerState, search: Search | None) -> _Wish:
    if search is None:
        return _Wish(_unmeasured(layer), "first", "the first plan; nothing that can be believed was measured", True)
    core = search.gentlest()
    if core is None:
        return _Wish(search.fastest(), "first", "the first plan; no setting within bounds meets the target", True)
    return _Wish(core, "first", f"the first plan; {_expected(search.cost(core))}", True)


def _unmeasured(layer: LayerState) -> Core:
    """The usual interval and the most exact codec, straight to the centre."""
    bounds, centre = layer.bounds, layer.centre
    fragments = min(bounds.fragments)
    usual = min(max(bounds.usual_sync_every, bounds.least_sync_every, fragments), bounds.most_sync_every)
    return Core(usual, bounds.codecs[0], fragments, 0, star((c.name for c in layer.clusters), centre))


def _rerouted(layer: LayerState, core: Core, search: Search) -> _Wish:
    """A cluster has come or gone, or a line is cut. The rest of the plan stays if it still meets the target."""
    assert layer.plan is not None
    new = search.gentlest() or search.fastest()
    same = replace_core(core, parents=new.parents)
    wrong = _wrong_members(layer)
    return _Wish(
        same if search.meets(search.cost(same)) else new,
        "members" if wrong else "route",
        wrong or "a line of the route in force is gone",
        at_once=True,
    )


def _wrong_members(layer: LayerState) -> str:
    """Why the members cannot follow the plan in force any more, for people; "" if they can."""
    assert layer.plan is not None
    wrong = breaches(layer.plan, layer)
    return in_words(layer.plan.parents, layer.clusters) or wrong[0] if wrong else ""


def _gentler(core: Core, cost: RoundCost, search: Search) -> _Wish:
    new = search.meeting(FAR_BACK)
    shorter = new is not None and new.sync_every * HYSTERESIS <= core.sync_every
    same_length = new is not None and new.sync_every <= core.sync_every and search.order(new) < search.order(core)
    if new is not None and (shorter or same_length):
        after = search.cost(new)
        return _Wish(new, "faster", f"the link allows a gentler setting: {_expected(after)}, {_expected(cost)} before")
    return _Wish(core, "kept", f"the target is met: {_expected(cost)}")


def _faster_exchange(core: Core, cost: RoundCost, search: Search) -> _Wish:
    new = search.gentlest()
    if new is not None:
        return _Wish(new, "slower", f"the target is missed: {_expected(cost)}; with this {_expected(search.cost(new))}")
    new = search.fastest()
    after = search.cost(new)
    if (after.waiting_s + after.own_s) * HYSTERESIS * cost.compute_s < (cost.waiting_s + cost.own_s) * after.compute_s:
        return _Wish(new, "slower", f"no setting within bounds meets the target; the best is {_expected(after)}")
    return _Wish(core, "kept", f"no setting within bounds meets the target; {_expected(cost)} is about the best")


def _expected(cost: RoundCost) -> str:
    lost_s = cost.waiting_s + cost.own_s
    return f"{100.0 * cost.utilization:.1f} % ({cost.compute_s:.4g} s of training, {lost_s:.4g} s of waiting per round)"


def _too_soon(layer: LayerState, search: Search | None, wish: _Wish) -> bool:
    assert layer.plan is not None
    core, since = _core_of(layer.plan), layer.round - layer.plan.from_round
    if wish.cause == "kept" or wish.at_once or since >= layer.bounds.rounds_between_changes:
        return False
    urgent = search is not None and wish.cause == "slower" and search.misses_by_far(search.cost(core))
    return not (urgent and since >= URGENT_ROUNDS)


def _core_of(plan: LayerPlan) -> Core:
    return Core(plan.sync_every, plan.codec, plan.num_fragments, plan.delay, plan.parents)


# --- the whole plan ---------------------------------------------------------------------------------------------------


def _plan(
    layer: LayerState, view: LayerView, search: Search | None, wish: _Wish, inner_timeout_s: float
) -> tuple[LayerPlan, Cause, str]:
    """With its cause and reason: members may ask for a change where the link does not."""
    now, core, cause, reason = layer.plan, wish.core, wish.cause, wish.reason
    assignments = _assignments(layer, view, core)
    if now is not None and cause in ("kept", "waiting"):
        anew = _new_shares(layer, view)
        if anew is None:
            assignments = now.assignments
        else:
            cause, reason = anew
    parents = {each.cluster: each.sends_to for each in assignments}
    need_s = _needed_s(view, search, core, assignments)
    timeout_s = _timeout(now.timeout_s if now else 0.0, need_s, inner_timeout_s)
    if now is not None and timeout_s != now.timeout_s and cause in ("kept", "waiting"):
        if timeout_s < now.timeout_s and _soon(layer):
            timeout_s = now.timeout_s
        else:
            cause, reason = "timeout", f"a round may take {need_s:.4g} s, and those inside it {inner_timeout_s:.4g} s"
    if layer.global_batch and (total := sum(each.samples for each in assignments)) != layer.global_batch:
        reason += f"; of the global batch of {layer.global_batch} the steps and memory allow {total}"
    backend = backend_for(layer.clusters)
    if not backend:
        reason += "; there is no backend that all clusters can speak"
    made = LayerPlan(
        layer=layer.name,
        revision=1,
        from_round=layer.round,
        sync_every=core.sync_every,
        codec=core.codec,
        down_codec=layer.bounds.down_for(core.codec),
        num_fragments=core.num_fragments,
        delay=core.delay,
        carry=core.delay > CARRY_BEYOND * core.sync_every,
        outer_lr=now.outer_lr
        if now is not None and cause in ("kept", "waiting")
        else outer_lr(layer.bounds, core.sync_every),
        timeout_s=timeout_s,
        backend=backend,
        route="tree" if set(parents.values()) != {layer.centre} else "star",
        assignments=assignments,
        not_planned_for=now.not_planned_for
        if now is not None and cause in ("kept", "waiting")
        else view.not_planned_for,
    )
    plan = _numbered(now, made)
    return plan, "kept" if plan is now and cause != "waiting" else cause, reason


def _assignments(layer: LayerState, view: LayerView, core: Core) -> tuple[Assignment, ...]:
    most = max(layer.bounds.most_sync_every, core.sync_every)
    steps = view.local_steps(core.sync_every, core.num_fragments, most)
    delays = {name: delay_of(core.delay, core.sync_every, core.num_fragments, count) for name, count in steps.items()}
    return assignments_for(layer, view.clusters, steps, delays, whole_route(core.parents, layer))


def _new_shares(layer: LayerState, view: LayerView) -> tuple[Cause, str] | None:
    """Whether members must be assigned anew even if the link asks for nothing, and why."""
    now = layer.plan
    assert now is not None
    if wrong := _wrong_members(layer):
        return "members", wrong
    fitting = _assignments(layer, view, _core_of(now))
    led = {cluster.name: cluster.leader for cluster in layer.clusters if cluster.leader}
    for was, fits in zip(now.assignments, fitting, strict=True):
        if was.leader != fits.leader and fits.cluster in led:
            return "members", f"{fits.cluster} is led by {led[fits.cluster]}"
    if _samples_off(layer, now.assignments, fitting):
        return "members", f"the global batch that was asked is {layer.global_batch} now"
    if _unbalanced(now.assignments, fitting) and not _soon(layer):
        return "balance", "a cluster's share of the steps is far off its speed"
    return None


def _numbered(now: LayerPlan | None, made: LayerPlan) -> LayerPlan:
    """The plan in force itself if nothing differs; else the next revision."""
    if now is None:
        return made
    return replace(made, revision=now.revision + 1) if changes_between(now, made) else now


def outer_lr(bounds: LayerBounds, sync_every: int) -> float:
    """η grows slowly with H, unless somebody has fixed it. Two digits: a plan is read by people, too."""
    if bounds.fixed_outer_lr is not None:
        return bounds.fixed_outer_lr
    grown = bounds.usual_outer_lr * math.pow(sync_every / bounds.usual_sync_every, LR_EXPONENT)
    return max(0.01, min(round(grown, 2), bounds.most_outer_lr))


def _soon(layer: LayerState) -> bool:
    assert layer.plan is not None
    return layer.round - layer.plan.from_round < layer.bounds.rounds_between_changes


def _samples_off(layer: LayerState, now: tuple[Assignment, ...], new: tuple[Assignment, ...]) -> bool:
    """Whether the samples of a round are not what was asked, and can be brought nearer."""
    if not layer.global_batch:
        return False
    off = [abs(sum(each.samples for each in some) - layer.global_batch) for some in (now, new)]
    return off[1] < off[0]


def _unbalanced(now: tuple[Assignment, ...], new: tuple[Assignment, ...]) -> bool:
    """Two steps or more, too: of few steps one is much."""
    pairs = [(was.local_steps, fits.local_steps) for was, fits in zip(now, new, strict=True)]
    return any(max(pair) > FAR_BACK * min(pair) and max(pair) - min(pair) >= 2 for pair in pairs)


def _needed_s(view: LayerView, search: Search | None, core: Core, assignments: tuple[Assignment, ...]) -> float:
    """How long a member may have to wait: for an exchange that takes four times as long as it should, and for others
    that are late by half a round."""
    if search is None or not search.can_route(core):
        return 0.0
    step_s = {cluster.name: cluster.step_s for cluster in view.clusters}
    round_s = max(each.local_steps * step_s[each.cluster] for each in assignments)
    return min(4.0 * search.exchange_s(core) + 0.5 * round_s, LONGEST_NEED_S)


def _timeout(now_s: float, need_s: float, inner_s: float) -> float:
    """10 s doubled as often as it takes. Kept while it is enough and at most eight times that, and above the inner
    layers' in any case: an outer round that ends before the inner ones can wait for nobody."""
    least_s = max(SHORTEST_TIMEOUT_S, need_s, OUTER_TIMES_INNER * inner_s)
    if least_s <= now_s and (now_s <= 8.0 * least_s or need_s == 0.0):
        return now_s
    wanted_s = max(SHORTEST_TIMEOUT_S, 1.5 * need_s, OUTER_TIMES_INNER * inner_s)
    return math.ldexp(SHORTEST_TIMEOUT_S, math.ceil(math.log2(wanted_s / SHORTEST_TIMEOUT_S)))
