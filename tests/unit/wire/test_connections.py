"""When there is no more room, strangers go: those of the address that has most of them, the oldest first."""

from __future__ import annotations

import socket

import pytest

from outerstep.wire.connections import ADDRESSES, Connection, Connections, group_of
from outerstep.wire.limits import LEAST_STRANGERS, ServiceLimits


class Door:
    """With a clock to turn by hand."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.limits = ServiceLimits(**{"max_connections": 32, **limits})  # type: ignore[arg-type]
        self.connections = Connections(self.limits, lambda: self.now)
        self._sock = socket.socket()

    def knock(self, peer: str) -> Connection | None:
        admission = self.connections.admit(self._sock, peer)
        self.dropped = admission.dropped
        return admission.connection

    def come_in(self, peer: str) -> Connection:
        connection = self.knock(peer)
        assert connection is not None
        return connection

    def workers(self, count: int, peer: str = "10.0.0.1") -> list[Connection]:
        known = []
        for _ in range(count):
            known.append(self.come_in(peer))
            self.connections.greet(known[-1])
        return known


@pytest.mark.parametrize(("most", "strangers"), [(1024, 512), (20, LEAST_STRANGERS), (2, 2)])
def test_strangers_have_half_of_the_room(most: int, strangers: int) -> None:
    assert ServiceLimits(max_connections=most).max_strangers == strangers


def test_however_many_strangers_come_workers_stay_and_come_in() -> None:
    door = Door(max_connections=64)
    workers = door.workers(32)
    for i in range(1000):
        door.now += 0.01
        door.knock(f"192.0.2.{i % 7}")
        assert door.connections.summary()["strangers"] <= 32
    assert all(worker in door.connections.list() for worker in workers)
    door.connections.leave(workers[0])
    assert door.come_in("10.0.0.1")  # and its address has fewer strangers than the others
    assert door.dropped is not None
    assert door.dropped.address != "10.0.0.1"


def test_in_a_rush_from_one_address_who_came_first_is_served_first() -> None:
    door = Door()
    for _ in range(16):
        door.come_in("10.0.0.1")
    assert door.knock("10.0.0.1") is None
    assert door.connections.counts["turned_away"] == 1


def test_who_has_had_time_enough_makes_room_for_the_next_of_its_address() -> None:
    door = Door()
    first, *_ = [door.come_in("10.0.0.1") for _ in range(16)]
    door.now += door.limits.settling_s
    assert door.knock("10.0.0.1") is not None
    assert door.dropped is first
    assert first.is_gone


def test_somebody_else_need_not_wait_for_that() -> None:
    door = Door()
    first, *_ = [door.come_in("192.0.2.1") for _ in range(16)]
    assert door.knock("10.0.0.1") is not None
    assert door.dropped is first


def test_when_all_are_workers_the_newcomer_is_turned_away() -> None:
    door = Door(max_connections=8)
    workers = door.workers(8)
    assert door.knock("10.0.0.2") is None
    assert door.connections.list() == workers


def test_a_token_that_is_no_longer_valid_makes_a_stranger_with_time_of_its_own() -> None:
    door = Door()
    [worker] = door.workers(1)
    door.now = 500.0
    door.connections.doubt(worker)
    assert (worker.is_known, worker.since) == (False, 500.0)
    assert door.connections.summary()["strangers"] == 1
    door.connections.greet(worker)
    assert door.connections.summary()["strangers"] == 0


def test_an_address_that_was_refused_often_has_few_strangers_at_a_time() -> None:
    door = Door(free_refusals=10)
    for _ in range(12):
        door.connections.refusals.note("192.0.2.1")
    taken = [door.knock("192.0.2.1") for _ in range(10)]
    assert sum(connection is not None for connection in taken) == door.limits.doubtful_strangers
    assert door.knock("192.0.2.2") is not None
    door.now += 60.0
    assert not door.connections.refusals.is_doubtful("192.0.2.1")


def test_refusals_are_forgotten_with_time_and_bounded_in_number() -> None:
    door = Door(free_refusals=10)
    refusals = door.connections.refusals
    for _ in range(10_000):
        refusals.note("192.0.2.1")
    door.now += 10.0 / door.limits.refusals_per_s + 1.0  # however many there were
    assert not refusals.is_doubtful("192.0.2.1")
    for i in range(2 * ADDRESSES):
        refusals.note(f"peer {i}")
    assert len(refusals) == ADDRESSES


@pytest.mark.parametrize(
    ("peer", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somebody who has gone", "somebody who has gone"),
    ],
)
def test_what_one_customer_is_given_counts_as_one_address(peer: str, group: str) -> None:
    assert group_of(peer) == group
