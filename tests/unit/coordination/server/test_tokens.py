"""What a token is to the coordinator: who joined with it, what that costs, and its end."""

from __future__ import annotations

import pytest

from outerstep.coordination.server.quotas import BURST_MIN, QuotaLimits, Quotas
from outerstep.errors import FutureRound, PlanMismatch, QuotaExceeded
from unit.coordination.builders import SIZE_BYTES, Desk, make_join


class Site(Desk):
    """Workers join with the token named "site", unless another is named."""

    def __init__(self, **limits: int) -> None:
        super().__init__(num_workers=2, fragments=2)
        self.coordinator.quotas = Quotas(QuotaLimits(**limits))

    @property
    def limits(self) -> QuotaLimits:
        return self.coordinator.quotas.limits

    def come(self, worker: str, *, token: str = "site", start: int = 1) -> None:
        answer = self.coordinator.join(make_join(worker, start=start), self.now, token=token)
        self.incarnations[worker] = answer.incarnation
        self.carry_out()


def test_who_joins_without_one_has_none() -> None:
    desk = Site()
    desk.coordinator.join(make_join("a"), desk.now)
    desk.come("b")
    assert [one.token for one in desk.coordinator.members] == ["", "site"]


class TestRevoking:
    def test_those_that_joined_with_it_are_out_and_the_others_stay(self) -> None:
        desk = Site()
        for worker, token in {"a": "old", "b": "new", "c": "", "d": "old"}.items():
            desk.come(worker, token=token)
        desk.leave("d")
        desk.effects.clear()
        desk.coordinator.revoke({"new"}, desk.now)
        desk.carry_out()
        assert desk.live == {"b", "c"}
        [told] = desk.events("leave")
        assert told["worker"] == "a"
        assert "token 'old' was revoked" in str(told["reason"])

    def test_a_round_that_waited_for_them_closes(self) -> None:
        desk = Site()
        for worker, token in {"a": "old", "b": "new"}.items():
            desk.come(worker, token=token)
        desk.contribute("b")
        assert desk.closed == []
        desk.coordinator.revoke({"new"}, desk.now)
        desk.carry_out()
        assert desk.closed == [(1, "b")]


class TestWhatAJoinCosts:
    def test_a_new_start_costs_a_join_and_a_repeated_message_nothing(self) -> None:
        desk = Site(joins=10)  # one a minute for one worker
        for start in range(1, BURST_MIN + 1):
            for _ in range(3):
                desk.come("a", start=start)
        with pytest.raises(QuotaExceeded, match=r"worker 'a'.*joins"):
            desk.come("a", start=99)
        desk.come("b")

    def test_newcomers_with_a_token_share_what_it_may_cost_and_others_do_not(self) -> None:
        desk = Site(joins=10)
        for i in range(10 * BURST_MIN):
            desk.come(f"w{i}")
        with pytest.raises(QuotaExceeded, match=r"the token 'site'.*joins"):
            desk.come("late")
        assert "late" not in desk.live
        desk.come("late", token="other")

    def test_one_that_has_contributed_pays_from_its_own_account_alone(self) -> None:
        desk = Site(joins=10)
        desk.come("a")
        desk.contribute("a")
        for i in range(10 * BURST_MIN - 1):
            desk.come(f"w{i}")
        with pytest.raises(QuotaExceeded):
            desk.come("late")
        desk.come("a", start=2)

    def test_one_that_is_known_and_gone_pays_for_coming_back(self) -> None:
        desk = Site(joins=10)
        for _ in range(BURST_MIN):
            desk.come("a")
            desk.leave("a")
        with pytest.raises(QuotaExceeded, match="joins"):
            desk.come("a")

    def test_what_was_written_down_of_it_is_paid_before_it_comes_again(self) -> None:
        desk = Site(records=10)
        desk.come("a")
        for _ in range(BURST_MIN):
            desk.coordinator.charge_record("a", desk.now)
        with pytest.raises(QuotaExceeded, match=r"worker 'a'.*records"):
            desk.come("a", start=2)
        desk.come("b")
        desk.coordinator.charge_record("nobody", desk.now)
        desk.come("nobody")

    def test_records_of_newcomers_are_paid_by_their_token_too(self) -> None:
        desk = Site(records=10)
        for i in range(10):
            desk.come(f"w{i}")
            for _ in range(BURST_MIN):
                desk.coordinator.charge_record(f"w{i}", desk.now)
        with pytest.raises(QuotaExceeded, match=r"the token 'site'.*records"):
            desk.come("late")
        desk.come("late", token="other")


class TestWhatAContributionCosts:
    def test_its_bytes_are_paid_as_they_arrive_and_a_repeated_part_costs_nothing(self) -> None:
        desk = Site(bytes=SIZE_BYTES)
        desk.come("a")
        desk.come("b")
        for sequence in range(1, BURST_MIN + 1):
            desk.offer("a", sequence)
            for part in (0, 0, 1, 1):
                desk.put("a", part, sequence)
        with pytest.raises(QuotaExceeded, match=r"worker 'a'.*bytes"):
            desk.offer("a", BURST_MIN + 1)
        assert desk.offer("a", BURST_MIN).missing == (), "what is under way may be finished"
        with pytest.raises(QuotaExceeded, match=r"the token 'site'.*bytes"):
            desk.offer("b")
        desk.now += 60.0
        assert desk.offer("b").state == "send"

    def test_one_that_has_contributed_leaves_its_tokens_account_alone(self) -> None:
        desk = Site(bytes=SIZE_BYTES * 10)
        for worker in "ab":
            desk.come(worker)
        desk.contribute("a")
        for sequence in range(2, 10 * BURST_MIN):
            desk.offer("a", sequence, fragment=1)
            for part in (0, 1):
                desk.put("a", part, sequence, fragment=1)
        assert desk.offer("b").state == "send"

    def test_so_many_of_newcomers_are_on_their_way_in(self) -> None:
        desk = Site(open_uploads=2)
        for worker in "abc":
            desk.come(worker)
        assert [desk.offer(worker).state for worker in "ab"] == ["send", "send"]
        with pytest.raises(QuotaExceeded, match="2 contributions on their way in"):
            desk.offer("c")
        assert desk.offer("a").state == "send", "one that is known costs nothing"
        desk.come("d", token="other")
        assert desk.offer("d").state == "send", "another token has room of its own"
        desk.leave("a")
        assert desk.offer("c").state == "send", "there is room again"

    def test_one_that_waits_for_room_is_on_its_way_in(self) -> None:
        desk = Site(open_uploads=2)
        desk.coordinator.uploads.capacity_bytes = SIZE_BYTES
        for worker in "abc":
            desk.come(worker)
        assert [desk.offer(worker).state for worker in "ab"] == ["send", "wait"]
        with pytest.raises(QuotaExceeded, match="2 contributions on their way in"):
            desk.offer("c")

    def test_those_that_have_contributed_are_not_counted_there(self) -> None:
        desk = Site(open_uploads=1)
        for worker in "abc":
            desk.come(worker)
        desk.contribute("a")
        desk.offer("b")
        assert desk.offer("a", fragment=1).state == "send"
        with pytest.raises(QuotaExceeded):
            desk.offer("c")

    def test_who_is_refused_too_often_may_not_send_for_a_while(self) -> None:
        desk = Site(refused=10)
        for worker in "ab":
            desk.come(worker)
        for _ in range(BURST_MIN):
            with pytest.raises(PlanMismatch):
                desk.offer("a", codec="int8")
        with pytest.raises(QuotaExceeded, match=r"worker 'a'.*refused"):
            desk.offer("a")
        assert desk.offer("b").state == "send"

    def test_what_newcomers_are_refused_for_concerns_no_newcomer_that_was_never_refused(self) -> None:
        desk = Site(refused=10)
        for i in range(10):
            desk.come(f"w{i}")
            for _ in range(BURST_MIN):
                with pytest.raises(PlanMismatch):
                    desk.offer(f"w{i}", codec="int8")
        for worker in "ab":
            desk.come(worker)
        assert desk.offer("a").state == "send"
        with pytest.raises(PlanMismatch):
            desk.offer("b", codec="int8")
        with pytest.raises(QuotaExceeded, match=r"the token 'site'.*refused"):
            desk.offer("b")

    def test_being_late_is_no_refusal_that_costs(self) -> None:
        desk = Site(refused=10)
        for worker in "ab":
            desk.come(worker)
        for _ in range(BURST_MIN + 1):
            with pytest.raises(FutureRound):
                desk.offer("a", base_version=5)
        assert desk.offer("a").state == "send"
