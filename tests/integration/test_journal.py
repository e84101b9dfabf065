"""A server that is killed between any two rounds goes on as if nothing had happened: its journal has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amounts import mostly_slow
from outerstep.server import DiLoCoServer
from outerstep.server.saved import load_state
from outerstep.types import Manifest, ParameterSpec
from outerstep.worker import DiLoCoWorker
from support import (
    HandClient,
    Relocatable,
    assert_same,
    kill,
    make_frame,
    memory_topology,
    tiny_model,
    train_steps,
    wait_until,
)


def normalized(seed: int = 0) -> nn.Module:
    """With statistics that are averaged at each round."""
    first, *others = tiny_model(seed)
    return nn.Sequential(first, nn.BatchNorm1d(5), *others)


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "bf16": {"codec": "bf16"},
    "int4 down": {"down_codec": "int4"},
    "int4 both ways, at random": {"codec": "int4+stochastic"},
    "deterministic": {"deterministic": True, "down_codec": "int8"},
    "two fragments with a delay": {"num_fragments": 2, "fragment_delay": 1},
    "a quorum": {"quorum": 1},
    "asynchronous": {"async_mode": True, "dn_buffer_size": 3},
    "asynchronous, int4 down": {"async_mode": True, "dn_buffer_size": 3, "down_codec": "int4"},
    "asynchronous, without its own rule": {"async_mode": True, "dn_buffer_size": 0},
    "a torch optimizer": {"outer_optimizer_factory": lambda params: torch.optim.Adam(params, lr=0.01)},
    "averaged buffers": {"model": normalized},
    "averaged buffers, asynchronous": {"model": normalized, "async_mode": True, "dn_buffer_size": 3},
    "averaged buffers, a torch optimizer": {
        "model": normalized,
        "outer_optimizer_factory": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01),
    },
}
QUICK = ["synchronous", "int4 both ways, at random", "asynchronous, int4 down", "averaged buffers, a torch optimizer"]


def make_server(folder: Path, model: Any = tiny_model, **settings: Any) -> DiLoCoServer:
    facts = {"sync_every": 4, "codec": "fp32", "port": 0, **settings}
    fresh = not (folder / "run.json").exists()
    server = DiLoCoServer(model().state_dict(), facts.pop("num_workers", 1), save_dir=str(folder), **facts)
    if fresh:
        server.service.coordinator.run_id = "run"  # rounding at random depends on it
    server.service.start()
    return server


def outer_state(folder: Path) -> dict[str, Tensor]:
    by_name = load_state(folder).optimizer.by_name
    found = {f"{name} {key}": value for name, entry in by_name.items() for key, value in entry.items()}
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


@pytest.mark.row("F29")
@pytest.mark.parametrize("mode", mostly_slow(MODES, QUICK))
def test_a_run_killed_at_any_step_equals_the_uninterrupted_one_bit_for_bit(mode: str, tmp_path: Path) -> None:
    def run(folder: Path, kills: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        server = make_server(folder, **MODES[mode])
        transport = Relocatable(server.service)
        model = MODES[mode].get("model", tiny_model)(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        topology = memory_topology(server, "w", transport)
        worker = DiLoCoWorker(model, optimizer, "memory:1", worker_id="w", topology=topology).start()
        for step in range(24):
            train_steps(model, optimizer, 1, seed=step)
            if step in kills:
                kill(server)
                server = make_server(folder, **MODES[mode])
                transport.move(server)
        worker.stop()
        agreed = server.get_global_params()
        server.service.stop()
        return agreed, outer_state(folder), server.service.coordinator.total_accepted

    interrupted = run(tmp_path / "interrupted", (2, 3, 7, 8, 13, 19, 22))
    smooth = run(tmp_path / "smooth", ())
    assert_same(interrupted[0], smooth[0])
    assert_same(interrupted[1], smooth[1])
    assert interrupted[1], "the outer optimizer remembers nothing"
    assert interrupted[2] == smooth[2]


STALE = Manifest(
    parameters=(
        ParameterSpec(name="weight", shape=(3,), dtype="float32"),
        ParameterSpec(name="mean", shape=(2,), dtype="float32", role="average"),
    )
)


@pytest.mark.parametrize("mode", [{"async_mode": True}, {"quorum": 1}], ids=["asynchronous", "a quorum"])
@pytest.mark.parametrize("down_codec", ["fp32", "int4"])
def test_late_contributions_to_averaged_buffers_replay_exactly(
    mode: dict[str, Any], down_codec: str, tmp_path: Path
) -> None:
    """Against the values of the version they were computed from, which is older than the last checkpoint."""

    def model() -> nn.Module:
        made = nn.Module()
        made.weight = nn.Parameter(torch.arange(3.0))
        made.register_buffer("mean", torch.tensor([1.0, 2.0]))
        return made

    def run(folder: Path, kills: tuple[int, ...]) -> list[str]:
        settings = {**mode, "num_workers": 2, "down_codec": down_codec, "save_every": 3, "model": model}
        server = make_server(folder, **settings)
        clients = [HandClient(Relocatable(server.service), name, STALE) for name in "ab"]
        for client in clients:
            client.join()
        hashes = []
        for version in range(1, 12):
            source = torch.Generator().manual_seed(version)
            delta = {"weight": torch.randn(3, generator=source), "mean": torch.randn(2, generator=source)}
            base = max(version - 1 - version % 3, 0)
            clients[version % 2].contribute(make_frame(delta), base_version=base, oldest_base=base)
            wait_until(lambda version=version, server=server: server.sync_round == version)
            hashes.append(server.service.stores[0].newest.agreement.anchor_hash)
            if version in kills:
                kill(server)
                server = make_server(folder, **settings)
                for client in clients:
                    client.transport.move(server)  # type: ignore[attr-defined]
                assert server.service.stores[0].newest.agreement.anchor_hash == hashes[-1]
        server.service.stop()
        return hashes

    assert run(tmp_path / "interrupted", (1, 2, 4, 5, 7, 10)) == run(tmp_path / "smooth", ())
