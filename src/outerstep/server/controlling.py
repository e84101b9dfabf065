"""The controller in a server: a thread that decides after each round, and what the status says of it.

What is decided, and how it becomes the run's plan: coordination/autoconfig/steering.py. No round waits for this thread.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..config import ServerConfig
from ..coordination.autoconfig import ControllerState, LayerDecision, LayerPlan, LinkMeter, Policy
from ..coordination.autoconfig.collected import facts_of, links_of
from ..coordination.autoconfig.steering import Steering, SteeringSettings
from ..coordination.layers.lifecycle import known_place
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.membership import KnownWorker
from ..defaults import OUTER_LR
from ..errors import ConfigError
from ..events import Event, VersionPublished
from ..observe.status import ClusterStatus, DecisionStatus, LayerPlanStatus, LayerStatus, LinkStatus
from .outer_state import Outer, takes_lr

log = logging.getLogger(__name__)

MOST_SHOWN_LINKS = 4096  # in a status


def make_steering(config: ServerConfig, optimizer: Outer) -> Steering | None:
    """None: nobody has named a target, so nothing is chosen by itself. `optimizer`: of the kind that takes the outer
    step; of most kinds η cannot change."""
    if config.target_utilization is None:
        return None
    settings = SteeringSettings(
        target_utilization=config.target_utilization,
        least_sync_every=config.least_sync_every,
        most_sync_every=config.most_sync_every,
        global_batch=config.global_batch,
        outer_lr=config.outer_lr if config.outer_lr is not None or takes_lr(optimizer) else OUTER_LR,
        round_deadline_s=config.round_deadline_s,
        may_grow=config.combining.is_plain and not config.deterministic,  # else all are kept until their round closes
    )
    return Steering(settings, load_policy(config.policy) if config.policy is not None else None)


def load_policy(name: str) -> Policy:
    """The function that MODULE:FUNCTION names."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy must be MODULE:FUNCTION that can be imported, got {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"policy must name a function, got {name!r}, which is a {type(found).__name__}")
    return cast(Policy, found)


class ControllerThread:
    """`look`: the state to decide from, or None; `carry_out`: what becomes of a decision. Both take the lock."""

    def __init__(
        self,
        steering: Steering,
        look: Callable[[], ControllerState | None],
        carry_out: Callable[[LayerDecision], None],
    ) -> None:
        self._steering, self._look, self._carry_out = steering, look, carry_out
        self._due = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="outerstep-controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(5.0)  # a policy of the user's may take longer; it changes nothing any more

    def heard(self, event: Event) -> None:
        """A round has closed: it is time."""
        if isinstance(event, VersionPublished) and event.agreement.participants:
            self._due.set()

    def _live(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._stopping:
                return
            try:
                self.decide_now()
            except ConfigError as error:  # say, a codec of the user's own, whose size nobody knows
                log.warning("the controller cannot decide: %s", error)
            except Exception:  # the run goes on as it is
                log.exception("the controller could not decide; the plan stays as it is")

    def decide_now(self) -> None:
        state = self._look()
        if state is not None:
            decision = self._steering.decide(state)
            if not self._stopping:
                self._carry_out(decision)


# --- for the status ---------------------------------------------------------------------------------------------------


def clusters_of(coordinator: Coordinator, addresses: Mapping[str, str]) -> dict[str, ClusterStatus]:
    made: dict[str, ClusterStatus] = {}
    for member in coordinator.members:
        if member.live:
            known = facts_of(member)
            made[member.worker_id] = ClusterStatus(
                address=addresses.get(member.worker_id, ""),
                size=known.size,
                members=list(known.members),
                machine=known.machine,
                accelerators=list(known.accelerators),
                backends=list(known.backends),
                data_location=known.data_location,
                batch_size=known.batch_size,
                step_s=known.step_s,
                unit_steps=known.unit_steps,
                leader=known.leader,
                states=_states(member),
            )
    return made


def _states(member: KnownWorker) -> dict[str, str]:
    """Of the members of a cluster; what is no place in a life is left out."""
    if member.facts is None:
        return {}
    told = zip(member.facts.members, map(known_place, member.facts.states), strict=False)
    return {name: place for name, place in told if place}


def links_of_run(coordinator: Coordinator, meter: LinkMeter, now: float) -> list[LinkStatus]:
    members = [member for member in coordinator.members if member.live]
    heard_before_s = {member.worker_id: now - member.facts_at for member in members}
    return [
        LinkStatus(
            source=report.source,
            target=report.target,
            bytes_per_s=round(report.bytes_per_s, 1),
            latency_s=round(report.latency_s, 6),
            age_s=round(report.age_s, 1),
            measured_by=report.measured_by,
        )
        for report in links_of(members, meter.reports(now), heard_before_s)[:MOST_SHOWN_LINKS]
    ]


def layer_of(steering: Steering | None) -> LayerStatus | None:
    if steering is None:
        return None
    plan, last = steering.plan, steering.last
    return LayerStatus(
        layer=steering.layer,
        target_utilization=steering.settings.target_utilization,
        utilization=last.utilization if last is not None else None,
        plan=_plan(plan) if plan is not None else None,
        last=_decision(last) if last is not None else None,
        decisions=[_decision(made) for made in steering.decisions],
    )


def _plan(plan: LayerPlan) -> LayerPlanStatus:
    said: dict[str, Any] = {
        name: getattr(plan, name) for name in LayerPlanStatus.__struct_fields__ if hasattr(plan, name)
    }
    return LayerPlanStatus(
        **said,
        local_steps={each.cluster: each.local_steps for each in plan.assignments},
        batch_sizes={each.cluster: each.batch_size for each in plan.assignments},
        sends_to={each.cluster: each.sends_to for each in plan.assignments},
        leaders={each.cluster: each.leader for each in plan.assignments if each.leader},
    )


def _decision(made: LayerDecision) -> DecisionStatus:
    return DecisionStatus(
        round=made.plan.from_round,
        revision=made.plan.revision,
        cause=made.cause,
        reason=made.reason,
        changes={change.field: f"{change.before} → {change.after}" for change in made.changes},
        utilization=made.utilization,
        meets_target=made.meets_target,
        not_believed=list(made.not_believed),
        not_planned_for=list(made.not_planned_for),
    )
