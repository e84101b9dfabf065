"""A few work at a time; nobody holds a turn while it waits."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from outerstep.wire.connections import Connection
from outerstep.wire.sockets import BURST_BYTES, LARGE_BYTES, Channel, Places
from support import wait_until

PATIENT_S = 60.0


@pytest.fixture
def places() -> Places:
    return Places(1)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def channel_to(sock: socket.socket, places: Places | None, timeout_s: float) -> Channel:
    return Channel(Connection(sock, "here", since=0.0), places, timeout_s)


def is_free(places: Places) -> bool:
    return places.free == 1


def asleep(thread: threading.Thread) -> bool:
    """Does it wait in the kernel for its socket? (Linux names the place; elsewhere we take its word for it.)"""
    try:
        with open(f"/proc/self/task/{thread.native_id}/wchan") as file:
            return "poll" in file.read()
    except OSError:
        return True


class TestTurn:
    def test_a_channel_that_works_holds_a_place(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        with channel_to(ends[0], places, PATIENT_S).turn:
            assert not is_free(places)
        assert is_free(places)

    def test_a_channel_that_is_away_holds_none_and_comes_back_to_one(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        channel = channel_to(ends[0], places, PATIENT_S)
        with channel.turn:
            with channel.away():
                assert is_free(places)
            assert not is_free(places)

    def test_a_place_is_given_back_whatever_goes_wrong(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        channel = channel_to(ends[0], places, PATIENT_S)
        with pytest.raises(ZeroDivisionError), channel.turn, channel.away():
            raise ZeroDivisionError
        assert is_free(places)

    def test_a_channel_that_goes_first_needs_no_place(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        first = channel_to(ends[0], None, PATIENT_S)
        with places, first.turn, first.away():
            pass


class TestChannel:
    def test_bytes_arrive_as_they_were_sent(self, places: Places, ends: tuple[socket.socket, socket.socket]) -> None:
        here, there = (channel_to(end, places, PATIENT_S) for end in ends)
        sent = memoryview(bytes(range(256)) * (3 * BURST_BYTES // 256) + b"and a bit")
        sender = threading.Thread(target=here.send, args=(sent,), daemon=True)
        sender.start()
        received = bytearray(len(sent))
        rest = memoryview(received)
        while rest:
            rest = rest[there.receive_into(rest) :]
        sender.join()
        assert received == sent

    def test_a_silent_sender_keeps_nobody_from_working(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        line, got = channel_to(ends[0], places, PATIENT_S), bytearray(1)
        reader = threading.Thread(target=line.receive_into, args=(memoryview(got),), daemon=True)
        reader.start()
        wait_until(lambda: is_free(places) and asleep(reader))
        with places:
            ends[1].sendall(b"x")
        reader.join()
        assert got == b"x"

    def test_what_is_large_is_read_without_a_turn_and_waits_no_longer_than_the_limit(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        line, got = channel_to(ends[0], places, PATIENT_S), bytearray(2 * LARGE_BYTES)
        with places:  # nobody else may work
            ends[1].sendall(b"x" * LARGE_BYTES)
            threading.Timer(0.05, ends[1].sendall, [b"y" * LARGE_BYTES]).start()
            assert line.receive_into(memoryview(got)) == len(got)
        assert bytes(got) == b"x" * LARGE_BYTES + b"y" * LARGE_BYTES
        assert not ends[0].getblocking()
        with pytest.raises(TimeoutError):
            channel_to(ends[0], places, timeout_s=0.05).receive_into(memoryview(got))

    def test_a_receiver_that_does_not_read_keeps_nobody_from_working(
        self, places: Places, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        line = channel_to(ends[0], places, PATIENT_S)
        sender = threading.Thread(target=line.send, args=(bytes(8 * BURST_BYTES),), daemon=True)
        sender.start()
        wait_until(lambda: not select.select([], [ends[0]], [], 0)[1] and is_free(places) and asleep(sender))
        assert sender.is_alive()
        left = 8 * BURST_BYTES
        while left:
            left -= len(ends[1].recv(BURST_BYTES))
        sender.join()

    def test_silence_ends_in_a_timeout(self, ends: tuple[socket.socket, socket.socket]) -> None:
        with pytest.raises(TimeoutError, match="silent for too long"):
            channel_to(ends[0], None, timeout_s=0.01).receive(1)

    def test_silence_ends_in_a_timeout_for_who_takes_turns_too(
        self, ends: tuple[socket.socket, socket.socket], places: Places
    ) -> None:
        with pytest.raises(TimeoutError, match="nothing for 0 s"):
            channel_to(ends[0], places, timeout_s=0.0).receive(1)

    def test_without_turns_a_buffer_is_filled_in_one_call(self, ends: tuple[socket.socket, socket.socket]) -> None:
        sender = threading.Thread(target=channel_to(ends[1], None, PATIENT_S).send, args=(bytes(range(256)) * 40_000,))
        sender.start()
        got = bytearray(256 * 40_000)
        assert channel_to(ends[0], None, PATIENT_S).receive_into(memoryview(got)) == len(got)
        assert got == bytes(range(256)) * 40_000
        sender.join()

    def test_the_end_of_the_connection_is_no_bytes(self, ends: tuple[socket.socket, socket.socket]) -> None:
        ends[1].close()
        assert channel_to(ends[0], None, PATIENT_S).receive(1) == b""
