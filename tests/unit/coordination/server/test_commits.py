"""What follows a decision, task by task."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.server import commits as module
from outerstep.coordination.server.commits import (
    AddContributions,
    AnnounceRound,
    Commits,
    CutJournal,
    Durability,
    ReportEnd,
    TakeStep,
    Task,
    WriteCheckpoint,
    WriteRecord,
    newest_first,
    superseded,
)
from outerstep.coordination.server.effects import Accumulate, CloseRound
from outerstep.coordination.server.quotas import QuotaLimits, Quotas
from outerstep.coordination.server.rounds import Aggregation
from outerstep.errors import NotFinite, QuotaExceeded, Refused
from outerstep.events import PlanChanged
from outerstep.types import (
    Control,
    ControlAnswer,
    Dataset,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    Lease,
    Leave,
    OfferAnswer,
    Wishes,
)
from unit.coordination.builders import SIZE_BYTES, Desk, make_agreement, make_join, make_key, make_offer


class Driver(Desk):
    """A desk whose effects go through commits; tasks are carried out only when the test says so."""

    def __init__(
        self,
        workers: str = "a",
        durability: Durability = "round",
        *,
        settings: dict[str, Any] | None = None,
        **rules: Any,
    ) -> None:
        super().__init__(prompt=False, **{"num_workers": max(1, len(workers)), **rules})
        self.coordinator.remembers = True
        self.commits = Commits(self.coordinator, durability, **(settings or {}))
        for worker in workers:
            self.ask(make_join(worker))
            self.incarnations[worker] = 1

    def ask(self, request: Any) -> int:
        """Returns the record that its answer waits for."""
        _, record = self.commits.answer(request, self.now)
        self.effects += self.commits.take_effects()
        return record

    def carry_out(self) -> None:
        if hasattr(self, "commits"):
            self.effects += self.commits.take_effects()

    def task(self) -> Task | None:
        return self.commits.next()

    def do(self, *kinds: type[Task]) -> list[Task]:
        """Carry out one task of each kind, in this order."""
        done: list[Task] = []
        for kind in kinds:
            task = self.task()
            assert isinstance(task, kind), f"{task} is not a {kind.__name__}"
            self._perform(task)
            done.append(task)
        return done

    def do_all(self) -> list[str]:
        names = []
        while (task := self.task()) is not None:
            names.append(type(task).__name__)
            self._perform(task)
        return names

    def _perform(self, task: Task) -> None:
        accepted: tuple[Accumulate, ...] = ()
        if isinstance(task, AddContributions):
            accepted = task.freed
        elif isinstance(task, AnnounceRound):
            accepted = task.step.held
            closing = task.step.closing
            made = make_agreement(closing.version, fragment=closing.fragment, participants=closing.participants)
            self.coordinator.published(made, self.now)
        for one in accepted:
            self.coordinator.uploads.drop(one.key)
        self.commits.done(100 if isinstance(task, WriteRecord) else 0)
        self.carry_out()

    def leave_request(self, worker: str) -> Leave:
        return Leave(**self.head(worker), reason="done")


def begun(workers: str = "a", durability: Durability = "round", **more: Any) -> Driver:
    """A run whose first checkpoint is on the disk."""
    driver = Driver(workers, durability, **more)
    driver.do_all()
    return driver


def keys(accepted: tuple[Accumulate, ...] | list[Accumulate]) -> list[str]:
    return [one.key.worker_id for one in accepted]


# --- the order of a round ---------------------------------------------------------------------------------------------


def test_a_round_is_stepped_then_written_then_announced() -> None:
    driver = begun()
    driver.contribute("a")
    step, record, told = driver.do(TakeStep, WriteRecord, AnnounceRound)
    assert isinstance(step, TakeStep)
    assert isinstance(record, WriteRecord)
    assert isinstance(told, AnnounceRound)
    assert step.closing.version == 1
    assert record.closing is step.closing
    assert told.step is step
    assert record.remembered.versions == (1,)


def test_a_task_stays_at_hand_until_it_is_done() -> None:
    driver = begun()
    driver.contribute("a")
    assert driver.task() is driver.task()


@pytest.mark.parametrize("durability", ["checkpoint", "none"])
def test_without_a_journal_a_round_is_announced_without_a_record(durability: Durability) -> None:
    driver = begun(durability=durability)
    driver.contribute("a")
    driver.do(TakeStep, AnnounceRound)
    assert driver.task() is None


def test_a_step_takes_the_contributions_of_its_own_round() -> None:
    driver = begun("ab", quorum=1)
    driver.contribute("a")  # closes round 1
    driver.contribute("b", base_version=0)  # late: counts in round 2, which it closes
    first = driver.task()
    assert isinstance(first, TakeStep)
    assert keys(first.accepted) == ["a"]
    driver.do(TakeStep, WriteRecord, AnnounceRound, WriteCheckpoint, CutJournal)
    second = driver.task()
    assert isinstance(second, TakeStep)
    assert keys(second.accepted) == ["b"]
    assert second.closing.version == 2


def test_what_was_left_out_is_freed_but_not_taken() -> None:
    driver = begun()
    driver.contribute("a")
    step = driver.task()
    assert isinstance(step, TakeStep)
    assert step.taken == list(step.accepted)
    closing = CloseRound(0, 1, (), step.closing.remembered, frozenset({step.accepted[0].key}))
    assert TakeStep(1, closing, step.accepted).taken == []


def test_a_deterministic_run_steps_in_the_order_of_the_workers() -> None:
    driver = begun("abc", settings={"deterministic": True})
    for worker in "cab":
        driver.contribute(worker)
    step = driver.task()
    assert isinstance(step, TakeStep)
    assert keys(step.accepted) == ["a", "b", "c"]


# --- contributions before the end of their round ----------------------------------------------------------------------


def test_contributions_are_added_together_when_nothing_comes() -> None:
    driver = begun("abc")
    driver.contribute("a")
    driver.contribute("b")
    assert driver.task() is None
    assert driver.commits.can_gather
    driver.commits.gather()
    (added,) = driver.do(AddContributions)
    assert isinstance(added, AddContributions)
    assert (added.fragment, added.version, keys(added.accepted)) == (0, 1, ["a", "b"])
    assert not driver.commits.can_gather
    driver.contribute("c")
    step = driver.task()
    assert isinstance(step, TakeStep)
    assert keys(step.accepted) == ["c"]


def test_nothing_is_gathered_while_there_is_something_to_do() -> None:
    driver = begun("ab", quorum=1, grace_s=0.0)
    driver.contribute("a")
    driver.contribute("b")
    driver.commits.gather()
    assert isinstance(driver.task(), TakeStep)
    driver.commits.gather()
    assert isinstance(driver.task(), TakeStep)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"keeps_contributions": True}, {}),
        ({"deterministic": True}, {}),
        ({}, {"aggregation": Aggregation("median")}),
    ],
    ids=["pushes", "deterministic", "rule"],
)
def test_some_runs_keep_contributions_until_their_round_closes(settings: Any, rules: Any) -> None:
    driver = begun("ab", settings=settings, **rules)
    driver.contribute("a")
    assert not driver.commits.can_gather
    driver.commits.gather()
    assert driver.task() is None


def test_a_contribution_that_may_still_be_left_out_is_not_added_early() -> None:
    driver = begun("ab")
    driver.contribute("a")
    driver.commits._accepted[0, 1] = [
        one.__class__(**{**one.__dict__, "keep": True}) for one in driver.commits._accepted[0, 1]
    ]
    assert not driver.commits.can_gather
    driver.commits.gather()
    assert driver.task() is None
    driver.contribute("b")
    step = driver.task()
    assert isinstance(step, TakeStep)
    assert keys(step.accepted) == ["a", "b"]


# --- contributions that a record may be made of -----------------------------------------------------------------------


def added_early(driver: Driver, workers: str) -> list[AddContributions]:
    """What is done with them when nothing else comes."""
    tasks = []
    for worker in workers:
        driver.contribute(worker)
        driver.commits.gather()
        (task,) = driver.do(AddContributions)
        assert isinstance(task, AddContributions)
        tasks.append(task)
    return tasks


def the_step(driver: Driver) -> TakeStep:
    step = driver.task()
    assert isinstance(step, TakeStep)
    return step


def test_contributions_smaller_than_their_mean_stay_until_it_is_written() -> None:
    driver = begun("abc", mean_bytes=3 * SIZE_BYTES + 1)
    first, second = added_early(driver, "ba")
    assert (first.freed, second.freed) == ((), ())
    assert driver.coordinator.uploads.held_bytes == 2 * SIZE_BYTES
    driver.contribute("c")
    step = the_step(driver)
    assert (keys(step.added), keys(step.accepted), step.freed) == (["b", "a"], ["c"], False)
    driver.do(TakeStep, WriteRecord)
    assert driver.coordinator.uploads.held_bytes == 3 * SIZE_BYTES
    driver.do(AnnounceRound)
    assert driver.coordinator.uploads.held_bytes == 0


def test_contributions_that_will_be_larger_than_their_mean_are_freed_when_they_are_added() -> None:
    """Also if those that are here are not: others are still to come."""
    driver = begun("abc", mean_bytes=3 * SIZE_BYTES)
    (task,) = added_early(driver, "a")
    assert keys(task.freed) == ["a"]
    driver.contribute("b")
    driver.contribute("c")
    step = the_step(driver)
    assert (step.added, step.freed) == ((), True)


@pytest.mark.parametrize("durability", ["checkpoint", "none"])
def test_without_a_journal_nothing_stays(durability: Durability) -> None:
    driver = begun("abc", durability, mean_bytes=1 << 20)
    (task,) = added_early(driver, "a")
    assert keys(task.freed) == ["a"]


def test_without_room_for_those_to_come_nothing_stays() -> None:
    driver = begun("abc", mean_bytes=1 << 20, pool_bytes=3 * SIZE_BYTES - 1)
    (task,) = added_early(driver, "a")
    assert keys(task.freed) == ["a"]


def test_what_stays_goes_as_soon_as_somebody_waits_for_its_room() -> None:
    driver = begun("abc", mean_bytes=1 << 20, pool_bytes=3 * SIZE_BYTES)
    added_early(driver, "a")
    assert not driver.commits.can_gather
    driver.ask(make_join("d"))
    driver.do_all()
    answers = [driver.offer(worker) for worker in "bcd"]
    assert [answer.state for answer in answers] == ["send", "send", "wait"]
    assert driver.commits.can_gather
    driver.commits.gather()
    (task,) = driver.do(AddContributions)
    assert isinstance(task, AddContributions)
    assert (task.accepted, keys(task.freed)) == ((), ["a"])
    assert not driver.commits.can_gather
    assert driver.offer("d").state == "send"


def test_the_next_round_does_not_know_what_was_freed_in_this_one() -> None:
    driver = begun("ab", mean_bytes=2 * SIZE_BYTES)
    added_early(driver, "a")
    driver.contribute("b")
    assert the_step(driver).freed
    driver.do_all()
    for worker in "ab":
        driver.contribute(worker, 2, base_version=1, oldest_base=1)
    assert not the_step(driver).freed


# --- notes, and the answers that wait for them ------------------------------------------------------------------------


def test_nobody_hears_of_a_run_before_its_first_checkpoint() -> None:
    driver = Driver("")
    record = driver.ask(make_join("a"))
    assert record > driver.commits.written
    first = driver.task()
    assert isinstance(first, WriteCheckpoint)
    assert first.required
    assert first.includes == 0
    driver.do(WriteCheckpoint)
    assert driver.commits.written >= record


def test_a_join_waits_for_its_record() -> None:
    driver = begun("a", num_workers=2)
    record = driver.ask(make_join("b"))
    assert record > driver.commits.written
    (note,) = driver.do(WriteRecord)
    assert isinstance(note, WriteRecord)
    assert note.closing is None
    assert "b" in note.remembered.ledger
    assert driver.commits.written == record


def test_a_join_that_is_repeated_waits_for_the_same_record_and_writes_none() -> None:
    driver = begun("a", num_workers=2)
    record = driver.ask(make_join("b"))
    assert driver.ask(make_join("b")) == record
    assert driver.do_all() == ["WriteRecord"]


def test_joins_that_come_together_are_one_record() -> None:
    driver = begun("a", num_workers=4)
    records = [driver.ask(make_join(worker)) for worker in "bcd"]
    assert driver.do_all() == ["WriteRecord"]
    assert driver.commits.written == max(records)


def test_a_note_is_superseded_by_a_round_that_closes_after_it() -> None:
    driver = begun("a")
    record = driver.ask(make_join("b"))
    driver.contribute("a")
    driver.do(TakeStep)
    assert driver.commits.written < record
    (written,) = driver.do(WriteRecord)
    assert isinstance(written, WriteRecord)
    assert "b" in written.remembered.ledger
    assert driver.commits.written > record


def test_the_first_note_is_never_superseded() -> None:
    driver = Driver("ab")
    assert driver.do_all()[0] == "WriteCheckpoint"


def test_a_leave_is_written_and_not_waited_for() -> None:
    driver = begun("ab")
    assert driver.ask(driver.leave_request("b")) == 0
    assert driver.do_all() == ["WriteRecord"]
    assert driver.ask(driver.leave_request("b")) == 0
    assert driver.do_all() == [], "it was gone already"


class TestTheEnd:
    """Of a run: the last worker that was here has left."""

    def test_what_its_leaving_closes_is_in_the_state_that_is_saved_then(self) -> None:
        driver = begun("ab")
        driver.contribute("a")
        driver.contribute("b")
        driver.do_all()
        driver.contribute("a", 2, base_version=1, oldest_base=1)
        driver.ask(driver.leave_request("a"))
        driver.ask(driver.leave_request("b"))  # for whom the round had waited
        done = driver.do(TakeStep, WriteRecord, AnnounceRound, WriteCheckpoint, CutJournal, ReportEnd)
        saved, report = done[3], done[5]
        assert isinstance(saved, WriteCheckpoint)
        assert isinstance(report, ReportEnd)
        assert saved.remembered.versions == (2,)
        assert (report.sync_round, report.left.reason) == (2, "done")

    def test_nothing_new_is_not_saved_again(self) -> None:
        driver = begun("a")
        driver.ask(driver.leave_request("a"))
        assert driver.do_all() == ["ReportEnd", "WriteRecord"]
        driver.ask(driver.leave_request("a"))
        assert driver.do_all() == [], "it was gone already"

    def test_a_state_that_cannot_be_written_is_no_reason_to_say_nothing(self) -> None:
        driver = begun("a", "checkpoint")
        driver.contribute("a")
        driver.do(TakeStep, AnnounceRound)
        driver.ask(driver.leave_request("a"))
        assert isinstance(driver.task(), WriteCheckpoint)
        assert driver.commits.failed() is None
        driver.do(ReportEnd)

    def test_without_a_disk_it_is_said_all_the_same(self) -> None:
        driver = begun("a", "none")
        driver.contribute("a")
        driver.do(TakeStep, AnnounceRound)
        driver.ask(driver.leave_request("a"))
        assert driver.do_all() == ["ReportEnd"]

    def test_a_worker_that_died_has_not_left(self) -> None:
        driver = begun("ab")
        driver.ask(driver.leave_request("a"))
        driver.later(1000.0)
        assert not driver.coordinator.members.live_ids
        assert "ReportEnd" not in driver.do_all()

    def test_the_loss_is_the_mean_of_those_that_were_reported(self) -> None:
        driver = begun("abc", num_workers=3)
        for worker, loss in (("a", 2.0), ("b", 3.0)):
            beat = {"step": 1, "steps_per_second": 1.0, "loss": loss}
            driver.ask(Heartbeat(**driver.head(worker), **beat))  # type: ignore[arg-type]
        for worker in "abc":
            driver.ask(driver.leave_request(worker))
        report = driver.do(ReportEnd)[0]
        assert isinstance(report, ReportEnd)
        assert report.left.loss == 2.5


@pytest.mark.parametrize("kind", ["kick", "pardon", "plan", "budget", "shutdown"])
def test_an_order_that_outlives_the_server_waits_for_its_record(kind: Any) -> None:
    driver = begun("ab")
    changes = Wishes(sync_every=5) if kind == "plan" else Wishes()
    record = driver.ask(Control(kind=kind, worker_id="b" if kind in ("kick", "pardon") else None, changes=changes))
    assert record > driver.commits.written
    assert driver.do_all() == ["WriteRecord"]
    assert driver.commits.written == record


@pytest.mark.parametrize("kind", ["drain", "sync"])
def test_an_order_that_does_not_is_not_written(kind: Any) -> None:
    driver = begun("ab")
    assert driver.ask(Control(kind=kind, worker_id="b")) == 0
    assert driver.do_all() == []


def test_other_messages_are_not_written() -> None:
    driver = begun("a")
    assert driver.ask(Heartbeat(**driver.head("a"), step=1, steps_per_second=1.0)) == 0
    assert driver.ask(make_offer("a")) == 0
    assert driver.do_all() == []


def test_a_join_that_is_refused_writes_nothing() -> None:
    driver = begun("a")
    with pytest.raises(Refused):
        driver.ask(make_join("b", protocol=0))
    assert driver.do_all() == []


def test_a_run_that_keeps_nothing_lets_nobody_wait() -> None:
    driver = Driver("", durability="none")
    assert driver.ask(make_join("a")) == 0
    driver.commits.note()
    assert driver.do_all() == []


def test_with_checkpoints_alone_a_later_note_need_not_be_written() -> None:
    driver = begun("a", "checkpoint", num_workers=2)
    record = driver.ask(make_join("b"))
    assert driver.task() is None
    assert driver.commits.written == record


def test_the_answer_is_the_coordinators() -> None:
    answer, _ = Driver("").commits.answer(make_join("a"), 1000.0)
    assert isinstance(answer, JoinAnswer)
    assert answer.incarnation == 1


def test_effects_of_a_refused_message_are_not_lost() -> None:
    driver = begun("a")
    driver.coordinator._effects.append(PlanChanged(2, {}))
    with pytest.raises(Refused):
        driver.commits.answer(make_join("b", protocol=0), driver.now)
    assert driver.commits.take_effects() == [PlanChanged(2, {})]
    assert driver.commits.take_effects() == []


# --- checkpoints and the journal --------------------------------------------------------------------------------------


def rounds(driver: Driver, count: int, first: int = 1) -> list[str]:
    names: list[str] = []
    for sequence in range(first, first + count):
        driver.contribute("a", sequence, base_version=sequence - 1)
        names += driver.do_all()
    return names


ROUND = ["TakeStep", "WriteRecord", "AnnounceRound"]
SAVED = ["WriteCheckpoint", "CutJournal"]


def test_the_first_round_after_a_start_is_followed_by_a_checkpoint_and_the_second_is_not() -> None:
    driver = begun()
    assert rounds(driver, 3) == [*ROUND, *SAVED, *ROUND, *ROUND]


def test_a_checkpoint_every_so_many_rounds() -> None:
    driver = begun(settings={"save_every": 2})
    assert rounds(driver, 4) == [*ROUND, *SAVED, *ROUND, *SAVED, *ROUND, *ROUND, *SAVED]


def test_with_checkpoints_alone_they_come_only_every_so_many_rounds() -> None:
    driver = begun(durability="checkpoint", settings={"save_every": 2})
    plain = ["TakeStep", "AnnounceRound"]
    assert rounds(driver, 4) == [*plain, *plain, *SAVED, *plain, *plain, *SAVED]
    assert rounds(begun(durability="none"), 3) == plain * 3


def test_a_long_journal_is_followed_by_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 3)
    driver = begun()
    assert rounds(driver, 5) == [*ROUND, *SAVED, *ROUND, *ROUND, *ROUND, *SAVED, *ROUND]


def test_a_large_journal_is_followed_by_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_JOURNAL_BYTES", 250)
    monkeypatch.setattr(module, "MODELS_IN_JOURNAL", 0)
    driver = begun()
    assert rounds(driver, 5) == [*ROUND, *SAVED, *ROUND, *ROUND, *ROUND, *SAVED, *ROUND]


def test_a_journal_of_joins_and_leaves_without_a_round_is_followed_by_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every note holds the whole ledger: without an end, the journal would grow with the square of the joins."""
    monkeypatch.setattr(module, "MOST_RECORDS", 10)
    driver, notes = begun(), 0
    for guest in range(100):
        for request in (make_join(f"guest{guest}"), Leave(run_id="run", worker_id=f"guest{guest}", incarnation=1)):
            driver.ask(request)
            names = driver.do_all()
            notes += 1
            assert driver.commits._last_record - (driver.commits.base or 0) <= 10, names
    assert notes == 200
    driver.contribute("a")
    assert driver.do_all()[:3] == ["TakeStep", "WriteRecord", "AnnounceRound"]


def test_a_large_journal_of_notes_is_followed_by_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_JOURNAL_BYTES", 250)
    monkeypatch.setattr(module, "MODELS_IN_JOURNAL", 0)
    driver = begun()
    made = []
    for guest in range(4):
        driver.ask(make_join(f"guest{guest}"))
        made.append(driver.do_all())
    assert made == [["WriteRecord"], ["WriteRecord"], ["WriteRecord", "WriteCheckpoint", "CutJournal"], ["WriteRecord"]]


def test_a_quarantine_is_in_the_journal_at_once() -> None:
    driver = begun("ab")
    for sequence in range(1, 4):
        driver.offer("b", sequence)
        for part in (0, 1):
            driver.put("b", part, sequence)
        driver.coordinator.reject(make_key("b", sequence), NotFinite("it has NaN"), driver.now)
        driver.carry_out()
        if sequence < 3:
            assert driver.do_all() == []
    [task] = driver.do(WriteRecord)
    assert isinstance(task, WriteRecord)
    assert task.remembered.facts["conduct"]["b"]["spells"] == 1
    assert driver.do_all() == []


def test_a_quarantine_that_closes_a_round_is_in_the_record_of_that_round() -> None:
    driver = begun("ab")
    driver.contribute("a")
    for sequence in range(1, 4):
        driver.offer("b", sequence)
        driver.coordinator.reject(make_key("b", sequence), NotFinite("it has NaN"), driver.now)
        driver.carry_out()
    _, task, _ = driver.do(TakeStep, WriteRecord, AnnounceRound)
    assert isinstance(task, WriteRecord)
    assert task.remembered.facts["conduct"]["b"]["spells"] == 1
    assert "WriteRecord" not in driver.do_all()


def test_a_large_model_may_have_a_large_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_JOURNAL_BYTES", 0)  # the model has 36 values: 144 bytes, four times 576
    driver = begun()
    assert rounds(driver, 8) == [*ROUND, *SAVED, *ROUND * 5, *ROUND, *SAVED, *ROUND]


def test_a_round_is_replayed_however_few_bytes_its_record_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small records of a large fragment: each counts for an eighth of it, 200 bytes instead of 100."""
    monkeypatch.setattr(module, "LEAST_JOURNAL_BYTES", 0)
    driver = begun(mean_bytes=8 * 200)
    assert rounds(driver, 5) == [*ROUND, *SAVED, *ROUND * 2, *ROUND, *SAVED, *ROUND]


def test_the_journal_reaches_back_to_the_checkpoint_before_the_last() -> None:
    driver = Driver()
    first, cut = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(first, WriteCheckpoint)
    assert first.includes == 0
    assert cut == CutJournal(0)
    rounds(driver, 1)
    driver.commits.save("now")
    second, cut = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(second, WriteCheckpoint)
    assert second.includes == 1
    assert cut == CutJournal(1), "the one after the first round includes record 1"
    rounds(driver, 2, first=2)
    driver.commits.save("now")
    third, cut = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(third, WriteCheckpoint)
    assert third.includes == 3
    assert cut == CutJournal(1)


def test_records_that_were_given_up_cannot_follow_the_first_checkpoint() -> None:
    driver = Driver("", settings={"last_record": 7})
    driver.ask(make_join("a"))
    first, cut = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(first, WriteCheckpoint)
    assert first.includes == 8
    assert cut == CutJournal(8)
    rounds(driver, 1)
    driver.commits.save("now")
    second = driver.task()
    assert isinstance(second, WriteCheckpoint)
    assert second.includes == 9


def test_a_resumed_run_builds_on_its_checkpoint() -> None:
    driver = Driver("", settings={"last_record": 7})
    driver.commits.resume(5, 3)
    driver.commits.note()
    assert driver.do_all() == ["WriteRecord"]
    driver.commits.save("now")
    (made, cut) = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(made, WriteCheckpoint)
    assert made.includes == 8
    assert cut == CutJournal(5)


def test_a_resumed_run_whose_journal_was_cut_goes_on_above_its_checkpoint() -> None:
    driver = Driver("")
    driver.commits.resume(5, 0)
    driver.commits.note()
    driver.do_all()
    driver.commits.save("now")
    made = driver.task()
    assert isinstance(made, WriteCheckpoint)
    assert made.includes == 6


def test_a_save_is_made_where_it_was_asked_for() -> None:
    driver = begun()
    driver.contribute("a")
    ticket = driver.commits.save("somebody asked")
    driver.do(TakeStep, WriteRecord, AnnounceRound, WriteCheckpoint, CutJournal)
    (made, _) = driver.do(WriteCheckpoint, CutJournal)
    assert isinstance(made, WriteCheckpoint)
    assert (made.ticket, made.reason, made.required, made.remembered.versions) == (
        ticket,
        "somebody asked",
        False,
        (1,),
    )
    assert driver.commits.save("again") == ticket + 1


def test_a_server_that_stops_saves_what_no_checkpoint_has() -> None:
    driver = begun()
    assert driver.commits.is_saved
    rounds(driver, 2)
    assert not driver.commits.is_saved
    driver.commits.save("it stops")
    driver.do_all()
    assert driver.commits.is_saved
    assert begun(durability="none").commits.is_saved


# --- a disk that refuses ----------------------------------------------------------------------------------------------


def test_a_record_is_retried_until_it_is_written() -> None:
    driver = begun()
    driver.contribute("a")
    driver.do(TakeStep)
    record, pauses = driver.task(), []
    for _ in range(7):
        pauses.append(driver.commits.failed())
        assert driver.task() is record
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    driver.do(WriteRecord, AnnounceRound)


def test_pauses_are_short_again_after_a_success() -> None:
    driver = begun()
    driver.ask(make_join("b"))
    driver.task()
    assert [driver.commits.failed(), driver.commits.failed()] == [0.25, 0.5]
    driver.do(WriteRecord)
    driver.ask(make_join("c"))
    driver.task()
    assert driver.commits.failed() == 0.25


def test_the_first_checkpoint_is_retried() -> None:
    driver = Driver()
    first = driver.task()
    assert driver.commits.failed() == 0.25
    assert driver.task() is first


def test_another_checkpoint_is_dropped_and_due_again_after_the_next_round() -> None:
    driver = begun()
    driver.contribute("a")
    driver.do(*[TakeStep, WriteRecord, AnnounceRound])
    assert isinstance(driver.task(), WriteCheckpoint)
    assert driver.commits.failed() is None
    assert driver.task() is None
    assert rounds(driver, 1, first=2) == [*ROUND, *SAVED]


def test_a_cut_is_dropped() -> None:
    driver = Driver()
    driver.do(WriteCheckpoint)
    assert isinstance(driver.task(), CutJournal)
    assert driver.commits.failed() is None
    assert driver.task() is None


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_server_that_stops_finishes_what_was_decided() -> None:
    driver = begun()
    driver.contribute("a")
    driver.commits.stop()
    assert not driver.commits.has_ended
    driver.do_all()
    assert driver.commits.has_ended
    assert not driver.commits.gave_up


def test_a_server_that_stops_does_not_wait_for_a_broken_disk() -> None:
    driver = begun()
    driver.contribute("a")
    driver.do(TakeStep)
    driver.commits.stop()
    driver.task()
    assert driver.commits.failed() is None
    assert driver.commits.gave_up
    assert driver.commits.has_ended
    assert driver.task() is None
    assert driver.commits.is_saved, "memory is ahead of the disk: nothing of it may be saved"
    driver.commits.save("too late")
    assert driver.task() is None


def test_it_has_not_ended_before_it_is_stopped() -> None:
    driver = begun()
    assert driver.task() is None
    assert not driver.commits.has_ended


# --- checkpoints in a folder ------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_tried_first() -> None:
    assert newest_first({"old": 3, "new": 12, "middle": 7}) == ["new", "middle", "old"]


def test_the_oldest_checkpoints_go_first() -> None:
    serials = {"c": 3, "a": 1, "d": 4, "b": 2}
    assert superseded(serials, 2) == ["a", "b"]
    assert superseded(serials, 4) == superseded({}, 2) == []
    assert superseded(serials, 0) == ["a", "b", "c", "d"]


# --- what goes through unchanged ------------------------------------------------------------------------------------


def test_every_kind_of_request_gets_the_coordinators_answer() -> None:
    driver = begun("a")
    commits, head = driver.commits, driver.head("a")
    beat, record = commits.answer(Heartbeat(**head, step=1, steps_per_second=1.0), driver.now)
    assert (isinstance(beat, HeartbeatAnswer), record) == (True, 0)
    offered, record = commits.answer(make_offer("a"), driver.now)
    assert (isinstance(offered, OfferAnswer), record) == (True, 0)
    done, _ = commits.answer(Control(kind="sync"), driver.now)
    assert isinstance(done, ControlAnswer)
    assert "a" in done.done


def test_a_heartbeat_is_heard_when_it_comes() -> None:
    driver = begun("a")
    driver.now += 3.0
    driver.commits.answer(Heartbeat(**driver.head("a"), step=1, steps_per_second=1.0), driver.now)
    assert driver.coordinator.members.find("a").last_seen == driver.now  # type: ignore[union-attr]


def test_a_resumed_run_takes_over_the_number_of_its_last_record_and_the_size_of_its_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAST_JOURNAL_BYTES", 350)
    monkeypatch.setattr(module, "MODELS_IN_JOURNAL", 0)
    driver = Driver("a")
    driver.commits.resume(5, 0, last_record=8, journal_bytes=200)
    driver.do_all()
    driver.contribute("a")
    names = driver.do_all()
    assert names.count("WriteCheckpoint") == 1  # 200 bytes were there, and each record has 100
    ticket = driver.commits.save("asked")
    task = driver.task()
    assert isinstance(task, WriteCheckpoint)
    assert (task.ticket, task.number, task.required) == (ticket, 0, False)


@pytest.mark.parametrize(("base", "last_record", "includes"), [(0, 0, 1), (5, 0, 6), (5, 8, 9)])
def test_a_resumed_run_counts_from_its_checkpoint_or_the_last_record_behind_it(
    base: int, last_record: int, includes: int
) -> None:
    driver = Driver("")
    driver.commits.resume(base, 0, **({"last_record": last_record} if last_record else {}))
    driver.ask(make_join("a"))
    driver.do_all()
    driver.commits.save("asked")
    task = driver.task()
    assert isinstance(task, WriteCheckpoint)
    assert task.includes == includes  # with the record of the join


def test_the_first_round_of_a_resumed_run_is_followed_by_a_checkpoint_too() -> None:
    driver = Driver("a")
    driver.commits.resume(5, 0)
    driver.do_all()
    driver.contribute("a")
    assert "WriteCheckpoint" in driver.do_all()


def test_the_first_checkpoint_says_why_it_is_made_and_waits_for_nobody() -> None:
    task = Driver("a").task()
    assert isinstance(task, WriteCheckpoint)
    assert task.reason
    assert (task.required, task.ticket) == (True, 0)


def test_a_round_in_which_nothing_is_kept_steps_over_nothing() -> None:
    driver = begun("a", settings={})
    driver.contribute("a")
    driver.commits._accepted.clear()  # gathered and added before
    [step] = driver.do(TakeStep)
    assert isinstance(step, TakeStep)
    assert step.accepted == ()


def test_a_copy_elsewhere_is_no_checkpoint_of_the_run() -> None:
    driver = begun()
    base = driver.commits.base
    ticket = driver.commits.save("somebody asked", "/elsewhere")
    (made,) = driver.do(WriteCheckpoint)
    assert isinstance(made, WriteCheckpoint)
    assert (made.place, made.ticket) == ("/elsewhere", ticket)
    assert driver.task() is None, "the journal is not cut for it"
    assert driver.commits.base == base


def test_a_checkpoint_says_why_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = begun()
    driver.contribute("a")
    *_, periodic = driver.do(TakeStep, WriteRecord, AnnounceRound, WriteCheckpoint)
    driver.do_all()
    monkeypatch.setattr(module, "MOST_RECORDS", 1)
    driver.ask(make_join("b"))
    *_, long = driver.do(WriteRecord, WriteCheckpoint)
    monkeypatch.undo()
    driver.do_all()
    driver.contribute("a", 2, base_version=1)
    driver.do_all()
    for worker in "ab":
        driver.ask(driver.leave_request(worker))
    (end,) = driver.do(WriteCheckpoint)
    reasons = [made.reason for made in (periodic, long, end) if isinstance(made, WriteCheckpoint)]
    assert reasons == ["periodic", "the journal is long", "all workers have left"]


def test_with_checkpoints_alone_a_round_lets_go_whoever_waited_for_an_earlier_note() -> None:
    driver = begun("a", "checkpoint", num_workers=1)
    record = driver.ask(make_join("b"))
    driver.contribute("a")
    driver.do(TakeStep)
    assert driver.commits.written > record > 0


def test_a_run_that_keeps_nothing_makes_no_checkpoint_of_its_own_after_a_save() -> None:
    driver = begun("a", "none", settings={"save_every": 1})
    driver.commits.save("somebody asked")
    assert driver.do_all() == ["WriteCheckpoint", "CutJournal"]
    assert rounds(driver, 2) == ["TakeStep", "AnnounceRound"] * 2


def test_a_checkpoint_waits_until_every_fragment_has_completed_the_round() -> None:
    driver = begun("a", "checkpoint", settings={"save_every": 1}, fragments=2)
    driver.contribute("a")
    assert driver.do_all() == ["TakeStep", "AnnounceRound"]
    driver.contribute("a", fragment=1)
    assert driver.do_all() == ["TakeStep", "AnnounceRound", "WriteCheckpoint", "CutJournal"]


def test_the_first_checkpoint_after_a_start_waits_for_every_fragment_too() -> None:
    driver = begun("a", fragments=2)
    driver.contribute("a")
    assert driver.do_all() == ROUND
    driver.contribute("a", fragment=1)
    assert driver.do_all() == [*ROUND, *SAVED]


def test_a_token_pays_for_what_is_written_of_those_that_come_and_go() -> None:
    driver = begun("", num_workers=2)
    driver.coordinator.quotas = Quotas(QuotaLimits(records=10))
    for start in (1, 2):
        driver.commits.answer(make_join("a", start=start), driver.now, token="site")
        driver.incarnations["a"] = start
        driver.ask(driver.leave_request("a"))
    [worker] = driver.coordinator.members
    assert worker.token == "site"
    with pytest.raises(QuotaExceeded, match=r"worker 'a'.*records in the journal"):
        driver.commits.answer(make_join("a", start=3), driver.now, token="site")
    driver.ask(make_join("b"))
    assert [one.token for one in driver.coordinator.members] == ["site", ""]


# --- leases -----------------------------------------------------------------------------------------------------------


def lease_request(driver: Driver, number: int, name: str = "train", **said: Any) -> Lease:
    dataset = Dataset(name=name, samples=100, unit_samples=1)
    return Lease(**driver.head("a"), dataset=dataset, number=number, want=4, **said)


def test_leases_that_need_a_record_are_paid_for() -> None:
    driver = begun()
    driver.coordinator.quotas = Quotas(QuotaLimits(records=100))
    records = [driver.ask(lease_request(driver, number)) for number in range(1, 41)]  # it says that it holds nothing
    assert len(set(records)) > 35, "what went back and is leased again is written down each time"
    with pytest.raises(QuotaExceeded, match="records in the journal a minute"):
        driver.ask(lease_request(driver, 41))
    assert driver.coordinator.leases.tables["train"].held, "nothing was changed by it"
    driver.now += 60.0
    driver.ask(lease_request(driver, 41))


def test_leases_below_the_mark_cost_nothing() -> None:
    driver = begun()
    driver.coordinator.quotas = Quotas(QuotaLimits(records=100))
    for number in range(1, 26):
        held = driver.coordinator.leases.tables["train"].held.get("a", ()) if number > 1 else ()
        driver.ask(lease_request(driver, number, holds=tuple(held)))
    driver.coordinator.quotas.check("records", "", "a", driver.now, is_newcomer=False)


def test_an_order_to_forget_a_dataset_outlives_a_restart() -> None:
    driver = begun()
    before = driver.ask(lease_request(driver, 1))
    assert driver.ask(Control(kind="forget", dataset="train", reason="a lie")) > before
    assert [(e["dataset"], e["owner"], e["done"]) for e in driver.events("data_forgotten")] == [("train", "a", 0)]
    assert driver.coordinator.leases.remembered() == []
    with pytest.raises(Refused, match="leases no dataset"):
        driver.ask(Control(kind="forget", dataset="train"))
    with pytest.raises(Refused, match="name the dataset"):
        driver.ask(Control(kind="forget"))
