"""The demo's model, and the loop that trains it."""

import math

import pytest
import torch

from outerstep.demo.corpus import BatchStream, evaluation_batches
from outerstep.demo.model import GPT, GPTConfig, build_model
from outerstep.demo.training import TrainSettings, evaluate, learning_rate_at, make_optimizer, make_stream, train

TINY = GPTConfig(context=16, d_model=16, num_layers=2, num_heads=2)
TEXT = torch.arange(2_000).remainder(50).to(torch.uint8)


def shard(index: int, batch_size: int = 4) -> BatchStream:
    return BatchStream(TEXT, shard=index, batch_size=batch_size, context=TINY.context)


def trained(streams: list[BatchStream], settings: TrainSettings) -> tuple[GPT, list[float]]:
    model = build_model(0, TINY)
    losses = [report.loss for report in train(model, make_optimizer(model, settings), streams, settings)]
    return model, losses


def flat(model: GPT) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class TestModel:
    def test_the_default_model_has_837_thousand_parameters(self) -> None:
        assert sum(p.numel() for p in build_model(0).parameters()) == 836_736

    def test_the_same_seed_builds_bit_identical_models(self) -> None:
        assert torch.equal(flat(build_model(7, TINY)), flat(build_model(7, TINY)))
        assert not torch.equal(flat(build_model(7, TINY)), flat(build_model(8, TINY)))

    def test_building_a_model_leaves_the_global_random_state_alone(self) -> None:
        before = torch.get_rng_state()
        build_model(7, TINY)
        assert torch.equal(torch.get_rng_state(), before)

    def test_logits_and_loss_have_the_documented_shapes(self) -> None:
        tokens = torch.zeros(3, 10, dtype=torch.int64)
        logits, loss = build_model(0, TINY)(tokens, tokens)
        assert logits.shape == (3, 10, 256)
        assert loss.shape == ()
        assert build_model(0, TINY)(tokens)[1] is None

    def test_a_fresh_model_knows_nothing(self) -> None:
        inputs, targets = shard(0).batch(0)
        _, loss = build_model(0, TINY)(inputs, targets)
        assert loss.item() == pytest.approx(math.log(256), abs=0.05)

    def test_no_position_sees_the_future(self) -> None:
        model = build_model(0, TINY)
        tokens = shard(0).batch(0)[0]
        changed = tokens.clone()
        changed[:, 9:] = 200
        before, after = model(tokens)[0], model(changed)[0]
        torch.testing.assert_close(before[:, :9], after[:, :9])
        assert not torch.allclose(before[:, 9:], after[:, 9:])

    def test_every_parameter_gets_a_gradient(self) -> None:
        model = build_model(0, TINY)
        model(*shard(0).batch(0))[1].backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []

    def test_a_sequence_longer_than_the_context_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at most context=16 bytes, got 17"):
            build_model(0, TINY)(torch.zeros(1, 17, dtype=torch.int64))

    def test_heads_must_divide_the_width(self) -> None:
        with pytest.raises(ValueError, match="d_model=16, num_heads=3"):
            GPTConfig(d_model=16, num_heads=3)


class TestSchedule:
    def test_the_rate_warms_up_peaks_and_ends_at_a_tenth(self) -> None:
        settings = TrainSettings(steps=600, warmup_steps=30, learning_rate=3e-3)
        assert learning_rate_at(0, settings) == pytest.approx(1e-4)
        assert learning_rate_at(29, settings) == learning_rate_at(30, settings) == 3e-3
        assert learning_rate_at(599, settings) == pytest.approx(3e-4)
        assert learning_rate_at(10_000, settings) == pytest.approx(3e-4)

    def test_after_the_warm_up_the_rate_never_rises(self) -> None:
        settings = TrainSettings()
        rates = [learning_rate_at(step, settings) for step in range(30, 600)]
        assert rates == sorted(rates, reverse=True)

    @pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (2, 2), (5, 30)])
    def test_short_runs_have_finite_rates(self, steps: int, warmup_steps: int) -> None:
        settings = TrainSettings(steps=steps, warmup_steps=warmup_steps)
        assert all(0 < learning_rate_at(step, settings) <= settings.learning_rate for step in range(steps))


class TestTraining:
    def test_a_stream_follows_the_settings(self) -> None:
        stream = make_stream(TEXT, 1, TrainSettings(batch_size=5, seed=9), context=7)
        assert torch.equal(stream.batch(2)[0], BatchStream(TEXT, 1, seed=9, batch_size=5, context=7).batch(2)[0])
        assert make_stream(TEXT, 0, TrainSettings()).context == GPTConfig().context

    def test_the_norms_are_not_decayed(self) -> None:
        model = build_model(0, TINY)
        decayed, spared = make_optimizer(model, TrainSettings()).param_groups
        assert decayed["weight_decay"] == 0.1
        assert spared["weight_decay"] == 0.0
        assert {p.ndim for p in decayed["params"]} == {2}
        assert {p.ndim for p in spared["params"]} == {1}
        assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))

    def test_training_learns_a_predictable_text(self) -> None:
        batches = evaluation_batches(TEXT, 2, batch_size=8, context=TINY.context)
        before = evaluate(build_model(0, TINY), batches)
        model, _ = trained([shard(0)], TrainSettings(steps=80, learning_rate=1e-2, warmup_steps=5))
        assert evaluate(model, batches) < before / 4

    def test_training_twice_gives_bit_identical_weights(self) -> None:
        settings = TrainSettings(steps=5)
        assert torch.equal(flat(trained([shard(0)], settings)[0]), flat(trained([shard(0)], settings)[0]))

    def test_two_shards_take_the_step_of_one_batch_twice_as_large(self) -> None:
        class Both(BatchStream):
            def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
                (a, b), (c, d) = shard(0).batch(step), shard(1).batch(step)
                return torch.cat([a, c]), torch.cat([b, d])

        settings = TrainSettings(steps=3)
        apart, apart_losses = trained([shard(0), shard(1)], settings)
        together, together_losses = trained([Both(TEXT, context=TINY.context)], settings)
        assert apart_losses == pytest.approx(together_losses, rel=1e-5)
        # Adam divides by gradients that may be almost zero, so rounding shows; a wrong mean would be off by the rate.
        torch.testing.assert_close(flat(apart), flat(together), atol=1e-5, rtol=1e-3)

    def test_a_run_can_go_on_where_another_stopped(self) -> None:
        settings = TrainSettings(steps=6)
        whole, _ = trained([shard(0)], settings)
        model = build_model(0, TINY)
        optimizer = make_optimizer(model, settings)
        for report in train(model, optimizer, [shard(0)], settings):
            if report.step == 3:
                break
        rest = [report.step for report in train(model, optimizer, [shard(0)], settings, first_step=4)]
        assert rest == [4, 5]
        assert torch.equal(flat(model), flat(whole))

    def test_training_without_a_stream_is_refused(self) -> None:
        model = build_model(0, TINY)
        settings = TrainSettings()
        with pytest.raises(ValueError, match="at least one stream"):
            next(train(model, make_optimizer(model, settings), [], settings))

    @pytest.mark.parametrize("training", [True, False])
    def test_evaluation_leaves_the_model_as_it_was(self, training: bool) -> None:
        model = build_model(0, TINY).train(training)
        before = flat(model)
        evaluate(model, evaluation_batches(TEXT, 1, batch_size=2, context=TINY.context))
        assert model.training is training
        assert torch.equal(flat(model), before)
        assert all(p.grad is None for p in model.parameters())
