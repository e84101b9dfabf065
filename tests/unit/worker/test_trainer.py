"""DiLoCoTrainer among peers: who agrees holds the same bits, and nothing is lost when they do not."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outerstep
from outerstep import DiLoCoTrainer, RobustAggregator
from outerstep.errors import ConfigError, ExchangeFailed, ModelError, WorkerError
from outerstep.server import DiLoCoServer
from support import assert_same, in_threads, memory_topology, memory_worker, params_of, tiny_model, train_steps

HALF_ULP = 2.0**-24
Grads = dict[str, Tensor]


class Hub:
    """A gossip in memory: waits for all, gives everybody the same list."""

    def __init__(self, count: int) -> None:
        self._meeting, self.offered = asyncio.Barrier(count), [{} for _ in range(count)]

    def seat(self, i: int) -> SimpleNamespace:
        async def gossip_round(local: Grads) -> Sequence[Grads]:
            self.offered[i] = {name: tensor.clone() for name, tensor in local.items()}
            await self._meeting.wait()
            collected = list(self.offered)
            await self._meeting.wait()
            return collected

        return SimpleNamespace(gossip_round=gossip_round)

    def peers_of(self, i: int, order: int = 1) -> list[SimpleNamespace]:
        """The same asked one by one, in this rank's own order."""
        here = asyncio.Event()
        arrived: list[int] = []

        def peer(other: int) -> SimpleNamespace:
            async def exchange_gradients(local: Grads) -> Grads:
                if not arrived:
                    arrived.append(i)
                    self.offered[i] = local
                    await self._meeting.wait()
                    here.set()
                await here.wait()
                return self.offered[other]

            return SimpleNamespace(id=f"peer-{other}", exchange_gradients=exchange_gradients)

        return [peer(other) for other in range(len(self.offered))[::order] if other != i]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def make_trainer(model: nn.Module | None = None, lr: float = 0.05, **settings: Any) -> DiLoCoTrainer:
    model = model or tiny_model()
    settings = {"inner_steps": 4, "loss_fn": loss_of, **settings}
    return DiLoCoTrainer(model, torch.optim.SGD(model.parameters(), lr=lr), **settings)


def batches(seed: int, count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, generator=source) for _ in range(count)]


def train(trainer: DiLoCoTrainer, seed: int, count: int = 4) -> None:
    for batch in batches(seed, count):
        trainer.train_step(batch)


def together(trainers: list[DiLoCoTrainer], aggregators: list[RobustAggregator], peers: list[Any]) -> list[bool]:
    async def all_of_them() -> list[bool]:
        rounds = zip(trainers, aggregators, peers, strict=True)
        return await asyncio.gather(*(t.sync_with_peers(a, p) for t, a, p in rounds))

    return asyncio.run(all_of_them())


def gossip(trainers: list[DiLoCoTrainer], aggregators: list[RobustAggregator]) -> list[Grads]:
    """One round; what was contributed."""
    hub = Hub(len(trainers))
    assert all(together(trainers, aggregators, [hub.seat(i) for i in range(len(trainers))]))
    return hub.offered


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
    with torch.no_grad():
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


# --- when it does not come to an agreement --------------------------------------------------------------------------


class Failing:
    id = "the-dead-one"

    async def exchange_gradients(self, local: Grads) -> Grads:
        raise ConnectionResetError("gone")


class Saying:
    """A peer that says this, whatever it hears."""

    def __init__(self, said: Any) -> None:
        self.said = said

    async def exchange_gradients(self, local: Grads) -> Any:
        return self.said


def sync(trainer: DiLoCoTrainer, aggregator: RobustAggregator, peers: Any) -> bool:
    return asyncio.run(trainer.sync_with_peers(aggregator, peers))


def test_a_peer_that_fails_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    train(trainer, 0)
    theirs = {name: delta * 0.5 for name, delta in trainer.compute_pseudo_gradient().items()}
    with caplog.at_level(logging.WARNING):
        assert sync(trainer, RobustAggregator("mean", min_peers=2), [Failing(), Saying(theirs)])
    assert "no pseudo-gradient from the-dead-one: ConnectionResetError: gone" in caplog.text
    assert trainer.sync_metrics["sync_count"] == 1


def test_with_too_few_nothing_moves_and_the_steps_go_into_the_next_sync(caplog: pytest.LogCaptureFixture) -> None:
    trainer, aggregator = make_trainer(outer_lr=1.0, outer_momentum=0.0), RobustAggregator("mean", min_peers=2)
    anchor = {name: theta.clone() for name, theta in trainer.initial_weights.items()}
    train(trainer, 0)
    before = params_of(trainer.model)
    with caplog.at_level(logging.WARNING):
        assert not sync(trainer, aggregator, [Failing()])
    assert "1 contributions, where min_peers is 2; 4 steps are kept" in caplog.text
    assert_same(params_of(trainer.model), before)
    assert_same(trainer.initial_weights, anchor)
    assert trainer.step_count == 4
    assert not trainer.should_sync()  # not at once
    train(trainer, 1, 3)
    assert not trainer.should_sync()
    train(trainer, 2, 1)
    assert trainer.should_sync()
    sent = trainer.compute_pseudo_gradient()
    assert_same(sent, {name: anchor[name] - value for name, value in params_of(trainer.model).items()})
    assert sync(trainer, aggregator, [Saying(sent)])
    assert (trainer.step_count, trainer.sync_metrics["failed_syncs"]) == (0, 1)
    train(trainer, 3)
    assert trainer.should_sync()  # and after an agreement it is the usual number again


def test_a_gossip_that_fails_is_a_round_that_came_to_nothing() -> None:
    class Broken:
        async def gossip_round(self, local: Grads) -> list[Grads]:
            raise ExchangeFailed("no majority")

    trainer = make_trainer()
    train(trainer, 0)
    assert not sync(trainer, RobustAggregator(), Broken())
    assert trainer.step_count == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: {k: v for k, v in d.items() if k != "0.bias"}, "'0.bias' must be a floating point tensor"),
        (lambda d: {**d, "0.bias": torch.zeros(7)}, r"'0.bias' must be .* of shape \[5\], got \[7\]"),
        (lambda d: {**d, "0.bias": d["0.bias"].long()}, "'0.bias' must be a floating point tensor"),
        (lambda d: {**d, "other": torch.zeros(1)}, "'other' is not trained here"),
        (lambda d: list(d.values()), "it must be a mapping from names to tensors, got list"),
        (lambda d: None, "1 contributions, where min_peers is 2"),
    ],
)
def test_what_is_not_of_this_model_is_left_out(change: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    train(trainer, 0)
    with caplog.at_level(logging.WARNING):
        wrong = Saying(change(trainer.compute_pseudo_gradient()))
        assert not sync(trainer, RobustAggregator("mean", min_peers=2), [wrong])
    assert re.search(said, caplog.text)


def test_contributions_of_another_dtype_or_order_of_names_count() -> None:
    trainer = make_trainer(outer_lr=1.0, outer_momentum=0.0)
    train(trainer, 0)
    own = trainer.compute_pseudo_gradient()
    theirs = {name: delta.double() * 3 for name, delta in reversed(own.items())}
    start = {name: theta.clone() for name, theta in trainer.initial_weights.items()}
    assert sync(trainer, RobustAggregator("mean", min_peers=2), [Saying(theirs)])
    for name, value in params_of(trainer.model).items():
        assert torch.allclose(value, start[name] - 2 * own[name], atol=1e-6), name


def test_something_that_is_no_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gossip_round.*exchange_gradients.*got str"):
        sync(make_trainer(), RobustAggregator(), ["host:1"])


def test_a_trainer_whose_weights_are_spoilt_is_healed_by_the_others() -> None:
    models = [tiny_model() for _ in range(4)]
    trainers = [
        DiLoCoTrainer(model, torch.optim.Adam(model.parameters()), inner_steps=2, loss_fn=loss_of) for model in models
    ]
    for i, trainer in enumerate(trainers):
        train(trainer, seed=i, count=2)
    trainers[3].train_step(torch.full((8, 6), float("nan")))
    gossip(trainers, [RobustAggregator("mean") for _ in trainers])
    assert len({trainer.anchor_hash for trainer in trainers}) == 1
    train(trainers[3], seed=9, count=2)
    assert all(bool(param.isfinite().all()) for param in models[3].parameters())
    assert trainers[3].sync_metrics["pseudo_grad_norm"] is None


def test_if_nobody_is_finite_nothing_moves() -> None:
    trainer = make_trainer()
    trainer.train_step(torch.full((8, 6), float("nan")))
    assert not sync(trainer, RobustAggregator("mean", min_peers=1), [])


# --- meanwhile and afterwards ---------------------------------------------------------------------------------------


def test_steps_taken_while_the_sync_is_awaited_belong_to_the_next_cycle() -> None:
    trainer, twin = make_trainer(), make_trainer()
    for one in (trainer, twin):
        train(one, 0)
    sent = trainer.compute_pseudo_gradient()

    class Slow:
        async def gossip_round(self, local: Grads) -> list[Grads]:
            train(trainer, 1, 2)
            return [local]

    alone = RobustAggregator("mean", min_peers=1)
    assert sync(trainer, alone, Slow())
    gossip([twin], [RobustAggregator("mean", min_peers=1)])
    assert trainer.anchor_hash == twin.anchor_hash
    assert trainer.step_count == 2
    late = make_trainer()
    train(late, 0)
    train(late, 1, 2)
    for name, delta in trainer.compute_pseudo_gradient().items():  # the two steps, and nothing else
        assert torch.allclose(delta, late.compute_pseudo_gradient()[name] - sent[name], atol=1e-6)


def test_one_sync_at_a_time() -> None:
    trainer, alone = make_trainer(), RobustAggregator("mean", min_peers=1)
    train(trainer, 0)

    async def twice() -> None:
        let_go = asyncio.Event()

        class Waiting:
            async def gossip_round(self, local: Grads) -> list[Grads]:
                await let_go.wait()
                return [local]

        first = asyncio.create_task(trainer.sync_with_peers(alone, Waiting()))
        await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="one sync at a time"):
            await trainer.sync_with_peers(alone, Waiting())
        let_go.set()
        assert await first

    asyncio.run(twice())
    assert sync(trainer, alone, [])  # and afterwards the next


def test_a_restart_goes_on_bit_for_bit() -> None:
    trainer, aggregator = make_trainer(), RobustAggregator("centered_clipping", min_peers=1)
    train(trainer, 0)
    gossip([trainer], [aggregator])
    train(trainer, 1, 3)
    again, aggregator_again = make_trainer(), RobustAggregator("centered_clipping", min_peers=1)
    again.model.load_state_dict(trainer.model.state_dict())
    again.load_state_dict(trainer.state_dict())
    aggregator_again.load_state_dict(aggregator.state_dict())
    assert (again.step_count, again.should_sync()) == (3, False)
    for one, rule in ((trainer, aggregator), (again, aggregator_again)):
        train(one, 2, 1)
        assert one.should_sync()
        gossip([one], [rule])
    assert again.anchor_hash == trainer.anchor_hash
    assert again.sync_metrics["local_step"] == 8


def test_a_state_of_another_model_is_refused_by_name() -> None:
    state = make_trainer(nn.Linear(6, 1)).state_dict()
    with pytest.raises(ModelError, match=r"another model: '0\.bias' is missing in it"):
        make_trainer().load_state_dict(state)


# --- the surface ----------------------------------------------------------------------------------------------------


def test_it_is_public_and_has_the_usual_defaults() -> None:
    assert outerstep.DiLoCoTrainer is DiLoCoTrainer
    model = tiny_model()
    trainer = DiLoCoTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.inner_steps == 500
    assert (trainer._rounds.outer.lr, trainer._rounds.outer.momentum, trainer._rounds.outer.nesterov) == (
        0.7,
        0.9,
        True,
    )


def test_the_pseudo_gradient_is_initial_minus_current() -> None:
    trainer = make_trainer()
    start = params_of(trainer.model)
    train(trainer, 0)
    assert_same(trainer.initial_weights, start)
    expected = {name: start[name] - value for name, value in params_of(trainer.model).items()}
    assert_same(trainer.compute_pseudo_gradient(), expected)
    assert any(bool(delta.any()) for delta in expected.values())


class Answering(nn.Module):
    """Returns its loss, as models of Hugging Face do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self._kind = nn.Parameter(torch.ones(3)), kind

    def forward(self, inputs: Tensor) -> Any:
        loss = (self.weight * inputs).sum()
        return {"object": SimpleNamespace(loss=loss), "mapping": {"loss": loss}, "nothing": inputs}[self._kind]


@pytest.mark.parametrize("kind", ["object", "mapping"])
def test_a_batch_that_is_a_mapping_goes_to_a_model_that_returns_its_loss(kind: str) -> None:
    trainer = make_trainer(Answering(kind), lr=1.0, loss_fn=None)
    trainer.model.eval()
    assert trainer.train_step({"inputs": torch.tensor([1.0, 2.0, 3.0])}) == 6.0
    assert trainer.model.weight.tolist() == [0.0, -1.0, -2.0]
    assert trainer.model.training
    assert trainer.model.weight.grad is None
    assert trainer.step_count == 1


def test_what_has_no_loss_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"must return a loss, got Tensor without one.*loss_fn"):
        make_trainer(Answering("nothing"), loss_fn=None).train_step({"inputs": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"a batch must be a mapping.*got Tensor.*loss_fn"):
        make_trainer(loss_fn=None).train_step(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inner_steps": 0}, "inner_steps must be a whole number ≥ 1, got 0"),
        ({"inner_steps": True}, "inner_steps"),
        ({"outer_lr": 0.0}, "outer lr must be a number > 0"),
        ({"outer_momentum": 1.0}, r"outer momentum must be in \[0, 1\)"),
        ({"worker_id": "w"}, "worker_id is a worker's setting, and needs server_addr"),
        ({"server_addr": "host:1", "outer_lr": 0.5}, "outer_lr is the server's to say"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trainer(**settings)


def test_what_is_watched_is_of_the_contributions_that_were_accepted() -> None:
    trainers = [make_trainer() for _ in range(3)]
    for i, trainer in enumerate(trainers):
        train(trainer, seed=i)
    offered = gossip(trainers, [RobustAggregator("median") for _ in trainers])
    flat = [torch.cat([one[name].reshape(-1) for name in sorted(one)]) for one in offered]
    mean, median = torch.stack(flat).mean(0), torch.stack(flat).median(0).values
    cosines = [float(torch.cosine_similarity(flat[i], flat[j], dim=0)) for i, j in ((0, 1), (0, 2), (1, 2))]
    shares = [float(flat[i].norm() * flat[j].norm()) for i, j in ((0, 1), (0, 2), (1, 2))]
    for trainer, own in zip(trainers, flat, strict=True):
        metrics = trainer.sync_metrics
        assert metrics["pseudo_grad_norm"] == pytest.approx(float(own.norm()), rel=1e-5)
        assert metrics["aggregated_grad_norm"] == pytest.approx(float(median.norm()), rel=1e-5)
        assert metrics["weight_divergence"] == pytest.approx(
            sum(float((one - mean).square().sum()) for one in flat) / 3, rel=1e-4
        )
        similarity = sum(c * s for c, s in zip(cosines, shares, strict=True)) / sum(shares)
        assert metrics["peer_grad_similarity"] == pytest.approx(similarity, abs=1e-4)
        assert metrics["inner_grad_norm"] > 0.0
        assert metrics["inner_loss"] > 0.0
        assert metrics["loss_after_sync"] is None
        after = trainer.train_step(batches(9, 1)[0])
        assert trainer.sync_metrics["loss_after_sync"] == after


def test_the_example_ends_with_one_anchor_and_refuses_the_broken_peer(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "peers_in_one_process.py"
    logger = logging.getLogger("outerstep")
    level = logger.level
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        logger.setLevel(level)
    *rounds, anchors = capsys.readouterr().out.splitlines()
    assert len(rounds) == 6
    assert all("refused 1 of 4" in line for line in rounds)
    assert len(anchors.split()) == 2
