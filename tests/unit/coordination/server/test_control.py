"""What an operator may ask of a run, and what comes of it: at the coordinator, with the clock turned by hand."""

from typing import Any

import pytest

from outerstep.coordination.server.effects import StopServer
from outerstep.errors import BadRequest, Closing, Kicked, OtherCodec, PlanMismatch, UnknownWorker
from outerstep.types import Control, Heartbeat, HeartbeatAnswer, Wishes
from unit.coordination.builders import RUN, TIMEOUT_S, Desk, make_join


def ask(desk: Desk, kind: str, **facts: Any) -> str:
    done = desk.coordinator.control(Control(kind=kind, **facts), desk.now).done  # type: ignore[arg-type]
    desk.carry_out()
    return done


def beat(desk: Desk, worker: str, *acknowledged: int) -> HeartbeatAnswer:
    message = Heartbeat(**desk.head(worker), step=1, steps_per_second=1.0, acknowledged=acknowledged)
    return desk.coordinator.heartbeat(message, desk.now)


def orders(desk: Desk, worker: str) -> list[str]:
    return [command.kind for command in beat(desk, worker).commands]


def stops(desk: Desk) -> list[StopServer]:
    return [effect for effect in desk.effects if isinstance(effect, StopServer)]


class TestDrainAndSync:
    def test_one_worker_or_all(self) -> None:
        desk = Desk("abc")
        ask(desk, "drain", worker_id="b")
        assert [orders(desk, w) for w in "abc"] == [[], ["drain"], []]
        ask(desk, "sync")
        assert [orders(desk, w) for w in "abc"] == [["sync"], ["drain", "sync"], ["sync"]]
        assert [e["workers"] for e in desk.events("sync")] == [["a", "b", "c"]]

    def test_the_reason_travels(self) -> None:
        desk = Desk("a")
        ask(desk, "drain", reason="new disks")
        assert beat(desk, "a").commands[0].reason == "new disks"

    def test_it_is_repeated_until_acknowledged(self) -> None:
        desk = Desk("a")
        ask(desk, "drain")
        first = beat(desk, "a").commands
        assert beat(desk, "a").commands == first
        assert beat(desk, "a", first[0].id).commands == ()

    @pytest.mark.parametrize("kind", ["drain", "sync"])
    def test_nobody_to_ask_is_said(self, kind: str) -> None:
        with pytest.raises(UnknownWorker, match="no worker is live"):
            ask(Desk(), kind)

    def test_who_left_has_nothing_to_obey_when_it_comes_back(self) -> None:
        desk = Desk("ab")
        ask(desk, "drain", worker_id="a")
        desk.leave("a")
        desk.join("a")
        assert orders(desk, "a") == []


class TestKick:
    def test_its_round_closes_without_it(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        assert desk.closed == []
        ask(desk, "kick", worker_id="b", reason="flips bits")
        assert desk.closed == [(1, "a")]
        assert desk.events("kick") == [{"worker": "b", "reason": "flips bits"}]

    def test_the_same_start_stays_out_and_a_new_one_may_come(self) -> None:
        desk = Desk("ab")
        ask(desk, "kick", worker_id="b", reason="flips bits")
        with pytest.raises(Kicked, match="flips bits"):
            beat(desk, "b")
        with pytest.raises(Kicked, match="flips bits"):
            desk.coordinator.join(make_join("b", run_id=RUN), desk.now)
        with pytest.raises(Kicked):
            desk.offer("b")
        desk.join("b", start=2)
        assert desk.live == {"a", "b"}
        assert orders(desk, "b") == []

    def test_a_kick_needs_a_name(self) -> None:
        with pytest.raises(BadRequest, match="kick needs a worker id; live: a, b"):
            ask(Desk("ab"), "kick")


class TestPlan:
    def test_it_holds_from_the_next_round_that_closes(self) -> None:
        desk = Desk("ab")
        ask(desk, "plan", changes=Wishes(sync_every=9))
        plan = desk.coordinator.plan
        assert plan is not None
        assert plan.sync_every == 4
        for worker in "ab":
            desk.contribute(worker)
        answers = [desk.poll(worker, after=0) for worker in "ab"]
        assert all(a.plan is not None and (a.plan.sync_every, a.plan.revision) == (9, 1) for a in answers)
        assert desk.poll("a", after=0, plan_revision=1).plan is None  # it has it

    def test_two_changes_before_a_round_closes_are_both_kept(self) -> None:
        desk = Desk("a")
        ask(desk, "plan", changes=Wishes(sync_every=9))
        ask(desk, "plan", changes=Wishes(delay=2))
        desk.contribute("a")
        plan = desk.coordinator.plan
        assert plan is not None
        assert (plan.sync_every, plan.delay, plan.revision) == (9, 2, 2)

    def test_another_codec_holds_from_the_round_on_and_the_one_before_stays_valid(self) -> None:
        desk = Desk("ab")
        ask(desk, "plan", changes=Wishes(codec="int8"))
        desk.contribute("a")
        with pytest.raises(OtherCodec, match="encoded as 'int8'; the run uses 'fp32'"):
            desk.contribute("b", codec="int8")
        assert desk.coordinator.codecs == ("fp32",)
        desk.contribute("b")
        assert desk.coordinator.codecs == ("fp32", "int8")
        desk.contribute("a", 2, base_version=1, codec="int8")
        desk.contribute("b", 2, base_version=1)  # it was under way
        assert desk.coordinator.sync_round == 2
        with pytest.raises(OtherCodec, match="encoded as 'int4'; the run uses 'int8'"):
            desk.contribute("a", 3, base_version=2, codec="int4")

    def test_what_was_usual_is_forgotten_with_the_codec_and_with_nothing_else(self) -> None:
        desk = Desk("abc")
        screen = desk.coordinator.fragments[0].screen

        def round_(number: int) -> None:
            for worker in "abc":
                desk.contribute(worker, number, base_version=number - 1, norm=1.0)

        round_(1)
        ask(desk, "plan", changes=Wishes(sync_every=9, codec="fp32"))
        round_(2)
        assert screen.usual is not None
        ask(desk, "plan", changes=Wishes(codec="sparse64"))
        round_(3)
        assert screen.usual is None

    def test_an_impossible_change_changes_nothing(self) -> None:
        desk = Desk("a", fragments=3)
        with pytest.raises(PlanMismatch, match="must be at least 3"):
            ask(desk, "plan", changes=Wishes(sync_every=2))
        assert desk.coordinator.next_plan is None
        assert desk.events("plan") == []


class TestBudget:
    def contribute(self, desk: Desk, worker: str, round_: int, tokens: int) -> None:
        desk.contribute(worker, round_, base_version=round_ - 1, tokens=tokens)

    def test_everybody_is_told_once_when_it_is_spent(self) -> None:
        desk = Desk("ab")
        ask(desk, "budget", tokens=30)
        for worker in "ab":
            self.contribute(desk, worker, 1, 10)
        assert orders(desk, "a") == []
        self.contribute(desk, "a", 2, 10)
        assert orders(desk, "a") == []  # it is in the model when its round has closed
        self.contribute(desk, "b", 2, 10)
        assert [orders(desk, w) for w in "ab"] == [["drain"], ["drain"]]
        assert desk.events("budget_spent") == [{"tokens": 40, "limit": 30}]

    def test_one_absurd_report_does_not_spend_it(self) -> None:
        desk = Desk("abc")
        ask(desk, "budget", tokens=10**9)
        for worker, tokens in (("a", 100), ("b", 10**12), ("c", 100)):
            self.contribute(desk, worker, 1, tokens)
        assert desk.coordinator.budget.total == 100 + 400 + 100
        assert orders(desk, "a") == []

    def test_afterwards_nobody_new_may_come_but_who_was_thought_dead_may_bring_what_it_has(self) -> None:
        desk = Desk("ab")
        ask(desk, "budget", tokens=5)
        for worker in "ab":
            self.contribute(desk, worker, 1, 10)
        desk.leave("b")
        with pytest.raises(Closing, match="the token budget is spent"):
            desk.join("c")
        with pytest.raises(Closing):
            desk.join("b", start=2)
        desk.join("b")
        assert orders(desk, "b") == ["drain"]

    def test_a_new_limit_is_announced_anew(self) -> None:
        desk = Desk("a")
        ask(desk, "budget", tokens=5)
        self.contribute(desk, "a", 1, 10)
        ask(desk, "budget", tokens=15)
        self.contribute(desk, "a", 2, 10)
        assert [e["limit"] for e in desk.events("budget_spent")] == [5, 15]


class TestShutdown:
    def test_the_server_stops_when_everybody_has_left(self) -> None:
        desk = Desk("ab")
        ask(desk, "shutdown", reason="done")
        assert [orders(desk, w) for w in "ab"] == [["drain"], ["drain"]]
        desk.leave("a")
        assert stops(desk) == []
        desk.leave("b")
        assert stops(desk) == [StopServer("done")]
        desk.later(1e6)
        assert stops(desk) == [StopServer("done")]  # once

    def test_or_when_they_have_had_time_enough(self) -> None:
        desk = Desk("a", heartbeat_timeout_s=0.0)
        ask(desk, "shutdown")
        assert desk.coordinator.next_wake(desk.now) == desk.now + desk.coordinator.drain_timeout_s
        desk.later(desk.coordinator.drain_timeout_s - 1.0)
        assert stops(desk) == []
        desk.later(1.0)
        assert len(stops(desk)) == 1

    def test_at_once_when_nobody_is_here(self) -> None:
        desk = Desk()
        ask(desk, "shutdown", reason="empty")
        assert stops(desk) == [StopServer("empty")]

    def test_who_dies_is_not_waited_for(self) -> None:
        desk = Desk("a")
        ask(desk, "shutdown")
        desk.later(60.0)
        assert len(stops(desk)) == 1

    def test_nobody_new_is_taken_and_who_is_here_may_ask_again(self) -> None:
        desk = Desk("a")
        ask(desk, "shutdown", reason="done")
        with pytest.raises(Closing, match="coming to its end: done"):
            desk.join("b")
        desk.join("a")
        assert desk.live == {"a"}

    def test_a_round_that_still_waited_for_workers_to_join_is_closed_with_those_who_are_here(self) -> None:
        desk = Desk(num_workers=2)
        desk.join("a")
        desk.contribute("a")
        assert desk.closed == []
        ask(desk, "shutdown")
        assert desk.closed == [(1, "a")]

    def test_the_last_contributions_still_count(self) -> None:
        desk = Desk("ab")
        ask(desk, "shutdown")
        for worker in "ab":
            desk.contribute(worker)
        assert desk.closed == [(1, "ab")]


def test_saving_is_the_drivers_own_business() -> None:
    with pytest.raises(BadRequest, match="carried out by the server itself"):
        ask(Desk("a"), "save")


class TestWhoIsMeant:
    @pytest.mark.parametrize("kind", ["kick", "drain", "sync"])
    def test_a_worker_that_is_not_here_cannot_be_told_anything(self, kind: str) -> None:
        desk = Desk("ab")
        desk.leave("b")
        for worker_id in ("b", "nobody"):
            with pytest.raises(UnknownWorker, match=f"no live worker '{worker_id}'; live: a"):
                ask(desk, kind, worker_id=worker_id)
        assert not desk.events(kind)

    def test_where_nobody_is_live_that_is_said(self) -> None:
        with pytest.raises(BadRequest, match="kick needs a worker id; live: none"):
            ask(Desk(), "kick")

    def test_what_was_done_is_answered_and_told_with_its_reason(self) -> None:
        desk = Desk("ab")
        assert ask(desk, "kick", worker_id="b") == "b is out of the run; it may join again after a restart"
        assert ask(desk, "sync") == "a will contribute at the next step after the next heartbeat"
        assert ask(desk, "drain", reason="new disks") == (
            "a will contribute and leave at the next step after the next heartbeat"
        )
        assert desk.events("sync") == [{"workers": ["a"], "reason": "an operator asked for it"}]
        assert desk.events("drain") == [{"workers": ["a"], "reason": "new disks"}]

    def test_at_the_end_everybody_is_told_why(self) -> None:
        desk = Desk("ab")
        ask(desk, "shutdown", reason="the disks are full")
        assert [beat(desk, worker).commands[0].reason for worker in "ab"] == ["the disks are full"] * 2


class TestWhatIsSaidOfAnOrder:
    def test_of_a_plan_what_changed_and_from_when_on(self) -> None:
        desk = Desk("a")
        assert "revision 1" in ask(desk, "plan", changes=Wishes(sync_every=8))
        assert desk.events("plan") == [{"revision": 1, "sync_every": 8}]

    def test_of_a_budget_its_end_or_that_there_is_none(self) -> None:
        desk = Desk("a")
        assert "ends at 500 tokens" in ask(desk, "budget", tokens=500)
        assert "has no end" in ask(desk, "budget", tokens=0)

    def test_of_a_shutdown_what_happens_next(self) -> None:
        assert "then the server stops" in ask(Desk("a"), "shutdown")


class TestABudgetThatIsSpent:
    @staticmethod
    def spent() -> Desk:
        desk = Desk("a")
        ask(desk, "budget", tokens=100)
        desk.contribute("a", tokens=100)
        return desk

    def test_it_is_announced_once(self) -> None:
        desk = self.spent()
        desk.contribute("a", 2, base_version=1, tokens=100)
        assert len(desk.events("budget_spent")) == 1
        assert len(desk.events("drain")) == 1

    def test_a_larger_one_takes_the_order_back_and_the_run_goes_on(self) -> None:
        desk = self.spent()
        assert orders(desk, "a") == ["drain"]
        ask(desk, "budget", tokens=1000)
        assert orders(desk, "a") == []
        assert desk.coordinator.closing == ""
        assert desk.coordinator.stop_at is None
        desk.join("b")

    def test_one_that_is_spent_already_is_announced_and_has_its_time_to_drain(self) -> None:
        desk = self.spent()
        ask(desk, "budget", tokens=50)
        assert len(desk.events("budget_spent")) == 2
        assert desk.coordinator.stop_at == desk.now + desk.coordinator.drain_timeout_s

    def test_an_operators_end_is_not_taken_back_by_a_budget(self) -> None:
        desk = Desk("a")
        ask(desk, "shutdown", reason="holidays")
        ask(desk, "budget", tokens=1000)
        assert desk.coordinator.closing == "holidays"
        assert orders(desk, "a") == ["drain"]


def test_one_that_was_thought_dead_and_joins_again_while_the_run_ends_is_told_why_to_leave() -> None:
    desk = Desk("ab")
    ask(desk, "shutdown", reason="holidays")
    desk.later(TIMEOUT_S + 1.0, alive="b")
    desk.join("a")
    assert [(one.kind, one.reason) for one in beat(desk, "a").commands] == [("drain", "holidays")]
