"""A round does not wait for a worker whose contributions to it were refused too often, whatever for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outerstep.coordination.server.claims import ClaimedWork
from outerstep.coordination.server.membership import BLAMELESS
from outerstep.coordination.server.rounds import MOST_REFUSALS, Aggregation, OpenRound, RoundRules
from outerstep.errors import (
    Absurd,
    BadRequest,
    BadTensors,
    Conflict,
    FutureRound,
    HashMismatch,
    MissingParts,
    NotFinite,
    PlanMismatch,
    Refused,
    StaleRound,
    TooLarge,
    TooOld,
)
from outerstep.types import Participant
from unit.coordination.builders import SIZE_BYTES, Desk, make_key

SHAPE = BadTensors("'wte': got [6], run has [5]", hint="look at the model")


def others_in(desk: Desk, version: int = 0) -> None:
    """Everybody but "c"."""
    for worker in "ab":
        desk.contribute(worker, version + 1, base_version=version, norm=1.0)


def part_out_of_range(desk: Desk) -> object:
    desk.offer("c")
    return desk.put("c", 99)


REFUSED: dict[str, tuple[type[Refused], Callable[[Desk], object]]] = {
    "codec": (PlanMismatch, lambda desk: desk.offer("c", codec="int8")),
    "size": (TooLarge, lambda desk: desk.offer("c", size_bytes=1 << 30)),
    "sections": (BadRequest, lambda desk: desk.offer("c", section_bytes=(1,) * SIZE_BYTES)),
    "version": (FutureRound, lambda desk: desk.offer("c", base_version=9)),
    "part": (BadRequest, part_out_of_range),
}


@pytest.mark.parametrize(("kind", "say"), REFUSED.values(), ids=REFUSED.keys())
def test_the_third_refusal_closes_the_round_for_the_others(kind: type[Refused], say: Callable[[Desk], object]) -> None:
    desk = Desk("abc")
    others_in(desk)
    for _ in range(MOST_REFUSALS - 1):
        with pytest.raises(kind) as told:
            say(desk)
        assert "closes without it" not in told.value.hint
        assert not desk.closed
    with pytest.raises(kind) as told:
        say(desk)
    desk.carry_out()
    assert desk.closed == [(1, "ab")]
    assert told.value.hint.endswith("refused 3 times, so the round closes without it unless it brings a good one first")
    why = told.value.message
    assert desk.events("counted_out") == [{"worker": "c", "fragment": 0, "version": 1, "why": why}]
    assert not desk.events("offence")
    assert desk.expected() == {"a", "b", "c"}, "in the next round it is expected as ever"


def test_a_hint_of_its_own_comes_first() -> None:
    desk = Desk("abc")
    for _ in range(MOST_REFUSALS):
        with pytest.raises(FutureRound) as told:
            desk.offer("c", base_version=9)
    assert told.value.hint.startswith("0 ≤ oldest_base ≤ base_version ≤ current version; refused 3 times")
    with pytest.raises(FutureRound) as told:
        desk.offer("c", base_version=9)
    assert "refused" not in told.value.hint, "it was told"
    desk.carry_out()
    assert len(desk.events("counted_out")) == 1


def test_what_it_brings_in_time_after_that_counts() -> None:
    desk = Desk("abc")
    for _ in range(MOST_REFUSALS):
        with pytest.raises(PlanMismatch):
            desk.offer("c", codec="int8")
    desk.contribute("c")
    others_in(desk)
    assert desk.closed == [(1, "cab")]


def test_far_too_large_again_and_again_is_one_offence_and_three_refusals() -> None:
    desk = Desk("abc")
    others_in(desk)
    desk.contribute("c", norm=1.0)
    others_in(desk, 1)
    for sequence in (2, 3, 4):
        with pytest.raises(Absurd):
            desk.contribute("c", sequence, base_version=1, norm=50.0)
    desk.carry_out()
    assert desk.closed[1:] == [(2, "ab")]
    assert [event["count"] for event in desk.events("offence")] == [1]


def test_when_the_run_has_changed_nothing_is_held_against_anybody() -> None:
    desk = Desk("abc")
    others_in(desk)
    desk.contribute("c", norm=1.0)
    for worker, sequence in (("a", 2), ("a", 3), ("c", 2)):
        with pytest.raises(Absurd):
            desk.contribute(worker, sequence, base_version=1, norm=50.0)
    assert desk.events("screen_forgotten")
    assert not desk.coordinator.fragments[0].round.refusals


def test_in_quarantine_it_is_not_counted_out_beside() -> None:
    desk = Desk("abc")
    others_in(desk)
    for sequence in (1, 2, 3):
        answer = desk.offer("c", sequence)
        for part in answer.missing:
            desk.put("c", part, sequence)
        desk.coordinator.reject(make_key("c", sequence), NotFinite("NaN"), desk.now)
    desk.carry_out()
    assert desk.events("quarantine")
    assert not desk.events("counted_out")
    assert desk.closed == [(1, "ab")]


# --- what a driver refuses ------------------------------------------------------------------------------------------


def test_one_payload_for_several_fragments_is_one_offence_and_a_refusal_in_each() -> None:
    desk = Desk("abc", fragments=2)
    desk.coordinator.turn_away("c", [0, 1], SHAPE, desk.now)
    desk.carry_out()
    assert [event["count"] for event in desk.events("offence")] == [1]
    assert [f.round.refusals for f in desk.coordinator.fragments] == [{"c": 1}, {"c": 1}]


def test_a_worker_that_nobody_knows_is_not_turned_away() -> None:
    desk = Desk("ab")
    desk.coordinator.turn_away("c", [0], SHAPE, desk.now)
    assert not desk.coordinator.fragments[0].round.refusals


# --- what is no fault of the worker's -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLAMELESS, ids=lambda kind: kind.__name__)
def test_what_healthy_workers_hear_does_not_count(kind: type[Refused]) -> None:
    desk = Desk("abc")
    for _ in range(2 * MOST_REFUSALS):
        desk.coordinator.turn_away("c", [0], kind("no"), desk.now)
    assert not desk.coordinator.fragments[0].round.refusals


def test_a_damaged_line_and_a_forgotten_upload_are_among_them() -> None:
    assert {HashMismatch, MissingParts} <= set(BLAMELESS)
    assert not {Conflict, StaleRound, TooOld, FutureRound, BadRequest, TooLarge, PlanMismatch} & set(BLAMELESS)


def test_a_late_worker_may_be_told_often_while_a_round_is_being_closed() -> None:
    """There is nothing yet that it could rebase on."""
    desk = Desk("abc", round_deadline_s=5.0, prompt=False)
    others_in(desk)
    desk.later(5.0, alive="abc")
    for _ in range(MOST_REFUSALS):
        with pytest.raises(StaleRound):
            desk.offer("c")
    assert not desk.coordinator.fragments[0].round.refusals
    desk.publish(desk.closings[0])
    for _ in range(MOST_REFUSALS):
        with pytest.raises(StaleRound):
            desk.offer("c")
    assert desk.coordinator.fragments[0].round.counted_out == {"c"}


# --- a round that refused -------------------------------------------------------------------------------------------


def a_round(*expected: str, refused: int = MOST_REFUSALS) -> OpenRound:
    made = OpenRound(1, set(expected))
    for _ in range(refused):
        made.refuse("z")
    return made


def test_it_is_told_once() -> None:
    made = OpenRound(1, {"a", "z"})
    assert [made.refuse("z") for _ in range(5)] == [False, False, True, False, False]
    assert (made.expected, made.counted_out, made.refusals) == ({"a"}, {"z"}, {"z": 5})


def test_below_that_it_is_still_expected() -> None:
    made = a_round("a", "z", refused=MOST_REFUSALS - 1)
    assert (made.expected, made.counted_out) == ({"a", "z"}, set())


def test_a_worker_that_is_in_the_round_is_not_counted_out_of_it() -> None:
    made = OpenRound(1, {"z"})
    who = Participant(worker_id="z", sequence=1, weight=1.0)
    made.count(who, RoundRules(num_workers=1), 0.0, reported=1.0, work=ClaimedWork(1, 0, 0), size=None, kept=False)
    assert [made.refuse("z") for _ in range(MOST_REFUSALS)] == [False] * MOST_REFUSALS
    assert (made.expected, made.counted_out) == ({"z"}, set())


def test_no_round_waits_for_it_to_be_complete() -> None:
    """Neither for `min_workers`, which is stuck then, nor for a rule that needs one more with training in it."""
    desk = Desk("abc", min_workers=3)
    others_in(desk)
    for _ in range(MOST_REFUSALS):
        with pytest.raises(PlanMismatch):
            desk.offer("c", codec="int8")
    told = desk.poll("a")
    assert told.waiting_for == "at least 3 (min_workers): 2 contributed, 0 more alive, c refused 3 times"
    assert told.stuck
    assert not desk.closed


def test_a_run_that_starts_late_does_not_wait_for_who_was_counted_out_before() -> None:
    """Whoever is there when the run starts is expected; it was refused too often already then."""
    round_ = a_round("a", "b")
    round_.expected = {"a", "b", "z"}
    for worker in "ab":
        round_.contributors.add(worker)
    verdict = round_.verdict(RoundRules(num_workers=2), 0.0, started=True, live=frozenset("abz"), turned_away=0)
    assert verdict.close


def test_to_a_rule_it_is_one_of_the_bad_ones_that_were_there() -> None:
    desk = Desk("abcd", aggregation=Aggregation(aggregation="trimmed_mean", trim_fraction=0.25))
    for worker in "abc":
        desk.contribute(worker)
    assert not desk.closed
    for _ in range(MOST_REFUSALS):
        with pytest.raises(PlanMismatch):
            desk.offer("d", codec="int8")
    desk.carry_out()
    assert desk.closings[0].turned_away == {"d"}


def test_but_not_when_it_has_left() -> None:
    desk = Desk("abcd", aggregation=Aggregation(aggregation="trimmed_mean", trim_fraction=0.25))
    for _ in range(MOST_REFUSALS):
        with pytest.raises(PlanMismatch):
            desk.offer("d", codec="int8")
    desk.leave("d")
    for worker in "abc":
        desk.contribute(worker)
    assert not desk.closed
