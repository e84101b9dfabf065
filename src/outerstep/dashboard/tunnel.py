"""A way for a browser to reach a server whose certificate only this user's commands know.

    browser ── http://127.0.0.1:PORT ──▶ this command ── TLS, certificate pinned ──▶ server

Bytes go through as they are. Whoever else reaches the port on this machine is a stranger to the server, as anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
from types import TracebackType

from ..errors import OuterstepError
from ..wire.http_transport import HttpTransport

log = logging.getLogger(__name__)

MOST = 32  # connections at a time
CHUNK_BYTES = 64 << 10
SEND_S = 60.0  # how long one end may take nothing


class Tunnel:
    """Listens on a free port of 127.0.0.1."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._places = threading.BoundedSemaphore(MOST)
        self._thread = threading.Thread(target=self._accept, name="outerstep-tunnel", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def wait(self) -> None:
        self._thread.join()

    def __enter__(self) -> Tunnel:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                browser, _ = self._listener.accept()
            except OSError:
                return
            self._places.acquire()
            threading.Thread(target=self._carry, args=(browser,), name="outerstep-tunnel", daemon=True).start()

    def _carry(self, browser: socket.socket) -> None:
        try:
            with browser, self._transport.open_line() as server:
                pass_on(browser, server)
        except (OuterstepError, OSError) as error:
            log.warning("a connection of the page ended: %s", error)
        finally:
            self._places.release()


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Until either closes. One thread reads and writes: no TLS connection may be used by two at once."""
    one.settimeout(SEND_S)
    other.settimeout(SEND_S)
    ways = {one.fileno(): (one, other), other.fileno(): (other, one)}
    poll = select.poll()
    for sock in (one, other):
        poll.register(sock, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            source, target = ways[number]
            while True:
                data = source.recv(CHUNK_BYTES)
                if not data:
                    return
                target.sendall(data)
                if not isinstance(source, ssl.SSLSocket) or not source.pending():  # decrypted already: no poll tells
                    break
