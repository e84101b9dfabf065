"""Δ = θ − l: its sign, its exactness, and what happens to local weights when a round ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outerstep.core.pseudogradient import adopt, pseudo_gradient, rebase

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOW_PRECISION = [torch.bfloat16, torch.float16]
PROPERTY = settings(deadline=None)
integers = st.lists(st.integers(-1000, 1000), min_size=3, max_size=3)


def tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestPseudoGradient:
    def test_it_is_the_anchor_minus_the_local_weights(self) -> None:
        assert pseudo_gradient(tensor([5, 5, 5]), tensor([3, 5, 9])).tolist() == [2.0, 0.0, -4.0]

    def test_it_is_written_where_it_is_wanted(self) -> None:
        place = torch.empty(3)
        made = pseudo_gradient(tensor([5, 5, 5]), tensor([1, 2, 3]), out=place)
        assert made is place
        assert place.tolist() == [4.0, 3.0, 2.0]

    @PROPERTY
    @given(anchor=integers, local=integers)
    def test_one_plain_descent_step_from_the_anchor_arrives_at_the_local_weights(
        self, anchor: list[int], local: list[int]
    ) -> None:
        theta = tensor(anchor)
        assert torch.equal(theta - pseudo_gradient(theta, tensor(local)), tensor(local))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_is_fp32_whatever_the_dtype_of_the_model(self, dtype: torch.dtype) -> None:
        delta = pseudo_gradient(random_values(0, 2, 3), random_values(1, 2, 3).to(dtype))
        assert delta.dtype == torch.float32
        assert delta.shape == (2, 3)

    @pytest.mark.parametrize("dtype", LOW_PRECISION)
    def test_a_model_that_has_not_moved_has_a_pseudo_gradient_of_exactly_zero(self, dtype: torch.dtype) -> None:
        anchor = random_values(2, 1000)
        local = anchor.to(dtype)
        assert not torch.equal(local.float(), anchor), "the anchor must not be representable, or this shows nothing"
        assert torch.count_nonzero(pseudo_gradient(anchor, local)) == 0

    @pytest.mark.parametrize("dtype", LOW_PRECISION)
    def test_a_low_precision_model_is_measured_from_where_its_training_began(self, dtype: torch.dtype) -> None:
        anchor, local = random_values(3, 1000), random_values(4, 1000).to(dtype)
        assert torch.equal(pseudo_gradient(anchor, local), anchor.to(dtype).float() - local.float())

    def test_it_carries_no_gradient_and_leaves_its_inputs_alone(self) -> None:
        anchor, local = tensor([4, 4, 4]), nn.Parameter(tensor([1, 2, 3]))
        delta = pseudo_gradient(anchor, local)
        delta.zero_()
        assert not delta.requires_grad
        assert anchor.tolist() == [4.0, 4.0, 4.0]
        assert local.tolist() == [1.0, 2.0, 3.0]


class TestAdopt:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_agreement_replaces_the_local_weights_in_place_in_their_own_dtype(self, dtype: torch.dtype) -> None:
        local, agreed = nn.Parameter(random_values(5, 4, 5).to(dtype)), random_values(6, 4, 5)
        memory = local.data_ptr()
        adopt(local, agreed)
        assert local.data_ptr() == memory
        assert local.dtype == dtype
        assert torch.equal(local, agreed.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_is_left_to_send_after_it(self, dtype: torch.dtype) -> None:
        local, agreed = random_values(7, 50).to(dtype), random_values(8, 50)
        adopt(local, agreed)
        assert torch.count_nonzero(pseudo_gradient(agreed, local)) == 0


class TestRebase:
    @PROPERTY
    @given(anchor=integers, steps=integers, rounds=st.lists(integers, min_size=1, max_size=5))
    def test_unsent_steps_are_kept_exactly_over_any_number_of_missed_rounds(
        self, anchor: list[int], steps: list[int], rounds: list[list[int]]
    ) -> None:
        theta = tensor(anchor)
        local = theta + tensor(steps)
        for agreed in map(tensor, rounds):
            rebase(local, theta, agreed)
            theta = agreed
            assert torch.equal(pseudo_gradient(theta, local), -tensor(steps))

    @PROPERTY
    @given(anchor=integers, first=integers, others=integers, later=integers)
    def test_steps_before_and_after_a_missed_round_travel_together(
        self, anchor: list[int], first: list[int], others: list[int], later: list[int]
    ) -> None:
        theta = tensor(anchor)
        local = theta + tensor(first)
        agreed = theta + tensor(others)
        rebase(local, theta, agreed)
        local += tensor(later)
        assert torch.equal(pseudo_gradient(agreed, local), -(tensor(first) + tensor(later)))

    def test_it_moves_a_parameter_in_place_and_leaves_anchor_and_agreement_alone(self) -> None:
        local, anchor, agreed = nn.Parameter(tensor([1, 2, 3])), tensor([1, 1, 1]), tensor([10, 20, 30])
        memory = local.data_ptr()
        rebase(local, anchor, agreed)
        assert local.tolist() == [10.0, 21.0, 32.0]
        assert local.data_ptr() == memory
        assert anchor.tolist() == [1.0, 1.0, 1.0]
        assert agreed.tolist() == [10.0, 20.0, 30.0]

    @PROPERTY
    @given(dtype=st.sampled_from(LOW_PRECISION), seed=st.integers(0, 2**31), shift=st.integers(-6, 6))
    def test_a_low_precision_model_that_has_not_moved_lands_on_the_rounded_agreement(
        self, dtype: torch.dtype, seed: int, shift: int
    ) -> None:
        anchor = random_values(seed, 20).clamp(0.5, 2.0)  # one scale, so that fp32 differences are exact
        agreed = random_values(seed + 1, 20).clamp(0.5, 2.0) + shift / 16
        local = anchor.to(dtype)
        rebase(local, anchor, agreed)
        assert torch.equal(local, agreed.to(dtype))
        assert torch.count_nonzero(pseudo_gradient(agreed, local)) == 0
