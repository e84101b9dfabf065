"""The rules between a layer and the layer around it: momentum in only one of them, and less patience inside.

    check_inner_momentum(0.9, …)        before the outer layer has told its terms: refuses, unless insisted on
    check_patience(inside, outside)     at a cluster's first join: refuses if the outer layer would give the cluster up
    warnings_about(inside, outside)     whenever the outer layer has told its terms

A layers file describes both layers, so config/layers/rules.py refuses every inner timeout that is not shorter. A
process that learns the outer terms at its join refuses what breaks the promise and warns of the rest (docs/adr/0057).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError

RUINS = "momentum on two levels ruins the model (docs/concepts/hierarchy.md#momentum-on-one-level-only)"
LONGEST_WAIT_S = 600.0
COSTS_A_PLACE = "one dead member costs the whole cluster its place in a round"
COSTS_TIME = "one dead member holds up the run above for longer than a dead cluster does"
STOPS_ALL = (
    "one dead member stops the cluster for ever, and the run above waits for ever, because the cluster seems alive"
)
LEADER_DIES = "the run above gives up the cluster while its members still wait for a leader that has died"


@dataclass(frozen=True)
class LayerTerms:
    """The terms of a layer. `momentum`: μ of its outer step; nan = unknown, or that of a named optimizer, which may use
    momentum. `waits_s`: how long the layer waits for a silent member; inf = for ever. `deadline_s`: of its rounds;
    None = none, or unknown. `is_decided`: a controller sets the deadline and may change it at any round.
    `member_leads`: a member speaks to the outer layer. If that member dies, the outer layer hears nothing while the
    others wait for it. (A server would keep speaking.)"""

    momentum: float = math.nan
    waits_s: float = 0.0
    deadline_s: float | None = None
    is_decided: bool = False
    member_leads: bool = False


@dataclass(frozen=True)
class TooPatient:
    """The cluster's setting `name` is too long compared with the outer layer's setting `beside`. `why`: the reason to
    refuse the first join; "" = a warning is enough, because only time is lost."""

    name: str
    value: float
    beside: str
    limit: float
    why: str = ""


def check_inner_momentum(momentum: float, optimizer: str = "", *, insists: bool) -> None:
    """Refuse momentum in a cluster, because the outer layer usually has momentum. `optimizer`: the name of an optimizer
    whose momentum is nan. `insists`: the user has set `inner_momentum`."""
    if insists or momentum == 0.0:
        return
    what = "outer_momentum must be 0 in a cluster, got "
    got = f"{momentum:g}"
    if math.isnan(momentum):
        what, got = "outer_optimizer must be left out in a cluster, got ", f"{optimizer!r}, which may have momentum"
    raise ConfigError(
        f"{what}{got}: the layer above usually has momentum, and {RUINS}; use the plain mean (outer_lr=1, "
        "outer_momentum=0), or set inner_momentum=True (--inner-momentum) if the run above has no momentum"
    )


def wait_for_above_s(usual_s: float, outside: LayerTerms) -> float:
    """How long members wait for an exchange above by default: the usual time, or the outer layer's round deadline if
    that is longer. An upper limit applies, so that no outer layer can make members wait for ever."""
    return max(usual_s, min(outside.deadline_s or 0.0, LONGEST_WAIT_S))


def too_patient(inside: LayerTerms, outside: LayerTerms) -> list[TooPatient]:
    """The cluster's settings that are too long. A cluster must give up a dead member before the outer layer gives up
    the cluster."""
    found = []
    if inside.waits_s >= outside.waits_s:
        found.append(TooPatient("timeout", inside.waits_s, "timeout", outside.waits_s, _why_given_up(inside, outside)))
    deadline_s = outside.deadline_s
    if deadline_s is None:
        return found
    own = (("timeout", inside.waits_s), ("round_deadline_s", inside.deadline_s))
    why = "" if outside.is_decided else COSTS_A_PLACE
    found += [
        TooPatient(name, value, "round_deadline_s", deadline_s, why)
        for name, value in own
        if value is not None and value >= deadline_s
    ]
    return found


def _why_given_up(inside: LayerTerms, outside: LayerTerms) -> str:
    """What an inner timeout breaks if it is as long as the outer one. A server stays audible while it waits for a
    member, so such a wait only costs time, if it ends."""
    if math.isinf(outside.waits_s):
        return ""
    if math.isinf(inside.waits_s):
        return STOPS_ALL
    return LEADER_DIES if inside.member_leads else ""


def check_patience(inside: LayerTerms, outside: LayerTerms) -> None:
    """Refuse the first join of a cluster that is too patient. Later a refusal would do more harm than the mistake."""
    for wrong in too_patient(inside, outside):
        if wrong.why:
            raise ConfigError(_said(wrong))


def warnings_about(inside: LayerTerms, outside: LayerTerms) -> list[str]:
    """Each contradiction between a cluster and the layer that it has joined, with the remedy. Unknown terms contradict
    nothing."""
    found = []
    if inside.momentum != 0.0 and not math.isnan(outside.momentum) and outside.momentum != 0.0:
        own = "an outer_optimizer that may use some" if math.isnan(inside.momentum) else f"{inside.momentum:g}"
        found.append(
            f"momentum must be on one level only, got {own} in this cluster and {outside.momentum:g} in the run above: "
            f"{RUINS}; restart this cluster without inner_momentum, or the run above with outer_momentum 0"
        )
    return found + [_said(wrong) for wrong in too_patient(inside, outside)]


def _said(wrong: TooPatient) -> str:
    said = {"timeout": "timeout (heartbeat_timeout_s, of torchft replicas transfer_timeout_s)"}.get(
        wrong.name, wrong.name
    )
    there = {"timeout": "heartbeat_timeout_s"}.get(wrong.beside, wrong.beside)
    why = wrong.why or (COSTS_A_PLACE if wrong.beside == "round_deadline_s" else COSTS_TIME)
    return (
        f"this cluster's {said} must be below {there} of the run above, got {wrong.value:g} and {wrong.limit:g} s: "
        f"else {why}; restart this cluster with a lower one, or the run above with a higher one"
    )
