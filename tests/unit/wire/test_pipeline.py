"""Parts that follow each other on one connection, over real sockets, and whatever may happen in the middle.

The other end is a script: it says for each request when to read it, what to answer, and when to break off.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from outerstep.errors import Busy, TransportError
from outerstep.types import GetPart, GetPartAnswer, PutPart, PutPartAnswer
from outerstep.wire.http_transport import DOUBTS, HttpTransport
from outerstep.wire.messages import HASH_HEADER, encode_error, encode_json
from outerstep.wire.pipeline import IN_A_ROW
from support import wait_until

HEAD = {"run_id": "r", "worker_id": "w", "incarnation": 1, "fragment": 0}
DONE = PutPartAnswer(state="stored")
STORED = encode_json(DONE)
PART = bytes(range(256)) * 512  # 128 KiB: goes apart from its head
SHORT_S = 0.3  # nothing is to come


class Talk:
    """One connection, as the other end sees it."""

    def __init__(self, sock: socket.socket, heard: list[int]) -> None:
        self.sock, self._lines, self._heard = sock, sock.makefile("rb", buffering=0), heard

    def read(self) -> int:
        """A whole request; returns which part it is of."""
        first = self._lines.readline().decode()
        size = 0
        while (line := self._lines.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        if not first:
            raise ConnectionError("the worker has closed")
        while size:
            size -= len(self.sock.recv(size)) or size
        part = int(first.split("part=")[1].split("&")[0].split()[0])
        self._heard.append(part)
        return part

    def answer(self, body: bytes = STORED, status: int = 200, *headers: str) -> None:
        head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Outerstep-Protocols: 1-2", *headers]
        self.sock.sendall("\r\n".join([*head, "", ""]).encode() + body)

    def is_quiet(self) -> bool:
        """Nothing more is sent for a while."""
        return not select.select([self.sock], [], [], SHORT_S)[0]

    def serve(self) -> None:
        """As a server does: one after the other, to the end."""
        while True:
            self.read()
            self.answer()


Script = Callable[[Talk], None]


@dataclass
class Peer:
    """Each connection is dealt with by the next script; when there is none left, by an honest server. `heard`: the
    parts that arrived whole, in order; `errors`: what went wrong in the scripts."""

    scripts: list[Script]
    heard: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            script = self.scripts.pop(0) if self.scripts else Talk.serve
            threading.Thread(target=self._run, args=(sock, script), daemon=True).start()

    def _run(self, sock: socket.socket, script: Script) -> None:
        with sock:
            try:
                script(Talk(sock, self.heard))
            except OSError:
                pass
            except BaseException as error:  # noqa: BLE001 - the test looks at them
                self.errors.append(error)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Worker:
    """Threads that ask for parts, over so many connections. What is begun `together` stands in a row before the first
    of it has a connection."""

    def __init__(self, peer: Peer, connections: int = 1, timeout_s: float = 20.0) -> None:
        self.transport = HttpTransport(f"http://{peer.address}", timeout_s=timeout_s)
        for up in (True, False):
            self.transport.spread(connections, up=up)
        self._pool = ThreadPoolExecutor(16)
        self._goes = threading.Event()
        self._goes.set()
        connect = self.transport._connection

        def when_it_goes(timeout_s: float) -> Any:
            assert self._goes.wait(20)
            return connect(timeout_s)

        self.transport._connection = when_it_goes  # type: ignore[method-assign]

    @contextmanager
    def together(self) -> Iterator[None]:
        self._goes.clear()
        yield
        self._goes.set()

    def put(self, part: int, data: bytes = PART) -> Future[Any]:
        """Returns when it has its place in the row."""
        return self._begin(PutPart(**HEAD, sequence=1, part=part, hash="0" * 16), body=memoryview(data))

    def get(self, part: int, into: bytearray) -> Future[Any]:
        return self._begin(GetPart(**HEAD, version=1, kind="full", part=part), into=memoryview(into))

    def _begin(self, request: PutPart | GetPart, **bytes_: memoryview) -> Future[Any]:
        before = self.in_rows()
        future = self._pool.submit(self.transport.call, request, **bytes_)
        wait_until(lambda: future.done() or self.in_rows() > before)
        return future

    def in_rows(self) -> int:
        return sum(lane.callers for lanes in self.transport._pipelines.values() for lane in lanes)

    def close(self) -> None:
        self.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def begin() -> Iterator[Callable[..., tuple[Peer, Worker]]]:
    with ExitStack() as stack:

        def made(*scripts: Script, **settings: Any) -> tuple[Peer, Worker]:
            peer = Peer(list(scripts))
            worker = Worker(peer, **settings)
            stack.callback(peer.close)
            stack.callback(worker.close)
            return peer, worker

        yield made


Begin = Callable[..., tuple[Peer, Worker]]


def test_a_part_is_sent_before_the_one_ahead_of_it_is_answered_and_never_more_than_so_many(begin: Begin) -> None:
    quiet: list[bool] = []

    def script(talk: Talk) -> None:
        for _ in range(IN_A_ROW):
            talk.read()
        quiet.append(talk.is_quiet())
        talk.answer()
        talk.read()  # the third follows as soon as there is room
        for _ in range(IN_A_ROW):
            talk.answer()

    peer, worker = begin(script)
    with worker.together():
        parts = [worker.put(part) for part in range(3)]
    assert [part.result(20) for part in parts] == [DONE] * 3
    assert (peer.heard, quiet, peer.connections, peer.errors) == ([0, 1, 2], [True], 1, [])


def test_parts_come_down_in_a_row_each_into_its_own_place(begin: Begin) -> None:
    sizes = [100_000, 3, 70_000, 0, 50_000]

    def script(talk: Talk) -> None:
        while True:
            first = talk.read()
            rest = [talk.read()] if first + 1 < len(sizes) and not talk.is_quiet() else []
            for part in [first, *rest]:
                talk.answer(bytes([part]) * sizes[part], 200, f"{HASH_HEADER}: {part:016d}")

    peer, worker = begin(script)
    places = [bytearray(size) for size in sizes]
    with worker.together():
        answers = [worker.get(part, place) for part, place in enumerate(places)]
    assert [a.result(20) for a in answers] == [GetPartAnswer(hash=f"{part:016d}") for part in range(len(sizes))]
    assert places == [bytes([part]) * size for part, size in enumerate(sizes)]
    assert (peer.connections, peer.errors) == (1, [])


def test_parts_spread_over_as_many_connections_as_there_may_be_before_they_follow_each_other(begin: Begin) -> None:
    peer, worker = begin(connections=3)
    with worker.together():
        parts = [worker.put(part) for part in range(12)]
    assert [part.result(20) for part in parts] == [DONE] * 12
    assert sorted(peer.heard) == list(range(12))
    assert peer.connections <= 3


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_part_that_is_refused_does_not_touch_those_around_it(begin: Begin, refused: int) -> None:
    busy = encode_error(Busy("full", retry_after_s=7.0), "id", 2)

    def script(talk: Talk) -> None:
        for _ in range(3):
            if talk.read() == refused:
                talk.answer(busy, 503, "Retry-After: 7")
            else:
                talk.answer()

    peer, worker = begin(script)
    with worker.together():
        parts = [worker.put(part) for part in range(3)]
    for number, part in enumerate(parts):
        if number == refused:
            with pytest.raises(Busy):
                part.result(20)
        else:
            assert part.result(20) == DONE
    assert (peer.heard, peer.connections, peer.errors) == ([0, 1, 2], 1, [])


def test_what_was_sent_behind_an_answer_that_ends_the_connection_is_asked_again_elsewhere(begin: Begin) -> None:
    def script(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.answer(STORED, 200, "Connection: close")

    peer, worker = begin(script)
    with worker.together():
        parts = [worker.put(part) for part in range(3)]
    assert [part.result(20) for part in parts] == [DONE] * 3
    assert peer.heard.count(0) == 1, "it was answered"
    assert peer.heard.count(1) == 2, "sent behind it, and again"
    assert peer.heard.count(2) == 1, "never sent before"
    assert worker.transport._doubts == 1, "does anything behind another ever get its answer here?"


def test_of_a_cut_between_two_answers_only_what_is_not_answered_is_sent_again(begin: Begin) -> None:
    def script(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.answer()
        talk.sock.shutdown(socket.SHUT_RDWR)

    peer, worker = begin(script)
    with worker.together():
        parts = [worker.put(part) for part in range(2)]
    assert [part.result(20) for part in parts] == [DONE] * 2
    assert peer.heard == [0, 1, 1]


def test_a_cut_inside_an_answer_fails_that_part_and_the_one_behind_it_is_asked_again(begin: Begin) -> None:
    def cut(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.sock.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n" + bytes(500))
        talk.sock.shutdown(socket.SHUT_RDWR)

    def honest(talk: Talk) -> None:
        talk.read()
        talk.answer(b"b" * 1000, 200, f"{HASH_HEADER}: b")

    peer, worker = begin(cut, honest)
    first, second = bytearray(1000), bytearray(1000)
    with worker.together():
        parts = [worker.get(0, first), worker.get(1, second)]
    with pytest.raises(TransportError):
        parts[0].result(20)
    assert parts[1].result(20) == GetPartAnswer(hash="b")
    assert second == b"b" * 1000
    assert peer.heard == [0, 1, 1]


def test_an_answer_that_is_not_http_fails_its_part_alone(begin: Begin) -> None:
    def script(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.sock.sendall(b"SSH-2.0-nonsense\r\n" * 3)

    peer, worker = begin(script)
    with worker.together():
        parts = [worker.put(part) for part in range(2)]
    with pytest.raises(TransportError):
        parts[0].result(20)
    assert parts[1].result(20) == DONE
    assert peer.heard == [0, 1, 1]


def test_behind_a_peer_that_reads_one_request_of_a_connection_every_part_arrives_and_none_follows_any_more(
    begin: Begin,
) -> None:
    """Some proxies drop what comes behind a request, and close. Twice that costs a part; then it is not tried again."""

    def drops(talk: Talk) -> None:
        talk.read()
        talk.is_quiet()
        talk.answer()
        talk.sock.shutdown(socket.SHUT_WR)
        while talk.sock.recv(1 << 16):  # a close with unread bytes is a reset, which may overtake the answer
            pass

    peer, worker = begin(*[drops] * 200)
    for start in range(0, 12, 3):
        with worker.together():
            parts = [worker.put(start + i) for i in range(3)]
        assert [part.result(20) for part in parts] == [DONE] * 3
        worker.transport.close()
    assert worker.transport._doubts == DOUBTS
    assert sorted(peer.heard) == list(range(12)), "the proxy took each part once"


def test_a_peer_that_is_silent_to_what_follows_costs_that_part_its_time_and_no_other(begin: Begin) -> None:
    done = threading.Event()

    def script(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.answer()
        done.wait(20)

    _, worker = begin(script, timeout_s=0.5)
    with worker.together():
        parts = [worker.put(part) for part in range(3)]
    assert parts[0].result(20) == DONE
    with pytest.raises(TransportError):
        parts[1].result(20)
    assert parts[2].result(20) == DONE, "it was not sent yet: it travels elsewhere"
    done.set()


def test_one_answer_to_what_follows_and_it_is_never_doubted_again(begin: Begin) -> None:
    def honest(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.answer()
        talk.answer()

    def cuts(talk: Talk) -> None:
        talk.read()
        talk.read()
        talk.answer()
        talk.sock.shutdown(socket.SHUT_RDWR)

    peer, worker = begin(honest, *[cuts, Talk.serve] * DOUBTS)
    for start in range(0, 2 * (1 + DOUBTS), 2):
        with worker.together():
            parts = [worker.put(part) for part in (start, start + 1)]
        assert [part.result(20) for part in parts] == [DONE] * 2
        assert worker.transport._doubts is None
        worker.transport.close()
    assert peer.heard == [0, 1, 2, 3, 3, 4, 5, 5]


def test_a_connection_that_the_server_has_closed_meanwhile_is_replaced_for_all_that_share_it(begin: Begin) -> None:
    closed = threading.Event()

    def script(talk: Talk) -> None:
        talk.read()
        talk.answer()
        talk.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    peer, worker = begin(script)
    assert worker.put(0).result(20) == DONE
    assert closed.wait(20)
    with worker.together():
        parts = [worker.put(part) for part in range(1, 4)]
    assert [part.result(20) for part in parts] == [DONE] * 3
    assert sorted(peer.heard) == [0, 1, 2, 3]
    assert worker.transport._doubts in (0, None), "that says nothing about what follows"


def test_a_pipeline_is_gone_when_nobody_uses_it_and_its_connection_is_used_again(begin: Begin) -> None:
    peer, worker = begin()
    for part in range(5):
        assert worker.put(part).result(20) == DONE
        wait_until(lambda: worker.in_rows() == 0)
    assert peer.connections == 1
    assert worker.transport._pipelines == {PutPart: [], GetPart: []}
