"""Each rule against its plain form, at the edges of what it is defined for, and in what it must not depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import plain_rules as plain
from amounts import cases
from outerstep.core.aggregate import weighted_mean
from outerstep.core.robust import (
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Rule,
    Tensors,
    TrimmedMean,
    cut,
)
from outerstep.core.robust.buckets import deal
from outerstep.core.robust.centres import distances_to
from outerstep.core.robust.coordinates import ascending, comparators
from outerstep.core.robust.products import products
from outerstep.core.robust.rule import RuleInputs, to_bf16
from outerstep.core.robust.selection import krum_scores
from outerstep.errors import ConfigError

PROPERTY = cases(60)
CPU = torch.device("cpu")
counts = st.integers(3, 9)
sizes = st.sampled_from([1, 2, 7, 33])
seeds = st.integers(0, 2**31)


def some(n: int, m: int, seed: int) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed)) + 0.3


def some_weights(n: int, seed: int) -> list[int]:
    return torch.randint(1, 6, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def applied(rule: Rule, x: Tensor, weights: Sequence[float] | None = None, centre: Tensor | None = None) -> Tensor:
    """The rule alone, without any screen, over one block."""
    each = tuple(float(w) for w in weights) if weights is not None else (1.0,) * len(x)
    rule.check(len(x), each)
    rows = x if not rule.needs_centre else torch.cat([torch.zeros(1, x.shape[1]) if centre is None else centre, x])
    readers = [Tensors({"x": row}) for row in rows]
    found = products(readers, cut({"x": x.shape[1]}, len(rows)), CPU) if rule.needs_products else None
    return rule.begin(RuleInputs(len(x), each, found))(rows.clone())


def near(out: Tensor, expected: plain.Matrix, tolerance: float) -> None:
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=tolerance, atol=tolerance)


class TestAgainstThePlainForm:
    @PROPERTY
    @given(n=st.integers(1, 9), m=sizes, seed=seeds)
    def test_mean(self, n: int, m: int, seed: int) -> None:
        x, w = some(n, m, seed), some_weights(n, seed)
        near(applied(Mean(), x, w), plain.mean(x.double().numpy(), w), 1e-5)
        assert torch.equal(applied(Mean(), x, w), weighted_mean(list(x), w))

    @PROPERTY
    @given(n=counts, m=sizes, seed=seeds, weighted=st.booleans())
    def test_trimmed_mean(self, n: int, m: int, seed: int, weighted: bool) -> None:
        x, w = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n
        for rule in (TrimmedMean(), TrimmedMean(0.34)):
            near(applied(rule, x, w), plain.trimmed_mean(x.double().numpy(), w, rule.trimmed(n)), 1e-5)

    @PROPERTY
    @given(n=counts, m=sizes, seed=seeds, weighted=st.booleans())
    def test_median(self, n: int, m: int, seed: int, weighted: bool) -> None:
        x, w = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n
        near(applied(Median(), x, w), plain.median(x.double().numpy(), w), 1e-6)

    @PROPERTY
    @given(n=st.integers(5, 9), m=sizes, seed=seeds)
    def test_krum(self, n: int, m: int, seed: int) -> None:
        x = some(n, m, seed)
        scores = plain.krum_scores(x.double().numpy(), 1)
        chosen = applied(Krum(), x)
        (index,) = [i for i in range(n) if torch.equal(chosen, x[i])]
        assert scores[index] <= min(scores) * (1 + 1e-5)

    @PROPERTY
    @given(n=st.integers(5, 9), m=sizes, seed=seeds, weighted=st.booleans(), keep=st.sampled_from([None, 1, 3]))
    def test_multi_krum(self, n: int, m: int, seed: int, weighted: bool, keep: int | None) -> None:
        x, w = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n
        scores, kept = sorted(plain.krum_scores(x.double().numpy(), 1)), keep or n - 1
        if scores[kept] - scores[kept - 1] > 1e-5 * scores[kept]:  # otherwise either may be left out
            expected = plain.multi_krum(x.double().numpy(), w, 1, kept)
            near(applied(MultiKrum(keep=keep), x, w), expected, 1e-5)

    @PROPERTY
    @given(n=counts, m=sizes, seed=seeds, weighted=st.booleans())
    def test_geometric_median_has_the_least_sum_of_distances(self, n: int, m: int, seed: int, weighted: bool) -> None:
        x, w = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n
        found = applied(GeometricMedian(iterations=500), x, w).double().numpy()
        xs = x.double().numpy()
        best = plain.geometric_median(xs, w)

        def cost(v: plain.Matrix) -> float:
            return float((np.array(w) * np.linalg.norm(xs - v, axis=1)).sum())

        assert cost(found) <= cost(best) * 1.005  # the pulls are rounded to bf16
        assert cost(found) <= min(cost(each) for each in [*xs, plain.mean(xs, w)]) * 1.005

    @PROPERTY
    @given(
        n=st.integers(1, 9),
        m=sizes,
        seed=seeds,
        weighted=st.booleans(),
        radius=st.sampled_from([None, 0.1, 2.0, 1e6]),
        iterations=st.integers(1, 3),
    )
    def test_centered_clipping(
        self, n: int, m: int, seed: int, weighted: bool, radius: float | None, iterations: int
    ) -> None:
        x, w, start = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n, some(1, m, seed + 1)
        rule = CenteredClipping(radius, iterations)
        expected = plain.centered_clipping(x.double().numpy(), w, start.double().numpy()[0], radius, iterations)
        largest = float((x - start).abs().max()) + 1.0
        near(applied(rule, x, w, start), expected, 0.005 * largest)

    @PROPERTY
    @given(n=st.integers(9, 13), m=sizes, seed=seeds, weighted=st.booleans())
    def test_bucketing(self, n: int, m: int, seed: int, weighted: bool) -> None:
        x, w = some(n, m, seed), some_weights(n, seed) if weighted else [1] * n
        groups = deal(n, 2, "round 7")
        xs = x.double().numpy()
        means = np.stack([plain.mean(xs[group], [w[i] for i in group]) for group in groups])
        each = [sum(w[i] for i in group) for group in groups]
        near(applied(Bucketing(Median(), seed="round 7"), x, w), plain.median(means, each), 1e-5)
        near(applied(Bucketing(Mean(), seed="round 7"), x, w), plain.mean(xs, w), 1e-5)
        centre = some(1, m, seed + 1)
        near(
            applied(Bucketing(CenteredClipping(1.0, 2), seed="round 7"), x, w, centre),
            plain.centered_clipping(means, each, centre.double().numpy()[0], 1.0, 2),
            0.02,
        )
        scores = sorted(plain.krum_scores(means, 1))
        if scores[-1] - scores[-2] > 1e-5 * scores[-1]:
            expected = plain.multi_krum(means, each, 1, len(groups) - 1)
            near(applied(Bucketing(MultiKrum(), seed="round 7"), x, w), expected, 1e-5)


ALL = [
    Mean(),
    TrimmedMean(),
    TrimmedMean(0.4),
    Median(),
    Krum(),
    MultiKrum(),
    GeometricMedian(),
    CenteredClipping(),
    Bucketing(Mean()),
    Bucketing(TrimmedMean()),
    Bucketing(Krum()),
    Bucketing(CenteredClipping()),
]


@pytest.mark.parametrize("rule", ALL, ids=repr)
class TestEveryRule:
    def test_it_works_with_as_few_as_it_says_and_refuses_one_fewer(self, rule: Rule) -> None:
        assert applied(rule, some(rule.fewest, 5, 0)).shape == (5,)
        if rule.fewest > 1:
            with pytest.raises(ConfigError, match=r"contributions, got|trims nothing"):
                applied(rule, some(rule.fewest - 1, 5, 0))

    def test_no_values_are_no_values(self, rule: Rule) -> None:
        assert applied(rule, torch.zeros(rule.fewest, 0)).shape == (0,)

    def test_a_single_value_is_between_the_smallest_and_the_largest(self, rule: Rule) -> None:
        x = some(rule.fewest + 2, 1, 3)
        assert x.min() * 0.99 - 0.01 <= applied(rule, x) <= x.max() * 1.01

    def test_equal_contributions_give_themselves(self, rule: Rule) -> None:
        one = some(1, 33, 5)
        out = applied(rule, one.repeat(rule.fewest, 1))
        torch.testing.assert_close(out, one[0], rtol=1e-2 if rule.needs_centre else 1e-6, atol=0.0)

    def test_zeros_give_zeros(self, rule: Rule) -> None:
        assert torch.equal(applied(rule, torch.zeros(rule.fewest, 9)), torch.zeros(9))

    def test_a_power_of_two_in_front_stays_in_front_bit_for_bit(self, rule: Rule) -> None:
        x = some(9, 33, 6)
        assert torch.equal(applied(rule, x * 2.0**-13), applied(rule, x) * 2.0**-13)

    def test_whoever_is_left_of_the_offered_is_combined(self, rule: Rule) -> None:
        """Screens may leave fewer than `fewest`: the rule goes on."""
        x, first = some(1, 5, 8), int(rule.needs_centre)
        rows = torch.cat([torch.zeros(first, 5), x])
        found = products([Tensors({"x": row}) for row in rows], cut({"x": 5}, 2), CPU) if rule.needs_products else None
        out = rule.begin(RuleInputs(rule.fewest, (1.0,), found))(rows.clone())
        torch.testing.assert_close(out, x[0])

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_weight_that_is_no_positive_number_is_refused(self, rule: Rule, weight: float) -> None:
        with pytest.raises(ConfigError, match="weight must be a number > 0"):
            rule.check(rule.fewest, [1.0] * (rule.fewest - 1) + [weight])


@pytest.mark.parametrize("rule", [rule for rule in ALL if not rule.needs_centre], ids=repr)
def test_moving_everybody_moves_the_result(rule: Rule) -> None:
    """Centered clipping starts from a centre that stays where it was."""
    x, by = some(9, 33, 7), torch.linspace(-4.0, 4.0, 33)
    torch.testing.assert_close(applied(rule, x + by), applied(rule, x) + by, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rule", [TrimmedMean(), Median(), GeometricMedian(), Krum(), MultiKrum()], ids=repr)
def test_one_of_nine_cannot_drag_it_away(rule: Rule) -> None:
    x = some(9, 33, 9)
    x[4] = 1e6
    assert (applied(rule, x) - x[[0, 1, 2, 3, 5, 6, 7, 8]].mean(0)).abs().max() < 4.0


class TestTrimmedMean:
    def test_a_fraction_that_trims_nothing_is_refused_with_one_that_does(self) -> None:
        with pytest.raises(ConfigError, match=r"trim_fraction 0.2 of 4 contributions trims nothing .* is 0.25, .* 5"):
            TrimmedMean(0.2).check(4, [1.0] * 4)
        TrimmedMean(0.25).check(4, [1.0] * 4)
        TrimmedMean(0.2).check(5, [1.0] * 5)

    @pytest.mark.parametrize("n", range(3, 200))
    def test_the_fraction_that_the_error_names_works(self, n: int) -> None:
        assert TrimmedMean(1.0 / n).trimmed(n) == 1
        TrimmedMean(1.0 / n).check(n, [1.0] * n)
        with pytest.raises(ConfigError) as caught:
            TrimmedMean(0.5 / n).check(n, [1.0] * n)
        named = float(str(caught.value).split("trims one is ")[1].split(",")[0])
        TrimmedMean(named).check(n, [1.0] * n)

    def test_left_out_it_is_a_fifth_and_never_nothing(self) -> None:
        assert [TrimmedMean().trimmed(n) for n in (3, 4, 5, 9, 10, 15)] == [1, 1, 1, 1, 2, 3]

    @pytest.mark.parametrize("fraction", [0.0, -0.1, 0.5, 0.9, float("nan")])
    def test_a_fraction_outside_its_range_is_refused(self, fraction: float) -> None:
        with pytest.raises(ConfigError, match="trim_fraction must be above 0 and below"):
            TrimmedMean(fraction)

    def test_when_screens_left_fewer_it_trims_what_was_assumed_if_it_can(self) -> None:
        x = torch.tensor([[1.0], [2.0], [4.0], [100.0]])
        assert TrimmedMean(0.2).begin(RuleInputs(5, (1.0,) * 4))(x).tolist() == [3.0]

    def test_equal_and_unequal_weights_take_the_same_way(self) -> None:
        x = some(8, 500, 1)
        nearly = [3.0] * 7 + [3.0 + 2.0**-40]  # which is 3 in fp32
        torch.testing.assert_close(applied(TrimmedMean(), x, nearly), applied(TrimmedMean(), x, [3.0] * 8))


class TestMedian:
    def test_the_sign_of_a_zero_is_not_left_to_chance(self) -> None:
        zeros = torch.tensor([[0.0], [-0.0], [-0.0]])
        for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
            for rule in (Median(), TrimmedMean()):
                assert not torch.signbit(applied(rule, zeros[order])).item()

    def test_a_small_weight_beside_large_ones_still_tips_the_balance(self) -> None:
        weights = [2.0**24, 1.0, 2.0**24]  # fp32 could not tell 2²⁴ + 1 from 2²⁴
        assert applied(Median(), torch.tensor([[0.0], [1.0], [5.0]]), weights) == 1.0

    def test_weights_that_balance_exactly_give_the_middle_of_two(self) -> None:
        assert applied(Median(), torch.tensor([[1.0], [5.0], [7.0]]), [2, 1, 1]).tolist() == [3.0]


class TestSortingNetwork:
    @pytest.mark.parametrize("n", range(1, 13))
    def test_it_sorts_every_pattern_of_zeros_and_ones(self, n: int) -> None:
        """…and hence everything (the 0-1 principle)."""
        patterns = (torch.arange(2**n)[None, :] >> torch.arange(n)[:, None] & 1).float()
        assert torch.equal(torch.stack(ascending(patterns)), patterns.sort(dim=0).values)
        assert all(i < j < n for i, j in comparators(n))


class TestKrum:
    def test_too_few_for_so_many_attackers_are_refused_with_what_would_do(self) -> None:
        with pytest.raises(ConfigError, match=r"krum against 2 attackers needs n ≥ 2f \+ 3 = 7 .* got 6; assume 1"):
            Krum(2).check(6, [1.0] * 6)
        with pytest.raises(ConfigError, match="got 7; assume 2 at most,"):
            Krum(3).check(7, [1.0] * 7)
        with pytest.raises(ConfigError, match=r"multi_krum against 1 attackers .* got 4; wait for five"):
            MultiKrum(1).check(4, [1.0] * 4)

    def test_without_neighbours_all_scores_are_equal(self) -> None:
        found = products([Tensors({"x": row}) for row in some(3, 5, 1)], cut({"x": 5}, 3), CPU)
        assert krum_scores(found, 1) == [0.0] * 3

    def test_of_those_that_a_screen_left_no_more_are_taken_for_attackers_than_they_withstand(self) -> None:
        """Of five one was refused. Four withstand none, so that each counts its two nearest, not one."""
        x = torch.tensor([[0.0], [0.5], [5.0], [6.0]])
        found = products([Tensors({"x": row}) for row in x], cut({"x": 1}, 4), CPU)
        assert Krum(1).begin(RuleInputs(5, (1.0,) * 4, found))(x) == x[1]

    def test_krum_refuses_weights_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"krum takes one .* cannot weigh them, got weights from 1 to 2"):
            Krum().check(5, [1.0, 1.0, 1.0, 1.0, 2.0])

    def test_between_copies_the_first_one_is_taken(self) -> None:
        x = some(6, 20, 2)
        x[4] = x[1]
        found = products([Tensors({"x": row}) for row in x], cut({"x": 20}, 6), CPU)
        assert found.distances2()[1][4] == 0.0
        assert krum_scores(found, 1)[1] == krum_scores(found, 1)[4]

    def test_settings_out_of_range_are_refused(self) -> None:
        for make in (lambda: Krum(0), lambda: MultiKrum(-1), lambda: MultiKrum(keep=0)):
            with pytest.raises(ConfigError, match="must be at least 1"):
                make()


class TestCentres:
    def test_distances_to_a_mixture_follow_from_those_between_its_parts(self) -> None:
        x = some(5, 40, 0).double()
        mixture = [0.1, 0.2, 0.3, 0.25, 0.15]
        squares = torch.cdist(x, x).square().tolist()
        expected = torch.linalg.vector_norm(x - torch.tensor(mixture, dtype=torch.float64) @ x, dim=1)
        np.testing.assert_allclose(distances_to(mixture, squares), expected.numpy(), rtol=1e-9)

    def test_clipping_nobody_is_the_mean_bit_for_bit(self) -> None:
        x, w = some(7, 100, 4), some_weights(7, 4)
        for iterations in (1, 2, 3):
            assert torch.equal(applied(CenteredClipping(1e9, iterations), x, w), weighted_mean(list(x), w))

    def test_a_clipped_one_pulls_no_farther_than_the_radius(self) -> None:
        x = torch.zeros(4, 10)
        x[3, 0] = 1e8
        assert applied(CenteredClipping(2.0, 1), x)[0] == pytest.approx(2.0 / 4, rel=0.01)

    def test_a_far_outlier_is_let_go_by_the_geometric_median(self) -> None:
        x = some(8, 50, 3)
        x[0] = 1e9
        out = applied(GeometricMedian(), x)
        assert (
            torch.linalg.vector_norm(out - x[1:].mean(0)) < torch.linalg.vector_norm(x[1:] - x[1:].mean(0), dim=1).max()
        )

    @pytest.mark.parametrize(
        "make",
        [
            lambda: GeometricMedian(iterations=0),
            lambda: GeometricMedian(smoothing=0.0),
            lambda: CenteredClipping(radius=0.0),
            lambda: CenteredClipping(radius=float("nan")),
            lambda: CenteredClipping(iterations=0),
        ],
    )
    def test_settings_out_of_range_are_refused(self, make: type) -> None:
        with pytest.raises(ConfigError, match="must be"):
            make()

    def test_bf16_is_what_torch_makes_of_it(self) -> None:
        x = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
        assert [to_bf16(each) for each in x.tolist()] == x.to(torch.bfloat16).tolist()
        assert to_bf16(0.0) == 0.0


class TestBuckets:
    def test_everybody_is_in_one_bucket_and_the_seed_decides_which(self) -> None:
        groups = deal(9, 2, "a")
        assert sorted(i for group in groups for i in group) == list(range(9))
        assert [len(group) for group in groups] == [2, 2, 2, 2, 1]
        assert groups == deal(9, 2, "a")
        assert len({str(deal(9, 2, f"round {i}")) for i in range(20)}) > 15

    def test_the_rule_over_buckets_needs_more_contributions(self) -> None:
        with pytest.raises(ConfigError, match=r"8 contributions are 4 buckets .* needs n ≥ 2f \+ 3 = 5"):
            Bucketing(MultiKrum()).check(8, [1.0] * 8)

    def test_buckets_of_one_and_of_buckets_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least 2"):
            Bucketing(Mean(), 1)
        with pytest.raises(ConfigError, match="larger size"):
            Bucketing(Bucketing(Mean()))
