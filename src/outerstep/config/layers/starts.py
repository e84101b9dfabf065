"""What each process of a layers file is started with: its settings, and the command that a person types."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...defaults import ABOVE_EVERY, RUN_FOLDER
from ...errors import ConfigError
from ...security import is_loopback, parse_address
from ..keywords import build, settings_of
from ..sources import Sourced, naming_sources
from ..table import SERVER, WORKER, Role
from .rules import check_layers, momentum_of, waits_s
from .tables import ClusterTable, LayersFile, read_layers

EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class Start:
    """A command to type. `where`: on which machine, for people. `joins`: whose join string that machine needs first
    ("" = none)."""

    where: str
    joins: str
    command: str


def settings_for(role: Role, path: str, name: str) -> dict[str, Sourced]:
    """What the file at `path` says to a process of cluster `name`: its server, or one that trains in it."""
    file = read_layers(path)
    check_layers(file)
    cluster = file.cluster(name)
    return server_settings(file, cluster) if role.name == SERVER.name else worker_settings(file, cluster)


def server_settings(file: LayersFile, cluster: ClusterTable) -> dict[str, Sourced]:
    """Of the server that the cluster meets at."""
    if cluster.layer.engine != "server":
        raise ConfigError(
            f"{cluster.at}: {cluster.name!r} has engine {cluster.layer.engine!r}, and therefore no server: `outerstep "
            f"layers check {file.path}` says what to type"
        )
    assert cluster.address is not None
    host, port = parse_address(cluster.address.value)
    behind = "port" in cluster.said  # it listens on one port and is called at another
    members = file.below(cluster.name)
    derived: dict[str, Any] = {
        "num_workers": len(members) or 1,
        "host": host if is_loopback(host) else EVERYWHERE,
        "port": port,
        "advertise": cluster.address.value if behind else host,
        "save_dir": f"{RUN_FOLDER}-{cluster.name}",
    }
    waits = waits_s(file, cluster)
    derived["heartbeat_timeout_s"] = 0.0 if math.isinf(waits) else waits
    if cluster.layer is not file.layers[-1] and file.layers[cluster.layer.depth + 1].engine != "ddp":
        derived["sync_every"] = ABOVE_EVERY
    if cluster.parent:
        relays = [each for each in file.below(cluster.parent) if each is not cluster and _relays(each)]
        derived |= {"above": file.clusters[cluster.parent].places, "cluster": cluster.name}
        derived |= {"via": ",".join(each.address.value for each in relays if each.address)} if relays else {}
        derived |= {"inner_momentum": True} if momentum_of(cluster) != 0.0 else {}
    return _with_derived(cluster, derived, SERVER)


def worker_settings(file: LayersFile, cluster: ClusterTable) -> dict[str, Sourced]:
    """Of a process that trains in the cluster."""
    engine, said, derived = cluster.layer.engine, cluster.said, dict[str, Any]()
    at = cluster.address.value if cluster.address is not None else None
    parent = file.clusters[cluster.parent].address if cluster.parent else None
    if engine == "server":
        said, derived = {}, {"topology": "server", "server_addr": at}
    elif engine == "ddp":
        assert parent is not None
        derived = {"topology": "server", "server_addr": parent.value, "worker_id": cluster.name}
    else:
        derived = {"topology": "torchft", "lighthouse": at} if engine == "torchft" else {"topology": engine}
        if parent is not None:
            derived |= {"above": file.clusters[cluster.parent].places, "cluster": cluster.name}
            derived |= {"inner_momentum": True} if momentum_of(cluster) != 0.0 else {}
    return _with_derived(cluster, derived, WORKER, said)


def _relays(cluster: ClusterTable) -> bool:
    return "relay" in cluster.said and bool(cluster.said["relay"].value)


def starts(file: LayersFile) -> list[Start]:
    """All commands, the outermost server first. Every process's settings are checked on the way."""
    found = []
    for cluster in file.clusters.values():
        found += _starts(file, cluster)
    return found


def _starts(file: LayersFile, cluster: ClusterTable) -> list[Start]:
    name, engine = cluster.name, cluster.layer.engine
    options = f"--layers {shlex.quote(file.path)} --cluster {name}"
    parent = cluster.parent if cluster.parent else ""
    host, port = parse_address(cluster.address.value) if cluster.address is not None else ("", 0)
    is_innermost = cluster.layer is file.layers[-1]
    found = []
    if engine == "server":
        _check(SERVER, server_settings(file, cluster))
        model = "" if "model" in cluster.said else " -m MODEL_DIR"
        found.append(Start(f"{host}, the server of {name}", parent, f"outerstep server{model} {options}"))
    if engine == "torchft":
        listens = host if is_loopback(host) else EVERYWHERE
        command = f"outerstep lighthouse --host {listens} --port {port}"
        found.append(Start(f"{host}, the lighthouse of {name}", "", command))
    has_jobs = not is_innermost and any(each.layer.engine == "ddp" for each in file.below(name))
    if is_innermost or (not has_jobs and file.layers[cluster.layer.depth + 1].engine == "ddp"):
        worker = worker_settings(file, cluster)
        _check(WORKER, worker)
        is_job = engine in ("ddp", "allreduce") or not is_innermost
        script = "torchrun --nproc-per-node GPUS train.py" if is_job else "python train.py"
        joins = name if engine == "server" else parent
        where = f"the machine of {name}" if engine == "ddp" else f"each machine that trains in {name}"
        found.append(Start(where, joins, f"outerstep worker {options} -- {script}"))
    return found


def _check(role: Role, said: Mapping[str, Sourced]) -> None:
    """Strictly: what has no effect is refused, for nobody else reads this file."""
    with naming_sources(said):
        for kind in (role.config, role.command):
            values = {field: said[field].value for field in settings_of(kind) if field in said}
            build(kind, values)


def _with_derived(
    cluster: ClusterTable, derived: Mapping[str, Any], role: Role, said: Mapping[str, Sourced] | None = None
) -> dict[str, Sourced]:
    """What the file states, and what follows from it. The place of the latter is the cluster's."""
    followed = {field: Sourced(value, cluster.at) for field, value in derived.items() if field in role.by_field}
    return {**followed, **(cluster.said if said is None else said)}
