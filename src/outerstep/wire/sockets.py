"""How bytes are moved: a few connections work at a time, however many there are.

When a round closes, every worker that waited for it asks at the same moment, and fetches the same bytes. Hundreds of
threads then want a core and the interpreter, and one more that wants them too, to answer an operator's status request,
would wait for its share among them. So a connection takes a *turn* to work: to read a message and make its answer, or
to move a burst of bytes that can be moved now. No connection holds a turn while it waits: a slow or silent peer keeps
no other from working, which a limit on the number of open transfers would let it do.

    with channel.turn:
        …work…
        with channel.away():
            …wait…
        …work…

Where there are few connections none takes turns, and each blocks in the kernel until its bytes are moved. That is
faster: a Python socket with a timeout never blocks in the kernel. It asks before every call whether the call will
block, takes what is there, and comes back, several thousand times for a large part, each time wanting the interpreter
that other threads want too. A socket that blocks, with the kernel's own limit on silence, fills a buffer in one call.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import queue
import select
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TypeVar

from .connections import Connection

BURST_BYTES = 1 << 20
LARGE_BYTES = 64 << 10
SLICE_BYTES = 4 << 20
KEEPALIVE_PROBES = 3
INFO_BYTES, BYTES_ACKED = 136, 120  # of struct tcp_info: u64 bytes_acked, u64 bytes_received

T = TypeVar("T")

# How a blocking socket says that the kernel's limit on silence has passed.
_SILENT: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


# --- blocking sockets -------------------------------------------------------------------------------------------------


def block(sock: socket.socket, silence_s: float) -> None:
    """From now on calls block, for at most so long without a byte."""
    sock.setblocking(True)
    limit = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6) or int(silence_s < 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_into(sock: socket.socket, view: memoryview) -> int:
    """At least a byte, as many as fit if they come; 0 = the peer has closed."""
    try:
        if isinstance(sock, ssl.SSLSocket):  # record by record
            return sock.recv_into(view)
        return sock.recv_into(view, 0, socket.MSG_WAITALL)
    except _SILENT as error:
        raise TimeoutError("the peer was silent for too long") from error


def receive_some(sock: socket.socket, view: memoryview) -> int:
    """Whatever comes next; 0 = the peer has closed."""
    try:
        return sock.recv_into(view)
    except _SILENT as error:
        raise TimeoutError("the peer was silent for too long") from error


def send(sock: socket.socket, data: bytes | memoryview) -> None:
    """All of it, in slices: the limit is on the silence of each."""
    view = memoryview(data)
    try:
        for start in range(0, len(view), SLICE_BYTES):
            sock.sendall(view[start : start + SLICE_BYTES])
    except _SILENT as error:
        raise TimeoutError("the peer was silent for too long") from error


def moved_bytes(sock: socket.socket) -> int | None:
    """Both ways, since it was opened; None = this system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, option, INFO_BYTES)
    if len(info) < INFO_BYTES:
        return None
    acked, received = struct.unpack_from("=QQ", info, BYTES_ACKED)
    return int(acked + received)


# --- turns ------------------------------------------------------------------------------------------------------------


class Places:
    """So many may work at a time. A queue in C of what lets one in: to take and to give it back is one call each, in
    which no other thread can be interrupted while it holds a lock, as in a semaphore of Python's."""

    def __init__(self, many: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(many):
            self._free.put(None)
        self.acquire, self.release = self._free.get, functools.partial(self._free.put, None)

    @property
    def free(self) -> int:
        return self._free.qsize()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Channel:
    """A connection's socket, plain or TLS. It moves bytes in turns, and waits without one for at most `timeout_s` of
    silence, which is a TimeoutError. `places`: how many may work at a time, shared by all. None = this one goes first
    and needs no turn: it blocks, for as long at most. While it waits for the peer, the connection says so."""

    def __init__(self, connection: Connection, places: Places | None, timeout_s: float) -> None:
        self.connection = connection
        self.sock = connection.sock
        self._places, self._blocks = places, places is None
        self.turn: AbstractContextManager[object] = nullcontext() if places is None else places
        self.set_timeout(timeout_s)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Wait in the middle of a turn, without it."""
        if self._places is not None:
            self._places.release()
        try:
            yield
        finally:
            if self._places is not None:
                self._places.acquire()

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        if self._blocks:
            block(self.sock, seconds)
        else:
            self.sock.setblocking(False)

    def wait(self, event: int = select.POLLIN) -> None:
        """Until it can be read from or written to; or is broken, which the next call will say."""
        poll = select.poll()
        poll.register(self.sock, event)
        self.connection.waits = "in" if event == select.POLLIN else "out"
        try:
            found = poll.poll(self.timeout_s * 1e3)
        finally:
            self.connection.waits = ""
        if not found:
            raise TimeoutError(f"nothing for {self.timeout_s:g} s")

    def receive(self, size_bytes: int) -> bytes:
        """Whatever comes next; b"" = the peer has closed."""
        if not self._blocks:
            return self._when_possible(lambda: self.sock.recv(size_bytes), select.POLLIN)
        self.connection.waits = "in"
        try:
            return self.sock.recv(size_bytes)
        except _SILENT as error:
            raise TimeoutError("the peer was silent for too long") from error
        finally:
            self.connection.waits = ""

    def receive_into(self, view: memoryview) -> int:
        """At least a byte. Much is waited for in the kernel, which wants no turn and no interpreter until it is
        there."""
        if not self._blocks and len(view) < LARGE_BYTES:
            return self._when_possible(lambda: self.sock.recv_into(view), select.POLLIN)
        if not self._blocks:
            block(self.sock, self.timeout_s)
        self.connection.waits = "in"
        try:
            return receive_into(self.sock, view)
        finally:
            self.connection.waits = ""
            if not self._blocks:
                self.sock.setblocking(False)

    def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        if self._blocks:
            self.connection.waits = "out"
            try:
                send(self.sock, data)
            finally:
                self.connection.waits = ""
            return
        rest = memoryview(data)
        while rest:
            burst = rest[:BURST_BYTES]
            count = self._when_possible(lambda: self.sock.send(burst), select.POLLOUT)  # noqa: B023 - called at once
            rest = rest[count:]
            if count < len(burst):  # there was no room for more
                self.wait(select.POLLOUT)

    def _when_possible(self, move: Callable[[], T], event: int) -> T:
        while True:
            try:
                with self.turn:
                    return move()
            except BlockingIOError:
                self.wait(event)
            except ssl.SSLWantReadError:  # whichever way the bytes of ours go
                self.wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self.wait(select.POLLOUT)


# --- any socket -------------------------------------------------------------------------------------------------------


def shut(sock: socket.socket) -> None:
    """Wake the threads that read or write. Not by the socket's own method: that of a TLS socket drops its encryption
    first, and the reader would take what is left on the line for plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def peer_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "a peer that has gone"


def is_gone(sock: socket.socket) -> bool:
    """Has the peer closed the connection? (A peer that closed only its own direction counts as gone, too.)"""
    try:
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def has_all(sock: socket.socket) -> bool:
    """Has the peer's kernel acknowledged every byte that we sent?"""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]) == 0
    except (OSError, ValueError):
        return False


def probe_often(sock: socket.socket, every_s: int) -> None:
    """Let the kernel find out by itself that the peer's machine is gone, after a few probes so far apart."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", KEEPALIVE_PROBES)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
