"""The controller in a closed loop with simulated links: it follows them, and what it expects is what happens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outerstep.coordination.autoconfig import LayerBounds
from outerstep.simulate.autoconfig import ClosedLoop, LoopRound, LoopScenario


def play(seed: int = 1, **said: object) -> list[LoopRound]:
    scenario = LoopScenario(**said)  # type: ignore[arg-type]
    rounds = ClosedLoop(scenario, seed).run()
    assert len(rounds) == scenario.rounds
    return rounds


def test_ten_times_less_and_back() -> None:
    """The interval and the codec follow the link, the utilization recovers, each time within a few rounds."""
    rounds = play(bytes_per_s=lambda number: 1e7 if 20 <= number < 50 else 1e8, rounds=85)
    before, slow, after = rounds[15], rounds[45], rounds[80]
    assert before.utilization >= 0.95
    assert min(each.utilization for each in rounds[20:24]) < 0.5
    assert all(each.utilization >= 0.95 for each in rounds[30:50])
    assert (slow.plan.codec, slow.plan.sync_every > 5 * before.plan.sync_every) == ("int4", True)
    assert slow.plan.outer_lr > before.plan.outer_lr
    assert all(each.utilization >= 0.95 for each in rounds[50:])
    assert after.plan.sync_every <= 1.25 * before.plan.sync_every
    assert after.plan.codec == before.plan.codec == "int8"
    causes = [each.decision.cause for each in rounds if each.decision.changes]
    assert causes == ["slower", "slower", "faster", "faster"]
    assert [each.plan.revision for each in (before, slow, after)] == [1, 3, 5]


def test_what_changed_is_told_with_a_reason() -> None:
    rounds = play(bytes_per_s=lambda number: 1e7 if number >= 10 else 1e8, rounds=30)
    first = next(each.decision for each in rounds if each.decision.changes)
    assert {"sync_every", "codec", "outer_lr"} <= {change.field for change in first.changes}
    assert "the target is missed" in first.reason


@pytest.mark.parametrize(
    ("rate", "bounds"),
    [
        (1e8, LayerBounds(most_delay=0)),
        (2e7, LayerBounds(most_delay=0, codecs=("bf16",))),
        (1e7, LayerBounds(least_sync_every=40, most_sync_every=40, codecs=("int8",))),
        (1e7, LayerBounds(least_sync_every=40, most_sync_every=40, codecs=("int8",), fragments=(4,))),
        (1e7, LayerBounds(least_sync_every=40, most_sync_every=40, codecs=("bf16",), fragments=(8,))),
        (1e6, LayerBounds(least_sync_every=40, most_sync_every=40, codecs=("int8",), fragments=(4,), most_delay=0)),
    ],
    ids=["blocking", "slow", "delayed", "fragments", "eight fragments", "hopeless"],
)
def test_what_is_expected_is_what_happens(rate: float, bounds: LayerBounds) -> None:
    """The formulas of the model of cost, against clusters that send, wait and adopt event by event."""
    rounds = play(bytes_per_s=lambda number: rate, bounds=bounds, rounds=12)
    for each in rounds[4:]:
        assert each.decision.utilization == pytest.approx(each.utilization, abs=0.01)


@pytest.mark.parametrize("slower", [1.1, 1.3, 2.0, 3.7])
@pytest.mark.parametrize("fragments", [1, 4])
def test_a_faster_cluster_loses_less_than_a_step_a_round_more(slower: float, fragments: int) -> None:
    """What is expected is the middle cluster's. Others take whole steps, too, and wait for the rest of one."""
    rounds = play(
        bytes_per_s=lambda number: 1e7, step_s=(1.0, slower), bounds=LayerBounds(fragments=(fragments,)), rounds=45
    )
    for each in rounds[35:]:
        mine = each.plan.assignments[0].local_steps
        assert each.decision.utilization is not None
        assert each.utilization > each.decision.utilization - 1.0 / mine - 0.005


def test_a_steady_noisy_link_is_left_alone() -> None:
    for seed in range(12):
        rounds = play(seed, bytes_per_s=lambda number: 3e7, noise=0.3, rounds=60, step_s=(1.0, 1.1))
        changed = [each.round for each in rounds if each.decision.changes]
        assert all(later - earlier >= 10 for earlier, later in pairwise(changed)), (seed, changed)


def test_a_seed_replays_exactly() -> None:
    assert play(3, noise=0.2) == play(3, noise=0.2)
    assert play(3, noise=0.2) != play(4, noise=0.2)
