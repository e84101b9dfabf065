"""Next to nothing is too slow; a bad link is not. The clock is turned by hand, the bytes are real."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from outerstep.wire.connections import Connection, Connections
from outerstep.wire.limits import ServiceLimits
from outerstep.wire.pace import Pace
from outerstep.wire.sockets import moved_bytes
from support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")

LOOK_S = 5.0
LIMITS = ServiceLimits()


class Peer:
    """A connection inside a request, and somebody at its other end."""

    def __init__(self, listener: socket.socket) -> None:
        self.now = 0.0
        self.connections = Connections(LIMITS, lambda: self.now)
        self.pace = Pace(self.connections, LIMITS, lambda: self.now)
        self.far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        admitted = self.connections.admit(near, "127.0.0.1").connection
        assert admitted is not None
        self.near: Connection = admitted
        self.connections.greet(self.near)
        self.near.request, self.near.waits = 1, "in"
        self.pace.look(self.connections.list())

    @property
    def is_cut(self) -> bool:
        return bool(self.connections.counts)

    def send(self, count: int, *, read: bool = True) -> None:
        before = moved_bytes(self.near.sock)
        assert before is not None
        self.far.sendall(bytes(count))
        wait_until(lambda: (moved_bytes(self.near.sock) or 0) == before + count)
        if read and count:
            self.near.sock.recv(count, socket.MSG_WAITALL)

    def look(self) -> None:
        self.now += LOOK_S
        self.pace.look(self.connections.list())

    def close(self) -> None:
        self.far.close()
        self.near.sock.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Peer(listener)
        yield made
        made.close()


def looks_until_cut(peer: Peer, count: int, limit: int = 1000) -> int:
    for look in range(1, limit):
        peer.send(count)
        peer.look()
        if peer.is_cut:
            return look
    raise AssertionError("it was never cut")


@pytest.mark.row("F17")
@pytest.mark.parametrize("per_look", [0, 1, 5, 100])
def test_nothing_or_a_byte_a_second_is_cut_after_a_window(peer: Peer, per_look: int) -> None:
    assert looks_until_cut(peer, per_look) == LIMITS.window_s / LOOK_S
    assert peer.connections.counts == {"slow_closed": 1}
    assert peer.far.recv(1) == b""


@pytest.mark.parametrize("transfers", [1, 4, 16])
def test_a_link_of_100_kbit_is_never_cut_however_many_transfers_share_it(peer: Peer, transfers: int) -> None:
    per_look = int(100e3 / 8 * LOOK_S / transfers)
    for _ in range(200):
        peer.send(per_look)
        peer.look()
    assert not peer.is_cut


def test_a_link_that_is_silent_for_most_of_a_window_is_not_cut(peer: Peer) -> None:
    for look in range(240):
        peer.send(LIMITS.least_bytes if look % 11 == 0 else 0)
        peer.look()
    assert not peer.is_cut


def test_the_time_we_take_ourselves_is_not_the_peers(peer: Peer) -> None:
    peer.send(1000, read=False)  # it lies there, and we do not read it
    for _ in range(100):
        peer.look()
    peer.near.waits = ""  # the answer is being made
    for _ in range(100):
        peer.look()
    peer.near.waits = "out"  # we mean to send, and have not begun
    for _ in range(100):
        peer.look()
    assert not peer.is_cut


def test_who_does_not_take_its_answer_is_cut(peer: Peer) -> None:
    peer.near.waits = "out"
    peer.near.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while peer.near.sock.send(bytes(1 << 20)):
            pass
    for _ in range(2 * int(LIMITS.window_s / LOOK_S)):
        peer.look()
        if peer.is_cut:
            break
    assert peer.connections.counts == {"slow_closed": 1}


def test_each_request_has_a_window_of_its_own(peer: Peer) -> None:
    for _ in range(100):
        peer.near.request += 1  # small ones, one after the other
        peer.send(10)
        peer.look()
    assert not peer.is_cut


def test_between_requests_only_the_limit_on_idleness_counts(peer: Peer) -> None:
    peer.near.idle_since, peer.near.waits = peer.now, "in"
    while peer.now < LIMITS.idle_s:
        peer.send(1)  # a record that never ends, say
        peer.look()
        assert not peer.is_cut
    peer.look()
    assert peer.connections.counts == {"idle_closed": 1}


def test_a_stranger_has_its_time_and_no_more_whatever_it_sends(peer: Peer) -> None:
    peer.connections.doubt(peer.near)
    while peer.now < LIMITS.stranger_s:
        peer.send(10_000)
        peer.look()
        assert not peer.is_cut
    peer.look()
    assert peer.connections.counts == {"strangers_closed": 1}
