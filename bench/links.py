"""The emulated link (outerstep/demo/link.py) as a process, and what it carries indeed.

    python bench/links.py 127.0.0.1:8512 --mbit 100 --rtt-ms 50      # prints its own port; ends with its standard input

In a process of its own, so that metering takes no time from what is measured. Whoever quotes a number measured through
it quotes what `validate` saw of the link itself.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from outerstep.demo.link import EmulatedLink, Link

HOST = "127.0.0.1"
PING_COUNT = 11
HANG_S = 120.0


@contextlib.contextmanager
def emulated(link: Link, target: str) -> Iterator[str]:
    """host:port of a proxy to `target`, in a process of its own."""
    command = [sys.executable, __file__, target, "--mbit", str(link.mbit_per_s), "--rtt-ms", str(link.rtt_ms)]
    command += ["--window-bytes", str(link.window_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        port = proxy.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the proxy did not start: {' '.join(command)}")
        try:
            yield f"{HOST}:{port}"
        finally:
            proxy.stdin.close()
            try:
                proxy.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                proxy.kill()


# --- is it what it says? ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one connection through the link saw: the median round trip, and transfers once its window was open."""

    rtt_ms: float
    up_mbit_per_s: float
    down_mbit_per_s: float
    transfer_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.up_mbit_per_s:.0f} Mbit/s up, {self.down_mbit_per_s:.0f} down, {self.rtt_ms:.1f} ms "
            f"(one connection, {self.transfer_bytes / 1e6:.0f} MB)"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def validate(link: Link, *, seconds: float = 1.0) -> Seen:
    """Measure the link with plain sockets: a byte to and fro, then as much as the link should carry in `seconds`."""
    limit = min(link.bytes_per_s, link.window_bytes / (2 * link.delay_s))
    size_bytes = int(limit * seconds)
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=_echo, args=(listener, size_bytes), daemon=True).start()
        with (
            emulated(link, f"{HOST}:{listener.getsockname()[1]}") as address,
            socket.create_connection(_pair(address), timeout=HANG_S) as sock,
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(PING_COUNT):
                began_at = time.perf_counter()
                sock.sendall(b".")
                _receive(sock, 1)
                trips.append(time.perf_counter() - began_at)
            for _ in range(2):  # the first one opens the window
                began_at = time.perf_counter()
                sock.sendall(bytes(size_bytes))
                _receive(sock, 1)
                up_s = time.perf_counter() - began_at
            for _ in range(2):
                began_at = time.perf_counter()
                sock.sendall(b".")
                _receive(sock, size_bytes)
                down_s = time.perf_counter() - began_at
    mbit = size_bytes * 8 / 1e6
    return Seen(statistics.median(trips) * 1e3, mbit / up_s, mbit / down_s, size_bytes)


def _echo(listener: socket.socket, size_bytes: int) -> None:
    """The other end of `validate`."""
    sock, _ = listener.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PING_COUNT):
            sock.sendall(_receive(sock, 1))
        for _ in range(2):
            _receive(sock, size_bytes)
            sock.sendall(b".")
        for _ in range(2):
            _receive(sock, 1)
            sock.sendall(bytes(size_bytes))


def _receive(sock: socket.socket, size_bytes: int) -> bytes:
    """So many bytes; the last of them, for who wants to see them."""
    data = b""
    while size_bytes:
        data = sock.recv(min(size_bytes, 1 << 20))
        if not data:
            raise ConnectionError("the link broke")
        size_bytes -= len(data)
    return data


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description="Carry TCP connections over an emulated slow link.")
    parser.add_argument("target", help="host:port at the other end of the link")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s each way, over all connections (default 100)")
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="round trip (default 50)")
    parser.add_argument("--window-bytes", type=int, default=4 << 20, help="under way per connection (default 4 MiB)")
    arguments = parser.parse_args()
    link = Link(arguments.mbit, arguments.rtt_ms, arguments.window_bytes)
    with contextlib.suppress(KeyboardInterrupt), EmulatedLink(arguments.target, link) as line:
        print(_pair(line.address)[1], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
