"""What an operator asks of a run, through the service, and what its workers make of it."""

from __future__ import annotations

import pytest
import torch

from outerstep.errors import BadRequest, Closing, ExchangeFailed, Kicked, PlanMismatch, TransportError, UnknownWorker
from outerstep.server import DiLoCoServer
from outerstep.types import Control as Order
from outerstep.types import ControlAnswer, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import Books, Ledger, count, in_threads, memory_topology, wait_until

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}


def order(server: DiLoCoServer, kind: str, **facts: object) -> str:
    answer = MemoryTransport(server.service).call(Order(kind=kind, **facts))  # type: ignore[arg-type]
    assert isinstance(answer, ControlAnswer)
    return answer.done


class Worker:
    """A real worker; the test sends its heartbeats. Each step adds one to its own cell."""

    def __init__(self, server: DiLoCoServer, cell: int, **settings: object) -> None:
        self.name, self.cell = f"w{cell}", cell
        self.model = Ledger()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.transport = MemoryTransport(server.service)
        self.topology = memory_topology(server, self.name, self.transport)
        self.worker = DiLoCoWorker(
            self.model,
            self.optimizer,
            "memory:1",
            worker_id=self.name,
            topology=self.topology,
            heartbeat_interval=0.0,
            **settings,  # type: ignore[arg-type]
        ).start()

    def count(self, steps: int, tokens: int = 0) -> None:
        for _ in range(steps):
            if tokens:
                self.worker.count(tokens=tokens)
            count(self.model, self.optimizer, self.cell, 1)

    def beat(self) -> None:
        self.topology.heartbeat(self.worker._started.machine.state.work.steps, 1.0, None)


@pytest.fixture
def server() -> DiLoCoServer:
    made = DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, **PLAIN)
    made.service.start()
    return made


@pytest.fixture
def books(server: DiLoCoServer) -> Books:
    return Books(server, ["w0", "w1"])


@pytest.fixture
def pair(server: DiLoCoServer, books: Books) -> list[Worker]:
    return [Worker(server, 0), Worker(server, 1)]


def pending(server: DiLoCoServer, name: str = "w0") -> list[str]:
    worker = server.service.coordinator.members.find(name)
    return [] if worker is None else [command.kind for command in worker.commands.values()]


# --- drain and sync -------------------------------------------------------------------------------------------------


def test_a_drained_worker_contributes_leaves_and_says_so(
    server: DiLoCoServer, books: Books, pair: list[Worker]
) -> None:
    first, second = pair
    assert "w0 will contribute and leave" in order(server, "drain", worker_id="w0", reason="maintenance")
    first.count(1)
    assert not first.worker.should_stop  # it has not heard of it yet
    first.beat()
    in_threads(lambda: first.count(1), lambda: second.count(4))
    assert first.worker.should_stop
    assert list(server.status()["workers"]) == ["w1"]  # type: ignore[call-overload]
    assert first.model.cells.tolist() == server.get_global_params()["cells"].tolist() == [1.0, 2.0]
    first.count(3)  # whoever does not look trains on for itself
    first.worker.stop()  # and the end of the `with` block does nothing more
    second.count(4)  # alone now
    assert books.audit() == {"w0": [2], "w1": [8]}
    second.worker.stop()


def test_all_are_drained_when_nobody_is_named(server: DiLoCoServer, books: Books, pair: list[Worker]) -> None:
    order(server, "drain")
    for worker in pair:
        worker.beat()
    in_threads(lambda: pair[0].count(1), lambda: pair[1].count(1))
    assert all(worker.worker.should_stop for worker in pair)
    assert server.status()["workers"] == {}
    assert books.audit() == {"w0": [1], "w1": [1]}


def test_an_order_comes_with_every_heartbeat_until_it_is_acknowledged(server: DiLoCoServer, pair: list[Worker]) -> None:
    first, second = pair
    order(server, "sync", worker_id="w0")
    order(server, "sync", worker_id="w0")  # the same order twice is one
    assert pending(server) == ["sync"]
    first.transport.drop_answers = 2
    for _ in range(2):
        with pytest.raises(TransportError):
            first.beat()
    first.count(1)
    assert server.sync_round == 0  # it was told twice, and heard nothing
    first.beat()
    assert pending(server) == ["sync"]  # the server does not know yet that it was heard
    in_threads(lambda: first.count(1), lambda: second.count(4))
    assert server.sync_round == 1
    first.transport.drop_requests = 1
    with pytest.raises(TransportError):
        first.beat()  # the "got it" is lost
    assert pending(server) == ["sync"]
    first.beat()
    assert pending(server) == []
    first.count(1)
    assert server.sync_round == 1  # obeyed once
    order(server, "sync", worker_id="w0")  # a new one is a new one
    first.beat()
    in_threads(lambda: first.count(1), lambda: second.count(4))
    assert server.sync_round == 2
    for worker in pair:
        worker.worker.abandon("over")


def test_a_drain_reaches_a_worker_through_its_own_heartbeats() -> None:
    settings = {**PLAIN, "sync_every": 1000}
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, **settings) as server:
        model = Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, worker_id="w", heartbeat_interval=0.05) as worker:
            count(model, optimizer, 0, 1)
            order(server, "drain", worker_id="w")
            steps = 1
            while not worker.should_stop:
                count(model, optimizer, 0, 1)
                steps += 1
                assert steps < 1_000_000
        assert server.get_global_params()["cells"].tolist() == [float(steps), 0.0]


# --- kick -----------------------------------------------------------------------------------------------------------


def test_a_kicked_worker_gets_one_clear_error_and_the_others_go_on(server: DiLoCoServer, pair: list[Worker]) -> None:
    first, second = pair
    in_threads(lambda: first.count(3), lambda: second.count(3))
    order(server, "kick", worker_id="w0", reason="it misbehaves")
    second.count(1)  # waits for nobody
    assert server.get_global_params()["cells"].tolist() == [0.0, 4.0]
    with pytest.raises(ExchangeFailed, match=r"removed from the run: it misbehaves.*start it again") as caught:
        first.count(1)
    assert isinstance(caught.value.__cause__, Kicked)
    assert first.model.cells.tolist() == [4.0, 0.0]
    with pytest.raises(Kicked):
        first.beat()
    with pytest.raises(Kicked):
        first.transport.call(first.topology.session.join_request)  # the same start may not come back
    first.worker.abandon("kicked")
    again = Worker(server, 0)  # a new one may
    assert again.model.cells.tolist() == [0.0, 4.0]
    again.worker.abandon("over")
    second.worker.abandon("over")


def test_who_waits_for_a_round_when_it_is_kicked_learns_it_at_once(server: DiLoCoServer, pair: list[Worker]) -> None:
    first, second = pair

    def kick() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["w0"])
        order(server, "kick", worker_id="w0")

    def waits() -> None:
        with pytest.raises(ExchangeFailed, match="an operator removed it"):
            first.count(4)

    in_threads(waits, kick)
    second.count(4)
    assert server.get_global_params()["cells"].tolist() == [2.0, 2.0]  # what was accepted stays
    second.worker.abandon("over")


@pytest.mark.parametrize("kind", ["kick", "drain", "sync"])
def test_an_unknown_worker_is_named(server: DiLoCoServer, pair: list[Worker], kind: str) -> None:
    with pytest.raises(UnknownWorker, match="no live worker 'w7'; live: w0, w1"):
        order(server, kind, worker_id="w7")
    for worker in pair:
        worker.worker.abandon("over")


# --- plan -----------------------------------------------------------------------------------------------------------


def exchanges(server: DiLoCoServer, pair: list[Worker], steps: int) -> list[list[int]]:
    """At which of the next steps each worker's version changes."""

    def watch(worker: Worker) -> list[int]:
        seen, found = worker.worker.sync_metrics["versions"], []
        for step in range(1, steps + 1):
            worker.count(1)
            now = worker.worker.sync_metrics["versions"]
            found += [step] if now != seen else []
            seen = now
        return found

    return in_threads(*(lambda worker=worker: watch(worker) for worker in pair))


def test_both_workers_change_h_in_the_same_round(server: DiLoCoServer, books: Books, pair: list[Worker]) -> None:
    assert exchanges(server, pair, 6) == [[4], [4]]
    done = order(server, "plan", changes=Wishes(sync_every=2))
    assert "revision 1 holds from the next round that closes" in done
    # The round that is open keeps its four steps (6 of them are done, so it closes after 8); then every two.
    assert exchanges(server, pair, 6) == [[2, 4, 6], [2, 4, 6]]
    order(server, "plan", changes=Wishes(sync_every=5))
    assert exchanges(server, pair, 12) == [[2, 7, 12], [2, 7, 12]]
    assert [worker.worker.plan.revision for worker in pair] == [2, 2]
    in_threads(*(worker.worker.stop for worker in pair))
    assert books.audit() == {"w0": [24], "w1": [24]}


def test_a_joiner_gets_the_new_plan_and_may_ask_for_either(server: DiLoCoServer, pair: list[Worker]) -> None:
    order(server, "plan", changes=Wishes(sync_every=2))
    in_threads(lambda: pair[0].count(4), lambda: pair[1].count(4))
    third = Worker(server, 0, sync_every=4)  # its own argument was right when it was written
    assert third.worker.sync_every == 2
    for worker in (*pair, third):
        worker.worker.abandon("over")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (Wishes(down_codec="bf16"), "down_codec cannot change during a run"),
        (Wishes(num_fragments=2), "num_fragments cannot change"),
        (Wishes(delay=4), "fragment_delay must be below sync_every"),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    server: DiLoCoServer, pair: list[Worker], changes: Wishes, problem: str
) -> None:
    with pytest.raises(PlanMismatch, match=problem):
        order(server, "plan", changes=changes)
    assert server.service.coordinator.next_plan is None
    for worker in pair:
        worker.worker.abandon("over")


def test_there_is_no_plan_to_change_before_the_first_worker(server: DiLoCoServer) -> None:
    with pytest.raises(BadRequest, match="before the first worker has joined"):
        order(server, "plan", changes=Wishes(sync_every=2))


# --- the token budget -----------------------------------------------------------------------------------------------


def test_at_the_token_budget_everybody_is_told_to_finish() -> None:
    server = DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, token_budget=100, **PLAIN)
    server.service.start()
    now = [1000.0]
    server.service.clock = lambda: now[0]
    books = Books(server, ["w0", "w1"])
    pair = [Worker(server, 0), Worker(server, 1)]
    budget = server.service.coordinator.budget

    def train(steps: int) -> None:
        in_threads(*(lambda worker=worker: worker.count(steps, tokens=5) for worker in pair))

    train(4)
    assert (budget.total, budget.per_second, budget.seconds_left) == (40, 0.0, None)
    now[0] += 10.0
    train(4)
    assert budget.total == 80
    assert budget.per_second > 0.0
    left = budget.seconds_left
    assert left is not None
    assert left == pytest.approx(20 / budget.per_second)
    now[0] += 10.0
    train(4)
    assert budget.total == 120
    assert budget.seconds_left == 0.0
    assert [pending(server, worker.name) for worker in pair] == [["drain"], ["drain"]]
    for worker in pair:
        worker.beat()
    train(1)
    assert all(worker.worker.should_stop for worker in pair)
    assert server.status()["workers"] == {}
    assert books.audit() == {"w0": [13], "w1": [13]}
    with pytest.raises(Closing, match="the token budget is spent"):
        Worker(server, 0)  # a new start


def test_the_budget_can_be_moved_while_the_run_is_on(server: DiLoCoServer, pair: list[Worker]) -> None:
    assert "ends at 30 tokens" in order(server, "budget", tokens=30)
    in_threads(*(lambda worker=worker: worker.count(4, tokens=5) for worker in pair))
    assert pending(server) == ["drain"]
    assert "has no end" in order(server, "budget", tokens=0)
    assert server.service.coordinator.budget.limit is None
    for worker in pair:
        worker.worker.abandon("over")


# --- shutdown -------------------------------------------------------------------------------------------------------


def test_a_shutdown_lets_the_workers_finish_and_takes_nobody_new(
    server: DiLoCoServer, books: Books, pair: list[Worker]
) -> None:
    assert "then the server stops" in order(server, "shutdown", reason="the power goes out at six")
    with pytest.raises(Closing, match="the power goes out at six"):
        Worker(server, 7)
    for worker in pair:
        worker.beat()
    in_threads(lambda: pair[0].count(1), lambda: pair[1].count(2))
    assert all(worker.worker.should_stop for worker in pair)
    assert books.audit() == {"w0": [1], "w1": [1]}
