"""Whose turn to send is next, who is told when, and what a turn that nobody uses becomes."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.server.effects import AskAgain
from outerstep.coordination.server.turns import (
    ASK_AGAIN_S,
    ASK_AGAIN_SOON_S,
    EARLY,
    LONGEST_WAIT_S,
    QUEUE_PATIENCE_S,
)
from outerstep.coordination.server.uploads import ROOM_PATIENCE_S, Uploads
from outerstep.errors import Conflict
from outerstep.types import ContributionKey
from unit.coordination.builders import PART_BYTES, SIZE_BYTES, Desk, make_key, make_offer

CAPACITY = 100


class Room:
    """Uploads, and contributions of ten bytes."""

    def __init__(self, capacity_bytes: int = CAPACITY) -> None:
        self.uploads = Uploads(capacity_bytes=capacity_bytes, part_size_bytes=PART_BYTES)

    def ask(self, worker: str, now: float = 0.0, size_bytes: int = 10, **facts: Any) -> bool:
        return self.uploads.request(make_offer(worker, size_bytes=size_bytes), now, **facts) is not None

    def free(self, worker: str, now: float) -> list[str]:
        """Its bytes are gone: who is told to ask again."""
        self.uploads.drop(make_key(worker))
        self.uploads.call_up(now)
        return [key.worker_id for key in self.uploads.take_to_ask()]


def crowd(many: int, prefix: str = "w") -> list[str]:
    return [f"{prefix}{i:03d}" for i in range(many)]


class TestCalledUp:
    def test_room_that_is_freed_is_given_to_the_first_at_once_and_only_that_one_is_told(self) -> None:
        room = Room(10)
        assert [room.ask(worker) for worker in "abc"] == [True, False, False]
        assert room.free("a", 1.0) == ["b"]
        assert room.uploads.held_bytes == 10
        assert not room.ask("c", 2.0)
        assert room.ask("b", 3.0)

    def test_as_many_are_told_as_there_is_room_for(self) -> None:
        room = Room()
        room.ask("large", size_bytes=100)
        for worker in crowd(15):
            assert not room.ask(worker)
        assert room.free("large", 1.0) == crowd(10)
        assert room.free("w000", 1.0) == ["w010"]

    def test_who_asks_and_finds_room_need_not_be_told_again(self) -> None:
        room = Room()
        assert room.ask("a")
        assert room.uploads.take_to_ask() == []

    def test_who_loses_its_place_is_told_so(self) -> None:
        room = Room(10)
        for worker in "ab":
            room.ask(worker)
        room.uploads.unqueue("b")
        assert room.uploads.take_to_ask() == [make_key("b")]

    def test_a_turn_that_its_worker_does_not_come_for_goes_to_the_next(self) -> None:
        room = Room(10)
        for worker in "abc":
            room.ask(worker)
        assert room.free("a", 1.0) == ["b"]
        assert room.uploads.take_lapsed(QUEUE_PATIENCE_S) == []
        [lapsed] = room.uploads.take_lapsed(QUEUE_PATIENCE_S + 1.0)
        assert lapsed.key == make_key("b")
        assert room.free("b", QUEUE_PATIENCE_S) == ["c"]

    def test_one_that_came_is_given_the_longer_time(self) -> None:
        room = Room(10)
        for worker in "abc":
            room.ask(worker)
        room.free("a", 1.0)
        assert room.ask("b", 2.0)
        assert room.uploads.take_lapsed(2.0 + ROOM_PATIENCE_S) == []
        assert [one.key for one in room.uploads.take_lapsed(4.0 + ROOM_PATIENCE_S)] == [make_key("b")]

    def test_nothing_lapses_while_nobody_waits(self) -> None:
        room = Room(10)
        room.ask("a")
        assert room.uploads.take_lapsed(1e6) == []


class TestNewcomers:
    def test_those_that_never_contributed_hold_half_of_the_room_once_one_has_asked_that_did(self) -> None:
        room = Room()
        assert room.ask("regular", is_newcomer=False)
        assert [room.ask(worker, is_newcomer=True) for worker in crowd(9)] == [True] * 5 + [False] * 4

    def test_before_that_they_may_have_all_of_it(self) -> None:
        room = Room()
        assert all(room.ask(worker, is_newcomer=True) for worker in crowd(10))

    def test_a_newcomer_that_waits_for_newcomers_keeps_no_regular_waiting(self) -> None:
        room = Room()
        room.ask("regular", is_newcomer=False)
        for worker in crowd(500, "stranger"):
            room.ask(worker, 1.0, is_newcomer=True)
        assert [room.ask(worker, 2.0, is_newcomer=False) for worker in crowd(5)] == [True] * 4 + [False]

    def test_who_came_first_goes_first_whoever_it_is_as_long_as_there_is_room_for_newcomers(self) -> None:
        room = Room(20)
        for worker in "ab":
            assert room.ask(worker, is_newcomer=False)
        room.ask("new", 1.0, is_newcomer=True)
        room.ask("old", 2.0, is_newcomer=False)
        assert room.free("a", 3.0) == ["new"]
        assert room.free("b", 3.0) == ["old"]

    def test_one_newcomer_gets_in_however_large_it_is(self) -> None:
        room = Room()
        room.ask("regular", is_newcomer=False)
        assert room.ask("new", size_bytes=90, is_newcomer=True)
        assert not room.ask("another", size_bytes=10, is_newcomer=True)

    def test_what_they_held_is_theirs_again_when_it_is_freed(self) -> None:
        room = Room()
        room.ask("regular", is_newcomer=False)
        for worker in crowd(6):
            room.ask(worker, is_newcomer=True)
        assert room.free("w000", 1.0) == ["w005"]


class TestWhenToCome:
    def test_a_place_is_told_by_how_fast_the_queue_has_moved(self) -> None:
        room = Room(10)
        for worker in ["first", *crowd(8)]:
            room.ask(worker, 0.0)
        assert room.uploads.wait_s(make_key("w007"), 0.0) == ASK_AGAIN_S
        assert room.uploads.wait_s(make_key("w000"), 0.0) == ASK_AGAIN_SOON_S
        room.free("first", 0.5)
        room.free("w000", 1.0)  # 20 bytes in a second: two turns
        assert room.uploads.wait_s(make_key("w007"), 1.0) == pytest.approx(EARLY * 6 / 2)
        assert room.uploads.wait_s(make_key("w003"), 1.0) == pytest.approx(EARLY * 2 / 2)

    def test_nobody_is_sent_away_for_long(self) -> None:
        room = Room(10)
        for worker in ["first", *crowd(200)]:
            room.ask(worker, 0.0)
        room.free("first", 10.0)
        assert room.uploads.wait_s(make_key("w199"), 10.0) == LONGEST_WAIT_S

    def test_a_queue_that_was_empty_begins_to_count_anew(self) -> None:
        room = Room(10)
        for worker in "ab":
            room.ask(worker, 0.0)
        room.free("a", 50.0)
        room.ask("c", 51.0)
        assert room.uploads.wait_s(make_key("c"), 51.0) == ASK_AGAIN_SOON_S


class TestTheCoordinator:
    @staticmethod
    def told(desk: Desk) -> list[ContributionKey]:
        return [effect.key for effect in desk.effects if isinstance(effect, AskAgain)]

    def test_tells_who_waits_when_its_turn_comes(self) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES)
        for worker in "abc":
            desk.offer(worker, wait_s=5.0)
        assert self.told(desk) == []
        desk.leave("a")
        assert self.told(desk) == [make_key("b")]

    def test_tells_who_waits_for_a_round_that_has_closed(self) -> None:
        desk = Desk("abc", pool_bytes=SIZE_BYTES, round_deadline_s=3.0, prompt=False)
        desk.contribute("a")
        desk.offer("b", wait_s=5.0)
        desk.later(3.0)
        assert self.told(desk) == [make_key("b")]
        assert desk.coordinator.uploads.queued == 0

    def test_takes_the_same_offer_whatever_its_answer_may_take(self) -> None:
        desk = Desk("ab")
        assert [desk.offer("a", wait_s=wait_s).state for wait_s in (5.0, 0.0)] == ["send", "send"]
        with pytest.raises(Conflict):
            desk.offer("a", wait_s=5.0, steps=2)


class TestTheClock:
    """The thread that watches it is woken for deadlines, and not for each message."""

    def test_a_deadline_before_the_moment_it_waits_for_is_news(self) -> None:
        desk = Desk("abc", round_deadline_s=3.0)
        desk.coordinator.next_wake(desk.now)
        assert not desk.coordinator.wakes_sooner
        desk.contribute("a")
        assert desk.coordinator.wakes_sooner
        assert desk.coordinator.next_wake(desk.now) == desk.now + 3.0

    def test_and_is_told_once(self) -> None:
        desk = Desk("abc", round_deadline_s=3.0)
        desk.contribute("a")
        desk.coordinator.next_wake(desk.now)
        desk.contribute("b")
        assert not desk.coordinator.wakes_sooner

    def test_a_grace_is_shorter_than_the_deadline_was(self) -> None:
        desk = Desk("abc", round_deadline_s=5.0, quorum=2, grace_s=1.0)
        desk.contribute("a")
        desk.coordinator.next_wake(desk.now)
        desk.contribute("b")
        assert desk.coordinator.wakes_sooner

    def test_contributions_and_offers_without_deadlines_are_none(self) -> None:
        desk = Desk("abc")
        desk.coordinator.next_wake(desk.now)
        desk.contribute("a")
        desk.offer("b")
        assert not desk.coordinator.wakes_sooner
