"""Weights that are changed behind a worker's back: noticed, adopted, said; the agreed model does not move by them.

Ledgers count: each step of worker i adds one to its cell, so the server's weights say whose steps are in them, exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outerstep.errors import ExchangeFailed, WorkerError
from outerstep.events import Event, WeightsChanged
from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Ticket
from outerstep.worker import DiLoCoWorker
from support import TwoLedgers, count, in_threads, memory_worker

FAR_OFF = 1000.0
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}
STREAMED = {**PLAIN, "num_fragments": 2, "fragment_delay": 1}
MODES = {
    "sync": PLAIN,
    "fragments": {**PLAIN, "num_fragments": 2, "fragment_delay": 0},
    "asynchronous": {**PLAIN, "async_mode": True, "dn_buffer_size": 0},
    "streaming, carry": {**STREAMED, "fragment_carry": True},
    "streaming, overwrite": {**STREAMED, "fragment_carry": False},
}


def by_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, FAR_OFF) for name, value in model.state_dict().items()})


def by_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(torch.full_like(param, FAR_OFF))


def by_other_memory(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = torch.full_like(param, FAR_OFF)


def by_swapping(model: nn.Module) -> None:
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(torch.full_like(param, FAR_OFF)))


LOADS: dict[str, Callable[[nn.Module], None]] = {
    "load_state_dict": by_state_dict,
    "data": by_data,
    "other memory": by_other_memory,
    "swap_tensors": by_swapping,
}


class Run:
    """One server and one worker that counts in cell 0."""

    def __init__(self, settings: dict[str, Any] = PLAIN, **worker: Any) -> None:
        self.server = DiLoCoServer(TwoLedgers(2).state_dict(), num_workers=1, port=0, **settings)
        self.server.service.start()
        self.model = TwoLedgers(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.events: list[Event] = []
        self.worker: DiLoCoWorker = memory_worker(
            self.server, "w0", self.model, self.optimizer, event_sink=self.events.append, **worker
        )

    def count(self, steps: int) -> None:
        count(self.model, self.optimizer, 0, steps)

    @property
    def agreed(self) -> list[list[float]]:
        return [value.tolist() for value in self.server.get_global_params().values()]

    def holds_all_but(self, *dropped: int) -> None:
        """Of this worker's steps, `dropped` in each fragment; and in a run that lets agreements overwrite the steps
        taken in the meantime, those."""
        steps, held = self.metrics["local_step"], [cells[0] for cells in self.agreed]
        if self.metrics["steps_overwritten"]:
            assert sum(held) == 2 * steps - sum(dropped) - self.metrics["steps_overwritten"], held
        else:
            assert held == [steps - one for one in dropped], held
        assert all(cells[1] == 0.0 for cells in self.agreed)

    @property
    def metrics(self) -> dict[str, Any]:
        return self.worker.sync_metrics

    @property
    def changes(self) -> list[tuple[int, int]]:
        return [(e.step, e.steps_dropped) for e in self.events if isinstance(e, WeightsChanged)]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="outerstep")
    return lambda: [r.getMessage() for r in caplog.records if "outside optimizer.step()" in r.getMessage()]


# --- loaded -----------------------------------------------------------------------------------------------------------


WAYS = [
    *(pytest.param(PLAIN, load, id=f"sync, {name}") for name, load in LOADS.items()),
    *(pytest.param(settings, by_state_dict, id=name) for name, settings in MODES.items() if settings is not PLAIN),
]


@pytest.mark.parametrize(("settings", "load"), WAYS)
def test_what_is_loaded_before_the_first_step_is_not_sent(
    settings: dict[str, Any], load: Callable[[nn.Module], None], lines: Callable[[], list[str]]
) -> None:
    run = Run(settings)
    with run.worker:
        load(run.model)
        run.count(9)
    run.holds_all_but(1, 1)  # the step that was taken on foreign weights is dropped, the others count
    assert run.changes == [(1, 1)]
    assert (run.metrics["outside_changes"], run.metrics["steps_discarded"]) == (1, 1)
    assert len(lines()) == 1
    assert "own_change" in lines()[0]


@pytest.mark.parametrize(("settings", "load"), WAYS)
@pytest.mark.parametrize("before", [2, 3, 5])
def test_what_is_loaded_between_steps_is_not_sent(
    settings: dict[str, Any], load: Callable[[nn.Module], None], before: int, lines: Callable[[], list[str]]
) -> None:
    """Steps that were sent before stay sent: those in flight are agreed on all the same."""
    run = Run(settings)
    with run.worker:
        run.count(before)
        load(run.model)
        run.count(12 - before)
        assert run.metrics["outside_changes"] == 1
    plan = run.server.service.coordinator.plan
    assert plan is not None
    if len(plan.fragments) == 1:
        safe = (before // 4 * 4,) * 2
    elif plan.carry or not plan.delay:
        safe = {2: (2, 0), 3: (2, 0), 5: (2, 4)}[before]  # sent
    else:
        safe = {2: (2, 0), 3: (3, 0), 5: (3, 5)}[before]  # sent, or overwritten by what came back
    dropped = [before + 1 - step for step in safe]
    run.holds_all_but(*dropped)
    assert run.changes == [(before + 1, max(dropped))]
    assert run.metrics["steps_discarded"] == max(dropped)
    assert run.model.first.tolist() == run.agreed[0]
    assert len(lines()) == 1


@pytest.mark.parametrize("on_exit", ["global", "local"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_what_is_loaded_at_the_end_is_not_sent(
    on_exit: str, load: Callable[[nn.Module], None], lines: Callable[[], list[str]]
) -> None:
    run = Run(on_exit=on_exit)
    with run.worker:
        run.count(6)
        load(run.model)
    assert run.agreed == [[4.0, 0.0]] * 2, "the two steps since the last exchange went with the weights"
    assert run.changes == [(6, 2)]
    held = [4.0, 0.0] if on_exit == "global" else [FAR_OFF, FAR_OFF]
    assert run.model.first.tolist() == held, "on_exit says what the model holds"
    assert len(lines()) == 1
    assert "on_exit" in lines()[0]


def test_a_forced_exchange_does_not_send_it_either() -> None:
    run = Run()
    with run.worker:
        run.count(6)
        by_data(run.model)
        run.worker.force_sync()
        assert run.model.first.tolist() == [4.0, 0.0]
        run.count(3)
    assert run.agreed == [[7.0, 0.0]] * 2


def test_the_others_go_on_as_if_nothing_had_been_loaded() -> None:
    """Two workers, one of which loads a checkpoint just before a round: it has nothing to contribute to it, and the
    round is the other's alone."""
    server = DiLoCoServer(TwoLedgers(2).state_dict(), num_workers=2, port=0, **PLAIN)
    server.service.start()
    models = [TwoLedgers(2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    workers = [memory_worker(server, f"w{i}", models[i], optimizers[i]) for i in range(2)]

    def work(i: int) -> None:
        with workers[i]:
            count(models[i], optimizers[i], i, 3)
            if i:
                by_state_dict(models[i])
            count(models[i], optimizers[i], i, 1)
            assert models[i].first.tolist() == [4.0, 0.0]

    in_threads(lambda: work(0), lambda: work(1))
    assert [value.tolist() for value in server.get_global_params().values()] == [[4.0, 0.0]] * 2


def test_what_the_codec_left_out_before_is_not_sent_any_more() -> None:
    run = Run({**PLAIN, "codec": "sparse64"})
    topology: Any = run.worker._topology
    with run.worker:
        run.count(4)
        topology._feedback._residuals["first"] = torch.tensor([0.0, 5.0])
        by_state_dict(run.model)
        run.count(4)
        left = topology._feedback.residual("first")
    assert left is None or left[1] == 0.0
    assert all(cells[1] == 0.0 for cells in run.agreed)


# --- announced, or back where they were -----------------------------------------------------------------------------


def test_a_change_that_is_announced_is_learning(lines: Callable[[], list[str]]) -> None:
    run = Run()

    def nudge() -> None:
        with torch.no_grad():
            for param in run.model.parameters():
                param[1] += 2.0

    with run.worker:
        announced = run.worker.own_change()(nudge)
        for _ in range(8):
            with run.worker.own_change():
                nudge()
            run.count(1)
        announced()
        run.count(1)
    assert run.agreed == [[9.0, 18.0]] * 2
    assert lines() == []
    assert run.metrics["outside_changes"] == 0


def test_an_announcement_covers_nothing_that_came_before_it() -> None:
    run = Run()
    with run.worker:
        run.count(1)
        by_state_dict(run.model)
        with run.worker.own_change(), torch.no_grad():
            run.model.first += 1.0
        run.count(1)
        assert run.model.first.tolist() == [0.0, 0.0]
        run.count(2)
    assert run.agreed == [[2.0, 0.0]] * 2


@pytest.mark.parametrize("exact", [True, False], ids=["copied", "averaged and back"])
def test_weights_that_are_swapped_out_and_back_have_not_changed(exact: bool, lines: Callable[[], list[str]]) -> None:
    """As for an evaluation of their running mean, or of the agreed weights."""
    run = Run()
    with run.worker:
        evaluate = run.worker.global_weights()(lambda: None)
        for _ in range(8):
            run.count(1)
            own = {name: value.clone() for name, value in run.model.state_dict().items()}
            by_state_dict(run.model)
            run.model.load_state_dict({name: value * (1.0 if exact else 1.0 + 1e-7) for name, value in own.items()})
            evaluate()
    assert [round(cells[0], 3) for cells in run.agreed] == [8.0, 8.0]
    assert lines() == []


def test_a_script_that_edits_its_weights_after_every_step_is_told_at_once() -> None:
    run = Run()

    def train() -> None:
        with run.worker:
            for _ in range(100):
                run.count(1)
                with torch.no_grad():
                    run.model.first += 1.0

    with pytest.raises(WorkerError, match="own_change"):
        train()
    assert run.metrics["local_step"] < 10
    assert run.agreed == [[0.0, 0.0]] * 2, "and nothing of it was sent"


def test_a_worker_may_be_told_to_keep_changes() -> None:
    run = Run(outside_changes="keep")
    with run.worker:
        for _ in range(8):
            with torch.no_grad():
                run.model.first[1] += 1.0
            run.count(1)
    assert run.agreed[0] == [8.0, 8.0]
    assert run.metrics["outside_changes"] == 0


def test_parameters_of_another_optimizer_are_its_own_to_move() -> None:
    run = Run()
    other = torch.optim.SGD([run.model.second], lr=1.0)
    run.optimizer.param_groups[0]["params"] = [run.model.first]
    with run.worker:
        for _ in range(8):
            run.model.second.grad = torch.tensor([0.0, -1.0])
            other.step()
            run.model.first.grad = torch.tensor([-1.0, 0.0])
            run.optimizer.step()
    assert run.agreed == [[8.0, 0.0], [0.0, 8.0]]


def test_a_state_that_is_saved_after_a_load_remembers_it() -> None:
    run = Run()
    run.worker.start()
    run.count(2)
    by_state_dict(run.model)
    state = run.worker.state_dict()
    run.worker.abandon("a power cut")
    again = memory_worker(run.server, "w0", run.model, run.optimizer)
    again.load_state_dict(state)
    with again:
        run.count(3)
    assert run.agreed == [[2.0, 0.0]] * 2
    assert again.sync_metrics["outside_changes"] == 1


def test_a_step_whose_exchange_failed_is_still_a_step() -> None:
    """An error that a script catches, and goes on."""
    run = Run()
    with run.worker:
        run.count(3)
        sending, run.worker._topology.begin = run.worker._topology.begin, broken  # type: ignore[method-assign]
        with pytest.raises(ExchangeFailed, match="of all times"):
            run.count(1)
        run.worker._topology.begin = sending  # type: ignore[method-assign]
        run.count(4)
    assert run.agreed == [[8.0, 0.0]] * 2
    assert run.metrics["outside_changes"] == 0


def broken(*args: object, **how: object) -> Ticket:
    raise ExchangeFailed("now, of all times")
