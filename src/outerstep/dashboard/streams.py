"""Server-sent events to every open page, from one thread.

A connection that asks for events is handed over by the HTTP server: it has no thread of its own, does not count among
the port's connections, and the minimum-rate guard does not look at it. Its limits are here. There are `MOST_STREAMS` at
a time. What is to be sent is rendered once, and the same bytes go to all. No send blocks: bytes that a reader does not
take wait for it, up to `MOST_WAITING_BYTES` and for `PATIENCE_S`; then it is dropped, and its browser reconnects.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import Busy
from ..wire.sockets import shut

MOST_STREAMS = 32
MOST_WAITING_BYTES = 4 << 20
PATIENCE_S = 30.0
COMMENT_S = 15.0  # so that a proxy on the way sees that the line is alive
COMMENT = b": still here\n\n"
RETRY_MS = 3000
HEAD = (
    "HTTP/1.1 200 OK\r\n"
    "Content-Type: text/event-stream; charset=utf-8\r\n"
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Accel-Buffering: no\r\n"
    "Connection: close\r\n"
    "\r\n"
    f"retry: {RETRY_MS}\n\n"
).encode()


@dataclass(eq=False)
class PageStream:
    """One open page. `is_valid`: whether its session still is. `waiting`: bytes that it has not taken yet."""

    sock: socket.socket
    is_valid: Callable[[], bool]
    waiting: bytearray = field(default_factory=lambda: bytearray(HEAD))
    stuck_since: float | None = None
    sent_at: float = 0.0

    @property
    def comment_at(self) -> float:
        return self.sent_at + COMMENT_S


class PageStreams:
    """All of them. `add` is for any thread; everything else for the one that sends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived: list[PageStream] = []
        self._open: dict[int, PageStream] = {}  # by file number
        self._reserved = 0
        self._is_closed = False
        self._inbox, self._bell = socket.socketpair()
        self._inbox.setblocking(False)
        self._bell.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self.dropped = 0  # those that were too slow

    def __len__(self) -> int:
        return self._reserved

    def reserve(self) -> None:
        """A place for one more; Busy if there is none."""
        with self._lock:
            if self._reserved >= MOST_STREAMS:
                raise Busy(f"{MOST_STREAMS} pages are open, the most there can be", retry_after_s=10.0)
            self._reserved += 1

    def add(self, sock: socket.socket, is_valid: Callable[[], bool]) -> None:
        """Who has a place."""
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            sock.setblocking(False)
            self._arrived.append(PageStream(sock, is_valid))
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        with contextlib.suppress(OSError):  # it is full, so it wakes; or closed, so nobody waits
            self._bell.send(b".")

    def wait(self, timeout_s: float) -> None:
        """Until something is to be done; meanwhile send what readers take, and let go of those that went away."""
        for number, happened in self._poll.poll(max(timeout_s, 0.0) * 1e3):
            if number == self._inbox.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._inbox.recv(4096)
                continue
            stream = self._open[number]
            if happened & ~select.POLLOUT and self._has_left(stream):
                self._drop(stream)
            elif happened & select.POLLOUT:
                self._push(stream)

    def greet(self, render: Callable[[], bytes]) -> None:
        """Take in those that have come, and send each the same greeting. If it cannot be rendered, they wait for the
        next time."""
        if not self._arrived:
            return
        greeting = render()
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for stream in arrived:
            stream.sent_at = self._clock()
            self._open[stream.sock.fileno()] = stream
            self._poll.register(stream.sock, select.POLLIN)
            self._give(stream, greeting)

    def send(self, data: bytes) -> None:
        for stream in list(self._open.values()):
            self._give(stream, data)

    @property
    def comment_at(self) -> float:
        """When the next comment is due, by the clock; never if nobody is here."""
        return min((stream.comment_at for stream in self._open.values()), default=math.inf)

    def remind(self) -> None:
        """A comment for each that has been sent nothing for `COMMENT_S`."""
        now = self._clock()
        for stream in list(self._open.values()):
            if now >= stream.comment_at:
                self._give(stream, COMMENT)

    def look(self) -> None:
        """Now and then: an end for those that take nothing, or whose session is over."""
        now = self._clock()
        for stream in list(self._open.values()):
            if not stream.is_valid():
                self._drop(stream)
            elif stream.stuck_since is not None and now - stream.stuck_since > PATIENCE_S:
                self.dropped += 1
                self._drop(stream)

    @property
    def has_readers(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        with self._lock:
            arrived, self._arrived, self._is_closed = self._arrived, [], True
        for stream in [*arrived, *self._open.values()]:
            shut(stream.sock)
            stream.sock.close()
        self._open.clear()
        self._inbox.close()
        self._bell.close()

    def let_go(self) -> None:
        """In a process that was forked. Its parent's connections end when the parent ends them."""
        for stream in [*self._arrived, *self._open.values()]:
            stream.sock.close()

    def _give(self, stream: PageStream, data: bytes) -> None:
        stream.waiting += data
        stream.sent_at = self._clock()
        if len(stream.waiting) > MOST_WAITING_BYTES:
            self.dropped += 1
            self._drop(stream)
        else:
            self._push(stream)

    def _push(self, stream: PageStream) -> None:
        """As many of the bytes as it takes now."""
        try:
            while stream.waiting:
                count = stream.sock.send(stream.waiting)
                del stream.waiting[:count]
                stream.stuck_since = None
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            stream.stuck_since = stream.stuck_since or self._clock()
        except OSError:
            self._drop(stream)
            return
        self._poll.modify(stream.sock, select.POLLIN | (select.POLLOUT if stream.waiting else 0))

    @staticmethod
    def _has_left(stream: PageStream) -> bool:
        """A browser says nothing on such a connection until it closes it; whoever does is no browser."""
        try:
            stream.sock.recv(4096)
            return True
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True

    def _drop(self, stream: PageStream) -> None:
        if self._open.pop(stream.sock.fileno(), None) is None:
            return
        self._poll.unregister(stream.sock)
        shut(stream.sock)
        stream.sock.close()
        with self._lock:
            self._reserved -= 1
