"""`RobustAggregator`: what it takes, what it refuses, what it remembers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import outerstep
from outerstep import RobustAggregator
from outerstep.core.aggregate import weighted_mean
from outerstep.core.robust import RULES, CenteredClipping, Median, TrimmedMean
from outerstep.core.robust.aggregator import make_rule
from outerstep.core.robust.buckets import Bucketing
from outerstep.core.robust.centres import GeometricMedian
from outerstep.core.robust.rule import Mean
from outerstep.core.robust.selection import Krum, MultiKrum
from outerstep.errors import ConfigError


def some(n: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(n)]


class TestWhatItTakes:
    def test_it_is_a_public_name(self) -> None:
        assert "RobustAggregator" in outerstep.__all__

    @pytest.mark.parametrize("aggregation", RULES)
    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 3, 4)])
    def test_the_shape_is_kept_and_the_inputs_are_left_alone(self, aggregation: str, shape: tuple[int, ...]) -> None:
        aggregator, deltas = RobustAggregator(aggregation), some(7, *shape)
        before = [delta.clone() for delta in deltas]
        made = aggregator.aggregate(deltas)
        assert made.shape == shape
        assert made.dtype == torch.float32
        assert all(torch.equal(a, b) for a, b in zip(deltas, before, strict=True))

    def test_tensor_by_tensor_or_by_name_the_values_are_the_same(self) -> None:
        """…where nobody is refused and the rule looks at one coordinate at a time."""
        models = [{"a": a, "b": b} for a, b in zip(some(5, 40), some(5, 3, 4, seed=1), strict=True)]
        aggregator = RobustAggregator()
        by_name = aggregator.aggregate(models)
        assert by_name.keys() == {"a", "b"}
        for name, values in by_name.items():
            assert torch.equal(aggregator.aggregate([model[name] for model in models]), values)

    def test_low_precision_and_strided_tensors_are_read_as_they_are(self) -> None:
        deltas = [each.to(torch.bfloat16).t() for each in some(5, 6, 4)]
        made = RobustAggregator("median").aggregate(deltas)
        assert torch.equal(made, torch.stack(deltas).float().median(dim=0).values)

    def test_weights_are_honoured(self) -> None:
        deltas = some(4, 10)
        made = RobustAggregator("mean").aggregate(deltas, [1.0, 2.0, 3.0, 4.0])
        assert torch.equal(made, weighted_mean(deltas, [1.0, 2.0, 3.0, 4.0]))

    def test_worker_ids_make_the_order_of_the_list_irrelevant(self) -> None:
        deltas, aggregator = some(6, 1000), RobustAggregator("mean")
        ids = list("fbadce")
        made = aggregator.aggregate(deltas, worker_ids=ids)
        assert torch.equal(aggregator.aggregate(deltas[::-1], worker_ids=ids[::-1]), made)
        assert not torch.equal(aggregator.aggregate(deltas), made)

    def test_the_order_of_the_names_makes_no_difference(self) -> None:
        models = [{f"{i:02d}": each[i] * 1.2**i for i in range(40)} for each in some(5, 40, 99)]
        turned = [dict(reversed(model.items())) for model in models]
        first, second = RobustAggregator("geometric_median"), RobustAggregator("geometric_median")
        for name, made in first.aggregate(models).items():
            assert torch.equal(second.aggregate(turned)[name], made)
        assert first.verdict == second.verdict

    def test_a_rule_with_settings_of_its_own(self) -> None:
        aggregator = RobustAggregator(CenteredClipping(radius=0.5))
        assert aggregator.aggregate(some(4, 30)).norm() < 1.6

    def test_the_seed_decides_the_buckets(self) -> None:
        aggregator, deltas = RobustAggregator("median", bucket_size=2), some(8, 50)
        assert aggregator.min_peers == 5
        made = aggregator.aggregate(deltas, seed="round 1")
        assert torch.equal(aggregator.aggregate(deltas, seed="round 1"), made)
        assert not torch.equal(aggregator.aggregate(deltas, seed="round 2"), made)


class TestDefaults:
    def test_three_peers_are_robust(self) -> None:
        deltas = [torch.tensor([1.0, 1.0]), torch.tensor([1.2, 0.9]), torch.tensor([1.1, -0.5])]
        aggregator = RobustAggregator()
        assert (aggregator.rule, aggregator.min_peers) == (TrimmedMean(), 3)
        torch.testing.assert_close(aggregator.aggregate(deltas), torch.tensor([1.1, 0.9]))

    def test_a_trim_that_trims_nothing_for_so_few_peers_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"trim_fraction 0.2 of 3 contributions trims nothing"):
            RobustAggregator("trimmed_mean", trim_fraction=0.2, min_peers=3)
        assert RobustAggregator(trim_fraction=0.2).min_peers == 5
        assert RobustAggregator(trim_fraction=0.34, min_peers=3).min_peers == 3

    @pytest.mark.parametrize(("aggregation", "fewest"), [("krum", 5), ("multi_krum", 5), ("median", 3), ("mean", 3)])
    def test_min_peers_follows_the_rule(self, aggregation: str, fewest: int) -> None:
        assert RobustAggregator(aggregation).min_peers == fewest

    def test_min_peers_follows_the_cosine_screen(self) -> None:
        assert RobustAggregator("mean", cosine_screen=True).min_peers == 5
        with pytest.raises(ConfigError, match="cosine screen needs at least 5"):
            RobustAggregator("mean", cosine_screen=True, min_peers=4)


class TestWhatItRefuses:
    def test_fewer_than_min_peers(self) -> None:
        with pytest.raises(ConfigError, match=r"at least 3 contributions \(min_peers\), got 2"):
            RobustAggregator().aggregate(some(2, 4))
        with pytest.raises(ConfigError, match="got 0"):
            RobustAggregator("mean", min_peers=1).aggregate([])

    def test_settings_that_make_no_sense(self) -> None:
        with pytest.raises(ConfigError, match=r"aggregation must be one of mean, trimmed_mean, .* got 'average'"):
            RobustAggregator("average")
        with pytest.raises(ConfigError, match=r"trim_fraction is for trimmed_mean, got 0.1 with median"):
            RobustAggregator("median", trim_fraction=0.1)
        with pytest.raises(ConfigError, match=r"trim_fraction is for trimmed_mean, got 0.1 with median"):
            RobustAggregator(Median(), trim_fraction=0.1)
        with pytest.raises(ConfigError, match="min_peers must be at least 1"):
            RobustAggregator("mean", min_peers=0)
        with pytest.raises(ConfigError, match="bucket must have at least 2"):
            RobustAggregator("mean", bucket_size=0)

    def test_lists_of_another_length(self) -> None:
        for wrong in ({"weights": [1.0]}, {"steps": [1] * 4}, {"worker_ids": ["a", "b"]}):
            with pytest.raises(
                ConfigError, match=rf"{next(iter(wrong))} must have one entry per pseudo-gradient \(3\)"
            ):
                RobustAggregator().aggregate(some(3, 4), **wrong)  # type: ignore[arg-type, call-overload]

    def test_other_tensors_naming_them_and_the_worker(self) -> None:
        models = [{"a": torch.ones(2), "b": torch.ones(3)} for _ in range(3)]
        models[2]["b"] = torch.ones(4)
        with pytest.raises(ConfigError, match=r"'b' is \(3,\) in 'x', \(4,\) in 'z'"):
            RobustAggregator().aggregate(models, worker_ids=["x", "y", "z"])
        del models[2]["b"]
        with pytest.raises(ConfigError, match=r"'b' is \(3,\) in 'x', missing in 'z'"):
            RobustAggregator().aggregate(models, worker_ids=["x", "y", "z"])

    def test_what_is_bad_is_named_in_the_verdict(self) -> None:
        deltas, aggregator = some(4, 100), RobustAggregator("mean")
        deltas[1][7] = torch.nan
        made = aggregator.aggregate(deltas, worker_ids=list("abcd"))
        assert aggregator.verdict is not None
        assert aggregator.verdict.refused == {"b": "it holds NaN or Inf"}
        assert torch.equal(made, weighted_mean([deltas[0], *deltas[2:]], [1.0] * 3))


class TestMemory:
    def test_a_fragments_norms_are_remembered_and_no_other_ones(self) -> None:
        aggregator = RobustAggregator("mean")
        for _ in range(3):
            aggregator.aggregate(some(4, 100), fragment=0)
        long = [each * factor for each, factor in zip(some(4, 100), (1.0, 1.0, 3.0, 3.0), strict=True)]
        aggregator.aggregate(long, fragment=0)
        assert aggregator.verdict is not None
        assert len(aggregator.verdict.refused) == 2
        aggregator.aggregate(long, fragment=1)
        assert aggregator.verdict.refused == {}

    def test_without_a_fragment_nothing_is_remembered(self) -> None:
        aggregator = RobustAggregator("centered_clipping")
        aggregator.aggregate(some(4, 10))
        assert aggregator.state_dict() == {"history": {}, "previous": {}}

    def test_centered_clipping_starts_from_the_previous_aggregate(self) -> None:
        aggregator, deltas = RobustAggregator(CenteredClipping(0.1, 1)), [torch.full((5,), 4.0)] * 3
        lengths = [float(aggregator.aggregate(deltas, fragment=0).norm()) for _ in range(4)]
        assert lengths == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.01)

    def test_who_takes_over_the_state_decides_alike(self) -> None:
        first, second = RobustAggregator("centered_clipping"), RobustAggregator("centered_clipping")
        for seed in range(10):
            first.aggregate([{"w": each} for each in some(5, 64, seed=seed)], fragment="embeddings")
        second.load_state_dict(first.state_dict())
        last = [{"w": each} for each in some(5, 64, seed=99)]
        assert torch.equal(
            first.aggregate(last, fragment="embeddings")["w"], second.aggregate(last, fragment="embeddings")["w"]
        )
        assert first.verdict == second.verdict
        assert len(first.state_dict()["history"]["embeddings"]) == 8

    def test_a_state_that_cannot_be_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="norm history of fragment 3"):
            RobustAggregator().load_state_dict({"history": {"3": [[float("inf")]]}, "previous": {}})


class TestARuleByItsName:
    def test_each_name_makes_its_rule_with_its_defaults(self) -> None:
        assert {name: make_rule(name) for name in RULES} == {
            "mean": Mean(),
            "trimmed_mean": TrimmedMean(),
            "median": Median(),
            "krum": Krum(1),
            "multi_krum": MultiKrum(1),
            "geometric_median": GeometricMedian(),
            "centered_clipping": CenteredClipping(),
        }

    def test_what_is_said_is_passed_on(self) -> None:
        assert make_rule("trimmed_mean", trim_fraction=0.3) == TrimmedMean(0.3)
        assert make_rule("krum", attackers=2) == Krum(2)
        assert make_rule("multi_krum", attackers=2) == MultiKrum(2)
        assert make_rule("geometric_median", iterations=5) == GeometricMedian(5)
        assert make_rule("centered_clipping", clip_radius=2.0) == CenteredClipping(2.0)
        assert make_rule("centered_clipping", clip_radius=2.0, iterations=5) == CenteredClipping(2.0, 5)
        assert make_rule("median", bucket_size=2) == Bucketing(Median(), 2)


def test_steps_are_what_the_norm_screen_divides_by() -> None:
    deltas = [torch.ones(4), torch.ones(4), torch.ones(4) * 6.0]
    aggregator = RobustAggregator("mean")
    aggregator.aggregate(deltas, steps=[1, 1, 36])
    assert aggregator.verdict is not None
    assert not aggregator.verdict.refused
    aggregator.aggregate(deltas, steps=[1, 1, 1])
    assert set(aggregator.verdict.refused) == {"000002"}


def test_a_single_peer_is_enough_where_that_is_said() -> None:
    alone = RobustAggregator("mean", min_peers=1)
    assert alone.verdict is None
    assert alone.aggregate([torch.ones(2)]).tolist() == [1.0, 1.0]
    assert alone.aggregate([{"w": torch.ones(2)}])["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_five_are_enough_for_the_cosine_screen_however_short_they_are(length: float) -> None:
    common = some(1, 1000)[0]
    deltas = [length * (common + each) for each in some(5, 1000, seed=1)]
    deltas[3] = -deltas[3]
    aggregator = RobustAggregator("mean", cosine_screen=True, min_peers=5)
    aggregator.aggregate(deltas)
    assert aggregator.verdict is not None
    assert set(aggregator.verdict.refused) == {"000003"}


@pytest.mark.parametrize("smoothing", [0.0, 1.0, 1.5])
def test_the_smoothing_of_a_geometric_median_is_a_fraction(smoothing: float) -> None:
    with pytest.raises(ConfigError):
        GeometricMedian(smoothing=smoothing)


@pytest.mark.parametrize("radius", [0.0, float("inf"), float("nan")])
def test_a_radius_to_clip_at_is_a_positive_number(radius: float) -> None:
    with pytest.raises(ConfigError):
        CenteredClipping(radius)
