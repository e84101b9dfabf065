"""Orders in the answers to heartbeats: each is obeyed once, however often it comes."""

from __future__ import annotations

from outerstep.coordination.worker.exchange import OrderInbox, Orders, is_evicted
from outerstep.errors import StaleRound, UnknownWorker
from outerstep.types import Command, HeartbeatAnswer


def answer(*commands: Command, sync_every: int | None = None) -> HeartbeatAnswer:
    return HeartbeatAnswer(sync_round=0, sync_every=sync_every, commands=commands)


SYNC = Command(id=1, kind="sync", reason="now")
DRAIN = Command(id=2, kind="drain")


def test_nothing_is_asked_before_the_first_answer() -> None:
    inbox = OrderInbox()
    assert inbox.take() == Orders()
    assert inbox.received == set()


def test_orders_are_taken_once_and_the_own_h_stays() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(SYNC, DRAIN, sync_every=7), ())
    assert inbox.take() == Orders(sync_every=7, drain="drain", sync="now")
    assert inbox.take() == Orders(sync_every=7)


def test_a_command_that_comes_again_is_not_obeyed_again() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(SYNC), ())
    inbox.take()
    inbox.heard(answer(SYNC), ())  # our "got it" was lost
    assert inbox.take() == Orders()
    assert inbox.received == {1}


def test_nor_when_it_comes_after_the_server_was_told() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(SYNC), ())
    inbox.take()
    inbox.heard(answer(SYNC), (1,))  # the answer crossed the "got it"
    assert inbox.take() == Orders()
    assert inbox.received == {1}
    inbox.heard(answer(), (1,))
    assert inbox.received == set()


def test_what_was_not_taken_yet_is_kept_beside_what_comes_later() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(SYNC, sync_every=3), ())
    inbox.heard(answer(DRAIN, sync_every=4), (1,))
    assert inbox.take() == Orders(sync_every=4, drain="drain", sync="now")


def test_an_answer_without_commands_says_the_own_h_too() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(sync_every=7), ())
    assert inbox.take() == Orders(sync_every=7)
    inbox.heard(answer(), ())
    assert inbox.take() == Orders()


def test_an_order_to_lead_names_the_leader_beside_the_other_orders() -> None:
    inbox = OrderInbox()
    inbox.heard(answer(DRAIN, Command(id=3, kind="lead", leader="b")), ())
    inbox.heard(answer(Command(id=4, kind="lead")), ())  # of an older server, which names nobody
    assert inbox.take() == Orders(drain="drain", leader="b")
    assert inbox.take() == Orders()


def test_a_worker_that_was_given_up_joins_again_unless_it_has_left() -> None:
    assert is_evicted(UnknownWorker("no worker 'a'"), has_left=False)
    assert not is_evicted(UnknownWorker("no worker 'a'"), has_left=True)
    assert not is_evicted(StaleRound("closed"), has_left=False)
    assert not is_evicted(answer(), has_left=False)
