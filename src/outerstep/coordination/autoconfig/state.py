"""What the controller is told: clusters, links, the plans in force, bounds and a target.

A *layer* is one group that exchanges with each other: the processes of a cluster, or the clusters of a run. Its members
are called clusters here, on every level; a *unit* is what a layer counts its interval in: a training step for the
innermost, a round of the layer below for every other.

Measurements and claims are bare numbers. They may be stale, absurd or lies; `trust.py` judges them. Bounds and targets
are the operator's own and are refused at once if they contradict each other.
"""

from __future__ import annotations

import math
from typing import Final

from ...defaults import OUTER_LR
from ...errors import ConfigError
from ...types import Label, Plain
from ..cost import bytes_per_value, down_recipe
from .layer_plan import LayerPlan

HYSTERESIS: Final = 1.25
LONG_INTERVAL: Final = 500  # the longest interval that published runs used without loss
SMALL_MODEL: Final = 100_000_000  # parameters: below, with four members or more, long intervals cost (0.14 at 500)
SMALL_MODEL_INTERVAL: Final = 100
DELAY_SHARE: Final = 4  # a delay is at most a fourth of the interval: the longest that was measured


class LeaderCandidate(Plain, frozen=True):
    """A healthy process that can speak for its cluster. `bytes_per_s`: to the layer's centre; 0 = not measured."""

    name: Label
    bytes_per_s: float = 0.0


class ClusterState(Plain, frozen=True):
    """What a cluster says about itself. `step_s`: one unit of this layer, with `batch_size` samples in it, the whole
    cluster's. `most_batch_size`: what fits; 0 = not known. `leader`: who leads it now, if any candidate may.
    `relays`: it has said that it passes bytes on for others."""

    name: Label
    step_s: float
    batch_size: int = 1
    most_batch_size: int = 0
    size: int = 1
    accelerators: tuple[Label, ...] = ()
    backends: tuple[Label, ...] = ("gloo",)
    data_location: Label = ""
    candidates: tuple[LeaderCandidate, ...] = ()
    leader: Label = ""
    relays: bool = False


class LinkReport(Plain, frozen=True):
    """One direction between two leaders, or a leader and the centre, as one end measured it."""

    source: Label
    target: Label
    measured_by: Label
    bytes_per_s: float
    latency_s: float
    age_s: float = 0.0


class LayerBounds(Plain, frozen=True):
    """What the controller may choose from. `codecs`: the most exact first, each smaller than the one before.
    `fragments`: one number, unless the run has not begun. `usual_outer_lr` belongs to `usual_sync_every`;
    `fixed_outer_lr`: somebody has said what it is to be. `down_codec` "": the one that goes with `codec`; else the one
    that the run has."""

    least_sync_every: int = 10
    most_sync_every: int = LONG_INTERVAL
    codecs: tuple[Label, ...] = ("bf16", "int8", "int4")
    down_codec: Label = ""
    fragments: tuple[int, ...] = (1,)
    most_delay: int = 5
    usual_sync_every: int = 50
    usual_outer_lr: float = OUTER_LR
    most_outer_lr: float = 1.0
    fixed_outer_lr: float | None = None
    stale_after_s: float = 600.0
    rounds_between_changes: int = 10

    def down_for(self, codec: str) -> str:
        return self.down_codec or down_recipe(codec)

    def longest_delay(self, sync_every: int) -> int:
        return min(self.most_delay, sync_every // DELAY_SHARE)


class LayerState(Plain, frozen=True):
    """One layer before a round begins. `round`: the one about to begin; a decision holds from it on. `plan`: the one in
    force; None = the first is wanted. `inside`: the layers whose rounds this one's clusters run. `global_batch`:
    samples per round of all clusters together; 0 = as it comes. `centre_…`: what the centre's own access carries in
    all, 0 = not known (rates that were measured while everybody sent hold it already)."""

    name: Label
    round: int
    parameters: int
    clusters: tuple[ClusterState, ...]
    links: tuple[LinkReport, ...] = ()
    centre: Label = "server"
    centre_in_bytes_per_s: float = 0.0
    centre_out_bytes_per_s: float = 0.0
    plan: LayerPlan | None = None
    bounds: LayerBounds = LayerBounds()
    target_utilization: float = 0.95
    global_batch: int = 0
    inside: tuple[Label, ...] = ()


class ControllerState(Plain, frozen=True):
    """All layers, in any order."""

    layers: tuple[LayerState, ...]


def usual_bounds(parameters: int, clusters: int) -> LayerBounds:
    """Long intervals cost a small model with many members more (docs/concepts/autoconfig.md)."""
    small = clusters >= 4 and parameters < SMALL_MODEL
    return LayerBounds(most_sync_every=SMALL_MODEL_INTERVAL if small else LONG_INTERVAL)


def check_state(state: ControllerState) -> None:
    """Refuse what the operator's own settings contradict. Nothing that a cluster says can make this raise."""
    names = [layer.name for layer in state.layers]
    if len(set(names)) != len(names):
        raise ConfigError(f"layers must have different names, got {', '.join(names)}")
    for layer in state.layers:
        _check_layer(layer)
    inner_first(state.layers)


def _check_layer(layer: LayerState) -> None:
    def must(holds: bool, rule: str, got: object) -> None:
        if not holds:
            raise ConfigError(f"layer {layer.name!r}: {rule}, got {got}")

    bounds, clusters = layer.bounds, [cluster.name for cluster in layer.clusters]
    must(bool(clusters), "it must have at least one cluster", "none")
    must(len(set(clusters)) == len(clusters), "clusters must have different names", ", ".join(clusters))
    must(layer.centre not in clusters, "the centre must have a name of its own", layer.centre)
    must(layer.parameters >= 1, "parameters must be at least 1", layer.parameters)
    must(layer.round >= 0, "round must not be negative", layer.round)
    must(layer.global_batch >= 0, "global_batch must not be negative", layer.global_batch)
    must(0.0 < layer.target_utilization < 1.0, "target_utilization must lie between 0 and 1", layer.target_utilization)
    for name in ("centre_in_bytes_per_s", "centre_out_bytes_per_s"):
        must(0.0 <= getattr(layer, name) < math.inf, f"{name} must be finite and not negative", getattr(layer, name))
    must(
        1 <= bounds.least_sync_every <= bounds.most_sync_every,
        "sync_every must have bounds from 1 up, the least first",
        (bounds.least_sync_every, bounds.most_sync_every),
    )
    sizes = [bytes_per_value(codec) for codec in bounds.codecs]
    must(bool(sizes) and sizes == sorted(sizes, reverse=True), "codecs must go from large to small", bounds.codecs)
    must(
        bool(bounds.fragments) and 1 <= min(bounds.fragments) <= max(bounds.fragments) <= bounds.most_sync_every,
        "fragments must be from 1 to most_sync_every",
        bounds.fragments,
    )
    must(bounds.most_delay >= 0, "most_delay must not be negative", bounds.most_delay)
    must(bounds.usual_sync_every >= 1, "usual_sync_every must be at least 1", bounds.usual_sync_every)
    must(
        0.0 < bounds.usual_outer_lr <= bounds.most_outer_lr < math.inf,
        "usual_outer_lr must be positive and at most most_outer_lr",
        (bounds.usual_outer_lr, bounds.most_outer_lr),
    )
    must(0.0 < bounds.stale_after_s < math.inf, "stale_after_s must be positive and finite", bounds.stale_after_s)
    must(bounds.rounds_between_changes >= 1, "rounds_between_changes must be at least 1", bounds.rounds_between_changes)


def inner_first(layers: tuple[LayerState, ...]) -> list[LayerState]:
    """Each layer after all those inside it."""
    left = {layer.name: layer for layer in layers}
    ordered: list[LayerState] = []
    while left:
        ready = sorted(name for name, layer in left.items() if not any(inner in left for inner in layer.inside))
        if not ready:
            raise ConfigError(f"no layer may be inside itself, got a circle among {', '.join(sorted(left))}")
        ordered += [left.pop(name) for name in ready]
    return ordered
