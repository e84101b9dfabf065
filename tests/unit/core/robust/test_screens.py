"""Who is refused before any rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outerstep.core.robust import Tensors, cosine_screen, cut, norm_screen, remember
from outerstep.core.robust.products import Products, products
from outerstep.core.robust.screens import HISTORY_ROUNDS, History, check_history, cosines, rate
from outerstep.errors import ConfigError


class TestNormScreen:
    def test_more_than_twice_the_usual_is_refused_and_the_reason_named(self) -> None:
        refused = norm_screen([1.0, 2.0, 2.1, 0.1], ((1.0, 1.0), (1.0,)))
        assert refused == {2: "its ‖Δ‖/√steps is 2.1, more than 2 times the usual 1"}

    def test_without_history_the_rounds_own_median_counts(self) -> None:
        assert norm_screen([1.0, 1.0, 1.0, 5.0]).keys() == {3}

    @pytest.mark.parametrize("rates", [[], [7.0], [1.0, 1000.0]])
    def test_fewer_than_three_are_not_screened(self, rates: list[float]) -> None:
        assert norm_screen(rates) == norm_screen(rates, ((0.001,),)) == {}

    def test_a_majority_that_has_grown_is_no_attack(self) -> None:
        """While the learning rate warms up, each round is several times longer than the one before."""
        assert norm_screen([3.0, 3.1, 2.9, 300.0], ((1.0, 1.0, 1.0),)).keys() == {3}

    def test_warming_up_never_ends_in_a_dead_end(self) -> None:
        history: History = ()
        for n in range(1, 20):
            rates = [3.0**n * each for each in (0.9, 1.0, 1.1)]
            assert norm_screen(rates, history) == {}
            history = remember(history, rates)

    def test_half_is_not_a_majority(self) -> None:
        assert norm_screen([1.0, 1.0, 9.0, 9.0], ((1.0,),)).keys() == {2, 3}

    def test_after_rounds_of_zeros_the_first_real_one_is_accepted(self) -> None:
        assert norm_screen([1.0, 1.0, 1.0], ((0.0, 0.0, 0.0),)) == {}
        assert norm_screen([0.0, 0.0, 0.0]) == {}

    def test_more_steps_may_go_farther(self) -> None:
        assert rate(6.0, 9) == rate(2.0, 1) == 2.0
        with pytest.raises(ConfigError, match="at least one step in it, got 0"):
            rate(1.0, 0)

    def test_eight_rounds_are_remembered_and_empty_ones_are_not(self) -> None:
        history: History = ()
        for n in range(20):
            history = remember(history, [float(n)])
            history = remember(history, [])
        assert history == tuple((float(n),) for n in range(20 - HISTORY_ROUNDS, 20))

    def test_a_saved_history_is_checked(self) -> None:
        check_history({"0": ((1.0, 2.0), (0.0,))})
        for wrong in (((math.nan,),), ((-1.0,),), ((),), ((1.0,),) * 9):
            with pytest.raises(ConfigError, match="norm history of fragment 0 must be"):
                check_history({"0": wrong})


def measured(x: Tensor) -> Products:
    return products([Tensors({"x": row}) for row in x], cut({"x": x.shape[1]}, len(x)), torch.device("cpu"))


def honest(n: int, seed: int = 0, m: int = 5000) -> Tensor:
    """A common direction with an eighth of the square, and noise of their own: cosine 1/8 between any two."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(m, generator=generator) * (1 / 8) ** 0.5 + torch.randn(n, m, generator=generator) * (7 / 8) ** 0.5
    )


class TestCosineScreen:
    def test_the_cosine_is_with_the_mean_of_the_others(self) -> None:
        x = honest(6)
        for i, found in enumerate(cosines(measured(x))):
            others = torch.cat([x[:i], x[i + 1 :]]).mean(0)
            assert found == pytest.approx(float(torch.cosine_similarity(x[i], others, dim=0)), abs=1e-5)

    @pytest.mark.parametrize("n", [5, 8, 16])
    def test_honest_ones_pass_and_a_flipped_one_does_not(self, n: int) -> None:
        x = honest(n)
        assert cosine_screen(measured(x)) == {}
        x[2] *= -1
        assert cosine_screen(measured(x)).keys() == {2}

    def test_two_of_eight_that_flip_are_found(self) -> None:
        x = honest(8)
        x[[1, 6]] *= -1
        assert cosine_screen(measured(x)).keys() == {1, 6}

    def test_at_most_a_minority_is_refused_and_the_lowest_first(self) -> None:
        x = torch.eye(5)
        x[:, 0] = torch.tensor([-5.0, -4.0, -3.0, 6.0, 6.1])  # three against two
        found = cosines(measured(x))
        refused = cosine_screen(measured(x))
        assert sum(cosine < -0.05 for cosine in found) > 2
        assert set(refused) == set(sorted(range(5), key=lambda i: found[i])[:2])

    def test_zeros_have_no_direction_and_pass(self) -> None:
        x = honest(6)
        x[0] = 0.0
        assert cosine_screen(measured(x)) == {}
        assert cosine_screen(measured(torch.zeros(5, 10))) == {}

    def test_fewer_than_five_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="needs at least 5 contributions, got 4"):
            cosine_screen(measured(honest(4)))
