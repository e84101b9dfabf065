"""A worker that sends NaN, or far too much: refused by name, told to go on from the agreed weights, put aside at the
third time; and nobody else notices."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.errors import Absurd, Conflict, ExchangeFailed, NotFinite, Quarantined
from outerstep.server import DiLoCoServer
from outerstep.topology.server.client import DiLoCoClient
from outerstep.types import Control
from outerstep.wire.memory import MemoryTransport
from support import (
    HandClient,
    Ledger,
    TwoLedgers,
    count,
    in_threads,
    make_frame,
    memory_worker,
    params_of,
    tiny_model,
    train_steps,
    wait_until,
)

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
NAN = float("nan")


def a_server(model: torch.nn.Module, num_workers: int, **settings: Any) -> DiLoCoServer:
    server = DiLoCoServer(model.state_dict(), num_workers=num_workers, port=0, **{**PLAIN, **settings})
    server.service.start()
    return server


def cells(*values: float) -> memoryview:
    return make_frame({"cells": torch.tensor(values)})


@pytest.fixture
def three() -> Iterator[tuple[DiLoCoServer, list[HandClient]]]:
    """Three workers by hand, and one round with norms of 1 behind them."""
    server = a_server(Ledger(), 3)
    clients = [HandClient(MemoryTransport(server.service), name) for name in "abc"]
    for client in clients:
        client.join()
    contribute_to(server, clients, [cells(1.0, 0.0)] * 3)
    yield server, clients
    server.service.stop()


def contribute_to(server: DiLoCoServer, clients: list[HandClient], payloads: list[memoryview]) -> None:
    version = server.sync_round
    for client, payload in zip(clients, payloads, strict=True):
        client.contribute(payload, base_version=version, oldest_base=version)
    wait_until(lambda: server.sync_round == version + 1)


def worker_facts(server: DiLoCoServer, name: str) -> dict[str, Any]:
    return server.status()["workers"][name]  # type: ignore[index]


# --- the screen, with real bytes ------------------------------------------------------------------------------------


def test_an_outlier_is_left_out_of_the_mean(three: tuple[DiLoCoServer, list[HandClient]]) -> None:
    server, clients = three
    before = server.get_global_params()["cells"]
    contribute_to(server, clients, [cells(1.0, 0.0), cells(0.0, 9.0), cells(1.0, 0.0)])
    moved = before - server.get_global_params()["cells"]
    assert moved.tolist() == [1.0, 0.0]
    assert (worker_facts(server, "b")["left_out"], worker_facts(server, "b")["offences"]) == (1, 0)
    assert worker_facts(server, "b")["delta_norm"] == 9.0
    assert server.status()["pool_held_bytes"] == 0
    agreement = clients[0].poll()
    assert {p.worker_id: p.weight for p in agreement.participants} == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_in_the_first_round_of_all_it_is_left_out_too() -> None:
    server = a_server(Ledger(), 3)
    clients = [HandClient(MemoryTransport(server.service), name) for name in "abc"]
    for client in clients:
        client.join()
    contribute_to(server, clients, [cells(0.0, 1e6), cells(1.0, 0.0), cells(1.0, 0.0)])
    assert server.get_global_params()["cells"].tolist() == [-1.0, 0.0]


def test_when_all_grow_together_all_are_taken(three: tuple[DiLoCoServer, list[HandClient]]) -> None:
    """A warm-up: five times the usual, and nobody is an outlier. The sum is the same as if they had not waited."""
    server, clients = three
    before = server.get_global_params()["cells"]
    contribute_to(server, clients, [cells(5.0, 0.0), cells(0.0, 5.0), cells(3.0, 4.0)])
    assert torch.equal(before - server.get_global_params()["cells"], torch.tensor([8.0, 9.0]) / 3)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"codec": "int8", "sync_every": 2}])
def test_in_every_mode_of_adding(settings: dict[str, Any]) -> None:
    server = a_server(Ledger(64), 3, **settings)
    clients = [HandClient(MemoryTransport(server.service), name) for name in "cab"]
    codec = settings.get("codec", "fp32")
    payloads = [make_frame({"cells": torch.full((64,), value)}, codec) for value in (1.0, 100.0, 1.0)]
    for client in clients:
        client.join()
    for client, payload in zip(clients, payloads, strict=True):
        client.contribute(payload, codec=codec)
    wait_until(lambda: server.sync_round == 1)
    assert server.get_global_params()["cells"].abs().max() == pytest.approx(1.0, rel=1e-3)


def test_what_is_far_too_large_is_refused_by_name_and_forgotten(three: tuple[DiLoCoServer, list[HandClient]]) -> None:
    server, clients = three
    with pytest.raises(Absurd, match=r"1e\+03 times as large as usual: ‖Δ‖ = 1000 in 1 steps.*norm_screen=2"):
        clients[2].contribute(cells(1000.0, 0.0), base_version=1, oldest_base=1)
    assert worker_facts(server, "c")["offences"] == 1
    before = server.get_global_params()["cells"]
    contribute_to(server, clients, [cells(1.0, 0.0)] * 3)
    assert (before - server.get_global_params()["cells"]).tolist() == [1.0, 0.0]


def test_a_norm_is_known_where_its_square_is_too_large_for_fp32() -> None:
    for value in (1e-15, 1e10, 1e17):
        server = a_server(Ledger(2), 1)
        client = HandClient(MemoryTransport(server.service), "a")
        client.join()
        client.contribute(cells(3 * value, 4 * value))
        assert worker_facts(server, "a")["delta_norm"] == pytest.approx(5 * value, rel=1e-5, abs=0.0)


# --- what a worker does about it ------------------------------------------------------------------------------------


@pytest.mark.row("F20")
def test_a_worker_whose_weights_are_nan_goes_on_from_the_agreed_ones(caplog: pytest.LogCaptureFixture) -> None:
    server = a_server(Ledger(), 1, sync_every=2)
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = memory_worker(server, "w", model, optimizer, outside_changes="keep")
    with caplog.at_level(logging.WARNING), worker:
        count(model, optimizer, 0, 3)
        model.cells.data[1] = NAN
        count(model, optimizer, 0, 1)  # refused: it takes what was agreed, and trains on
        assert model.cells.tolist() == server.get_global_params()["cells"].tolist() == [2.0, 0.0]
        count(model, optimizer, 0, 2)
    assert server.get_global_params()["cells"].tolist() == [4.0, 0.0]
    assert "tensor 'cells' holds NaN or Inf" in caplog.text
    assert (worker.sync_metrics["reloads"], worker.sync_metrics["steps_discarded"]) == (1, 2)


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.Adam])
def test_a_nan_does_not_come_back_from_the_optimizers_memory(optimizer_type: type[torch.optim.Adam]) -> None:
    server = a_server(tiny_model(), 1, sync_every=2)
    model = tiny_model()
    optimizer = optimizer_type(model.parameters(), lr=0.01)
    with memory_worker(server, "w", model, optimizer) as worker:
        train_steps(model, optimizer, 2, seed=1)
        next(model.parameters()).grad = torch.full_like(next(model.parameters()), NAN)
        optimizer.step()  # one batch gone wrong: weights and moments
        train_steps(model, optimizer, 7, seed=2)
        assert worker.sync_metrics["reloads"] == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert worker_of(server, "w").conduct.total == 1
    assert server.sync_round >= 4


@pytest.mark.parametrize("settings", [{}, {"fragment_delay": 1}, {"fragment_delay": 1, "fragment_carry": True}])
def test_one_nan_is_one_offence_however_many_fragments_there_are(settings: dict[str, Any]) -> None:
    server = a_server(TwoLedgers(1), 1, sync_every=4, num_fragments=2, **settings)
    model = TwoLedgers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, "w", model, optimizer, outside_changes="keep"):
        count(model, optimizer, 0, 8)
        for param in model.parameters():
            param.data.fill_(NAN)
        count(model, optimizer, 0, 16)
    assert worker_of(server, "w").conduct.total == 1
    steps = [value.item() for value in server.get_global_params().values()]
    assert all(16 <= step <= 24 for step in steps), steps  # what was lost is lost, and nothing was counted twice


def test_a_program_that_sends_by_hand_is_told_as_before() -> None:
    server = a_server(Ledger(), 1)
    client = DiLoCoClient("memory:1", transport=MemoryTransport(server.service))
    client.register("w")
    with pytest.raises(ExchangeFailed, match="'cells' holds NaN or Inf"):
        client.submit_pseudogradients("w", {"cells": torch.tensor([NAN, 0.0])})


def worker_of(server: DiLoCoServer, name: str) -> Any:
    member = server.service.coordinator.members.find(name)
    assert member is not None
    return member


# --- quarantine -----------------------------------------------------------------------------------------------------


@pytest.mark.row("F20")
def test_after_the_third_it_is_put_aside_and_an_operator_brings_it_back(
    three: tuple[DiLoCoServer, list[HandClient]],
) -> None:
    server, clients = three
    for _ in range(3):
        with pytest.raises(NotFinite, match="tensor 'cells' holds NaN or Inf"):
            clients[2].contribute(cells(NAN, 0.0), base_version=1, oldest_base=1)
    with pytest.raises(Quarantined, match=r"'c' is in quarantine for \d+ s more: refused for not_finite, not_finite"):
        clients[2].contribute(cells(1.0, 0.0), base_version=1, oldest_base=1)
    facts = worker_facts(server, "c")
    assert facts["offences"] == 3
    assert "holds NaN" in facts["quarantine"]["reason"]
    contribute_to(server, clients[:2], [cells(1.0, 0.0)] * 2)  # nobody waits for it
    assert clients[2].poll().version == 2  # but it may look
    answer = clients[0].transport.call(Control(kind="pardon", worker_id="c"))
    assert "clean slate" in answer.done  # type: ignore[union-attr]
    assert worker_facts(server, "c")["quarantine"] is None
    contribute_to(server, clients[::-1], [cells(1.0, 0.0)] * 3)  # this round would not wait for it yet
    contribute_to(server, clients, [cells(1.0, 0.0)] * 3)  # this one does


def test_the_same_key_with_other_bytes_counts_too(three: tuple[DiLoCoServer, list[HandClient]]) -> None:
    server, clients = three
    clients[0].contribute(cells(1.0, 0.0), base_version=1, oldest_base=1)
    for _ in range(3):
        with pytest.raises(Conflict):
            clients[0].commit(cells(2.0, 0.0))
    assert worker_facts(server, "a")["quarantine"] is not None


def test_a_worker_in_quarantine_trains_on_in_vain_and_hinders_nobody() -> None:
    server = a_server(Ledger(), 2, sync_every=2)
    good, bad = Ledger(), Ledger()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (good, bad)]

    def spoil() -> None:
        with memory_worker(server, "bad", bad, optimizers[1], outside_changes="keep") as worker:
            for _ in range(5):
                bad.cells.data[1] = NAN
                count(bad, optimizers[1], 1, 2)
            assert worker.sync_metrics["reloads"] == 5
            assert bad.cells.isfinite().all()

    def train() -> None:
        with memory_worker(server, "good", good, optimizers[0]):
            count(good, optimizers[0], 0, 10)

    in_threads(spoil, train)
    assert server.get_global_params()["cells"].tolist() == [10.0, 0.0]
    assert worker_of(server, "bad").conduct.spells == 1


# --- processes ------------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "outerstep", "worker"]
SCRIPT = """
import sys, torch, outerstep
sys.path.insert(0, {tests!r})
from support import tiny_model, train_steps
torch.set_num_threads(1)
model = tiny_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with outerstep.attach(model, optimizer, outside_changes="keep") as worker:
    for round in range(6):
        if sys.argv[1] == "bad" and round < 4:
            next(model.parameters()).data.fill_(float("nan"))
        train_steps(model, optimizer, 5, seed=round)
    print("reloads:", worker.sync_metrics["reloads"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.row("F20")
def test_a_process_that_sends_nan_is_put_aside_and_the_others_finish(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    events = tmp_path / "events.jsonl"
    # The bad one may be through with all it does before the others have joined: they must not wait for three.
    settings = {"sync_every": 5, "event_log": str(events), "start_deadline_s": 1.0}
    with DiLoCoServer(tiny_model().state_dict(), num_workers=3, port=0, **settings) as server:
        workers = {
            name: subprocess.Popen(
                [*COMMAND, "--server", server.address, "--worker-id", name, "--", sys.executable, str(script), name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in ("good-1", "good-2", "bad")
        }
        said = {name: worker.communicate(timeout=240)[0] for name, worker in workers.items()}
        assert {name: worker.returncode for name, worker in workers.items()} == dict.fromkeys(workers, 0), said
        assert server.sync_round >= 6
        assert all(value.isfinite().all() for value in server.get_global_params().values())
        assert {name for name, value in params_of(tiny_model()).items()} == set(server.get_global_params())
    assert "reloads: 0" in said["good-1"]
    assert "reloads: 0" in said["good-2"]
    assert "reloads: 6" in said["bad"]
    assert "holds NaN or Inf" in said["bad"]
    assert "in quarantine" in said["bad"]
    log = events.read_text()
    assert log.count('"event": "offence", "worker": "bad"') == 3
    assert log.count('"event": "quarantine", "worker": "bad"') == 1
