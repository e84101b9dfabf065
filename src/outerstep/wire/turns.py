"""Who works: a few connections at a time, however many there are.

When a round closes, every worker that waited for it asks at the same moment, and fetches the same bytes. Hundreds of
threads then want a core and the interpreter, and one more that wants them too, to answer an operator's status request,
would wait for its share among them. So a connection takes a *turn* to work: to read a message and make its answer
(`Turn`), or to move a burst of bytes that can be moved now (`Line`). Nobody holds a turn while it waits for anything: a
slow or silent peer keeps no one else from working, which a limit on the number of open transfers would let it do.

Where there are few connections nobody takes turns, and each blocks in the kernel until its bytes are moved
(blocking.py): that is faster.

    with Turn(places) as turn:
        …work…
        with turn.away():
            …wait…
        …work…
"""

from __future__ import annotations

import select
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from . import blocking
from .connections import Connection

BURST_BYTES = 1 << 20

T = TypeVar("T")


class Turn:
    """`places`: how many may work at a time, shared by all; None = this one goes first and needs no turn."""

    def __init__(self, places: threading.Semaphore | None) -> None:
        self._places = places

    def __enter__(self) -> Turn:
        if self._places is not None:
            self._places.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._places is not None:
            self._places.release()

    @contextmanager
    def away(self) -> Iterator[None]:
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class Line:
    """A connection's socket, plain or TLS. It moves bytes in turns, and waits without one for at most `timeout_s` of
    silence, which is a TimeoutError. Without `places` it blocks, for as long at most. While it waits for the peer, the
    connection says so."""

    def __init__(self, connection: Connection, places: threading.Semaphore | None, timeout_s: float) -> None:
        self.connection = connection
        self.sock = connection.sock
        self.turn = Turn(places)
        self._blocks = places is None
        self.set_timeout(timeout_s)

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        if self._blocks:
            blocking.block(self.sock, seconds)
        else:
            self.sock.setblocking(False)

    def wait(self, event: int = select.POLLIN) -> None:
        """Until it can be read from or written to; or is broken, which the next call will say."""
        poll = select.poll()
        poll.register(self.sock, event)
        with self._waiting("in" if event == select.POLLIN else "out"):
            found = poll.poll(self.timeout_s * 1e3)
        if not found:
            raise TimeoutError(f"nothing for {self.timeout_s:g} s")

    def receive(self, size_bytes: int) -> bytes:
        """Whatever comes next; b"" = the peer has closed."""
        if self._blocks:
            with self._waiting("in"):
                return blocking.receive(self.sock, size_bytes)
        return self._when_possible(lambda: self.sock.recv(size_bytes), select.POLLIN)

    def receive_into(self, view: memoryview) -> int:
        if self._blocks:
            with self._waiting("in"):
                return blocking.receive_into(self.sock, view)
        return self._when_possible(lambda: self.sock.recv_into(view[:BURST_BYTES]), select.POLLIN)

    def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        if self._blocks:
            with self._waiting("out"):
                blocking.send(self.sock, data)
            return
        rest = memoryview(data)
        while rest:
            burst = rest[:BURST_BYTES]
            count = self._when_possible(lambda: self.sock.send(burst), select.POLLOUT)  # noqa: B023 - called at once
            rest = rest[count:]
            if count < len(burst):  # there was no room for more
                self.wait(select.POLLOUT)

    @contextmanager
    def _waiting(self, way: Literal["in", "out"]) -> Iterator[None]:
        self.connection.waits = way
        try:
            yield
        finally:
            self.connection.waits = ""

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


__all__ = ["Line", "Turn"]
