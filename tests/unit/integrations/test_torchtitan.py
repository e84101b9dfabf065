"""torchtitan's settings as ours. Its own class is used where torchtitan can be imported, which CI's environment cannot
(it wants an older huggingface_hub than transformers); elsewhere a stand-in with the same fields and defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import outerstep
from outerstep.config import WorkerConfig, build, values_of
from outerstep.errors import ConfigError


def fault_tolerance(**changes: Any) -> Any:
    try:
        from torchtitan.experiments.torchft.config.job_config import FaultTolerance
    except ImportError:
        fields: dict[str, Any] = {
            "enable": False,
            "process_group": "gloo",
            "process_group_timeout_ms": 10000,
            "replica_id": 0,
            "group_size": 0,
            "min_replica_size": 1,
            "semi_sync_method": None,
            "sync_steps": 5,
            "should_quantize": False,
            "fragment_sync_delay": 0,
            "fragment_update_alpha": 0.0,
            "module_fqns_per_model_fragment": [],
            "num_fragments": 1,
        }
        return SimpleNamespace(**{**fields, "semi_sync_method": "diloco", **changes})
    return FaultTolerance(**{"semi_sync_method": "diloco", **changes})


def settings_of(topology: str = "server", **changes: Any) -> dict[str, Any]:
    told = outerstep.torchtitan.settings_from(fault_tolerance(**changes), topology)
    given = {"server_addr": "host:8512"} if topology == "server" else {}
    return values_of(build(WorkerConfig, {**told, **given}))


def test_what_torchtitan_says_of_diloco_a_worker_hears() -> None:
    told = settings_of(sync_steps=40, num_fragments=4, fragment_sync_delay=2, fragment_update_alpha=0.25, replica_id=3)
    assert (told["sync_every"], told["num_fragments"]) == (40, 4)
    assert (told["fragment_delay"], told["fragment_alpha"]) == (2, 0.25)
    assert told["worker_id"] == "torchtitan-3"
    assert told["topology"] == "server"


def test_its_replicas_are_those_of_the_torchft_topology() -> None:
    told = settings_of("torchft", min_replica_size=2, process_group="nccl", process_group_timeout_ms=2500)
    assert (told["min_replicas"], told["replica_backend"], told["transfer_timeout_s"]) == (2, "nccl", 2.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable": True}, "enable must be off"),
        ({"semi_sync_method": None}, "semi_sync_method must be 'diloco', got None"),
        ({"semi_sync_method": "local_sgd"}, "--outer-lr 1 --outer-momentum 0"),
        ({"should_quantize": True}, "codec='int8'"),
        ({"module_fqns_per_model_fragment": [["layers.0"]]}, "give num_fragments"),
    ],
)
def test_what_has_no_counterpart_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        outerstep.torchtitan.settings_from(fault_tolerance(**changes))


def test_something_else_than_its_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="got dict without sync_steps"):
        outerstep.torchtitan.settings_from({})


def test_a_trainer_with_several_parts_is_refused() -> None:
    trainer = SimpleNamespace(model_parts=[None, None], optimizers=SimpleNamespace(optimizers=[None]))
    with pytest.raises(ConfigError, match="got 2 parts and 1 optimizers"):
        outerstep.torchtitan.attach_trainer(trainer, fault_tolerance())
