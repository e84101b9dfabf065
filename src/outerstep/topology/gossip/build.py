"""A worker among peers. Every process is a peer of its own, with the whole model."""

from __future__ import annotations

from ...errors import ModelError
from ..local_worker import LocalWorker
from ..protocol import Topology
from .base import GossipSettings
from .node import Node, NodeSettings
from .pairs import PairsTopology
from .topology import GossipTopology


def build(worker: LocalWorker, node: NodeSettings, settings: GossipSettings) -> Topology:
    """The node listens from now on."""
    if worker.shards.sections > 1 or worker.is_data_parallel:
        raise ModelError(
            "this model is sharded, or wrapped in DistributedDataParallel: its processes are one worker together, and "
            "with topology='gossip' every process is a peer; give each the whole model, or use a server"
        )
    topology = GossipTopology if settings.wishes.pattern in (None, "all") else PairsTopology
    return topology(
        Node(node, event_sink=worker.events), tensors=worker.tensors, anchors=worker.anchors, settings=settings
    )


__all__ = ["GossipSettings", "NodeSettings", "build"]
