"""DiLoCoTrainer among peers that fail, lie or are missing: nothing is lost."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from outerstep import DiLoCoTrainer, RobustAggregator
from outerstep.errors import ConfigError, ExchangeFailed
from support import assert_same, params_of, tiny_model
from unit.worker.trainers import Grads, gossip, loss_of, make_trainer, sync, train


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
