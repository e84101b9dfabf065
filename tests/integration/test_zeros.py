"""Rounds of all-zero pseudo-gradients: the worker warns, the server has an event, and a frozen fragment is no alarm."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support import memory_worker, tiny_model, train_steps

from outerstep import DiLoCoServer
from outerstep.events import Event, NothingLearned, RoundReport

QUESTION = "Is the optimizer the one the model trains with?"


def run(
    make_optimizer: object, caplog: pytest.LogCaptureFixture, steps: int = 8, **settings: object
) -> tuple[list[NothingLearned], list[NothingLearned], list[str]]:
    """The events of the server, those of the worker, and what the worker warned of."""
    seen: list[Event] = []
    own: list[Event] = []
    model = tiny_model()
    server = DiLoCoServer(model.state_dict(), num_workers=1, port=0, sync_every=4, event_sink=seen.append, **settings)
    server.service.start()
    optimizer = make_optimizer(model)  # type: ignore[operator]
    with memory_worker(server, "w", model, optimizer, event_sink=own.append):
        train_steps(model, optimizer, steps, seed=1)
    server.service.stop()
    assert any(isinstance(event, RoundReport) for event in own), "rounds there were"
    said = [record.getMessage() for record in caplog.records if QUESTION in record.getMessage()]
    return (
        [event for event in seen if isinstance(event, NothingLearned)],
        [event for event in own if isinstance(event, NothingLearned)],
        said,
    )


def of_another_model(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)


@pytest.mark.parametrize("settings", [{}, {"num_fragments": 2}, {"async_mode": True}], ids=str)
def test_an_optimizer_of_another_model_is_noticed_at_both_ends_once(
    settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    server, worker, said = run(of_another_model, caplog, **settings)
    assert [event.worker for event in server] == [event.worker for event in worker] == ["w"]
    assert len(said) == 1
    assert "zeros worker=w" in caplog.text, "in the server's log, too"


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_an_optimizer_that_leaves_most_parameters_alone_is_fine(
    num_fragments: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Fragment 0, or most of the model, is frozen as far as the optimizer is concerned."""

    def of_the_last(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([list(model.parameters())[-1]], lr=0.1)

    assert run(of_the_last, caplog, num_fragments=num_fragments) == ([], [], [])


def test_a_healthy_run_hears_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    assert run(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), caplog) == ([], [], [])


@pytest.mark.parametrize("own", [True, False], ids=["its own optimizer", "another's"])
def test_running_means_that_move_by_themselves_hide_nothing(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    server = DiLoCoServer(model.state_dict(), num_workers=1, port=0, sync_every=2, num_fragments=2)
    server.service.start()
    optimizer = torch.optim.SGD((model if own else copy.deepcopy(model)).parameters(), lr=0.1)
    with memory_worker(server, "w", model, optimizer):
        train_steps(model, optimizer, 6, seed=1)
    server.service.stop()
    assert sum(QUESTION in record.getMessage() for record in caplog.records) == (not own)


def test_after_a_round_that_learned_something_it_is_said_anew(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    server = DiLoCoServer(model.state_dict(), num_workers=1, port=0, sync_every=2)
    server.service.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memory_worker(server, "w", model, optimizer):
        for lr in (0.0, 0.0, 0.1, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            train_steps(model, optimizer, 2, seed=1)
    server.service.stop()
    assert sum(QUESTION in record.getMessage() for record in caplog.records) == 2
