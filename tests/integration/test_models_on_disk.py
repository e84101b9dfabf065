"""A server started on a model as it lies on disk, tied and with buffers; clients of the old protocol, which bring no
manifest, and current workers in one run, whoever joins first.

The file sorts its tensors by name. What a run trains, in which order and in which fragments, must come from those who
train it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_safetensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from integration.old_clients import PLAIN as EXACT
from integration.old_clients import Answered, OldClient, OldWorker, serving
from nursery import start
from outerstep.compat import CompatServer
from outerstep.core.manifest import describe
from outerstep.model_folder import load_state_dict
from outerstep.server import DiLoCoServer
from outerstep.types import Wishes
from outerstep.worker import DiLoCoWorker
from ports import free_port
from support import assert_same, in_threads, kill, memory_topology, wait_until

WORDS = 8


class Speaker(nn.Module):
    """Says which word follows which. Its order is not that of its names; the head is the table; it has buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.middle = nn.Linear(6, 6)
        self.level = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.table.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.5 * torch.randn(param.shape, generator=generator))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.first(torch.tanh(self.level(self.middle(self.table(words))))))


def loss_of(model: nn.Module) -> Tensor:
    words = torch.arange(WORDS)
    return cross_entropy(model(words), (words + 1) % WORDS)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def write(folder: Path, model: nn.Module) -> Path:
    """As other programs write a model: tied tensors once, nothing about their order."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}, folder / "model.safetensors")
    return folder


def global_loss(params: dict[str, Tensor]) -> float:
    """Of the agreed weights; the statistics are those of the batch."""
    model = Speaker(seed=5)
    model.load_state_dict({**{n: t for n, t in params.items() if n in model.state_dict()}}, strict=False)
    return loss_of(model.train()).item()


class Turns:
    """Who comes first, and how long: the old client sets the pace."""

    def __init__(self) -> None:
        self.old_is_in, self.new_is_in, self.done = threading.Event(), threading.Event(), threading.Event()


def old_worker(address: str, turns: Turns, rounds: int, *, first: bool, fragments: int = 1, alone: int = 0) -> int:
    """`alone`: so many rounds before the other comes."""
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not first:
        assert turns.new_is_in.wait(20)
    worker = OldWorker(model, optimizer, OldClient(address, "old"), sync_every=4 * fragments, fragments=fragments)
    try:
        while worker.syncs < rounds:
            if worker.syncs == alone:
                turns.old_is_in.set()
                assert alone == 0 or turns.new_is_in.wait(20)
            step(model, optimizer)
            worker.stepped()
    finally:
        turns.done.set()
        worker.stop()
    return worker.syncs


def new_worker(address: str, turns: Turns, *, first: bool, least: int = 1, **settings: Any) -> int:
    """`least`: so many exchanges, also when the other has left."""
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not first:
        assert turns.old_is_in.wait(20)
    with DiLoCoWorker(model, optimizer, address, worker_id="new", exit_patience_s=1.0, **settings) as worker:
        turns.new_is_in.set()
        while not turns.done.is_set() or int(str(worker.sync_metrics["sync_count"])) < least:
            step(model, optimizer)
        return int(str(worker.sync_metrics["sync_count"]))


PLAIN: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5, "codec": "bf16"}
MODES: dict[str, tuple[dict[str, Any], int, int]] = {  # settings, fragments, rounds that an old client has for itself
    "sync": ({}, 1, 0),
    "async": ({"async_mode": True, "dn_buffer_size": 0, "outer_momentum": 0.0, "outer_lr": 0.3}, 1, 2),
    "streaming": ({"num_fragments": 3, "fragment_strategy": "counted"}, 3, 0),
    "streaming, and nobody told the server": ({"async_mode": True, "dn_buffer_size": 0, "outer_momentum": 0.0}, 3, 2),
}
NAMES = [name for name, _ in Speaker().named_parameters()]
THIRDS = [NAMES[:3], NAMES[3:5], NAMES[5:]]  # seven tensors: 3, 2, 2


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("who", ["old first", "new first"])
@pytest.mark.parametrize("mode", MODES)
def test_old_clients_and_workers_train_one_model_from_disk(tmp_path: Path, mode: str, who: str, buffers: str) -> None:
    settings, fragments, alone = MODES[mode]
    if mode.endswith("server") and who == "new first":
        pytest.skip("then the worker says how many fragments there are")
    state = load_state_dict(write(tmp_path, Speaker()))
    turns, old_is_first = Turns(), who == "old first"
    wished: dict[str, Any] = {"sync_every": 4 * fragments, "buffers": buffers}
    with serving(state, num_workers=1 if alone else 2, **{**PLAIN, **settings}) as (server, compat):
        alone = alone if old_is_first else 0
        rounds = 8 * fragments
        syncs = in_threads(
            lambda: old_worker(compat.address, turns, rounds, first=old_is_first, fragments=fragments, alone=alone),
            lambda: new_worker(server.address, turns, first=not old_is_first, least=2 * fragments + 2, **wished),
        )
        assert min(syncs) >= fragments
        manifest, plan = server.service.coordinator.manifest, server.service.coordinator.plan
        assert manifest is not None
        assert plan is not None
        trained = [spec.name for spec in manifest.parameters if spec.role == "parameter"]
        assert trained == NAMES
        assert [name for group in plan.fragments for name in group if name in NAMES] == NAMES
        assert manifest.aliases == {"head.weight": "table.weight"}
        statistics = {name for name in state if name.startswith("level.running")}
        assert {spec.name for spec in manifest.parameters} - set(NAMES) == (
            statistics if buffers == "average" else set()
        )
        params = server.get_global_params()
        assert global_loss(params) < 0.7 * global_loss(state)
        assert torch.equal(params["head.weight"], params["table.weight"])
        moved = not torch.equal(params["level.running_mean"], state["level.running_mean"])
        if mode != "async" or old_is_first:  # else a push of the old client may have drawn them back
            assert moved == (buffers == "average")
        assert int(params["level.num_batches_tracked"]) == 0


def ones(names: Sequence[str], value: float = 0.25) -> dict[str, Tensor]:
    params = dict(Speaker().named_parameters())
    return {name: torch.full_like(params[name], value).detach() for name in names}


def test_no_worker_ever_joins(tmp_path: Path) -> None:
    """Two old clients have the run to themselves, and say by what they send what is trained and how it is cut."""
    state = load_state_dict(write(tmp_path, Speaker()))
    with serving(state, num_workers=2, **EXACT) as (server, compat):
        clients = [OldClient(compat.address, name) for name in "ab"]
        given = [client.register() for client in clients]
        assert_same(given[0], server.get_global_params())
        expected = {name: tensor.float() for name, tensor in state.items() if tensor.is_floating_point()}
        for _ in range(2):
            for fragment, names in enumerate(THIRDS):
                got = in_threads(*(partial(client.submit_fragment, fragment, ones(names)) for client in clients))
                expected |= {name: expected[name] - 0.25 for name in names}
                assert_same(got[0], {name: expected[name] for name in names})
                assert_same(got[1], got[0])
        assert server.sync_round == 2
        with pytest.raises(Answered, match="fragment 4 does not exist: the plan has 3") as caught:
            clients[0].submit_fragment(4, ones(["first.weight"]))
        assert caught.value.status == 400
        whole = in_threads(*(partial(client.submit, ones(NAMES)) for client in clients))
        expected |= {name: expected[name] - 0.25 for name in NAMES}
        assert_same({name: whole[0][name] for name in expected}, expected)
        assert_same(whole[1], whole[0])


def test_a_submission_that_is_not_of_this_model_settles_nothing(tmp_path: Path) -> None:
    state = load_state_dict(write(tmp_path, Speaker()))
    with serving(state, num_workers=1, **EXACT) as (_, compat):
        client = OldClient(compat.address, "a")
        client.register()
        for bad in ({"stranger": torch.ones(2)}, {**ones(NAMES), "first.bias": torch.ones(9)}):
            with pytest.raises(Answered) as caught:
                client.submit(bad)
            assert caught.value.status == 422
        assert_same(client.submit_fragment(0, ones(THIRDS[0])), {n: state[n] - 0.25 for n in THIRDS[0]})


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
def test_a_server_that_is_killed_resumes_wherever_the_naming_was(tmp_path: Path, durability: str) -> None:
    """Registered; fragment by fragment; then a worker with its manifest; then a round of all. With a journal each start
    has the weights that the clients were told; with checkpoints alone, those of the last."""
    state = load_state_dict(write(tmp_path / "model", Speaker()))
    settings: dict[str, Any] = {"save_dir": str(tmp_path / "run"), "durability": durability, "port": 0, **EXACT}
    told = dict(state)

    @contextlib.contextmanager
    def life() -> Iterator[tuple[DiLoCoServer, OldClient]]:
        server = DiLoCoServer(state, num_workers=1, heartbeat_timeout=0, **settings).start()
        with CompatServer(server, 0) as compat:
            if durability == "round":
                told_now = {name: told[name] for name in NAMES}
                assert_same({name: server.get_global_params()[name] for name in NAMES}, told_now)
            client = OldClient(compat.address, "a")
            client.register()
            yield server, client
        if durability == "checkpoint":
            server.save_state()
        kill(server)

    with life():
        pass
    for fragment, names in enumerate(THIRDS):
        with life() as (server, client):
            told |= client.submit_fragment(fragment, ones(names))
            assert len(server.service.stores) == fragment + 1
    with life() as (server, client):
        described = describe(Speaker(), "average")[1]
        memory_topology(server, "w").join(described, Wishes(sync_every=40))
        assert server.service.coordinator.naming is None
        client.post_json("/deregister", worker_id="a")
    with life() as (server, _):
        manifest, plan = server.service.coordinator.manifest, server.service.coordinator.plan
        assert manifest is not None
        assert [spec.name for spec in manifest.parameters] == [spec.name for spec in described.parameters]
        assert (manifest.aliases, manifest.buffers) == (described.aliases, described.buffers)
        assert plan is not None
        assert plan.sync_every == 40
        assert [list(names) for names in plan.fragments] == [*THIRDS, ["level.running_mean", "level.running_var"]]


def test_a_tied_tensor_may_lie_in_the_file_under_its_other_name(tmp_path: Path) -> None:
    """`safetensors` keeps the name that comes first in the alphabet, and notes the other."""
    tmp_path.joinpath("model").mkdir()
    save_safetensors(Speaker(), str(tmp_path / "model" / "model.safetensors"))
    assert "table.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    state = load_state_dict(tmp_path / "model")
    with serving(state, num_workers=1, **EXACT) as (server, compat):
        client = OldClient(compat.address, "a")
        start = client.register()
        got = client.submit(ones(NAMES))
        assert_same({name: got[name] for name in NAMES}, {name: start[name] - 0.25 for name in NAMES})
        assert torch.equal(got["head.weight"], got["table.weight"])
        memory_topology(server, "w").join(describe(Speaker(), "local")[1], Wishes())
        assert server.service.coordinator.naming is None


def test_an_old_client_whose_server_dies_registers_again_and_goes_on(tmp_path: Path) -> None:
    state = load_state_dict(write(tmp_path / "model", Speaker()))
    port, settings = free_port(), {"save_dir": str(tmp_path / "run"), "port": 0, **EXACT}
    first = DiLoCoServer(state, num_workers=1, **settings).start()
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CompatServer(first, port):
        worker = OldWorker(model, optimizer, OldClient(f"127.0.0.1:{port}", "old"), sync_every=2)
    kill(first)
    second = DiLoCoServer(state, num_workers=1, **settings).start()
    with CompatServer(second, port):
        for _ in range(4):
            step(model, optimizer)
            worker.stepped()
        assert worker.syncs == 2
        params = {name: second.get_global_params()[name] for name in NAMES}
        assert_same(params, {name: p.detach() for name, p in model.named_parameters()})
        worker.stop()
    second.stop()


def test_the_command_line_in_a_process_of_its_own(tmp_path: Path) -> None:
    """`outerstep server -m`, an old client that joins first, and a worker after it, which has the run's H to say."""
    write(tmp_path / "model", Speaker())
    before, port, compat_port = global_loss(load_state_dict(tmp_path / "model")), free_port(), free_port()
    words = ["server", "-m", str(tmp_path / "model"), "-n", "2", "--insecure", "--outer-lr", "0.7", "--save-every", "1"]
    words += ["--port", str(port), "--compat-port", str(compat_port), "--save-dir", str(tmp_path / "run")]
    turns = Turns()
    with (tmp_path / "server.log").open("ab") as log:
        server = start(["-m", "outerstep", *words], log=log, cwd=tmp_path, env=dict(os.environ))
    try:
        wait_until(lambda: server.poll() is not None or "older protocol" in (tmp_path / "server.log").read_text())
        in_threads(
            lambda: old_worker(f"127.0.0.1:{compat_port}", turns, 8, first=True),
            lambda: new_worker(f"http://127.0.0.1:{port}", turns, first=False, sync_every=4),
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, (tmp_path / "server.log").read_text()
    finally:
        if server.poll() is None:
            server.kill()
    assert global_loss(load_state_dict(tmp_path / "run" / "latest")) < 0.7 * before
