"""A run whose server and workers are stopped and started again, at whatever step, equals one that never was.

Over HTTP and TLS. A worker is stopped between two steps, without a goodbye, as if its process had been killed there; it
starts again from its own checkpoint. The server starts again from its saved state, at any moment of the others' work.
"""

from __future__ import annotations

import io
import random
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amounts import mostly_slow
from outerstep.server import DiLoCoServer
from outerstep.topology.server.topology import ServerTopology
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from support import EAGER, assert_same, in_threads, params_of, tiny_model

STEPS = 30
WORKERS = ("a", "b")
MODES: dict[str, dict[str, Any]] = {
    "blocking, bf16": {"codec": "bf16", "sync_every": 4, "fragment_delay": 0},
    "blocking, int4 with feedback": {"codec": "int4+feedback", "sync_every": 4, "fragment_delay": 0},
    "blocking, sparse": {"codec": "sparse64", "sync_every": 3, "num_fragments": 2, "fragment_delay": 0},
    "streaming, bf16": {"codec": "bf16", "sync_every": 6, "num_fragments": 3, "fragment_delay": 2},
    "streaming and carried, int4 with feedback": {
        "codec": "int4+feedback",
        "sync_every": 6,
        "num_fragments": 2,
        "fragment_delay": 4,
        "fragment_carry": True,
    },
    "streaming and mixed, at random": {
        "codec": "int4+stochastic",
        "sync_every": 6,
        "num_fragments": 2,
        "fragment_delay": 4,
        "fragment_alpha": 0.5,
    },
}


class Station:
    """A server that can be started again at its address."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._settings = {**settings, "deterministic": True, "save_dir": str(folder)}
        self.server = DiLoCoServer(tiny_model().state_dict(), len(WORKERS), port=0, **self._settings)
        self.server.service.coordinator.run_id = "run"  # rounding at random depends on it
        self.server.start()
        self.address = self.server.address

    def restart(self) -> None:
        self.server.stop()
        port, folder = int(self.address.rsplit(":", 1)[1]), self._settings["save_dir"]
        self.server = DiLoCoServer(None, len(WORKERS), port=port, resume=folder, **self._settings).start()

    def momentum(self) -> dict[str, Tensor]:
        optimizer = self.server.service.optimizer
        assert optimizer is not None
        return {name: entry["momentum_buffer"].clone() for name, entry in optimizer.state_dict().items()}

    def targets(self) -> dict[str, Tensor]:
        """Where the outer optimizer is, beside what the workers hold."""
        return {n: t.clone() for store in self.server.service.stores for n, t in store.down.targets().items()}


@dataclass
class Trainer:
    """The user's script: it can be killed after any step, and goes on from its last checkpoint."""

    station: Station
    name: str
    losses: list[float] = field(default_factory=list)
    under_way: int = 0  # contributions, when it was killed

    def __post_init__(self) -> None:
        self.build(None)

    def build(self, checkpoint: bytes | None) -> None:
        self.model = tiny_model(ord(self.name))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        transport = HttpTransport(self.station.address)
        self.topology = ServerTopology(
            transport, worker_id=self.name, instance=secrets.token_hex(8), hostname="test", patience=EAGER
        )
        self.worker = DiLoCoWorker(
            self.model, self.optimizer, self.station.address, worker_id=self.name, topology=self.topology
        )
        if checkpoint is not None:
            loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
            self.model.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])
            self.worker.load_state_dict(loaded["worker"])
        self.worker.start()

    def checkpoint(self) -> bytes:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "worker": self.worker.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def kill(self) -> None:
        """The process is gone; the server hears nothing of it."""
        self.topology.leave = lambda reason: self.topology.close()  # type: ignore[method-assign]
        self.worker.abandon("killed")

    def restart(self) -> None:
        saved = self.checkpoint()
        self.under_way += len(self.worker._started.machine.in_flight)
        self.kill()
        self.build(saved)

    def step(self) -> None:
        source = torch.Generator().manual_seed(1000 * ord(self.name) + len(self.losses))
        inputs = torch.randn(8, 6, generator=source)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def train(self, own_stops: Collection[int], server_stops: Collection[int] = ()) -> None:
        for step in range(STEPS):
            if step in own_stops:
                self.restart()
            if step in server_stops:
                self.station.restart()
            self.step()


@dataclass(frozen=True)
class Result:
    losses: list[list[float]]
    tensors: dict[str, dict[str, Tensor]]
    metrics: list[dict[str, Any]]
    under_way: int


def run(folder: Path, mode: str, stops: list[set[int]]) -> Result:
    """`stops`: the steps before which worker a, worker b and the server are stopped and started again. (For the server
    it is a's steps; b is wherever it is.)"""
    station = Station(folder, MODES[mode])
    trainers = in_threads(*(lambda name=name: Trainer(station, name) for name in WORKERS))
    in_threads(lambda: trainers[0].train(stops[0], stops[2]), lambda: trainers[1].train(stops[1]))
    tensors = {}
    for trainer in trainers:
        tensors[f"local {trainer.name}"] = params_of(trainer.model)
        tensors[f"anchor {trainer.name}"] = {n: t.clone() for n, t in trainer.worker._replica.anchors.items()}
    in_threads(*(trainer.worker.stop for trainer in trainers))
    tensors |= {f"final {trainer.name}": params_of(trainer.model) for trainer in trainers}
    tensors |= {"final": station.server.get_global_params(), "momentum": station.momentum()}
    tensors["targets"] = station.targets()
    station.server.stop()
    metrics, under_way = [t.worker.sync_metrics for t in trainers], sum(t.under_way for t in trainers)
    return Result([t.losses for t in trainers], tensors, metrics, under_way)


_uninterrupted: dict[str, Result] = {}


@pytest.mark.row("F29")
@pytest.mark.parametrize("seed", mostly_slow([0, 1, 2], [0]))
@pytest.mark.parametrize("mode", mostly_slow(MODES, ["blocking, bf16", "streaming and mixed, at random"]))
def test_stopped_and_resumed_at_random_points_it_gives_the_same_bits(mode: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{mode}/{seed}")
    stops = [set(rng.sample(range(1, STEPS), count)) for count in (4, 3, 2)]
    if mode not in _uninterrupted:
        _uninterrupted[mode] = run(tmp_path / "straight", mode, [set(), set(), set()])
    expected, found = _uninterrupted[mode], run(tmp_path / "stopped", mode, stops)
    assert found.losses == expected.losses, stops
    for what, tensors in expected.tensors.items():
        assert_same(found.tensors[what], tensors)
    for before, after in zip(expected.metrics, found.metrics, strict=True):
        assert after["missed_rounds"] == after["anchor_repairs"] == after["steps_discarded"] == 0
        assert after["sync_count"] == before["sync_count"]
    assert (found.under_way > 0) == (MODES[mode]["fragment_delay"] > 0)


def test_a_worker_that_stayed_proves_its_anchor_to_the_restarted_server(tmp_path: Path) -> None:
    """It keeps its steps, is not sent what it holds, and goes on with updates."""
    station = Station(tmp_path, {"codec": "bf16", "sync_every": 4})
    trainers = in_threads(*(lambda name=name: Trainer(station, name) for name in WORKERS))

    def together(steps: int) -> None:
        in_threads(*(lambda t=t: [t.step() for _ in range(steps)] for t in trainers))

    together(6)
    before = [(params_of(t.model), t.worker.sync_metrics["bytes_received"]) for t in trainers]
    station.restart()
    for trainer, (local, _) in zip(trainers, before, strict=True):
        assert_same(params_of(trainer.model), local)
    together(2)
    for trainer, (_, received) in zip(trainers, before, strict=True):
        metrics: dict[str, Any] = trainer.worker.sync_metrics
        assert metrics["bytes_received"] - received == trainer.topology.forms[0].update.size_bytes
        assert (metrics["missed_rounds"], metrics["anchor_repairs"], metrics["versions"]) == (0, 0, [2])
        assert_same(trainer.worker._replica.anchors, station.server.get_global_params())
    in_threads(*(trainer.worker.stop for trainer in trainers))
    station.server.stop()
