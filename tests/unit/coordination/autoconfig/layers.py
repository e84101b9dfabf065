"""Layers to decide about, as short as a test can say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from outerstep.coordination.autoconfig import (
    ClusterState,
    ControllerState,
    LayerDecision,
    LayerPlan,
    LayerState,
    LeaderCandidate,
    LinkReport,
    decide,
)

MBIT = 1e6 / 8  # bytes per second


def cluster(name: str, step_s: float = 1.0, **said: Any) -> ClusterState:
    said.setdefault("candidates", (LeaderCandidate(name=f"{name}-0"), LeaderCandidate(name=f"{name}-1")))
    return ClusterState(name=name, step_s=step_s, **said)


def both_ways(
    one: str, other: str, bytes_per_s: float, latency_s: float = 0.02, *, by: tuple[str, ...] = (), **said: Any
) -> tuple[LinkReport, ...]:
    """As each of `by` measured it: by default the centre, or both ends where it is none of them."""
    by = by or (("server",) if "server" in (one, other) else (one, other))
    return tuple(
        LinkReport(source=source, target=target, measured_by=end, bytes_per_s=bytes_per_s, latency_s=latency_s, **said)
        for end in by
        for source, target in ((one, other), (other, one))
    )


def star_links(rates: Mapping[str, float], **said: Any) -> tuple[LinkReport, ...]:
    return tuple(report for name, rate in rates.items() for report in both_ways(name, "server", rate, **said))


def layer(rates: Mapping[str, float], **said: Any) -> LayerState:
    """Clusters of one speed, each with a link of that many bytes per second to the server."""
    said = {"parameters": 100_000_000, "clusters": tuple(map(cluster, rates)), "links": star_links(rates)} | said
    return LayerState(**{"name": "top", "round": 0, **said})


def decided(state: LayerState, **options: Any) -> LayerDecision:
    (made,) = decide(ControllerState(layers=(state,)), **options)
    return made


def following(state: LayerState, plan: LayerPlan, rounds: int = 20, **changed: Any) -> LayerState:
    """So many rounds later, with this plan in force."""
    return replace(state, round=state.round + rounds, plan=plan, **changed)
