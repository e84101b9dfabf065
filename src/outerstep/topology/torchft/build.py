"""A worker among the replicas that meet at a lighthouse. A replica may consist of several processes."""

from __future__ import annotations

from ...errors import ModelError
from ..local_worker import LocalWorker
from .quorum import TorchftSettings
from .topology import TorchftTopology


def build(worker: LocalWorker, settings: TorchftSettings) -> TorchftTopology:
    if worker.ranks is None and worker.shards.sections > 1:
        raise ModelError(
            f"this model is sharded over {worker.shards.sections} processes, which can only be one replica together: "
            "leave group='auto', and give every rank its DiLoCoWorker"
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
    )


__all__ = ["TorchftSettings", "build"]
