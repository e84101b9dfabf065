"""What a server's decisions mean for the lives of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.layers.lifecycle import EDGES, Happening, targets
from outerstep.coordination.server.effects import CloseRound
from outerstep.coordination.server.lives import Lives
from outerstep.coordination.server.membership import FIRST_S
from outerstep.errors import BadTensors
from outerstep.types import Control
from unit.coordination.builders import TIMEOUT_S, Desk


def place(desk: Desk, worker: str) -> str:
    found = desk.coordinator.members.find(worker)
    assert found is not None
    return str(found.life.place) if found.life is not None else ""


def places(desk: Desk, workers: str) -> list[str]:
    return [place(desk, worker) for worker in workers]


def control(desk: Desk, kind: Any, worker: str | None = None, **more: Any) -> None:
    desk.coordinator.control(Control(kind=kind, worker_id=worker, **more), desk.now)
    desk.carry_out()


class TestComing:
    def test_whoever_comes_first_waits_for_the_run_to_start(self) -> None:
        desk = Desk("a", num_workers=2)
        assert place(desk, "a") == "INIT"
        desk.join("b")
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2

    def test_whoever_comes_later_waits_for_the_round_that_is_open(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.join("c")
        assert place(desk, "c") == "INIT"
        desk.contribute("b")
        assert places(desk, "abc") == ["TRAINING (compute)"] * 3

    def test_whoever_comes_when_nobody_else_is_there_trains_at_once(self) -> None:
        desk = Desk("a")
        desk.leave("a")
        desk.join("b")
        assert place(desk, "b") == "TRAINING (compute)"

    def test_a_contribution_before_the_run_starts_is_in_sync_when_it_does(self) -> None:
        desk = Desk("a", num_workers=2)
        desk.contribute("a")
        assert place(desk, "a") == "INIT"
        desk.join("b")
        assert places(desk, "ab") == ["TRAINING (sync)", "TRAINING (compute)"]


class TestARound:
    def test_a_contribution_is_in_sync_until_its_round_closes_and_in_commit_until_it_is_told(self) -> None:
        desk = Desk("ab", prompt=False)
        desk.contribute("a")
        assert places(desk, "ab") == ["TRAINING (sync)", "TRAINING (compute)"]
        desk.contribute("b")
        assert places(desk, "ab") == ["TRAINING (commit)"] * 2
        desk.publish(desk.closings[-1])
        desk.carry_out()
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2

    def test_a_worker_that_missed_a_round_is_behind_until_it_contributes_again(self) -> None:
        desk = Desk("abc", quorum=2)
        desk.contribute("a")
        desk.contribute("b")
        assert places(desk, "abc") == ["TRAINING (compute)", "TRAINING (compute)", "TRAINING (fetch checkpoint)"]
        desk.contribute("c", base_version=1)
        assert place(desk, "c") == "TRAINING (sync)"

    def test_in_an_asynchronous_run_nobody_is_behind_for_a_round_of_anothers(self) -> None:
        desk = Desk("ab", asynchronous=True, quorum=1)
        desk.contribute("a")
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2

    def test_with_two_fragments_under_way_a_worker_is_in_sync_until_both_are_told(self) -> None:
        desk = Desk("ab", fragments=2)
        for fragment in (0, 1):
            desk.contribute("a", fragment=fragment)
        desk.contribute("b", fragment=0)
        assert places(desk, "ab") == ["TRAINING (sync)", "TRAINING (compute)"]
        desk.contribute("b", fragment=1)
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2

    def test_what_a_layer_above_agreed_on_finds_the_members_as_followers(self) -> None:
        desk = Desk("ab", prompt=False)
        desk.coordinator.withheld_until = desk.now + 60.0
        desk.heartbeat("a")
        desk.carry_out()
        assert places(desk, "ab") == ["TRAINING (wait for broadcast)"] * 2
        desk.coordinator.move_from_above(0, 1)
        desk.carry_out()
        assert places(desk, "ab") == ["TRAINING (follower's commit)"] * 2
        desk.publish(desk.closings[-1])
        desk.carry_out()
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2

    def test_members_that_have_waited_long_enough_for_the_layer_above_train_on(self) -> None:
        desk = Desk("ab")
        desk.coordinator.withheld_until = desk.now + 5.0
        desk.later(1.0)
        assert place(desk, "a") == "TRAINING (wait for broadcast)"
        desk.later(5.0)
        assert place(desk, "a") == "TRAINING (compute)"


class TestGoing:
    def test_a_dead_worker_is_idle_and_comes_back_with_the_next_round(self) -> None:
        desk = Desk("ab")
        desk.later(TIMEOUT_S + 1.0, alive="a")
        assert places(desk, "ab") == ["TRAINING (compute)", "IDLE"]
        desk.join("b", instance="again")
        assert place(desk, "b") == "REJOIN (wait for the current round)"
        desk.contribute("a")
        assert place(desk, "b") == "TRAINING (compute)"

    def test_a_worker_that_was_restarted_broke_down_and_came_back(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        desk.join("a", instance="again")
        assert place(desk, "a") == "REJOIN (wait for the current round)"
        assert desk.events("state")[-1] == {"worker": "a", "state": "REJOIN", "before": "TRAINING"}

    def test_a_restart_that_has_its_steps_is_waited_for_and_trains_at_once(self) -> None:
        desk = Desk("ab")
        desk.join("a", instance="again", continues=True)
        assert place(desk, "a") == "TRAINING (compute)"

    def test_a_worker_that_is_told_to_drain_commits_once_more_and_is_gone(self) -> None:
        desk = Desk("ab")
        control(desk, "drain", "a")
        assert place(desk, "a") == "DRAINING (notice others)"
        desk.contribute("a")
        desk.contribute("b")
        assert place(desk, "a") == "DRAINING (last commit)"
        desk.leave("a")
        assert place(desk, "a") == "EXIT"

    def test_a_drain_that_is_withdrawn_before_it_was_heard_leaves_the_worker_training(self) -> None:
        desk = Desk("ab")
        control(desk, "budget", tokens=1)
        desk.contribute("a", tokens=5)
        desk.contribute("b", tokens=5)
        assert places(desk, "ab") == ["DRAINING (last commit)"] * 2, "the round that spent it"
        control(desk, "budget", tokens=1000)
        assert places(desk, "ab") == ["TRAINING (compute)"] * 2
        assert desk.events("drain_withdrawn") == [{"workers": ["a", "b"], "reason": "the token budget was raised"}]

    def test_a_worker_that_dies_while_it_drains_is_idle(self) -> None:
        desk = Desk("ab")
        control(desk, "drain", "b")
        desk.later(TIMEOUT_S + 1.0, alive="a")
        assert place(desk, "b") == "IDLE"

    def test_a_worker_that_comes_back_to_a_run_that_is_ending_drains(self) -> None:
        desk = Desk("ab")
        desk.later(TIMEOUT_S + 1.0, alive="a")
        control(desk, "shutdown")
        desk.join("b")
        assert places(desk, "ab") == ["DRAINING (notice others)"] * 2

    def test_whoever_is_done_is_gone_and_a_new_start_is_a_new_life(self) -> None:
        desk = Desk("ab")
        desk.leave("a")
        assert place(desk, "a") == "EXIT"
        desk.contribute("b")
        desk.join("a", instance="again")
        assert place(desk, "a") == "INIT"

    def test_a_worker_that_was_kicked_is_gone(self) -> None:
        desk = Desk("ab")
        control(desk, "kick", "a")
        assert place(desk, "a") == "EXIT"


class TestQuarantine:
    def offend(self, desk: Desk) -> None:
        for _ in range(3):
            desk.coordinator.turn_away("a", [0], BadTensors("nonsense"), desk.now)
        desk.carry_out()
        assert place(desk, "a") == "IDLE"

    def test_a_worker_in_quarantine_is_idle_and_a_pardoned_one_comes_back(self) -> None:
        desk = Desk("ab")
        self.offend(desk)
        control(desk, "pardon", "a")
        assert place(desk, "a") == "REJOIN (wait for the current round)"
        desk.contribute("b")
        assert place(desk, "a") == "TRAINING (compute)"

    def test_when_its_time_is_over_it_trains_from_the_next_round_on(self) -> None:
        desk = Desk("ab", heartbeat_timeout_s=0.0)
        self.offend(desk)
        desk.contribute("b")
        assert place(desk, "a") == "IDLE"
        desk.later(FIRST_S + 1.0)
        desk.contribute("b", 2, base_version=1)
        assert place(desk, "a") == "TRAINING (compute)"

    def test_whoever_leaves_out_of_quarantine_is_gone(self) -> None:
        desk = Desk("ab")
        self.offend(desk)
        desk.leave("a")
        assert place(desk, "a") == "EXIT"


class TestTelling:
    def test_each_change_of_state_is_told_once_with_the_state_before(self) -> None:
        desk = Desk("a", num_workers=2)
        desk.join("b")
        desk.contribute("a")
        desk.leave("a")
        of_a = [(facts.get("before"), facts["state"]) for facts in desk.events("state") if facts["worker"] == "a"]
        assert of_a == [(None, "INIT"), ("INIT", "TRAINING"), ("TRAINING", "EXIT")]

    def test_a_restarted_server_takes_those_who_were_here_for_training(self) -> None:
        desk, after = Desk("ab"), Desk("", num_workers=2)
        kept = desk.coordinator.remember()
        after.coordinator.resume(kept.ledger, kept.totals, kept.facts, after.now)
        assert places(after, "ab") == ["TRAINING (compute)"] * 2

    def test_or_for_waiting_if_its_run_had_not_started(self) -> None:
        desk, after = Desk("a", num_workers=2), Desk("", num_workers=2)
        kept = desk.coordinator.remember()
        after.coordinator.resume(kept.ledger, kept.totals, kept.facts, after.now)
        assert place(after, "a") == "INIT"
        after.join("b")
        assert places(after, "ab") == ["TRAINING (compute)"] * 2

    def test_what_the_table_does_not_know_is_told_and_stops_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lame = targets([edge for edge in EDGES if edge.happening is not Happening.LOCAL_OK])
        monkeypatch.setattr(Lives, "table", lame)
        desk = Desk("ab")
        desk.contribute("a")
        desk.contribute("b")
        assert [effect.version for effect in desk.effects if isinstance(effect, CloseRound)] == [1]
        assert desk.events("state_unclear") == [
            {"worker": worker, "why": "local_ok cannot happen to a group in TRAINING (sync)"} for worker in "ab"
        ]
        assert places(desk, "ab") == ["", ""]
