"""Orders on their way to workers."""

from outerstep.coordination.server.membership import Membership
from outerstep.types import Command
from unit.coordination.builders import TIMEOUT_S, make_heartbeat, make_join


def members() -> Membership:
    made = Membership(heartbeat_timeout_s=TIMEOUT_S)
    for worker in "abc":
        made.join(make_join(worker), 0.0)
    return made


def pending(here: Membership, worker: str = "a") -> list[Command]:
    return list(here.heard(make_heartbeat(worker), 0.0).commands.values())


def acknowledge(here: Membership, *ids: int, worker: str = "a") -> None:
    here.heard(make_heartbeat(worker, acknowledged=ids), 0.0)


def kinds(here: Membership, worker: str = "a") -> list[str]:
    return [command.kind for command in pending(here, worker)]


def test_an_order_is_pending_until_it_is_acknowledged() -> None:
    here = members()
    here.order("a", "drain", "maintenance")
    [order] = pending(here)
    assert (order.kind, order.reason) == ("drain", "maintenance")
    assert pending(here) == [order]
    acknowledge(here, order.id)
    assert pending(here) == []


def test_the_same_order_twice_is_one_order_while_it_is_pending() -> None:
    here = members()
    here.order("a", "sync", "once")
    [first] = pending(here)
    here.order("a", "sync", "again")
    assert pending(here) == [first]
    acknowledge(here, first.id)
    here.order("a", "sync", "later")
    [second] = pending(here)
    assert second.id > first.id


def test_orders_come_in_the_order_they_were_given() -> None:
    here = members()
    here.order("a", "sync", "")
    here.order("a", "drain", "")
    assert kinds(here) == ["sync", "drain"]


def test_every_worker_has_its_own() -> None:
    here = members()
    here.order("a", "drain", "")
    here.order("b", "drain", "")
    ids = {command.id for worker in "ab" for command in pending(here, worker)}
    assert len(ids) == 2
    acknowledge(here, *ids)  # nobody acknowledges for somebody else
    assert (kinds(here, "a"), kinds(here, "b")) == ([], ["drain"])
    assert kinds(here, "c") == []


def test_a_worker_that_is_gone_has_nothing_to_obey() -> None:
    here = members()
    here.order("a", "drain", "")
    worker = here.find("a")
    assert worker is not None
    here.gone(worker)
    here.gone(worker)
    here.join(make_join("a"), 1.0)
    assert kinds(here) == []


def test_acknowledging_what_was_never_ordered_changes_nothing() -> None:
    here = members()
    acknowledge(here, 1, 2)
    here.order("a", "drain", "")
    acknowledge(here, 999)
    assert kinds(here) == ["drain"]


def test_what_was_ordered_for_a_reason_that_passed_is_withdrawn() -> None:
    here = members()
    here.order("a", "drain", "the budget is spent")
    here.order("a", "sync", "an operator asked for it")
    here.order("b", "drain", "the budget is spent")
    here.withdraw("the budget is spent")
    assert (kinds(here, "a"), kinds(here, "b")) == (["sync"], [])
