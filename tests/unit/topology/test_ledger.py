"""A worker whose codec leaves much out keeps exact books: Σ applied + e + unsent = Σ local steps, whatever happens.

All numbers are whole, and the codec sends multiples of eight, so that every sum is exact. The server is one for this
worker alone, loses what the test says, and may move on without it.
"""

from __future__ import annotations

import io
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amounts import mostly_slow
from outerstep.coordination.worker.exchange import Patience
from outerstep.core.codecs import CODECS
from outerstep.errors import (
    BadTensors,
    ConfigError,
    ExchangeFailed,
    ModelError,
    OtherRun,
    TransportError,
    WorkerError,
)
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Commit, Join, Offer, Poll, PutPart, Request
from outerstep.worker import DiLoCoWorker
from outerstep.worker.replica import Replica
from support import Eights, params_of, wait_until
from unit.topology.one_fragment import OneFragment


def nothing(request: Request) -> None:
    """Neither a request nor an answer is lost."""


QUICK = Patience(first_backoff_s=0.002, longest_backoff_s=0.01, give_up_after_s=30.0, poll_wait_s=0.0)


@pytest.fixture(autouse=True)
def eights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "eights", Eights())


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, 5))
        self.second = nn.Parameter(torch.zeros(7))


class Book:
    """Trains one worker and audits it."""

    def __init__(self, codec: str = "eights+feedback", seed: int = 0, **plan: Any) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.server = OneFragment(
            params_of(Cells()), Replica(Cells()).manifest, codec=codec, down_codec="fp32", part_size_bytes=64, **plan
        )
        self.steps, self.elsewhere = self.zeros(), self.zeros()
        self.start()

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(p.shape) for name, p in Cells().named_parameters()}

    def start(self, state: dict[str, Any] | None = None, worker_id: str = "w") -> None:
        self.model = Cells()
        if state is not None:
            self.model.load_state_dict(state["model"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.topology = ServerTopology(
            self.server, worker_id=worker_id, instance=secrets.token_hex(8), hostname="test", patience=QUICK
        )
        self.worker = DiLoCoWorker(
            self.model,
            self.optimizer,
            "none:1",
            worker_id=worker_id,
            topology=self.topology,
            heartbeat_interval=0.0,
        )
        if state is not None:
            self.worker.load_state_dict(state["worker"])
        self.worker.start()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for name, param in self.model.named_parameters():
                param.grad = torch.randint(-9, 10, param.shape, generator=self.source).float()
                self.steps[name] += param.grad
            self.optimizer.step()

    def move_on(self) -> None:
        """The others make a version without us."""
        moves = {n: torch.randint(-9, 10, t.shape, generator=self.source).float() for n, t in self.zeros().items()}
        for name, move in moves.items():
            self.elsewhere[name] += move
        self.server.move(moves)

    def save(self) -> dict[str, Any]:
        """As it comes back from a file."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "worker": self.worker.state_dict()}, file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state

    def restart(self) -> None:
        """With the state that was saved now: nothing is lost."""
        state = self.save()
        self.worker.abandon("to be started anew")
        self.start(state)

    @contextmanager
    def no_line(self, *, from_poll: bool = False) -> Iterator[None]:
        """Nobody answers, from now on or once the contribution has gone through; the worker trains on."""
        machine, cut = self.worker._started.machine, []
        usual, machine.offline = machine.offline, replace(machine.offline, after_s=0.01)

        def lose(request: Request) -> None:
            if not from_poll or isinstance(request, Poll):
                cut.append(request)
            if cut:
                raise TransportError("the line is cut")

        self.server.before = lose
        yield
        self.server.before = nothing
        machine.offline = usual
        assert cut

    def lose_answers(self, kind: type[Request], count: int = 1) -> list[Request]:
        """The next answers to such requests; they were carried out."""
        lost: list[Request] = []

        def lose(request: Request) -> None:
            if isinstance(request, kind) and len(lost) < count:
                lost.append(request)
                raise TransportError("the answer was lost")

        self.server.after = lose
        return lost

    def unsent(self) -> dict[str, Tensor]:
        return self.worker._replica.deltas(self.zeros())

    def audit(self) -> None:
        """When nothing is under way: what the server has counted and the worker not heard of is applied and unsent."""
        assert not self.worker._started.machine.in_flight
        unsent = self.unsent()
        for name, total in self.steps.items():
            applied = sum((one[name] for one in self.server.applied), torch.zeros(total.shape))
            e = self.topology._feedback.residual(name)
            owed = torch.zeros(total.shape) if e is None else e.view(total.shape)
            assert torch.equal(applied + owed + unsent[name], total), name
            assert torch.equal(self.server.theta[name], self.elsewhere[name] - applied)

    @property
    def owed(self) -> float:
        return sum(float(e.abs().sum()) for e in self.topology._feedback._residuals.values())


def test_what_was_left_out_is_sent_later() -> None:
    book = Book()
    for _ in range(6):
        book.step()
        book.audit()
    assert book.owed > 0
    assert book.worker.sync_metrics["sync_count"] == 6


def test_without_feedback_it_would_be_lost() -> None:
    book = Book("eights")
    book.step(6)
    with pytest.raises(AssertionError):
        book.audit()
    assert book.owed == 0


def test_a_round_that_closed_without_us_leaves_e_as_it_was() -> None:
    book = Book()
    book.step(2)
    for _ in range(3):
        book.move_on()
        book.step()
        book.audit()
    assert book.worker.sync_metrics["missed_rounds"] == 3


@pytest.mark.parametrize("kind", [Offer, PutPart, Commit, Poll])
def test_lost_answers_change_nothing(kind: type[Request]) -> None:
    book = Book()
    book.step()
    lost = book.lose_answers(kind, 2)
    book.step(2)
    book.audit()
    assert len(lost) == 2
    assert book.server.last_sequence == 3


def test_a_refused_contribution_is_not_owed_but_still_to_be_sent() -> None:
    book = Book()
    book.step()

    def refuse(request: Request) -> None:
        if isinstance(request, Commit):
            raise BadTensors("a tensor is missing")

    book.server.before = refuse
    with pytest.raises(ExchangeFailed, match="is missing"):
        book.step()
    book.audit()
    book.server.before = nothing
    book.step()
    book.audit()
    assert len(book.server.applied) == 2


@pytest.mark.parametrize("arrived", [False, True])
def test_a_contribution_left_open_is_settled_later(arrived: bool) -> None:
    book = Book()
    book.step()
    with book.no_line(from_poll=arrived):
        book.step()
        assert book.worker._started.machine.in_flight
        book.step(2)
    book.step()
    book.audit()
    assert book.worker.sync_metrics["offline_exchanges"] == 3
    assert book.server.last_sequence == 3


@pytest.mark.parametrize("arrived", [False, True])
def test_a_restart_finds_out_whether_its_last_contribution_counted(arrived: bool) -> None:
    book = Book()
    book.step(2)
    with book.no_line(from_poll=arrived):
        book.step(2)
    book.restart()
    book.step()  # settles it, and sends what was done since then
    book.audit()
    assert len(book.server.applied) == 4
    assert book.server.last_sequence == 4
    assert book.worker.sync_metrics["offline_exchanges"] == 2, "the metrics go on"


def test_a_restart_with_nothing_under_way_keeps_e() -> None:
    book = Book(sync_every=2)
    book.step(5)
    owed = book.owed
    assert owed > 0
    book.restart()
    assert book.owed == owed
    book.audit()


@pytest.mark.parametrize("missed", [False, True])
def test_with_a_delay_and_what_was_done_meanwhile_carried_along(missed: bool) -> None:
    book = Book(sync_every=3, delay=2, carry=True)
    for _ in range(4):
        book.step(3)  # sent
        if missed:
            wait_until(lambda: book.worker._started._tickets[0].look(0.0).done)
            book.move_on()
        book.step(2)  # landed
        book.audit()
        book.step()
    assert book.worker.sync_metrics["missed_rounds"] == (3 if missed else 0)


def test_a_restart_between_sending_and_landing() -> None:
    book = Book(sync_every=3, delay=2, carry=True)
    book.step(4)
    wait_until(lambda: book.server.last_sequence == 1)
    book.restart()
    assert book.worker._started.machine.in_flight[0].land_at == 5
    book.step()
    book.audit()
    assert book.owed > 0
    assert book.server.last_sequence == 1


def test_a_sparse_codec_keeps_its_books_with_decay() -> None:
    """What is sent and what is kept add up to 0.95·e + Δ, round after round."""
    book = Book("sparse2")
    owed = book.zeros()
    for i in range(8):
        before = {name: t.clone() for name, t in book.steps.items()}
        book.step()
        applied = book.server.applied[i]
        for name, total in book.steps.items():
            wanted = owed[name] * 0.95 + (total - before[name])
            e = book.topology._feedback.residual(name)
            assert e is not None
            assert torch.allclose(applied[name] + e.view(total.shape), wanted, atol=1e-5)
            assert int((applied[name] != 0).sum()) <= 2
            owed[name] = e.view(total.shape).clone()


@pytest.mark.parametrize("seed", mostly_slow(range(12), [0, 1, 2]))
def test_whatever_happens_in_whatever_order(seed: int) -> None:
    rng = random.Random(seed)
    delay = rng.choice([0, 0, 1])
    book = Book(seed=seed, sync_every=2 if delay else 1, delay=delay, carry=bool(delay), max_staleness=99)
    for _ in range(12):
        event = rng.choice(["step", "step", "move on", "lost", "away", "gone", "restart"])
        if event == "move on":
            book.move_on()
        elif event == "lost":
            book.lose_answers(rng.choice([Offer, PutPart, Commit, Poll]), rng.randint(1, 2))
        elif event == "restart":
            book.restart()
        elif event in ("away", "gone"):
            with suppress(AssertionError), book.no_line(from_poll=event == "gone"):
                book.step(rng.randint(1, 3))
        book.step(rng.randint(0, 2))
        if not book.worker._started.machine.in_flight:
            book.audit()
    book.worker.force_sync()
    book.audit()


# --- what a state is good for ---------------------------------------------------------------------------------------


def test_a_state_is_loaded_before_the_start() -> None:
    book = Book()
    with pytest.raises(WorkerError, match="before the worker is started"):
        book.worker.load_state_dict(book.worker.state_dict())


def test_a_state_of_another_form_is_refused() -> None:
    book = Book()
    fresh = DiLoCoWorker(Cells(), torch.optim.SGD(Cells().parameters()), "none:1", topology=book.topology)
    with pytest.raises(ConfigError, match="format 2, got 1"):
        fresh.load_state_dict({"format": 1})
    state = book.save()["worker"]
    with pytest.raises(ConfigError, match=r"not the state of a worker: .*work.steps"):
        fresh.load_state_dict({**state, "work": {"steps": "many"}})
    with pytest.raises(ConfigError, match=r"not the state of a worker: .*run_id"):
        fresh.load_state_dict({**state, "topology": {**state["topology"], "run_id": 3}})
    with pytest.raises(WorkerError, match="has not been started"):
        fresh.state_dict()


def test_a_state_of_another_worker_is_refused_and_without_an_id_it_names_this_one() -> None:
    book = Book()
    book.step()
    state = book.save()
    book.worker.abandon("gone")
    with pytest.raises(ConfigError, match="start with worker_id='w'"):
        book.start(state, worker_id="another")
    model = Cells()
    model.load_state_dict(state["model"])
    topology = ServerTopology(
        book.server, worker_id="made-up", instance=secrets.token_hex(8), hostname="test", patience=QUICK
    )
    nameless = DiLoCoWorker(model, torch.optim.SGD(model.parameters()), "none:1", topology=topology)
    nameless.load_state_dict(state["worker"])
    nameless.start()
    assert nameless.worker_id == topology.session.worker_id == "w"
    nameless.abandon("the test is over")


def test_a_state_of_another_model_is_refused_by_name() -> None:
    book = Book()
    state = book.save()["worker"]
    state["anchors"]["first"] = torch.zeros(3, 6)
    fresh = DiLoCoWorker(Cells(), torch.optim.SGD(Cells().parameters()), "none:1", topology=book.topology)
    with pytest.raises(ModelError, match=r"another model: 'first' is \[3, 6\] in it, \[3, 5\] here"):
        fresh.load_state_dict(state)
    del state["anchors"]["first"]
    with pytest.raises(ModelError, match=r"'first' is missing in it, \[3, 5\] here"):
        fresh.load_state_dict(state)


def test_a_model_that_was_not_loaded_is_noticed_before_anybody_is_told() -> None:
    book = Book()
    book.step()
    state = book.save()
    book.worker.abandon("gone")
    joins: list[Request] = []
    book.server.before = joins.append
    with pytest.raises(ModelError, match="load model, optimizer and worker from the same checkpoint"):
        book.start({**state, "model": Cells().state_dict()})
    assert not joins


def test_a_state_of_another_run_is_refused_by_name() -> None:
    book = Book()
    book.step()
    state = book.save()
    book.worker.abandon("gone")
    runs = []

    def refuse(request: Request) -> None:
        if isinstance(request, Join) and request.run_id != "two":
            runs.append(request.run_id)
            raise OtherRun("this server holds run two, not one")

    book.server.before = refuse
    with pytest.raises(OtherRun, match=r"holds run two, not one.*start without load_state_dict"):
        book.start(state)
    assert runs == ["one"]


def test_a_state_of_other_fragments_is_refused_by_name() -> None:
    book = Book()
    state = book.save()
    book.worker.abandon("gone")
    state["worker"]["fragments"][0]["names"] = ["first"]
    with pytest.raises(ConfigError, match="1 fragments that are not those of the run"):
        book.start(state)
    state["worker"]["topology"]["fragments"] *= 2
    with pytest.raises(ConfigError, match="the state has 2 fragments, the run has 1"):
        book.start(state)


def test_a_contribution_that_is_not_one_of_this_run_is_refused_by_name() -> None:
    book = Book()
    book.step()
    with book.no_line():
        book.step()
        state = book.save()
    book.worker.abandon("gone")
    [contribution] = state["worker"]["fragments"][0]["contributions"]
    good = contribution["exchange"]
    for bad, message in (
        ({**good, "bytes": good["bytes"][:-8]}, r"\(eights\+feedback, \d+ bytes\) is not one of this run"),
        ({**good, "bytes": good["bytes"].clone().fill_(7)}, "is not one of this run"),
        ({**good, "steps": -1}, "cannot be sent again: .*steps"),
        ({}, "cannot be sent again: .*each process loads the state that it saved"),
    ):
        contribution["exchange"] = bad
        with pytest.raises(ConfigError, match=message):
            book.start(state)
    contribution["exchange"] = good
    book.start(state)
    book.step()
    book.audit()
