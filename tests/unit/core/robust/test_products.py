"""Inner products: right, and the same whatever the cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.robust.products import Products, products, squares
from outerstep.core.robust.streams import LEAF_VALUES, Tensors, TensorSpan, check_blocks, cut
from outerstep.errors import ConfigError

CPU = torch.device("cpu")


def some(n: int, m: int, seed: int = 0) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed))


def found(x: Tensor, stack_values: int = 1 << 20) -> Products:
    sizes = {"a": x.shape[1] // 3, "b": x.shape[1] - x.shape[1] // 3}
    rows = [Tensors({"a": row[: sizes["a"]], "b": row[sizes["a"] :]}) for row in x]
    return products(rows, cut(sizes, len(x), stack_values=stack_values), CPU)


class TestProducts:
    @cases(40)
    @given(n=st.integers(1, 6), m=st.sampled_from([0, 1, 5, 4096, 4097, 20_000]), seed=st.integers(0, 2**31))
    def test_they_are_those_of_the_values(self, n: int, m: int, seed: int) -> None:
        x = some(n, m, seed)
        expected = (x.double() @ x.double().T).numpy()
        norms = np.sqrt(np.diag(expected))
        error = np.abs(np.array(found(x).rows) - expected)
        assert (error <= 2.0**-19 * norms[:, None] * norms[None, :] + 1e-300).all()

    def test_values_made_to_be_rounded_to_one_side_change_a_norm_by_little(self) -> None:
        quantum = 2.0**-20
        x = torch.full((1, 4096), (2**14 + 0.499) * quantum)
        x[0, 0] = 0.5
        exact = float(torch.linalg.vector_norm(x.double()))
        assert 1e-6 < abs(found(x.repeat(1, 3)).norm(0) / math.sqrt(3) / exact - 1) < 1 / 30_000

    @pytest.mark.parametrize("factor", [1e-30, 1e-10, 1e10, 1e18])
    def test_contributions_of_very_different_size_do_not_blur_each_other(self, factor: float) -> None:
        x = some(3, 9000)
        x[1] *= factor
        expected = x[0].double() @ x[2].double()
        assert found(x).rows[0][2] == pytest.approx(float(expected), abs=1e-6 * 9000)
        assert found(x).norm(1) == pytest.approx(float(torch.linalg.vector_norm(x[1].double())), rel=1e-6)

    @pytest.mark.parametrize("stack_values", [1, 3 * 4096 * 3, 3 * 4096 * 7, 1 << 20])
    def test_the_cut_changes_no_bit(self, stack_values: int) -> None:
        x = some(3, 100_001)
        assert found(x, stack_values) == found(x)

    def test_the_diagonal_alone_has_the_same_bits(self) -> None:
        x = some(4, 30_000)
        rows, blocks = [Tensors({"x": row}) for row in x], cut({"x": 30_000}, 4)
        full = products(rows, blocks, CPU)
        assert squares(rows, blocks, CPU) == [full.rows[i][i] for i in range(4)]

    def test_copies_are_at_distance_zero_and_nobody_below(self) -> None:
        x = some(4, 10_000)
        x[3] = x[0]
        x[2] = x[0] * (1 + 2.0**-23)
        distances = found(x).distances2()
        assert distances[0][3] == 0.0
        assert min(min(row) for row in distances) >= 0.0

    @pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_shows_and_stays_where_it_is(self, value: float) -> None:
        x = some(3, 9000)
        clean = found(x)
        x[1, 5000] = value
        rows = found(x).rows
        assert not math.isfinite(rows[1][1])
        assert Products(rows).of([0, 2]) == clean.of([0, 2])

    @pytest.mark.parametrize("value", [3.4e38, 1e-45, 2.0**-126, 2.0**-127])
    def test_the_largest_and_the_smallest_numbers_are_finite(self, value: float) -> None:
        x = torch.full((2, 5000), value)
        assert math.isfinite(found(x).norm(0))
        assert found(x).norm(0) <= value * math.sqrt(5000) * 1.000001

    def test_mixtures(self) -> None:
        x, mix = some(3, 50), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])
        np.testing.assert_allclose(found(x).mixed(mix.tolist()).rows, found(mix @ x).rows, rtol=1e-4, atol=1e-4)


class TestBlocks:
    @pytest.mark.parametrize("rows", [1, 8, 300])
    def test_they_cover_every_value_once_and_fit_the_room(self, rows: int) -> None:
        sizes = {"a": 700_001, "empty": 0, "b": 1}
        blocks = cut(sizes, rows)
        for name, size in sizes.items():
            of_it = [block for block in blocks if block.name == name]
            assert [i for block in of_it for i in (block.start, block.stop)] == (
                sorted([0, size, *(block.start for block in of_it[1:]), *(block.start for block in of_it[1:])])
                if size
                else []
            )
        assert all(block.count * rows <= max(1 << 20, rows * LEAF_VALUES) for block in blocks)
        check_blocks(blocks)

    def test_blocks_that_cut_a_leaf_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="begin at a multiple of 4096 values, got 100"):
            check_blocks([TensorSpan("x", 100, 200)])
        with pytest.raises(ConfigError, match="no multiple of 4096, got 5000 before a block that begins at 8192"):
            check_blocks([TensorSpan("x", 0, 5000), TensorSpan("x", 8192, 9000)])
        check_blocks([TensorSpan("x", 0, 5000), TensorSpan("y", 0, 9000)])
