"""Who a worker is, and the topology that it exchanges through, chosen by name.

`register_topology` adds one of your own:

    register_topology("ring", lambda worker, config: RingTopology(worker.worker_id, worker.tensors))
    with DiLoCoWorker(model, optimizer, topology="ring"): …
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from ..config import (
    LIGHTHOUSE_VARIABLE,
    ServerlessConfig,
    WorkerConfig,
    check_outer_step,
    check_topology_name,
    is_named,
    outer_arguments,
    parse_lighthouse,
    unknown,
)
from ..coordination.layers.between import LayerTerms
from ..core.outer import OuterRule
from ..core.own_outer import as_own_rule
from ..defaults import PEER_BEAT_S
from ..errors import ConfigError
from ..events import EventSink
from ..installing import install_line
from ..topology.group.ranks import Ranks
from ..topology.local_worker import LocalWorker
from ..topology.protocol import Topology
from ..types import MemberFacts
from .facts import about_this_machine
from .inner import InnerState
from .replica import Replica

if TYPE_CHECKING:
    from ..topology.leadership import ClusterSettings

TopologyFactory = Callable[[LocalWorker, WorkerConfig], Topology]


class Identity(msgspec.Struct, frozen=True):
    """`instance` is drawn at each start. A group has one identity: rank 0's."""

    worker_id: str
    instance: str
    hostname: str


def find_ranks(config: WorkerConfig, environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """The job whose processes are this worker, if there is one."""
    if config.group == "off" or config.topology == "allreduce":  # there every rank is a worker of its own
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
        return Identity(_make_worker_id(config), secrets.token_hex(8), socket.gethostname())

    return make() if ranks is None else ranks.tell(make, Identity)


def connect(
    config: WorkerConfig,
    identity: Identity,
    replica: Replica,
    ranks: Ranks | None,
    inner: InnerState,
    events: EventSink,
    facts: Callable[[], MemberFacts],
) -> Topology:
    factory = _FACTORIES.get(config.topology)
    if factory is None:
        raise ConfigError(
            f"{unknown('topology', config.topology, _FACTORIES)}; outerstep.register_topology adds one of your own"
        )
    worker = LocalWorker(
        worker_id=identity.worker_id,
        instance=identity.instance,
        hostname=identity.hostname,
        tensors=replica.tensors,
        anchors=replica.anchors,
        shards=replica.shards,
        is_data_parallel=replica.is_data_parallel,
        ranks=ranks,
        inner=inner,
        events=events,
        info=about_this_machine(),
        facts=facts,
    )
    return factory(worker, config)


def register_topology(name: str, factory: TopologyFactory) -> None:
    """Make `topology=name` build a worker's topology by `factory(worker, config)`."""
    check_topology_name(name)
    _FACTORIES[name] = factory


# Each imports what it needs when it is chosen: a build of torch may lack it, and torchft is optional.


def _through_server(worker: LocalWorker, config: WorkerConfig) -> Topology:
    from ..topology.server.build import ServerLinkSettings, build

    assert config.server_addr is not None  # config/worker.py
    return build(
        worker,
        ServerLinkSettings(
            address=config.server_addr,
            credentials=config.credentials,
            connections=config.server.connections,
            give_up_after_s=config.give_up_after_s,
            join_timeout_s=config.join_timeout_s,
        ),
    )


def _by_allreduce(worker: LocalWorker, config: WorkerConfig) -> Topology:
    from ..topology.allreduce.build import AllReduceSettings, build

    return build(
        worker,
        AllReduceSettings(
            outer=_outer_rule(config) if config.layer_above.above is None else _inner_rule(config),
            weight_by=config.serverless.weight_by or "equal",
            timeout_s=config.allreduce.peer_timeout_s,
            on_divergence=config.serverless.on_divergence,
        ),
        _cluster(config),
    )


def _by_torchft(worker: LocalWorker, config: WorkerConfig) -> Topology:
    own = config.torchft
    address = own.lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE)
    if not address:
        raise ConfigError(
            "topology='torchft' needs a lighthouse to meet at: start one (outerstep lighthouse) and say "
            f"lighthouse='host:port', or set {LIGHTHOUSE_VARIABLE}"
        )
    try:
        from ..topology.torchft.build import TorchftSettings, build
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchft":
            raise
        raise ConfigError(
            f"topology='torchft' needs the package torchft, which is not installed: {install_line('torchft')}"
        ) from error
    return build(
        worker,
        TorchftSettings(
            lighthouse=parse_lighthouse(address),
            outer=_outer_rule(config) if config.layer_above.above is None else _inner_rule(config),
            weight_by=config.serverless.weight_by or "equal",
            min_replicas=own.min_replicas,
            backend=own.replica_backend,
            quorum_timeout_s=own.quorum_timeout_s,
            transfer_timeout_s=own.transfer_timeout_s,
            join_timeout_s=config.join_timeout_s,
            give_up_after_s=config.give_up_after_s,
            on_divergence=config.serverless.on_divergence,
        ),
        _cluster(config),
    )


def _cluster(config: WorkerConfig) -> ClusterSettings | None:
    """The replicas or ranks are together a worker of another run: any replica may come to be that, too."""
    own = config.layer_above
    if own.above is None or own.cluster is None:
        return None
    from ..hierarchy.members_below import as_cluster

    return as_cluster(
        own.above,
        own.cluster,
        every=own.above_every,
        wait_s=own.above_wait_s,
        credentials=config.credentials,
        terms=LayerTerms(
            momentum=math.nan if is_named(config.serverless) else _inner_rule(config).momentum,
            waits_s=config.torchft.transfer_timeout_s
            if config.topology == "torchft"
            else 0.0,  # a job ends with a rank
            member_leads=config.topology == "torchft",
        ),
        any_may_lead=config.topology == "torchft",
    )


def _inner_rule(config: WorkerConfig) -> OuterRule:
    """Under another layer a cluster averages, unless somebody says otherwise."""
    told = config.serverless
    if is_named(told):
        return _outer_rule(config)
    lr, momentum = (
        usual if said is None else said for said, usual in ((told.outer_lr, 1.0), (told.outer_momentum, 0.0))
    )
    return outer_rule(replace(told, outer_lr=lr, outer_momentum=momentum), "in a cluster")


def _by_gossip(worker: LocalWorker, config: WorkerConfig) -> Topology:
    from ..topology.gossip.build import GossipSettings, NodeSettings, build
    from ..topology.gossip.node.announce import announce
    from ..topology.gossip.terms import GossipWishes

    own, outer = config.gossip, config.serverless
    return build(
        worker,
        NodeSettings(
            peer_id=worker.worker_id,
            listen=own.listen,
            advertise=own.advertise,
            join=tuple((own.peers or "").split()),
            folder=own.peer_dir,
            credentials=config.credentials,
            insecure=own.insecure,
            page=own.page,
            invitation=own.invitation or "",
            beat_every_s=min(config.heartbeat_interval_s or PEER_BEAT_S, PEER_BEAT_S),
        ),
        GossipSettings(
            GossipWishes(
                outer_lr=None if is_named(outer) else outer.outer_lr,
                outer_momentum=None if is_named(outer) else outer.outer_momentum,
                nesterov=None if is_named(outer) else outer.nesterov,
                own_outer=_outer_rule(config).own if is_named(outer) else None,
                weight_by=outer.weight_by,
                aggregation=own.aggregation,
                trim_fraction=own.trim_fraction,
                cosine_screen=own.cosine_screen,
                bucket_size=own.bucket_size,
                min_peers=own.min_peers,
                attackers=own.attackers,
                round_deadline_s=own.round_deadline_s,
                heartbeat_timeout_s=own.heartbeat_timeout_s,
                pattern=own.pattern,
                protocol=own.protocol,
                invite_only=own.invite_only,
            ),
            join_timeout_s=config.join_timeout_s,
            announce=announce if own.announce else lambda node: None,
        ),
    )


_FACTORIES: dict[str, TopologyFactory] = {
    "server": _through_server,
    "allreduce": _by_allreduce,
    "gossip": _by_gossip,
    "torchft": _by_torchft,
}


def outer_rule(told: ServerlessConfig, where: str) -> OuterRule:
    """The outer step of a worker without a server; `where`: in words, how it takes part."""
    check_outer_step(told)
    if is_named(told):
        assert told.outer_optimizer is not None
        return as_own_rule(told.outer_optimizer, outer_arguments(told), where)
    said = {"lr": told.outer_lr, "momentum": told.outer_momentum, "nesterov": told.nesterov}
    return OuterRule(**{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def _outer_rule(config: WorkerConfig) -> OuterRule:
    return outer_rule(config.serverless, f"with topology={config.topology!r}")


def _make_worker_id(config: WorkerConfig) -> str:
    if config.topology == "allreduce":  # all ranks may have been given the same name
        return f"{config.worker_id or 'rank'}-{_rank_in_job()}"
    if config.worker_id is not None:
        return config.worker_id
    if config.gossip.peer_dir is not None:  # a peer's id is part of who it is
        from ..topology.gossip.node.records import remembered_id

        known = remembered_id(config.gossip.peer_dir)
        if known:
            return known
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", socket.gethostname()).strip(".-") or "worker"
    return f"{host[:64]}-{os.getpid()}-{secrets.token_hex(2)}"


def _rank_in_job() -> int:
    if not dist.is_available():
        raise ConfigError("topology='allreduce' needs torch.distributed, which this build of torch does not have")
    from ..topology.allreduce.build import join_process_group

    return join_process_group()
