"""A connection on which parts follow each other: the next request is sent before the answer to the last one is read.

Over a long link a connection would else stand idle for a round trip after each part. HTTP/1.1 allows it (RFC 9112,
9.3.2): a server reads one request after the other and answers in that order, at its own time. One thread at a time uses
the socket, because OpenSSL wants it so; a thread with a request to send goes before one that waits for an answer:

    part 1   send ······ read
    part 2        send ······ read
    part 3        wait ······ send ······ read

At most `IN_A_ROW` requests are unanswered. What was sent and not answered when the connection ends, or is to end after
an answer, is asked again elsewhere, alone: each request for a part may be repeated.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from . import sockets
from .answers import WATCH, Incoming, bytes_due, read_answer, send_request

IN_A_ROW: Final = 2
CALLERS: Final = 3  # that keep it busy: one reads, one is sent, one waits to be

ReadAnswer = tuple[int, http.client.HTTPMessage, bytes]


class PipelineEnded(Exception):
    """The connection is of no use any more, through no fault of this request."""


@dataclass(eq=False)
class _Request:
    """`size_bytes`: what it and its answer may move."""

    size_bytes: int


class Pipeline:
    """`connect` gives a connection, and whether it was used before. `in_a_row`: 1 = each part waits for the answer to
    the one before. Its owner counts the `callers`."""

    def __init__(self, connect: Callable[[], tuple[http.client.HTTPConnection, bool]], in_a_row: int) -> None:
        self._connect, self._in_a_row = connect, in_a_row
        self.callers = 0
        self.connection: http.client.HTTPConnection | None = None
        self.has_followed = False  # an answer came to a request that was sent before the answer to another
        self.has_failed_behind = False  # it ended with two requests that were not answered
        self.is_over = False
        self._was_used = self._has_answered = False
        self._shared: _SharedSocket | None = None
        self._turn = threading.Condition()
        self._is_busy = False
        self._to_send: deque[_Request] = deque()
        self._to_read: deque[_Request] = deque()

    def ask(
        self,
        method: str,
        target: str,
        payload: memoryview,
        headers: dict[str, str],
        into: memoryview | Incoming | None,
        timeout_s: float,
    ) -> ReadAnswer:
        me = _Request(len(payload) + (bytes_due(into) or 0))
        with self._turn:
            self._to_send.append(me)
        self._await(lambda: self._to_send[0] is me and len(self._to_read) < self._in_a_row)
        follows = len(self._to_read) > 0
        try:
            if self.connection is None:
                self.connection, self._was_used = self._connect()
            sock, moving = self._sock(timeout_s), me.size_bytes + sum(other.size_bytes for other in self._to_read)
            with WATCH.over(sock, 2.0 * timeout_s, moving, bytes_due(into)):
                send_request(_beside(self.connection), method, target, payload, headers)
            self._next(sent=True)
            self._await(lambda: self._to_read[0] is me and not (self._to_send and len(self._to_read) < self._in_a_row))
            sock, moving = self._sock(timeout_s), sum(each.size_bytes for each in self._to_read)
            with WATCH.over(sock, 2.0 * timeout_s, moving, bytes_due(into)):
                response = http.client.HTTPResponse(cast(socket.socket, self._shared), method=method)
                response.begin()
                data = read_answer(response, sock, into)
        except PipelineEnded:
            raise
        except BaseException as error:
            self._end(me)
            is_ours = isinstance(error, TimeoutError) or not isinstance(error, OSError | http.client.HTTPException)
            if is_ours or not (follows or self._was_used or self._has_answered):
                raise
            raise PipelineEnded from error
        self._has_answered, self.has_followed = True, self.has_followed or follows
        if response.will_close or not response.isclosed():
            self._end(me)
        else:
            self._next(sent=False)
        return response.status, response.headers, data

    # --- turns ----------------------------------------------------------------------------------------------------

    def _await(self, is_mine: Callable[[], bool]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self.is_over or (not self._is_busy and is_mine()))
            if self.is_over:
                raise PipelineEnded
            self._is_busy = True

    def _next(self, *, sent: bool) -> None:
        with self._turn:
            if sent:
                self._to_read.append(self._to_send.popleft())
            else:
                self._to_read.popleft()
            self._is_busy = False
            self._turn.notify_all()

    def _end(self, mine: _Request) -> None:
        """By the one that has the turn: nobody else uses the socket."""
        with self._turn:
            is_stale = self._was_used and not self._has_answered
            self.has_failed_behind = not is_stale and any(other is not mine for other in self._to_read)
            self.is_over = True
            self._turn.notify_all()
        if self.connection is not None:
            self.connection.close()

    # --- the connection -------------------------------------------------------------------------------------------

    def _sock(self, timeout_s: float) -> socket.socket:
        assert self.connection is not None
        if self.connection.sock is None:
            self.connection.connect()
        assert self.connection.sock is not None
        if self._shared is None:
            self._shared = _SharedSocket(self.connection.sock)
        self.connection.sock.settimeout(timeout_s)
        return self.connection.sock


class _SharedSocket(io.RawIOBase):
    """What `http.client` takes for the socket of each answer: they share a buffer, in which the next may begin."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = _AnswerReader(self)

    def makefile(self, *_: object) -> io.BufferedReader:
        return self._reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return sockets.receive_some(self._sock, memoryview(buffer))


class _AnswerReader(io.BufferedReader):
    def close(self) -> None:
        """Only one answer is over."""


def _beside(connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
    """The same connection for one more request: `http.client` would wait for the answer to the last one."""
    beside = http.client.HTTPConnection(connection.host, connection.port)
    beside.sock = connection.sock
    return beside
