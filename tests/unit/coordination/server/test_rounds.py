"""When a round closes: the rule by itself, then with workers that come and go."""

from typing import Any

import pytest

from outerstep.coordination.server.claims import ClaimedWork
from outerstep.coordination.server.rounds import OpenRound, RoundRules, RoundVerdict
from outerstep.types import Participant
from unit.coordination.builders import TIMEOUT_S, Desk

SOON, NEVER = 1.0, 1e9


def open_round(expected: str, contributions: str = "", **rules: Any) -> tuple[OpenRound, RoundRules]:
    """One letter per worker; contribution number i came at moment i."""
    round_, fixed = OpenRound(1, set(expected)), RoundRules(**{"num_workers": len(expected), **rules})
    for moment, worker in enumerate(contributions):
        participant = Participant(worker_id=worker, sequence=moment + 1, weight=1.0)
        round_.count(participant, fixed, float(moment), reported=1.0, work=ClaimedWork(1, 0, 0), size=None, kept=False)
    return round_, fixed


def verdict(
    expected: str,
    contributions: str,
    now: float = SOON,
    *,
    started: bool = True,
    live: str | None = None,
    turned_away: int = 0,
    **rules: Any,
) -> RoundVerdict:
    """`live`: who is alive, if it is not just those expected."""
    round_, fixed = open_round(expected, contributions, **rules)
    alive = frozenset(expected if live is None else live)
    return round_.verdict(fixed, now, started=started, live=alive, turned_away=turned_away)


class TestSynchronous:
    @pytest.mark.parametrize(("contributions", "close"), [("", False), ("a", False), ("ab", False), ("abc", True)])
    def test_it_closes_when_all_expected_are_in(self, contributions: str, close: bool) -> None:
        assert verdict("abc", contributions, NEVER).close is close

    def test_a_contribution_of_somebody_else_does_not_stand_in_for_an_expected_one(self) -> None:
        assert not verdict("abc", "abx").close

    def test_it_says_for_whom_it_waits(self) -> None:
        assert verdict("abc", "b").waiting_for == "contributions of a, c"

    def test_it_names_four_and_counts_the_rest(self) -> None:
        assert verdict("abcdefg", "a").waiting_for == "contributions of b, c, d, e and 2 more"

    @pytest.mark.parametrize(("expected", "named"), [("abcde", "b, c, d, e"), ("abcdef", "b, c, d, e and 1 more")])
    def test_up_to_four_are_named_alone(self, expected: str, named: str) -> None:
        assert verdict(expected, "a").waiting_for == f"contributions of {named}"

    def test_an_asynchronous_one_waits_for_whoever_comes_next(self) -> None:
        waiting = RoundVerdict(False, None, "the next contribution")
        assert verdict("abc", "", quorum=1, asynchronous=True) == waiting

    def test_without_a_deadline_there_is_nothing_to_wake_for(self) -> None:
        assert verdict("ab", "a").wake_at is None

    def test_not_before_the_run_has_started(self) -> None:
        answer = verdict("ab", "ab", NEVER, started=False, num_workers=3)
        assert (answer.close, answer.stuck, answer.waiting_for) == (False, True, "3 workers to join (2 here)")


class TestQuorum:
    @pytest.mark.parametrize(("now", "close"), [(1.0, False), (5.9, False), (6.0, True)])
    def test_it_closes_when_the_grace_after_the_quorum_has_passed(self, now: float, close: bool) -> None:
        assert verdict("abcd", "ab", now, quorum=2, grace_s=5.0).close is close

    def test_it_says_that_it_waits_out_the_grace_and_for_whom(self) -> None:
        answer = RoundVerdict(False, 6.0, "5 s of grace, for contributions of c, d")
        assert verdict("abcd", "ab", quorum=2, grace_s=5.0) == answer

    def test_it_wakes_at_the_end_of_the_grace(self) -> None:
        assert verdict("abcd", "abc", quorum=2, grace_s=5.0).wake_at == 6.0

    def test_without_grace_it_closes_at_once(self) -> None:
        assert verdict("abc", "a", 0.0, quorum=1).close

    def test_all_expected_close_it_within_the_grace(self) -> None:
        assert verdict("ab", "ab", quorum=1, grace_s=100.0).close

    def test_a_quorum_is_of_workers_not_of_contributions(self) -> None:
        assert not verdict("abc", "aa", NEVER, quorum=2).close
        assert verdict("abc", "aab", NEVER, quorum=2).close

    def test_a_quorum_below_min_workers_waits_for_min_workers(self) -> None:
        assert not verdict("abc", "a", NEVER, quorum=1, min_workers=2).close
        assert verdict("abc", "ab", NEVER, quorum=1, min_workers=2).close


class TestDeadline:
    @pytest.mark.parametrize(("now", "close"), [(9.9, False), (10.0, True)])
    def test_it_counts_from_the_first_contribution(self, now: float, close: bool) -> None:
        assert verdict("abc", "ab", now, round_deadline_s=10.0).close is close

    def test_a_later_contribution_does_not_move_it(self) -> None:
        assert verdict("abc", "ab", round_deadline_s=10.0).wake_at == 10.0

    def test_the_earlier_of_deadline_and_grace_counts(self) -> None:
        assert verdict("abc", "ab", quorum=2, grace_s=3.0, round_deadline_s=10.0).wake_at == 4.0
        assert verdict("abc", "ab", quorum=2, grace_s=30.0, round_deadline_s=10.0).wake_at == 10.0

    def test_without_a_contribution_no_time_is_running(self) -> None:
        answer = verdict("abc", "", NEVER, round_deadline_s=10.0)
        assert (answer.close, answer.wake_at) == (False, None)


class TestFloor:
    @pytest.mark.row("F18")
    @pytest.mark.parametrize("expected", ["", "abc"])
    @pytest.mark.parametrize(
        ("min_workers", "contributions"), [(0, ""), (1, ""), (2, ""), (2, "a"), (2, "aaa"), (3, "ab"), (3, "abab")]
    )
    def test_never_a_step_from_zero_or_too_few(self, min_workers: int, contributions: str, expected: str) -> None:
        rules = {"min_workers": min_workers, "quorum": 1, "round_deadline_s": 1.0, "num_workers": 3}
        assert not verdict(expected, contributions, NEVER, **rules).close

    @pytest.mark.parametrize(
        ("expected", "contributions", "stuck"),
        [("a", "a", True), ("", "a", True), ("ab", "a", False), ("b", "a", False), ("", "", True), ("ab", "", False)],
    )
    def test_stuck_means_that_those_alive_cannot_reach_min_workers(
        self, expected: str, contributions: str, stuck: bool
    ) -> None:
        assert verdict(expected, contributions, min_workers=2).stuck is stuck

    def test_a_live_worker_that_is_not_expected_may_still_come(self) -> None:
        answer = verdict("a", "a", live="ab", min_workers=2)
        assert not answer.stuck
        assert answer.waiting_for == "contributions of b"

    @pytest.mark.row("F13")
    def test_a_stuck_round_says_how_many_it_needs_and_has(self) -> None:
        why = "at least 3 (min_workers): 1 contributed, 1 more alive"
        assert verdict("ab", "a", min_workers=3) == RoundVerdict(False, None, why, stuck=True)

    def test_the_dead_who_contributed_count_towards_min_workers(self) -> None:
        assert verdict("a", "ab", min_workers=2).close


class TestWants:
    @pytest.mark.parametrize(
        ("expected", "contributions", "min_workers", "wanted"),
        [
            ("ab", "", 1, False),  # nobody waits yet
            ("ab", "a", 1, True),
            ("ab", "b", 1, False),  # it is in
            ("a", "a", 1, False),  # not expected, and not needed
            ("a", "a", 2, True),  # not expected, but needed
        ],
    )
    def test_a_round_wants_whoever_keeps_a_contributor_waiting(
        self, expected: str, contributions: str, min_workers: int, wanted: bool
    ) -> None:
        round_, rules = open_round(expected, contributions, min_workers=min_workers)
        assert round_.wants("b", rules) is wanted


class TestStart:
    @pytest.mark.parametrize(
        ("live", "asynchronous", "start"), [(3, False, True), (2, False, False), (1, True, True), (0, True, False)]
    )
    def test_all_are_needed_or_any_if_nobody_waits_for_anybody(
        self, live: int, asynchronous: bool, start: bool
    ) -> None:
        assert RoundRules(3, asynchronous=asynchronous).may_start(live, 0.0, NEVER) is start

    def test_before_the_first_join_no_deadline_passes(self) -> None:
        rules = RoundRules(3, min_workers=1, start_deadline_s=5.0)
        assert not rules.may_start(1, None, NEVER)
        assert [rules.may_start(1, 10.0, now) for now in (14.9, 15.0)] == [False, True]

    def test_one_of_two_configured_workers_waits_for_the_second(self) -> None:
        desk = Desk("a", num_workers=2, heartbeat_timeout_s=0.0)
        desk.contribute("a")
        desk.later(NEVER)
        answer = desk.poll("a")
        assert (desk.closed, answer.stuck, answer.waiting_for) == ([], True, "2 workers to join (1 here)")
        desk.join("b")
        assert desk.closed == []
        desk.contribute("b")
        assert desk.closed == [(1, "ab")]

    def test_the_second_may_come_and_go_before_the_start(self) -> None:
        desk = Desk("ab", num_workers=3)
        desk.leave("b")
        desk.join("c")
        assert not desk.coordinator.started
        desk.join("b")
        assert desk.events("start") == [{"workers": ["a", "b", "c"]}]

    @pytest.mark.parametrize(("waited_s", "started"), [(4.9, False), (5.0, True)])
    def test_at_the_start_deadline_min_workers_are_enough(self, waited_s: float, started: bool) -> None:
        desk = Desk("ab", num_workers=3, min_workers=2, start_deadline_s=5.0)
        desk.later(waited_s)
        assert desk.coordinator.started is started
        assert desk.expected() == ({"a", "b"} if started else set())

    def test_the_start_deadline_counts_from_the_first_join(self) -> None:
        desk = Desk("a", num_workers=3, start_deadline_s=5.0)
        desk.later(3.0)
        desk.join("b")
        assert desk.coordinator.next_wake(desk.now) == desk.now + 2.0

    def test_below_min_workers_the_start_deadline_passes_and_the_next_join_starts_the_run(self) -> None:
        desk = Desk("a", num_workers=3, min_workers=2, start_deadline_s=5.0)
        desk.later(6.0)
        assert not desk.coordinator.started
        desk.join("b")
        assert desk.coordinator.started

    def test_nothing_starts_at_the_deadline_when_nobody_is_left(self) -> None:
        desk = Desk("a", num_workers=2, min_workers=0, start_deadline_s=5.0)
        desk.leave("a")
        desk.later(6.0)
        assert not desk.coordinator.started

    def test_who_contributed_before_the_start_is_in_the_first_round(self) -> None:
        desk = Desk("ab", num_workers=3, start_deadline_s=5.0)
        desk.contribute("a")
        desk.contribute("b")
        assert desk.closed == []
        desk.later(5.0)
        assert desk.closed == [(1, "ab")]


class TestComingAndGoing:
    def test_nobody_waits_for_a_mid_round_joiner(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.join("c")
        desk.contribute("b")
        assert desk.closed == [(1, "ab")]

    def test_a_mid_round_joiner_is_counted_if_in_time(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.join("c")
        desk.contribute("c")
        assert desk.closed == []
        desk.contribute("b")
        assert desk.closed == [(1, "acb")]

    def test_a_mid_round_joiner_is_expected_in_the_next_round(self) -> None:
        desk = Desk("ab")
        desk.join("c")
        desk.contribute("a")
        desk.contribute("b")
        assert desk.expected() == {"a", "b", "c"}

    def test_a_restart_is_not_waited_for_in_the_open_round_and_is_in_the_next(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.join("b", start=2)
        assert desk.closed == [(1, "a")]
        assert desk.expected() == {"a", "b"}

    @pytest.mark.row("F01", "F18")
    @pytest.mark.parametrize("how", ["leave", "death"])
    def test_leave_and_death_shrink_the_barrier_at_once(self, how: str) -> None:
        desk = Desk("abc")
        desk.contribute("a")
        desk.contribute("b")
        assert desk.closed == []
        self.remove(desk, "c", how, others="ab")
        assert desk.closed == [(1, "ab")]
        assert desk.expected() == {"a", "b"}

    @pytest.mark.row("F13")
    @pytest.mark.parametrize("how", ["leave", "death"])
    def test_below_min_workers_the_round_stays_open_and_closes_when_the_worker_is_back(self, how: str) -> None:
        desk = Desk("ab", min_workers=2, round_deadline_s=3.0)
        desk.contribute("a")
        self.remove(desk, "b", how, others="a")
        desk.later(4.0, alive="a")
        assert (desk.closed, desk.poll("a").stuck) == ([], True)
        desk.join("b")
        desk.contribute("b")
        assert desk.closed == [(1, "ab")]

    @pytest.mark.row("F18")
    @pytest.mark.parametrize("how", ["leave", "death"])
    @pytest.mark.parametrize("start", [1, 2])
    def test_all_die_and_return_without_a_step_from_nothing(self, how: str, start: int) -> None:
        desk = Desk("ab", round_deadline_s=3.0)
        self.remove(desk, "ab", how)
        desk.later(100.0)
        assert (desk.live, desk.expected(), desk.closed) == (set(), set(), [])
        desk.join("a", start=start)
        assert desk.expected() == {"a"}
        desk.join("b", start=start)
        desk.contribute("a")
        assert desk.closed == [(1, "a")]
        assert desk.expected() == {"a", "b"}

    def test_all_die_after_one_contributed_and_it_is_counted_once(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.later(TIMEOUT_S + 1.0)
        assert (desk.live, desk.closed) == (set(), [(1, "a")])
        assert desk.join("a").fragments[0].version == 1

    @staticmethod
    def remove(desk: Desk, workers: str, how: str, others: str = "") -> None:
        if how == "death":
            desk.later(TIMEOUT_S + 1.0, alive=others)
        else:
            for worker in workers:
                desk.leave(worker)


class TestWaking:
    def test_the_coordinator_wakes_for_the_earliest_of_deaths_and_deadlines(self) -> None:
        desk = Desk("ab", round_deadline_s=3.0)
        assert desk.coordinator.next_wake(desk.now) == desk.now + TIMEOUT_S
        desk.contribute("a")
        assert desk.coordinator.next_wake(desk.now) == desk.now + 3.0

    def test_a_start_deadline_that_passed_in_vain_wakes_nobody(self) -> None:
        desk = Desk("a", num_workers=3, min_workers=2, start_deadline_s=5.0, heartbeat_timeout_s=0.0)
        desk.later(6.0)
        assert desk.coordinator.next_wake(desk.now) is None

    def test_what_is_due_now_needs_no_waking(self) -> None:
        desk = Desk("a")
        assert desk.coordinator.next_wake(desk.now + TIMEOUT_S) is None
        assert desk.coordinator.next_wake(desk.now + TIMEOUT_S - 0.5) == desk.now + TIMEOUT_S

    def test_a_run_that_has_started_or_that_nobody_has_joined_waits_for_no_start_deadline(self) -> None:
        for workers in ("", "ab"):
            desk = Desk(workers, num_workers=2, start_deadline_s=5.0, heartbeat_timeout_s=0.0)
            assert desk.coordinator.next_wake(desk.now) is None

    def test_without_a_start_deadline_the_others_are_waited_for_as_long_as_it_takes(self) -> None:
        desk = Desk("a", num_workers=2, heartbeat_timeout_s=0.0)
        assert desk.coordinator.next_wake(desk.now) is None

    def test_with_nothing_to_decide_it_sleeps(self) -> None:
        desk = Desk("a", heartbeat_timeout_s=0.0)
        assert desk.coordinator.next_wake(desk.now) is None

    def test_the_deadline_closes_the_round_without_a_message(self) -> None:
        desk = Desk("ab", round_deadline_s=3.0)
        desk.contribute("a")
        desk.later(2.9)
        assert desk.closed == []
        desk.later(0.1)
        assert desk.closed == [(1, "a")]
