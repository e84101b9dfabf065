"""Who is refused for pointing away from the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outerstep.core.robust import Tensors, cosine_screen, cut
from outerstep.core.robust.cosines import cosines
from outerstep.core.robust.products import Products, products
from outerstep.errors import ConfigError


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
        assert cosines(measured(x / 1024)) == pytest.approx(cosines(measured(x))), "whatever their length"

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
        assert cosines(measured(x))[0] == 0.0
        assert cosine_screen(measured(x)) == {}
        assert cosine_screen(measured(torch.zeros(5, 10))) == {}

    def test_fewer_than_five_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="needs at least 5 contributions, got 4"):
            cosine_screen(measured(honest(4)))
