"""What the coordinator tells of a member's comings, goings and refusals, and when a worker is to ask again."""

from __future__ import annotations

import pytest

from outerstep.coordination.server.commits import Commits
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.rounds import RoundRules
from outerstep.coordination.server.turns import ASK_AGAIN_S, ASK_AGAIN_SOON_S
from outerstep.errors import BadRequest, MissingParts, NotFinite, Quarantined, Refused
from outerstep.types import PROTOCOL_VERSION, Control, Wishes
from unit.coordination.builders import RUN, SIZE_BYTES, TIMEOUT_S, Desk, make_key


class TestComingsAndGoings:
    def test_a_join_names_worker_host_and_start(self) -> None:
        desk = Desk()
        desk.join("a", hostname="h1")
        desk.join("a", start=2, hostname="h1")
        assert desk.events("join") == [
            {"worker": "a", "host": "h1", "incarnation": 1},
            {"worker": "a", "host": "h1", "incarnation": 2},
        ]

    def test_a_leave_names_worker_and_reason(self) -> None:
        desk = Desk("ab")
        desk.leave("a")
        assert desk.events("leave") == [{"worker": "a", "reason": "done"}]

    def test_a_death_says_how_long_it_was_silent_to_a_tenth(self) -> None:
        desk = Desk("ab")
        desk.later(TIMEOUT_S + 0.123, alive="b")
        assert desk.events("death") == [{"worker": "a", "silent_s": TIMEOUT_S + 0.1}]

    def test_every_death_is_counted(self) -> None:
        desk = Desk("abc")
        desk.later(TIMEOUT_S + 1.0, alive="a")
        assert desk.coordinator.members.total_deaths == 2

    def test_what_was_heard_last_is_the_time_that_is_remembered(self) -> None:
        desk = Desk("a")
        desk.join("b")
        assert desk.coordinator.now == desk.now
        desk.later(1.0)
        assert desk.coordinator.now == desk.now
        desk.now += 1.0
        desk.leave("b")
        assert desk.coordinator.now == desk.now


class TestWhenToAskAgain:
    def test_soon_if_the_room_will_be_enough_and_later_behind_others(self) -> None:
        desk = Desk("abcd", pool_bytes=2 * SIZE_BYTES)
        assert [desk.offer(worker).state for worker in "ab"] == ["send", "send"]
        assert desk.offer("c").retry_after_s == ASK_AGAIN_SOON_S
        assert desk.offer("d", size_bytes=2 * SIZE_BYTES).retry_after_s == ASK_AGAIN_S

    def test_soon_if_another_round_wants_the_worker(self) -> None:
        desk = Desk("ab", fragments=2)
        assert desk.poll("a").retry_after_s == ASK_AGAIN_S
        desk.contribute("b", fragment=1)
        assert desk.poll("a").retry_after_s == ASK_AGAIN_SOON_S

    def test_a_refused_offer_leaves_the_queue_of_its_fragment_and_no_other(self) -> None:
        desk = Desk("ab", fragments=2, pool_bytes=SIZE_BYTES)
        desk.offer("b")
        assert desk.offer("a", 1).state == desk.offer("a", 1, fragment=1).state == "wait"
        with pytest.raises(Refused):
            desk.offer("a", 1, codec="int9")
        assert desk.coordinator.uploads.queued == 1

    def test_what_waits_is_shown_up_to_a_length(self) -> None:
        desk = Desk("".join(chr(ord("a") + i) for i in range(2)))
        for i in range(60):
            desk.join(f"another-worker-{i:03d}")
        assert len(desk.poll("a").waiting_for) <= 256


class TestAnOfferThatIsRepeated:
    def test_shows_that_its_worker_is_there_and_its_room_is_not_taken_away(self) -> None:
        desk = Desk("ab", pool_bytes=SIZE_BYTES)
        for _ in range(20):
            assert desk.offer("a").state == "send"
            desk.now += 8.0
            desk.heartbeat("a")
            desk.heartbeat("b")
            assert desk.offer("b").state == "wait"


class TestOffences:
    @staticmethod
    def refuse(desk: Desk, worker: str, sequence: int, refusal: Refused) -> None:
        desk.offer(worker, sequence)
        desk.coordinator.reject(make_key(worker, sequence), refusal, desk.now)
        desk.carry_out()

    def test_each_names_worker_kind_and_count_and_the_last_the_reason(self) -> None:
        desk = Desk("ab")
        sequence = 0
        while not desk.events("quarantine"):
            sequence += 1
            self.refuse(desk, "a", sequence, NotFinite("it holds a NaN"))
        assert [event["worker"] for event in desk.events("offence")] == ["a"] * sequence
        [quarantine] = desk.events("quarantine")
        assert quarantine["worker"] == "a"
        assert "NaN" in str(quarantine["reason"])
        with pytest.raises(Quarantined, match="'a'"):
            desk.put("a", 0, sequence)


class TestWhatIsLeftOut:
    def test_is_counted_for_each_worker(self) -> None:
        desk = Desk("ab")
        for version in (1, 2):
            desk.coordinator.note_verdict(0, version, {"a": "it points away"}, [])
        assert [desk.coordinator.members.find(worker).left_out for worker in "ab"] == [2, 0]  # type: ignore[union-attr]


class TestWhatIsKeptOfEachWorker:
    def test_one_that_leaves_takes_only_its_own_unfinished_contributions_along(self) -> None:
        desk = Desk("abc")
        desk.offer("a")
        desk.offer("b")
        desk.leave("a")
        assert desk.dropped == [make_key("a")]
        assert [upload.key for upload in desk.coordinator.uploads.of()] == [make_key("b")]

    def test_the_protocol_it_speaks(self) -> None:
        desk = Desk("a")
        member = desk.coordinator.members.find("a")
        assert member is not None
        assert member.protocol == PROTOCOL_VERSION

    def test_a_commit_that_comes_too_early_shows_that_it_is_there(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.now += 1.0
        with pytest.raises(MissingParts):
            desk.commit("a")
        assert desk.coordinator.uploads.by_key[make_key("a")].heard_at == desk.now


def test_one_that_asks_for_more_than_the_open_round_can_bring_gets_what_there_is() -> None:
    answer = Desk("a").poll("a", after=1)  # it holds an agreement from before the server was restarted
    assert answer.agreement is not None
    assert answer.agreement.version == 0


def test_tokens_are_counted_by_the_clock() -> None:
    desk = Desk("a")
    for sequence in (1, 2):
        desk.now += 5.0
        desk.contribute("a", sequence, base_version=sequence - 1, tokens=100)
    assert desk.coordinator.budget.per_second == 20.0


class TestBeforeTheFirstWorker:
    @staticmethod
    def coordinator() -> Coordinator:
        return Coordinator(
            run_id=RUN,
            rules=RoundRules(num_workers=1),
            heartbeat_timeout_s=1.0,
            pool_bytes=1,
            part_size_bytes=1,
            token_budget=700,
        )

    def test_the_budget_is_the_one_that_the_server_was_started_with(self) -> None:
        assert self.coordinator().budget.limit == 700

    def test_no_round_is_complete_and_there_is_no_plan_to_change(self) -> None:
        made = self.coordinator()
        assert made.sync_round == 0
        with pytest.raises(BadRequest, match="no plan"):
            made.control(Control(kind="plan", changes=Wishes(sync_every=8)), 0.0)

    def test_there_is_nothing_to_save(self) -> None:
        assert Commits(self.coordinator(), "round").is_saved
