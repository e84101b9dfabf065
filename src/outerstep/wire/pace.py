"""The minimum-rate guard: connections whose peer gives or takes next to nothing are closed.

A thread that reads from a slow peer is inside one call of the kernel or of OpenSSL, for as long as single bytes keep
coming. So the rule is applied from outside: every few seconds one thread looks at all connections. Where a connection
waits for its peer, the time since the last look is added up, and the kernel is asked how many bytes have gone either
way; when `window_s` have been waited and fewer than `least_bytes` have gone, it is shut. Time in which bytes lie ready
and we are the slow ones is not counted, nor is any outside of a request.

Linux tells the bytes (TCP_INFO). Elsewhere only silence, handshakes, strangers and idleness are bounded.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .connections import Connection, Connections
from .limits import ServiceLimits
from .sockets import moved_bytes, shut

log = logging.getLogger(__name__)

LOOKS_PER_WINDOW = 12


@dataclass
class _Window:
    request: int
    moved: int
    waited_s: float = 0.0


class Pace:
    """`start` and `stop` are for the thread; `look` is what it does."""

    def __init__(self, connections: Connections, limits: ServiceLimits, clock: Callable[[], float]) -> None:
        self._connections, self._limits, self._clock = connections, limits, clock
        self._windows: dict[Connection, _Window] = {}
        self._looked_at = clock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outerstep-pace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        limits = self._limits
        pause_s = min(limits.window_s, limits.stranger_s, limits.idle_s) / LOOKS_PER_WINDOW
        while not self._ending.wait(pause_s):
            self.look(self._connections.list())

    def look(self, connections: Iterable[Connection]) -> None:
        now, before = self._clock(), self._windows
        passed_s, self._looked_at, self._windows = now - self._looked_at, now, {}
        for connection in connections:
            if not connection.is_known and now - connection.since > self._limits.stranger_s:
                self._close(connection, "strangers_closed")
            elif connection.idle_since is not None:
                if now - connection.idle_since > self._limits.idle_s:
                    self._close(connection, "idle_closed")
            elif connection.waits:
                self._judge(connection, before.get(connection), passed_s)
            elif connection in before:
                self._windows[connection] = before[connection]

    def _judge(self, connection: Connection, window: _Window | None, passed_s: float) -> None:
        try:
            moved, is_ours = moved_bytes(connection.sock), is_our_turn(connection)
        except (OSError, ValueError):
            return  # it is being closed
        if moved is None:
            return
        if window is None or window.request != connection.request:
            window = _Window(connection.request, moved)
        elif not is_ours:
            window.waited_s += passed_s
        if moved - window.moved >= self._limits.least_bytes:
            window = _Window(connection.request, moved)
        self._windows[connection] = window
        if window.waited_s >= self._limits.window_s and connection.request == window.request and connection.waits:
            self._close(connection, "slow_closed")

    def _close(self, connection: Connection, why: str) -> None:
        self._connections.note(why)
        log.debug("closed a connection from %s: %s", connection.address, why.removesuffix("_closed"))
        shut(connection.sock)


def is_our_turn(connection: Connection) -> bool:
    """Bytes lie ready that we have not read, or we have nothing on its way."""
    if connection.waits == "in":
        return _queued(connection.sock, termios.FIONREAD) > 0
    return _queued(connection.sock, termios.TIOCOUTQ) == 0


def _queued(sock: socket.socket, what: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), what, bytes(4)))[0])
