"""A client whose other end answers at length, for ever or next to nothing: it reads within limits and gives up.

In each case the other end goes on for as long as it is listened to: a client that believed it would never return."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outerstep.errors import NotFound, OuterstepError, ServerError, TransportError
from outerstep.security import Access, Credentials
from outerstep.security.tokens import new_token
from outerstep.types import GetPart, Leave
from outerstep.wire import answers
from outerstep.wire.http_transport import HttpTransport
from support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
TIMEOUT_S = 0.25
PAUSE_S = 0.02  # between two drops
MOST_BYTES = 1 << 20  # in place of 32 MiB
LEAVE = Leave(run_id="r", worker_id="w", incarnation=1)
PART = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=0, part=0)
OURS = (b"POST /v1/leave ", b"GET /v1/part?run_id=r&worker_id=w&")

Say = Callable[[socket.socket], None]


def where(port: int, fingerprint: str) -> str:
    return Access("127.0.0.1", port, new_token("run"), fingerprint).join_string


class Liar:
    """A port that reads a request and answers as `say` does; with a certificate, over TLS. `requests` are those of this
    file: a port that another test's server has just left may still be asked by that server's workers."""

    def __init__(self, say: Say, identity: tuple[str, ssl.SSLContext] | None = None) -> None:
        self._say, self._identity = say, identity
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.given_up = threading.Event()
        self.requests = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def transport(self) -> HttpTransport:
        port = self._listener.getsockname()[1]
        if self._identity is None:
            return HttpTransport(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S)
        return HttpTransport(where(port, self._identity[0]), timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(sock)
                if self._identity is not None:
                    sock = stack.enter_context(self._identity[1].wrap_socket(sock, server_side=True))
                while b"\r\n\r\n" not in (heard := sock.recv(65536)):
                    if not heard:
                        return
                self.requests += heard.startswith(OURS)
                self._say(sock)
        except OSError:
            self.given_up.set()


def drip(sock: socket.socket, drop: bytes = b" ") -> None:
    """Always in time for a limit on silence."""
    pause = threading.Event()
    while True:
        sock.sendall(drop)
        pause.wait(PAUSE_S)


def flood(sock: socket.socket, wave: bytes) -> None:
    while True:
        sock.sendall(wave)


def announced(length: int) -> bytes:
    return OK + f"Content-Length: {length}\r\n\r\n".encode()


def after(head: bytes, then: Callable[..., None], *what: bytes) -> Say:
    def say(sock: socket.socket) -> None:
        sock.sendall(head)
        then(sock, *what)

    return say


@pytest.fixture(params=["plain", "TLS"])
def lie(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Say], Liar]]:
    made: list[Liar] = []
    identity = Credentials(tmp_path / "credentials").server_identity()

    def make(say: Say) -> Liar:
        secured = (identity.fingerprint, identity.context()) if request.param == "TLS" else None
        made.append(Liar(say, secured))
        return made[-1]

    yield make
    for liar in made:
        liar.close()


CHUNK = b"10000\r\n" + bytes(0x10000) + b"\r\n"


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (after(announced(1 << 40), flood, bytes(65536)), f"{1 << 40} bytes"),
        (after(OK + b"Transfer-Encoding: chunked\r\n\r\n", flood, CHUNK), f"more than {MOST_BYTES} bytes"),
        (after(OK + b"Connection: close\r\n\r\n", flood, bytes(65536)), f"more than {MOST_BYTES} bytes"),
        (after(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", flood, b"X: y\r\n" * 4096), "does not end"),
        (after(b"", flood, b"HTTP/1.1 100 Continue\r\n\r\n" * 1024), "does not end"),
        (after(announced(1000), drip), "too slow"),
        (after(OK + b"Transfer-Encoding: chunked\r\n\r\n", drip, b"1\r\n \r\n"), "too slow"),
        (after(OK + b"Connection: close\r\n\r\n", drip), "too slow"),
        (after(OK + b"X-Header: ", drip, b"x"), "too slow"),
        (after(b"", drip, b"HTTP/1.1 100 Continue\r\n\r\n"), "too slow"),
    ],
    ids=[
        "length",
        "chunks",
        "until closed",
        "trailers",
        "continues",
        "dripped body",
        "dripped chunks",
        "dripped until closed",
        "dripped head",
        "dripped continues",
    ],
)
def test_an_answer_that_does_not_end_is_given_up(
    lie: Callable[[Say], Liar], say: Say, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_BYTES", MOST_BYTES)
    liar = lie(say)
    transport = liar.transport()
    with pytest.raises(TransportError, match=why):
        transport.call(LEAVE)
    assert not transport._idle  # that connection is of no use any more
    assert liar.requests == 1  # not asked again at once, on another connection


def test_of_endless_chunks_no_more_is_held_than_may_be_read(lie: Callable[[Say], Liar]) -> None:
    transport = lie(after(OK + b"Transfer-Encoding: chunked\r\n\r\n", flood, CHUNK)).transport()
    tracemalloc.start()
    try:
        with pytest.raises(TransportError, match=f"more than {answers.MOST_BYTES} bytes"):
            transport.call(LEAVE)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * answers.MOST_BYTES
    finally:
        tracemalloc.stop()


def test_the_bytes_of_a_part_that_drip_are_given_up(lie: Callable[[Say], Liar]) -> None:
    liar = lie(after(announced(1 << 20), drip))
    with pytest.raises(TransportError, match="too slow"):
        liar.transport().call(PART, into=memoryview(bytearray(1 << 20)))
    assert liar.given_up.wait(30)


def test_a_record_of_tls_that_drips_is_given_up(tmp_path: Path) -> None:
    """Inside one record nothing is read until all of it is there: the bytes that drip are those on the line."""
    identity = Credentials(tmp_path / "credentials").server_identity()
    size, given_up = 1 << 20, threading.Event()
    listener, behind = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    def serve() -> None:
        sock = identity.context().wrap_socket(behind.accept()[0], server_side=True)
        with contextlib.suppress(OSError):
            sock.recv(65536)
            sock.sendall(announced(size) + bytes(100_000))

    def forward() -> None:
        near, far = listener.accept()[0], socket.create_connection(behind.getsockname())
        threading.Thread(target=lambda: [far.sendall(data) for data in iter(lambda: near.recv(65536), b"")]).start()
        passed = 0
        try:
            while data := far.recv(1 if passed > 50_000 else 4096):
                near.sendall(data)
                passed += len(data)
                if passed > 50_000:
                    threading.Event().wait(PAUSE_S)
        except OSError:
            given_up.set()

    for job in (serve, forward):
        threading.Thread(target=job, daemon=True).start()
    place = where(listener.getsockname()[1], identity.fingerprint)
    with pytest.raises(TransportError, match="too slow"):
        HttpTransport(place, timeout_s=TIMEOUT_S).call(PART, into=memoryview(bytearray(size)))
    assert given_up.wait(30)


def test_a_slow_link_is_waited_for_as_long_as_it_moves(
    lie: Callable[[Say], Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times the timeout in all."""
    monkeypatch.setattr(answers, "LEAST_BYTES", 64)
    body, pause = b"{" + b" " * 4000 + b"}", threading.Event()

    def say(sock: socket.socket) -> None:
        sock.sendall(announced(len(body)))
        for start in range(0, len(body), 100):
            sock.sendall(body[start : start + 100])
            pause.wait(0.05)

    assert lie(say).transport().call(LEAVE) is not None


def test_what_comes_steadily_ends_when_its_time_is_over(lie: Callable[[Say], Liar]) -> None:
    """However fast each window is: several requests have their time together."""
    place = memoryview(bytearray(64 << 20))
    liar = lie(after(announced(len(place)), steadily))
    transport = liar.transport()
    with answers.WATCH.within(1.0):
        for _ in range(2):
            with pytest.raises(TransportError, match="no longer waited for"):
                transport.call(PART, into=place)
    assert liar.requests == 1


def steadily(sock: socket.socket) -> None:
    pause = threading.Event()
    while True:
        sock.sendall(bytes(65536))
        pause.wait(PAUSE_S)


def test_of_a_long_error_the_status_is_taken_and_the_rest_left(lie: Callable[[Say], Liar]) -> None:
    """As of a proxy that shows a page; its status says whether to ask again."""
    head = b"HTTP/1.1 502 Bad Gateway\r\nTransfer-Encoding: chunked\r\n\r\n"
    liar = lie(after(head, flood, CHUNK))
    with pytest.raises(ServerError, match="HTTP status 502"):
        liar.transport().call(LEAVE)


def test_a_connection_is_kept_after_a_short_error(lie: Callable[[Say], Liar]) -> None:
    body = b'{"error":{"code":"not_found","message":"it is not here"}}'
    said = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def say(sock: socket.socket) -> None:
        sock.sendall(said)
        sock.recv(65536)
        sock.sendall(said)
        sock.recv(65536)

    transport = lie(say).transport()
    for _ in range(2):
        with pytest.raises(NotFound, match="it is not here"):
            transport.call(LEAVE)
    assert len(transport._idle) == 1


def test_nothing_is_watched_when_nothing_is_under_way(lie: Callable[[Say], Liar]) -> None:
    transport = lie(after(announced(1000), drip)).transport()
    with pytest.raises(OuterstepError):
        transport.call(LEAVE)
    wait_until(lambda: not answers.WATCH.open)
