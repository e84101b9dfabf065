"""A worker that loses the server for a while: it trains on, comes back, and every step of its own counts once.

The books are exact: ledgers of whole numbers, an outer step that adopts the mean, and for every round a record of who
was in it with how many steps. Deadlines pass when a test says so.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from outerstep.coordination.worker.exchange import Patience
from outerstep.errors import ServerUnreachable, TransportError
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Poll, Request
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import Books, Ledger, TwoLedgers, count, in_threads, memory_worker, wait_until

DEADLINE_S = 100.0
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "round_deadline_s": DEADLINE_S}
IMPATIENT = Patience(first_backoff_s=0.01, longest_backoff_s=0.02, give_up_after_s=30.0, poll_wait_s=0.05)


class Line(MemoryTransport):
    """Can be cut: at once, or by itself when the contribution has gone through (`cut_at_poll`)."""

    def __init__(self, server: DiLoCoServer) -> None:
        super().__init__(server.service)
        self.is_cut = False
        self.cut_at_poll = False
        self.refused = 0

    def call(self, request: Request, **buffers: object) -> Answer:
        if self.cut_at_poll and isinstance(request, Poll):
            self.is_cut, self.cut_at_poll = True, False
        if self.is_cut:
            self.refused += 1
            raise TransportError("the line is cut")
        return super().call(request, **buffers)  # type: ignore[arg-type]


class Run:
    """Two workers: "a" stays, "b" goes away. Only while it is away is b quick to call the server out of reach: a busy
    machine must not make it so."""

    def __init__(
        self,
        model: type[Ledger] | type[TwoLedgers] = Ledger,
        *,
        offline_rounds: int = 20,
        offline_after_s: float = 30.0,
        patience: Patience = IMPATIENT,
        **settings: object,
    ) -> None:
        settings = {**PLAIN, "sync_every": 4, "heartbeat_timeout": 0.0, **settings}
        self.server = DiLoCoServer(model().state_dict(), num_workers=2, port=0, **settings)
        self.server.service.start()
        self.books = Books(self.server, "ab")
        self.lines = [Line(self.server), Line(self.server)]
        self.models = [model(), model()]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in self.models]
        self.workers: list[DiLoCoWorker] = [
            memory_worker(
                self.server,
                "ab"[i],
                self.models[i],
                self.optimizers[i],
                transport=self.lines[i],
                patience=patience,
                heartbeat_interval=0.0,
                offline_after_s=offline_after_s,
                offline_rounds=offline_rounds,
            ).start()
            for i in range(2)
        ]
        self.line = self.lines[1]

    def cut(self, *, after_sending: bool = False) -> None:
        """From now on, or from the next poll on."""
        offline = self.workers[1]._started.machine.offline
        self.workers[1]._started.machine.offline = replace(offline, after_s=0.1)
        self.line.is_cut, self.line.cut_at_poll = not after_sending, after_sending

    def mend(self) -> None:
        offline = self.workers[1]._started.machine.offline
        self.workers[1]._started.machine.offline = replace(offline, after_s=30.0)
        self.line.is_cut = False

    def a(self, steps: int) -> None:
        count(self.models[0], self.optimizers[0], 0, steps)

    def b(self, steps: int) -> None:
        count(self.models[1], self.optimizers[1], 1, steps)

    def a_alone(self, steps: int) -> None:
        """`a` trains; at each of its exchanges the deadline passes without `b`."""
        done = threading.Event()

        def train() -> None:
            self.a(steps)
            done.set()

        def pass_deadlines() -> None:
            while not done.wait(0.01):
                if self.server.status()["pending_submissions"] == ["a"]:
                    self.server.service.tick(self.server.service.clock() + DEADLINE_S + 1.0)

        in_threads(train, pass_deadlines)

    def together(self, steps: int) -> None:
        in_threads(lambda: self.a(steps), lambda: self.b(steps))

    def stop(self) -> None:
        in_threads(*(worker.stop for worker in self.workers))

    @property
    def cells(self) -> list[float]:
        return self.server.get_global_params()["cells"].tolist()

    def metric(self, name: str) -> object:
        return self.workers[1].sync_metrics[name]

    def audit(self) -> dict[str, list[int]]:
        return self.books.audit()


# --- coming back ----------------------------------------------------------------------------------------------------


@pytest.mark.row("F06")
def test_two_rounds_away_and_back_without_undoing_or_repeating_anything() -> None:
    run = Run()
    run.cut()
    run.b(8)
    assert run.metric("offline_exchanges") == 2
    assert run.models[1].cells.tolist() == [0.0, 8.0]  # it trained on
    run.a_alone(8)
    assert run.cells == [8.0, 0.0]
    run.mend()
    run.together(4)
    # Round 3 is the mean of a's (4, 0) and b's (0, 12), on top of what a did alone.
    assert run.cells == [10.0, 6.0]
    assert run.models[0].cells.tolist() == run.models[1].cells.tolist() == [10.0, 6.0]
    assert run.audit() == {"a": [12], "b": [12]}
    assert (run.metric("missed_rounds"), run.metric("steps_discarded")) == (1, 0)
    run.stop()


def test_what_went_through_before_the_line_was_cut_is_not_sent_again() -> None:
    run = Run()
    run.cut(after_sending=True)
    in_threads(lambda: run.a(4), lambda: run.b(4))
    assert run.cells == [2.0, 2.0]  # b's first four are in, b does not know
    run.b(4)
    run.a_alone(8)
    assert run.cells == [10.0, 2.0]
    run.mend()
    run.together(4)
    assert run.cells == [12.0, 6.0]  # only b's last eight
    assert run.audit() == {"a": [16], "b": [12]}
    assert (run.metric("missed_rounds"), run.metric("steps_discarded")) == (0, 0)
    run.stop()


@pytest.mark.row("F06")
def test_a_quorum_takes_the_late_contribution_and_the_steps_since_travel_in_the_next() -> None:
    run = Run(quorum=1, staleness_policy="log", num_fragments=1)
    run.cut()
    run.b(8)
    run.a(8)  # a quorum of one: two rounds
    run.mend()
    run.b(4)
    run.stop()
    assert run.audit() == {"a": [8], "b": [12]}
    assert run.metric("steps_discarded") == 0


def test_an_asynchronous_worker_comes_back_the_same_way() -> None:
    run = Run(async_mode=True, dn_buffer_size=0, round_deadline_s=None)
    run.cut()
    run.b(8)
    run.a(8)
    run.mend()
    run.b(4)
    run.stop()
    assert run.audit() == {"a": [8], "b": [12]}
    assert run.cells == [8.0, 12.0]


def test_an_evicted_worker_joins_again_by_itself_and_its_steps_count() -> None:
    run = Run(heartbeat_timeout=50.0)
    run.cut()
    run.b(4)
    run.server.service.tick(run.server.service.clock() + 60.0)  # nobody was heard from: both are out
    assert run.server.status()["workers"] == {}
    run.a(8)  # joins again, and has nobody to wait for
    assert run.cells == [8.0, 0.0]
    run.mend()
    wait_until(lambda: "b" in run.server.status()["workers"])  # type: ignore[operator]
    run.a(4)  # the open round did not expect b; the next one does
    run.b(2)
    run.together(4)
    run.stop()
    assert run.audit() == {"a": [16], "b": [10]}
    assert run.metric("reconnections") == 1
    assert run.server.status()["total_worker_deaths"] == 2


@pytest.mark.parametrize("when", ["before it was sent", "after it was sent"])
def test_streaming_fragments_come_back_too(when: str) -> None:
    """Two fragments, taken over one step after they were sent; the steps taken meanwhile are carried on."""
    run = Run(TwoLedgers, num_fragments=2, fragment_delay=1, fragment_carry=True)
    run.together(3)
    run.cut(after_sending=when == "after it was sent")
    run.b(8)
    assert run.line.refused > 0
    run.a_alone(8)
    run.mend()
    run.together(8)
    run.stop()
    assert run.audit() == {"a": [19, 19], "b": [19, 19]}
    assert (run.metric("steps_discarded"), run.metric("steps_overwritten")) == (0, 0)
    for model in run.models:
        for name, value in run.server.get_global_params().items():
            assert model.get_parameter(name).tolist() == value.tolist()


# --- too old --------------------------------------------------------------------------------------------------------


@pytest.mark.row("F06")
def test_beyond_the_age_limit_its_steps_are_discarded_and_counted() -> None:
    run = Run(max_staleness=1)
    run.cut()
    run.b(8)
    run.a_alone(8)
    run.mend()
    run.b(4)  # its oldest step was taken two versions ago
    assert run.metric("steps_discarded") == 12
    assert run.models[1].cells.tolist() == run.cells == [8.0, 0.0]
    run.together(4)  # and it goes on from there
    assert run.cells == [10.0, 2.0]
    assert run.audit() == {"a": [12], "b": [4]}
    run.stop()


def test_steps_taken_while_an_answer_was_lost_grow_old_too() -> None:
    """The contribution itself counted; what was done after it was done on an old version, and is past the limit."""
    run = Run(max_staleness=1)
    run.cut(after_sending=True)
    run.together(4)
    run.a_alone(8)
    run.b(3)
    run.mend()
    run.b(1)
    assert run.metric("steps_discarded") == 4
    assert run.models[1].cells.tolist() == run.cells == [10.0, 2.0]
    run.together(4)
    assert run.audit() == {"a": [16], "b": [8]}
    run.stop()


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("F09")
def test_after_so_many_exchanges_left_open_it_waits() -> None:
    run = Run(offline_rounds=2)
    run.cut()
    run.b(8)
    done = threading.Event()

    def third() -> None:
        run.b(4)
        done.set()

    def mend() -> None:
        refused = run.line.refused
        wait_until(lambda: run.line.refused > refused + 20)  # many times longer than offline_after_s
        assert not done.is_set()
        assert run.metric("offline_exchanges") == 2
        run.mend()

    in_threads(third, mend, lambda: run.a(8))
    assert done.is_set()
    assert run.cells == [4.0, 6.0]  # what it had offered first, then the rest
    assert run.audit() == {"a": [8], "b": [12]}
    run.cut()
    run.b(4)  # the limit is for one absence
    assert run.metric("offline_exchanges") == 3
    run.mend()
    run.stop()


def test_no_answer_for_too_long_is_one_clear_error_and_nothing_is_lost() -> None:
    patience = Patience(first_backoff_s=0.01, longest_backoff_s=0.02, give_up_after_s=0.3, poll_wait_s=0.05)
    run = Run(offline_rounds=0, patience=patience)
    run.cut()
    with pytest.raises(ServerUnreachable, match=r"no answer from the server for .* s \(the limit is 0.3 s\)"):
        run.b(4)
    assert run.models[1].cells.tolist() == [0.0, 4.0]
    run.mend()
    in_threads(lambda: run.a(4), run.workers[1].force_sync)
    assert run.cells == [2.0, 2.0]
    assert run.audit() == {"a": [4], "b": [4]}
    run.stop()


@pytest.mark.slow
def test_a_worker_that_only_waits_for_the_others_is_not_offline() -> None:
    """However long the round takes: the server answers, and says for whom it waits."""
    run = Run(offline_after_s=0.4, patience=Patience(first_backoff_s=0.01, longest_backoff_s=0.02, poll_wait_s=1.0))
    polls = threading.Semaphore(0)
    ask = run.line.call

    def counted(request: Request, **buffers: object) -> Answer:
        answer = ask(request, **buffers)
        if isinstance(request, Poll):
            polls.release()
        return answer

    run.line.call = counted  # type: ignore[method-assign]

    def late() -> None:
        for _ in range(2):
            assert polls.acquire(timeout=30.0)
        run.a(4)

    in_threads(lambda: run.b(4), late)
    assert run.cells == [2.0, 2.0]
    assert run.metric("offline_exchanges") == 0
    run.stop()
