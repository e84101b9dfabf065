"""DiLoCoTrainer among peers: who agrees holds the same bits, and those that a server would come to."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from outerstep import RobustAggregator
from outerstep.errors import WorkerError
from outerstep.server import DiLoCoServer
from support import assert_same, in_threads, memory_topology, memory_worker, params_of, tiny_model, train_steps
from unit.worker.trainers import Grads, Hub, batches, gossip, make_trainer, train

HALF_ULP = 2.0**-24


# --- the same for everybody -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["mean", "trimmed_mean", "median", "centered_clipping", "geometric_median"])
def test_trainers_that_aggregate_the_same_list_hold_the_same_bits(aggregation: str) -> None:
    trainers = [make_trainer() for _ in range(4)]
    aggregators = [RobustAggregator(aggregation) for _ in trainers]
    hashes = set()
    for round_ in range(4):
        for i, trainer in enumerate(trainers):
            train(trainer, seed=10 * round_ + i)
            assert trainer.should_sync()
        gossip(trainers, aggregators)
        for other in trainers[1:]:
            assert_same(params_of(other.model), params_of(trainers[0].model))
        assert len({trainer.anchor_hash for trainer in trainers}) == 1
        assert [(trainer.step_count, trainer.should_sync()) for trainer in trainers] == [(0, False)] * 4
        hashes.add(trainers[0].anchor_hash)
    assert len(hashes) == 4  # it moved each time


def test_peers_that_are_asked_one_by_one_in_any_order_lead_to_the_same_bits() -> None:
    trainers = [make_trainer() for _ in range(3)]
    for i, trainer in enumerate(trainers):
        train(trainer, seed=i)
    aggregators = [RobustAggregator() for _ in trainers]

    async def all_of_them() -> None:
        hub = Hub(3)
        peers = [hub.peers_of(i, order=-1 if i == 1 else 1) for i in range(3)]
        await asyncio.gather(*(t.sync_with_peers(a, p) for t, a, p in zip(trainers, aggregators, peers, strict=True)))

    asyncio.run(all_of_them())
    assert len({trainer.anchor_hash for trainer in trainers}) == 1


def test_averaged_buffers_are_the_same_too_and_local_ones_are_not() -> None:
    for policy, same in (("average", True), ("local", False)):
        models = [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(3)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        trainers = [make_trainer(model, buffers=policy) for model in models]
        for i, trainer in enumerate(trainers):
            train(trainer, seed=i)
        statistics = [model[1].running_mean.clone() for model in models]
        gossip(trainers, [RobustAggregator("mean") for _ in trainers])
        assert torch.equal(models[0][1].running_mean, models[1][1].running_mean) == same
        if same:
            assert torch.allclose(models[0][1].running_mean, torch.stack(statistics).mean(0), atol=1e-6)
        assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_liar_among_five_is_refused_by_all_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    honest, attacked = ([make_trainer() for _ in range(5)] for _ in range(2))
    for i, (one, other) in enumerate(zip(honest, attacked, strict=True)):
        train(one, seed=i)
        train(other, seed=i)
    with torch.no_grad(), attacked[4].own_change():
        for param in attacked[4].model.parameters():
            param.mul_(1000.0)
    with caplog.at_level(logging.WARNING):
        gossip(attacked, [RobustAggregator("mean") for _ in attacked])
    assert "pseudo-gradient 5 of 5 is refused" in caplog.text
    gossip(honest[:4], [RobustAggregator("mean") for _ in honest[:4]])
    assert len({trainer.anchor_hash for trainer in (*attacked, *honest[:4])}) == 1


SAME_BITS = """
import asyncio, sys
import torch
from torch import nn
from outerstep import DiLoCoTrainer, RobustAggregator

torch.set_num_threads(int(sys.argv[1]))
source = torch.Generator().manual_seed(0)

def draw():  # whole numbers: torch draws others with other vectors
    return {name: torch.randint(-9999, 9999, shape, generator=source) / 8192 for name, shape in SHAPES.items()}

SHAPES = {"weight": (61, 57), "bias": (77,)}

class Gossip:
    async def gossip_round(self, local):
        return [draw() for _ in range(7)]

for rule in ("trimmed_mean", "centered_clipping"):
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in draw().items()})
    trainer = DiLoCoTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    aggregator = RobustAggregator(rule)
    for _ in range(3):
        assert asyncio.run(trainer.sync_with_peers(aggregator, Gossip()))
    print(rule, trainer.anchor_hash)
"""


@pytest.mark.slow
def test_the_bits_do_not_depend_on_a_machines_vectors_or_threads() -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_BITS, threads],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability}, stdout=subprocess.PIPE, text=True,
        )
        for capability, threads in (("default", "1"), ("avx2", "2"))
    ]  # fmt: skip
    first, second = (process.communicate()[0] for process in started)
    assert first.count("\n") == 2
    assert first == second


# --- the same as others ---------------------------------------------------------------------------------------------


def test_with_a_plain_outer_step_and_alone_it_is_the_plain_run_to_rounding() -> None:
    """θ′ = fl(a − fl(a − l)), as in golden/test_identity.py."""
    trainer = make_trainer(outer_lr=1.0, outer_momentum=0.0)
    aggregator = RobustAggregator("mean", min_peers=1)
    for round_ in range(6):
        anchor = {name: theta.clone() for name, theta in trainer.initial_weights.items()}
        train(trainer, seed=round_)
        plain = params_of(trainer.model)
        gossip([trainer], [aggregator])
        for name, theta in params_of(trainer.model).items():
            bound = HALF_ULP * ((anchor[name] - plain[name]).abs() * (1 + HALF_ULP) + theta.abs())
            assert ((theta - plain[name]).abs() <= bound).all()


@pytest.mark.parametrize(
    ("outer", "exact"),
    [({"outer_lr": 1.0, "outer_momentum": 0.5}, True), ({"outer_lr": 0.7, "outer_momentum": 0.9}, False)],
)
def test_two_trainers_come_to_what_a_server_comes_to(outer: dict[str, float], exact: bool) -> None:
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, codec="fp32", sync_every=4, deterministic=True, **outer
    )
    server.service.start()

    def work(i: int) -> Grads:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, f"w{i}", model, optimizer):
            train_steps(model, optimizer, 12, seed=i)
        return params_of(model)

    expected, _ = in_threads(lambda: work(0), lambda: work(1))
    trainers = [make_trainer(**outer) for _ in range(2)]
    aggregators = [RobustAggregator("mean", min_peers=2) for _ in trainers]
    streams = [batches(i, 12) for i in range(2)]
    for round_ in range(3):
        for trainer, stream in zip(trainers, streams, strict=True):
            for batch in stream[4 * round_ : 4 * round_ + 4]:
                trainer.train_step(batch)
        gossip(trainers, aggregators)
    for name, value in params_of(trainers[0].model).items():
        assert torch.equal(value, expected[name]) if exact else torch.allclose(value, expected[name], rtol=1e-5)


def test_with_a_server_the_same_loop_runs_on_a_worker() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, codec="fp32", sync_every=4)
    server.service.start()

    def work(i: int) -> tuple[Grads, dict[str, Any]]:
        trainer = make_trainer(
            inner_steps=None, server_addr="memory:1", topology=memory_topology(server, f"w{i}"), worker_id=f"w{i}"
        )
        with trainer:
            assert trainer.inner_steps == 4
            for batch in batches(i, 10):
                trainer.train_step(batch)
                assert not trainer.should_sync()
            assert trainer.step_count == 2
            assert trainer.compute_pseudo_gradient().keys() == params_of(trainer.model).keys()
            with pytest.raises(WorkerError, match="inside train_step"):
                asyncio.run(trainer.sync_with_peers(RobustAggregator(), []))
        return params_of(trainer.model), trainer.sync_metrics

    (first, metrics), (second, _) = in_threads(lambda: work(0), lambda: work(1))
    assert_same(first, second)
    assert_same(first, server.get_global_params())
    assert metrics["local_step"] == 10
    assert metrics["loss_after_sync"] is not None
