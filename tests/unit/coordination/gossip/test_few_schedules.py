"""A few runs of peers in virtual time, each a tenth of a second: do they keep what they promise, and get on?

A thousand of them, and what is checked in each: tests/faults/test_gossip_schedules.py.
"""

from __future__ import annotations

import pytest

from outerstep.simulate.gossip import run_gossip
from outerstep.simulate.gossip_scenario import GossipScenario


@pytest.mark.parametrize("seed", range(8))
def test_through_faults_and_lies_every_promise_is_kept(seed: int) -> None:
    history = run_gossip(GossipScenario.drawn(seed), seed)
    assert history.violations == []
    assert history.round_count >= 5


@pytest.mark.parametrize(
    ("lie", "expelled"),
    [("offers", 1), ("votes", 1), ("proposals", 1), ("rubbish", 1), ("withholds", 0), ("frames", 0)],
)
def test_a_liar_in_a_calm_run_costs_no_rounds_and_is_expelled_where_it_can_be_proven(lie: str, expelled: int) -> None:
    history = run_gossip(GossipScenario(liar=2, lie=lie, round_deadline_s=20.0, calm_after_s=120.0), 0)
    assert history.violations == []
    assert (history.expelled, history.round_count >= 20) == (expelled, True)
