"""A request's body, read straight from the socket to its destination; and two things to do with any socket."""

from __future__ import annotations

import contextlib
import socket
import threading

from ..errors import BadRequest, Busy
from ..security import is_loopback
from .turns import Line

SLICE_BYTES = 1 << 20
SMALL_BYTES = 64 << 10


class Allowance:
    """How many bytes of messages may be in memory at a time. A small one is always taken: there are as many as there
    are connections."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            if count > self._left:
                raise Busy("too many large messages at a time", retry_after_s=1.0)
            self._left -= count

    def give_back(self, count: int) -> None:
        with self._lock:
            self._left += count


class HttpBody:
    """The unread rest of a request. `began` holds the bytes that arrived together with the head."""

    def __init__(
        self, line: Line, length: int, began: bytes, *, expects_continue: bool, allowance: Allowance | None = None
    ) -> None:
        self._allowance = allowance
        self._taken = 0
        self._line = line
        self._sock = line.sock
        self.length = length
        self._began = began
        self._left = length
        self._expects_continue = expects_continue

    @property
    def peer(self) -> str:
        """The address of the machine that sends."""
        return peer_of(self._sock)

    @property
    def is_from_here(self) -> bool:
        """From this very machine: over the loopback, or from the address that it was sent to."""
        return is_loopback(self.peer) or self.peer == self._sock.getsockname()[0]

    @property
    def left(self) -> int:
        return self._left

    @property
    def is_held_back(self) -> bool:
        """The sender waits for our "100 Continue", which it will not get any more."""
        return self._expects_continue and self._left > 0

    @property
    def unexpected(self) -> bytes:
        """What came after the end of the body: the beginning of the next request."""
        return self._began

    def read_into(self, view: memoryview) -> None:
        if len(view) > self._left:
            raise BadRequest(f"body has {self.length} bytes, {len(view)} expected")
        if self._expects_continue:
            self._line.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        here = min(len(self._began), len(view))
        view[:here] = self._began[:here]
        self._began = self._began[here:]
        self._left -= here
        rest = view[here:]
        while rest:
            count = self._line.receive_into(rest)
            if count == 0:
                raise BadRequest(f"the body ended {self._left} bytes short of its announced {self.length}")
            self._left -= count
            rest = rest[count:]

    def read(self) -> bytearray:
        """All of it. Memory is taken as the bytes come, not as they are announced; `release` gives it back."""
        data = bytearray()
        while self._left:
            count = min(self._left, SLICE_BYTES)
            if self._allowance is not None and self.length > SMALL_BYTES:
                self._allowance.take(count)
                self._taken += count
            piece = bytearray(count)
            self.read_into(memoryview(piece))
            if not self._left and not data:
                return piece
            data += piece
        return data

    def release(self) -> None:
        """The message is not needed any more."""
        if self._allowance is not None:
            self._allowance.give_back(self._taken)
            self._taken = 0

    def discard(self) -> None:
        scratch = memoryview(bytearray(min(self._left, SLICE_BYTES)))
        while self._left:
            self.read_into(scratch[: min(self._left, len(scratch))])

    def abort(self) -> None:
        shut(self._sock)


def shut(sock: socket.socket) -> None:
    """Wake whoever reads or writes. Not by the socket's own method: that of a TLS socket drops its encryption first,
    and the reader would take what is left on the line for plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def peer_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "somebody who has gone"
