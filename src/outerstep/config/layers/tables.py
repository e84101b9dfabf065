"""What a layers file says: its tables, each value checked by itself and known by its line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...security import is_join_string, parse_address
from ..checks import check_value
from ..keywords import unknown, with_current_names
from ..sources import Sourced
from ..table import SERVER, WORKER, Role
from ..toml_file import line_of, parse_toml

ENGINES: Mapping[str, Role] = {"server": SERVER, "torchft": WORKER, "allreduce": WORKER, "ddp": WORKER}
# Keys that are no settings, by kind of table.
LAYER_KEYS, CLUSTER_KEYS = ("engine", "address", "also"), ("layer", "parent", "address", "also")
# Settings that follow from names, parents and addresses, and from what.
FOLLOWS = {
    "above": "the cluster's parent",
    "via": "relay, of the clusters beside it",
    "above_every": "sync_every of the layer above",
    "cluster": "the cluster's name",
    "worker_id": "the cluster's name",
    "topology": "engine",
    "server_addr": "address",
    "lighthouse": "address",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_GOSSIP = "a member that takes over for another without its old statements would contradict them, and count as a liar"
_NOT_ENGINES = {"gossip": f"{_GOSSIP}; peers form a run of their own (`outerstep peer`)"}


@dataclass(frozen=True)
class LayerTable:
    """`depth`: 0 = the top. `said`: its settings. `at`: where it stands in the file."""

    name: str
    engine: str
    depth: int
    said: Mapping[str, Sourced]
    address: Sourced | None
    also: Sourced | None
    at: str

    @property
    def role(self) -> Role:
        """Whose settings it takes."""
        return ENGINES[self.engine]


@dataclass(frozen=True)
class ClusterTable:
    """One group of members that agree with each other: a cluster; or the whole top layer, whose name it then has.
    `also`: where its server may be moved to. `said`: what its layer's table and its own say together. `parent`: "" = it
    is the top."""

    name: str
    layer: LayerTable
    parent: str
    address: Sourced | None
    also: Sourced | None
    said: Mapping[str, Sourced]
    at: str

    @property
    def places(self) -> str:
        """Where the layer below calls it: its address, and the one that it may be moved to."""
        return ",".join(str(each.value) for each in (self.address, self.also) if each is not None)


@dataclass(frozen=True)
class LayersFile:
    """`layers`: outermost first. `clusters`: by name, the top among them."""

    path: str
    layers: tuple[LayerTable, ...]
    clusters: Mapping[str, ClusterTable]

    def cluster(self, name: str) -> ClusterTable:
        if name not in self.clusters:
            raise ConfigError(f"{self.path}: {unknown('cluster', name, self.clusters)}")
        return self.clusters[name]

    def below(self, name: str) -> list[ClusterTable]:
        """The clusters that are members of this one."""
        return [each for each in self.clusters.values() if each.parent == name]


def read_layers(path: str | Path) -> LayersFile:
    """The tables of a file, as far as each is right by itself (`check_layers` looks at them together)."""
    text, tables = parse_toml(Path(path))
    for name in tables:
        if name not in ("layers", "clusters"):
            raise ConfigError(f"{path}:{line_of(text, name)}: {unknown('table', name, ('layers', 'clusters'))}")
    layers: list[LayerTable] = []
    for name, table in _named(path, text, tables, "layers"):
        layers.append(_layer(path, text, name, table, len(layers)))
    if not layers:
        raise ConfigError(f"{path}: there must be a layer, got none: begin with [layers.world] and its address")
    top = layers[0]
    clusters = {top.name: ClusterTable(top.name, top, "", top.address, top.also, top.said, top.at)}
    for name, table in _named(path, text, tables, "clusters"):
        if name == top.name:
            raise ConfigError(
                f"{path}:{line_of(text, f'clusters.{name}')}: {name!r} is the top layer, which is one cluster under "
                f"that name: write its settings and its address under [layers.{name}]"
            )
        clusters[name] = _cluster(path, text, name, table, layers)
    return LayersFile(str(path), tuple(layers), clusters)


def _named(path: str | Path, text: str, tables: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The tables [kind.NAME]."""
    found = tables.get(kind, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}:{line_of(text, kind)}: {kind} must be tables [{kind}.NAME], got {found!r}")
    for name, table in found.items():
        at = f"{path}:{line_of(text, f'{kind}.{name}')}"
        if not isinstance(table, dict):
            raise ConfigError(f"{at}: {name} must stand in a table [{kind}.NAME], got {kind}.{name} = {table!r}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{at}: a name must be 1 to 64 letters, digits, '_' or '-', got {name!r}")
    return list(found.items())


def _layer(path: str | Path, text: str, name: str, table: dict[str, Any], depth: int) -> LayerTable:
    head = f"layers.{name}"
    at = f"{path}:{line_of(text, head)}"
    engine = table.get("engine", "server")
    if engine not in ENGINES:
        why = _NOT_ENGINES.get(engine, "") if isinstance(engine, str) else ""
        raise ConfigError(
            f"{path}:{line_of(text, 'engine', head)}: engine must be one of {', '.join(ENGINES)}, got {engine!r}"
            + (f": {why}" if why else "")
        )
    said = _settings(path, text, head, table, LAYER_KEYS, ENGINES[engine])
    address = _address(path, text, head, table)
    if address is not None and depth:
        raise ConfigError(f"{address.source}: an address belongs to a cluster: write it under [clusters.NAME]")
    return LayerTable(name, engine, depth, said, address, _address(path, text, head, table, "also"), at)


def _cluster(path: str | Path, text: str, name: str, table: dict[str, Any], layers: list[LayerTable]) -> ClusterTable:
    head = f"clusters.{name}"
    at = f"{path}:{line_of(text, head)}"
    if len(layers) < 2:
        raise ConfigError(f"{at}: clusters are of a layer below the top, and there is none: add [layers.NAME]")
    by_name = {layer.name: layer for layer in layers[1:]}
    of = table.get("layer", layers[1].name if len(layers) == 2 else None)
    if of is None:
        raise ConfigError(f"{at}: cluster {name!r} must say its layer: add layer = one of {', '.join(by_name)}")
    if not isinstance(of, str) or of not in by_name:
        line = line_of(text, "layer", head)
        raise ConfigError(f"{path}:{line}: {unknown('layer of a cluster', str(of), by_name)}")
    layer = by_name[of]
    parent = table.get("parent", layers[0].name if layer.depth == 1 else None)
    if not isinstance(parent, str):
        raise ConfigError(f"{at}: cluster {name!r} must say its parent, a cluster of {layers[layer.depth - 1].name!r}")
    own = _settings(path, text, head, table, CLUSTER_KEYS, layer.role)
    places = _address(path, text, head, table), _address(path, text, head, table, "also")
    return ClusterTable(name, layer, parent, *places, {**layer.said, **own}, at)


def _settings(
    path: str | Path, text: str, head: str, table: dict[str, Any], own: tuple[str, ...], role: Role
) -> dict[str, Sourced]:
    lined = {
        key: Sourced(value, f"{path}:{line_of(text, key, head)}") for key, value in table.items() if key not in own
    }
    found: dict[str, Sourced] = {}
    for field, at in with_current_names(role.config, lined).items():
        if field in FOLLOWS:
            raise ConfigError(f"{at.source}: {field} follows from {FOLLOWS[field]}: leave it out")
        if field not in role.by_field:
            raise ConfigError(f"{at.source}: {unknown('key', field, [*own, *role.by_field])}")
        value = None if role.kinds[field].optional and at.value == "none" else at.value
        try:
            check_value(field, value, role.kinds[field])
        except ConfigError as error:
            raise ConfigError(f"{at.source}: {error}") from error
        found[field] = Sourced(value, at.source)
    return found


def _address(path: str | Path, text: str, head: str, table: dict[str, Any], key: str = "address") -> Sourced | None:
    if key not in table:
        return None
    value, at = table[key], f"{path}:{line_of(text, key, head)}"
    if not isinstance(value, str):
        raise ConfigError(f"{at}: {key} must be text, got {value!r}")
    if is_join_string(value):
        raise ConfigError(
            f"{at}: {key} must be host:port, got a join string: it holds a token, and this file is for every "
            "machine; give it to `outerstep join` on those that need it"
        )
    try:
        parse_address(value)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error
    return Sourced(value, at)
