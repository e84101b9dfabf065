"""What a restarted server knows of its run: as much as was remembered, and of a state that says less, nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outerstep.coordination.server.coordinator import BUDGET_SPENT
from outerstep.coordination.server.effects import StopServer
from outerstep.coordination.server.remembered import LEAP, Acceptance, Remembered
from outerstep.errors import Closing, Kicked
from outerstep.types import Control, Wishes
from unit.coordination.builders import TIMEOUT_S, Desk


def a_run(**rules: Any) -> Desk:
    """Two rounds of two fragments, of different sizes and tokens; one worker died, one was kicked, one got an order."""
    desk = Desk("abcd", fragments=2, weight_by="tokens", **rules)
    for round_ in (1, 2):
        for fragment in (0, 1):
            for worker in "abcd":
                tokens = 100 * (fragment + 1)
                desk.contribute(
                    worker, round_, fragment=fragment, base_version=round_ - 1, tokens=tokens, norm=1.0 + fragment
                )
    desk.later(TIMEOUT_S + 1.0, alive="abc")
    ask(desk, "kick", worker_id="c", reason="it is needed elsewhere")
    ask(desk, "sync", worker_id="a")
    return desk


def ask(desk: Desk, kind: str, **facts: Any) -> None:
    desk.coordinator.control(Control(kind=kind, **facts), desk.now)  # type: ignore[arg-type]
    desk.carry_out()


def remembered(desk: Desk) -> Remembered:
    """As it comes back from the disk."""
    kept = desk.coordinator.remember()
    facts, totals = json.loads(json.dumps([kept.facts, kept.totals]))
    return Remembered(
        run_id=kept.run_id, plan=kept.plan, versions=kept.versions, ledger=kept.ledger, totals=totals, facts=facts
    )


def restart(kept: Remembered, *, fragments: int = 2, token_budget: int | None = None, **settings: Any) -> Desk:
    """Another process, whose clock begins elsewhere."""
    desk = Desk("", num_workers=4, fragments=fragments, weight_by="tokens")
    desk.now = 5.0
    desk.coordinator.budget.limit = token_budget
    desk.coordinator.resume(kept.ledger, kept.totals, kept.facts, desk.now, **settings)
    desk.incarnations = dict.fromkeys("abcd", 1)
    return desk


class TestWhatIsRemembered:
    def test_what_is_decided_and_nothing_of_open_rounds(self) -> None:
        desk = a_run()
        desk.contribute("a", 3, base_version=2, tokens=100)
        kept = desk.coordinator.remember()
        assert (kept.run_id, kept.plan, kept.versions) == ("run", desk.coordinator.plan, (2, 2))
        assert kept.totals == {
            "total_submissions": 16,
            "total_worker_deaths": 1,
            "rounds_too_few": 0,
            "tokens_0": 800,
            "tokens_1": 1600,
        }
        assert {worker: record.accepted[0].sequence for worker, record in kept.ledger.items()} == dict.fromkeys(
            "abcd", 2
        )
        facts = kept.facts
        assert (facts["started"], facts["live"], facts["last_command"]) == (True, ["a", "b"], 1)
        assert (facts["token_budget"], facts["conduct"]) == (None, {})
        assert facts["kicked"] == {"c": "it is needed elsewhere"}
        assert facts["usual_weights"] == [{"mean": 100.0, "count": 8}, {"mean": 200.0, "count": 8}]
        assert facts["usual_tokens"] == facts["usual_weights"]
        assert [[len(sizes) for _, sizes in norms] for norms in facts["norms"]] == [[4, 4], [4, 4]]
        assert set(facts["settled"]) >= {"sync_every", "codec", "num_fragments"}

    def test_the_plan_that_holds_from_the_next_round_on(self) -> None:
        desk = a_run()
        ask(desk, "plan", changes=Wishes(sync_every=9))
        assert desk.coordinator.remember().plan.sync_every == 9

    def test_the_codecs_that_it_has_had_once_there_is_more_than_one(self) -> None:
        desk = a_run()
        assert "codecs" not in desk.coordinator.remember().facts
        ask(desk, "plan", changes=Wishes(codec="int8"))
        kept = remembered(desk)
        assert (kept.plan.codec, kept.facts["codecs"]) == ("int8", ["fp32"])
        again = restart(kept)  # whose settings say fp32
        assert again.coordinator.codecs == ("fp32",)
        again.coordinator.resume({}, {}, {"codecs": ["bf16", "int8"]}, again.now)
        assert again.coordinator.codecs == ("bf16", "int8", "fp32")


class TestResumed:
    def test_counters_and_measures_are_as_they_were(self) -> None:
        before = a_run()
        again = restart(remembered(before)).coordinator
        old = before.coordinator
        assert (again.total_accepted, again.members.total_deaths, again.total_too_few) == (16, 1, 0)
        assert (again.budget.per_fragment, again.budget.limit) == ({0: 800, 1: 1600}, None)
        for fragment, was in zip(again.fragments, old.fragments, strict=True):
            assert (fragment.usual, fragment.usual_tokens) == (was.usual, was.usual_tokens)
            assert (fragment.screen.rounds, fragment.screen.usual) == (was.screen.rounds, was.screen.usual)

    def test_rounds_that_moved_nothing_are_counted_on(self) -> None:
        before = a_run()
        before.coordinator.total_too_few = 3
        assert restart(remembered(before)).coordinator.total_too_few == 3

    def test_orders_get_numbers_that_nobody_has_seen(self) -> None:
        again = restart(remembered(a_run()))
        assert again.coordinator.members.last_command == 1 + LEAP

    def test_the_ledger_answers_as_before(self) -> None:
        again = restart(remembered(a_run()))
        worker = again.coordinator.members.find("a")
        assert worker is not None
        assert {fragment: entry.sequence for fragment, entry in worker.accepted.items()} == {0: 2, 1: 2}
        assert isinstance(worker.accepted[0], Acceptance)

    def test_those_that_were_here_are_expected_back_and_no_others(self) -> None:
        again = restart(remembered(a_run()))
        assert again.coordinator.started is True
        assert (again.live, again.expected(0), again.expected(1)) == ({"a", "b"}, {"a", "b"}, {"a", "b"})
        assert {w.worker_id for w in again.coordinator.members if w.expected_back} == {"a", "b"}

    def test_unless_nobody_is_to_be_waited_for(self) -> None:
        again = restart(remembered(a_run()), expect_back=False)
        assert (again.live, again.expected()) == (set(), set())
        assert again.coordinator.started

    def test_a_run_that_had_not_started_has_not_started(self) -> None:
        before = Desk("ab", num_workers=4, fragments=2, weight_by="tokens")
        again = restart(remembered(before))
        assert again.coordinator.started is False
        assert again.expected() == set()

    def test_who_was_kicked_stays_out_and_others_do_not(self) -> None:
        again = restart(remembered(a_run()))
        with pytest.raises(Kicked, match="it is needed elsewhere"):
            again.join("c")
        again.join("a")
        again.join("d")
        assert again.live == {"a", "b", "d"}

    def test_incarnations_begin_above_what_may_have_been_given(self) -> None:
        assert restart(remembered(a_run())).join("new").incarnation == 1
        assert restart(remembered(a_run()), first_incarnation=1000).join("new").incarnation == 1000


class TestTheBudget:
    def test_goes_on_unless_the_server_was_started_with_another(self) -> None:
        before = a_run()
        before.coordinator.budget.limit = 5000
        assert restart(remembered(before)).coordinator.budget.limit == 5000
        assert restart(remembered(before), token_budget=9000).coordinator.budget.limit == 9000

    def test_that_is_spent_ends_the_run_again(self) -> None:
        again = restart(remembered(a_run()), token_budget=800)
        assert again.coordinator.closing == BUDGET_SPENT
        assert again.coordinator.stop_at == again.now + 600.0
        with pytest.raises(Closing):
            again.join("new")
        again.later(600.0)
        assert [effect.reason for effect in again.effects if isinstance(effect, StopServer)] == [BUDGET_SPENT]


def test_a_state_that_says_nothing_leaves_everything_at_its_beginning() -> None:
    fresh = Desk("", fragments=2)
    desk = Desk("", fragments=2)
    desk.coordinator.resume({}, {}, {}, 5.0)
    one, other = desk.coordinator, fresh.coordinator
    assert (one.total_accepted, one.total_too_few, one.members.total_deaths) == (0, 0, 0)
    assert (one.budget, one.started, list(one.members)) == (other.budget, False, [])
    assert one.members.last_command == LEAP
    assert [(f.usual, f.usual_tokens, f.screen) for f in one.fragments] == [
        (f.usual, f.usual_tokens, f.screen) for f in other.fragments
    ]


def test_of_a_worker_that_the_state_says_nothing_else_about_nothing_is_held_against() -> None:
    kept = remembered(a_run())
    desk = Desk("", num_workers=4, fragments=2)
    desk.coordinator.resume(kept.ledger, {}, {}, 5.0)
    assert [(w.live, w.kicked, w.conduct.total) for w in desk.coordinator.members] == [(False, "", 0)] * 4
    assert not desk.coordinator.started
