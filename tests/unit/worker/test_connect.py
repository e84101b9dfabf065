"""A worker's topology: by a built-in name, by a name of one's own, or as an object."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outerstep
from outerstep import DiLoCoWorker
from outerstep.config import WorkerConfig
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.topology.local_worker import LocalWorker
from outerstep.worker import connect
from support import memory_topology, tiny_model, train_steps

PLAIN: dict[str, Any] = {"sync_every": 2, "codec": "fp32"}


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_FACTORIES", dict(connect._FACTORIES))


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_registered_name_builds_the_users_topology() -> None:
    seen: list[tuple[LocalWorker, WorkerConfig]] = []
    with DiLoCoServer(tiny_model(1).state_dict(), num_workers=1, port=0, **PLAIN) as server:

        def build(worker: LocalWorker, config: WorkerConfig) -> Any:
            seen.append((worker, config))
            return memory_topology(server, worker.worker_id)

        outerstep.register_topology("mine", build)
        model = tiny_model(2)
        with DiLoCoWorker(model, sgd(model), topology="mine", worker_id="w", round_deadline_s=3.0) as worker:
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model(1).parameters(), strict=True))
            train_steps(model, worker.optimizer, 2, seed=0)
            assert worker.sync_metrics["versions"] == [1]
        ((told, config),) = seen
        assert (told.worker_id, set(told.tensors)) == ("w", set(dict(model.named_parameters())))
        assert (config.topology, config.server_addr, config.gossip.round_deadline_s) == ("mine", None, 3.0)


def test_an_object_needs_neither_a_name_nor_an_address() -> None:
    with DiLoCoServer(tiny_model(1).state_dict(), num_workers=1, port=0, **PLAIN) as server:
        for attach in (DiLoCoWorker, outerstep.attach):
            model = tiny_model(2)
            with attach(model, sgd(model), topology=memory_topology(server, "w"), worker_id="w") as worker:
                assert worker.config.server_addr is None


@pytest.mark.parametrize("name", ["server", "gossip", "gosip", "all_reduce", "", "a b", "-x"])
def test_a_name_that_is_ours_or_nearly_so_is_not_the_users(name: str) -> None:
    with pytest.raises(ConfigError, match="topology"):
        outerstep.register_topology(name, lambda worker, config: None)  # type: ignore[arg-type,return-value]


def test_a_name_that_nobody_registered_is_answered_with_those_there_are() -> None:
    model = tiny_model()
    with pytest.raises(
        ConfigError,
        match=r'unknown topology "mine"; known: server, allreduce, gossip, torchft; outerstep.register_topology',
    ):
        DiLoCoWorker(model, sgd(model), topology="mine")
    with pytest.raises(ConfigError, match=r'unknown topology "gosip"; did you mean "gossip"\?'):
        DiLoCoWorker(model, sgd(model), topology="gosip")


def test_a_topology_without_a_server_and_an_address_exclude_each_other() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"topology 'gossip' has no server, got server_addr 'h:1': leave one"):
        DiLoCoWorker(model, sgd(model), "h:1", topology="gossip")
    with pytest.raises(ConfigError, match="missing setting: server_addr"):
        DiLoCoWorker(model, sgd(model))
