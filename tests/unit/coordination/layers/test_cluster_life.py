"""The life of a cluster in the layer above, as what its leader does moves it."""

from __future__ import annotations

from outerstep.coordination.layers.lifecycle import Happening
from outerstep.coordination.layers.machine import ClusterMachine, RecordFacts
from outerstep.coordination.layers.tasks import LetGo, MoveBelow, TakeRounds
from unit.coordination.layers.test_cluster_machine import at_rest, in_an_exchange


def settle(machine: ClusterMachine) -> None:
    """Whatever is left to do until it waits."""
    while machine.next() is not None:
        machine.done()


def exchange(machine: ClusterMachine, *, deferred: int = 0, moved: bool = True) -> None:
    machine.round_closed(exchanges_next=True)
    while not isinstance(machine.next(), TakeRounds):
        machine.done()
    machine.exchanged([0] if moved else [], deferred=deferred)
    settle(machine)


def test_a_cluster_is_in_init_until_it_has_joined_the_layer_above() -> None:
    assert ClusterMachine(60.0).life.place == "INIT"
    assert at_rest().life.place == "TRAINING (compute)"


def sent_and_let_go(machine: ClusterMachine) -> None:
    machine.sent()
    while not isinstance(machine.next(), LetGo):
        machine.done()
    machine.done()


def test_an_exchange_is_a_global_sync_as_its_leader_goes_through_it() -> None:
    machine = in_an_exchange()
    machine.sent()
    assert machine.life.place == "TRAINING (pseudo-gradient)", "its record is being kept"
    while not isinstance(machine.next(), LetGo):
        machine.done()
    machine.done()
    assert machine.life.place == "TRAINING (global all-reduce)"
    machine.next()
    machine.exchanged([0], deferred=0)
    assert machine.life.place == "TRAINING (broadcast)", "it is not in the layer below yet"
    while not isinstance(machine.next(), MoveBelow):
        machine.done()
    assert machine.life.place == "TRAINING (broadcast)"
    machine.done()
    assert machine.life.place == "TRAINING (global commit)", "members wait still"
    settle(machine)
    assert machine.life.place == "TRAINING (compute)"


def test_what_travels_while_members_train_is_still_under_way() -> None:
    """As with a delay: what comes of it is adopted in a later exchange."""
    machine = in_an_exchange()
    sent_and_let_go(machine)
    machine.next()
    machine.exchanged([], deferred=0)
    settle(machine)
    assert machine.life.place == "TRAINING (global all-reduce)"
    exchange(machine)
    assert machine.life.place == "TRAINING (compute)"


def test_while_nobody_above_answers_the_cluster_trains_and_waits_for_another_global_group() -> None:
    machine = at_rest()
    exchange(machine, deferred=1, moved=False)
    assert machine.life.place == "TRAINING (reconfigure globally)"
    exchange(machine, deferred=1, moved=False)
    assert machine.life.place == "TRAINING (reconfigure globally)", "a round without an exchange"
    exchange(machine, deferred=1)
    assert machine.life.place == "TRAINING (compute)"


def test_nobody_answers_in_the_middle_of_an_exchange() -> None:
    for lets_go in (False, True):
        machine = in_an_exchange()
        machine.sent()
        if lets_go:
            sent_and_let_go(machine)
        machine.life.exchanged(answered=False, moved=False)
        assert machine.life.place == "TRAINING (reconfigure globally)"
        assert not machine.life.unclear


def test_whoever_leads_next_takes_an_idle_life_up() -> None:
    machine = ClusterMachine(60.0)
    machine.began(is_new=False)
    machine.next()
    machine.found(RecordFacts(serial=7, moved={0: 6}, has_joined=True), {0: 6})
    assert machine.life.place == "IDLE"
    machine.next()
    machine.restored([], rounds=0)
    machine.next()
    machine.joined([], unsettled=False)
    assert machine.life.place == "TRAINING (compute)"


def test_a_cluster_that_has_lost_the_layer_above_for_good_stands_idle() -> None:
    for machine in (at_rest(), in_an_exchange()):
        machine.lost("fenced")
        assert machine.life.place == "IDLE"
    rolled_back = at_rest()
    exchange(rolled_back, deferred=1, moved=False)
    rolled_back.lost("kicked")
    assert rolled_back.life.place == "IDLE"


def test_a_cluster_that_stops_drains_and_leaves() -> None:
    machine = at_rest()
    machine.stop()
    machine.next()
    assert machine.life.place == "DRAINING (notice others)"
    machine.exchanged([0], deferred=0)
    assert machine.life.place == "DRAINING (last commit)"
    settle(machine)
    assert machine.is_over
    assert machine.life.place == "EXIT"


def test_a_cluster_that_stops_before_it_has_joined_is_gone() -> None:
    machine = ClusterMachine(60.0)
    machine.stop()
    assert machine.next() is None
    assert machine.life.place == "EXIT"


def test_what_the_table_does_not_know_is_kept_and_its_place_is_not_shown() -> None:
    machine = at_rest()
    machine.life._feed(Happening.LEFT)
    assert machine.life.place == ""
    assert machine.life.unclear == "left cannot happen to a group in TRAINING (compute)"
    machine.life.lost()
