"""A run that is saved, stopped and resumed goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amounts import mostly_slow
from outerstep import load_model
from outerstep.coordination.server.uploads import Upload
from outerstep.errors import BadRequest, Busy, ConfigError, Kicked, ServerFailed
from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Contribution, anchors_of
from outerstep.types import Control, ControlAnswer, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import (
    HandClient,
    Ledger,
    Relocatable,
    assert_same,
    count,
    in_threads,
    make_frame,
    memory_topology,
    memory_worker,
    params_of,
    tiny_model,
    train_steps,
    wait_until,
)

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "bf16": {"codec": "bf16"},
    "int8 down": {"down_codec": "int8"},
    "int4 both ways, at random": {"codec": "int4+stochastic"},
    "deterministic": {"deterministic": True, "down_codec": "int4"},
    "two fragments with a delay": {"num_fragments": 2, "fragment_delay": 1},
    "asynchronous": {"async_mode": True, "dn_buffer_size": 3},
    "asynchronous, int4 down": {"async_mode": True, "dn_buffer_size": 3, "down_codec": "int4"},
    "a torch optimizer": {"outer_optimizer_factory": lambda params: torch.optim.Adam(params, lr=0.01)},
}
QUICK = ["synchronous", "int4 both ways, at random", "asynchronous, int4 down", "a torch optimizer"]


def make_server(folder: Path | None, **settings: Any) -> DiLoCoServer:
    facts = {"sync_every": 4, "codec": "fp32", "port": 0, **settings}
    state = None if "resume" in facts else tiny_model().state_dict()
    if folder is not None:
        facts["save_dir"] = str(folder)
    server = DiLoCoServer(state, 1, **facts)
    server.service.coordinator.run_id = "run"  # rounding at random depends on it
    server.service.start()
    return server


def train_on(transport: Relocatable, server: DiLoCoServer) -> tuple[DiLoCoWorker, Any, Any]:
    model = tiny_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    topology = memory_topology(server, "w", transport)
    worker = DiLoCoWorker(model, optimizer, "memory:1", worker_id="w", topology=topology)
    return worker, model, optimizer


@pytest.mark.parametrize("mode", mostly_slow(MODES, QUICK))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(mode: str, tmp_path: Path) -> None:
    def run(*, interrupt: bool) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(interrupt)
        server = make_server(folder, **MODES[mode])
        transport = Relocatable(server.service)
        worker, model, optimizer = train_on(transport, server)
        worker.start()
        for step in range(24):
            train_steps(model, optimizer, 1, seed=step)
            if interrupt and step in (7, 13):
                server.service.stop()  # saves
                server = make_server(folder, resume=str(folder), **MODES[mode])
                transport.move(server)
        worker.stop()
        return server.get_global_params()

    assert_same(run(interrupt=True), run(interrupt=False))


def test_what_the_open_round_had_accepted_is_sent_again_and_counted_once(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"codec": "fp32", "port": 0, "outer_lr": 1.0, "outer_momentum": 0.0}
    first = DiLoCoServer(Ledger().state_dict(), 2, save_dir=str(tmp_path), **facts)
    first.service.start()
    transports = [Relocatable(first.service) for _ in range(2)]
    a, b = (memory_topology(first, name, transport) for name, transport in zip("ab", transports, strict=True))
    for topology in (a, b):
        topology.join(None, Wishes(sync_every=2))
    ticket = a.begin(Contribution(0, 0, 0, 2, 0, 0, {"cells": torch.tensor([-2.0, 0.0])}))
    wait_until(lambda: first.status()["pending_submissions"] == ["a"])
    first.service.stop()
    second = DiLoCoServer(None, 2, resume=str(tmp_path), **facts)
    second.service.start()
    for transport in transports:
        transport.move(second)
    agreed, _ = in_threads(
        ticket.finish,
        b.begin(Contribution(0, 0, 0, 2, 0, 0, {"cells": torch.tensor([0.0, -2.0])})).finish,
    )
    assert agreed.counted
    assert second.get_global_params()["cells"].tolist() == [1.0, 1.0]


def test_who_was_here_is_expected_back_and_nobody_closes_a_round_without_it(tmp_path: Path) -> None:
    first = DiLoCoServer(Ledger().state_dict(), 2, save_dir=str(tmp_path), codec="fp32", port=0)
    first.service.start()
    clients = [HandClient(MemoryTransport(first.service), name) for name in "ab"]
    for client in clients:
        client.join()
    first.save_state()
    second = DiLoCoServer(None, 2, resume=str(tmp_path), port=0)
    second.service.start()
    assert second.run_id == first.run_id
    returned = clients[0]
    returned.transport = MemoryTransport(second.service)
    returned.contribute(make_frame({"cells": torch.ones(2)}))
    fragments: Any = second.status()["fragments"]
    assert fragments[0]["expected"] == ["a", "b"]
    assert second.sync_round == 0


def test_saving_every_few_rounds_on_demand_and_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    server = make_server(tmp_path / "saves", save_every=2, keep_saves=9, event_log=str(log))
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory_worker(server, "w", model, optimizer):
        train_steps(model, optimizer, 20, seed=0)
        answer = MemoryTransport(server.service).call(Control(kind="save"))
        assert isinstance(answer, ControlAnswer)
        assert "state-round-00000005" in answer.done
    server.service.stop()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    saves = [(event["round"], event["reason"]) for event in events if event["event"] == "save"]
    # Nothing has changed between the operator's save and the end: one is enough.
    assert saves == [
        (0, "the run begins here"),
        *((n, "periodic") for n in (1, 2, 4)),  # the first round after a start, and every second
        (5, "an operator asked for it"),
    ]
    assert {"start", "join", "round", "control", "save", "leave", "stop"} <= {event["event"] for event in events}
    again = tiny_model(3)
    load_model(again, tmp_path / "saves" / "latest")
    assert_same(params_of(again), server.get_global_params())


def test_a_save_that_fails_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "saves"
    server = make_server(blocked, save_every=1, durability="checkpoint")
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory_worker(server, "w", model, optimizer):
        blocked.rename(tmp_path / "moved")
        blocked.write_text("a file where the folder should be")
        train_steps(model, optimizer, 8, seed=0)
        assert server.sync_round == 2
        assert str(server.status()["last_save"]).startswith("failed: ")
        with pytest.raises(Exception, match="saving failed"):
            MemoryTransport(server.service).call(Control(kind="save"))


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"save_dir .*file/saves' cannot be written"):
        make_server(tmp_path / "file" / "saves")


@pytest.mark.row("B19")
def test_another_model_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    HandClient(MemoryTransport(server.service)).join()
    server.save_state()
    with pytest.raises(ConfigError, match="the saved state is of another model than the one given"):
        DiLoCoServer(Ledger().state_dict(), 1, port=0, resume=str(tmp_path))
    DiLoCoServer(tiny_model().state_dict(), 1, port=0, resume=str(tmp_path))


def test_a_budget_that_was_set_while_running_is_kept(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    client.transport.call(Control(kind="budget", tokens=5000))
    server.save_state()
    status: Any = make_server(None, resume=str(tmp_path)).status()
    assert status["tokens"]["budget"] == 5000


def test_without_a_place_or_a_worker_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--save-dir"):
        make_server(None).save_state()
    with pytest.raises(BadRequest, match="nobody has joined"):
        make_server(tmp_path).save_state()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"down_codec": "bf16"}, "down_codec=fp32, which cannot change; the settings say bf16"),
        ({"num_fragments": 2}, "num_fragments=1, which cannot change"),
        ({"async_mode": True}, "saved with the outer optimizer 'nesterov', now it is 'delayed_nesterov'"),
    ],
)
def test_a_state_that_does_not_fit_the_settings_is_refused(
    settings: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    server = make_server(tmp_path)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory_worker(server, "w", model, optimizer):
        train_steps(model, optimizer, 4, seed=0)
        server.save_state()
    with pytest.raises(ConfigError, match=complaint):
        make_server(None, resume=str(tmp_path), **{"sync_every": None, "codec": None, **settings})


def test_another_sync_every_at_resume_is_a_change_of_plan(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    HandClient(MemoryTransport(server.service)).join()
    server.save_state()
    resumed = make_server(None, resume=str(tmp_path), sync_every=9)
    plan: Any = resumed.status()["plan"]
    assert (plan["sync_every"], plan["revision"]) == (9, 1), "people are told how often it was changed"
    assert resumed.service.coordinator.plan is not None
    assert resumed.service.coordinator.plan.revision > 1_000_000  # beyond any that was given since the state was saved


def test_a_state_of_the_old_layout_goes_on_with_its_momentum(tmp_path: Path) -> None:
    model = tiny_model(5)
    names = [name for name, _ in model.named_parameters()]
    reference = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True, foreach=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    reference.step()
    old = tmp_path / "diloco_server_state_latest.pt"
    facts = {"sync_round": 7, "num_workers": 1, "param_names": names, "async_mode": False, "total_submissions": 9}
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save({"global_params": state, "outer_optimizer": reference.state_dict(), **facts}, old)
    server = make_server(None, resume=str(old), outer_lr=0.5)
    topology = memory_topology(server, "w")
    ((_, anchor),) = anchors_of(topology, topology.join(None, Wishes()))
    assert anchor.version == 7
    deltas = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}
    topology.begin(Contribution(0, 7, 7, 1, 0, 0, deltas)).finish()
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)
    reference.step()
    assert_same(server.get_global_params(), params_of(model))
    assert server.status()["total_submissions"] == 10


def test_a_worker_that_is_ahead_of_a_resumed_server_goes_on_from_what_the_server_has(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"codec": "fp32", "port": 0, "sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    first = DiLoCoServer(Ledger().state_dict(), 1, save_dir=str(tmp_path), **facts)
    first.service.start()
    transport = Relocatable(first.service)
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    topology = memory_topology(first, "w", transport)
    with DiLoCoWorker(model, optimizer, "memory:1", worker_id="w", topology=topology) as worker:
        count(model, optimizer, 0, 4)
        saved = first.save_state()
        count(model, optimizer, 0, 5)  # rounds 3 and 4, and a step on top
        second = DiLoCoServer(None, 1, resume=str(saved), **facts)
        second.service.start()
        assert (first.sync_round, second.sync_round) == (4, 2)
        transport.move(second)
        count(model, optimizer, 1, 1)
        assert second.sync_round == 3
        # Rounds 3 and 4 went down with the first server; the two steps since then are in.
        assert second.get_global_params()["cells"].tolist() == [5.0, 1.0]
        assert_same(params_of(model), second.get_global_params())
        assert worker.sync_metrics["steps_discarded"] == 0


def test_what_is_sent_again_is_not_counted_twice(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"codec": "fp32", "port": 0}
    first = DiLoCoServer(Ledger().state_dict(), 2, save_dir=str(tmp_path), **facts)
    first.service.start()
    clients = [HandClient(MemoryTransport(first.service), name) for name in "ab"]
    for client in clients:
        client.join()
    clients[0].contribute(make_frame({"cells": torch.ones(2)}), tokens=1000)  # its round stays open
    first.save_state()
    second = DiLoCoServer(None, 2, resume=str(tmp_path), **facts)
    second.service.start()
    for client in clients:
        client.transport = MemoryTransport(second.service)
        client.sequence = 0
        client.contribute(make_frame({"cells": torch.ones(2)}), tokens=1000)
    wait_until(lambda: second.sync_round == 1)
    status: Any = second.status()
    assert (status["total_submissions"], status["tokens"]["total"]) == (2, 2000)


def test_a_worker_that_stayed_learns_the_settings_that_changed_at_resume(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"codec": "fp32", "port": 0}
    first = DiLoCoServer(Ledger().state_dict(), 1, save_dir=str(tmp_path), sync_every=2, **facts)
    first.service.start()
    transport = Relocatable(first.service)
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCoWorker(
        model, optimizer, "memory:1", worker_id="w", topology=memory_topology(first, "w", transport)
    ) as worker:
        count(model, optimizer, 0, 2)
        saved = first.save_state()
        transport.call(Control(kind="plan", changes=Wishes(sync_every=5)))  # after the save: it goes down with it
        count(model, optimizer, 0, 2)
        assert worker.sync_every == 5
        settings = {"sync_every": 3, "quorum": 1, "max_staleness": 9}
        second = DiLoCoServer(None, 1, resume=str(saved), **settings, **facts)
        second.service.start()
        transport.move(second)
        count(model, optimizer, 0, 5)
        assert (worker.sync_every, worker.plan.mode, worker.plan.max_staleness) == (3, "quorum", 9)


def test_an_order_given_after_a_resume_is_obeyed_though_its_number_was_used_before(tmp_path: Path) -> None:
    first = make_server(tmp_path)
    transport = Relocatable(first.service)
    worker, model, optimizer = train_on(transport, first)
    worker.start()
    saved = first.save_state()
    transport.call(Control(kind="sync", worker_id="w"))
    topology: Any = worker._topology
    topology.heartbeat(0, 1.0, None)
    train_steps(model, optimizer, 1, seed=0)  # obeys
    second = make_server(None, resume=str(saved))
    transport.move(second)
    transport.call(Control(kind="drain", worker_id="w"))
    topology.heartbeat(1, 1.0, None)
    train_steps(model, optimizer, 1, seed=1)
    assert worker.should_stop


def test_a_kicked_process_stays_out_after_a_resume(tmp_path: Path) -> None:
    first = make_server(tmp_path)
    client = HandClient(MemoryTransport(first.service))
    client.join()
    client.transport.call(Control(kind="kick", worker_id="by-hand"))
    first.save_state()
    client.transport = MemoryTransport(make_server(None, resume=str(tmp_path)).service)
    with pytest.raises(Kicked):
        client.join()


def test_a_save_is_answered_even_if_the_server_fails_before_it_comes_to_it(tmp_path: Path) -> None:
    huge = {"outer_optimizer_factory": lambda params: torch.optim.SGD(params, lr=1e30)}
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, codec="fp32", save_dir=str(tmp_path), **huge)
    server.service.start()
    client = HandClient(MemoryTransport(server.service))
    client.join()
    client.contribute(make_frame({"cells": torch.full((2,), 1e10)}))  # its outer step overflows
    with pytest.raises(ServerFailed):
        in_threads(server.save_state, timeout_s=20.0)


def test_what_arrives_while_the_server_stops_is_not_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that was decided then would be in the ledger, and not in the model: its steps would be lost."""
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, codec="fp32", save_dir=str(tmp_path))
    server.service.start()
    client = HandClient(MemoryTransport(server.service), "w")
    client.join()
    frame = make_frame({"cells": torch.ones(2)})
    client.sequence = 1
    client.offer(len(frame))
    client.put(frame, 0)
    intake = server.service.intake
    conclude = intake.conclude

    def stopping(upload: Upload) -> Callable[[], float]:
        """It stops after the contribution was looked at, and before it is accepted."""
        check = conclude(upload)

        def last() -> float:
            norm = check()
            server.service.stop()
            return norm

        return last

    monkeypatch.setattr(intake, "conclude", stopping)
    with pytest.raises(Busy, match="the server is stopping"):
        client.commit(frame)
    second = DiLoCoServer(None, 1, resume=str(tmp_path), port=0)
    assert second.service.coordinator.fragments[0].published.version == second.sync_round == 0
    assert second.service.coordinator.members.find("w").last_sequence(0) == 0  # type: ignore[union-attr]
