"""Who a worker is to its server, and what it goes by after joining again."""

from __future__ import annotations

import pytest

from outerstep.coordination.worker.exchange import (
    Outcome,
    Sending,
    Session,
    is_forgotten,
    lost_late,
    overtaken,
    sent_along,
    stays_late,
)
from outerstep.coordination.worker.machine import Work
from outerstep.types import JoinAnswer, JoinedFragment
from unit.coordination.builders import MANIFEST, RUN, make_agreement, make_join, make_offer, make_plan


def joined(last_sequence: int = 5, counted_in: int = 9) -> Session:
    session = Session(make_join("a"))
    state = JoinedFragment(version=9, last_sequence=last_sequence, counted_in=counted_in)
    other = JoinedFragment(version=1, last_sequence=70, counted_in=90)
    session.answer = JoinAnswer(
        run_id=RUN, incarnation=1, plan=make_plan(2), manifest=MANIFEST, fragments=(other, state)
    )
    return session


@pytest.mark.parametrize(("used", "following"), [(0, 6), (5, 6), (7, 8)])
def test_a_new_sequence_follows_all_that_the_worker_used_and_the_server_took(used: int, following: int) -> None:
    assert joined().next_sequence(1, used) == following


def test_a_worker_that_was_overtaken_asks_for_the_agreement_with_what_the_server_took_last() -> None:
    assert joined().catching_up(1, overtaken=True) == (5, 8)


def test_any_other_claims_nothing_and_takes_the_newest() -> None:
    assert joined().catching_up(1, overtaken=False) == (None, -1)


class Sent:
    """What a sender keeps of a contribution; `sequence` None: it sends none of it."""

    def __init__(self, sequence: int | None) -> None:
        self.sending = Sending(make_offer("a", sequence=sequence), {}) if sequence is not None else None


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("earlier_lost", [True, False])
def test_a_late_contribution_is_lost_if_its_own_exchange_or_the_next_says_so(counted: bool, earlier_lost: bool) -> None:
    outcome, late = Outcome(make_agreement(1), counted=counted, earlier_lost=earlier_lost), Sent(4)
    assert lost_late(late, Sent(4), outcome) is (None if counted else late)
    assert lost_late(late, Sent(5), outcome) is (late if earlier_lost else None)


def test_where_nothing_was_sent_nothing_is_lost() -> None:
    lost = Outcome(make_agreement(1), counted=False, earlier_lost=True)
    assert lost_late(None, Sent(4), lost) is None
    assert lost_late(Sent(None), Sent(4), lost) is None
    assert lost_late(Sent(4), Sent(None), lost) is None


def test_a_late_contribution_goes_along_with_the_next_but_not_with_itself() -> None:
    late = Sent(4)
    assert sent_along(late, make_offer("a", sequence=5)) is late
    assert sent_along(late, make_offer("a", sequence=4)) is None
    assert sent_along(Sent(None), make_offer("a", sequence=5)) is None
    assert sent_along(None, make_offer("a", sequence=5)) is None


@pytest.mark.parametrize(("counted_in", "stays"), [(0, False), (6, False), (7, False), (8, True)])
def test_a_contribution_stays_late_until_the_agreement_in_hand_holds_it(counted_in: int, stays: bool) -> None:
    assert stays_late(counted_in, version=7) is stays


def test_work_is_added_and_subtracted_number_by_number() -> None:
    assert Work(5, 40, 300) + Work(2, 10, 100) == Work(7, 50, 400)
    assert Work(5, 40, 300) - Work(2, 10, 100) == Work(3, 30, 200)


def test_a_state_is_overtaken_where_the_server_has_a_later_contribution() -> None:
    assert overtaken([3, 3, 3], [2, 3, 4]) == {2}


def test_a_late_contribution_is_forgotten_by_a_server_that_has_only_earlier_ones() -> None:
    assert [is_forgotten(5, last) for last in (4, 5, 6)] == [True, False, False]
