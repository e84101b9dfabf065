"""What the layers of a file must be to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...coordination.layers.between import COSTS_A_PLACE, RUINS, LayerTerms, too_patient
from ...defaults import OUTER_MOMENTUM, OUTER_PATIENCE
from ...errors import ConfigError
from ..keywords import unknown
from ..outer_step import SHIPPED
from .tables import ENGINES, ClusterTable, LayersFile, LayerTable

NEEDS_ADDRESS = ("server", "torchft")  # other machines call them there
INSIDE_ONLY = {
    "torchft": "its members keep no ledger of (cluster, sequence) that a replica could be healed with, so a "
    "contribution could count twice",
    "allreduce": "its ranks are one job, which ends when one of them does",
    "ddp": "it exchanges at every step",
}


def check_layers(file: LayersFile) -> None:
    """Refuse what cannot work, with the rule, the value and the remedy."""
    for layer in file.layers:
        _check_engine(file, layer)
    for cluster in file.clusters.values():
        _check_place(file, cluster)
    for cluster in file.clusters.values():
        _check_timeouts(file, cluster)
        _check_momentum(file, cluster)
    _check_addresses(file)


def around(file: LayersFile, cluster: ClusterTable) -> Iterator[ClusterTable]:
    """The clusters that this one is in, the innermost first."""
    while cluster.parent:
        cluster = file.clusters[cluster.parent]
        yield cluster


def waits_s(file: LayersFile, cluster: ClusterTable) -> float:
    """How long it waits for a silent member before it goes on without it; inf = for ever."""
    engine, said = cluster.layer.engine, cluster.said
    if engine in ("ddp", "allreduce"):
        return 0.0  # the job ends with its member
    field = "heartbeat_timeout_s" if engine == "server" else "transfer_timeout_s"
    if field in said:
        return float(said[field].value) or math.inf
    usual = float(ENGINES[engine].defaults[field])
    inside = [waits_s(file, each) for each in file.below(cluster.name)]
    return max([usual, *(OUTER_PATIENCE * wait for wait in inside if wait < math.inf)])


def momentum_of(cluster: ClusterTable) -> float:
    """μ of its outer step. An optimizer of another name may have some: nan."""
    said = cluster.said
    named = said.get("outer_optimizer")
    if named is not None and named.value not in (None, SHIPPED):
        return math.nan
    momentum = said.get("outer_momentum")
    if momentum is None or momentum.value is None:
        return 0.0 if cluster.parent or cluster.layer.engine == "ddp" else OUTER_MOMENTUM
    return float(momentum.value)


def _check_engine(file: LayersFile, layer: LayerTable) -> None:
    is_innermost = layer is file.layers[-1]
    if layer.engine != "server" and not is_innermost:
        raise ConfigError(
            f"{layer.at}: engine must be server for a layer between clusters, got {layer.engine!r} for {layer.name!r}: "
            f"{INSIDE_ONLY[layer.engine]}; leave engine out, or make {layer.name!r} the innermost layer"
        )
    if layer.engine == "ddp" and not layer.depth:
        raise ConfigError(
            f"{layer.at}: engine ddp must be inside another layer, got {layer.name!r} alone: one job needs no layers; "
            "put a layer with a server in front of it"
        )
    if layer.engine == "ddp" and "sync_every" in layer.said:
        raise ConfigError(
            f"{layer.said['sync_every'].source}: engine ddp exchanges at every step, got sync_every: leave it out, or "
            f"write it under [layers.{file.layers[layer.depth - 1].name}]"
        )


def _check_place(file: LayersFile, cluster: ClusterTable) -> None:
    layer = cluster.layer
    if layer.engine in NEEDS_ADDRESS and cluster.address is None:
        what = "server" if layer.engine == "server" else "lighthouse"
        table = f"[clusters.{cluster.name}]" if cluster.parent else f"[layers.{cluster.name}]"
        raise ConfigError(
            f'{cluster.at}: {cluster.name!r} must have an address, got none: write address = "HOST:PORT" of its {what} '
            f"under {table}"
        )
    if not cluster.parent:
        return
    outer = file.layers[layer.depth - 1]
    possible = [each.name for each in file.clusters.values() if each.layer.name == outer.name]
    if cluster.parent not in possible:
        raise ConfigError(
            f"{cluster.at}: the parent of {cluster.name!r} must be a cluster of the layer above it, {outer.name!r}: "
            f"{unknown('cluster', cluster.parent, possible)}"
        )


def _check_timeouts(file: LayersFile, cluster: ClusterTable) -> None:
    if not cluster.parent:
        return
    outer = file.clusters[cluster.parent]
    found = too_patient(_terms(file, cluster), _terms(file, outer))
    if not found:
        return
    name, value, beside, limit = found[0].name, found[0].value, found[0].beside, found[0].limit
    reason = f"else {COSTS_A_PLACE}; raise the outer or lower the inner one"
    if beside == "timeout":
        where = cluster.said.get("heartbeat_timeout_s") or cluster.said.get("transfer_timeout_s")
        raise ConfigError(
            f"{where.source if where is not None else cluster.at}: the timeout of {cluster.name!r} must be below that "
            f"of {outer.name!r} around it, got {value:g} and {limit:g} s: {reason}"
        )
    raise ConfigError(
        f"{outer.said[beside].source}: {beside} of {outer.name!r} must be above the {name} of {cluster.name!r} inside "
        f"it, got {limit:g} and {value:g} s: {reason}"
    )


def _terms(file: LayersFile, cluster: ClusterTable) -> LayerTerms:
    deadline = cluster.said.get("round_deadline_s")
    return LayerTerms(momentum_of(cluster), waits_s(file, cluster), deadline.value if deadline is not None else None)


def _check_momentum(file: LayersFile, cluster: ClusterTable) -> None:
    own, insists = momentum_of(cluster), cluster.said.get("inner_momentum")
    if own == 0.0 or (insists is not None and insists.value):
        return
    for outer in around(file, cluster):
        if momentum_of(outer) != 0.0 or insists is not None:
            said = cluster.said.get("outer_optimizer" if math.isnan(own) else "outer_momentum")
            at = said.source if said is not None else cluster.at
            shown = f"{said.value!r}" if math.isnan(own) and said is not None else f"{own:g}"
            has = "has some too" if momentum_of(outer) != 0.0 else "has none, but inner_momentum = false is said"
            raise ConfigError(
                f"{at}: momentum belongs to one layer, got {shown} in {cluster.name!r} inside {outer.name!r}, which "
                f"{has}: {RUINS}; leave one of them out, or write outer_momentum = 0 under "
                f"[layers.{outer.layer.name}], or insist with inner_momentum = true under "
                f"[layers.{cluster.layer.name}]"
            )


def _check_addresses(file: LayersFile) -> None:
    seen: dict[str, str] = {}
    for cluster in file.clusters.values():
        if cluster.address is None:
            continue
        if cluster.address.value in seen:
            raise ConfigError(
                f"{cluster.address.source}: each cluster must have an address of its own, got "
                f"{cluster.address.value} of {seen[cluster.address.value]!r} for {cluster.name!r} too"
            )
        seen[cluster.address.value] = cluster.name
