"""The server's decisions on one contribution: it counts once, in its order, and not when it is too old."""

import math
from typing import Any

import pytest

from outerstep.coordination.server.remembered import LEAP
from outerstep.coordination.server.uploads import Upload
from outerstep.errors import (
    BadRequest,
    Conflict,
    FutureRound,
    MissingParts,
    NotFinite,
    StaleRound,
    Superseded,
    TooOld,
)
from outerstep.types import Participant
from unit.coordination.builders import (
    SIZE_BYTES,
    Desk,
    make_key,
)
from unit.coordination.speaking import CONTRIBUTING, Speak, accumulated, full_rounds, saying, traces


class TestExactlyOnce:
    def test_a_repeated_offer_gets_the_same_answer_and_takes_room_once(self) -> None:
        desk = Desk("ab")
        assert desk.offer("a") == desk.offer("a")
        assert desk.coordinator.uploads.held_bytes == SIZE_BYTES

    def test_a_repeated_offer_asks_only_for_what_is_missing(self) -> None:
        desk = Desk("ab")
        assert desk.offer("a").missing == (0, 1)
        desk.put("a", 0)
        assert desk.offer("a").missing == (1,)

    def test_a_repeated_part_is_a_duplicate(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        assert [desk.put("a", 0).state for _ in range(2)] == ["stored", "duplicate"]

    def test_two_copies_of_a_part_that_cross_are_stored_once(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        message = desk.part_message("a", 0)
        begun = [desk.coordinator.begin_part(message, desk.now) for _ in range(2)]
        assert all(isinstance(b, Upload) for b in begun)
        states = [desk.coordinator.part_arrived(message, desk.now).state for _ in range(2)]
        assert states == ["stored", "duplicate"]

    @pytest.mark.row("F04", "F05")
    @pytest.mark.parametrize("closed", [False, True])
    def test_a_repeated_commit_gets_the_same_answer_and_is_applied_once(self, closed: bool) -> None:
        desk = Desk("ab")
        first = desk.contribute("a")
        if closed:
            desk.contribute("b")
            assert desk.version() == 1
        before = traces(desk)
        assert desk.commit("a") == first
        assert traces(desk) == before
        assert [e.key.worker_id for e in accumulated(desk)].count("a") == 1

    @pytest.mark.parametrize("closed", [False, True])
    def test_once_accepted_an_offer_and_its_parts_are_known(self, closed: bool) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        if closed:
            desk.contribute("b")
        answer = desk.offer("a")
        assert (answer.state, answer.version) == ("accepted", 1)
        assert desk.put("a", 1).state == "duplicate"

    @pytest.mark.row("F05")
    def test_two_commits_that_cross_are_applied_once(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.put("a", 0)
        desk.put("a", 1)
        message = desk.commit_message("a")
        assert [isinstance(desk.coordinator.begin_commit(message, desk.now), Upload) for _ in range(2)] == [True, True]
        answers = [desk.coordinator.accept(message, desk.now) for _ in range(2)]
        desk.carry_out()
        assert answers[0] == answers[1]
        assert len(accumulated(desk)) == 1

    @pytest.mark.row("F03")
    def test_who_was_killed_after_its_contribution_was_accepted_is_counted_once(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        answer = desk.join("a", start=2)
        assert answer.fragments[0].last_sequence == 1
        assert desk.offer("a").state == "accepted"
        desk.contribute("b")
        assert desk.closed == [(1, "ab")]

    @pytest.mark.parametrize("facts", [{"tokens": 2}, {"size_bytes": SIZE_BYTES + 1}, {"steps": 9}])
    def test_the_same_key_with_other_facts_is_a_conflict(self, facts: dict[str, Any]) -> None:
        desk = Desk("ab")
        desk.offer("a")
        with pytest.raises(Conflict, match=r"a/fragment 0/#1 was offered before.*use the next sequence"):
            desk.offer("a", **facts)

    def test_the_same_part_with_another_hash_is_a_conflict(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.put("a", 0)
        with pytest.raises(Conflict, match="part 0 of a/fragment 0/#1 was stored with hash"):
            desk.put("a", 0, flavour="other")

    def test_a_commit_of_other_bytes_than_arrived_is_a_conflict_and_nothing_is_applied(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.put("a", 0)
        desk.put("a", 1)
        with pytest.raises(Conflict, match="the parts received make"):
            desk.commit("a", flavour="other")
        assert accumulated(desk) == []

    def test_the_same_key_accepted_with_another_hash_is_a_conflict(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        with pytest.raises(Conflict, match=r"was accepted with payload.*use the next sequence"):
            desk.commit("a", flavour="other")

    @saying(CONTRIBUTING)
    def test_an_older_sequence_is_superseded(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.contribute("a", 2)
        before = traces(desk)
        with pytest.raises(Superseded, match=r"a/fragment 0/#1 is older than the last accepted one \(#2\)"):
            say(desk, "a")
        assert traces(desk) == before

    def test_a_sequence_cannot_be_pushed_to_its_end(self) -> None:
        desk = Desk("ab")
        desk.contribute("a", LEAP)
        before = traces(desk)
        for say in (lambda n: desk.offer("a", n), lambda n: desk.put("a", 0, n), lambda n: desk.commit("a", n)):
            for sequence in (2 * LEAP + 1, 2**53):
                with pytest.raises(BadRequest, match=rf"at most {LEAP} above the last accepted one \(#{LEAP}\)"):
                    say(sequence)
        assert traces(desk) == before
        desk.contribute("b")
        assert desk.offer("a", 2 * LEAP, base_version=1).state == "send"

    def test_sequences_of_other_fragments_and_workers_are_their_own(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", 5)
        assert desk.offer("a", 1, fragment=1).state == "send"
        assert desk.offer("b", 1).state == "send"

    def test_a_new_sequence_replaces_the_unfinished_one_of_its_fragment_only(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.offer("a", 1)
        desk.offer("a", 1, fragment=1)
        desk.offer("a", 2)
        assert desk.dropped == [make_key("a", 1)]
        assert desk.coordinator.uploads.held_bytes == 2 * SIZE_BYTES

    def test_a_contribution_found_unfit_is_dropped_told_and_leaves_no_trace_in_the_round(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.coordinator.reject(make_key("a"), NotFinite("not finite: wte"), desk.now)
        desk.carry_out()
        assert desk.dropped == [make_key("a")]
        assert desk.events("refused") == [{"worker": "a", "fragment": 0, "reason": "not finite: wte"}]
        assert (desk.coordinator.uploads.held_bytes, desk.coordinator.total_accepted) == (0, 0)

    def test_rejecting_what_is_not_on_offer_does_nothing(self) -> None:
        desk = Desk("ab")
        before = traces(desk)
        desk.coordinator.reject(make_key("a"), NotFinite("too late"), desk.now)
        desk.carry_out()
        assert traces(desk) == before


class TestOrder:
    """A worker that was told "accepted" of an earlier one says so; a restarted server must be sent that one first."""

    def test_one_that_follows_what_is_not_here_is_refused_until_that_is_sent(self) -> None:
        desk = Desk("ab", quorum=1)
        with pytest.raises(MissingParts, match=r"a/fragment 0/#4 follows #3, which is not here.*send that one first"):
            desk.offer("a", 4, follows=3)
        desk.contribute("a", 3)
        assert desk.offer("a", 4, follows=3, base_version=1, oldest_base=1).state == "send"

    def test_one_that_was_accepted_is_accepted_whatever_it_follows(self) -> None:
        desk = Desk("ab")
        desk.contribute("a", 4)
        assert desk.offer("a", 4, follows=3).state == "accepted"


class TestAge:
    def test_synchronous_a_contribution_to_a_closed_round_is_stale(self) -> None:
        desk = Desk("ab")
        full_rounds(desk, 2)
        with pytest.raises(StaleRound, match=r"round 2 of fragment 0 closed.*at version 2.*rebase"):
            desk.offer("a", 3, base_version=1)

    @pytest.mark.row("F06")
    def test_with_a_quorum_a_late_one_counts_in_the_next_round_with_its_staleness(self) -> None:
        desk = Desk("abc", quorum=2, max_staleness=4)
        desk.contribute("a")
        desk.contribute("b")
        desk.contribute("a", 2, base_version=1)
        assert desk.contribute("c", base_version=0).version == 2
        assert desk.closings[1].participants == (
            Participant(worker_id="a", sequence=2, weight=1.0, staleness=0),
            Participant(worker_id="c", sequence=1, weight=1 / math.sqrt(2), staleness=1),
        )

    def test_an_upload_that_a_closing_round_overtakes_counts_late_with_a_quorum(self) -> None:
        desk = Desk("abc", quorum=1)
        desk.offer("b")
        desk.put("b", 0)
        desk.contribute("a")
        desk.put("b", 1)
        assert desk.commit("b").version == 2
        assert desk.closings[1].participants[0].staleness == 1
        assert desk.dropped == []

    @pytest.mark.parametrize(("oldest_base", "too_old"), [(1, False), (0, True)])
    def test_a_late_one_beyond_max_staleness_is_too_old(self, oldest_base: int, too_old: bool) -> None:
        desk = Desk("ab", quorum=1, max_staleness=2)
        for version in range(3):
            desk.contribute("a", version + 1, base_version=version)
        facts = {"base_version": 1, "oldest_base": oldest_base}
        if not too_old:
            assert desk.offer("b", **facts).state == "send"
            return
        with pytest.raises(TooOld, match=r"version 0, 3 before the newest; max_staleness is 2.*discard"):
            desk.offer("b", **facts)

    def test_synchronous_steps_kept_through_too_many_rebases_are_too_old(self) -> None:
        desk = Desk("ab", max_staleness=1)
        full_rounds(desk, 2)
        assert desk.offer("a", 3, base_version=2, oldest_base=1).state == "send"
        with pytest.raises(TooOld):
            desk.offer("b", 3, base_version=2, oldest_base=0)

    @pytest.mark.parametrize(
        ("facts", "told"),
        [
            ({"base_version": 2}, "is at version 1; got base_version 2, oldest_base 2"),
            ({"base_version": 1, "oldest_base": 2}, "is at version 1; got base_version 1, oldest_base 2"),
        ],
    )
    def test_a_base_that_does_not_exist_is_refused_with_the_current_version(
        self, facts: dict[str, int], told: str
    ) -> None:
        desk = Desk("ab", quorum=1)
        desk.contribute("a")
        with pytest.raises(FutureRound, match=told):
            desk.offer("a", 2, **facts)

    def test_a_round_that_closes_between_check_and_acceptance_does_not_count_it(self) -> None:
        desk = Desk("ab", round_deadline_s=3.0)
        desk.contribute("a")
        desk.offer("b")
        desk.put("b", 0)
        desk.put("b", 1)
        message = desk.commit_message("b")
        assert isinstance(desk.coordinator.begin_commit(message, desk.now), Upload)
        desk.later(3.0)
        with pytest.raises(MissingParts, match="offer it"):
            desk.coordinator.accept(message, desk.now)
        with pytest.raises(StaleRound):
            desk.offer("b")
        assert desk.closed == [(1, "a")]
        assert desk.coordinator.total_accepted == 1
