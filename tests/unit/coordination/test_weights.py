"""How much a contribution counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.weights import (
    MEMORY,
    UsualWeight,
    check_reported,
    peer_weights,
    rank_weights,
    reported,
    staleness_factor,
)
from outerstep.errors import BadRequest, ConfigError, WorkerError
from outerstep.statements import Offered
from outerstep.types import WeightBy
from unit.coordination.builders import Desk, make_offer
from unit.coordination.speaking import accumulated

UNITS: list[WeightBy] = ["equal", "samples", "tokens"]


def usual(*weights: float) -> UsualWeight:
    made = UsualWeight()
    made.include(weights, math.inf)
    return made


def test_what_counts_is_what_the_run_weighs_by() -> None:
    offer = make_offer(steps=5, samples=7, tokens=11)
    assert [reported(offer, unit) for unit in UNITS] == [1.0, 7.0, 11.0]


@pytest.mark.parametrize("unit", UNITS)
def test_without_a_step_there_is_nothing_to_weigh(unit: WeightBy) -> None:
    assert reported(make_offer(steps=0), unit) == 0.0
    assert usual(5.0).bounded(0.0, unit, 10.0) == 0.0


@pytest.mark.parametrize("unit", UNITS[1:])
def test_steps_without_a_report_are_refused_with_the_remedy(unit: WeightBy) -> None:
    with pytest.raises(BadRequest, match=f"weighs contributions by {unit}.*of 3 steps reports none") as caught:
        reported(make_offer(steps=3), unit)
    assert f"worker.count({unit}=…)" in caught.value.hint


def test_while_nothing_is_usual_everybody_counts_the_same() -> None:
    assert usual().bounded(1.0, "tokens", 10.0) == usual().bounded(1e12, "tokens", 10.0) == 1.0
    assert usual().relative(7.0, "tokens") == 7.0


def test_equal_weights_stay_equal_whatever_was_usual() -> None:
    assert usual(40.0).bounded(1.0, "equal", 10.0) == 1.0
    assert usual(40.0).relative(0.5, "equal") == 0.5


@given(st.floats(1e-6, 1e12), st.floats(1.0, 1e9), st.floats(1.0, 100.0))
def test_no_weight_is_further_from_the_usual_one_than_the_ratio(weight: float, mean: float, ratio: float) -> None:
    got = usual(mean).bounded(weight, "tokens", ratio)
    assert mean / ratio <= got <= mean * ratio
    if mean / ratio <= weight <= mean * ratio:
        assert got == weight


def test_the_usual_weight_is_the_mean_and_then_a_running_one() -> None:
    assert usual(2.0, 4.0, 9.0).mean == pytest.approx(5.0)
    settled = usual(*[1.0] * MEMORY)
    settled.include([1.0 + MEMORY], math.inf)
    assert settled.mean == pytest.approx(2.0)


def test_one_absurd_word_does_not_shift_what_is_usual() -> None:
    first = UsualWeight()
    assert first.include([100.0, 1e12, 120.0], 10.0) == [100.0, 1200.0, 120.0]  # within ten times the median
    assert first.mean < 500.0
    before = first.mean
    assert first.include([1e12], 10.0) == [pytest.approx(10.0 * before)]
    assert first.mean < 4.0 * before


def test_rounds_without_training_leave_it_alone() -> None:
    assert UsualWeight().include([0.0, 0.0], 10.0) == []


def test_age_discounts_only_where_the_run_weighs_it() -> None:
    def weight(**rules: bool) -> float:
        desk = Desk("ab", quorum=1, **rules)
        for sequence in (1, 2, 3):
            desk.contribute("a", sequence, base_version=sequence - 1)
        desk.contribute("b")
        return accumulated(desk)[-1].weight

    assert weight() == 1.0 / math.sqrt(4)
    assert weight(weigh_staleness=False) == 1.0


class TestStalenessFactor:
    def test_it_is_one_over_the_root_of_one_plus_the_age(self) -> None:
        assert [staleness_factor(s) for s in (0, 3, 8, 99)] == [1.0, 0.5, pytest.approx(1 / 3), 0.1]

    @given(s=st.integers(0, 10**9))
    def test_older_never_counts_for_more_and_never_for_nothing(self, s: int) -> None:
        assert 0.0 < staleness_factor(s + 1) <= staleness_factor(s) <= 1.0

    def test_a_contribution_from_the_future_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="got -1"):
            staleness_factor(-1)


# --- without a server -----------------------------------------------------------------------------------------------


def offered(steps: int, tokens: int) -> Offered:
    return Offered(
        run_id="r", fragment=0, version=1, sequence=1, digest="0" * 64, size_bytes=1, base_hash="0" * 32, steps=steps,
        tokens=tokens,
    )  # fmt: skip


def test_what_peers_say_of_themselves_weighs_within_a_factor_of_the_median() -> None:
    said = [offered(5, 100), offered(5, 120), offered(5, 10**12), offered(5, 0), offered(0, 100)]
    assert peer_weights(said, "equal") == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert peer_weights(said, "tokens") == [100.0, 120.0, 1200.0, 12.0, 0.0]
    assert peer_weights([offered(5, 0), offered(0, 0)], "tokens") == [1.0, 0.0]
    assert peer_weights([offered(5, 1), offered(5, 0)], "tokens") == [1.0, 0.1]


def test_ranks_are_believed_and_must_report() -> None:
    said = [offered(5, 100), offered(5, 10**12)]
    assert rank_weights(said, "tokens") == (100.0, 1e12)
    assert rank_weights([offered(5, 0), offered(0, 0)], "equal") == (1.0, 0.0), "it has not trained"
    assert rank_weights([offered(0, 0), offered(0, 0)], "equal") == (1.0, 1.0), "nor has anybody"
    assert rank_weights([offered(5, 100), offered(0, 0)], "tokens") == (100.0, 0.0)
    with pytest.raises(WorkerError, match=r"by tokens, and rank 1 reported none in 3 steps: .*count\(tokens=…\)"):
        rank_weights([offered(5, 100), offered(3, 0)], "tokens")


def test_a_worker_is_told_before_it_sends() -> None:
    check_reported(offered(5, 0), "equal")
    check_reported(offered(0, 0), "tokens")
    with pytest.raises(WorkerError, match="by tokens, and none were reported in 5 steps"):
        check_reported(offered(5, 0), "tokens")


def test_beside_the_usual_a_weight_is_a_ratio_and_before_there_is_a_usual_one_it_is_itself() -> None:
    assert usual(10.0, 30.0).relative(60.0, "tokens") == 3.0
    assert usual().relative(60.0, "tokens") == 60.0
    assert usual(10.0, 30.0).relative(0.5, "equal") == 0.5


def test_in_one_round_a_worker_weighs_so_many_times_the_usual_at_most() -> None:
    assert UsualWeight(mean=5.0, count=1).most("tokens", 2.0) == 10.0
    assert UsualWeight(mean=5.0, count=9).most("tokens", 2.0) == 10.0
    assert UsualWeight(mean=5.0, count=9).most("equal", 2.0) == 2.0
    assert UsualWeight().most("tokens", 2.0) == 2.0
