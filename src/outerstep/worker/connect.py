"""Who a worker is, and its way to the others: to a server, its own or that of the group of processes it is one of; or
without a server, to the other ranks, peers or replicas."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch.distributed as dist

from ..config import ALLREDUCE, GOSSIP, LIGHTHOUSE_VARIABLE, TORCHFT, WorkerConfig, parse_lighthouse
from ..coordination.worker.exchange import Patience
from ..errors import ConfigError, ModelError
from ..security.secret_files import write_secret
from ..topology.gossip.node import Node, NodeSettings
from ..topology.gossip.node.records import remembered_id
from ..topology.gossip.terms import GossipWishes
from ..topology.group.ranks import Ranks
from ..topology.group.sharded import ShardedTopology
from ..topology.group.topology import GroupTopology
from ..topology.memory import KEPT, Memory
from ..topology.protocol import Topology
from ..topology.server.topology import ServerTopology
from ..topology.stepped import OuterRule
from ..wire.http_transport import HttpTransport
from .inner import InnerState
from .replica import Replica

USUAL_BEAT_S = 2.0  # between peers
OTHER_CONNECTIONS = 4  # heartbeats, and other fragments' exchanges, beside the one that sends its parts


class Identity(msgspec.Struct, frozen=True):
    """`instance` is drawn at each start. A group has one identity: rank 0's."""

    worker_id: str
    instance: str
    hostname: str


def find_ranks(config: WorkerConfig, environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """The job whose processes are this worker, if there is one."""
    if config.group == "off" or config.server_addr == ALLREDUCE:  # there every rank is a worker of its own
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
        worker_id = config.worker_id or _remembered_id(config) or _make_worker_id()
        if config.server_addr == ALLREDUCE:  # all ranks may have been given the same name
            _begin_to_talk()
            worker_id = f"{config.worker_id or 'rank'}-{dist.get_rank()}"
        return Identity(worker_id, secrets.token_hex(8), socket.gethostname())

    return make() if ranks is None else ranks.tell(make, Identity)


def connect(
    config: WorkerConfig, identity: Identity, replica: Replica, ranks: Ranks | None, inner: InnerState
) -> Topology:
    shards = replica.shards
    if config.server_addr == ALLREDUCE:
        return _allreduce_topology(config, identity, replica)
    if config.server_addr == TORCHFT:
        return _torchft_topology(config, identity, replica, ranks, inner)
    if config.server_addr == GOSSIP:
        return _gossip_topology(config, identity, replica)
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


def _begin_to_talk(environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that there is a process group: the user's, or one from torchrun's variables."""
    if not dist.is_available():
        raise ConfigError("server_addr='allreduce' needs torch.distributed, which this build of torch does not have")
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"server_addr='allreduce' needs the other ranks, and {missing[0]} is not set: start this script with "
            "torchrun, or call torch.distributed.init_process_group() first"
        )
    dist.init_process_group("gloo")


def _allreduce_topology(config: WorkerConfig, identity: Identity, replica: Replica) -> Topology:
    if replica.shards.sections > 1:
        raise ModelError(
            f"this model is sharded over {replica.shards.sections} processes, which can only be one worker together; "
            "with server_addr='allreduce' every rank is a worker: give each the whole model, or use a server"
        )
    if replica.is_data_parallel:
        raise ModelError(
            "this model is wrapped in DistributedDataParallel: its ranks train in step and are one worker; with "
            "server_addr='allreduce' every rank is a worker of its own: leave the wrapper away"
        )
    from ..topology.allreduce.topology import (  # a build of torch may lack what it needs
        AllReduceSettings,
        AllReduceTopology,
    )

    return AllReduceTopology(
        worker_id=identity.worker_id,
        hostname=identity.hostname,
        tensors=replica.tensors,
        anchors=replica.anchors,
        settings=AllReduceSettings(
            outer=_outer_rule(config),
            weight_by=config.weight_by or "equal",
            timeout_s=config.peer_timeout_s,
            on_divergence=config.on_divergence,
        ),
    )


def _torchft_topology(
    config: WorkerConfig, identity: Identity, replica: Replica, ranks: Ranks | None, inner: InnerState
) -> Topology:
    address = config.lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE)
    if not address:
        raise ConfigError(
            "server_addr='torchft' needs a lighthouse to meet at: start one (outerstep lighthouse) and say "
            f"lighthouse='host:port', or set {LIGHTHOUSE_VARIABLE}"
        )
    if ranks is None and replica.shards.sections > 1:
        raise ModelError(
            f"this model is sharded over {replica.shards.sections} processes, which can only be one replica together: "
            "leave group='auto', and give every rank its DiLoCoWorker"
        )
    try:
        from ..topology.torchft.topology import TorchftSettings, TorchftTopology
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchft":
            raise
        raise ConfigError(
            "server_addr='torchft' needs the package torchft, which is not installed: pip install 'outerstep[torchft]'"
        ) from error
    return TorchftTopology(
        worker_id=identity.worker_id,
        hostname=identity.hostname,
        instance=identity.instance,
        tensors=replica.tensors,
        anchors=replica.anchors,
        settings=TorchftSettings(
            lighthouse=parse_lighthouse(address),
            outer=_outer_rule(config),
            weight_by=config.weight_by or "equal",
            min_replicas=config.min_replicas,
            backend=config.replica_backend,
            quorum_timeout_s=config.quorum_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            join_timeout_s=config.join_timeout_s,
            give_up_after_s=config.give_up_after_s,
            on_divergence=config.on_divergence,
        ),
        inner=inner,
        ranks=ranks,
        sections=replica.shards.sections,
    )


def _outer_rule(config: WorkerConfig) -> OuterRule:
    usual = OuterRule()
    return OuterRule(
        lr=usual.lr if config.outer_lr is None else config.outer_lr,
        momentum=usual.momentum if config.outer_momentum is None else config.outer_momentum,
        nesterov=usual.nesterov if config.nesterov is None else config.nesterov,
    )


def _gossip_topology(config: WorkerConfig, identity: Identity, replica: Replica) -> Topology:
    if replica.shards.sections > 1 or replica.is_data_parallel:
        raise ModelError(
            "this model is sharded, or wrapped in DistributedDataParallel: its processes are one worker together, and "
            "with server_addr='gossip' every process is a peer; give each the whole model, or use a server"
        )
    from ..topology.gossip.pairs import PairsTopology
    from ..topology.gossip.topology import GossipSettings, GossipTopology

    topology = GossipTopology if config.pattern in (None, "all") else PairsTopology
    return topology(
        make_node(config, identity.worker_id),
        tensors=replica.tensors,
        anchors=replica.anchors,
        settings=GossipSettings(
            _gossip_wishes(config),
            join_timeout_s=config.join_timeout_s,
            announce=_announce if config.announce else lambda node: None,
        ),
    )


def _gossip_wishes(config: WorkerConfig) -> GossipWishes:
    return GossipWishes(
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        nesterov=config.nesterov,
        weight_by=config.weight_by,
        aggregation=config.aggregation,
        trim_fraction=config.trim_fraction,
        cosine_screen=config.cosine_screen,
        bucket_size=config.bucket_size,
        min_peers=config.min_peers,
        liars=config.liars,
        round_deadline_s=config.round_deadline_s,
        heartbeat_timeout_s=config.heartbeat_timeout,
        pattern=config.pattern,
    )


def _remembered_id(config: WorkerConfig) -> str | None:
    """A peer's id is part of who it is, and lies in its folder."""
    return remembered_id(config.peer_dir) if config.peer_dir is not None else None


def _announce(node: Node) -> None:
    """What to type on the next machine. The join string holds the run's token: it is shown to people, and not to log
    files; those are told where it lies."""
    folder, insecure = node.settings.folder, " --insecure" if node.settings.insecure else ""
    where, hint = shlex.quote(node.join_string), ""
    is_for_people = bool(insecure) or sys.stderr.isatty()
    if folder is not None:
        file = Path(folder).absolute() / "join"
        write_secret(file, f"{node.join_string}\n".encode())
        hint = (
            "" if is_for_people else f"JOIN_STRING is the line in {file} on this machine; it holds the run's token.\n"
        )
    elif not is_for_people:
        hint = "JOIN_STRING holds the run's token and is not for logs: give this peer a peer_dir, and it lies there.\n"
    print(
        f"peer {node.peer_id} listens on {node.address}. On each other machine:\n\n"
        f"    outerstep peer{insecure} --join {where if is_for_people else 'JOIN_STRING'} -- python train.py\n\n{hint}",
        file=sys.stderr,
        flush=True,
    )


def make_node(config: WorkerConfig, peer_id: str) -> Node:
    """This process's voice among the peers; it listens from now on."""
    return Node(
        NodeSettings(
            peer_id=peer_id,
            listen=config.listen,
            advertise=config.advertise,
            join=tuple((config.peers or "").split()),
            folder=config.peer_dir,
            credentials=config.credentials,
            insecure=config.insecure,
            beat_every_s=min(config.heartbeat_interval or USUAL_BEAT_S, USUAL_BEAT_S),
        )
    )


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
