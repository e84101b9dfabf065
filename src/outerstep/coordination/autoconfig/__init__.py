"""The controller: from what was measured to each layer's next plan. Pure; whoever calls it carries the plan out.

    state.py       what it is told                       trust.py       what it believes of that
    meter.py       the matrix of links                   routes.py      star or tree
    search.py      interval, codec, fragments, delay     members.py     shares, leaders, backend
    controller.py  when a plan changes, and why          bounds.py      what every plan must keep to
    layer_plan.py  the plan, and how a member reads it   policy.py      a policy of the user's own
    recommend.py   what is recommended to the script

What settings cost is in ../cost.py. docs/concepts/autoconfig.md explains the rules.
"""

from ...types import Assignment
from .controller import decide
from .layer_plan import ClusterOrders, LayerDecision, LayerPlan, decode_plan, encode_plan, orders_for
from .meter import LinkMeter
from .policy import Policy, decide_by
from .recommend import InnerSettings, Recommendation, recommend
from .state import (
    ClusterState,
    ControllerState,
    LayerBounds,
    LayerState,
    LeaderCandidate,
    LinkReport,
    usual_bounds,
)

__all__ = [
    "Assignment",
    "ClusterOrders",
    "ClusterState",
    "ControllerState",
    "InnerSettings",
    "LayerBounds",
    "LayerDecision",
    "LayerPlan",
    "LayerState",
    "LeaderCandidate",
    "LinkMeter",
    "LinkReport",
    "Policy",
    "Recommendation",
    "decide",
    "decide_by",
    "decode_plan",
    "encode_plan",
    "orders_for",
    "recommend",
    "usual_bounds",
]
