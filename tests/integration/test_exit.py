"""The end of training in every mode, forced exchanges, and answers that get lost: nothing is lost, nobody hangs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch

from outerstep.coordination.worker.exchange import Patience
from outerstep.errors import TransportError
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Request
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import (
    Books,
    Ledger,
    TwoLedgers,
    assert_same,
    count,
    in_threads,
    memory_topology,
    memory_worker,
    params_of,
    wait_until,
)

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}
STREAMED = {"num_fragments": 2, "fragment_delay": 1}


@dataclass(frozen=True)
class Mode:
    name: str
    settings: dict[str, object] = field(default_factory=dict)
    buffer_size: int | None = None  # of Delayed Nesterov

    def server(self, num_workers: int, **more: object) -> DiLoCoServer:
        settings = {**PLAIN, **self.settings, **more}
        made = DiLoCoServer(TwoLedgers(num_workers).state_dict(), num_workers=num_workers, port=0, **settings)
        made.service.start()
        return made


MODES = [
    Mode("sync"),
    Mode("sync with fragments", {"num_fragments": 2, "fragment_delay": 0}),
    Mode("quorum", {"quorum": 1, "staleness_policy": "log"}),
    Mode("asynchronous", {"async_mode": True}, buffer_size=2),
    Mode("asynchronous without Delayed Nesterov", {"async_mode": True, "dn_buffer_size": 0}),
    Mode("streaming, carry", {**STREAMED, "fragment_carry": True}),
    Mode("streaming, overwrite", {**STREAMED, "fragment_carry": False}),
    Mode("streaming, mixed", {**STREAMED, "fragment_alpha": 0.5}),
    Mode("streaming, quorum", {**STREAMED, "fragment_carry": True, "quorum": 1, "staleness_policy": "log"}),
    Mode("streaming, asynchronous", {**STREAMED, "fragment_carry": True, "async_mode": True}, buffer_size=2),
]
EXACT = [mode for mode in MODES if mode.name != "streaming, mixed"]  # a mixture sends parts of steps again
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


class Two:
    """Two workers, each counting in its own cell of both fragments."""

    def __init__(self, server: DiLoCoServer, workers: int = 2, **settings: object) -> None:
        self.server = server
        self.books = Books(server, [f"w{i}" for i in range(workers)])
        self.models = [TwoLedgers(workers) for _ in range(workers)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in self.models]
        self.workers: list[DiLoCoWorker] = [
            memory_worker(server, f"w{i}", self.models[i], self.optimizers[i], **settings) for i in range(workers)
        ]

    def count(self, i: int, steps: int) -> None:
        count(self.models[i], self.optimizers[i], i, steps)

    def start(self) -> Two:
        for worker in self.workers:
            worker.start()
        return self

    def abandon(self) -> None:
        for worker in self.workers:
            worker.abandon("over")


# --- the end --------------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("steps", [9, 10, 12])
def test_a_clean_exit_contributes_what_is_left_and_ends_with_the_agreed_weights(mode: Mode, steps: int) -> None:
    """After a step between two exchanges, right after one that sent a fragment, and at the end of a cycle."""
    two = Two(mode.server(2))
    both_here = threading.Barrier(2)

    def work(i: int) -> None:
        with two.workers[i]:
            both_here.wait(30.0)
            two.count(i, steps)

    in_threads(lambda: work(0), lambda: work(1))
    newest = two.server.get_global_params()
    for name, value in newest.items():
        held = [torch.equal(model.get_parameter(name), value) for model in two.models]
        # Where nobody waits for everybody, one may leave before the other's last contribution is in.
        assert all(held) if two.server.service.coordinator.rules.mode == "sync" else any(held), name
    assert two.server.status()["workers"] == {}
    for worker in two.workers:
        assert worker.sync_metrics["steps_discarded"] == 0
    if mode in EXACT:
        overwritten = [w.sync_metrics["steps_overwritten"] for w in two.workers]
        in_the_model = two.books.audit(mode.buffer_size)
        assert [sum(in_the_model[f"w{i}"]) + overwritten[i] for i in range(2)] == [
            steps * len(in_the_model["w0"]) for _ in range(2)
        ]


@every_mode
def test_an_exception_contributes_nothing_more(mode: Mode) -> None:
    server = mode.server(1)
    two = Two(server, workers=1)

    def fail() -> None:
        with two.workers[0]:
            two.count(0, 9)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    wait_until(lambda: not server.service.coordinator.uploads.held_bytes)
    accepted = server.status()["total_submissions"]
    assert accepted == sum(len(agreement.participants) for agreement in two.books.agreements)
    assert server.status()["workers"] == {}
    two.count(0, 9)  # the hook is gone
    assert server.status()["total_submissions"] == accepted


@pytest.mark.parametrize("steps", [3, 4], ids=["sent at the exit", "sent before it"])
def test_a_late_last_contribution_waits_for_the_round_that_holds_it(steps: int) -> None:
    """Quorum two of three: the third is late, counts in the next round, and leaves with the weights that hold it."""
    two = Two(Mode("quorum", {"quorum": 2, "staleness_policy": "log"}).server(3), workers=3).start()
    two.count(2, 3)
    in_threads(lambda: two.count(0, 4), lambda: two.count(1, 4))
    assert two.server.sync_round == 1
    two.count(2, steps - 3)

    def one_more() -> None:
        wait_until(lambda: two.server.status()["pending_submissions"] == ["w2"])
        two.count(0, 4)

    in_threads(two.workers[2].stop, one_more)
    assert two.server.sync_round == 2
    assert_same(params_of(two.models[2]), two.server.get_global_params())
    assert two.books.audit() == {"w0": [8], "w1": [4], "w2": [steps]}
    assert two.workers[2].sync_metrics["sync_count"] == 1
    two.abandon()


def test_a_clean_exit_does_not_wait_for_ever_for_a_fragment_in_the_air(caplog: pytest.LogCaptureFixture) -> None:
    """min_workers=2, and the other one is gone after this one has sent."""
    mode = Mode("delayed", {"fragment_delay": 1, "min_workers": 2})
    two = Two(mode.server(2), exit_patience_s=0.2).start()
    two.count(0, 4)  # all there is is on its way
    wait_until(lambda: two.server.status()["pending_submissions"] == ["w0"])
    two.workers[1].abandon("gone")
    in_threads(two.workers[0].stop, timeout_s=20.0)
    assert "cannot close" in caplog.text
    assert two.workers[0].sync_metrics["steps_discarded"] == 4
    assert_same(params_of(two.models[0]), params_of(TwoLedgers()))


def test_who_leaves_first_does_not_hold_up_those_who_stay() -> None:
    two = Two(Mode("streaming", {**STREAMED, "fragment_carry": True}).server(2)).start()

    def leave() -> None:
        two.count(0, 5)
        two.workers[0].stop()

    def stay() -> None:
        two.count(1, 21)
        two.workers[1].stop()

    in_threads(leave, stay)
    assert two.books.audit() == {"w0": [5, 5], "w1": [21, 21]}
    assert_same(params_of(two.models[1]), two.server.get_global_params())


# --- an exchange by force -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [m for m in EXACT if "quorum" not in m.name], ids=lambda mode: mode.name)
def test_a_forced_exchange_returns_when_the_others_reach_their_slots(mode: Mode) -> None:
    two = Two(mode.server(2)).start()

    def force() -> None:
        two.count(0, 3)
        two.workers[0].force_sync()
        assert all(p.counted.steps == 3 for p in two.workers[0]._started.machine.state.fragments)
        two.count(0, 6)
        two.workers[0].stop()

    def train() -> None:
        two.count(1, 9)
        two.workers[1].stop()

    in_threads(force, train)
    in_the_model = two.books.audit(mode.buffer_size)
    overwritten = [w.sync_metrics["steps_overwritten"] for w in two.workers]
    for i in range(2):
        assert sum(in_the_model[f"w{i}"]) + overwritten[i] == 9 * len(in_the_model["w0"])


def test_a_forced_exchange_while_the_others_stand_still_ends_at_the_deadline() -> None:
    settings = {**PLAIN, **STREAMED, "round_deadline_s": 0.2}
    with DiLoCoServer(TwoLedgers().state_dict(), num_workers=2, port=0, **settings) as server:
        two = Two(server).start()
        two.count(0, 1)
        in_threads(two.workers[0].force_sync, timeout_s=30.0)
        assert two.books.audit() == {"w0": [1, 1], "w1": [0, 0]}
        two.abandon()


def test_two_forced_exchanges_at_once_are_one_round() -> None:
    two = Two(Mode("sync").server(2)).start()
    for i in range(2):
        two.count(i, 2 + i)
    in_threads(*(worker.force_sync for worker in two.workers))
    assert two.server.sync_round == 1
    assert two.server.get_global_params()["first"].tolist() == [1.0, 1.5]
    two.abandon()


# --- lost answers ---------------------------------------------------------------------------------------------------


class Lossy(MemoryTransport):
    """Loses every second answer: what was asked is carried out, and asked again."""

    def __init__(self, server: DiLoCoServer) -> None:
        super().__init__(server.service)
        self.calls = self.lost = 0

    def call(self, request: Request, **buffers: object) -> Answer:
        answer = super().call(request, **buffers)  # type: ignore[arg-type]
        self.calls += 1
        if self.calls % 2 == 0:
            self.lost += 1
            raise TransportError("lost on purpose")
        return answer


@pytest.mark.row("F04")
@pytest.mark.parametrize("mode", EXACT, ids=lambda mode: mode.name)
def test_a_contribution_whose_answer_is_lost_is_applied_once(mode: Mode) -> None:
    server = mode.server(2)
    books = Books(server, ["w0", "w1"])
    both_here = threading.Barrier(2)

    def work(i: int) -> tuple[int, int]:
        model = TwoLedgers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        transport = Lossy(server)
        with memory_worker(server, f"w{i}", model, optimizer, transport=transport, heartbeat_interval=0.0) as worker:
            both_here.wait(30.0)
            count(model, optimizer, i, 13)
        assert transport.lost > 5
        assert worker.sync_metrics["sync_retries"] > 3  # type: ignore[operator]
        return worker.sync_metrics["steps_overwritten"], worker.sync_metrics["steps_discarded"]  # type: ignore[return-value]

    losses = in_threads(lambda: work(0), lambda: work(1))
    in_the_model = books.audit(mode.buffer_size)
    for i, (overwritten, discarded) in enumerate(losses):
        assert discarded == 0
        assert sum(in_the_model[f"w{i}"]) + overwritten == 13 * len(in_the_model["w0"])


def test_if_the_server_is_gone_at_the_end_the_script_goes_on_with_its_own_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What follows the with block, such as saving the model, must still run."""
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, codec="fp32", sync_every=4)
    server.service.start()
    transport = MemoryTransport(server.service)
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    patience = Patience(first_backoff_s=0.01, longest_backoff_s=0.02, give_up_after_s=0.3, poll_wait_s=0.05)
    topology = memory_topology(server, "w", transport, patience=patience)
    with DiLoCoWorker(model, optimizer, "memory:1", worker_id="w", topology=topology) as worker:
        count(model, optimizer, 0, 6)
        own = model.cells.tolist()
        transport.drop_requests = 10**9
    assert model.cells.tolist() == own
    assert worker.sync_metrics["steps_discarded"] == 2
    assert "Leaving with this worker's own weights" in caplog.text
