"""A worker in somebody else's trainer: when it may begin, what a checkpoint holds of it, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.errors import ConfigError, ModelError, OtherRun
from outerstep.integrations.trainer_worker import TrainerWorker, read_state, write_state
from outerstep.server import DiLoCoServer
from support import Books, Ledger, count, memory_topology

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}


_ends: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """A worker that goes on sending heartbeats would be heard by the tests after this one."""
    yield
    while _ends:
        _ends.pop()()


class Script:
    """A trainer: a model, its optimizer, and the worker in it."""

    def __init__(self, server: DiLoCoServer, **said: Any) -> None:
        self.model = Ledger(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.life = TrainerWorker({"topology": memory_topology(server, "w"), "worker_id": "w", **said})
        _ends.append(lambda: self.life.abandon("the test is over"))

    def begin(self) -> None:
        self.life.start(self.model, self.optimizer)

    def step(self, steps: int) -> None:
        count(self.model, self.optimizer, 0, steps)


def make_server() -> DiLoCoServer:
    server = DiLoCoServer(Ledger(1).state_dict(), 1, port=0, **PLAIN)
    server.service.start()
    _ends.append(server.service.stop)
    return server


def test_a_state_goes_through_a_file_and_a_worker_goes_on_from_it(tmp_path: Path) -> None:
    server = make_server()
    books = Books(server, ["w"])
    first = Script(server)
    first.begin()
    first.step(6)
    write_state(first.life.state_dict(), tmp_path / "outerstep.pt")
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    second = Script(server)
    second.model.load_state_dict(weights)
    second.life.load(read_state(tmp_path / "outerstep.pt"))
    second.begin()
    second.step(2)
    assert books.audit() == {"w": [8]}
    second.step(1)
    second.life.finish()
    assert books.audit() == {"w": [9]}
    assert second.life.state_dict() == {"format": 1, "worker": None}, "nothing is unsent"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outerstep.pt"]


def test_it_ends_once_and_an_abandoned_one_contributes_nothing() -> None:
    server = make_server()
    books = Books(server, ["w"])
    script = Script(server)
    script.life.finish()  # before it began
    script.begin()
    assert script.life.running is script.life.worker is not None
    script.step(5)
    script.life.abandon("a test says so")
    script.life.abandon("again")
    script.life.finish()
    assert script.life.running is None
    script.step(4)
    assert books.audit() == {"w": [4]}


def test_the_state_of_another_run_says_how_to_go_on_without_it() -> None:
    first = Script(make_server())
    first.begin()
    first.step(5)
    other = Script(make_server())
    other.model.load_state_dict(first.model.state_dict())
    other.life.load(first.life.state_dict())
    with pytest.raises(OtherRun) as refusal:
        other.begin()
    assert "resume_worker=False" in refusal.value.__notes__[0]


def test_metrics_are_numbers_and_the_loss_is_told() -> None:
    server = make_server()
    script = Script(server)
    assert script.life.metrics("x/") == {}
    script.life.report(1.0)  # nobody is there to hear it
    script.begin()
    script.life.report(torch.tensor(2.5))
    script.step(4)
    assert script.life.worker is not None
    assert script.life.worker.last_loss == 2.5
    shown = script.life.metrics("x/")
    assert (shown["x/round"], shown["x/local_step"]) == (1, 4)
    assert all(isinstance(value, int | float) for value in shown.values())


def test_the_end_that_a_trainer_knows_is_counted_in_steps_of_this_worker(tmp_path: Path) -> None:
    server = make_server()
    first = Script(server)
    first.life.start(first.model, first.optimizer, steps_left=10)
    assert first.life.worker is not None
    assert first.life.worker.config.total_steps == 10
    first.step(6)
    write_state(first.life.state_dict(), tmp_path / "outerstep.pt")
    second = Script(server)
    second.model.load_state_dict(first.model.state_dict())
    second.life.load(read_state(tmp_path / "outerstep.pt"))
    worker = second.life.start(second.model, second.optimizer, steps_left=4)
    assert worker.config.total_steps == 10, "six are in the state that it resumed from"
    second.life.finish()


@pytest.mark.parametrize(
    ("said", "steps_left", "total"),
    [({}, None, None), ({}, float("inf"), None), ({}, 0, None), ({}, 7.0, 7), ({"total_steps": 99}, 7, 99)],
)
def test_an_end_that_is_not_known_is_not_shown_and_what_the_script_says_goes_first(
    said: dict[str, int], steps_left: float | None, total: int | None
) -> None:
    script = Script(make_server(), **said)
    assert script.life.start(script.model, script.optimizer, steps_left).config.total_steps == total
    script.life.finish()


@pytest.mark.parametrize("state", [{}, {"format": 7, "worker": None}, {"format": 1}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a checkpoint holds a worker's state of format 1"):
        TrainerWorker({}).load(state)


def test_a_damaged_file_and_a_file_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "outerstep.pt"
    file.write_bytes(b"not a file of torch.save")
    with pytest.raises(ModelError, match=r"outerstep\.pt"):
        read_state(file)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match="must hold a worker's state, got list"):
        read_state(file)
