"""torchtitan's `fault_tolerance` settings for DiLoCo, as settings of a worker (docs/integrations/torchtitan.md).

    sync_steps                       sync_every
    num_fragments                    num_fragments
    fragment_sync_delay              fragment_delay
    fragment_update_alpha            fragment_alpha
    replica_id                       worker_id
    min_replica_size, process_group, process_group_timeout_ms      of topology="torchft" only

What has no counterpart is refused, never dropped. Nothing of torchtitan is imported: any object with those attributes
will do.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..worker import DiLoCoWorker, attach

SAME = ("sync_steps", "num_fragments", "fragment_sync_delay", "fragment_update_alpha")
OTHERS = ("semi_sync_method", "should_quantize", "module_fqns_per_model_fragment", "replica_id")
REPLICAS = ("min_replica_size", "process_group", "process_group_timeout_ms")


def settings_from(fault_tolerance: Any, topology: str = "server") -> dict[str, Any]:
    """The keywords of `outerstep.attach` that say what `fault_tolerance` says. Its `enable` must stay off: otherwise
    torchtitan exchanges, too."""
    missing = [name for name in (*SAME, *OTHERS, *REPLICAS) if not hasattr(fault_tolerance, name)]
    if missing:
        raise ConfigError(
            f"fault_tolerance must be torchtitan's settings for torchft, got {type(fault_tolerance).__name__} without "
            f"{', '.join(missing)}"
        )
    _check(fault_tolerance)
    settings: dict[str, Any] = {name: getattr(fault_tolerance, name) for name in SAME}
    settings |= {"topology": topology, "worker_id": f"torchtitan-{fault_tolerance.replica_id}"}
    if topology == "torchft":
        settings |= {
            "min_replicas": fault_tolerance.min_replica_size,
            "replica_backend": fault_tolerance.process_group,
            "transfer_timeout_s": fault_tolerance.process_group_timeout_ms / 1000.0,
        }
    return settings


def attach_trainer(trainer: Any, fault_tolerance: Any, **settings: Any) -> DiLoCoWorker:
    """`with attach_trainer(trainer, config.fault_tolerance): trainer.train()`. Keywords win over `fault_tolerance`.

    For a Trainer with one part of a model and one optimizer: without pipeline parallelism."""
    if len(trainer.model_parts) != 1 or len(trainer.optimizers.optimizers) != 1:
        raise ConfigError(
            f"a worker has one model and one optimizer, got {len(trainer.model_parts)} parts and "
            f"{len(trainer.optimizers.optimizers)} optimizers: leave pipeline parallelism out"
        )
    told = settings_from(fault_tolerance, settings.get("topology", "server"))
    return attach(trainer.model_parts[0], trainer.optimizers.optimizers[0], **{**told, **settings})


def _check(told: Any) -> None:
    if getattr(told, "enable", False):
        raise ConfigError(
            "fault_tolerance.enable must be off, got True: torchtitan would exchange beside outerstep; turn it off"
        )
    if str(told.semi_sync_method).lower() != "diloco":
        raise ConfigError(
            f"fault_tolerance.semi_sync_method must be 'diloco', got {told.semi_sync_method!r}: for plain averaging "
            "start the server with --outer-lr 1 --outer-momentum 0, and say 'diloco' here"
        )
    if told.should_quantize:
        raise ConfigError(
            "fault_tolerance.should_quantize has no counterpart: turn it off, and choose a codec that says how, "
            "codec='int8' or 'int4' (docs/reference/codecs.md)"
        )
    if told.module_fqns_per_model_fragment:
        raise ConfigError(
            "fault_tolerance.module_fqns_per_model_fragment names modules, and outerstep cuts fragments by size: leave "
            "it empty, and give num_fragments"
        )
