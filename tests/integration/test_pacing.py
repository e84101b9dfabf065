"""Workers of unequal speed: the server gives each its own number of steps between exchanges."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from amounts import mostly_slow
from outerstep.errors import BadRequest
from outerstep.server import DiLoCoServer
from outerstep.types import Heartbeat, HeartbeatAnswer
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import HandClient, Ledger, count, in_threads, memory_topology, tiny_model, train_steps

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


def paced_server(num_workers: int, **settings: object) -> DiLoCoServer:
    made = DiLoCoServer(
        tiny_model().state_dict(), num_workers=num_workers, port=0, **{**PLAIN, "dylu_enabled": True, **settings}
    )
    made.service.start()
    return made


def beat(client: HandClient, steps_per_second: float) -> int | None:
    answer = client.transport.call(Heartbeat(**client.session.head, step=1, steps_per_second=steps_per_second))
    assert isinstance(answer, HeartbeatAnswer)
    return answer.sync_every


@pytest.mark.parametrize(("fragments", "expected"), [(1, [100, 50, 29, 1]), (3, [100, 50, 29, 3])])
def test_each_worker_gets_steps_in_proportion_to_its_speed(fragments: int, expected: list[int]) -> None:
    server = paced_server(4, sync_every=100, num_fragments=fragments)
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(4)]
    speeds = [20.0, 10.0, 5.8, 0.001]
    for client in clients:
        client.join()
        assert beat(client, 0.0) is None  # not known yet: as the plan says
    for client, speed in zip(clients, speeds, strict=True):
        beat(client, speed)
    assert [beat(client, speed) for client, speed in zip(clients, speeds, strict=True)] == expected


def test_the_base_may_be_another_than_the_plans() -> None:
    server = paced_server(2, sync_every=10, dylu_base_sync_every=40)
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(2)]
    for client in clients:
        client.join()
    assert beat(clients[0], 8.0) == 40
    assert beat(clients[1], 2.0) == 10


def test_a_worker_that_has_left_is_not_the_fastest_any_more() -> None:
    server = paced_server(2, sync_every=10)
    fast, slow = (memory_topology(server, name) for name in ("fast", "slow"))
    for topology in (fast, slow):
        topology.join(None, DiLoCoWorker(tiny_model(), torch.optim.SGD([torch.zeros(1)]), "http://h:1").config.wishes)
    fast.heartbeat(1, 100.0, None)
    slow.heartbeat(1, 10.0, None)
    assert slow.orders(at_exchange=False).sync_every == 1
    fast.leave("done")
    slow.heartbeat(2, 10.0, None)
    assert slow.orders(at_exchange=False).sync_every == 10


@pytest.mark.parametrize("speed", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_not_a_speed_is_refused(speed: float) -> None:
    server = paced_server(1, sync_every=10)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    with pytest.raises(BadRequest) as caught:
        beat(client, speed)
    assert caught.value.status == 400
    assert server.status()["workers"]["by-hand"]["steps_per_second"] == 0.0  # type: ignore[index]


class Paced:
    """A real worker whose heartbeats the test sends."""

    def __init__(self, server: DiLoCoServer, name: str, **settings: object) -> None:
        self.model = tiny_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.topology = memory_topology(server, name)
        self.worker = DiLoCoWorker(
            self.model,
            self.optimizer,
            "memory:1",
            worker_id=name,
            topology=self.topology,
            heartbeat_interval=0.0,
            **settings,  # type: ignore[arg-type]
        ).start()

    def train(self, steps: int) -> None:
        train_steps(self.model, self.optimizer, steps, seed=1)


def test_a_worker_adopts_its_own_h_with_its_next_cycle() -> None:
    server = paced_server(2, sync_every=6, async_mode=True)
    slow, fast = Paced(server, "slow"), Paced(server, "fast")
    slow.train(2)
    fast.topology.heartbeat(1, 9.0, None)
    slow.topology.heartbeat(2, 3.0, None)
    slow.train(3)
    assert (slow.worker.sync_every, server.sync_round) == (6, 0)  # the cycle that it is in stays as it was
    slow.train(1)
    assert (slow.worker.sync_every, server.sync_round) == (2, 1)
    slow.train(2)
    assert server.sync_round == 2
    fast.train(5)
    assert server.sync_round == 2
    fast.train(1)
    assert (fast.worker.sync_every, server.sync_round) == (6, 3)
    for paced in (slow, fast):
        paced.worker.stop()


def test_a_worker_that_declines_keeps_its_h() -> None:
    server = paced_server(2, sync_every=6, async_mode=True)
    slow, fast = Paced(server, "slow", dylu=False), Paced(server, "fast")
    fast.topology.heartbeat(1, 9.0, None)
    slow.topology.heartbeat(1, 3.0, None)
    slow.train(12)
    assert (slow.worker.sync_every, server.sync_round) == (6, 2)
    for paced in (slow, fast):
        paced.worker.stop()


@pytest.mark.parametrize(
    ("asked", "given", "warned"), [(True, False, True), (True, True, False), (None, False, False), (False, True, False)]
)
def test_who_asks_for_what_the_run_does_not_do_is_told_so(
    asked: bool | None, given: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    paced = Paced(paced_server(1, sync_every=6, dylu_enabled=given), "w", dylu=asked)
    assert ("the run has none (start the server with --dylu)" in caplog.text) is warned
    paced.worker.abandon("over")


def test_the_speed_is_of_training_and_survives_an_exchange() -> None:
    """Two seconds a step, an hour for the exchange: half a step per second, before, right after, and later."""
    server = paced_server(1, sync_every=4)
    paced = Paced(server, "w")
    now = [0.0]
    paced.worker._clock = lambda: now[0]
    paced.worker._resumed_at = 0.0
    exchange = paced.worker._started.stepped

    def slow_exchange(**how: bool) -> bool:
        exchanged = exchange(**how)
        now[0] += 3600.0 if exchanged else 0.0
        return exchanged

    paced.worker._started.stepped = slow_exchange  # type: ignore[method-assign]
    speeds = []
    for _ in range(9):
        now[0] += 2.0
        paced.train(1)
        speeds.append(paced.worker.steps_per_second)
    assert server.sync_round == 2
    assert speeds == pytest.approx([0.5] * 9)
    paced.worker.stop()


@pytest.mark.parametrize("delay", mostly_slow([0, 1], [0]))
def test_very_different_h_with_synchronous_fragments_never_wait_in_a_circle(delay: int) -> None:
    server = paced_server(3, sync_every=12, num_fragments=3, fragment_delay=delay)
    speeds = [12.0, 5.0, 0.1]
    here, known = threading.Barrier(3), threading.Barrier(3)

    def work(i: int) -> tuple[int, list[int]]:
        paced = Paced(server, f"w{i}")
        here.wait(30.0)
        paced.topology.heartbeat(0, speeds[i], None)
        known.wait(30.0)
        paced.topology.heartbeat(0, speeds[i], None)
        assigned = paced.topology.orders(at_exchange=False).sync_every
        paced.worker._started.machine.state.cycle.assigned = assigned
        paced.worker._started.machine.state.cycle.begin(paced.worker.plan)
        own = paced.worker.sync_every
        paced.train(18)
        paced.worker.stop()
        return own, list(paced.worker.sync_metrics["versions"])  # type: ignore[call-overload]

    found = in_threads(*(lambda i=i: work(i) for i in range(3)))
    assert [own for own, _ in found] == [12, 5, 3]
    assert all(min(versions) >= 2 for _, versions in found)


def test_every_step_counts_once_when_each_worker_has_its_own_h() -> None:
    """An exact ledger: N = 2, no momentum, whole numbers; one worker pushes three times as often as the other."""
    server = DiLoCoServer(
        Ledger().state_dict(),
        num_workers=2,
        port=0,
        **{**PLAIN, "async_mode": True, "dylu_enabled": True, "sync_every": 6},
    )
    server.service.start()
    topologies = [memory_topology(server, f"w{i}") for i in range(2)]
    models = [Ledger(), Ledger()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    workers = [
        DiLoCoWorker(m, o, "memory:1", worker_id=f"w{i}", topology=t, heartbeat_interval=0.0).start()
        for i, (m, o, t) in enumerate(zip(models, optimizers, topologies, strict=True))
    ]
    for topology, speed in zip(topologies, (3.0, 1.0), strict=True):
        topology.heartbeat(0, speed, None)
    for _ in range(12):
        for cell in (0, 1):
            count(models[cell], optimizers[cell], cell, 1)
    for worker in workers:
        worker.stop()
    assert server.get_global_params()["cells"].tolist() == [6.0, 6.0]
    assert [worker.sync_metrics["sync_count"] for worker in workers] == [2, 1 + 3]
