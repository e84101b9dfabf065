"""g = Σ w·Δ / Σ w, at once or block by block."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.aggregate import add_weighted, divide, weighted_mean
from outerstep.errors import ConfigError

PROPERTY = cases(100)
weights = st.floats(1e-3, 1e6)
weight_lists = st.lists(weights, min_size=1, max_size=6)
sizes = st.integers(1, 300)
seeds = st.integers(0, 2**31)


def random_deltas(seed: int, count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def blockwise_mean(deltas: list[Tensor], each: list[float], cuts: list[int]) -> Tensor:
    numel = deltas[0].numel()
    borders = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    total = torch.zeros(numel)
    for delta, weight in zip(deltas, each, strict=True):
        for begin, end in pairwise(borders):
            add_weighted(total[begin:end], delta[begin:end].clone(), weight)
    divide(total, sum(each))
    return total


class TestWeightedMean:
    @PROPERTY
    @given(each=weight_lists, numel=sizes, seed=seeds)
    def test_it_agrees_with_a_float64_reference_to_fp32_rounding(
        self, each: list[float], numel: int, seed: int
    ) -> None:
        deltas = random_deltas(seed, len(each), numel)
        stacked, column = np.stack([d.double().numpy() for d in deltas]), np.array(each)[:, None]
        reference = (column * stacked).sum(0) / column.sum()
        magnitude = (column * np.abs(stacked)).sum(0) / column.sum()
        error = np.abs(weighted_mean(deltas, each).double().numpy() - reference)
        assert (error <= 2 * (len(each) + 1) * 2.0**-24 * magnitude + 1e-30).all()

    def test_a_heavier_contribution_pulls_harder(self) -> None:
        assert weighted_mean([torch.tensor([0.0]), torch.tensor([4.0])], [1.0, 3.0]).tolist() == [3.0]

    def test_equal_weights_give_the_plain_mean(self) -> None:
        deltas = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
        assert weighted_mean(deltas, [1.0, 1.0]).tolist() == [2.0, 4.0]
        assert weighted_mean(deltas, [8.0, 8.0]).tolist() == [2.0, 4.0]

    @PROPERTY
    @given(each=weight_lists, power=st.integers(-6, 6), seed=seeds)
    def test_only_the_ratio_of_the_weights_matters(self, each: list[float], power: int, seed: int) -> None:
        deltas = random_deltas(seed, len(each), 33)
        scaled = [weight * 2.0**power for weight in each]
        assert torch.equal(weighted_mean(deltas, each), weighted_mean(deltas, scaled))

    def test_a_lone_contribution_of_weight_one_is_the_mean_bit_for_bit(self) -> None:
        (delta,) = random_deltas(0, 1, 1000)
        assert torch.equal(weighted_mean([delta], [1.0]), delta)

    def test_the_shape_is_kept_and_the_inputs_are_left_alone(self) -> None:
        deltas = [torch.ones(2, 3), torch.full((2, 3), 3.0)]
        assert torch.equal(weighted_mean(deltas, [1.0, 1.0]), torch.full((2, 3), 2.0))
        assert torch.equal(deltas[0], torch.ones(2, 3))

    def test_low_precision_deltas_are_summed_in_fp32(self) -> None:
        deltas = [torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)]
        mean = weighted_mean(deltas, [1.0, 1.0])
        assert mean.dtype == torch.float32
        assert mean.tolist() == [128.5]  # bf16 would have lost the 1

    @pytest.mark.parametrize("weight", [0.0, -1.0, -0.0, float("nan"), float("-inf")])
    def test_a_weight_that_is_not_positive_is_refused(self, weight: float) -> None:
        with pytest.raises(ConfigError, match=r"weight must be > 0, got"):
            weighted_mean([torch.ones(2), torch.ones(2)], [1.0, weight])

    def test_the_mean_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no contributions"):
            weighted_mean([], [])

    @pytest.mark.parametrize("each", [[1.0], [1.0, 1.0, 1.0]])
    def test_each_delta_needs_exactly_one_weight(self, each: list[float]) -> None:
        with pytest.raises(ValueError, match=r"zip\(\)"):
            weighted_mean([torch.ones(2), torch.ones(2)], each)


class TestBlockByBlock:
    @PROPERTY
    @given(each=weight_lists, numel=sizes, seed=seeds, cuts=st.lists(sizes, max_size=6))
    def test_it_equals_all_at_once_bit_for_bit(self, each: list[float], numel: int, seed: int, cuts: list[int]) -> None:
        deltas = random_deltas(seed, len(each), numel)
        assert torch.equal(blockwise_mean(deltas, each, cuts), weighted_mean(deltas, each))

    def test_a_sum_large_enough_for_several_threads_gives_the_same_bits(self) -> None:
        deltas, each = random_deltas(1, 3, 100_003), [0.3, 1.0, 7.7]
        assert torch.equal(blockwise_mean(deltas, each, [1, 4097, 65_537]), weighted_mean(deltas, each))

    def test_product_and_sum_are_rounded_one_after_the_other(self) -> None:
        """A fused multiply-add would keep the last bit of the product, on the machines that have one."""
        total, value, weight = torch.full((64,), -1.0), 1.0 + 2.0**-23, 1.0 - 2.0**-23
        add_weighted(total, torch.full((64,), value), weight)
        assert total.tolist() == [0.0] * 64

    @pytest.mark.parametrize("weight", [2.0**-20, 0.5, 1.0, 2.0, 3.0, 16.0, 1e6, 2.0**30])
    def test_a_product_stands_for_the_division_only_where_it_has_the_same_bits(self, weight: float) -> None:
        (total,) = random_deltas(3, 1, 10_000)
        expected = total / weight
        divide(total, weight)
        assert torch.equal(total, expected)


def test_deltas_of_any_precision_are_weighed_in_fp32() -> None:
    delta = torch.tensor([1.0 + 2.0**-7], dtype=torch.bfloat16)  # three times that needs more digits than bf16 has
    mean = weighted_mean([delta, torch.zeros(1)], [3.0, 1.0])
    assert mean.dtype == torch.float32
    assert mean.tolist() == [0.75 * (1.0 + 2.0**-7)]
