"""How much of a dataset a worker may hold: what it says of itself, and how far the run believes it."""

from __future__ import annotations

import json
from math import inf

import pytest

from outerstep.coordination.shares import (
    AHEAD_S,
    AT_ONCE,
    FEW,
    FEW_PART,
    LEAST_INTERVAL_S,
    PACE_MEMORY,
    PACE_RATIO,
    PROVEN_RATIO,
    UNKNOWN_PACE,
    Crowd,
    FairShares,
)

UNITS = 1000  # of an epoch


def make(**paces: float) -> FairShares:
    """Workers that have said at time 0 how fast they train, and that nothing of theirs is untrained."""
    shares = FairShares(UNITS)
    for name, pace in paces.items():
        shares.told(name, 0, pace, 0.0)
    return shares


HERE = 6  # workers, of some of which nothing is known


def crowd(shares: FairShares, now: float = 0.0) -> Crowd:
    return shares.among(set("abcdef"), now)


class TestPace:
    def test_a_worker_that_is_alone_is_believed(self) -> None:
        assert crowd(make(a=1e6)).pace("a") == 1e6

    def test_no_worker_is_believed_to_be_much_faster_than_the_others(self) -> None:
        among = crowd(make(a=100.0, b=1.0, c=2.0, d=3.0))
        assert [among.pace(name) for name in "abcd"] == [PACE_RATIO * 2.0, 1.0, 2.0, 3.0]

    def test_the_others_are_the_median_of_those_that_know_their_pace(self) -> None:
        assert crowd(make(a=100.0, b=1.0, c=2.0, d=0.0)).pace("a") == PACE_RATIO * 1.5

    def test_a_worker_is_not_its_own_other(self) -> None:
        assert crowd(make(a=100.0, b=1.0)).pace("a") == PACE_RATIO * 1.0
        assert crowd(make(a=3.0, b=9.0, c=100.0)).pace("c") == PACE_RATIO * 6.0

    def test_slow_workers_are_compared_like_fast_ones(self) -> None:
        assert crowd(make(a=0.9, b=0.1)).pace("a") == PACE_RATIO * 0.1

    def test_while_no_other_knows_its_pace_so_much_is_believed(self) -> None:
        assert crowd(make(a=100.0, b=0.0)).pace("a") == UNKNOWN_PACE
        assert crowd(make(a=1.0, b=0.0)).pace("a") == 1.0

    def test_a_worker_that_knows_no_pace_has_none(self) -> None:
        assert crowd(make(a=0.0, b=5.0)).pace("a") == 0.0

    def test_what_a_worker_has_brought_proves_that_it_is_fast(self) -> None:
        shares = make(a=100.0, b=1.0)
        shares.brought("a", 80, 2.0)
        assert crowd(shares, 2.0).pace("a") == PROVEN_RATIO * 40.0

    def test_the_newest_proof_counts_for_half(self) -> None:
        shares = make(a=1000.0, b=1.0)
        shares.brought("a", 80, 2.0)  # 40 a second
        shares.brought("a", 40, 6.0)  # 10
        assert crowd(shares, 6.0).pace("a") == PROVEN_RATIO * (PACE_MEMORY * 40.0 + (1 - PACE_MEMORY) * 10.0)

    def test_to_bring_much_at_once_proves_no_more_than_in_a_second(self) -> None:
        shares = make(a=1000.0, b=1.0)
        shares.brought("a", 30, 0.001)
        assert crowd(shares, 0.001).pace("a") == PROVEN_RATIO * 30.0 / LEAST_INTERVAL_S

    def test_to_bring_nothing_proves_nothing(self) -> None:
        shares = make(a=1000.0, b=1.0)
        shares.brought("a", 0, 2.0)
        shares.brought("a", 80, 4.0)
        assert crowd(shares, 4.0).pace("a") == PROVEN_RATIO * 20.0, "in four seconds and not in two"

    def test_nobody_asks_who_it_was_that_never_asked_for_anything(self) -> None:
        shares = make(b=1.0)
        shares.brought("a", 10, 1.0)
        assert list(crowd(shares)) == ["b"]


class TestUntrained:
    def test_alone_it_is_believed_less_what_it_has_trained_since(self) -> None:
        shares = make(a=2.0)
        shares.told("a", 50, 2.0, 0.0)
        assert crowd(shares, 0.0).untrained("a", 80) == 50.0
        assert crowd(shares, 10.0).untrained("a", 80) == 30.0
        assert crowd(shares, 100.0).untrained("a", 80) == 0.0

    def test_it_is_no_more_than_it_holds(self) -> None:
        shares = make(a=2.0)
        shares.told("a", 50, 2.0, 0.0)
        assert crowd(shares).untrained("a", 20) == 20.0

    def test_what_it_is_granted_is_untrained(self) -> None:
        shares = make(a=2.0)
        shares.granted("a", 7)
        shares.granted("a", 5)
        assert crowd(shares).untrained("a", 80) == 12.0

    def test_among_others_it_cannot_have_trained_more_than_its_pace_allows(self) -> None:
        shares = make(a=2.0, b=2.0)
        assert crowd(shares, 10.0).untrained("a", 80) == 80.0 - 20.0

    def test_one_of_unknown_pace_may_have_trained_at_that_of_unknown_ones(self) -> None:
        shares = make(a=0.0, b=2.0)
        assert crowd(shares, 3.0).untrained("a", 80) == 80.0 - 3.0 * UNKNOWN_PACE

    def test_since_it_last_brought_something(self) -> None:
        shares = make(a=2.0, b=2.0)
        shares.brought("a", 10, 6.0)
        assert crowd(shares, 8.0).untrained("a", 80) == 80.0 - 4.0

    def test_what_it_says_counts_if_it_says_more(self) -> None:
        shares = make(a=2.0, b=2.0)
        shares.told("a", 75, 2.0, 9.0)
        assert crowd(shares, 10.0).untrained("a", 80) == 73.0

    def test_nobody_trains_much_more_than_the_others_bring_at_once(self) -> None:
        shares = make(a=2.0, b=2.0, c=2.0)
        shares.brought("b", 3, 1.0)
        shares.brought("c", 5, 1.0)
        assert crowd(shares, 30.0).untrained("a", 80) == 80.0 - 60.0, "they may wait for it"
        shares.brought("b", 3, 30.0)
        shares.brought("c", 5, 30.0)
        assert crowd(shares, 30.0).untrained("a", 80) == 80.0 - AT_ONCE * 4.0

    def test_the_one_that_brings_least_is_not_among_the_others(self) -> None:
        shares = make(a=9.0, b=9.0, c=9.0)
        for name, brought in (("a", 1), ("b", 5), ("c", 9)):
            shares.brought(name, brought, 100.0)
        assert crowd(shares, 110.0).untrained("a", 200) == 200.0 - AT_ONCE * 7.0

    def test_nor_much_more_than_it_brought_before(self) -> None:
        shares = make(a=2.0, b=2.0)
        shares.brought("a", 20, 10.0)
        shares.brought("b", 1, 10.0)
        assert crowd(shares, 15.0).untrained("a", 80) == 80.0 - 10.0
        shares.brought("b", 1, 35.0)
        assert crowd(shares, 35.0).untrained("a", 80) == 80.0 - PROVEN_RATIO * 20.0

    def test_while_others_wait_they_would_have_brought_more(self) -> None:
        shares = make(a=9.0, b=9.0)
        shares.brought("b", 2, 10.0)  # in ten seconds
        assert crowd(shares, 20.0).untrained("a", 200) == 200.0 - AT_ONCE * 2.0
        assert crowd(shares, 30.0).untrained("a", 200) == 200.0 - AT_ONCE * 4.0


class TestRoom:
    def test_alone_there_is_no_bound(self) -> None:
        assert crowd(make(a=1.0)).room("a", 10**6) == inf

    def test_among_others_so_much_training_ahead(self) -> None:
        shares = make(a=50.0, b=50.0)
        shares.told("a", 30, 50.0, 0.0)
        assert crowd(shares).room("a", 30) == AHEAD_S * 50.0 - 30.0

    def test_and_never_less_than_a_small_part_of_an_epoch(self) -> None:
        shares = make(a=1.0, b=1.0)
        assert crowd(shares).room("a", 0) == UNITS / (FEW_PART * HERE)
        small = FairShares(10)
        small.told("a", 0, 0.0, 0.0)
        small.told("b", 0, 0.0, 0.0)
        assert crowd(small).room("a", 3) == FEW - 3.0

    def test_a_worker_may_hold_too_much(self) -> None:
        shares = make(a=1.0, b=1.0)
        assert crowd(shares).room("a", 500) == UNITS / (FEW_PART * HERE) - 500.0


class TestWhoIsThere:
    def test_only_the_live_ones_that_train_this_dataset(self) -> None:
        shares = make(a=1.0, b=2.0, c=3.0)
        assert sorted(shares.among({"b", "c", "z"}, 0.0)) == ["b", "c"]
        assert shares.among({"c"}, 0.0).pace("c") == 3.0, "it is alone"

    def test_one_that_is_gone_is_no_other(self) -> None:
        shares = make(a=100.0, b=1.0, c=9.0)
        shares.gone("b")
        shares.gone("nobody")
        assert crowd(shares).pace("a") == PACE_RATIO * 9.0

    def test_it_is_all_there_after_a_restart(self) -> None:
        shares = make(a=100.0, b=1.0)
        shares.told("a", 50, 90.0, 1.0)
        shares.brought("a", 20, 4.0)
        facts = json.loads(json.dumps(shares.remembered()))
        assert list(facts) == ["a", "b"]
        again = FairShares.resumed(UNITS, facts)
        assert again.remembered() == shares.remembered()
        assert [crowd(again, 9.0).room(name, 60) for name in "ab"] == [
            crowd(shares, 9.0).room(name, 60) for name in "ab"
        ]

    @pytest.mark.parametrize(("paces", "wanted"), [((2.0,), 2.0), ((2.0, 4.0), 3.0), ((2.0, 4.0, 9.0), 4.0)])
    def test_the_median_of_an_even_number_is_between_the_middle_two(
        self, paces: tuple[float, ...], wanted: float
    ) -> None:
        others = dict(zip("bcd", paces, strict=False))
        assert crowd(make(a=1000.0, **others)).pace("a") == PACE_RATIO * wanted
