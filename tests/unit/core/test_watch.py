"""What is watched of a round, from norms alone, against the contributions themselves."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from amounts import cases
from outerstep.core.watch import as_seen_by, norm_of, sum_of_squares, watched, whole_model
from outerstep.types import Agreement, Participant, Watched

WEIGHT = st.floats(0.1, 10.0)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Tensor], list[float]]:
    """Contributions that have something in common, more or less, and what they weigh."""
    count = draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    common = torch.randn(40, generator=generator, dtype=torch.float64) * draw(st.floats(0.0, 3.0))
    scales = draw(st.lists(st.floats(0.01, 5.0), min_size=count, max_size=count))
    deltas = [scale * (common + torch.randn(40, generator=generator, dtype=torch.float64)) for scale in scales]
    return deltas, draw(st.lists(WEIGHT, min_size=count, max_size=count))


def mean_of(deltas: list[Tensor], weights: list[float]) -> Tensor:
    return sum((w * d for w, d in zip(weights, deltas, strict=True)), torch.zeros(())) / sum(weights)


def of(deltas: list[Tensor], weights: list[float]) -> Watched:
    return watched(
        float(deltas[0].norm()), [float(d.norm()) for d in deltas], weights, float(mean_of(deltas, weights).norm())
    )


@cases(200)
@given(rounds())
def test_the_divergence_is_the_variance_of_the_local_weights(case: tuple[list[Tensor], list[float]]) -> None:
    deltas, weights = case
    anchor = torch.linspace(-1, 1, 40, dtype=torch.float64)
    local = [anchor - delta for delta in deltas]
    centre = mean_of(local, weights)
    squares = [float((each - centre).square().sum()) for each in local]
    direct = sum(w * square for w, square in zip(weights, squares, strict=True)) / sum(weights)
    found = of(deltas, weights).weight_divergence
    assert found == pytest.approx(direct, rel=1e-6, abs=1e-9)


@cases(200)
@given(rounds())
def test_the_similarity_is_the_mean_cosine_of_the_pairs_counted_with_their_norms(
    case: tuple[list[Tensor], list[float]],
) -> None:
    deltas, weights = case
    pairs = list(itertools.combinations(range(len(deltas)), 2))
    shares = [float(weights[i] * weights[j] * deltas[i].norm() * deltas[j].norm()) for i, j in pairs]
    cosines = [float(torch.cosine_similarity(deltas[i], deltas[j], dim=0)) for i, j in pairs]
    direct = sum(s * c for s, c in zip(shares, cosines, strict=True)) / sum(shares)
    assert of(deltas, weights).peer_grad_similarity == pytest.approx(direct, abs=1e-6)


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_of_contributions_that_are_equally_long_and_count_alike_it_is_the_plain_mean_cosine(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(n)]
    deltas = [d / d.norm() for d in drawn]
    cosines = [float(a @ b) for a, b in itertools.combinations(deltas, 2)]
    assert of(deltas, [1.0] * n).peer_grad_similarity == pytest.approx(sum(cosines) / len(cosines), abs=1e-9)


@given(st.floats(0.001, 1e6), st.integers(2, 9))
def test_equal_contributions_are_as_similar_as_can_be_and_have_not_gone_apart(norm: float, n: int) -> None:
    seen = watched(norm, [norm] * n, [1.0] * n, norm)
    assert seen.peer_grad_similarity == pytest.approx(1.0)
    assert seen.weight_divergence == pytest.approx(0.0, abs=1e-9 * norm * norm)


def test_opposite_contributions_are_as_unlike_as_can_be() -> None:
    seen = watched(2.0, [2.0, 2.0], [1.0, 1.0], 0.0)
    assert seen == Watched(
        pseudo_grad_norm=2.0, peer_grad_similarity=-1.0, aggregated_grad_norm=0.0, weight_divergence=4.0
    )


@pytest.mark.parametrize(
    ("norms", "weights"), [([3.0], [1.0]), ([3.0, 0.0], [1.0, 1.0]), ([3.0, 5.0], [1.0, 0.0])], ids=str
)
def test_one_contribution_alone_is_similar_to_nobody(norms: list[float], weights: list[float]) -> None:
    mean = norms[0] * weights[0] / sum(weights)
    assert watched(3.0, norms, weights, mean).peer_grad_similarity is None


def test_a_round_in_which_nothing_counts_has_no_divergence() -> None:
    seen = watched(None, [3.0, 4.0], [0.0, 0.0], 0.0)
    assert seen == Watched(aggregated_grad_norm=0.0)


def test_what_does_not_count_is_not_in_the_divergence() -> None:
    assert watched(1.0, [1.0, 1000.0], [1.0, 0.0], 1.0).weight_divergence == 0.0


def test_if_the_mean_is_not_known_only_the_norms_are() -> None:
    seen = watched(1.0, [1.0, 2.0, 3.0], [1.0] * 3, None, 0.5)
    assert seen == Watched(pseudo_grad_norm=1.0, aggregated_grad_norm=0.5)


def test_another_rule_than_the_mean_changes_the_norm_of_the_aggregate_and_nothing_else() -> None:
    norms, weights = [1.0, 2.0, 3.0], [1.0, 2.0, 1.0]
    seen, of_the_mean = (watched(1.0, norms, weights, 1.5, made) for made in (0.25, None))
    assert seen == replace(of_the_mean, aggregated_grad_norm=0.25)
    assert of_the_mean.aggregated_grad_norm == 1.5


@pytest.mark.parametrize(("mean", "made"), [(math.nan, 1.0), (1.0, math.inf), (None, math.nan)])
def test_of_what_is_not_finite_nothing_is_told(mean: float | None, made: float) -> None:
    assert watched(1.0, [1.0, 2.0], [1.0, 1.0], mean, made) == Watched()


def test_norms_that_are_a_little_off_never_lead_out_of_range() -> None:
    seen = watched(1.0, [0.99, 0.99], [1.0, 1.0], 1.0)
    assert seen.peer_grad_similarity == 1.0
    assert seen.weight_divergence == 0.0
    assert watched(1.0, [1.0, 1.01], [1.0, 1.0], 0.0).peer_grad_similarity == -1.0


def test_norms_whose_squares_are_too_small_for_a_float_have_no_similarity() -> None:
    assert watched(1e-200, [1e-200, 1e-200], [1.0, 1.0], 1e-200).peer_grad_similarity is None


@cases(100)
@given(rounds(), st.integers(1, 39))
def test_fragments_add_up_to_the_whole_model(case: tuple[list[Tensor], list[float]], cut: int) -> None:
    deltas, weights = case
    parts = [of([d[:cut] for d in deltas], weights), of([d[cut:] for d in deltas], weights)]
    whole, direct = whole_model(parts), of(deltas, weights)
    assert whole.pseudo_grad_norm == pytest.approx(direct.pseudo_grad_norm)
    assert whole.aggregated_grad_norm == pytest.approx(direct.aggregated_grad_norm)
    assert whole.weight_divergence == pytest.approx(direct.weight_divergence, rel=1e-6, abs=1e-9)


@given(st.integers(0, 2**31), st.integers(1, 29))
def test_the_similarity_of_fragments_adds_up_where_they_are_equally_long(seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(3)]
    pieces = [[d[:cut] / d[:cut].norm() for d in deltas], [3.0 * d[cut:] / d[cut:].norm() for d in deltas]]
    parts = [of(piece, [1.0] * 3) for piece in pieces]
    direct = of([torch.cat(pair) for pair in zip(*pieces, strict=True)], [1.0] * 3)
    assert whole_model(parts).peer_grad_similarity == pytest.approx(direct.peer_grad_similarity, abs=1e-9)


def test_of_no_fragment_nothing_is_known() -> None:
    assert whole_model([]) == whole_model([Watched()]) == Watched()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50))
def test_squares_are_summed(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert sum_of_squares(tensor) == pytest.approx(float(tensor.double().square().sum()), rel=1e-4)


def test_squares_that_overflow_fp32_are_summed_all_the_same() -> None:
    assert sum_of_squares(torch.tensor([3e30, 4e30])) == pytest.approx(25e60)
    assert math.isnan(sum_of_squares(torch.tensor([1.0, math.nan])))


class TestAsAWorkerSeesIt:
    ROUND = Watched(peer_grad_similarity=0.5, aggregated_grad_norm=2.0, weight_divergence=1.0)

    def agreement(self, *norms: tuple[str, float], watched: Watched | None = ROUND) -> Agreement:
        taken = tuple(Participant(worker_id=w, sequence=i + 1, weight=1.0, norm=n) for i, (w, n) in enumerate(norms))
        return Agreement(fragment=0, version=1, anchor_hash="0" * 32, participants=taken, watched=watched)

    def test_the_norm_is_that_of_its_own_last_contribution(self) -> None:
        seen = as_seen_by("a", self.agreement(("b", 9.0), ("a", 3.0), ("a", 4.0), ("c", 8.0)))
        assert seen == Watched(
            pseudo_grad_norm=4.0, peer_grad_similarity=0.5, aggregated_grad_norm=2.0, weight_divergence=1.0
        )

    def test_one_contribution_is_the_last_one(self) -> None:
        seen = as_seen_by("a", self.agreement(("b", 9.0), ("a", 3.0)))
        assert seen is not None
        assert seen.pseudo_grad_norm == 3.0

    def test_without_one_there_is_none(self) -> None:
        assert as_seen_by("a", self.agreement(("b", 9.0))) == self.ROUND

    def test_what_was_not_watched_is_not_seen(self) -> None:
        assert as_seen_by("a", self.agreement(("a", 9.0), watched=None)) is None


def test_the_norm_of_several_tensors_is_that_of_all_their_values() -> None:
    assert norm_of([torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor(2.0)]) == 5.0
    assert norm_of([]) == 0.0


@pytest.mark.parametrize(
    ("norms", "weights", "similarity"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0),
        ([1.0, 0.0], [1.0, 1.0], None),
        ([1.0, 1.0], [1.0, 0.0], None),
        ([2.0, 0.0, 3.0], [1.0, 5.0, 0.0], None),
    ],
)
def test_only_those_that_moved_and_count_can_be_similar(
    norms: list[float], weights: list[float], similarity: float | None
) -> None:
    mean = math.sqrt(sum((w * n) ** 2 for n, w in zip(norms, weights, strict=True))) / sum(weights)
    found = watched(None, norms, weights, mean).peer_grad_similarity
    assert found == (None if similarity is None else pytest.approx(similarity, abs=1e-9))


@pytest.mark.parametrize("missing", ["peer_grad_similarity", "aggregated_grad_norm", "weight_divergence"])
def test_a_fragment_of_which_something_is_not_known_has_no_say_in_the_similarity(missing: str) -> None:
    known = {"peer_grad_similarity": 0.25, "aggregated_grad_norm": 0.5, "weight_divergence": 0.25}
    partly = {**known, "peer_grad_similarity": 0.75, missing: None}
    whole = whole_model([Watched(**known), Watched(**partly)])
    assert whole.peer_grad_similarity == pytest.approx(0.25)
