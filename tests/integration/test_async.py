"""Asynchronous runs: nobody waits for anybody. Delayed Nesterov, staleness, the grace window."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.core.outer import Nesterov
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.topology.server.client import DiLoCoClient
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import (
    Ledger,
    assert_same,
    count,
    in_threads,
    memory_worker,
    params_of,
    record_agreements,
    tiny_model,
    wait_until,
)

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "async_mode": True}


def async_server(num_workers: int, cells: int = 2, **settings: object) -> DiLoCoServer:
    made = DiLoCoServer(Ledger(cells).state_dict(), num_workers=num_workers, port=0, **{**PLAIN, **settings})
    made.service.start()
    return made


class Hand:
    """A worker moved by hand: in an asynchronous run it never waits, so one thread can lead several."""

    def __init__(self, server: DiLoCoServer, cell: int, cells: int = 2, **settings: object) -> None:
        self.model, self.cell = Ledger(cells), cell
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.worker: DiLoCoWorker = memory_worker(server, f"w{cell}", self.model, self.optimizer, **settings).start()

    def count(self, steps: int) -> None:
        count(self.model, self.optimizer, self.cell, steps)


def push_all(server: DiLoCoServer, gradients: list[dict[str, Tensor]], workers: int) -> list[dict[str, Tensor]]:
    """Push one after the other, the workers taking turns; the global weights after each push."""
    client = DiLoCoClient("memory", transport=MemoryTransport(server.service))
    for i in range(workers):
        client.register(f"w{i}", codec="fp32")
    return [client.submit_pseudogradients(f"w{i % workers}", g) for i, g in enumerate(gradients)]


def random_gradients(how_many: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    start = params_of(tiny_model())
    return [{n: torch.randn(w.shape, generator=source) for n, w in start.items()} for _ in range(how_many)]


# --- through real workers -------------------------------------------------------------------------------------------


def test_every_push_of_every_worker_is_counted_once_whatever_its_speed() -> None:
    """N = 4 and no momentum: each push moves the weights by a quarter of itself, exactly, on whole numbers."""
    server = async_server(3, cells=3, dn_buffer_size=4, sync_every=4)
    agreements = record_agreements(server)
    cycles = [9, 4, 1]
    all_here = threading.Barrier(3)
    the_fast_one_is_done = threading.Event()

    def work(cell: int) -> dict[str, object]:
        model = Ledger(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(server, f"w{cell}", model, optimizer) as worker:
            all_here.wait(30.0)
            count(model, optimizer, cell, 2)
            if cell == 2:  # in the middle of its only cycle while the fast one goes through all of its own
                assert the_fast_one_is_done.wait(30.0)
            count(model, optimizer, cell, 4 * cycles[cell] - 2)
            if cell == 0:
                the_fast_one_is_done.set()
        return worker.sync_metrics

    metrics = in_threads(*(lambda cell=cell: work(cell) for cell in range(3)))
    assert server.get_global_params()["cells"].tolist() == [4 * n / 4 for n in cycles]
    assert [m["sync_count"] for m in metrics] == cycles
    assert server.status()["total_submissions"] == server.sync_round == sum(cycles)
    assert all(len(agreement.participants) == 1 for agreement in agreements)  # a version for each push
    pushes = [agreement.participants[0] for agreement in agreements]
    assert Counter(p.worker_id for p in pushes) == {"w0": 9, "w1": 4, "w2": 1}
    slow = next(p for p in pushes if p.worker_id == "w2")
    assert slow.staleness >= 9  # what the others pushed meanwhile
    assert all(p.weight == 1.0 for p in pushes)  # staleness is logged, by default, and does not weigh


def test_staleness_is_the_number_of_versions_since_the_push_was_begun() -> None:
    server = async_server(2, sync_every=1)
    agreements = record_agreements(server)
    fast, slow = Hand(server, 0), Hand(server, 1)
    fast.count(3)
    slow.count(1)
    fast.count(1)
    found = [(a.version, a.participants[0].worker_id, a.participants[0].staleness) for a in agreements]
    assert found == [(1, "w0", 0), (2, "w0", 0), (3, "w0", 0), (4, "w1", 3), (5, "w0", 1)]
    member = server.service.coordinator.members.find("w1")
    assert member is not None
    assert (member.staleness, member.contributions) == (3, 1)
    fast.worker.stop()
    slow.worker.stop()


def test_a_worker_takes_over_what_the_others_pushed_with_its_own_push() -> None:
    server = async_server(2, sync_every=2)
    first, second = Hand(server, 0), Hand(server, 1)
    first.count(2)
    assert first.model.cells.tolist() == [1.0, 0.0]  # N = 2: half of it, now
    second.count(2)
    assert second.model.cells.tolist() == [1.0, 1.0]
    first.count(2)
    assert first.model.cells.tolist() == [2.0, 1.0]
    for hand in (first, second):
        hand.worker.stop()


def test_a_run_begins_with_the_first_worker() -> None:
    server = async_server(3, sync_every=2)
    alone = Hand(server, 0)
    alone.count(2)
    assert server.sync_round == 1
    alone.worker.stop()


# --- Delayed Nesterov -----------------------------------------------------------------------------------------------


def test_three_unit_gradients_without_momentum_move_the_weights_by_one_and_not_by_three() -> None:
    server = async_server(3, cells=1, sync_every=1)
    hands = []
    for i in range(3):  # each of them begins before anybody has pushed
        model = Ledger(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        hands.append((model, optimizer, memory_worker(server, f"w{i}", model, optimizer).start()))
    for model, optimizer, _ in hands:
        count(model, optimizer, 0, 1)
    assert server.sync_round == 3
    torch.testing.assert_close(server.get_global_params()["cells"], torch.ones(1))
    for *_, worker in hands:
        worker.stop()


@pytest.mark.parametrize("workers", [2, 4])
def test_n_pushes_are_one_nesterov_step_on_their_mean(workers: int) -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=workers, port=0, async_mode=True, codec="fp32")
    server.service.start()
    gradients = random_gradients(3 * workers)
    history = push_all(server, gradients, workers)
    theta = params_of(tiny_model())
    plain = Nesterov(0.7, 0.9)
    for buffer in range(3):
        pushed = gradients[buffer * workers : (buffer + 1) * workers]
        plain.step(theta, {name: torch.stack([g[name] for g in pushed]).mean(0) for name in theta})
        for name, value in theta.items():  # sums in another order
            torch.testing.assert_close(history[(buffer + 1) * workers - 1][name], value, rtol=0.0, atol=1e-5)
    assert server.sync_round == 3 * workers


def test_an_explicit_buffer_of_none_steps_the_outer_optimizer_at_every_push(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"async_mode": True, "dn_buffer_size": 0, "codec": "fp32"}
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **settings)
    assert "dn_buffer_size=0: the outer optimizer steps on every push" in caplog.text
    server.service.start()
    gradients = random_gradients(5)
    history = push_all(server, gradients, workers=2)
    reference = {name: torch.nn.Parameter(value) for name, value in params_of(tiny_model()).items()}
    sgd = torch.optim.SGD(reference.values(), lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    for g, after in zip(gradients, history, strict=True):
        for name, param in reference.items():
            param.grad = g[name]
        sgd.step()
        assert_same(after, {name: param.detach() for name, param in reference.items()})


def test_each_parameter_group_of_the_outer_sgd_keeps_its_own_rate() -> None:
    def groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        first = [{"params": params[:2], "lr": 1.0, "momentum": 0.5}]
        rest = [{"params": params[2:]}] if params[2:] else []
        return torch.optim.SGD(first + rest, lr=0.1, momentum=0.9, nesterov=True)

    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, async_mode=True, codec="fp32", outer_optimizer_factory=groups
    )
    server.service.start()
    gradients = random_gradients(4)
    after = push_all(server, gradients, workers=2)[-1]
    theta = params_of(tiny_model())
    names = list(theta)
    for chosen, plain in ((names[:2], Nesterov(1.0, 0.5)), (names[2:], Nesterov(0.1, 0.9))):
        part = {name: theta[name] for name in chosen}
        for pair in (gradients[:2], gradients[2:]):
            plain.step(part, {name: (pair[0][name] + pair[1][name]) / 2 for name in chosen})
    for name, value in theta.items():
        torch.testing.assert_close(after[name], value, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"outer_optimizer_factory": lambda params: torch.optim.Adam(params)}, "torch.optim.SGD, got Adam"),
        ({"outer_optimizer_factory": lambda params: torch.optim.SGD(params, momentum=0.9)}, "nesterov=False"),
        ({"nesterov": False}, r"nesterov=False with outer_momentum=0\.9: choose outer_momentum=0"),
        ({"dn_buffer_size": 3, "async_mode": False}, "needs async_mode"),
        ({"quorum": 2}, "async_mode is quorum 1"),
    ],
)
def test_what_delayed_nesterov_is_not_made_for_is_refused_at_construction(
    settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        DiLoCoServer(tiny_model().state_dict(), num_workers=3, port=0, **{"async_mode": True, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "outer_lr": 0.5, "outer_momentum": 0.0},
        {"outer_optimizer_factory": lambda params: torch.optim.SGD(params, lr=0.5)},
    ],
)
def test_without_momentum_there_is_nothing_to_delay(settings: dict[str, Any]) -> None:
    """Each push moves the weights by its N-th, and that is all."""
    server = DiLoCoServer(
        Ledger(1).state_dict(), num_workers=2, port=0, async_mode=True, codec="fp32", sync_every=4, **settings
    )
    server.service.start()
    hand = Hand(server, 0, cells=1)
    for pushes in range(1, 4):
        hand.count(4)
        assert server.get_global_params()["cells"].tolist() == [pushes * 4 * 0.5 / 2]


# --- the grace window -----------------------------------------------------------------------------------------------


def test_pushes_that_arrive_together_share_a_version_and_go_through_the_rule_one_by_one() -> None:
    server = async_server(3, cells=3, dn_buffer_size=4, sync_every=2, grace_period=1000.0, heartbeat_timeout=0.0)
    hands = [Hand(server, cell, cells=3) for cell in range(3)]
    agreements = record_agreements(server)
    hands[0].count(2)  # the run began with it alone: nobody to wait for
    assert server.get_global_params()["cells"].tolist() == [0.5, 0.0, 0.0]

    def closing() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["w0", "w1"])
        assert server.sync_round == 1  # the third may still come
        server.service.tick(server.service.clock() + 1001.0)  # it does not

    in_threads(lambda: hands[0].count(2), lambda: hands[1].count(2), closing)
    assert server.sync_round == 2
    assert server.get_global_params()["cells"].tolist() == [1.0, 0.5, 0.0]
    assert hands[0].model.cells.tolist() == hands[1].model.cells.tolist() == [1.0, 0.5, 0.0]
    assert {(p.worker_id, p.staleness) for p in agreements[1].participants} == {("w0", 0), ("w1", 1)}
    assert server.service.optimizer is not None
    assert server.service.optimizer.buffered(0) == 3  # type: ignore[union-attr]
    for hand in hands:
        hand.worker.abandon("over")


# --- age ------------------------------------------------------------------------------------------------------------


def test_the_weight_policy_scales_a_push_by_its_age() -> None:
    server = async_server(2, sync_every=1, staleness_policy="weight")
    agreements = record_agreements(server)
    fast, slow = Hand(server, 0), Hand(server, 1)
    fast.count(3)
    slow.count(1)
    late = agreements[-1].participants[0]
    assert (late.worker_id, late.staleness) == ("w1", 3)
    assert late.weight == pytest.approx(1 / math.sqrt(1 + 3))
    assert server.get_global_params()["cells"].tolist() == [1.5, 0.25]  # half of a half
    for hand in (fast, slow):
        hand.worker.stop()


def test_a_push_that_is_too_old_is_refused_and_its_worker_counts_the_loss() -> None:
    server = async_server(2, sync_every=2, max_staleness=1)
    fast, slow = Hand(server, 0), Hand(server, 1)
    slow.count(1)
    fast.count(4)  # two versions
    slow.count(1)
    assert slow.worker.sync_metrics["steps_discarded"] == 2
    assert slow.worker.sync_metrics["sync_count"] == 0
    assert slow.model.cells.tolist() == server.get_global_params()["cells"].tolist() == [2.0, 0.0]
    slow.count(2)  # and goes on from there
    assert server.get_global_params()["cells"].tolist() == [2.0, 1.0]
    for hand in (fast, slow):
        hand.worker.stop()
