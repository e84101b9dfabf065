"""A worker among the replicas that meet at a lighthouse. A replica may consist of several processes."""

from __future__ import annotations

from ...errors import ModelError
from ..leadership import ClusterSettings
from ..local_worker import LocalWorker
from .process_groups import place_of
from .quorum import TorchftSettings
from .state import ReplicaKinds
from .topology import TorchftTopology


def build(worker: LocalWorker, settings: TorchftSettings, cluster: ClusterSettings | None = None) -> TorchftTopology:
    if cluster is not None and worker.ranks is not None:
        raise ModelError(
            f"a replica of {worker.ranks.size} processes cannot speak to a layer above: leave out above, or run each "
            "replica as one process"
        )
    if worker.ranks is None and worker.shards.sections > 1:
        raise ModelError(
            f"this model is sharded over {worker.shards.sections} processes, which can only be one replica together: "
            "leave group='auto', and give every rank its DiLoCoWorker"
        )
    if not worker.shards.by_rows:
        raise ModelError(
            f"this model is cut into {worker.shards.sections} pieces that are not rows (TP, or FSDP2 and TP together); "
            "replicas that meet at a lighthouse are whole or cut by rows: use a server, or FSDP2 alone"
        )
    return TorchftTopology(
        worker_id=worker.worker_id,
        hostname=worker.hostname,
        instance=worker.instance,
        tensors=worker.tensors,
        anchors=worker.anchors,
        settings=settings,
        inner=worker.inner,
        ranks=worker.ranks,
        sections=worker.shards.sections,
        cluster=cluster,
        kinds=ReplicaKinds.told_by(worker.info, place_of(next(iter(worker.tensors.values())).device)),
    )


__all__ = ["ClusterSettings", "TorchftSettings", "build"]
