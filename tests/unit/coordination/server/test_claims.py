"""Nobody ends a token budget by claiming, and nobody pushes many times as often as the others."""

from __future__ import annotations

import math
from statistics import median_high
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.server.claims import (
    BURST,
    MOST_HELD,
    OTHERS,
    PATIENCE_S,
    REMEMBERED_RATES,
    SHORTEST_S,
    Claim,
    Claimant,
    ClaimedWork,
    UsualRates,
    allowed,
    settle,
)
from unit.coordination.builders import Desk, Participant
from unit.coordination.speaking import accumulated

TRILLION = 10**12


def work(tokens: float, steps: float = 0.0, samples: float = 0.0) -> ClaimedWork:
    return ClaimedWork(steps, samples, tokens)


# --- how much may be true -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed", "limit", "elapsed_s", "counted"),
    [
        (50.0, 10.0, 4.0, 40),
        (30.0, 10.0, 4.0, 30),
        (50.0, 10.0, 4.19, 41),
        (50.0, 10.0, 0.0, 10 * SHORTEST_S),
        (50.0, 10.0, SHORTEST_S + 1.0, 20),
        (50.0, 0.1, 4.0, 1),
        (0.0, 10.0, 4.0, 0),
        (TRILLION, None, 4.0, TRILLION),
    ],
)
def test_a_claim_counts_up_to_the_limit_times_the_time(
    claimed: float, limit: float | None, elapsed_s: float, counted: float
) -> None:
    assert allowed(claimed, limit, elapsed_s) == counted


# --- one worker -----------------------------------------------------------------------------------------------------


def test_its_rates_are_between_contributions_and_the_first_is_forgotten() -> None:
    one = Claimant(100.0)
    assert one.note(Claim("a", 110.0, ClaimedWork(20, 40, 80))) == 10.0
    assert list(one.rates) == [ClaimedWork(2.0, 4.0, 8.0, 0.1)]
    assert one.note(Claim("a", 112.0, ClaimedWork(20, 40, 80))) == 2.0
    assert list(one.rates) == [ClaimedWork(10.0, 20.0, 40.0, 0.5)]
    assert one.note(Claim("a", 116.0, ClaimedWork(20, 40, 80))) == 4.0
    assert list(one.rates) == [ClaimedWork(10.0, 20.0, 40.0, 0.5), ClaimedWork(5.0, 10.0, 20.0, 0.25)]
    assert (one.last_at, one.contributions) == (116.0, 3)


def test_no_time_between_them_counts_as_a_second_but_for_how_often_it_pushes() -> None:
    one = Claimant(100.0)
    one.note(Claim("a", 100.0, work(8)))
    assert list(one.rates) == [ClaimedWork(0.0, 0.0, 8.0 / SHORTEST_S, math.inf)]
    one.note(Claim("a", 100.5, work(8)))
    assert list(one.rates) == [ClaimedWork(0.0, 0.0, 8.0 / SHORTEST_S, 2.0)]


def test_what_is_usual_is_the_median_of_the_last_ones_unit_by_unit() -> None:
    one = Claimant(0.0)
    for at, tokens, steps in ((2.0, 9, 9), (4.0, 2, 8), (6.0, 4, 2), (8.0, 1000, 4)):
        one.note(Claim("a", at, work(tokens, steps)))
    assert one.usual == ClaimedWork(steps=2.0, samples=0.0, tokens=2.0, pushes=0.5)
    for _ in range(2 * REMEMBERED_RATES):
        one.note(Claim("a", 10.0, work(0)))
    assert len(one.rates) == REMEMBERED_RATES


def test_what_exceeds_the_limit_is_held_and_counts_when_there_is_room() -> None:
    one = Claimant(0.0)
    counted = [
        one.count_tokens(claimed, 10.0, elapsed_s, others_come=False)
        for claimed, elapsed_s in ((600.0, 60.0), (600.0, 1.0), (300.0, 60.0), (290.0, 60.0), (100.0, 60.0))
    ]
    assert counted == [600, 10, 600, 580, 100]
    assert one.held_tokens == 0.0
    assert sum(counted) == 600 + 600 + 300 + 290 + 100


def test_it_gains_nothing_by_claiming_more_than_its_limit() -> None:
    one = Claimant(0.0)
    assert [one.count_tokens(TRILLION, 10.0, 60.0, others_come=True) for _ in range(3)] == [600, 600, 600]
    for _ in range(2000):
        one.count_tokens(TRILLION, 10.0, 60.0, others_come=False)
    assert one.held_tokens == MOST_HELD


def test_a_lone_claim_is_held_for_others_that_are_still_to_speak() -> None:
    one = Claimant(0.0)
    assert one.count_tokens(TRILLION, None, 60.0, others_come=True) == 0
    assert one.held_tokens == TRILLION
    assert one.count_tokens(10, 10.0, 60.0, others_come=True) == 600
    other = Claimant(0.0)
    assert other.count_tokens(7, None, 60.0, others_come=True) == 0
    assert other.count_tokens(8, None, 60.0, others_come=False) == 15


def test_it_may_push_a_few_times_in_a_row_and_then_at_its_pace() -> None:
    one = Claimant(0.0)
    moments = []
    for _ in range(BURST + 2):
        one.pushed(100.0, 0.5)
        moments.append(one.free_at)
    assert moments == [94.0 + 2.0 * (i + 1) for i in range(BURST + 2)]
    assert [moment <= 100.0 for moment in moments] == [True] * (BURST - 1) + [False] * 3
    one.pushed(200.0, 0.5)
    assert one.free_at == 196.0


def test_a_pace_that_nobody_knows_holds_nobody_up() -> None:
    one = Claimant(0.0)
    for _ in range(100):
        one.pushed(100.0, math.inf)
        assert one.free_at <= 100.0


# --- the others -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=7))
def test_the_median_of_the_others_is_that(rates: list[float]) -> None:
    pace = UsualRates({str(i): work(rate) for i, rate in enumerate(rates)})
    for i in range(len(rates)):
        others = [rate for j, rate in enumerate(rates) if j != i and rate > 0.0]
        assert pace.others(str(i), "tokens") == (median_high(others) if others else None)
    every = [rate for rate in rates if rate > 0.0]
    assert pace.others("somebody else", "tokens") == (median_high(every) if every else None)


def test_each_unit_is_compared_with_itself() -> None:
    pace = UsualRates({"a": ClaimedWork(1.0, 2.0, 3.0, 4.0), "b": ClaimedWork(5.0, 6.0, 0.0, 8.0)})
    assert [pace.others("b", unit) for unit in ClaimedWork._fields] == [1.0, 2.0, 3.0, 4.0]
    assert [pace.others("a", unit) for unit in ClaimedWork._fields] == [5.0, 6.0, None, 8.0]


def test_the_limit_is_the_runs_or_several_times_what_the_others_do() -> None:
    pace = UsualRates({"a": work(3.0)})
    assert pace.limit("b", "tokens", None) == OTHERS * 3.0
    assert pace.limit("b", "tokens", 7.0) == 7.0
    assert pace.limit("a", "tokens", None) is None
    assert pace.limit("a", "tokens", 7.0) == 7.0


# --- a round closes -------------------------------------------------------------------------------------------------


def settled(claims: list[Claim], known: dict[str, Claimant], **facts: Any) -> tuple[UsualRates, list[int]]:
    whole = {"live": known.keys(), "others_come": False, "most_per_s": None, "push_ratio": 10.0}
    return settle(claims, known, **{**whole, **facts})


def test_in_the_first_round_too_a_claim_is_compared_with_the_others() -> None:
    known = {name: Claimant(0.0) for name in "abz"}
    pace, tokens = settled([Claim(name, 10.0, work(TRILLION if name == "z" else 100)) for name in "zab"], known)
    assert tokens == [400, 100, 100]
    assert pace.others("a", "tokens") is None, "nobody has contributed twice"


def test_the_pace_is_of_live_workers_that_have_contributed_twice() -> None:
    known = {name: Claimant(0.0) for name in "abc"}
    for at in (10.0, 20.0):
        pace, _ = settled(
            [Claim(name, at, work(100)) for name in "abc"[: 3 if at == 20.0 else 2]], known, live={"a", "c"}
        )
    assert pace.others("z", "tokens") == 10.0
    assert pace.others("a", "tokens") is None, "b is gone, and c has come once"


def test_two_contributions_of_a_worker_share_its_time() -> None:
    known = {name: Claimant(0.0) for name in "ab"}
    claims = [Claim("a", 10.0, work(1000)), Claim("a", 20.0, work(1000)), Claim("b", 20.0, work(200))]
    assert settled(claims, known)[1] == [400, 400, 200]


def test_the_setting_bounds_a_lone_worker() -> None:
    assert settled([Claim("a", 10.0, work(TRILLION))], {"a": Claimant(0.0)}, most_per_s=5.0)[1] == [50]
    assert settled([Claim("a", 10.0, work(TRILLION))], {"a": Claimant(0.0)})[1] == [TRILLION]
    assert settled([Claim("a", 10.0, work(TRILLION))], {"a": Claimant(0.0)}, others_come=True)[1] == [0]


def test_a_worker_that_pushes_far_more_often_than_the_others_is_paced() -> None:
    known = {"a": Claimant(0.0), "z": Claimant(0.0)}
    for at in (100.0, 200.0):
        settled([Claim("a", at, work(0))], known)
    for i in range(BURST):
        settled([Claim("z", 200.0 + i * 1e-3, work(0))], known)
    assert known["z"].free_at == pytest.approx(200.0 + 100.0 / 10.0)
    assert known["a"].free_at == -math.inf


# --- in the coordinator ---------------------------------------------------------------------------------------------


def a_round(desk: Desk, after_s: float = 10.0, **facts: dict[str, int]) -> tuple[Participant, ...]:
    """By everybody that is named, with these claims."""
    desk.later(after_s, alive="".join(sorted(desk.live)))
    version = desk.version()
    for worker, claims in facts.items():
        desk.contribute(worker, version + 1, base_version=version, norm=1.0, **claims)
    return desk.closings[-1].participants


def test_nobody_ends_a_token_budget_by_claiming() -> None:
    desk = Desk("abz", heartbeat_timeout_s=0.0)
    desk.coordinator.budget.limit = 10_000
    for _ in range(3):
        a_round(desk, z={"tokens": TRILLION}, a={"tokens": 100}, b={"tokens": 100})
    assert desk.coordinator.budget.total == 3 * (100 + 100 + 400)
    assert not desk.coordinator.closing
    assert {w.worker_id: w.tokens for w in desk.coordinator.members} == {"a": 300, "b": 300, "z": 1200}
    assert desk.events("claim_bounded") == [{"worker": "z", "claimed": TRILLION, "counted": 400}] * 3


def test_tokens_are_counted_with_one_fragment_since_all_see_the_same() -> None:
    desk = Desk("a", fragments=2)
    for fragment in (0, 1):
        desk.contribute("a", fragment=fragment, tokens=5)
    [worker] = desk.coordinator.members
    assert (worker.tokens, desk.coordinator.budget.total) == (5, 5)
    assert not desk.events("claim_bounded")


def test_the_first_to_push_does_not_end_it_before_the_others_have_spoken() -> None:
    desk = Desk("za", quorum=1, asynchronous=True, heartbeat_timeout_s=0.0)
    desk.coordinator.budget.limit = 10_000
    a_round(desk, z={"tokens": TRILLION})
    assert desk.coordinator.budget.total == 0
    a_round(desk, a={"tokens": 100})
    assert desk.coordinator.budget.total == 100
    a_round(desk, z={"tokens": 1})
    assert desk.coordinator.budget.total == 100 + int(OTHERS * 100 / 20 * 20)
    assert not desk.coordinator.closing


@pytest.mark.parametrize("why", ["it left", "it has been here for long", "it is in quarantine", "it has spoken"])
def test_and_waits_for_nobody_that_will_not_speak(why: str) -> None:
    desk = Desk("za", quorum=1, asynchronous=True, heartbeat_timeout_s=0.0)
    match why:
        case "it left":
            desk.leave("a")
        case "it has been here for long":
            desk.later(PATIENCE_S)
        case "it is in quarantine":
            member = desk.coordinator.members.find("a")
            assert member is not None
            member.conduct.until = math.inf
            desk.coordinator.members.quarantined(member)
        case "it has spoken":  # and does not report tokens
            a_round(desk, a={})
    a_round(desk, after_s=0.0, z={"tokens": 70})
    assert desk.coordinator.budget.total == 70


def test_until_then_it_is_waited_for() -> None:
    desk = Desk("za", quorum=1, asynchronous=True, heartbeat_timeout_s=0.0)
    desk.later(PATIENCE_S - 1.0)
    a_round(desk, after_s=0.0, z={"tokens": 70})
    assert desk.coordinator.budget.total == 0


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_what_is_claimed_weighs_no_more_than_it_counts(unit: str) -> None:
    desk = Desk("abz", heartbeat_timeout_s=0.0, weight_by=unit, max_weight_ratio=100.0)
    honest = {worker: {unit: 100} for worker in "abz"}
    for _ in range(2):
        a_round(desk, **honest)
    made = a_round(desk, **{**honest, "z": {unit: TRILLION}})
    assert [p.weight for p in made] == [100.0, 100.0, 400.0]
    made = a_round(desk, **honest)
    assert [p.weight for p in made] == [100.0, 100.0, 100.0], "what was claimed before weighs no longer"


def test_claimed_steps_excuse_a_large_norm_no_further() -> None:
    desk = Desk("abz", heartbeat_timeout_s=0.0)
    honest = {worker: {"steps": 10} for worker in "abz"}
    for _ in range(2):
        a_round(desk, **honest)
    a_round(desk, **{**honest, "z": {"steps": 10_000}})
    sizes = [size.steps for _, round_ in desk.coordinator.fragments[0].screen.rounds for size in round_]
    assert sorted(sizes)[-1] == 40


def test_the_setting_bounds_weights_from_the_first_contribution_on() -> None:
    desk = Desk("a", heartbeat_timeout_s=0.0, max_tokens_per_s=5.0)
    a_round(desk, a={"tokens": TRILLION})
    a_round(desk, a={"tokens": 20})
    assert desk.coordinator.budget.total == 100, "50, then 20 and what was held"


def test_a_worker_that_pushes_too_often_is_told_when_to_come_back() -> None:
    desk = Desk("za", quorum=1, asynchronous=True, heartbeat_timeout_s=0.0)
    a_round(desk, 100.0, a={})
    a_round(desk, 100.0, a={})
    for _ in range(BURST):
        a_round(desk, 0.0, z={})
    version = desk.version()
    answer = desk.offer("z", version + 1, base_version=version)
    assert answer.state == "wait"
    assert answer.retry_after_s == pytest.approx(10.0)
    assert not desk.coordinator.uploads.by_key
    desk.later(answer.retry_after_s)
    assert desk.offer("z", version + 1, base_version=version).state == "send"
    assert len(accumulated(desk)) == 2 + BURST


def test_in_rounds_of_all_nobody_is_paced() -> None:
    desk = Desk("za", heartbeat_timeout_s=0.0)
    for after_s in (100.0, 100.0, *[0.0] * (2 * BURST)):
        a_round(desk, after_s, a={}, z={})
    assert desk.version() == 2 + 2 * BURST
