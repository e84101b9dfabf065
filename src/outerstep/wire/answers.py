"""How a client sends one request and reads its answer: within a length and within a time, whoever gives it.

*Length*: a message has at most `MOST_BYTES`, announced or not; of an error's body the beginning is enough. *Time*: a
limit on silence alone lets the other end hold a thread for ever, by a byte now and then. So one thread looks at all
requests that are under way, as pace.py does at a server's connections, and by the same measure: in each window of twice
the timeout at least `LEAST_BYTES` must go either way. A large answer over a slow link takes as long as it takes; an
answer of so many bytes that drips ends after so many windows; and one of a few bytes, or a head, within one.

Nothing else reaches a thread that is inside OpenSSL, waiting for the rest of a record. Linux tells the bytes. Elsewhere
only silence is bounded, and length.
"""

from __future__ import annotations

import http.client
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from . import sockets
from .messages import MAX_JOIN_BYTES

MOST_BYTES = MAX_JOIN_BYTES
MOST_ERROR_BYTES = 64 << 10
LEAST_BYTES = 4096
SPARE_BYTES = 1 << 20  # of heads, and of what TLS adds
SLICE_BYTES = 64 << 10
LOOKS_PER_WINDOW = 8
LONGEST_PAUSE_S = 1.0
LINGER_S = 5.0  # the next request is seldom far
LARGE_BYTES = 64 << 10  # bodies that are moved apart from their heads
ANY_LENGTH = 1 << 62


@dataclass(eq=False)
class PendingAnswer:
    """A request under way. `most_bytes`: both ways, as the kernel counts them. `verdict`: why it was ended."""

    sock: socket.socket
    window_s: float
    least_bytes: int
    most_bytes: int
    since: float
    moved: int
    began_with: int
    until: float
    verdict: str = ""

    def judge(self, now: float) -> None:
        try:
            moved = sockets.moved_bytes(self.sock)
        except (OSError, ValueError):
            return  # it is being closed
        if moved is None:
            return
        if moved - self.began_with > self.most_bytes:
            self.verdict = "the answer does not end: it has more bytes than any that is read"
        elif now > self.until:
            self.verdict = "too slow: it is not all here, and no longer waited for"
        elif moved - self.moved >= self.least_bytes:
            self.since, self.moved = now, moved
        elif now - self.since > self.window_s:
            few = moved - self.moved
            self.verdict = f"too slow: {few} bytes in {self.window_s:g} s, at least {self.least_bytes} are waited for"


@dataclass(eq=False)
class AnswerWatch:
    """Ends what takes too long. Its thread lives while there is something to look at, and a little longer."""

    clock: Callable[[], float] = time.monotonic
    open: set[PendingAnswer] = field(default_factory=set)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _mine: threading.local = field(default_factory=threading.local)

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Whatever this thread asks for in here, in one request or many, ends by then."""
        self._mine.until = self.clock() + limit_s
        try:
            yield
        finally:
            del self._mine.until

    @contextmanager
    def over(
        self, sock: socket.socket, window_s: float, sent_bytes: int, answer_bytes: int | None = None
    ) -> Iterator[None]:
        """Around one request and its answer; a TimeoutError if it was ended. `answer_bytes` None = a message."""
        most = 2 * (sent_bytes + (MOST_BYTES if answer_bytes is None else answer_bytes)) + SPARE_BYTES
        began_with = sockets.moved_bytes(sock) or 0
        now, until = self.clock(), getattr(self._mine, "until", math.inf)
        if now > until:
            raise TimeoutError("too slow: it is not all here, and no longer waited for")
        pending = PendingAnswer(sock, window_s, LEAST_BYTES, most, now, began_with, began_with, until)
        with self._lock:
            self.open.add(pending)
            if self._thread is None or not self._thread.is_alive():  # in a process that was forked it is not
                self._thread = threading.Thread(target=self._look_always, name="outerstep-answers", daemon=True)
                self._thread.start()
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            if pending.verdict:
                raise TimeoutError(pending.verdict) from error
            raise
        finally:
            with self._lock:
                self.open.discard(pending)
        if pending.verdict:  # some that were cut look whole
            raise TimeoutError(pending.verdict)

    def _look_always(self) -> None:
        with self._lock:
            idle_since = self.clock()
            while self.open or self.clock() - idle_since < LINGER_S:
                windows_s = [pending.window_s / LOOKS_PER_WINDOW for pending in self.open]
                self._lock.wait(min([LONGEST_PAUSE_S, *windows_s]))
                if self.open:
                    idle_since = self.clock()
                self.look()
            self._thread = None

    def look(self) -> None:
        """With the lock held: a request that ends meanwhile keeps its socket open until that is over."""
        now = self.clock()
        for pending in self.open:
            if not pending.verdict:
                pending.judge(now)
            if pending.verdict:
                sockets.shut(pending.sock)

    def begin_anew(self) -> None:
        """In a process that was forked: what is under way is the parent's."""
        self._lock, self._thread = threading.Condition(), None
        self.open.clear()


WATCH = AnswerWatch()
os.register_at_fork(after_in_child=WATCH.begin_anew)


class Incoming(Protocol):
    """Where an answer goes of which only its head tells the length."""

    def places(self, size_bytes: int) -> Iterator[memoryview]:
        """Memory for all of it, piece by piece: one is filled before the next is asked for. Called again if the answer
        has to be asked for again."""


class AnswerTooLong(http.client.HTTPException):
    """More than is read."""


# --- one request, and one answer --------------------------------------------------------------------------------------


def send_request(
    connection: http.client.HTTPConnection, method: str, target: str, payload: memoryview, headers: dict[str, str]
) -> None:
    if len(payload) < LARGE_BYTES:
        connection.request(method, target, body=bytes(payload) or None, headers=headers)
        return
    connection.request(method, target, headers=headers)
    sock = connection.sock
    assert sock is not None
    timeout_s = sock.gettimeout() or 0.0
    sockets.block(sock, timeout_s)
    sockets.send(sock, payload)
    sock.settimeout(timeout_s)


def read_answer(response: http.client.HTTPResponse, sock: socket.socket, into: memoryview | Incoming | None) -> bytes:
    """Its body, unless that goes to `into`."""
    if into is None or response.status != 200:
        return read_message(response)
    timeout_s = sock.gettimeout() or 0.0
    sockets.block(sock, timeout_s)
    if isinstance(into, memoryview):
        read_bytes(response, sock, into)
    else:
        read_incoming(response, sock, into)
    sock.settimeout(timeout_s)
    return b""


def bytes_due(into: memoryview | Incoming | None) -> int | None:
    """None = a message."""
    return len(into) if isinstance(into, memoryview) else None if into is None else ANY_LENGTH


def read_message(response: http.client.HTTPResponse) -> bytes:
    """All of it. Of an error, what there is room for: its status matters more."""
    is_error = response.status != 200
    most = MOST_ERROR_BYTES if is_error else MOST_BYTES
    if response.length is not None and response.length > most and not is_error:
        raise AnswerTooLong(f"the answer has {response.length} bytes; at most {most} are read")
    data = bytearray()
    while piece := response.read(min(SLICE_BYTES, most + 1 - len(data))):
        data += piece
        if len(data) > most:
            if is_error:
                return bytes(data[:most])
            raise AnswerTooLong(f"the answer has more than {most} bytes, which is the most that is read")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(data)


def read_bytes(response: http.client.HTTPResponse, sock: socket.socket, into: memoryview) -> None:
    """A body of exactly so many."""
    if response.length != len(into):
        raise http.client.HTTPException(f"a body of {len(into)} bytes is due, {response.length} are announced")
    _fill(response, sock, into)
    response.length = 0  # nothing of it is left
    response.close()


def read_incoming(response: http.client.HTTPResponse, sock: socket.socket, incoming: Incoming) -> None:
    """A body of as many as its head says."""
    if response.length is None:
        raise http.client.HTTPException("the length of the answer is not announced")
    left = response.length
    for place in incoming.places(response.length):
        if len(place) > left:
            raise http.client.HTTPException(f"{len(place)} more bytes are due, {left} are announced")
        _fill(response, sock, place)
        left -= len(place)
    if left:
        raise http.client.HTTPException(f"{left} bytes more than are due are announced")
    response.length = 0
    response.close()


def _fill(response: http.client.HTTPResponse, sock: socket.socket, into: memoryview) -> None:
    """What came with the head, then straight from the socket."""
    began = response.fp.peek(1)[: len(into)] if into else b""
    into[: len(began)] = response.fp.read(len(began))
    rest = into[len(began) :]
    while rest:
        count = sockets.receive_into(sock, rest)
        if count == 0:
            raise http.client.IncompleteRead(b"", len(rest))
        rest = rest[count:]
