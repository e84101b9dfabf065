"""Delayed Nesterov: N pushes are one step, each counted once, however it is cut and wherever interrupted."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov, OptimizerFactory, OuterRule
from outerstep.errors import ConfigError

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 7), "b": (33,), "c": ()}
EPS = 2.0**-23


def values(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def sgd(**options: Any) -> OptimizerFactory:
    defaults: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    return lambda params: torch.optim.SGD(params, **{**defaults, **options})


class TestTheRule:
    @given(
        size=st.integers(1, 6),
        rounds=st.integers(1, 8),
        lr=st.sampled_from([0.3, 0.7, 1.0]),
        momentum=st.sampled_from([0.0, 0.5, 0.9]),
        seed=st.integers(0, 2**32),
    )
    @settings(deadline=None)
    def test_n_pushes_are_one_nesterov_step_on_their_mean(
        self, size: int, rounds: int, lr: float, momentum: float, seed: int
    ) -> None:
        """Equal but for rounding. Per round each of the two ways rounds fewer than 3·N + 6 times, each time by at most
        half an eps of the largest number in play, and what is rounded into the momentum comes back in each later round,
        1/(1 − β) times in all. (Counting the momentum N times, or not at all, misses by more than a tenth.)"""
        theta, expected = values(seed), values(seed)
        delayed, plain = DelayedNesterov(size, lr, momentum), Nesterov(lr, momentum)
        largest = 1.0
        for r in range(rounds):
            grads = [values(seed + 1 + r * size + i) for i in range(size)]
            for g in grads:
                delayed.push(0, theta, g)
            mean = {name: torch.stack([g[name] for g in grads]).mean(dim=0) for name in SHAPES}
            plain.step(expected, mean)
            everything = [expected, *grads, *({n: e["momentum_buffer"]} for n, e in plain.state_dict().items())]
            largest = max(largest, *(float(t.abs().max()) for tensors in everything for t in tensors.values()))
        bound = rounds * (3 * size + 6) / (1 - momentum) * largest * EPS / 2
        assert bound < 0.01
        for name in SHAPES:
            torch.testing.assert_close(theta[name], expected[name], rtol=0, atol=bound)

    def test_it_is_the_recursion_written_out(self) -> None:
        """N = 2, β = 1/2, ε = 1, pushes 2, 4, 6, 8: numbers that floating point holds exactly."""
        theta, rule = {"w": torch.zeros(1)}, DelayedNesterov(2, lr=1.0, momentum=0.5)
        seen = []
        for g in (2.0, 4.0, 6.0, 8.0):
            rule.push(0, theta, {"w": torch.tensor([g])})
            seen.append(float(theta["w"]))
        # −2/2;  m = 3, −(3/2 + 4/2);  −6/2;  m = 3/2 + 7, −(17/4 + 8/2)
        assert seen == [-1.0, -4.5, -7.5, -15.75]

    def test_without_momentum_three_unit_pushes_move_the_weights_by_one_and_not_by_three(self) -> None:
        theta, rule = {"w": torch.zeros(4)}, DelayedNesterov(3, lr=1.0, momentum=0.0)
        for _ in range(3):
            rule.push(0, theta, {"w": torch.ones(4)})
        assert torch.equal(theta["w"], -torch.ones(4))
        assert rule.state_dict()["tensors"] == {}, "without momentum there is nothing to remember"
        assert rule.buffered(0) == 0

    def test_each_push_moves_the_weights_at_once(self) -> None:
        theta, rule = {"w": torch.zeros(1)}, DelayedNesterov(4, lr=1.0, momentum=0.9)
        for n in (1, 2, 3):
            rule.push(0, theta, {"w": torch.ones(1)})
            assert float(theta["w"]) == -n / 4
            assert rule.buffered(0) == n

    def test_the_gradients_are_left_as_they_are(self) -> None:
        theta, grads, rule = values(0), values(1), DelayedNesterov(2)
        for _ in range(2):
            rule.push(0, theta, grads)
        assert same(grads, values(1))

    def test_parameters_may_have_rates_of_their_own(self) -> None:
        rates = {"a": OuterRule(lr=0.1, momentum=0.5), "c": OuterRule(lr=1.0, momentum=0.0)}
        theta, rule = values(0), DelayedNesterov(2, 0.7, 0.9, rates=rates)
        each, alone = {"a": (0.1, 0.5), "b": (0.7, 0.9), "c": (1.0, 0.0)}, values(0)
        rules = {name: DelayedNesterov(2, *rate) for name, rate in each.items()}
        for seed in range(1, 6):
            rule.push(0, theta, values(seed))
            for name in SHAPES:
                rules[name].push(0, {name: alone[name]}, {name: values(seed)[name]})
        assert same(theta, alone)

    def test_two_fragments_count_for_themselves(self) -> None:
        """Interleaved 3 : 1, they do what they would do alone."""
        apart = {0: DelayedNesterov(3), 1: DelayedNesterov(3)}
        together, theta, expected = DelayedNesterov(3), values(0), values(0)
        names = {0: ("a", "c"), 1: ("b",)}
        for seed in range(1, 13):
            fragment = int(seed % 4 == 0)
            params = {name: theta[name] for name in names[fragment]}
            reference = {name: expected[name] for name in names[fragment]}
            together.push(fragment, params, values(seed))
            apart[fragment].push(fragment, reference, values(seed))
        assert same(theta, expected)
        assert (together.buffered(0), together.buffered(1)) == (0, 0)
        together.push(1, {"b": theta["b"]}, values(0))
        assert (together.buffered(0), together.buffered(1), together.buffered(7)) == (0, 1, 0)


class TestBlocks:
    @given(cuts=st.sets(st.integers(1, 32)), size=st.integers(1, 3), seed=st.integers(0, 2**32))
    @settings(deadline=None)
    def test_blocks_equal_the_whole_to_the_bit(self, cuts: set[int], size: int, seed: int) -> None:
        whole = values(seed, {"w": (33,)})
        cut = {"w": whole["w"].clone().view(3, 11)}
        by_whole, by_block = DelayedNesterov(size), DelayedNesterov(size)
        edges = [0, *sorted(cuts), 33]
        for i in range(2 * size + 1):
            g = values(seed + i, {"w": (33,)})["w"]
            by_whole.push(0, whole, {"w": g})
            push = by_block.begin(cut)
            for start, stop in pairwise(edges):
                push.block("w", cut["w"].view(-1)[start:stop], g[start:stop], start)
            push.done()
        assert torch.equal(whole["w"], cut["w"].view(-1))
        a, b = by_whole.state_dict()["tensors"]["w"], by_block.state_dict()["tensors"]["w"]
        assert same(a, b)

    def test_a_push_knows_whether_it_completes_the_buffer(self) -> None:
        rule, found = DelayedNesterov(3), []
        for _ in range(6):
            push = rule.begin({})
            found.append(push.completes)
            push.done()
        assert found == [False, False, True] * 2

    def test_nothing_outside_the_block_moves(self) -> None:
        theta, rule = torch.zeros(10), DelayedNesterov(1)
        rule.begin({"w": theta}).block("w", theta[4:7], torch.ones(3), 4)
        assert theta.nonzero().view(-1).tolist() == [4, 5, 6]

    def test_a_block_past_the_end_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="exceeds dimension"):
            DelayedNesterov(2).begin({"w": torch.zeros(10)}).block("w", torch.zeros(3), torch.ones(3), 8)


class TestState:
    @pytest.mark.parametrize("saved_after", range(7))
    def test_a_restored_state_goes_on_bit_for_bit_in_the_middle_of_a_buffer(self, saved_after: int) -> None:
        straight, theta = DelayedNesterov(3), values(0)
        for seed in range(saved_after):
            straight.push(0, theta, values(seed + 1))
        resumed, again = DelayedNesterov(3), copied(theta)
        resumed.push(1, values(5), values(6))  # what it did before must be forgotten
        resumed.load_state_dict(straight.state_dict())
        for seed in range(saved_after, 9):
            straight.push(0, theta, values(seed + 1))
            resumed.push(0, again, values(seed + 1))
        assert same(theta, again)
        assert resumed.buffered(1) == 0

    def test_tensors_come_out_live_and_go_in_as_copies(self) -> None:
        first, second, theta = DelayedNesterov(3), DelayedNesterov(3), values(0)
        first.push(0, theta, values(1))
        state = first.state_dict()
        assert state["counts"] == {"0": 1}
        assert state["buffer_size"] == 3
        second.load_state_dict(state)
        second.push(0, copied(theta), values(2))
        assert torch.equal(state["tensors"]["b"]["buffered"], values(1)["b"])
        first.push(0, theta, values(2))
        assert torch.equal(state["tensors"]["b"]["buffered"], values(1)["b"] + values(2)["b"])

    def test_m_and_d_share_no_memory(self) -> None:
        """Otherwise a checkpoint writer that refuses shared storage could not save them."""
        rule = DelayedNesterov(2)
        rule.push(0, values(0), values(1))
        tensors = [t for entry in rule.state_dict()["tensors"].values() for t in entry.values()]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors) == 6

    def test_another_buffer_size_is_refused_while_pushes_are_buffered(self) -> None:
        rule, theta = DelayedNesterov(3), values(0)
        for seed in range(4):
            rule.push(0, theta, values(seed))
        with pytest.raises(ConfigError, match=r"saved with 3.*fragment 0: 1.*is 4 now; finish the buffer.*= 3"):
            DelayedNesterov(4).load_state_dict(rule.state_dict())

    def test_another_buffer_size_is_accepted_when_the_buffer_is_empty_and_the_momentum_stays(self) -> None:
        rule, theta = DelayedNesterov(3), values(0)
        for seed in range(3):
            rule.push(0, theta, values(seed))
        other = DelayedNesterov(2)
        other.load_state_dict(rule.state_dict())
        assert other.buffer_size == 2
        saved, loaded = rule.state_dict()["tensors"], other.state_dict()["tensors"]
        assert all(same(saved[name], loaded[name]) for name in SHAPES)
        assert float(loaded["b"]["momentum_buffer"].abs().max()) > 0

    @pytest.mark.parametrize("n", [-1, 3])
    def test_counts_that_cannot_be_are_refused(self, n: int) -> None:
        with pytest.raises(ConfigError, match=rf"must be in \[0, buffer_size = 3\), got {{0: {n}}}"):
            DelayedNesterov(3).load_state_dict({"tensors": {}, "counts": {"0": n}, "buffer_size": 3})


class TestFromSgd:
    def test_one_group(self) -> None:
        built, direct = DelayedNesterov.from_sgd(2, sgd(lr=0.4, momentum=0.8), SHAPES), DelayedNesterov(2, 0.4, 0.8)
        theta, expected = values(0), values(0)
        for seed in range(1, 5):
            built.push(0, theta, values(seed))
            direct.push(0, expected, values(seed))
        assert same(theta, expected)

    def test_without_momentum_it_is_plain_descent_by_each_pushs_part(self) -> None:
        built = DelayedNesterov.from_sgd(2, sgd(lr=0.5, momentum=0.0, nesterov=False), SHAPES)
        theta, expected = values(0), values(0)
        for seed in range(1, 5):
            built.push(0, theta, values(seed))
            for name, g in values(seed).items():
                expected[name].sub_((g / 2).mul_(0.5))
        assert same(theta, expected)

    def test_each_group_has_its_own_rate(self) -> None:
        def factory(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            a, b, c = params
            groups = [{"params": [a, c], "lr": 0.1}, {"params": [b], "momentum": 0.5}]
            return torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True)

        built = DelayedNesterov.from_sgd(2, factory, SHAPES)
        direct = DelayedNesterov(
            2, rates={"a": OuterRule(0.1, 0.9), "b": OuterRule(0.7, 0.5), "c": OuterRule(0.1, 0.9)}
        )
        theta, expected = values(0), values(0)
        for seed in range(1, 5):
            built.push(0, theta, values(seed))
            direct.push(0, expected, values(seed))
        assert same(theta, expected)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nesterov": False}, r"nesterov=False; set nesterov=True, or momentum=0"),
            ({"weight_decay": 0.1}, r"weight_decay=0\.1; decay the weights in the inner optimizer"),
            ({"maximize": True}, r"maximize=True; set maximize=False"),
        ],
    )
    def test_sgd_with_anything_else_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            DelayedNesterov.from_sgd(2, sgd(**options), SHAPES)

    def test_dampening_smuggled_past_sgd_is_refused(self) -> None:
        def factory(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = sgd()(params)
            optimizer.param_groups[0]["dampening"] = 0.1
            return optimizer

        with pytest.raises(ConfigError, match=r"dampening=0\.1; set dampening=0"):
            DelayedNesterov.from_sgd(2, factory, SHAPES)

    def test_a_bad_second_group_is_refused_by_its_number(self) -> None:
        def factory(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            a, *rest = params
            groups = [{"params": rest}, {"params": [a], "weight_decay": 0.5}]
            return torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True)

        with pytest.raises(ConfigError, match=r"parameter group 1 has weight_decay=0\.5"):
            DelayedNesterov.from_sgd(2, factory, SHAPES)

    def test_another_optimizer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"torch\.optim\.SGD, got Adam; use SGD"):
            DelayedNesterov.from_sgd(2, lambda params: torch.optim.Adam(params), SHAPES)

    def test_a_subclass_of_sgd_is_refused_because_it_may_step_otherwise(self) -> None:
        class Twice(torch.optim.SGD):
            pass

        with pytest.raises(ConfigError, match="got Twice"):
            DelayedNesterov.from_sgd(2, lambda params: Twice(params, lr=0.7, momentum=0.9, nesterov=True), SHAPES)

    def test_what_is_no_optimizer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="got list"):
            DelayedNesterov.from_sgd(2, lambda params: list(params), SHAPES)  # type: ignore[arg-type,return-value]

    def test_a_parameter_in_no_group_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"'b' is not \(2 in all\)"):
            DelayedNesterov.from_sgd(2, lambda params: sgd()([next(iter(params))]), SHAPES)


class TestRefusals:
    @pytest.mark.parametrize("size", [0, -1])
    def test_a_buffer_holds_at_least_one_push(self, size: int) -> None:
        with pytest.raises(ConfigError, match=f"at least 1, got {size}"):
            DelayedNesterov(size)

    @pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf")])
    def test_the_learning_rate_is_a_positive_number(self, lr: float) -> None:
        with pytest.raises(ConfigError, match="outer lr must be"):
            DelayedNesterov(2, lr)
        with pytest.raises(ConfigError, match="outer lr must be"):
            OuterRule(lr=lr)

    @pytest.mark.parametrize("momentum", [1.0, -0.1, float("nan")])
    def test_the_momentum_is_below_one(self, momentum: float) -> None:
        with pytest.raises(ConfigError, match="outer momentum must be"):
            DelayedNesterov(2, 0.7, momentum)


def test_what_is_buffered_is_fp32_where_the_parameter_is_and_of_fragment_zero_unless_said() -> None:
    rule = DelayedNesterov(2)
    rule.begin({"w": torch.empty(3, dtype=torch.bfloat16, device="meta")}).done()
    kept = rule.state_dict()["tensors"]["w"]
    assert {(one.device.type, one.dtype, one.shape) for one in kept.values()} == {("meta", torch.float32, (3,))}
    assert rule.buffered(0) == 1


def test_a_parameter_whose_rate_has_no_momentum_has_no_buffers() -> None:
    rule = DelayedNesterov(2, rates={"plain": OuterRule(0.5, 0.0)})
    rule.begin({"plain": torch.zeros(3), "other": torch.zeros(3)})
    assert set(rule.state_dict()["tensors"]) == {"other"}
