"""Moving many bytes with few calls.

A Python socket with a timeout never blocks in the kernel: it asks before every call whether the call will block, takes
what is there, and comes back, several thousand times for a large part, each time wanting the interpreter that other
threads want too. A socket that blocks, with the kernel's own limit on silence, fills a buffer in one call.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from typing import TypeVar

SLICE_BYTES = 4 << 20

T = TypeVar("T")


def block(sock: socket.socket, silence_s: float) -> None:
    """From now on calls block, for at most so long without a byte."""
    sock.setblocking(True)
    limit = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6) or int(silence_s < 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_into(sock: socket.socket, view: memoryview) -> int:
    """At least a byte, as many as fit if they come; 0 = the peer has closed."""
    if isinstance(sock, ssl.SSLSocket):  # record by record
        return _timed(lambda: sock.recv_into(view))
    return _timed(lambda: sock.recv_into(view, 0, socket.MSG_WAITALL))


def receive(sock: socket.socket, size_bytes: int) -> bytes:
    """Whatever comes next; b"" = the peer has closed."""
    return _timed(lambda: sock.recv(size_bytes))


def send(sock: socket.socket, data: bytes | memoryview) -> None:
    """All of it, in slices: the limit is on the silence of each."""
    view = memoryview(data)
    for start in range(0, len(view), SLICE_BYTES):
        _timed(lambda: sock.sendall(view[start : start + SLICE_BYTES]))  # noqa: B023 - called at once


def _timed(move: Callable[[], T]) -> T:
    try:
        return move()
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:  # how the kernel says it
        raise TimeoutError("the peer was silent for too long") from error
