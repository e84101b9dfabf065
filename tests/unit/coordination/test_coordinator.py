"""The server's decisions, message by message."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.effects import Accumulate, CloseRound, Event, is_news
from outerstep.coordination.uploads import QUEUE_PATIENCE_S, ROOM_PATIENCE_S, Upload
from outerstep.errors import (
    BadRequest,
    Conflict,
    Fenced,
    FutureRound,
    ManifestMismatch,
    MissingParts,
    NotFinite,
    OtherRun,
    PlanMismatch,
    ProtocolMismatch,
    StaleRound,
    Superseded,
    TooLarge,
    TooOld,
    UnknownWorker,
)
from outerstep.types import PROTOCOL_VERSION, Participant, Wishes
from unit.coordination.builders import (
    MANIFEST,
    PART_BYTES,
    SIZE_BYTES,
    TIMEOUT_S,
    Desk,
    make_agreement,
    make_key,
)

Speak = Callable[[Desk, str], Any]

CONTRIBUTING: dict[str, Speak] = {
    "offer": lambda desk, worker: desk.offer(worker),
    "part": lambda desk, worker: desk.put(worker, 0),
    "commit": lambda desk, worker: desk.commit(worker),
}
SPEAKING: dict[str, Speak] = {
    **CONTRIBUTING,
    "heartbeat": lambda desk, worker: desk.heartbeat(worker),
    "poll": lambda desk, worker: desk.poll(worker),
    "get_part": lambda desk, worker: desk.get_part(worker, 0),
}


def saying(what: dict[str, Speak]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("say", what.values(), ids=what.keys())


def traces(desk: Desk) -> tuple[Any, ...]:
    """Everything that an accepted message would have changed."""
    coordinator = desk.coordinator
    open_rounds = [list(f.round.participants) for f in coordinator.fragments]
    return (list(desk.effects), coordinator.total_accepted, coordinator.uploads.held_bytes, open_rounds)


def accumulated(desk: Desk) -> list[Accumulate]:
    return [e for e in desk.effects if isinstance(e, Accumulate)]


def full_rounds(desk: Desk, count: int, workers: str = "ab") -> None:
    """Rounds in which everybody is on time; sequence = round."""
    for round_ in range(desk.version() + 1, desk.version() + count + 1):
        for worker in workers:
            desk.contribute(worker, round_, base_version=round_ - 1)


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


class TestWhoMaySpeak:
    @saying(SPEAKING)
    def test_an_unregistered_worker_gets_nothing_accepted(self, say: Speak) -> None:
        desk = Desk("ab")
        before = traces(desk)
        with pytest.raises(UnknownWorker):
            say(desk, "x")
        assert traces(desk) == before
        assert desk.live == {"a", "b"}

    @saying(SPEAKING)
    def test_a_worker_declared_dead_gets_nothing_accepted_before_it_joins_again(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.later(TIMEOUT_S + 1.0, alive="b")
        before = traces(desk)
        with pytest.raises(UnknownWorker, match="join again"):
            say(desk, "a")
        assert traces(desk) == before

    @pytest.mark.row("F07")
    @saying({**SPEAKING, "leave": lambda desk, worker: desk.leave(worker)})
    def test_an_older_start_is_fenced(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.join("a", start=2)
        desk.incarnations["a"] = 1
        before = traces(desk)
        with pytest.raises(Fenced):
            say(desk, "a")
        assert traces(desk) == before
        assert desk.live == {"a", "b"}

    @saying({**SPEAKING, "leave": lambda desk, worker: desk.leave(worker)})
    def test_who_speaks_of_another_run_is_refused_naming_both(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.run_id = "other"
        with pytest.raises(OtherRun, match="holds run run, not other"):
            say(desk, "a")
        assert desk.live == {"a", "b"}

    @saying(
        {
            "offer": lambda desk, worker: desk.offer(worker, fragment=2),
            "commit": lambda desk, worker: desk.commit(worker, fragment=2),
            "poll": lambda desk, worker: desk.poll(worker, fragment=2),
            "get_part": lambda desk, worker: desk.get_part(worker, 0, fragment=2),
        }
    )
    def test_an_unknown_fragment_is_refused_with_the_number_there_are(self, say: Speak) -> None:
        with pytest.raises(BadRequest, match="fragment 2 does not exist: the plan has 2"):
            say(Desk("ab", fragments=2), "a")


class TestJoining:
    def test_another_protocol_is_refused_naming_both(self) -> None:
        with pytest.raises(
            ProtocolMismatch, match=f"protocol {PROTOCOL_VERSION + 1}, the server speaks {PROTOCOL_VERSION}"
        ):
            Desk("a").join("b", protocol=PROTOCOL_VERSION + 1)

    def test_a_rejoin_to_another_run_is_refused(self) -> None:
        with pytest.raises(OtherRun, match="holds run run, not old"):
            Desk("a").join("b", run_id="old")

    def test_another_plan_is_refused_showing_both_values_and_who_said_the_first(self) -> None:
        with pytest.raises(PlanMismatch, match=r"sync_every=9.*sync_every=4 \(said by the server\)"):
            Desk("a").join("b", wishes=Wishes(sync_every=9))
        with pytest.raises(PlanMismatch, match=r"num_fragments=2.*num_fragments=1 \(said by worker 'first'\)"):
            Desk("a").join("b", wishes=Wishes(num_fragments=2))

    def test_another_model_is_refused_naming_the_first_differences(self) -> None:
        wte, head = MANIFEST.parameters
        other = replace(MANIFEST, parameters=(replace(wte, shape=(4, 8)), replace(head, dtype="bfloat16")))
        with pytest.raises(ManifestMismatch, match=r"got \[4, 8\], run has \[8, 4\]; 'head': got bfloat16, run has"):
            Desk("a").join("b", manifest=other)

    @pytest.mark.parametrize(
        "changes", [{"protocol": 99}, {"run_id": "old"}, {"wishes": Wishes(codec="int8")}], ids=lambda c: next(iter(c))
    )
    def test_who_is_refused_is_not_a_member(self, changes: dict[str, Any]) -> None:
        desk = Desk("a")
        with pytest.raises((ProtocolMismatch, OtherRun, PlanMismatch)):
            desk.join("b", **changes)
        assert desk.live == {"a"}

    def test_the_answer_brings_the_run_the_plan_and_where_every_fragment_stands(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", fragment=1)
        desk.contribute("b", fragment=1)
        answer = desk.join("c", run_id="run", manifest=MANIFEST, wishes=Wishes(sync_every=4))
        assert (answer.run_id, answer.incarnation, answer.manifest) == ("run", 1, MANIFEST)
        assert answer.plan == desk.coordinator.plan
        assert [state.version for state in answer.fragments] == [0, 1]

    def test_the_heartbeat_answer_tells_the_rounds_that_every_fragment_has_completed(self) -> None:
        desk = Desk("a", fragments=2)
        desk.contribute("a", fragment=0)
        assert desk.heartbeat("a").sync_round == 0
        desk.contribute("a", fragment=1)
        assert desk.heartbeat("a").sync_round == 1


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


class TestShape:
    def test_another_codec_is_refused_naming_both(self) -> None:
        with pytest.raises(PlanMismatch, match="encoded as 'int8'; the run uses 'fp32'"):
            Desk("a").offer("a", codec="int8")

    def test_too_large_is_refused_with_the_limit(self) -> None:
        desk = Desk("a", max_payload_bytes=100)
        with pytest.raises(TooLarge, match=r"101 bytes.*at most 100"):
            desk.offer("a", size_bytes=101)
        assert desk.coordinator.uploads.held_bytes == 0
        assert desk.offer("a", size_bytes=100).state == "send"

    def test_a_commit_with_missing_parts_lists_them(self) -> None:
        desk = Desk("a")
        desk.offer("a", size_bytes=3 * PART_BYTES)
        desk.put("a", 1)
        with pytest.raises(MissingParts, match=r"misses 2 of 3 parts: \[0, 2\]"):
            desk.commit("a", size_bytes=3 * PART_BYTES)

    def test_a_part_out_of_range_is_refused(self) -> None:
        desk = Desk("a")
        desk.offer("a")
        with pytest.raises(BadRequest, match="part 2 is out of range"):
            desk.put("a", 2)

    @pytest.mark.parametrize("say", [CONTRIBUTING["part"], CONTRIBUTING["commit"]], ids=["part", "commit"])
    def test_what_was_not_offered_is_told_to_be_offered(self, say: Speak) -> None:
        with pytest.raises(MissingParts, match=r"not on offer.*offer it"):
            say(Desk("a"), "a")


class TestDroppedUploads:
    @pytest.mark.row("F02")
    @pytest.mark.parametrize("how", ["death", "leave", "restart"])
    def test_a_worker_gone_loses_what_was_unfinished_and_keeps_what_was_accepted(self, how: str) -> None:
        desk = Desk("abc", fragments=2)
        desk.contribute("a", fragment=0)
        desk.offer("a", fragment=1)
        desk.put("a", 0, fragment=1)
        if how == "death":
            desk.later(TIMEOUT_S + 1.0, alive="bc")
        elif how == "leave":
            desk.leave("a")
        else:
            desk.join("a", start=2)
        assert desk.dropped == [make_key("a", fragment=1)]
        assert desk.coordinator.uploads.held_bytes == 0
        desk.contribute("b")
        desk.contribute("c")
        assert desk.closed == [(1, "abc")]

    def test_a_restart_that_goes_on_from_its_own_state_is_still_waited_for(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.offer("a")
        desk.contribute("b")
        desk.join("a", start=2, continues=True)
        assert desk.dropped == [make_key("a")], "what it had in hand is sent again"
        assert desk.closed == []
        desk.contribute("a")
        assert desk.closed == [(1, "ba")]

    def test_a_restart_that_begins_anew_is_not(self) -> None:
        desk = Desk("ab")
        desk.contribute("b")
        desk.join("a", start=2)
        assert desk.closed == [(1, "b")]

    def test_the_join_answer_says_in_which_version_the_last_contribution_counts(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        [state] = desk.join("a", start=2, continues=True).fragments
        assert (state.version, state.last_sequence, state.counted_in) == (0, 1, 1)
        [state] = desk.join("b", start=2, continues=True).fragments
        assert (state.version, state.last_sequence, state.counted_in) == (0, 0, 0)

    def test_who_comes_back_sends_all_parts_again(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.put("a", 0)
        desk.later(TIMEOUT_S + 1.0, alive="b")
        desk.join("a")
        assert desk.offer("a").missing == (0, 1)

    def test_a_closing_round_frees_the_room_of_uploads_that_it_made_stale(self) -> None:
        desk = Desk("abc", fragments=2, round_deadline_s=3.0)
        desk.contribute("a")
        desk.offer("b")
        desk.offer("c", fragment=1)
        desk.later(3.0)
        assert desk.dropped == [make_key("b")]
        assert desk.coordinator.uploads.held_bytes == SIZE_BYTES

    def test_with_a_quorum_a_closing_round_drops_only_what_became_too_old(self) -> None:
        desk = Desk("abc", quorum=1, max_staleness=1)
        desk.contribute("a", 1)
        desk.offer("b", base_version=0)
        desk.offer("c", base_version=1)
        desk.contribute("a", 2, base_version=1)
        assert desk.dropped == [make_key("b")]


class TestPool:
    def test_a_full_pool_answers_wait_with_a_time_to_ask_again(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES)
        desk.offer("a")
        answer = desk.offer("b")
        assert (answer.state, answer.missing) == ("wait", ())
        assert answer.retry_after_s > 0

    @pytest.mark.parametrize("say", [CONTRIBUTING["part"], CONTRIBUTING["commit"]], ids=["part", "commit"])
    def test_who_waits_may_not_send(self, say: Speak) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES)
        desk.offer("a")
        desk.offer("b")
        with pytest.raises(MissingParts):
            say(desk, "b")

    def test_room_is_served_in_order_of_asking(self) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES)
        desk.offer("a")
        desk.offer("b")
        desk.offer("c")
        desk.put("a", 0)
        desk.put("a", 1)
        desk.commit("a")
        assert desk.offer("c").state == "wait"
        assert desk.offer("b").state == "send"

    def test_who_holds_room_and_sends_nothing_loses_it_to_who_waits(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES, heartbeat_timeout_s=0.0)
        desk.offer("a")
        desk.put("a", 0)
        desk.now += ROOM_PATIENCE_S
        assert desk.offer("b").state == "wait"
        desk.now += 1.0
        assert desk.offer("b").state == "send"
        assert desk.dropped == [make_key("a")]
        assert desk.events("upload_dropped") == [{"worker": "a", "fragment": 0}]
        with pytest.raises(MissingParts, match="is not on offer"):
            desk.put("a", 1)
        desk.put("b", 0)
        desk.put("b", 1)
        desk.commit("b")
        desk.contribute("a")

    def test_a_part_that_takes_hours_is_not_standing_still(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES, heartbeat_timeout_s=0.0)
        desk.offer("a")
        upload = desk.coordinator.uploads.get(make_key("a"))
        assert upload is not None
        upload.under_way = 1
        desk.now += 100 * ROOM_PATIENCE_S
        assert desk.offer("b").state == "wait"

    def test_accepted_bytes_hold_their_room_until_the_driver_has_freed_them(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES, prompt=False)
        desk.contribute("a")
        assert desk.offer("b").state == "wait"
        desk.coordinator.freed(make_key("a"))
        assert desk.offer("b").state == "send"

    def test_an_oversized_contribution_gets_in_when_it_is_alone(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES - 1)
        assert desk.offer("a").state == "send"
        assert desk.offer("b").state == "wait"
        desk.put("a", 0)
        desk.put("a", 1)
        desk.commit("a")
        assert desk.contribute("b").version == 1

    @pytest.mark.parametrize(
        ("silent_s", "state"), [(QUEUE_PATIENCE_S - 1.0, "wait"), (QUEUE_PATIENCE_S + 1.0, "send")]
    )
    def test_a_waiter_that_stops_asking_loses_its_place(self, silent_s: float, state: str) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES, heartbeat_timeout_s=0.0)
        desk.offer("a")
        desk.offer("b")
        desk.leave("a")
        desk.later(silent_s)
        assert desk.offer("c").state == state

    def test_a_waiter_that_is_refused_loses_its_place_at_once(self) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES, round_deadline_s=3.0)
        desk.contribute("a")
        desk.offer("b")
        assert desk.offer("c").state == "wait"
        desk.later(3.0)
        with pytest.raises(StaleRound):
            desk.offer("c")
        assert desk.offer("a", 2, base_version=1).state == "send"

    def test_a_waiter_does_not_stand_behind_an_older_sequence_of_its_own(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES)
        desk.offer("a")
        assert desk.offer("b", 1).state == "wait"
        assert desk.offer("b", 2).state == "wait"
        desk.leave("a")
        assert desk.offer("b", 2).state == "send"

    def test_a_waiter_that_is_gone_loses_its_place_at_once(self) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES)
        desk.offer("a")
        desk.offer("b")
        desk.leave("b")
        desk.leave("a")
        assert desk.offer("c").state == "send"


class TestPolling:
    def test_nothing_newer_tells_what_the_round_waits_for(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        answer = desk.poll("a")
        assert (answer.agreement, answer.last_sequence, answer.stuck) == (None, 1, False)
        assert answer.waiting_for == "contributions of b"
        assert answer.retry_after_s > 0

    @pytest.mark.parametrize("after", [-1, 0, 1])
    def test_the_newest_agreement_is_handed_to_whoever_holds_an_older_one(self, after: int) -> None:
        desk = Desk("ab")
        full_rounds(desk, 2)
        answer = desk.poll("a", after)
        assert answer.agreement is not None
        assert answer.agreement.version == 2
        assert answer.last_sequence == 2

    def test_nobody_is_told_of_a_round_before_it_is_published(self) -> None:
        desk = Desk("a", prompt=False)
        desk.contribute("a")
        assert desk.closed == [(1, "a")]
        assert desk.poll("a").agreement is None
        desk.publish(desk.closings[0])
        assert desk.poll("a").agreement == make_agreement(1, participants=desk.closings[0].participants)

    def test_wanted_names_the_rounds_of_other_fragments_that_wait_for_the_worker(self) -> None:
        desk = Desk("ab", fragments=4)
        desk.contribute("a", fragment=3)
        desk.contribute("b", fragment=3)
        desk.contribute("a", fragment=0)
        desk.contribute("a", 2, fragment=3, base_version=1)
        desk.contribute("b", fragment=1)
        assert desk.poll("b", fragment=1).wanted == ((0, 1), (3, 2))
        assert desk.poll("a", fragment=0).wanted == ((1, 1),)

    def test_the_polled_fragment_itself_is_not_wanted(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", fragment=0)
        assert desk.poll("b", fragment=0).wanted == ()

    def test_only_a_member_may_fetch(self) -> None:
        desk = Desk("ab")
        desk.get_part("a", 0)
        desk.leave("a")
        with pytest.raises(UnknownWorker):
            desk.get_part("a", 0)


class TestEffects:
    def test_a_contribution_is_added_before_its_round_closes(self) -> None:
        desk = Desk("ab", prompt=False)
        desk.contribute("a")
        desk.contribute("b")
        effects = [e for e in desk.effects if not isinstance(e, Event)]
        participants = tuple(Participant(worker_id=w, sequence=1, weight=x) for w, x in (("a", 1.0), ("b", 1.0)))
        assert effects == [
            Accumulate(make_key("a"), 1, 1.0, 1.0, 0, first=True),
            Accumulate(make_key("b"), 1, 1.0, 1.0, 0),
            CloseRound(0, 1, participants),
        ]

    def test_of_a_round_the_first_contribution_and_the_agreement_are_news(self) -> None:
        desk = Desk("abc", prompt=False)
        for worker in "abc":
            desk.contribute(worker)
        news = {type(effect): is_news(effect) for effect in desk.effects if not isinstance(effect, Accumulate)}
        assert [is_news(effect) for effect in desk.effects if isinstance(effect, Accumulate)] == [True, False, False]
        assert news == {Event: True, CloseRound: False}

    def test_effects_are_handed_out_once(self) -> None:
        desk = Desk("a", prompt=False)
        desk.offer("a")
        desk.put("a", 0)
        desk.put("a", 1)
        desk.coordinator.accept(desk.commit_message("a"), desk.now)
        assert [type(e) for e in desk.coordinator.take_effects()] == [Accumulate, CloseRound]
        assert desk.coordinator.take_effects() == []

    def test_fragments_close_their_rounds_by_themselves(self) -> None:
        desk = Desk("ab", fragments=2)
        for worker in "ab":
            desk.contribute(worker, fragment=1)
        assert [(e.fragment, e.version) for e in desk.closings] == [(1, 1)]
        assert (desk.version(0), desk.version(1)) == (0, 1)

    def test_the_next_round_is_open_while_the_outer_step_is_taken(self) -> None:
        desk = Desk("ab", quorum=1, prompt=False)
        desk.contribute("a")
        assert desk.contribute("b", base_version=0).version == 2
        assert desk.closed == [(1, "a"), (2, "b")]

    @pytest.mark.parametrize("version", [0, 2])
    def test_agreements_must_be_published_in_order(self, version: int) -> None:
        with pytest.raises(AssertionError, match="published in order"):
            Desk("a").coordinator.published(make_agreement(version), 0.0)

    def test_a_published_round_is_told(self) -> None:
        desk = Desk("ab")
        full_rounds(desk, 1)
        [told] = desk.events("round")
        assert told == {"fragment": 0, "version": 1, "workers": ["a", "b"], "sequences": [1, 1], "staleness": [0, 0]}
