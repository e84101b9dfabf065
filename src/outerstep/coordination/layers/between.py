"""What a layer and the one around it must be to each other: momentum in one of them, and the shorter patience inside.

    check_inner_momentum(0.9, …)        before anything was heard of the layer around: refused, unless insisted on
    warnings_about(inside, outside)     when that one has answered, and has told its own terms

The layers file knows both and refuses (config/layers/rules.py); a process that is told of the other layer when it joins
it warns, and trains on: alone it would learn nothing of the others at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError

RUINS = "on two levels it ruins the model (docs/concepts/hierarchy.md#momentum-on-one-level-only)"
LONGEST_WAIT_S = 600.0
COSTS_A_PLACE = "one dead member costs the whole cluster its place in a round"


@dataclass(frozen=True)
class LayerTerms:
    """`momentum`: μ of the outer step; nan = of an optimizer by name, which may have some, or not known. `waits_s`: how
    long it waits for a silent member; inf = for ever. `deadline_s`: of its rounds; None = none, or not known."""

    momentum: float = math.nan
    waits_s: float = 0.0
    deadline_s: float | None = None


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


def too_patient(inside: LayerTerms, outside: LayerTerms) -> tuple[str, float, str, float] | None:
    """A cluster must have given up a dead member of its own before the layer around it gives up the cluster. What of
    the cluster is too long, and beside what: both by name and value."""
    if inside.waits_s >= outside.waits_s:
        return "timeout", inside.waits_s, "timeout", outside.waits_s
    deadline_s = outside.deadline_s
    if deadline_s is None:
        return None
    own = (("timeout", inside.waits_s), ("round_deadline_s", inside.deadline_s))
    for name, value in own:
        if value is not None and value >= deadline_s:
            return name, value, "round_deadline_s", deadline_s
    return None


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
    wrong = too_patient(inside, outside)
    if wrong is not None:
        name, value, beside, limit = wrong
        said = {"timeout": "timeout (heartbeat_timeout_s, of torchft replicas transfer_timeout_s)"}.get(name, name)
        there = {"timeout": "heartbeat_timeout_s"}.get(beside, beside)
        found.append(
            f"this cluster's {said} must be below {there} of the run above, got {value:g} and {limit:g} s: else "
            f"{COSTS_A_PLACE} up there; lower the one or raise the other"
        )
    return found
