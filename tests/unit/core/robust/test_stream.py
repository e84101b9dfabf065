"""Both passes together: screens, then the rule; streamed and at once; in whatever order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from outerstep.core.robust import (
    Bucketing,
    Candidate,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Rule,
    Screening,
    ScreenVerdict,
    Tensors,
    TensorSpan,
    TrimmedMean,
    aggregate,
    cut,
)
from outerstep.errors import ConfigError, NotFinite

SHAPES: dict[str, tuple[int, ...]] = {"w": (70, 301), "scalar": (), "empty": (0, 3), "b": (4097,)}
RULES: list[Rule] = [
    Mean(),
    TrimmedMean(),
    Median(),
    Krum(),
    MultiKrum(),
    GeometricMedian(),
    CenteredClipping(),
    Bucketing(TrimmedMean(), seed="s"),
    Bucketing(GeometricMedian(), seed="s"),
    Bucketing(CenteredClipping(), seed="s"),
]
IDS = [f"worker-{i}" for i in range(8)]


def model(seed: int) -> dict[str, Tensor]:
    generator, common = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    return {
        name: torch.randn(shape, generator=generator) + 0.4 * torch.randn(shape, generator=common)
        for name, shape in SHAPES.items()
    }


def combined(
    models: list[dict[str, Tensor]],
    rule: Rule,
    *,
    weights: list[float] | None = None,
    order: list[int] | None = None,
    stack_values: int = 1 << 20,
    screening: Screening = Screening(cosine=True),  # noqa: B008 (frozen)
) -> tuple[dict[str, Tensor], ScreenVerdict]:
    made = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    candidates = [
        Candidate[TensorSpan](IDS[i], Tensors(each), weights[i] if weights else 1.0) for i, each in enumerate(models)
    ]
    blocks = cut({name: tensor.numel() for name, tensor in made.items()}, len(models), stack_values=stack_values)
    verdict = aggregate(
        [candidates[i] for i in order] if order else candidates,
        blocks,
        Tensors(made),
        rule,
        screening=screening,
        centre=Tensors(model(1234)),
    )
    return made, verdict


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
class TestWhateverTheRule:
    def weights(self, rule: Rule, weighted: bool) -> list[float] | None:
        if weighted and rule.name == "krum":
            pytest.skip("Krum refuses weights")
        return [1.0, 2.5, 0.7, 1.0, 3.0, 1.1, 1.0, 0.3] if weighted else None

    def test_blocks_of_any_size_give_the_same_bits(self, rule: Rule, weighted: bool) -> None:
        models, weights = [model(i) for i in range(8)], self.weights(rule, weighted)
        whole, _ = combined(models, rule, weights=weights, stack_values=1 << 30)
        for stack_values in (1, 8 * 4096 * 3):
            assert same(combined(models, rule, weights=weights, stack_values=stack_values)[0], whole)
        assert all(torch.isfinite(tensor).all() for tensor in whole.values())

    def test_the_order_in_which_they_come_makes_no_difference(self, rule: Rule, weighted: bool) -> None:
        models, weights = [model(i) for i in range(8)], self.weights(rule, weighted)
        models[5]["w"] *= 50.0
        expected = combined(models, rule, weights=weights)
        order = list(range(8))
        for seed in range(3):
            random.Random(seed).shuffle(order)
            made, verdict = combined(models, rule, weights=weights, order=order)
            assert same(made, expected[0])
            assert verdict == expected[1]

    def test_the_refused_leave_no_trace(self, rule: Rule, weighted: bool) -> None:
        models, weights = [model(i) for i in range(8)], self.weights(rule, weighted)
        made = []
        for spoiled in (torch.nan, torch.inf, 1e30):
            models[3] = {name: torch.full(shape, spoiled) for name, shape in SHAPES.items()}
            values, verdict = combined(models, rule, weights=weights)
            assert verdict.accepted == tuple(IDS[:3] + IDS[4:])
            assert verdict.refused.keys() == {IDS[3]}
            made.append(values)
        assert same(made[0], made[1])
        assert same(made[0], made[2])


class TestScreening:
    def test_each_screen_says_why(self) -> None:
        models = [model(i) for i in range(8)]
        models[1]["w"][3, 3] = torch.nan
        models[2] = {name: tensor * 100 for name, tensor in models[2].items()}
        models[4] = {name: -tensor for name, tensor in models[4].items()}
        _, verdict = combined(models, Mean())
        assert verdict.refused[IDS[1]] == "it holds NaN or Inf"
        assert "more than 2 times the usual" in verdict.refused[IDS[2]]
        assert "its cosine with the mean of the others" in verdict.refused[IDS[4]]
        assert verdict.accepted == tuple(IDS[i] for i in (0, 3, 5, 6, 7))
        assert len(verdict.rates) == 5

    def test_the_cosine_screen_is_a_choice(self) -> None:
        models = [model(i) for i in range(8)]
        models[4] = {name: -tensor for name, tensor in models[4].items()}
        assert combined(models, Mean(), screening=Screening())[1].refused == {}

    def test_the_history_is_what_is_usual(self) -> None:
        models = [model(i) for i in range(5)]
        length = float(torch.cat([tensor.flatten() for tensor in models[0].values()]).norm())
        models[0] = {name: 3 * tensor for name, tensor in models[0].items()}
        usual = ((2 * length,), (2 * length,))
        assert combined(models, Mean(), screening=Screening(usual))[1].refused == {}
        assert combined(models, Mean(), screening=Screening())[1].refused.keys() == {IDS[0]}

    def test_a_bad_contribution_cannot_make_the_rest_too_few(self) -> None:
        """Five are enough for a trim of 0.2, Krum and the cosine screen; four would not be."""
        for rule in (TrimmedMean(0.2), Krum(), MultiKrum(), Median()):
            models = [model(i) for i in range(5)]
            models[0]["b"][0] = torch.nan
            made, verdict = combined(models, rule)
            assert verdict.accepted == tuple(IDS[1:5])
            assert torch.isfinite(made["w"]).all()

    def test_if_nothing_is_finite_nothing_is_written(self) -> None:
        models = [{name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()} for _ in range(5)]
        with pytest.raises(NotFinite, match="none of the 5 contributions is finite"):
            combined(models, Mean())

    def test_too_few_are_refused_before_anything_is_read(self) -> None:
        class Unreadable:
            def read(self, block: TensorSpan, out: Tensor) -> None:
                raise AssertionError("it was read")

        few = [Candidate[TensorSpan](worker, Unreadable()) for worker in "abcd"]
        with pytest.raises(ConfigError, match="trims nothing"):
            aggregate(few, cut({"x": 10}, 4), Tensors({"x": torch.empty(10)}), TrimmedMean(0.2))
        with pytest.raises(ConfigError, match="cosine screen needs at least 5"):
            aggregate(few, cut({"x": 10}, 4), Tensors({"x": torch.empty(10)}), screening=Screening(cosine=True))

    def test_a_worker_cannot_come_twice(self) -> None:
        twice = [Candidate[TensorSpan]("a", Tensors({"x": torch.ones(3)})) for _ in range(3)]
        with pytest.raises(ConfigError, match="'a' came twice"):
            aggregate(twice, cut({"x": 3}, 3), Tensors({"x": torch.empty(3)}))

    def test_steps_count_by_their_root(self) -> None:
        values = [torch.ones(100) for _ in range(3)] + [torch.full((100,), 2.5)]
        for steps, refused in ((1, {"3"}), (2, set())):
            candidates = [
                Candidate[TensorSpan](str(i), Tensors({"x": each}), steps=steps if i == 3 else 1)
                for i, each in enumerate(values)
            ]
            verdict = aggregate(candidates, cut({"x": 100}, 4), Tensors({"x": torch.empty(100)}))
            assert verdict.refused.keys() == refused


def test_contributions_with_known_norms_are_read_once() -> None:
    reads = 0

    class Counting:
        def __init__(self, value: float) -> None:
            self.value = value

        def read(self, block: TensorSpan, out: Tensor) -> None:
            nonlocal reads
            reads += 1
            out.fill_(self.value)

    out = {"x": torch.empty(100)}
    for norms, expected in (([10.0, 10.0, 10.0, 90.0], 3), ([10.0, 10.0, 10.0, None], 7)):
        reads = 0
        candidates = [
            Candidate[TensorSpan](str(i), Counting(value), norm=norm)
            for i, (value, norm) in enumerate(zip((1.0, 1.0, 1.0, 9.0), norms, strict=True))
        ]
        verdict = aggregate(candidates, cut({"x": 100}, 4), Tensors(out), Median())
        assert reads == expected
        assert verdict.refused.keys() == {"3"}
        assert verdict.rates == (10.0, 10.0, 10.0)
        assert torch.equal(out["x"], torch.ones(100))


def test_memory_is_one_block_of_each_however_large_the_model_is() -> None:
    largest = 0

    class Counting:
        def read(self, block: TensorSpan, out: Tensor) -> None:
            nonlocal largest
            largest = max(largest, out.untyped_storage().nbytes() // 4)
            out.fill_(1.0)

    class Nowhere:
        def write(self, block: TensorSpan, values: Tensor) -> None:
            assert torch.equal(values, torch.ones(block.count))

    candidates = [Candidate[TensorSpan](worker, Counting()) for worker in "abcdefgh"]
    aggregate(candidates, cut({"x": 3_000_000}, 8), Nowhere(), Median(), screening=Screening(cosine=True))
    assert largest <= 1 << 20  # values, of all eight together


class TestForAServer:
    """Which looked at every contribution while it arrived."""

    @pytest.mark.parametrize("rule", RULES, ids=repr)
    def test_what_it_refused_is_as_if_refused_here(self, rule: Rule) -> None:
        models = [model(i) for i in range(8)]
        models[3] = {name: 100 * tensor for name, tensor in models[3].items()}
        expected, verdict = combined(models, rule)
        assert verdict.refused.keys() == {IDS[3]}

        class Unreadable:
            def read(self, block: TensorSpan, out: Tensor) -> None:
                raise AssertionError("it was read")

        made = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        candidates = [
            Candidate[TensorSpan](
                IDS[i], Unreadable() if i == 3 else Tensors(each), refused="too long" if i == 3 else ""
            )
            for i, each in enumerate(models)
        ]
        blocks = cut({name: tensor.numel() for name, tensor in made.items()}, 8)
        screening = Screening(cosine=True, arrived=True)
        found = aggregate(candidates, blocks, Tensors(made), rule, screening=screening, centre=Tensors(model(1234)))
        assert same(made, expected)
        assert (found.accepted, found.unused) == (verdict.accepted, verdict.unused)
        assert (found.refused, found.rates) == ({}, ())

    def test_norms_are_not_looked_at_again(self) -> None:
        models = [model(i) for i in range(8)]
        models[3] = {name: 100 * tensor for name, tensor in models[3].items()}
        assert combined(models, Median(), screening=Screening(arrived=True))[1].accepted == tuple(IDS)


@pytest.mark.parametrize(
    ("rule", "n", "unused"),
    [(Krum(), 8, 7), (MultiKrum(2), 8, 2), (Bucketing(Krum(), seed="s"), 10, 8), (Median(), 8, 0)],
    ids=repr,
)
def test_who_was_not_chosen_is_named_and_leaves_no_trace(rule: Rule, n: int, unused: int) -> None:
    models = {f"worker-{i}": model(i) for i in range(n)}
    made = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    candidates = [Candidate[TensorSpan](worker, Tensors(each)) for worker, each in models.items()]
    verdict = aggregate(candidates, cut({name: each.numel() for name, each in made.items()}, n), Tensors(made), rule)
    assert len(verdict.unused) == unused
    assert verdict.accepted == tuple(models)
    chosen = [each for worker, each in models.items() if worker not in verdict.unused]
    for name in SHAPES if unused else ():
        torch.testing.assert_close(made[name], torch.stack([each[name] for each in chosen]).mean(0))


@pytest.mark.parametrize("stack_values", [1, 1 << 20])
def test_beside_what_a_rule_makes_the_norm_of_the_plain_mean_is_told(stack_values: int) -> None:
    models, weights = [model(seed) for seed in range(4)], [1.0, 2.5, 0.5, 4.0]
    verdict = combined(models, Median(), weights=weights, stack_values=stack_values, screening=Screening())[1]
    mean = {
        name: sum(weight * each[name].double() for weight, each in zip(weights, models, strict=True)) / sum(weights)
        for name in SHAPES
    }
    expected = math.sqrt(sum(float(value.square().sum()) for value in mean.values() if isinstance(value, Tensor)))
    assert verdict.mean_norm == pytest.approx(expected, rel=1e-5)
    assert combined(models, Mean(), weights=weights, screening=Screening())[1].mean_norm is None
