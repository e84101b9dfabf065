"""The controller of one run: from what was collected to a decision, and from a decision to the run's plan.

    state = steering.state(run, links, now)              # between two rounds, with the coordinator's lock
    decision = steering.decide(state)                    # without it: this may take a while
    plan, events = steering.carry_out(run, decision)     # with it

The coordinator says what the run is (`SteeredRun`), and puts the plan into force.

A decision that changes something becomes the run's next plan. It holds from the next round that closes: with what that
round agrees on everybody is told the same revision, and does it from the cycle after (with a delay: from the one after
that, because the next has begun). η is that of the plan that a round ends under: its journal record has it. The
operator's own settings are the limits: a stated `outer_lr` or `round_deadline` stays; `sync_every` and the codec are
where it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ...errors import ConfigError, PlanMismatch
from ...events import PlanDecided
from ...types import THE_SERVER, Assignment, Manifest, Plan, Wishes
from ..server.membership import KnownWorker
from ..server.plan import Settled, changed
from .collected import cluster_of, links_of, unit_steps_of
from .controller import decide
from .layer_plan import LayerDecision, LayerPlan, encode_plan
from .policy import Policy, decide_by
from .state import ControllerState, LayerBounds, LayerState, LinkReport, usual_bounds

TOP: Final = "top"
CODECS: Final = LayerBounds().codecs
LAST: Final = 16  # decisions that are remembered for people
# Of a layer's plan, what a run does. Orders are wishes that the next plan grants; terms are told under the names of the
# settings that they stand in for, and an operator that has said one of those keeps it.
ORDERS: Final = ("sync_every", "codec", "delay", "carry")
TERMS: Final = {"outer_lr": "outer_lr", "timeout_s": "round_deadline_s"}


@dataclass(frozen=True)
class SteeringSettings:
    """What the operator says. None = the usual. `outer_lr`: it stays; None = the controller's to choose, from
    `usual_outer_lr` on. `round_deadline_s`: likewise. `may_grow`: whether there is room for contributions that are
    larger than those the run began with."""

    target_utilization: float
    least_sync_every: int | None = None
    most_sync_every: int | None = None
    global_batch: int = 0
    outer_lr: float | None = None
    round_deadline_s: float | None = None
    may_grow: bool = True

    @property
    def said(self) -> frozenset[str]:
        """The terms that stay as they are."""
        return frozenset(name for name in TERMS.values() if getattr(self, name) is not None)


@dataclass(frozen=True)
class SteeredRun:
    """A run as the controller is shown it. `plan`: the next one, or the one in force; `members`: those that are live;
    `rounds`: how many every fragment has completed; `is_open`: more rounds may come, and the model's names stay."""

    plan: Plan | None
    manifest: Manifest | None
    settled: Settled | None
    members: tuple[KnownWorker, ...]
    rounds: int
    is_open: bool

    def first_round(self, plan: Plan) -> int:
        """The first that a decision of now can hold for. The open round's members are told with what it agrees on."""
        return self.rounds + 2 + (plan.delay > 0)


class Steering:
    """Guarded by the coordinator's lock, except `decide`. `plan`: the layer's plan in force; None = the run's own, as
    it was settled when the first worker joined. `decisions`: those that changed something, the newest last; `last`:
    the newest of all."""

    def __init__(self, settings: SteeringSettings, policy: Policy | None = None) -> None:
        self.settings, self._policy = settings, policy
        self.layer = TOP  # or the cluster that this is
        self.plan: LayerPlan | None = None
        self.decisions: deque[LayerDecision] = deque(maxlen=LAST)
        self.last: LayerDecision | None = None

    # --- what it decides from -----------------------------------------------------------------------------------------

    def state(self, run: SteeredRun, links: Iterable[LinkReport], now: float) -> ControllerState | None:
        """None: there is nothing to decide yet, or not any more."""
        plan, manifest, members = run.plan, run.manifest, run.members
        if plan is None or manifest is None or run.settled is None or not members or not run.is_open:
            return None
        parameters = sum(spec.numel for spec in manifest.parameters)
        heard_before_s = {member.worker_id: now - member.facts_at for member in members}
        number = run.first_round(plan)
        return ControllerState(
            layers=(
                LayerState(
                    name=self.layer,
                    round=number,
                    parameters=max(parameters, 1),
                    clusters=tuple(cluster_of(member) for member in members),
                    links=links_of(members, links, heard_before_s),
                    centre=THE_SERVER,
                    plan=_in_force(self.plan, plan, number),
                    bounds=self._bounds(plan, parameters, members, run.settled.codec),
                    target_utilization=self.settings.target_utilization,
                    global_batch=self.settings.global_batch,
                ),
            )
        )

    def _codecs(self, plan: Plan, settled: str) -> tuple[str, ...]:
        """The usual ones, if the run has one of them: any other was somebody's choice."""
        if plan.codec not in CODECS:
            return (plan.codec,)
        first = 0 if self.settings.may_grow or settled not in CODECS else CODECS.index(settled)
        return CODECS[min(first, CODECS.index(plan.codec)) :]

    def _bounds(self, plan: Plan, parameters: int, members: Sequence[KnownWorker], settled: str) -> LayerBounds:
        """In units of the layer: a cluster's round may be many steps."""
        said, unit = self.settings, unit_steps_of(members)
        usual, fragments = usual_bounds(parameters, len(members)), len(plan.fragments)
        least = max(said.least_sync_every or usual.least_sync_every // unit, fragments, 1)
        most = max(said.most_sync_every or usual.most_sync_every // unit, least)
        return replace(
            usual,
            least_sync_every=least,
            most_sync_every=most,
            codecs=self._codecs(plan, settled),
            down_codec=plan.down_codec,
            fragments=(fragments,),
            most_delay=usual.most_delay // unit,
            usual_sync_every=max(usual.usual_sync_every // unit, 1),
            fixed_outer_lr=said.outer_lr,
        )

    # --- what it decides ----------------------------------------------------------------------------------------------

    def decide(self, state: ControllerState) -> LayerDecision:
        (decision,) = decide(state) if self._policy is None else decide_by(self._policy, state)
        return decision

    def carry_out(self, run: SteeredRun, decision: LayerDecision) -> tuple[Plan | None, list[PlanDecided]]:
        """The run's new plan, if there is one, and what is to be told."""
        before, self.last = self.last, decision
        now = run.plan
        if decision.cause in ("kept", "waiting"):
            self.plan = decision.plan  # an operator may have ordered another since the last one
            return None, []
        is_blind = self.plan is None and decision.utilization is None and decision.cause != "policy"
        if now is None or is_blind or decision.plan == self.plan:
            is_refused = decision.cause == "policy" and (before is None or before.reason != decision.reason)
            return None, [_event(decision)] if is_refused else []
        plan = replace(decision.plan, from_round=run.first_round(now))
        try:
            carries = bool(run.settled and run.settled.carry)
            made = as_run_plan(now, plan, carries=carries, said=self.settings.said)
        except (ConfigError, PlanMismatch) as error:
            self.last = replace(decision, reason=f"it cannot be carried out: {error}")
            return None, []
        self.plan = plan
        self.last = decision = replace(decision, plan=plan)
        self.decisions.append(decision)
        return made, [_event(decision)]

    @property
    def round_deadline_s(self) -> float | None:
        """Rounds close without a member that is later than the plan allows. None: there is no plan, or the operator has
        said when."""
        return self.plan.timeout_s if self.settings.round_deadline_s is None and self.plan is not None else None

    # --- over a restart of the server ---------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """As JSON has it."""
        return {} if self.plan is None else {"layer_plan": msgspec.json.decode(encode_plan(self.plan))}

    def resume(self, facts: Mapping[str, Any]) -> None:
        if "layer_plan" in facts:
            self.plan = msgspec.convert(facts["layer_plan"], LayerPlan)


def as_run_plan(now: Plan, layer: LayerPlan, *, carries: bool = False, said: Collection[str] = ()) -> Plan:
    """The run's next plan: the layer's, with everybody's assignment in it. `carries`: somebody has asked that steps
    taken meanwhile are kept. `said`: the terms that the operator has said."""
    orders: dict[str, Any] = {name: getattr(layer, name) for name in ORDERS}
    orders["carry"] = (carries or layer.carry) and now.alpha == 0.0
    terms = {name: getattr(layer, of) for of, name in TERMS.items() if name not in said}
    return replace(changed(now, Wishes(**orders), layer.assignments), **terms)


def _in_force(layer: LayerPlan | None, run: Plan, number: int) -> LayerPlan | None:
    """The layer's plan, unless an operator has ordered another since: then that one, as of now."""
    if layer is None or (layer.sync_every, layer.delay, layer.codec) == (run.sync_every, run.delay, run.codec):
        return layer
    assignments: tuple[Assignment, ...] = tuple(
        replace(each, local_steps=run.sync_every, larger_batches=0, delay=run.delay) for each in layer.assignments
    )
    return replace(
        layer,
        sync_every=run.sync_every,
        delay=run.delay,
        carry=run.carry,
        codec=run.codec,
        down_codec=run.down_codec,
        from_round=number,
        assignments=assignments,
    )


def _event(decision: LayerDecision) -> PlanDecided:
    plan = decision.plan
    return PlanDecided(
        layer=plan.layer,
        revision=plan.revision,
        from_round=plan.from_round,
        cause=decision.cause,
        reason=decision.reason,
        changes={change.field: f"{change.before} → {change.after}" for change in decision.changes},
        utilization=decision.utilization,
    )
