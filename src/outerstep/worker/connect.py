"""Who a worker is, and its way to the server: its own, or that of the group of processes it is one of."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping

import msgspec
import torch.distributed as dist

from ..config import WorkerConfig
from ..coordination.exchange import Patience
from ..errors import ConfigError, ModelError
from ..topology import Topology
from ..topology.group import GroupTopology
from ..topology.memory import KEPT, Memory
from ..topology.ranks import Ranks
from ..topology.server import ServerTopology
from ..topology.sharded import ShardedTopology, Shards
from ..wire.http_transport import HttpTransport

OTHER_CONNECTIONS = 4  # heartbeats, and other fragments' exchanges, beside the one that sends its parts


class Identity(msgspec.Struct, frozen=True):
    """`instance` is drawn at each start. A group has one identity: rank 0's."""

    worker_id: str
    instance: str
    hostname: str


def find_ranks(config: WorkerConfig, environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """The job whose processes are this worker, if there is one."""
    if config.group == "off":
        return None
    ranks = Ranks.find()
    started = environ.get("WORLD_SIZE", "1")
    if ranks is None and "RANK" in environ and started not in ("", "1") and not dist.is_initialized():
        raise ConfigError(
            f"this process is one of {started} (WORLD_SIZE), but does not talk to the others yet: call "
            "torch.distributed.init_process_group() first, or say group='off' if each is a worker of its own"
        )
    return ranks


def make_identity(config: WorkerConfig, ranks: Ranks | None) -> Identity:
    def make() -> Identity:
        return Identity(config.worker_id or _make_worker_id(), secrets.token_hex(8), socket.gethostname())

    return make() if ranks is None else ranks.tell(make, Identity)


def connect(config: WorkerConfig, identity: Identity, shards: Shards, ranks: Ranks | None) -> Topology:
    if ranks is None:
        if shards.sections > 1:
            raise ModelError(
                f"this model is sharded over {shards.sections} processes, which can only be one worker together: "
                "leave group='auto', and give every rank its DiLoCoWorker"
            )
        return _server_topology(config, identity)
    if shards.sections > 1:
        return ShardedTopology(ranks, _server_topology(config, identity), shards)
    return GroupTopology(ranks, _server_topology(config, identity) if ranks.rank == 0 else None)


def _server_topology(config: WorkerConfig, identity: Identity) -> ServerTopology:
    return ServerTopology(
        HttpTransport(
            config.server_addr,
            kept_connections=config.connections + OTHER_CONNECTIONS,
            credentials=config.credentials,
        ),
        worker_id=identity.worker_id,
        instance=identity.instance,
        hostname=identity.hostname,
        patience=Patience(give_up_after_s=config.give_up_after_s, calls_in_flight=config.connections),
        join_timeout_s=config.join_timeout_s,
        memory=Memory(KEPT),
    )


def _make_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", socket.gethostname()).strip(".-") or "worker"
    return f"{host[:64]}-{os.getpid()}-{secrets.token_hex(2)}"
