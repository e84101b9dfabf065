"""How much a contribution counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.server.rounds import RoundRules
from outerstep.coordination.server.weights import MEMORY, UsualWeight, bounded, discount, reported
from outerstep.errors import BadRequest
from unit.coordination.builders import make_offer

EQUAL = RoundRules(num_workers=2)
TOKENS = RoundRules(num_workers=2, weight_by="tokens", max_weight_ratio=10.0)


def usual(*weights: float) -> UsualWeight:
    made = UsualWeight()
    made.include(weights, math.inf)
    return made


def test_what_counts_is_what_the_run_weighs_by() -> None:
    offer = make_offer(steps=5, samples=7, tokens=11)
    assert reported(offer, EQUAL) == 1.0
    assert reported(offer, RoundRules(num_workers=2, weight_by="samples")) == 7.0
    assert reported(offer, TOKENS) == 11.0


@pytest.mark.parametrize("rules", [EQUAL, TOKENS])
def test_without_a_step_there_is_nothing_to_weigh(rules: RoundRules) -> None:
    assert reported(make_offer(steps=0), rules) == 0.0
    assert bounded(0.0, usual(5.0), rules) == 0.0


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_steps_without_a_report_are_refused_with_the_remedy(unit: str) -> None:
    rules = RoundRules(num_workers=2, weight_by=unit)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=f"weighs contributions by {unit}.*of 3 steps reports none") as caught:
        reported(make_offer(steps=3), rules)
    assert f"worker.count({unit}=…)" in caught.value.hint


def test_while_nothing_is_usual_everybody_counts_the_same() -> None:
    assert bounded(1.0, usual(), TOKENS) == bounded(1e12, usual(), TOKENS) == 1.0


def test_equal_weights_stay_equal_whatever_was_usual() -> None:
    assert bounded(1.0, usual(40.0), EQUAL) == 1.0


@given(st.floats(1e-6, 1e12), st.floats(1.0, 1e9), st.floats(1.0, 100.0))
def test_no_weight_is_further_from_the_usual_one_than_the_ratio(weight: float, mean: float, ratio: float) -> None:
    rules = RoundRules(num_workers=2, weight_by="tokens", max_weight_ratio=ratio)
    got = bounded(weight, usual(mean), rules)
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
    assert [discount(s, EQUAL) for s in (0, 3)] == [1.0, 1.0 / math.sqrt(4)]
    assert discount(3, RoundRules(num_workers=2, weigh_staleness=False)) == 1.0
