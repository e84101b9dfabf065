"""A policy of your own: a function from what the controller knows to the plans that you want.

This one never touches the interval: somebody has tuned it. It takes the most exact codec whose exchange fits into the
time that the target leaves for waiting. Whatever a policy returns is held to the layer's bounds, so it cannot ask for
something that the workers could not carry out.

    python examples/own_policy.py                                                               # what it would decide
    outerstep server … --target-utilization 0.95 --policy own_policy:codec_only                 # in a run
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from outerstep.coordination.autoconfig import (
    ClusterState,
    ControllerState,
    LayerBounds,
    LayerPlan,
    LayerState,
    LinkReport,
    decide_by,
)
from outerstep.coordination.cost import bytes_per_value

ROOM = 1.25  # a larger codec must fit with that much to spare, so that noise does not change it back and forth


def codec_only(state: ControllerState) -> Mapping[str, LayerPlan]:
    wanted: dict[str, LayerPlan] = {}
    for layer in state.layers:
        if layer.plan is None or not layer.links:
            continue  # the controller's own choice holds
        plan = layer.plan
        slowest = min(report.bytes_per_s for report in layer.links)
        training_s = plan.sync_every * min(cluster.step_s for cluster in layer.clusters)
        allowed_s = training_s * (1.0 / layer.target_utilization - 1.0)
        for codec in layer.bounds.codecs:
            exchange_s = 2 * layer.parameters * bytes_per_value(codec) / slowest  # there and back
            if exchange_s * (1.0 if codec == plan.codec else ROOM) <= allowed_s:
                break
        wanted[layer.name] = replace(plan, codec=codec, down_codec=layer.bounds.down_for(codec))
    return wanted


def main() -> None:
    """Two clusters behind a link that becomes ten times slower, and recovers."""
    plan = None
    for number in range(0, 90, 10):
        mbit = 100 if 30 <= number < 60 else 1000
        links = tuple(
            LinkReport(source=one, target=other, measured_by="server", bytes_per_s=mbit * 1e6 / 8, latency_s=0.02)
            for name in ("left", "right")
            for one, other in ((name, "server"), ("server", name))
        )
        layer = LayerState(
            name="top",
            round=number,
            parameters=10_000_000,
            clusters=tuple(ClusterState(name=name, step_s=1.0) for name in ("left", "right")),
            links=links,
            plan=plan,
            bounds=LayerBounds(most_delay=0),
        )
        (decision,) = decide_by(codec_only, ControllerState(layers=(layer,)))
        plan = decision.plan
        print(f"round {number:2}, {mbit:4} Mbit/s: every {plan.sync_every} steps, {plan.codec} ({decision.reason})")


if __name__ == "__main__":
    main()
