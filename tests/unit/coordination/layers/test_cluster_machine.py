"""What a cluster's leader does next, and what it must not do yet."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.layers.leadership import MemberInSight, who_leads
from outerstep.coordination.layers.machine import AGAIN_S, LAST_LOOKS, ClusterMachine, RecordFacts
from outerstep.coordination.layers.tasks import (
    ContributeRest,
    EndBelow,
    FollowBelow,
    GoAlone,
    JoinAbove,
    KeepRecord,
    LeaveAbove,
    LetGo,
    MarkMoved,
    MoveBelow,
    ReadRecord,
    ReleaseMembers,
    Rest,
    Restore,
    SettleAbove,
    TakeRest,
    TakeRounds,
    Withdraw,
)


def at_rest(wait_s: float = 60.0) -> ClusterMachine:
    """Joined anew, with nothing to do."""
    machine = ClusterMachine(wait_s)
    machine.began(is_new=False)
    assert machine.next() == ReadRecord()
    machine.found(None, {0: 0})
    assert machine.next() == JoinAbove(resumes=False)
    machine.joined([], unsettled=False)
    assert machine.next() == KeepRecord()
    machine.done()
    assert machine.next() is None
    assert machine.is_idle
    return machine


def in_an_exchange() -> ClusterMachine:
    machine = at_rest()
    machine.round_closed(exchanges_next=True)
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() == TakeRounds(1)
    return machine


# --- the beginning ----------------------------------------------------------------------------------------------------


def test_a_new_cluster_writes_down_where_it_begins_before_it_joins() -> None:
    machine = ClusterMachine(60.0)
    assert machine.next() is None, "it is not known what is trained"
    machine.began(is_new=True)
    machine.next()
    machine.found(None, {0: 0, 1: 0})
    assert machine.next() == KeepRecord()
    machine.done()
    assert machine.next() == JoinAbove(resumes=False)
    machine.joined([0, 1], unsettled=False)  # what the layer above has agreed on is in S
    seen = []
    while (task := machine.next()) is not None:
        seen.append(task)
        machine.done()
    assert seen == [KeepRecord(), MoveBelow(1, (0, 1)), FollowBelow(), KeepRecord()]
    assert (machine.serial, machine.moved) == (2, {0: 1, 1: 1})


@pytest.mark.parametrize(
    ("known", "is_in", "moving"),
    [({0: 6, 1: 6}, (), [0, 1]), ({0: 7, 1: 6}, (0,), [1]), ({0: 7, 1: 7}, (0, 1), [])],
)
def test_a_move_that_the_layer_below_knows_is_not_made_again(
    known: dict[int, int], is_in: tuple[int, ...], moving: list[int]
) -> None:
    """The leader before died after it had written down move 7."""
    machine = ClusterMachine(60.0)
    machine.began(is_new=False)
    machine.next()
    machine.found(RecordFacts(serial=7, moved={0: 6, 1: 6}, has_joined=True), known)
    assert machine.next() == Restore(is_in)
    machine.restored(moving, rounds=2)
    if moving:
        assert machine.next() == MoveBelow(7, tuple(moving))
        machine.done()
        assert machine.next() == MarkMoved()
        machine.done()
    assert machine.next() == JoinAbove(resumes=True)
    machine.joined([], unsettled=True)
    assert machine.next() == SettleAbove(), "it has joined: whoever spoke before is fenced, so now it may ask"
    machine.exchanged([], deferred=0)
    assert machine.next() == FollowBelow(), "two rounds have closed since the record"
    machine.done()
    assert machine.next() == TakeRounds(2)
    machine.exchanged([], deferred=0)
    assert machine.next() == ReleaseMembers()
    machine.done()
    assert machine.next() == KeepRecord(), "a record in which S has what is no step yet would lose it"


def test_a_record_of_another_past_is_not_resumed() -> None:
    machine = ClusterMachine(60.0)
    machine.began(is_new=False)
    machine.next()
    machine.found(RecordFacts(serial=8, moved={0: 7}, has_joined=True), {0: 6})
    assert machine.next() == JoinAbove(resumes=False)
    assert machine.serial == 7


def test_while_nobody_answers_above_it_reads_again_and_tries_again() -> None:
    machine = ClusterMachine(60.0)
    machine.began(is_new=False)
    machine.next()
    machine.found(None, {0: 0})
    for _ in range(3):
        assert machine.next() == JoinAbove(resumes=False)
        machine.failed("nobody is there")
        assert machine.next() == Rest(AGAIN_S)
        machine.done()
        assert machine.next() == ReadRecord()
        machine.found(None, {0: 0})
    machine.stop()
    assert machine.next() is None
    assert machine.is_over


# --- the record comes first -------------------------------------------------------------------------------------------


def test_nothing_is_let_go_before_the_record_is_kept() -> None:
    machine = in_an_exchange()
    machine.sent()
    assert machine.next() == KeepRecord()
    machine.sent()  # another fragment, while the record was made
    machine.done()
    assert machine.next() == KeepRecord(), "the second is not in it"
    machine.failed("the disk is full")
    assert machine.next() == Rest(AGAIN_S)
    machine.done()
    assert machine.next() == KeepRecord()
    machine.done()
    assert machine.next() == LetGo()
    machine.done()
    assert not machine.is_offering
    machine.exchanged([0], deferred=0)
    assert machine.next() == KeepRecord(), "and T does not move before it either"
    machine.failed("the disk is full")
    assert machine.next() == Rest(AGAIN_S)
    machine.done()
    assert machine.next() == KeepRecord()
    machine.done()
    assert machine.next() == MoveBelow(1, (0,))


@pytest.mark.parametrize("offering", [True, False])
def test_a_cluster_that_stops_and_cannot_keep_its_record_goes_without_contributing(offering: bool) -> None:
    machine = in_an_exchange()
    if offering:
        machine.sent()
    else:
        machine.exchanged([0], deferred=0)
    machine.stop()
    assert machine.next() == KeepRecord()
    machine.failed("the disk is full")
    if offering:
        assert machine.next() == Withdraw("the disk is full")
        machine.done()
        machine.failed("withdrawn")  # the exchange
    assert machine.next() == GoAlone("the disk is full")
    machine.done()
    assert machine.is_over


def test_who_was_fenced_in_the_middle_of_an_exchange_speaks_no_more() -> None:
    machine = in_an_exchange()
    machine.sent()
    machine.lost("another instance has joined")
    assert machine.next() == Withdraw("another instance has joined")
    machine.done()
    machine.failed("withdrawn")
    assert machine.next() == GoAlone("another instance has joined")
    assert machine.round_closed(exchanges_next=True) == 0.0


@pytest.mark.parametrize("is_kept", [True, False])
def test_who_is_fenced_while_the_record_is_being_kept_withdraws_whatever_becomes_of_it(is_kept: bool) -> None:
    machine = in_an_exchange()
    machine.sent()
    assert machine.next() == KeepRecord()
    machine.lost("another instance has joined")
    if is_kept:
        machine.done()
    else:
        machine.failed("this replica does not lead its cluster any more")
    assert machine.next() == Withdraw("another instance has joined")
    machine.done()
    assert not machine.is_offering
    machine.failed("withdrawn")
    assert machine.next() == GoAlone("another instance has joined")


# --- members wait, but not for ever -----------------------------------------------------------------------------------


def test_members_wait_for_the_round_that_begins_an_exchange_and_for_no_other() -> None:
    machine = at_rest()
    assert machine.round_closed(exchanges_next=False) == 0.0
    assert machine.round_closed(exchanges_next=True) == 0.0, "the leader has not caught up"
    machine.next()
    machine.done()
    assert machine.next() == TakeRounds(2)
    machine.exchanged([], deferred=0)
    assert machine.next() == ReleaseMembers()
    machine.done()
    assert machine.round_closed(exchanges_next=True) == 60.0


def test_members_do_not_wait_while_the_layer_above_does_not_answer() -> None:
    machine = in_an_exchange()
    machine.exchanged([], deferred=1)
    machine.next()
    machine.done()
    assert machine.round_closed(exchanges_next=True) == 0.0
    machine.next()
    machine.done()
    machine.next()
    machine.exchanged([], deferred=1)
    machine.next()
    machine.done()
    assert machine.round_closed(exchanges_next=True) == 60.0, "it has answered"


def test_who_gets_ahead_of_an_exchange_waits_until_the_leader_has_caught_up() -> None:
    """Otherwise the next exchange would begin behind the members, too, and so would each one after it."""
    machine = at_rest()
    machine.round_closed(exchanges_next=False)
    machine.next()
    machine.done()
    assert machine.next() == TakeRounds(1)
    assert machine.round_closed(exchanges_next=False) == 0.0, "nothing is exchanged yet"
    machine.sent()
    assert machine.round_closed(exchanges_next=False) == 60.0
    assert machine.round_closed(exchanges_next=False) == 0.0, "told once"
    for task in (KeepRecord(), LetGo()):
        assert machine.next() == task
        machine.done()
    machine.exchanged([0], deferred=0)
    for handed_down in (KeepRecord(), MoveBelow(1, (0,)), FollowBelow()):
        assert machine.next() == handed_down
        machine.done()
    assert not machine.is_idle
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() == TakeRounds(3), "members still wait"
    machine.exchanged([], deferred=0)
    assert machine.next() == ReleaseMembers()
    machine.done()
    assert machine.is_idle
    assert machine.round_closed(exchanges_next=True) == 60.0, "in step again"


def test_members_whose_wait_ran_out_are_told_to_wait_for_the_next_exchange_anew() -> None:
    machine = at_rest()
    assert machine.round_closed(exchanges_next=True) == 60.0
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() == TakeRounds(1)
    machine.sent()
    assert machine.round_closed(exchanges_next=False) == 0.0, "they have waited for this one"
    machine.next()
    machine.done()
    machine.next()
    machine.done()
    machine.exchanged([], deferred=0)
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() == TakeRounds(1)
    machine.sent()
    assert machine.round_closed(exchanges_next=False) == 60.0


@pytest.mark.parametrize("why", ["nobody answers", "stopped", "told to end", "members never wait"])
def test_members_are_released_before_the_leader_catches_up_where_nobody_should_wait(why: str) -> None:
    machine = at_rest(0.0 if why == "members never wait" else 60.0)
    machine.round_closed(exchanges_next=True)
    machine.next()
    machine.done()
    assert machine.next() == TakeRounds(1)
    machine.round_closed(exchanges_next=False)
    if why == "stopped":
        machine.stop()
    machine.exchanged([], deferred=int(why == "nobody answers"), told_to_end=why == "told to end")
    assert machine.next() == ReleaseMembers()


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_last_member_leaves_and_what_there_is_goes_up() -> None:
    machine = at_rest()
    machine.round_closed(exchanges_next=False)
    machine.emptied()
    machine.next()
    machine.done()
    machine.next()
    machine.exchanged([], deferred=0)
    machine.next()
    machine.done()
    assert machine.next() == ContributeRest()
    machine.exchanged([0], deferred=0)
    for _ in range(2):
        machine.next()
        machine.done()
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() is None
    machine.stop()
    assert machine.next() == LeaveAbove()
    machine.exchanged([], deferred=0)
    assert machine.next() is None
    assert machine.is_over
    assert not machine.failure


@pytest.mark.parametrize("empty_after", [3, None])
def test_a_run_above_that_ends_ends_the_one_below_first(empty_after: int | None) -> None:
    """What the members bring last goes up before the cluster leaves; but it does not wait for ever."""
    machine = in_an_exchange()
    machine.exchanged([], deferred=0, told_to_end=True)
    seen, looks = [], 0
    while (task := machine.next()) is not None:
        if isinstance(task, Rest):
            looks += 1
            if looks == empty_after:
                machine.round_closed(exchanges_next=False)
                machine.emptied()
        else:
            seen.append(task)
        if isinstance(task, LeaveAbove | TakeRounds):
            machine.exchanged([], deferred=0, told_to_end=True)
        else:
            machine.done()
    last = [FollowBelow(), TakeRounds(1), ReleaseMembers()] if empty_after else []
    assert seen == [ReleaseMembers(), EndBelow(), *last, LeaveAbove()]
    assert looks == (empty_after or LAST_LOOKS)
    assert machine.is_over


def test_rounds_of_other_fragments_after_the_last_of_the_first_go_up_too() -> None:
    machine = at_rest()
    machine.other_closed()
    assert machine.next() is None
    machine.stop()
    assert machine.next() == FollowBelow()
    machine.done()
    assert machine.next() == TakeRest()
    machine.exchanged([], deferred=0)
    assert machine.next() == ReleaseMembers()
    machine.done()
    assert machine.next() == LeaveAbove()


# --- who leads --------------------------------------------------------------------------------------------------------


def test_the_lowest_name_that_reaches_the_layer_above_leads() -> None:
    members = [MemberInSight("c"), MemberInSight("b"), MemberInSight("a", reaches_above=False)]
    assert who_leads(members) == "b"
    assert who_leads(members, named="c") == "c"
    assert who_leads(members, named="a") == "b", "whom the route names does not get through"
    assert who_leads(members[2:]) == "a", "somebody must go on trying"
    assert who_leads([]) is None


def test_whoever_leads_goes_on_until_it_leaves_is_cut_off_or_is_slow_by_far() -> None:
    def led(rates: dict[str, float], leading: str = "b", **said: Any) -> str | None:
        return who_leads([MemberInSight(name, bytes_per_s=rate) for name, rate in rates.items()], "", leading, **said)

    assert led({"a": 0.0, "b": 0.0}) == "b", "though a lower name is there"
    assert led({"a": 155.0, "b": 100.0}) == "b"
    assert led({"a": 157.0, "b": 100.0}) == "a"
    assert led({"a": 157.0, "b": 100.0}, compares_lines=False) == "b"
    assert led({"a": 9e9, "b": 1e9}) == "b", "both are fast enough"
    assert led({"a": 9e9, "b": 0.0}) == "b", "what is not known is not slow"
    assert led({"c": 200.0, "a": 200.0, "b": 1.0}) == "a", "of equals the first"
    leaving = [MemberInSight("b", leaves=True), MemberInSight("c"), MemberInSight("d")]
    assert who_leads(leaving, leading="b") == "c"
    assert who_leads(leaving, named="b", leading="b") == "c"
    assert who_leads(leaving[:1], leading="b") == "b", "all of them leave"
    assert who_leads([MemberInSight("a", reaches_above=False), MemberInSight("b")], leading="a") == "b"
