"""DiLoCoTrainer: its surface, and what happens while a sync is awaited and after a restart."""

from __future__ import annotations

import asyncio
import logging
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outerstep
from outerstep import DiLoCoTrainer, RobustAggregator
from outerstep.errors import ConfigError, ModelError, WorkerError
from support import assert_same, params_of, tiny_model
from unit.worker.trainers import Grads, batches, gossip, make_trainer, sync, train

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


# --- weights that somebody else has changed ---------------------------------------------------------------------------


def spoil(trainer: DiLoCoTrainer) -> None:
    trainer.model.load_state_dict({name: value + 10.0 for name, value in trainer.model.state_dict().items()})


@pytest.mark.parametrize("before", [0, 2, 4], ids=["before the first step", "between steps", "before the sync"])
def test_weights_that_are_loaded_are_not_sent(before: int, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit as if the steps before and the load had never been."""
    trainer, twin, alone = make_trainer(), make_trainer(), RobustAggregator("mean", min_peers=1)
    with caplog.at_level(logging.WARNING):
        train(trainer, 0, before)
        spoil(trainer)
        train(trainer, 1, 4 - before)
        assert sync(trainer, alone, [])
    train(twin, 1, 4 - before)
    assert sync(twin, RobustAggregator("mean", min_peers=1), [])
    assert trainer.anchor_hash == twin.anchor_hash
    assert_same(params_of(trainer.model), params_of(twin.model))
    assert trainer.sync_metrics["outside_changes"] == 1
    assert [record.getMessage() for record in caplog.records if f"{before} local steps are dropped" in record.message]


def test_nor_while_a_sync_is_awaited_and_what_was_sent_counts() -> None:
    trainer, twin = make_trainer(), make_trainer()

    class Slow:
        async def gossip_round(self, local: Grads) -> list[Grads]:
            spoil(trainer)
            train(trainer, 1, 1)
            return [local]

    for one in (trainer, twin):
        train(one, 0)
    assert sync(trainer, RobustAggregator("mean", min_peers=1), Slow())
    gossip([twin], [RobustAggregator("mean", min_peers=1)])
    assert trainer.anchor_hash == twin.anchor_hash
    alone = make_trainer()
    train(alone, 1, 1)
    for name, delta in trainer.compute_pseudo_gradient().items():  # one step from where it started over
        assert torch.allclose(delta, alone.compute_pseudo_gradient()[name], atol=1e-6)


def test_changes_that_are_announced_are_sent() -> None:
    trainer = make_trainer()
    train(trainer, 0)
    with trainer.own_change():
        spoil(trainer)
    offered = gossip([trainer], [RobustAggregator("mean", min_peers=1)])
    assert all(float(delta.mean()) < -9.0 for delta in offered[0].values())
    assert trainer.sync_metrics["outside_changes"] == 0


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
        ({"server_addr": "host:1", "outer_lr": 0.5}, "outer_lr .* needs topology .*the server's to say"),
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
