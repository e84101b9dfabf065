"""A worker among the ranks of a job. Every rank is a worker of its own, with the whole model."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from ...errors import ConfigError, ModelError
from ..leadership import ClusterSettings
from ..local_worker import LocalWorker
from .topology import AllReduceSettings, AllReduceTopology


def build(
    worker: LocalWorker, settings: AllReduceSettings, cluster: ClusterSettings | None = None
) -> AllReduceTopology:
    if worker.shards.sections > 1:
        raise ModelError(
            f"this model is sharded over {worker.shards.sections} processes, which can only be one worker together; "
            "with topology='allreduce' every rank is a worker: give each the whole model, or use a server"
        )
    if worker.is_data_parallel:
        raise ModelError(
            "this model is wrapped in DistributedDataParallel: its ranks train in step and are one worker; with "
            "topology='allreduce' every rank is a worker of its own: leave the wrapper away"
        )
    return AllReduceTopology(
        worker_id=worker.worker_id,
        hostname=worker.hostname,
        tensors=worker.tensors,
        anchors=worker.anchors,
        settings=settings,
        cluster=cluster,
    )


def join_process_group(environ: Mapping[str, str] = os.environ) -> int:
    """Make sure that there is a process group, the user's or one from torchrun's variables. Returns this rank."""
    if dist.is_initialized():
        return dist.get_rank()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"topology='allreduce' needs the other ranks, and {missing[0]} is not set: start this script with "
            "torchrun, or call torch.distributed.init_process_group() first"
        )
    dist.init_process_group("gloo")
    return dist.get_rank()


__all__ = ["AllReduceSettings", "ClusterSettings", "build", "join_process_group"]
