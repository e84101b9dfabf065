"""The server's decisions on unfinished contributions: how long they are kept, and who gets the room."""

import pytest

from outerstep.coordination.server.turns import QUEUE_PATIENCE_S
from outerstep.coordination.server.uploads import LEAST_BYTES_PER_S, ROOM_PATIENCE_S, TURN_S
from outerstep.errors import (
    MissingParts,
    StaleRound,
)
from unit.coordination.builders import (
    SIZE_BYTES,
    TIMEOUT_S,
    Desk,
    make_key,
)
from unit.coordination.speaking import CONTRIBUTING, Speak

LARGE_BYTES = 32 << 20


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
        desk = Desk("ab", pool_bytes=LARGE_BYTES, max_payload_bytes=LARGE_BYTES, heartbeat_timeout_s=0.0)
        desk.offer("a", size_bytes=LARGE_BYTES)
        upload = desk.coordinator.uploads.by_key.get(make_key("a"))
        assert upload is not None
        upload.under_way = 1
        desk.now += 100 * ROOM_PATIENCE_S
        assert desk.offer("b").state == "wait"
        assert LARGE_BYTES / LEAST_BYTES_PER_S > 100 * ROOM_PATIENCE_S

    @pytest.mark.parametrize("under_way", [0, 1])
    def test_who_sends_less_than_the_least_rate_loses_its_room_to_who_waits_and_to_nobody_else(
        self, under_way: int
    ) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES, heartbeat_timeout_s=0.0)
        desk.offer("a")
        upload = desk.coordinator.uploads.by_key[make_key("a")]
        upload.under_way = under_way
        for _ in range(20):  # a byte a minute, so to say
            desk.now += TURN_S / 10
            upload.heard_at = desk.now
            desk.later(0.0)
        assert make_key("a") in desk.coordinator.uploads.by_key, "nobody waits"
        desk.offer("b")
        assert desk.dropped == [make_key("a")]
        assert desk.offer("b").state == "send"

    def test_accepted_bytes_hold_their_room_until_the_driver_has_freed_them(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES, prompt=False)
        desk.contribute("a")
        assert desk.offer("b").state == "wait"
        desk.coordinator.uploads.drop(make_key("a"))
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
