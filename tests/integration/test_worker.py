"""A worker's life against a real server: exits, exceptions, waiting, joining late, losing messages."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from torch import nn

from outerstep.errors import (
    ConfigError,
    ExchangeFailed,
    Fenced,
    ServerUnreachable,
    TransportError,
    WorkerError,
)
from outerstep.server import DiLoCoServer
from outerstep.topology.server.client import DiLoCoClient
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Answer, Offer, Request
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import (
    EAGER,
    HandClient,
    Ledger,
    assert_same,
    count,
    in_threads,
    memory_topology,
    memory_worker,
    params_of,
    tiny_model,
    train_steps,
    wait_until,
)

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


@pytest.fixture
def server() -> DiLoCoServer:
    """One worker, H = 5, an outer step that adopts the mean; no sockets."""
    made = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=5, **PLAIN)
    made.service.start()
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# --- the end of training --------------------------------------------------------------------------------------------


def test_a_clean_exit_contributes_the_remaining_steps(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer) as worker:
        train_steps(model, optimizer, 8, seed=1)
        local = params_of(model)
    assert worker.sync_metrics["sync_count"] == 2
    assert server.sync_round == 2
    assert_same(params_of(model), server.get_global_params())
    for name, value in params_of(model).items():
        torch.testing.assert_close(value, local[name])  # the three steps after the first round are in
    assert server.status()["workers"] == {}


def test_an_exception_contributes_nothing_and_leaves(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)

    def fail() -> None:
        with memory_worker(server, "w", model, optimizer):
            train_steps(model, optimizer, 3, seed=1)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    assert server.sync_round == 0
    assert_same(server.get_global_params(), params_of(tiny_model()))
    assert server.status()["workers"] == {}
    train_steps(model, optimizer, 10, seed=1)  # the hook is gone: this exchanges nothing
    assert server.sync_round == 0


def test_on_exit_local_keeps_the_local_weights_but_contributes(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer, on_exit="local"):
        train_steps(model, optimizer, 3, seed=1)
        local = params_of(model)
    assert_same(params_of(model), local)
    assert server.sync_round == 1


def test_leaving_at_a_round_boundary_contributes_nothing_more(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer):
        train_steps(model, optimizer, 10, seed=1)
    assert server.sync_round == 2


def test_stopping_twice_is_stopping_once(server: DiLoCoServer) -> None:
    model = tiny_model()
    worker = memory_worker(server, "w", model, sgd(model)).start()
    worker.stop()
    worker.stop()
    with pytest.raises(WorkerError, match="started before"):
        worker.start()


def test_the_last_of_too_few_workers_leaves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """min_workers=2, and the other one is gone: the round can never close, so a clean exit does not wait for ever."""
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, min_workers=2, port=0, sync_every=50, **PLAIN)
    server.service.start()
    other = memory_worker(server, "other", model := tiny_model(), sgd(model)).start()
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer, exit_patience_s=0.3) as worker:
        train_steps(model, optimizer, 3, seed=1)
        other.abandon("gone")
    assert server.sync_round == 0
    assert worker.sync_metrics["steps_discarded"] == 3
    assert "cannot close" in caplog.text
    assert_same(params_of(model), params_of(tiny_model()))  # what was agreed last


@pytest.mark.slow
def test_a_worker_that_waits_for_a_dead_partner_says_who_that_is_and_until_when(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerstep.worker.sync.SAY_SO_S", 0.1)
    monkeypatch.setattr("outerstep.worker.sync.SAY_AGAIN_S", 1.4)
    caplog.set_level("INFO")
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, sync_every=2, heartbeat_timeout_s=2.4, **PLAIN
    )
    server.service.start()
    server.service.monitor.start()
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer):
        HandClient(MemoryTransport(server.service), "dead").join()  # and nothing was heard of it ever after
        train_steps(model, optimizer, 2, seed=1)
    said = [record.getMessage() for record in caplog.records if record.name == "outerstep.worker.sync"]
    assert "waiting for contributions of dead" in said
    again = (
        r"still waiting \(\d s\) for contributions of dead; dead has been silent for \d s; in \d s it counts as dead"
    )
    assert any(re.match(again, line) for line in said), said
    server.service.monitor.stop()
    server.service.stop()


# --- while it runs --------------------------------------------------------------------------------------------------


def test_force_sync_exchanges_now_and_begins_a_new_cycle(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer) as worker:
        train_steps(model, optimizer, 3, seed=1)
        worker.force_sync()
        assert server.sync_round == 1
        worker.force_sync()  # nothing new to say
        assert server.sync_round == 1
        train_steps(model, optimizer, 4, seed=2)
        assert server.sync_round == 1
        train_steps(model, optimizer, 1, seed=3)
        assert server.sync_round == 2


def test_global_weights_shows_the_anchor_and_gives_the_local_weights_back(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer) as worker:
        train_steps(model, optimizer, 7, seed=1)
        local = params_of(model)
        with worker.global_weights():
            assert_same(params_of(model), server.get_global_params())
        assert_same(params_of(model), local)
        with pytest.raises(ZeroDivisionError), worker.global_weights():
            1 / 0  # noqa: B018
        assert_same(params_of(model), local)


def test_three_fragments_are_sent_at_their_steps() -> None:
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=1, port=0, sync_every=7, num_fragments=3, fragment_delay=0, **PLAIN
    )
    server.service.start()
    model = tiny_model()
    optimizer = sgd(model)
    seen = []
    with memory_worker(server, "w", model, optimizer) as worker:
        for step in range(14):
            train_steps(model, optimizer, 1, seed=step)
            seen.append(list(worker.sync_metrics["versions"]))  # type: ignore[arg-type]
    changes = [i + 1 for i in range(1, 14) if seen[i] != seen[i - 1]]
    assert changes == [2, 4, 7, 9, 11, 14]
    assert seen[-1] == [2, 2, 2]
    assert_same(params_of(model), server.get_global_params())


def test_tied_frozen_and_buffers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight
            self.scalar = nn.Parameter(torch.tensor(2.0))

    torch.manual_seed(0)
    model = Odd()
    server = DiLoCoServer(model.state_dict(), num_workers=1, port=0, sync_every=1, **PLAIN)
    server.service.start()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with memory_worker(server, "w", model, optimizer):
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
    manifest = server.service.coordinator.manifest
    assert manifest is not None
    assert [p.name for p in manifest.parameters] == [
        *("scalar", "table.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var"),  # averaged
    ]
    assert [p.name for p in manifest.parameters if p.role == "average"] == ["norm.running_mean", "norm.running_var"]
    assert manifest.buffers == ("norm.num_batches_tracked",)
    assert manifest.aliases == {"out.weight": "table.weight"}
    assert manifest.frozen == ("frozen",)
    after = server.get_global_params()
    assert torch.equal(after["out.weight"], after["table.weight"])
    assert torch.equal(after["scalar"], torch.tensor(1.0))
    assert torch.equal(after["frozen"], torch.ones(3))
    assert "norm.running_mean" in after


# --- other workers --------------------------------------------------------------------------------------------------


def test_the_first_round_waits_for_the_configured_workers() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, sync_every=3, **PLAIN)
    server.service.start()
    model = tiny_model()
    optimizer = sgd(model)
    first = memory_worker(server, "first", model, optimizer).start()
    thread = threading.Thread(target=train_steps, args=(model, optimizer, 3, 1), daemon=True)
    thread.start()
    wait_until(lambda: server.status()["pending_submissions"] == ["first"])
    assert "2 workers to join" in str(server.status()["fragments"])
    assert server.sync_round == 0
    assert thread.is_alive()

    other = tiny_model()
    other_optimizer = sgd(other)
    with memory_worker(server, "second", other, other_optimizer):
        train_steps(other, other_optimizer, 3, seed=2)
        thread.join(30)
        assert server.sync_round == 1
        assert_same(params_of(model), params_of(other))
    first.stop()


def test_at_the_start_deadline_the_run_begins_with_min_workers() -> None:
    settings = {"start_deadline_s": 0.2, "sync_every": 3, **PLAIN}
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **settings) as server:
        model = tiny_model()
        optimizer = sgd(model)
        with DiLoCoWorker(model, optimizer, server.address):
            train_steps(model, optimizer, 3, seed=1)
        assert server.sync_round == 1


@pytest.mark.row("F18")
def test_a_worker_that_joins_in_the_middle_of_a_round_counts_from_the_next() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=5, **PLAIN)
    server.service.start()
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "old", model, optimizer):
        train_steps(model, optimizer, 7, seed=1)
        late = tiny_model()
        late_optimizer = sgd(late)
        joiner = memory_worker(server, "late", late, late_optimizer).start()
        assert_same(params_of(late), server.get_global_params())  # it begins with the newest anchor
        train_steps(late, late_optimizer, 2, seed=2)
        train_steps(model, optimizer, 3, seed=3)  # the open round closes without waiting for the joiner
        assert server.sync_round == 2
        in_threads(
            lambda: train_steps(late, late_optimizer, 3, seed=4),  # its fifth step: rebases, sends again, is counted
            lambda: train_steps(model, optimizer, 5, seed=5),
        )
        assert server.sync_round == 3
        participants = server.service.coordinator.fragments[0].published.participants
        assert {p.worker_id for p in participants} == {"old", "late"}
        assert joiner.sync_metrics["missed_rounds"] == 1
        assert joiner.sync_metrics["steps_discarded"] == 0
        joiner.abandon("test over")


@pytest.mark.row("F06")
def test_a_missed_round_keeps_the_steps_and_undoes_nobodys_work() -> None:
    """An exact ledger on whole numbers: what each worker did is in the model once, whichever round it travelled in."""
    server = DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, sync_every=4, **PLAIN)
    server.service.start()
    models = [Ledger(), Ledger()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    a = memory_worker(server, "a", models[0], optimizers[0]).start()
    count(models[0], optimizers[0], 0, 1)
    b = memory_worker(server, "b", models[1], optimizers[1]).start()
    count(models[1], optimizers[1], 1, 3)
    count(models[0], optimizers[0], 0, 3)  # a closes round 1 alone: [4, 0]
    assert server.get_global_params()["cells"].tolist() == [4.0, 0.0]
    in_threads(
        lambda: count(models[1], optimizers[1], 1, 1),  # b's fourth: stale, rebased on [4, 0], sent again
        lambda: count(models[0], optimizers[0], 0, 4),
    )
    # Round 2 is the mean of a's (4, 0) and b's (0, 4), on top of [4, 0]: each step once, nothing of a's undone.
    assert server.get_global_params()["cells"].tolist() == [6.0, 2.0]
    a.abandon("test over")
    b.abandon("test over")


@pytest.mark.slow
def test_a_full_pool_lets_everybody_in_one_after_the_other() -> None:
    settings = {"sync_every": 2, "pool_bytes": 1, "spool_bytes": 0, "part_size_bytes": 64, **PLAIN}
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=4, port=0, **settings)
    server.service.start()

    def work(i: int) -> None:
        model = tiny_model()
        optimizer = sgd(model)
        with memory_worker(server, f"w{i}", model, optimizer):
            train_steps(model, optimizer, 6, seed=i)

    in_threads(*(lambda i=i: work(i) for i in range(4)))
    assert server.sync_round == 3
    assert server.status()["pool_held_bytes"] == 0


# --- lost messages --------------------------------------------------------------------------------------------------


class Lossy(MemoryTransport):
    """Loses the answer to every second request: each is carried out, and asked again."""

    def __init__(self, service) -> None:  # type: ignore[no-untyped-def]
        super().__init__(service)
        self.count = self.lost = 0
        self.offers: list[Offer] = []

    def call(self, request: Request, **buffers: memoryview | None) -> Answer:
        if isinstance(request, Offer):
            self.offers.append(request)
        answer = super().call(request, **buffers)
        self.count += 1
        if self.count % 2:
            self.lost += 1
            raise TransportError("lost on purpose")
        return answer


@pytest.mark.row("F04")
def test_lost_answers_are_asked_again_and_applied_once(server: DiLoCoServer) -> None:
    transport = Lossy(server.service)
    model = tiny_model()
    optimizer = sgd(model)
    topology = memory_topology(server, "w", transport)
    with DiLoCoWorker(model, optimizer, "memory:1", topology=topology, worker_id="w") as worker:
        train_steps(model, optimizer, 30, seed=1)
    assert transport.lost > 10
    assert worker.sync_metrics["sync_retries"] > 5
    assert server.sync_round == 6
    assert server.status()["total_submissions"] == 6
    assert {offer.sequence for offer in transport.offers} == {1, 2, 3, 4, 5, 6}
    assert_same(params_of(model), server.get_global_params())


def test_an_evicted_worker_joins_again_by_itself(server: DiLoCoServer) -> None:
    model = tiny_model()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer) as worker:
        train_steps(model, optimizer, 3, seed=1)
        server.service.tick(server.service.clock() + 1e6)  # nobody has been heard from for days
        assert server.status()["workers"] == {}
        train_steps(model, optimizer, 2, seed=2)
        assert server.sync_round == 1
        assert worker.sync_metrics["reconnections"] == 1
        assert server.status()["total_worker_deaths"] == 1


@pytest.mark.row("F07")
def test_a_replacement_fences_the_old_start(server: DiLoCoServer) -> None:
    old = tiny_model()
    old_optimizer = sgd(old)
    worker = memory_worker(server, "w", old, old_optimizer).start()
    train_steps(old, old_optimizer, 4, seed=1)
    new = tiny_model()
    replacement = memory_worker(server, "w", new, sgd(new)).start()
    with pytest.raises(ExchangeFailed, match="started again") as caught:
        train_steps(old, old_optimizer, 1, seed=1)
    assert isinstance(caught.value.__cause__, Fenced)
    assert server.sync_round == 0
    worker.abandon("fenced")
    assert list(server.status()["workers"]) == ["w"]  # type: ignore[call-overload]
    replacement.abandon("test over")


def test_a_server_that_never_answers_ends_in_one_clear_error() -> None:
    model = tiny_model()
    worker = DiLoCoWorker(model, sgd(model), "127.0.0.1:9", join_timeout_s=0.2)
    with pytest.raises(ServerUnreachable, match=r"no answer from the server for .* s .*127\.0\.0\.1:9"):
        worker.start()


@pytest.mark.row("F23")
def test_a_bug_in_a_background_thread_surfaces_in_the_training_thread(server: DiLoCoServer) -> None:
    class Broken(MemoryTransport):
        def call(self, request: Request, **buffers: memoryview | None) -> Answer:
            if isinstance(request, Offer):
                raise ZeroDivisionError("a bug")
            return super().call(request, **buffers)

    model = tiny_model()
    optimizer = sgd(model)
    topology = memory_topology(server, "w", Broken(server.service))
    with pytest.raises(ExchangeFailed, match="ZeroDivisionError: a bug"):  # noqa: SIM117
        with DiLoCoWorker(model, optimizer, "memory:1", topology=topology):
            train_steps(model, optimizer, 5, seed=1)


# --- the documented low-level client --------------------------------------------------------------------------------


def test_the_client_registers_submits_and_leaves_as_documented() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **PLAIN) as server:

        def work(i: int) -> dict[str, torch.Tensor]:
            client = DiLoCoClient(server.address)
            params = client.register(f"worker-{i}", {"hostname": "machine-a"})
            assert_same(params, params_of(tiny_model()))
            pseudograds = {name: torch.full_like(value, float(i + 1)) for name, value in params.items()}
            with pytest.raises(ConfigError, match="unknown \\['extra'\\]"):
                client.submit_pseudogradients(f"worker-{i}", {**pseudograds, "extra": torch.zeros(1)})
            new = client.submit_pseudogradients(f"worker-{i}", pseudograds)
            client.heartbeat(f"worker-{i}", steps_per_second=3.5)
            assert client.get_status()["sync_round"] == 1
            client.deregister(f"worker-{i}")
            return new

        first, second = in_threads(lambda: work(0), lambda: work(1))
        assert_same(first, second)
        assert_same(first, {name: value - 1.5 for name, value in params_of(tiny_model()).items()})


def test_the_client_submits_one_fragment_at_a_time() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, **PLAIN)
    server.service.start()
    client = DiLoCoClient("memory", transport=MemoryTransport(server.service))
    before = client.register("w", num_fragments=2)
    ones = {name: torch.ones_like(value) for name, value in before.items()}
    new = client.submit_fragment_pseudogradients("w", 1, ones)
    assert_same(new, {name: before[name] - 1.0 for name in client.plan("w").fragments[1]})
    assert_same(server.get_global_params(), {**before, **new})  # the other fragment has not moved
    with pytest.raises(ConfigError, match="fragment 2 does not exist: the plan has 2"):
        client.submit_fragment_pseudogradients("w", 2, ones)


@pytest.mark.parametrize("lost", ["drop_requests", "drop_answers"])
def test_the_in_memory_twin_loses_what_it_is_told_to_lose(server: DiLoCoServer, lost: str) -> None:
    transport = MemoryTransport(server.service)
    model = tiny_model()
    optimizer = sgd(model)
    topology = memory_topology(server, "w", transport)
    with DiLoCoWorker(model, optimizer, "memory:1", topology=topology, worker_id="w") as worker:
        train_steps(model, optimizer, 4, seed=1)
        setattr(transport, lost, 3)
        train_steps(model, optimizer, 1, seed=2)
        assert getattr(transport, lost) == 0
        assert worker.sync_metrics["sync_retries"] == 3
    assert server.status()["total_submissions"] == 1


def test_a_heartbeat_finds_out_about_an_eviction(server: DiLoCoServer) -> None:
    topology = ServerTopology(
        MemoryTransport(server.service), worker_id="w", instance="0" * 16, hostname="h", patience=EAGER
    )
    model = tiny_model()
    with DiLoCoWorker(model, sgd(model), "memory:1", topology=topology, worker_id="w"):
        server.service.tick(server.service.clock() + 1e6)
        assert server.status()["workers"] == {}
        topology.heartbeat(3, 2.5, 0.25)
        assert list(server.status()["workers"]) == ["w"]  # type: ignore[call-overload]
        topology.heartbeat(3, 2.5, 0.25)
        facts = server.status()["workers"]["w"]  # type: ignore[index]
        assert (facts["step"], facts["steps_per_second"], facts["loss"]) == (3, 2.5, 0.25)
