"""Who sends what cannot be used is put aside, keeps nobody waiting, and finds the way back."""

from __future__ import annotations

import json

import pytest

from outerstep.coordination.server.membership import FIRST_S, LONGEST_S, OFFENCES, WINDOW_S, Conduct
from outerstep.errors import Conflict, HashMismatch, NotFinite, Quarantined, Refused, UnknownWorker
from outerstep.types import Control
from unit.coordination.builders import TIMEOUT_S, Desk, make_key

NAN = NotFinite("tensor 'wte' holds NaN or Inf")


def send_nan(desk: Desk, worker: str, sequence: int, **changes: int) -> None:
    """As the driver does: all parts are in, it looks inside, and it is refused."""
    answer = desk.offer(worker, sequence, **changes)
    for part in answer.missing:
        desk.put(worker, part, sequence)
    desk.coordinator.reject(make_key(worker, sequence), NAN, desk.now)
    desk.carry_out()


def an_offender(desk: Desk, worker: str = "c") -> Desk:
    for sequence in range(1, OFFENCES + 1):
        send_nan(desk, worker, sequence)
    return desk


# --- one worker's conduct -------------------------------------------------------------------------------------------


def test_the_third_offence_within_the_window_is_one_too_many() -> None:
    conduct = Conduct()
    assert [conduct.offend(NAN, now) for now in (0.0, 10.0, 20.0)] == [False, False, True]
    assert conduct.is_quarantined(20.0 + FIRST_S - 1)
    assert not conduct.is_quarantined(20.0 + FIRST_S)


def test_offences_that_lie_far_apart_are_forgotten() -> None:
    conduct = Conduct()
    assert not any(conduct.offend(NAN, i * 0.6 * WINDOW_S) for i in range(50))


def test_an_offence_a_whole_window_ago_still_counts_and_an_older_one_does_not() -> None:
    conduct, other = Conduct(), Conduct()
    assert [conduct.offend(NAN, now) for now in (0.0, 1.0, WINDOW_S)] == [False, False, True]
    assert [other.offend(NAN, now) for now in (0.0, 1.0, WINDOW_S + 0.1)] == [False, False, False]


def test_the_reason_names_the_last_offences_and_is_as_long_as_a_message_may_be() -> None:
    conduct = Conduct()
    for refusal in (NotFinite("a"), Conflict("b"), NotFinite("c" * 300)):
        conduct.offend(refusal, 0.0)
    begins = "refused for not_finite, conflict, not_finite; the last time because "
    assert conduct.reason == begins + "c" * (256 - len(begins))


def test_a_clean_sheet_holds_nothing() -> None:
    conduct = Conduct()
    for now in (1.0, 2.0, 3.0):
        conduct.offend(NAN, now)
    conduct.clear()
    assert conduct == Conduct()
    assert conduct.remembered(5.0) == {}


def test_what_is_held_against_it_is_remembered_as_ages_and_resumed_on_another_clock() -> None:
    conduct = Conduct()
    for now, refusal in ((10.0, NAN), (20.0, Conflict("other bytes")), (25.0, NAN)):
        conduct.offend(refusal, now)
    facts = conduct.remembered(30.0)
    assert facts == {
        "offences": [[20.0, "not_finite"], [10.0, "conflict"], [5.0, "not_finite"]],
        "total": 3,
        "spells": 1,
        "left_s": FIRST_S - 5.0,
        "reason": conduct.reason,
    }
    again = Conduct.resumed(facts, 100.0)
    assert list(again.offences) == [(80.0, "not_finite"), (90.0, "conflict"), (95.0, "not_finite")]
    assert (again.total, again.spells, again.until) == (3, 1, 100.0 + FIRST_S - 5.0)
    assert again.reason == conduct.reason
    assert again.offences.maxlen == OFFENCES


def test_of_a_spell_that_is_over_no_time_is_left() -> None:
    conduct = Conduct()
    for _ in range(OFFENCES):
        conduct.offend(NAN, 0.0)
    assert conduct.remembered(2 * FIRST_S)["left_s"] == 0.0
    assert not Conduct.resumed(conduct.remembered(2 * FIRST_S), 0.0).is_quarantined(0.0)


def test_an_offence_that_was_none_is_taken_back_the_last_of_its_kind_first() -> None:
    conduct = Conduct()
    for now, refusal in ((1.0, NAN), (2.0, Conflict("other bytes")), (3.0, NAN)):
        conduct.offend(refusal, now)
    conduct.forgive(NAN)
    assert (list(conduct.offences), conduct.total) == ([(1.0, "not_finite"), (2.0, "conflict")], 2)
    conduct.forgive(HashMismatch("of another kind"))
    assert conduct.total == 2


def test_each_spell_is_twice_as_long_up_to_a_limit_and_needs_one_more_offence() -> None:
    conduct, now, spells = Conduct(), 0.0, []
    conduct.offend(NAN, now)
    conduct.offend(NAN, now)
    for _ in range(12):
        assert conduct.offend(NAN, now)
        spells.append(conduct.until - now)
        assert not conduct.offend(NAN, now + 1.0)  # inside, it does not get longer
        now = conduct.until
    assert spells[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert spells[-1] == LONGEST_S


def test_what_is_no_fault_of_the_workers_is_no_offence() -> None:
    desk = Desk("ab")
    for sequence in range(1, 10):
        desk.offer("a", sequence)
        desk.coordinator.reject(make_key("a", sequence), HashMismatch("a byte changed on its way"), desk.now)
    desk.carry_out()
    assert not desk.events("offence")


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.row("F20")
def test_nothing_is_taken_from_who_is_in_quarantine_and_nobody_waits_for_it() -> None:
    desk = Desk("abc")
    desk.contribute("a")
    desk.contribute("b")
    assert desk.closed == []
    an_offender(desk)
    assert desk.closed == [(1, "ab")]  # at once: they waited only for the one that is out
    assert [event["code"] for event in desk.events("offence")] == ["not_finite"] * 3
    [event] = desk.events("quarantine")
    assert (event["worker"], event["seconds"]) == ("c", FIRST_S)
    assert desk.expected() == {"a", "b"}
    with pytest.raises(Quarantined, match=r"'c' is in quarantine for 600 s more: refused for not_finite, not_finite, "
                       r"not_finite; the last time because tensor 'wte'") as told:  # fmt: skip
        desk.offer("c", 4, base_version=1)
    assert "outerstep control pardon c" in told.value.hint
    assert told.value.retry_after_s == FIRST_S
    desk.heartbeat("c")
    assert desk.poll("c", after=0).agreement is not None
    desk.get_part("c", 1)
    desk.contribute("a", 2, base_version=1)
    desk.contribute("b", 2, base_version=1)
    assert desk.version() == 2


def test_no_other_round_wants_it_either() -> None:
    desk = an_offender(Desk("abc", fragments=2, min_workers=2))
    desk.contribute("a", fragment=1)
    assert desk.poll("c").wanted == ()
    assert desk.poll("b").wanted == ((1, 1),)


def test_a_run_of_offenders_alone_waits_and_says_so() -> None:
    desk = an_offender(Desk("c"))
    assert desk.poll("c").stuck
    assert desk.closed == []


def test_what_was_counted_before_stays_and_is_answered_the_same() -> None:
    desk = Desk("abc")
    desk.contribute("c")
    for _ in range(OFFENCES):
        with pytest.raises(Conflict):
            desk.commit("c", flavour="other")
    assert desk.events("quarantine")
    assert desk.offer("c").state == "accepted"
    assert desk.commit("c").version == 1
    desk.contribute("a")
    desk.contribute("b")
    assert desk.closed == [(1, "cab")]


def test_the_same_key_with_other_bytes_is_an_offence() -> None:
    desk = Desk("ab")
    desk.contribute("a")
    for _ in range(OFFENCES):
        with pytest.raises(Conflict):
            desk.commit("a", flavour="other")
    assert desk.events("quarantine")


def test_time_brings_it_back_from_the_next_round_on() -> None:
    desk = an_offender(Desk("abc"))
    desk.later(FIRST_S, alive="abc")
    desk.contribute("a")
    desk.contribute("b")
    assert desk.closed == [(1, "ab")]
    assert desk.expected() == {"a", "b", "c"}
    for worker in "cab":
        desk.contribute(worker, 4, base_version=1)
    send_nan(desk, "c", 5, base_version=2)  # on probation: one is enough
    assert [event["seconds"] for event in desk.events("quarantine")] == [FIRST_S, 2 * FIRST_S]


def test_a_new_process_does_not_end_it_but_begins_with_a_clean_sheet_after_it() -> None:
    desk = an_offender(Desk("abc"))
    desk.join("c", start=2)
    with pytest.raises(Quarantined):
        desk.offer("c", 4)
    desk.later(FIRST_S, alive="abc")
    desk.join("c", start=3)
    send_nan(desk, "c", 5)
    assert len(desk.events("quarantine")) == 1


def test_an_operator_can_pardon_it_also_when_it_is_away() -> None:
    desk = an_offender(Desk("abc"))
    desk.leave("c")
    answer = desk.coordinator.control(Control(kind="pardon", worker_id="c", reason="a bad disk"), desk.now)
    assert answer.done == "c has a clean slate and takes part again from the next round"
    desk.carry_out()
    assert desk.events("pardon") == [{"worker": "c", "offences": 3, "reason": "a bad disk"}]
    desk.join("c")
    desk.contribute("c", 4)
    with pytest.raises(UnknownWorker, match="no worker 'nobody' is known; live: a, b, c"):
        desk.coordinator.control(Control(kind="pardon", worker_id="nobody"), desk.now)
    with pytest.raises(Refused, match="pardon needs a worker id"):
        desk.coordinator.control(Control(kind="pardon"), desk.now)


def test_it_outlives_the_server_and_the_time_goes_on_where_it_was() -> None:
    desk = an_offender(Desk("abc"))
    desk.later(100.0, alive="abc")
    desk.contribute("a", norm=1.0)
    desk.contribute("b", norm=1.0)
    facts = json.loads(json.dumps(desk.coordinator.remember().facts))
    again = Desk("", num_workers=3)
    again.now = 5.0
    again.incarnations = dict.fromkeys("abc", 1)
    again.coordinator.resume(desk.coordinator.remember().ledger, {}, facts, again.now)
    assert again.expected() == {"a", "b"}
    assert again.coordinator.fragments[0].screen.rounds == desk.coordinator.fragments[0].screen.rounds
    again.join("c")
    with pytest.raises(Quarantined, match="for 500 s more") as told:
        again.offer("c", 4, base_version=0)
    assert told.value.retry_after_s == FIRST_S - 100.0
    again.later(FIRST_S - 100.0)
    again.join("c")
    again.offer("c", 4, base_version=0)
    assert TIMEOUT_S < FIRST_S
