"""What is told of a round beside what it agreed on: losses, how long its first contribution waited, bytes, tokens."""

from __future__ import annotations

import pytest

from outerstep.coordination.server.rounds import TokenBudget
from outerstep.events import RoundSummary, mean_loss
from unit.coordination.builders import SIZE_BYTES, Desk, make_heartbeat


def say_loss(desk: Desk, worker: str, loss: float | None) -> None:
    desk.coordinator.heartbeat(make_heartbeat(worker, loss=loss), desk.now)


def test_a_round_tells_its_losses_its_wait_and_its_bytes() -> None:
    desk = Desk("ab")
    say_loss(desk, "a", 2.0)
    desk.contribute("a")
    desk.later(3.0, alive="ab")
    say_loss(desk, "b", 1.0)
    say_loss(desk, "a", 2.5)
    desk.contribute("b")
    [told] = desk.events("round")
    assert told["loss"] == 1.75
    assert told["losses"] == [2.5, 1.0]
    assert told["waited_s"] == 3.0
    assert told["bytes"] == 2 * SIZE_BYTES
    assert "tokens" not in told
    assert "share" not in told


def test_the_next_round_counts_its_own_bytes_and_an_unknown_loss_is_none() -> None:
    desk = Desk("ab")
    for sequence, base in ((1, 0), (2, 1)):
        for worker in "ab":
            desk.contribute(worker, sequence, base_version=base, tokens=5)
    first, second = desk.events("round")
    assert first["bytes"] == second["bytes"] == 2 * SIZE_BYTES
    assert second["losses"] == [None, None]
    assert second["loss"] is None
    assert (first["tokens"], second["tokens"]) == (10, 20)


def test_a_version_from_above_has_no_round_to_tell_of() -> None:
    desk = Desk("ab")
    desk.coordinator.move_from_above(0, 1)
    desk.carry_out()
    [told] = desk.events("round")
    assert "waited_s" not in told
    assert desk.coordinator._summaries == {}


def test_a_budget_tells_its_share_and_the_time_that_is_left() -> None:
    budget = TokenBudget(100)
    budget.fix(1)
    budget.add(0, 25, 1.0)
    budget.add(0, 25, 2.0)
    assert (budget.share, budget.seconds_left) == (0.5, 2.0)
    budget.add(0, 75, 3.0)
    assert budget.share == 1.0
    assert TokenBudget().share is None
    facts = RoundSummary(losses=(1.23456789,), share=0.5, seconds_left=2.04).facts
    assert facts == {
        "loss": 1.23457,
        "losses": [1.23457],
        "waited_s": 0.0,
        "bytes": 0,
        "share": 0.5,
        "seconds_left": 2.0,
    }


@pytest.mark.parametrize(
    ("losses", "mean"),
    [([], None), ([None], None), ([1.0, None, 2.0], 1.5), ([1.7e308, 1.7e308], 1.7e308), ([1.7e308, -1.7e308], 0.0)],
)
def test_the_mean_is_of_those_that_are_known_and_of_any_size(losses: list[float | None], mean: float | None) -> None:
    assert mean_loss(losses) == mean
