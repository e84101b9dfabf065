"""Open pages: one rendering for all, nobody waits for a slow one, and there are so many at most."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from outerstep.dashboard.streams import COMMENT, COMMENT_S, HEAD, MOST_STREAMS, PATIENCE_S, PageStreams
from outerstep.errors import Busy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def streams(clock: Clock) -> Iterator[PageStreams]:
    made = PageStreams(clock)
    yield made
    made.close()


def join(streams: PageStreams, *, valid: list[bool] | None = None) -> socket.socket:
    ours, theirs = socket.socketpair()
    streams.reserve()
    streams.add(ours, lambda: valid is None or valid[0])
    theirs.settimeout(10.0)
    return theirs


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


def test_everybody_gets_the_same_bytes_which_are_made_once(streams: PageStreams) -> None:
    readers, made = [join(streams) for _ in range(10)], []

    def render() -> bytes:
        made.append(1)
        return b"event: hello\n\n"

    streams.greet(render)
    streams.send(b"event: update\n\n")
    expected = HEAD + b"event: hello\n\nevent: update\n\n"
    assert [receive(reader, len(expected)) for reader in readers] == [expected] * 10
    assert made == [1]


def test_there_is_no_place_for_one_more_until_one_leaves(streams: PageStreams) -> None:
    readers = [join(streams) for _ in range(MOST_STREAMS)]
    streams.greet(lambda: b"")
    with pytest.raises(Busy, match="32 pages"):
        streams.reserve()
    readers[0].close()
    streams.wait(10.0)
    streams.wait(10.0)
    assert len(streams) == MOST_STREAMS - 1
    streams.reserve()


def test_who_takes_nothing_is_dropped_and_keeps_nobody_waiting(streams: PageStreams, clock: Clock) -> None:
    slow, quick = join(streams), join(streams)
    streams.greet(lambda: b"")
    assert receive(quick, len(HEAD)) == HEAD
    block = b"x" * (1 << 20)
    for _ in range(3):
        streams.send(block)
        taken = 0
        while taken < len(block):  # the quick one takes it all
            streams.wait(0.0)
            taken += len(quick.recv(1 << 20))
    streams.look()
    assert len(streams) == 2
    clock.now += PATIENCE_S + 1.0
    streams.look()
    assert (len(streams), streams.dropped) == (1, 1)
    streams.send(b"an update")
    assert receive(quick, 9) == b"an update"
    slow.close()


def test_what_waits_for_a_reader_is_bounded(streams: PageStreams) -> None:
    reader = join(streams)
    streams.greet(lambda: b"")
    for _ in range(8):
        streams.send(b"x" * (1 << 20))
    assert (len(streams), streams.dropped) == (0, 1)
    reader.close()


def test_a_quiet_line_gets_a_comment(streams: PageStreams, clock: Clock) -> None:
    reader = join(streams)
    streams.greet(lambda: b"")
    receive(reader, len(HEAD))
    clock.now += COMMENT_S - 0.1
    streams.remind()
    clock.now += 0.1
    streams.remind()
    streams.remind()
    assert receive(reader, len(COMMENT)) == COMMENT
    reader.setblocking(False)
    with pytest.raises(BlockingIOError):
        reader.recv(1)


def test_a_session_that_ends_ends_its_stream(streams: PageStreams) -> None:
    valid = [True]
    reader = join(streams, valid=valid)
    streams.greet(lambda: b"")
    streams.look()
    receive(reader, len(HEAD))
    valid[0] = False
    streams.look()
    assert reader.recv(1) == b""
    assert len(streams) == 0


def test_who_talks_on_a_stream_is_no_browser(streams: PageStreams) -> None:
    reader = join(streams)
    streams.greet(lambda: b"")
    reader.sendall(b"x" * 100)
    streams.wait(10.0)
    streams.wait(10.0)
    assert len(streams) == 0


def test_who_comes_when_all_is_over_is_closed(clock: Clock) -> None:
    streams = PageStreams(clock)
    streams.reserve()
    streams.close()
    ours, theirs = socket.socketpair()
    streams.add(ours, lambda: True)
    assert theirs.recv(1) == b""


def test_a_greeting_that_cannot_be_rendered_takes_no_place_for_good(streams: PageStreams) -> None:
    def render() -> bytes:
        raise RuntimeError("the status is not to be had")

    reader = join(streams)
    with pytest.raises(RuntimeError):
        streams.greet(render)
    streams.greet(lambda: b"event: hello\n\n")  # the next time it is there
    assert reader.recv(len(HEAD)) == HEAD
    reader.close()
    streams.wait(10.0)
    streams.wait(10.0)
    assert len(streams) == 0
