"""How many tokens are in the model, how fast they come, and when there will be enough."""

import pytest

from outerstep.coordination.server.rounds import REMEMBERED, TokenBudget


def budget(limit: int | None = None, fragments: int = 1) -> TokenBudget:
    made = TokenBudget(limit)
    made.fix(fragments)
    return made


def test_a_token_is_in_the_model_when_every_fragment_has_it() -> None:
    tokens = budget(fragments=2)
    tokens.add(0, 100, 1.0)
    assert tokens.total == 0
    tokens.add(1, 60, 2.0)
    assert tokens.total == 60


def test_it_is_spent_at_its_limit_and_never_without_one() -> None:
    tokens, endless = budget(100), budget()
    for each in (tokens, endless):
        each.add(0, 99, 1.0)
    assert not tokens.is_spent
    for each in (tokens, endless):
        each.add(0, 1, 2.0)
    assert tokens.is_spent
    assert not endless.is_spent


def test_nothing_is_spent_before_the_fragments_are_known() -> None:
    assert TokenBudget(100).total == 0
    assert not TokenBudget(100).is_spent


def test_the_rate_is_over_the_remembered_moments() -> None:
    tokens = budget(1000)
    assert (tokens.per_second, tokens.seconds_left) == (0.0, None)
    tokens.add(0, 100, 10.0)
    assert (tokens.per_second, tokens.seconds_left) == (0.0, None)  # one moment makes no rate
    tokens.add(0, 100, 20.0)
    assert tokens.per_second == 10.0
    assert tokens.seconds_left == 80.0


def test_old_moments_are_forgotten() -> None:
    tokens = budget()
    tokens.add(0, 1, 0.0)
    for i in range(REMEMBERED):
        tokens.add(0, 5, 1000.0 + i)
    assert tokens.per_second == pytest.approx(5.0)


def test_contributions_that_complete_nothing_are_no_moments() -> None:
    """Two fragments: the total moves with the second of each pair; the rate is of the total, from the first on."""
    tokens = budget(fragments=2)
    for i in range(4):
        tokens.add(0, 10, 10.0 * i)
        tokens.add(1, 10, 10.0 * i + 5.0)
    assert tokens.per_second == pytest.approx(40 / 35)


def test_everything_at_one_instant_has_no_rate() -> None:
    tokens = budget(10)
    tokens.add(0, 3, 1.0)
    tokens.add(0, 3, 1.0)
    assert (tokens.per_second, tokens.seconds_left) == (0.0, None)


def test_past_the_limit_no_time_is_left() -> None:
    tokens = budget(10)
    tokens.add(0, 8, 1.0)
    tokens.add(0, 8, 2.0)
    assert tokens.seconds_left == 0.0


def test_fixing_the_fragments_again_keeps_what_was_counted() -> None:
    tokens = budget(fragments=2)
    tokens.add(0, 5, 1.0)
    tokens.add(1, 7, 1.0)
    tokens.fix(2)
    assert tokens.total == 5
