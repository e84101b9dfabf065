"""What goes wrong in the middle: interrupted waits, hung loops, failed allocations, absurd weights, slow readers."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from outerstep.config import server as config_of_server
from outerstep.digest import part_count
from outerstep.errors import (
    BadRequest,
    ConfigError,
    ExchangeFailed,
    NotFinite,
    Refused,
    ServerError,
    ServerFailed,
    ServerUnreachable,
    Superseded,
    TransportError,
)
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Control, Offer, Poll, Request, Wishes
from outerstep.wire.http_transport import HttpTransport, parse_address
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.messages import decode_error
from outerstep.wire.routes import Presented
from outerstep.worker import DiLoCoWorker
from support import (
    HandClient,
    Ledger,
    assert_same,
    count,
    in_threads,
    intercept,
    make_frame,
    memory_topology,
    memory_worker,
    params_of,
    tiny_model,
    train_steps,
    wait_until,
)

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


def ledger_server(num_workers: int, **settings: object) -> DiLoCoServer:
    server = DiLoCoServer(Ledger().state_dict(), num_workers=num_workers, port=0, **{**PLAIN, **settings})
    server.service.start()
    return server


# --- interrupted waits ----------------------------------------------------------------------------------------------


def test_steps_are_counted_once_when_the_wait_for_their_round_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the round is open, as in a notebook; the contribution is in, and training goes on."""
    server = ledger_server(2, sync_every=4)
    first, second = Ledger(), Ledger()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    a = memory_worker(server, "a", first, optimizers[0]).start()
    b = memory_worker(server, "b", second, optimizers[1]).start()
    count(first, optimizers[0], 0, 3)

    def interrupted(self: object, timeout_s: float) -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["a"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("outerstep.topology.server.exchange.ServerTicket.look", interrupted)
        with pytest.raises(KeyboardInterrupt):
            count(first, optimizers[0], 0, 1)
    count(second, optimizers[1], 1, 4)  # closes round 1: the mean of (4, 0) and (0, 4)
    assert server.get_global_params()["cells"].tolist() == [2.0, 2.0]
    count(first, optimizers[0], 0, 2)  # goes on from its own (4, 0), unaware
    assert first.cells.tolist() == [6.0, 0.0]
    in_threads(
        lambda: count(first, optimizers[0], 0, 2),  # due: settles round 1, then sends only the four steps since
        lambda: count(second, optimizers[1], 1, 4),
    )
    assert server.get_global_params()["cells"].tolist() == [4.0, 4.0]
    assert first.cells.tolist() == second.cells.tolist() == [4.0, 4.0]
    assert a.sync_metrics["steps_discarded"] == 0
    a.abandon("over")
    b.abandon("over")


class Switchable(MemoryTransport):
    """Can be cut off; `cut_at_poll`: cuts itself off when the contribution has gone through."""

    def __init__(self, service) -> None:  # type: ignore[no-untyped-def]
        super().__init__(service)
        self.is_cut = False
        self.cut_at_poll = False

    def call(self, request: Request, **buffers: object) -> Answer:
        if self.cut_at_poll and isinstance(request, Poll):
            self.is_cut = True
        if self.is_cut:
            raise TransportError("cut off")
        return super().call(request, **buffers)  # type: ignore[arg-type]


def test_steps_are_counted_once_when_the_server_was_out_of_reach() -> None:
    """The contribution went through, the answer never came, the worker gave up, and later tries again."""
    server = ledger_server(1, sync_every=4)
    transport = Switchable(server.service)
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    topology = memory_topology(server, "w", transport)
    topology._patience = type(topology._patience)(
        first_backoff_s=0.01, longest_backoff_s=0.02, give_up_after_s=0.2, poll_wait_s=0.1
    )
    worker = DiLoCoWorker(model, optimizer, "memory:1", topology=topology, worker_id="w").start()
    transport.cut_at_poll = True
    with pytest.raises(ServerUnreachable):
        count(model, optimizer, 0, 4)
    wait_until(lambda: server.sync_round == 1)
    count(model, optimizer, 0, 3)
    transport.is_cut = transport.cut_at_poll = False
    count(model, optimizer, 0, 1)
    assert server.get_global_params()["cells"].tolist() == [8.0, 0.0]
    assert model.cells.tolist() == [8.0, 0.0]
    worker.stop()
    assert server.status()["total_submissions"] == 2


# --- life and death of a worker -------------------------------------------------------------------------------------


def test_a_heartbeat_after_the_goodbye_does_not_bring_a_worker_back() -> None:
    server = ledger_server(1)
    topology = memory_topology(server, "w")
    model = Ledger()
    with DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=1.0), "memory:1", topology=topology):
        pass
    topology.heartbeat(1, 1.0, None)
    assert server.status()["workers"] == {}


@pytest.mark.row("F25")
def test_a_hung_loop_stops_beating_and_the_others_go_on() -> None:
    with DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, sync_every=2, heartbeat_timeout=0.6) as server:
        hung, model = Ledger(), Ledger()
        DiLoCoWorker(
            hung, torch.optim.SGD(hung.parameters(), lr=1.0), server.address, worker_id="hung", stalled_after_s=0.3
        ).start()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, worker_id="alive"):
            count(model, optimizer, 0, 4)  # returns only because the hung one is declared dead
        assert server.sync_round == 2
        assert server.status()["total_worker_deaths"] == 1


def test_the_loss_may_be_a_tensor() -> None:
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, sync_every=1) as server:
        model = Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, worker_id="w") as worker:
            worker.last_loss = torch.tensor(0.5, requires_grad=True)
            count(model, optimizer, 0, 1)
            wait_until(lambda: server.status()["workers"]["w"]["loss"] == 0.5)  # type: ignore[index]
            worker.last_loss = float("nan")
            assert worker.last_loss is None


def test_leaving_with_an_unprintable_reason_keeps_the_users_exception() -> None:
    server = ledger_server(1)
    model = Ledger()

    def fail() -> None:
        with memory_worker(server, "w", model, torch.optim.SGD(model.parameters(), lr=1.0)):
            raise RuntimeError("half a character: \ud800")

    with pytest.raises(RuntimeError, match="half a character"):
        fail()
    assert server.status()["workers"] == {}


# --- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**60, -1, 0.5, float("nan")])
def test_an_absurd_report_of_work_is_refused(tokens: float) -> None:
    server = ledger_server(1)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    with pytest.raises(BadRequest, match=r"tokens|not finite|NaN"):
        client.contribute(make_frame({"cells": torch.ones(2)}), tokens=tokens)


@pytest.mark.parametrize("mode", [{}, {"async_mode": True}], ids=["sync", "async"])
def test_an_absurd_value_is_refused_before_it_can_overflow_anything(mode: dict[str, bool]) -> None:
    server = ledger_server(1, **mode)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    with pytest.raises(NotFinite, match=r"'cells' holds values of about 3e\+38, which is absurd"):
        client.contribute(make_frame({"cells": torch.tensor([3e38, 0.0])}))
    client.contribute(make_frame({"cells": torch.ones(2)}))
    wait_until(lambda: server.sync_round == 1)
    assert server.get_global_params()["cells"].tolist() == [-1.0, -1.0]


def test_an_outer_step_that_overflows_stops_the_server_and_says_so() -> None:
    huge = {"outer_optimizer_factory": lambda params: torch.optim.SGD(params, lr=1e30)}
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, codec="fp32", **huge) as server:
        client = HandClient(HttpTransport(server.address))
        client.join()
        client.contribute(make_frame({"cells": torch.full((2,), 1e10)}))
        wait_until(lambda: server.status()["failure"])
        assert "not finite" in str(server.status()["failure"])
        with pytest.raises(ServerFailed, match="failed half-way"):
            server.get_global_params()
        probe = HttpTransport(server.address)._new_connection(20.0)
        probe.request("GET", "/healthz")
        answer = probe.getresponse()
        assert (answer.status, answer.read()) == (503, b'{"status":"failing"}')
        model = Ledger()
        worker = DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=1.0), server.address)
        with pytest.raises(Exception, match="the server has stopped"):
            worker.start()


def test_a_failed_allocation_costs_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ledger_server(1)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    payload = make_frame({"cells": torch.ones(2)})
    client.sequence = 1
    client.offer(len(payload))

    def no_memory(*args: object, **flags: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", no_memory)
        with pytest.raises(OSError, match="Cannot allocate"):
            client.put(payload, 0)
    in_threads(lambda: client.put(payload, 0), timeout_s=20.0)
    assert client.commit(payload).version == 1


def test_what_does_not_fit_into_memory_goes_through_a_file(tmp_path: Path) -> None:
    """Room for one in memory: of three contributions on their way at once, two lie on disk. The sum is the same."""
    payload = make_frame({"cells": torch.ones(2)})
    server = ledger_server(3, pool_bytes=len(payload), spool_dir=str(tmp_path))
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(3)]
    for client in clients:
        client.join()
        client.sequence = 1
        client.offer(len(payload))
        client.put(payload, 0)
    assert server.status()["pool_memory_bytes"] == len(payload)
    assert server.status()["pool_spooled_bytes"] == 2 * len(payload)
    assert list(tmp_path.iterdir()) == []  # the files have no names: nothing is left behind, whatever happens
    for client in clients:
        client.commit(payload)
    wait_until(lambda: server.sync_round == 1)
    assert server.get_global_params()["cells"].tolist() == [-1.0, -1.0]
    assert server.status()["pool_memory_bytes"] == server.status()["pool_spooled_bytes"] == 0


def test_by_default_memory_has_room_for_two_contributions_however_many_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the plan's codec: when that changes, so does the room."""
    monkeypatch.setattr(config_of_server, "LEAST_POOL_BYTES", 1)
    values = {"weight": torch.ones(1000, 300)}
    server = DiLoCoServer(values, 5, port=0, **PLAIN, spool_dir=str(tmp_path), part_size_bytes=16 << 20)
    server.service.start()
    payload = make_frame(values)
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(5)]
    for client in clients:
        client.join()
        client.sequence = 1
        client.offer(len(payload))
        client.put(payload, 0)
    status = server.status()
    assert (status["pool_memory_bytes"], status["pool_spooled_bytes"]) == (2 * len(payload), 3 * len(payload))
    for client in clients:
        client.commit(payload)
    wait_until(lambda: server.sync_round == 1)
    assert torch.equal(server.get_global_params()["weight"], torch.zeros(1000, 300))
    full = server.service.run.pool_memory_bytes()
    MemoryTransport(server.service).call(Control(kind="plan", changes=Wishes(codec="int8")))
    for client in clients:
        client.contribute(payload, base_version=1, oldest_base=1)
    wait_until(lambda: server.sync_round == 2)
    assert server.service.run.pool_memory_bytes() < full / 3


def test_a_full_disk_costs_one_try_and_heals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """posix_fallocate is replaced: a disk cannot be filled safely in a unit test."""
    server = ledger_server(1, pool_bytes=1, spool_dir=str(tmp_path))
    client = HandClient(MemoryTransport(server.service))
    client.join()
    payload = make_frame({"cells": torch.ones(2)})
    client.sequence = 1
    client.offer(len(payload))

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            client.put(payload, 0)
    client.put(payload, 0)
    assert client.commit(payload).version == 1


def test_a_slow_reader_finishes_the_version_it_began() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, quorum=1, port=0, **PLAIN, part_size_bytes=64)
    server.service.start()
    quick, slow = (HandClient(MemoryTransport(server.service), name) for name in ("quick", "slow"))
    quick.join()
    slow.join()
    store = server.service.stores[0]
    (start,) = slow.poll().payloads
    whole, read = bytes(quick.fetch(start)), bytes(slow.get(start, 0))
    ones = {name: torch.ones_like(value) for name, value in params_of(tiny_model()).items()}
    for version in range(1, 6):
        quick.contribute(make_frame(ones), base_version=version - 1, oldest_base=version - 1)
        wait_until(lambda version=version: server.sync_round == version)
        assert store.down.held_versions == [0, version]
        read += slow.get(start, version)  # its next part of version 0
    for part in range(6, part_count(start.size_bytes, 64)):
        read += slow.get(start, part)
    assert read == whole
    quick.contribute(make_frame(ones), base_version=5, oldest_base=5)
    wait_until(lambda: server.sync_round == 6)
    assert store.down.held_versions == [6]
    with pytest.raises(Superseded, match="version 0 of fragment 0 is not held"):
        slow.get(start, 0)


def test_the_server_outlives_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0) as server:
        start = threading.Thread.start

        def cannot(self: threading.Thread) -> None:
            if self.name.startswith("outerstep-connection"):
                raise RuntimeError("can't start new thread")
            start(self)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", cannot)
            with pytest.raises(TransportError):
                HttpTransport(server.address, timeout_s=5.0).status()
        assert HttpTransport(server.address).status()["num_workers"] == 1


def test_an_outer_optimizer_that_cannot_step_by_itself_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot step by itself"):
        DiLoCoServer(Ledger().state_dict(), 1, port=0, outer_optimizer_factory=lambda params: torch.optim.LBFGS(params))


def test_stopping_does_not_wait_for_long_polls() -> None:
    """A worker waits for a round that will not close; the server answers it and stops."""
    server = DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0).start()
    client = HandClient(HttpTransport(server.address))
    client.join()
    answers: list[Answer] = []
    poll = Poll(**client.session.head, fragment=0, after=0, wait_s=19.0)
    thread = threading.Thread(target=lambda: answers.append(client.transport.call(poll)), daemon=True)
    take, asked = server.service.poll, threading.Event()

    def noting(request: Poll, shown: Presented) -> object:
        asked.set()
        return take(request, shown)

    intercept(server.service, take, noting)
    thread.start()
    assert asked.wait(20)  # not sooner: the connection may still look busy with the join
    server.stop()
    thread.join(10)
    assert len(answers) == 1


# --- words ----------------------------------------------------------------------------------------------------------


def test_a_proxys_error_page_is_worth_another_try_and_a_foreign_servers_is_not() -> None:
    assert isinstance(decode_error(b"<html>bad gateway</html>", 502), ServerError)
    assert type(decode_error(b"<html>not found</html>", 404)) is Refused


@pytest.mark.parametrize("address", ["https://server:8512", "a..b:1", "", ":1", "host:0", "host:99999", "::1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="server address"):
        parse_address(address)


def test_workers_at_different_fragments_do_not_wait_in_a_circle() -> None:
    """One worker is a slot ahead of the other (it trained before the other joined): both go on."""
    settings = {**PLAIN, "sync_every": 6, "num_fragments": 3}
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, min_workers=2, port=0, **settings)
    server.service.start()

    def work(name: str, head_start: int) -> list[int]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with memory_worker(server, name, model, optimizer) as worker:
            worker._started.machine.state.cycle.step = head_start  # out of step with the rest of the run
            train_steps(model, optimizer, 12, seed=head_start)
        return list(worker.sync_metrics["versions"])  # type: ignore[arg-type]

    first, second = in_threads(lambda: work("a", 0), lambda: work("b", 2))
    assert min(first) >= 2
    assert min(second) >= 2


@pytest.mark.row("F23")
def test_a_failed_exchange_names_its_cause_and_leaves_the_weights_alone() -> None:
    server = ledger_server(1, sync_every=1)

    class Refusing(MemoryTransport):
        def call(self, request: Request, **buffers: object) -> Answer:
            if isinstance(request, Offer):
                raise BadRequest("no such thing")
            return super().call(request, **buffers)  # type: ignore[arg-type]

    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    topology = memory_topology(server, "w", Refusing(server.service))
    worker = DiLoCoWorker(model, optimizer, "memory:1", topology=topology).start()
    with pytest.raises(ExchangeFailed) as caught:
        count(model, optimizer, 0, 1)
    assert isinstance(caught.value.__cause__, BadRequest)
    assert_same(params_of(model), {"cells": torch.tensor([1.0, 0.0])})  # the user's weights are untouched
    worker.abandon("over")
