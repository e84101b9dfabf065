"""Fragments that travel while training goes on: two real workers against the algorithm written out in a few lines.

The reference (`reference_run`) knows nothing of servers, versions or threads: it moves both replicas step by step,
sends fragment p after step ⌊(p+1)·H/P⌋ of each cycle and lands it τ steps later.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from outerstep.core.fragments import FragmentManager
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Offer, Request
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import (
    EAGER,
    TwoLedgers,
    assert_same,
    count,
    in_threads,
    memory_topology,
    memory_worker,
    params_of,
    tiny_model,
    train_steps,
    wait_until,
)

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
INNER_LR = 0.05
CYCLES = 4
WORKERS = 2

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    fragments: int
    sync_every: int
    delay: int
    alpha: float = 0.0
    carry: bool = False

    @property
    def steps(self) -> int:
        return CYCLES * self.sync_every

    def __str__(self) -> str:
        kept = "carry" if self.carry else f"α{self.alpha:g}"
        return f"P{self.fragments} H{self.sync_every} τ{self.delay} {kept}"


@dataclass
class History:
    """Local weights after every step, per worker; global weights of every fragment after every round."""

    local: list[list[Weights]] = field(default_factory=lambda: [[] for _ in range(WORKERS)])
    rounds: dict[tuple[int, int], Weights] = field(default_factory=dict)  # (fragment, version)


def gradients(worker: int, step: int, weights: Weights) -> Weights:
    """They pull towards zero, plus noise of this worker's own: where a replica stands matters for where it goes."""
    source = torch.Generator().manual_seed(1000 * worker + step)
    return {name: 0.1 * w + torch.randn(w.shape, generator=source) for name, w in weights.items()}


# --- the algorithm, written out -------------------------------------------------------------------------------------


def reference_run(case: Case, start: Weights, fragments: list[list[str]]) -> History:
    history = History()
    local = [{name: w.clone() for name, w in start.items()} for _ in range(WORKERS)]
    theta = {name: w.clone() for name, w in start.items()}  # the anchor: one for both, they are in lock-step
    buf: Weights = {}
    version = [0] * len(fragments)
    under_way: dict[int, tuple[int, Weights, list[Weights]]] = {}  # fragment -> lands at, θ′, local weights when sent
    send_at = {(p + 1) * case.sync_every // case.fragments: p for p in range(case.fragments)}

    def land(p: int) -> None:
        _, agreed, sent = under_way.pop(p)
        for name in fragments[p]:
            for worker in range(WORKERS):
                now = local[worker][name]
                if case.carry:
                    local[worker][name] = agreed[name] + (now - sent[worker][name])
                elif case.alpha:
                    local[worker][name] = case.alpha * now + (1.0 - case.alpha) * agreed[name]
                else:
                    local[worker][name] = agreed[name].clone()
            theta[name] = agreed[name].clone()

    def send(p: int, step: int) -> None:
        agreed: Weights = {}
        for name in fragments[p]:
            g = (theta[name] - local[0][name] + (theta[name] - local[1][name])) / 2
            buf[name] = OUTER_MOMENTUM * buf[name] + g if name in buf else g
            agreed[name] = theta[name].add(g.add(buf[name], alpha=OUTER_MOMENTUM), alpha=-OUTER_LR)
        version[p] += 1
        history.rounds[p, version[p]] = agreed
        sent = [{name: local[worker][name].clone() for name in fragments[p]} for worker in range(WORKERS)]
        under_way[p] = (step + case.delay, agreed, sent)

    for step in range(1, case.steps + 1):
        for worker in range(WORKERS):
            for name, grad in gradients(worker, step, local[worker]).items():
                local[worker][name] = local[worker][name].add(grad, alpha=-INNER_LR)
        for p in [p for p, (lands_at, *_) in under_way.items() if lands_at == step]:
            land(p)
        due = send_at.get((step - 1) % case.sync_every + 1)
        if due is not None:
            send(due, step)
            if case.delay == 0:
                land(due)
        for worker in range(WORKERS):
            history.local[worker].append({name: w.clone() for name, w in local[worker].items()})
    return history


# --- the same with workers and a server -----------------------------------------------------------------------------


def real_run(case: Case) -> tuple[History, DiLoCoServer, list[nn.Module]]:
    server = DiLoCoServer(
        tiny_model().state_dict(),
        num_workers=WORKERS,
        port=0,
        codec="fp32",
        sync_every=case.sync_every,
        num_fragments=case.fragments,
        fragment_delay=case.delay,
        fragment_alpha=case.alpha,
        fragment_carry=case.carry,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
    )
    history = History()
    announce = server.service.coordinator.published

    def record(agreement, now: float) -> None:  # type: ignore[no-untyped-def]
        params = server.service.stores[agreement.fragment].params()
        history.rounds[agreement.fragment, agreement.version] = {name: p.clone() for name, p in params.items()}
        announce(agreement, now)

    server.service.coordinator.published = record  # type: ignore[method-assign]
    server.service.start()

    def work(i: int) -> nn.Module:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR, foreach=False)
        with memory_worker(server, f"w{i}", model, optimizer) as worker:
            for step in range(1, case.steps + 1):
                grads = gradients(i, step, params_of(model))
                for name, param in model.named_parameters():
                    param.grad = grads[name]
                optimizer.step()
                history.local[i].append(params_of(model))
            in_the_air = {f: flight.land_at for f, flight in worker._started.machine.in_flight.items()}
            assert all(step < land_at for land_at in in_the_air.values())
        return model

    models = in_threads(*(lambda i=i: work(i) for i in range(WORKERS)))
    server.service.stop()
    return history, server, models


def compare(case: Case, close: float) -> History:
    """`close` = 0: bit for bit."""
    real, server, models = real_run(case)
    fragments = FragmentManager(tiny_model(), case.fragments).fragments
    expected = reference_run(case, params_of(tiny_model()), fragments)
    for worker in range(WORKERS):
        assert len(real.local[worker]) == case.steps
        for step, (got, wanted) in enumerate(zip(real.local[worker], expected.local[worker], strict=True), 1):
            for name, value in wanted.items():
                torch.testing.assert_close(
                    got[name], value, rtol=0.0, atol=close, msg=f"{name} of worker {worker} after step {step}"
                )
    assert expected.rounds.keys() <= real.rounds.keys()  # the clean exit adds a round per fragment
    for key, agreed in expected.rounds.items():
        for name, value in agreed.items():
            torch.testing.assert_close(real.rounds[key][name], value, rtol=0.0, atol=close, msg=f"{name} in {key}")
    for model in models:
        assert_same(params_of(model), server.get_global_params())
    return real


EXACT = [
    Case(2, 6, 0),
    Case(2, 6, 0, alpha=0.5),
    Case(2, 6, 0, alpha=1.0),
    Case(2, 6, 1),
    Case(2, 6, 1, alpha=0.5),
    Case(2, 6, 1, alpha=1.0),
    Case(3, 7, 2),  # sent after steps 2, 4 and 7: the third lands in the next cycle
    Case(3, 7, 2, alpha=0.5),
    Case(2, 6, 4),  # τ > H/P: two fragments in the air at once
    Case(3, 6, 5, alpha=0.5),  # three
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_two_workers_make_the_history_of_the_algorithm_bit_for_bit(case: Case) -> None:
    compare(case, close=0.0)


@pytest.mark.parametrize(
    "case", [Case(2, 6, 1, carry=True), Case(3, 7, 2, carry=True), Case(2, 6, 4, carry=True)], ids=str
)
def test_delta_carry_makes_the_history_of_the_algorithm_to_rounding(case: Case) -> None:
    """θ′ + (l − l_sent) is computed as l + (θ′ − θ) + (θ − l_sent), which needs no copy of l_sent beside the delta that
    was sent: the same number, rounded three times instead of twice, at weights of about one."""
    compare(case, close=2e-6)


def test_with_a_delay_the_global_weights_depend_on_what_is_kept_of_the_local_steps() -> None:
    """The cases above would prove little if they were all the same history."""
    start, fragments = params_of(tiny_model()), FragmentManager(tiny_model(), 2).fragments
    cases = [
        Case(2, 6, 0),
        Case(2, 6, 1),
        Case(2, 6, 1, alpha=0.5),
        Case(2, 6, 1, alpha=1.0),
        Case(2, 6, 1, carry=True),
    ]
    ends = [reference_run(case, start, fragments).rounds[0, CYCLES] for case in cases]
    for i, left in enumerate(ends):
        for right in ends[i + 1 :]:
            assert any((left[name] - right[name]).abs().max() > 1e-3 for name in left)


class Gated(MemoryTransport):
    """Holds the offers of some fragments back until their gate is opened."""

    def __init__(self, server: DiLoCoServer, *closed: int) -> None:
        super().__init__(server.service)
        self.gates = {fragment: threading.Event() for fragment in closed}

    def call(self, request: Request, **buffers: object) -> Answer:
        if isinstance(request, Offer) and request.fragment in self.gates:
            assert self.gates[request.fragment].wait(60.0)
        return super().call(request, **buffers)  # type: ignore[arg-type]


def test_a_fragment_on_its_way_is_not_taken_over_before_its_step() -> None:
    """Another worker waits for it, and this one waits for another fragment of that worker: still no reason to land it
    early, for it is on its way already. (Landing when somebody happens to ask would make histories a matter of luck.)
    """
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, codec="fp32", sync_every=6, num_fragments=2, fragment_delay=4
    )
    server.service.start()
    transports = [Gated(server, 0), Gated(server, 1)]
    reached = threading.Event()

    def work(i: int) -> list[int]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        topology = memory_topology(server, f"w{i}", transports[i])
        worker = DiLoCoWorker(model, optimizer, "memory:1", topology=topology, worker_id=f"w{i}").start()
        train_steps(model, optimizer, 7, seed=i)  # fragment 0 lands, fragment 1 was sent one step ago
        versions = list(worker.sync_metrics["versions"])  # type: ignore[call-overload]
        if i == 1:
            reached.set()
        wait_until(reached.is_set)
        worker.abandon("over")
        return versions

    def watch() -> None:
        wait_until(lambda: [f.round.contributors for f in server.service.coordinator.fragments] == [{"w1"}, {"w0"}])
        asked = server.service.coordinator.members.find("w1")
        assert asked is not None
        seen = asked.last_seen
        wait_until(lambda: asked.last_seen > seen + EAGER.poll_wait_s)  # w1 has been told that w0 waits at fragment 1
        transports[0].gates[0].set()
        wait_until(reached.is_set)
        transports[1].gates[1].set()

    *versions, _ = in_threads(lambda: work(0), lambda: work(1), watch)
    assert versions == [[1, 0], [1, 0]]
    server.service.stop()


# --- nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_with_delta_carry_no_local_step_is_lost(delay: int) -> None:
    """Outer step: adopt the mean. Then half of every step of both workers is in the end in both fragments, exactly."""
    server = DiLoCoServer(
        TwoLedgers().state_dict(),
        num_workers=2,
        port=0,
        sync_every=6,
        num_fragments=2,
        fragment_delay=delay,
        fragment_carry=True,
        codec="fp32",
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    server.service.start()

    def work(cell: int) -> tuple[TwoLedgers, dict[str, object]]:
        model = TwoLedgers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(server, f"w{cell}", model, optimizer) as worker:
            count(model, optimizer, cell, 20)  # three cycles and two steps: the exit finds steps unsent and in the air
        return model, worker.sync_metrics

    for model, metrics in in_threads(lambda: work(0), lambda: work(1)):
        assert model.first.tolist() == model.second.tolist() == [10.0, 10.0]
        assert (metrics["steps_overwritten"], metrics["steps_discarded"]) == (0, 0)
    assert_same(server.get_global_params(), {"first": torch.full((2,), 10.0), "second": torch.full((2,), 10.0)})
    server.service.stop()


def test_without_carry_the_steps_taken_meanwhile_are_counted_as_overwritten() -> None:
    server = DiLoCoServer(
        TwoLedgers().state_dict(),
        num_workers=1,
        port=0,
        sync_every=6,
        num_fragments=2,
        fragment_delay=2,
        fragment_carry=False,
        codec="fp32",
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    server.service.start()
    model = TwoLedgers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, "w", model, optimizer) as worker:
        count(model, optimizer, 0, 12)
        assert worker.sync_metrics["steps_overwritten"] == 3 * 2  # the fourth fragment is still in the air
    assert worker.sync_metrics["steps_overwritten"] == 3 * 2  # nothing was done since that one was sent
    assert server.get_global_params()["first"].tolist() == [12.0 - 2 * 2, 0.0]
    assert server.get_global_params()["second"].tolist() == [12.0 - 2, 0.0]
    server.service.stop()
