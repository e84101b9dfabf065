"""A worker has one voice in a round, and weighs no more than the run allows, however its weight comes about."""

from __future__ import annotations

import math

import pytest

from outerstep.errors import StaleRound
from unit.coordination.builders import Desk, make_key


def weights(desk: Desk) -> dict[str, float]:
    """By worker, of the last round that closed."""
    found: dict[str, float] = {}
    for p in desk.closings[-1].participants:
        found[p.worker_id] = found.get(p.worker_id, 0.0) + p.weight
    return found


# --- one voice ------------------------------------------------------------------------------------------------------


def test_a_second_contribution_to_an_open_round_is_refused_by_name_and_waits() -> None:
    desk = Desk("ab")
    desk.contribute("a")
    with pytest.raises(StaleRound) as told:
        desk.offer("a", 2)
    assert told.value.message == (
        "round 1 of fragment 0 has contribution #1 of worker 'a', and takes one of each worker; this is #2"
    )
    assert "waits for the next round" in told.value.hint
    assert not desk.coordinator.uploads.by_key
    desk.contribute("b")
    assert desk.closed == [(1, "ab")]
    with pytest.raises(StaleRound, match="closed without this contribution"):
        desk.offer("a", 2)  # without a quorum its worker rebases, and sends the same steps on the new version
    desk.contribute("a", 3, base_version=1)
    desk.contribute("b", 2, base_version=1)
    assert desk.closed == [(1, "ab"), (2, "ab")]


def test_so_is_that_of_a_worker_that_was_started_again() -> None:
    desk = Desk("ab")
    desk.contribute("a")
    desk.join("a", start=2)
    with pytest.raises(StaleRound):
        desk.offer("a", 2)
    assert desk.offer("a", 1).state == "accepted"


def test_the_voice_of_another_worker_and_of_another_fragment_is_another() -> None:
    desk = Desk("abc", fragments=2)
    desk.contribute("a")
    desk.contribute("a", fragment=1)
    desk.contribute("b")
    assert [len(f.round.participants) for f in desk.coordinator.fragments] == [2, 1]


def test_two_that_were_offered_before_either_counted_are_one() -> None:
    """Only one upload of a worker is open for a fragment, and it is looked at again when it is whole."""
    desk = Desk("ab")
    desk.offer("a", 1)
    desk.offer("a", 2)
    assert desk.dropped == [make_key("a", 1)]
    desk.contribute("a", 2)
    with pytest.raises(StaleRound):
        desk.contribute("a", 3)


def test_a_contribution_without_training_is_a_voice_too() -> None:
    desk = Desk("ab")
    desk.contribute("a", steps=0)
    with pytest.raises(StaleRound):
        desk.offer("a", 2)


# --- what stays legal -----------------------------------------------------------------------------------------------


def late(desk: Desk) -> Desk:
    """Version 1 was made by "a" and "b"; the contribution of "c" to it counts in round 2."""
    for worker in "ab":
        desk.contribute(worker)
    desk.contribute("c")
    return desk


def test_with_a_quorum_a_late_contribution_stands_beside_the_current_one() -> None:
    desk = late(Desk("abc", quorum=2))
    desk.contribute("c", 2, base_version=1)
    desk.contribute("a", 2, base_version=1)
    assert desk.closed == [(1, "ab"), (2, "cca")]
    assert weights(desk) == {"c": 1.0 + 1.0 / math.sqrt(2.0), "a": 1.0}


def test_but_not_a_third_one() -> None:
    desk = late(Desk("abc", quorum=2))
    desk.contribute("c", 2, base_version=1)
    with pytest.raises(StaleRound):
        desk.offer("c", 3, base_version=1)


def test_nor_two_that_are_equally_late() -> None:
    desk = late(Desk("abc", quorum=2))
    with pytest.raises(StaleRound):
        desk.offer("c", 2, base_version=0)


def test_nor_a_late_one_after_the_current_one() -> None:
    desk = Desk("abc", quorum=2)
    for worker in "ab":
        desk.contribute(worker)
    desk.contribute("c", 1, base_version=1)
    with pytest.raises(StaleRound):
        desk.offer("c", 2, base_version=0)


def test_what_waits_counts_in_the_next_round_under_its_key_where_late_ones_are_taken() -> None:
    desk = Desk("abc", quorum=2, prompt=False)
    desk.contribute("a")
    with pytest.raises(StaleRound):
        desk.offer("a", 2)
    desk.contribute("b")  # the round is decided, and not yet published
    assert desk.contribute("a", 2).version == 2


def test_asynchronous_pushes_share_a_grace_window() -> None:
    desk = Desk("ab", quorum=1, asynchronous=True, grace_s=5.0)
    desk.contribute("a")
    desk.contribute("b")
    desk.contribute("b", 2, base_version=1)
    with pytest.raises(StaleRound):
        desk.offer("b", 3, base_version=1)
    desk.later(5.0)
    assert desk.closed == [(1, "a"), (2, "bb")]


# --- a worker's weight in one round ---------------------------------------------------------------------------------


def test_two_voices_weigh_no_more_than_one_may() -> None:
    desk = Desk("abc", quorum=2, weight_by="tokens", max_weight_ratio=4.0, weigh_staleness=False)
    for worker in "ab":
        desk.contribute(worker, tokens=100)
    desk.contribute("c", tokens=10_000)
    desk.contribute("c", 2, base_version=1, tokens=10_000)
    desk.contribute("a", 2, base_version=1, tokens=100)
    assert [p.weight for p in desk.closings[-1].participants] == [400.0, 0.0, 100.0]


def test_of_the_second_as_much_counts_as_the_first_left() -> None:
    desk = Desk("abc", quorum=2, weight_by="tokens", max_weight_ratio=4.0, weigh_staleness=False)
    for worker in "ab":
        desk.contribute(worker, tokens=100)
    desk.contribute("c", tokens=300)
    desk.contribute("c", 2, base_version=1, tokens=300)
    desk.contribute("a", 2, base_version=1, tokens=100)
    assert [p.weight for p in desk.closings[-1].participants] == [300.0, 100.0, 100.0]


def test_where_all_weigh_the_same_two_voices_weigh_within_the_ratio() -> None:
    desk = late(Desk("abc", quorum=2, max_weight_ratio=1.0))
    desk.contribute("c", 2, base_version=1)
    desk.contribute("a", 2, base_version=1)
    assert weights(desk) == {"c": 1.0, "a": 1.0}
