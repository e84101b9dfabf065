"""What a layer and the one around it must be to each other: momentum in one of them, and the shorter patience inside.

    check_inner_momentum(0.9, …)        before anything was heard of the layer around: refused, unless insisted on
    check_patience(inside, outside)     at a cluster's first join: refused where the layer around would give it up
    warnings_about(inside, outside)     whenever that one has told its terms

The layers file knows both layers and refuses whatever is not shorter inside (config/layers/rules.py). A process that is
told of the other layer when it joins refuses what breaks the promise, and warns of the rest (docs/adr/0057).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError

RUINS = "on two levels it ruins the model (docs/concepts/hierarchy.md#momentum-on-one-level-only)"
LONGEST_WAIT_S = 600.0
COSTS_A_PLACE = "one dead member costs the whole cluster its place in a round"
COSTS_TIME = "one dead member holds up the run above for longer than a dead cluster does"
STOPS_ALL = "one dead member stops the cluster for ever, and the run above with it, which hears that the cluster lives"
LEADER_DIES = "the run above gives up the cluster while its members still wait for a leader that has died"


@dataclass(frozen=True)
class LayerTerms:
    """`momentum`: μ of the outer step; nan = of an optimizer by name, which may have some, or not known. `waits_s`: how
    long it waits for a silent member; inf = for ever. `deadline_s`: of its rounds; None = none, or not known.
    `is_decided`: a controller sets that deadline, and may set another at any round. `member_leads`: one of its members
    speaks to the layer around, which hears nobody while the others wait for that member; a server speaks on."""

    momentum: float = math.nan
    waits_s: float = 0.0
    deadline_s: float | None = None
    is_decided: bool = False
    member_leads: bool = False


@dataclass(frozen=True)
class TooPatient:
    """`name` of the cluster is too long beside `beside` of the layer around. `why` it is refused at the first join;
    "" = it costs time at most, and is warned of."""

    name: str
    value: float
    beside: str
    limit: float
    why: str = ""


def check_inner_momentum(momentum: float, optimizer: str = "", *, insists: bool) -> None:
    """Of a cluster inside another layer, which usually has momentum. `optimizer`: whose momentum is nan. `insists`:
    `inner_momentum` was said."""
    if insists or momentum == 0.0:
        return
    what = "outer_momentum must be 0 in a cluster, got "
    got = f"{momentum:g}"
    if math.isnan(momentum):
        what, got = "outer_optimizer must be left out in a cluster, got ", f"{optimizer!r}, which may have momentum"
    raise ConfigError(
        f"{what}{got}: the layer above usually has some, and {RUINS}; leave it to the mean (outer_lr=1, "
        "outer_momentum=0), or say inner_momentum=True (--inner-momentum) if the run above has none"
    )


def wait_for_above_s(usual_s: float, outside: LayerTerms) -> float:
    """How long members wait for an exchange above, if nobody has said it: the usual time, or as long as the layer above
    gives a round, if that is longer. Not as long as it likes: nobody waits for ever because another says so."""
    return max(usual_s, min(outside.deadline_s or 0.0, LONGEST_WAIT_S))


def too_patient(inside: LayerTerms, outside: LayerTerms) -> list[TooPatient]:
    """A cluster must have given up a dead member of its own before the layer around it gives up the cluster. What of
    the cluster is too long."""
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
    """What a timeout breaks that is as long as the one outside. A server's signs of life go on while it waits for a
    member, so that wait costs time only, if it ends."""
    if math.isinf(outside.waits_s):
        return ""
    if math.isinf(inside.waits_s):
        return STOPS_ALL
    return LEADER_DIES if inside.member_leads else ""


def check_patience(inside: LayerTerms, outside: LayerTerms) -> None:
    """Of a cluster that joins for the first time: later, to go on alone would lose more than what is wrong."""
    for wrong in too_patient(inside, outside):
        if wrong.why:
            raise ConfigError(_said(wrong))


def warnings_about(inside: LayerTerms, outside: LayerTerms) -> list[str]:
    """What is wrong between a cluster and the layer that it has joined, with the remedy. What is not known of either is
    not found wrong."""
    found = []
    if inside.momentum != 0.0 and not math.isnan(outside.momentum) and outside.momentum != 0.0:
        own = "an outer_optimizer that may have some" if math.isnan(inside.momentum) else f"{inside.momentum:g}"
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
