"""A worker's way to a server: its own, or that of the group of processes it is one of."""

from __future__ import annotations

from dataclasses import dataclass

from ...coordination.worker.exchange import Patience
from ...errors import ModelError
from ...lanes import MOST
from ...wire.http_transport import HttpTransport
from ..group.sharded import ShardedTopology
from ..group.tiled import TiledTopology, is_tiled
from ..group.topology import GroupTopology
from ..local_worker import LocalWorker
from ..payload import KEPT, Memory
from ..protocol import Topology
from .topology import ServerTopology

OTHER_CONNECTIONS = 4  # heartbeats, and other fragments' exchanges, beside the one that sends its parts


@dataclass(frozen=True)
class ServerLinkSettings:
    """`address`: host:port, a join string, or http://host:port. `connections`: parts of one exchange that travel at the
    same time; None = as the link needs."""

    address: str
    credentials: str | None
    connections: int | None
    give_up_after_s: float
    join_timeout_s: float


def build(worker: LocalWorker, settings: ServerLinkSettings) -> Topology:
    ranks, sections = worker.ranks, worker.shards.sections
    if ranks is None:
        if sections > 1:
            raise ModelError(
                f"this model is sharded over {sections} processes, which can only be one worker together: "
                "leave group='auto', and give every rank its DiLoCoWorker"
            )
        return _connect(worker, settings)
    if is_tiled(ranks, worker.shards):
        return TiledTopology(ranks, _connect(worker, settings), worker.shards.places)
    if sections > 1:
        return ShardedTopology(ranks, _connect(worker, settings), worker.shards)
    return GroupTopology(ranks, _connect(worker, settings) if ranks.rank == 0 else None)


def _connect(worker: LocalWorker, settings: ServerLinkSettings) -> ServerTopology:
    return ServerTopology(
        HttpTransport(
            settings.address,
            kept_connections=(settings.connections or MOST) + OTHER_CONNECTIONS,
            credentials=settings.credentials,
        ),
        worker_id=worker.worker_id,
        instance=worker.instance,
        hostname=worker.hostname,
        patience=Patience(give_up_after_s=settings.give_up_after_s, calls_in_flight=settings.connections),
        join_timeout_s=settings.join_timeout_s,
        memory=Memory(KEPT),
        info=worker.info,
        facts=worker.facts,
    )
