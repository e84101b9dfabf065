"""What a worker is told before it trains a single step: other plans, other models, impossible settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outerstep.config import WorkerConfig
from outerstep.errors import ConfigError, ManifestMismatch, ModelError, PlanMismatch
from outerstep.server import DiLoCoServer
from outerstep.types import Wishes
from outerstep.worker import DiLoCoWorker, attach
from support import memory_topology, memory_worker, tiny_model


@pytest.fixture
def server() -> DiLoCoServer:
    made = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=5)
    made.service.start()
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.row("F22")
def test_a_different_plan_is_refused_showing_both(server: DiLoCoServer) -> None:
    model = tiny_model()
    with pytest.raises(PlanMismatch, match=r"wants sync_every=7, but the run has sync_every=5 \(said by the server\)"):
        memory_worker(server, "w", model, sgd(model), sync_every=7).start()


@pytest.mark.row("F22")
def test_what_the_server_left_open_the_first_worker_fixes() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0)
    server.service.start()
    model = tiny_model()
    first = memory_worker(server, "first", model, sgd(model), sync_every=123, bf16_comm=False).start()
    assert (first.plan.sync_every, first.plan.codec, len(first.plan.fragments)) == (123, "fp32", 1)
    model = tiny_model()
    with pytest.raises(PlanMismatch, match=r"wants codec=bf16, but the run has codec=fp32 \(said by worker 'first'\)"):
        memory_worker(server, "second", model, sgd(model), bf16_comm=True).start()
    model = tiny_model()
    follower = memory_worker(server, "third", model, sgd(model)).start()
    assert follower.sync_every == 123
    first.abandon("over")
    follower.abandon("over")


@pytest.mark.row("B14")
def test_a_different_model_is_refused_by_name(server: DiLoCoServer) -> None:
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(ManifestMismatch, match=r"'2.weight': got \[3, 5\], run has \[4, 5\]"):
        memory_worker(server, "w", other, sgd(other)).start()
    model = tiny_model()
    first = memory_worker(server, "first", model, sgd(model)).start()
    half = tiny_model().bfloat16()
    with pytest.raises(ManifestMismatch, match="got bfloat16, run has float32"):
        memory_worker(server, "half", half, sgd(half)).start()
    first.abandon("over")


@pytest.mark.row("B20")
@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.Linear(2, 2, device="meta"), "meta device"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model: nn.Module, problem: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ModelError, match=problem):
        DiLoCoWorker(model, optimizer, "127.0.0.1:9")


@pytest.mark.row("B20")
def test_an_optimizer_has_one_worker_at_a_time(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer), pytest.raises(ModelError, match="already has a DiLoCoWorker"):
        memory_worker(server, "again", model, optimizer).start()
    memory_worker(server, "later", model, optimizer).start().abandon("over")


def test_settings_are_checked_where_they_are_written() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match='unknown setting "heartbeat_intervall"; did you mean "heartbeat_interval_s"'):
        DiLoCoWorker(model, sgd(model), "127.0.0.1:9", heartbeat_intervall=3)
    with pytest.raises(ConfigError, match="sync_every must be ≥ 1, got 0"):
        DiLoCoWorker(model, sgd(model), "127.0.0.1:9", sync_every=0)
    with pytest.raises(ConfigError, match="host:port"):
        DiLoCoWorker(model, sgd(model), "127.0.0.1:port")


def test_attach_reads_the_environment() -> None:
    model = tiny_model()
    environ = {
        "DILOCO_SERVER": "127.0.0.1:9",
        "DILOCO_SYNC_EVERY": "12",
        "DILOCO_BF16_COMM": "0",
        "DILOCO_NUM_FRAGMENTS": "2",
        "DILOCO_HEARTBEAT_INTERVAL": "7.5",
        "DILOCO_WORKER_ID": "left",
    }
    worker = attach(model, sgd(model), environ=environ, num_fragments=3)
    assert worker.config == WorkerConfig(
        server_addr="127.0.0.1:9",
        sync_every=12,
        bf16_comm=False,
        num_fragments=3,
        heartbeat_interval_s=7.5,
        worker_id="left",
    )
    assert attach(model, sgd(model), environ={**environ, "DILOCO_DYLU": "1"}).config.server.dylu is True
    with pytest.raises(ConfigError, match='unknown setting "devices"'):
        attach(model, sgd(model), environ=environ, devices="0")
    with pytest.raises(ConfigError, match=r"sync_every must be ≥ 1, got 0 \(sync_every: keyword sync_every\)"):
        attach(model, sgd(model), environ=environ, sync_every=0)
    with pytest.raises(ConfigError, match="DILOCO_SERVER is not set"):
        attach(model, sgd(model), environ={})
    with pytest.raises(ConfigError, match="DILOCO_SYNC_EVERY='often' is not a valid sync_every"):
        attach(model, sgd(model), environ={**environ, "DILOCO_SYNC_EVERY": "often"})


@pytest.mark.parametrize(
    ("down_codec", "said"), [("sparse64", "must send every value"), ("int4+feedback", "leave \\+feedback out")]
)
def test_a_downlink_that_leaves_values_out_is_refused(down_codec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, down_codec=down_codec)
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0)
    server.service.start()
    with pytest.raises(PlanMismatch, match=said):
        memory_topology(server, "w").join(None, Wishes(down_codec=down_codec))
