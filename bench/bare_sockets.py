"""The reference of a round: the same bytes between the same processes, over sockets and nothing else.

As fast as plain Python sockets go: a thread per connection, `recv_into` memory that is there already, `sendall` of
several MiB at a time. A client says with one byte what follows; an upload is answered with one byte when it is in.
"""

from __future__ import annotations

import socket
import ssl
import threading

from harness import HOST
from thin_client import map_file

SLICE_BYTES = 4 << 20
UP, DOWN, DONE = b"U", b"D", b"."


class BareServer:
    """One buffer per client for what comes, one for all for what goes."""

    def __init__(self, clients: int, up_bytes: int, down_bytes: int, *, tls: bool = False) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
        if self._tls is not None:
            import trustme  # only a bench with TLS needs it

            trustme.CA().issue_cert(HOST).configure_cert(self._tls)
        self._free = [_touched(up_bytes) for _ in range(clients)]
        self._answer = _touched(down_bytes)
        self._listener = socket.create_server((HOST, 0), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock, self._free.pop()), daemon=True).start()

    def _serve(self, sock: socket.socket, buffer: memoryview) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True)
        while what := sock.recv(1):
            if what == UP:
                receive(sock, buffer)
                sock.sendall(DONE)
            else:
                send(sock, self._answer)


class BareClient:
    def __init__(self, file: str, down_bytes: int, port: int, *, tls: bool = False) -> None:
        self._frame = map_file(file)
        self._received = _touched(down_bytes)
        self._sock = socket.create_connection((HOST, port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its speed is measured, not its peer
            self._sock = context.wrap_socket(self._sock)

    def upload(self) -> None:
        self._sock.sendall(UP)
        send(self._sock, self._frame)
        receive(self._sock, memoryview(bytearray(len(DONE))))

    def fetch(self) -> None:
        self._sock.sendall(DOWN)
        receive(self._sock, self._received)

    def close(self) -> None:
        self._sock.close()


def send(sock: socket.socket, payload: memoryview) -> None:
    for start in range(0, len(payload), SLICE_BYTES):
        sock.sendall(payload[start : start + SLICE_BYTES])


def receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        count = sock.recv_into(into)
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        into = into[count:]


def _touched(size_bytes: int) -> memoryview:
    """Memory whose pages are mapped: page faults are not what is measured."""
    return memoryview(bytearray(b"\x01") * size_bytes)
