"""A slow link on one machine, without root: a TCP proxy that delays and meters what passes through it.

    python bench/links.py 127.0.0.1:8512 --mbit 100 --rtt-ms 50      # prints its own port; ends with its standard input

What it does to each direction, over all connections together:

    rate      bytes leave one after the other: a chunk of n bytes occupies the link for n / rate
    delay     half the round trip later they arrive; never reordered, never lost
    window    a connection has at most so many bytes in flight; they count until the acknowledgement is back

and to each connection:

    handshake    the first byte waits for one round trip
    slow start   its window begins with 10 segments and grows by what is acknowledged (so it doubles every round trip);
                 after a second without traffic it starts over, as on Linux

So one connection carries at most window / round trip, as over a long fat link; several share the rate. What it leaves
out: losses, and acknowledgements that queue behind data of the other direction. Whoever quotes a number measured
through it quotes what `validate` saw of the link itself.
"""

from __future__ import annotations

import argparse
import asyncio
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

HOST = "127.0.0.1"
SEGMENT_BYTES = 1460
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
IDLE_S = 1.0  # after which a connection starts slowly again
CHUNK_S = 0.001  # how long one chunk occupies the link: finer than the timer would gain nothing
SOCKET_BUFFER_BYTES = 128 << 10  # the proxy's own: what lies in them is not metered yet
PING_COUNT = 11
HANG_S = 120.0


@dataclass(frozen=True)
class Link:
    """What is emulated; the same both ways."""

    mbit_per_s: float
    rtt_ms: float
    window_bytes: int = 4 << 20

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_per_s * 1e6 / 8

    @property
    def delay_s(self) -> float:
        return self.rtt_ms / 2e3

    @property
    def chunk_bytes(self) -> int:
        return min(max(int(self.bytes_per_s * CHUNK_S), SEGMENT_BYTES), 64 << 10)

    def __str__(self) -> str:
        return f"{self.mbit_per_s:g} Mbit/s, {self.rtt_ms:g} ms round trip"


# --- the proxy --------------------------------------------------------------------------------------------------------


class Lane:
    """One direction of the link, for all connections."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_at = 0.0

    def arrival(self, size_bytes: int, now: float) -> float:
        """When bytes that are handed over now are on the other side."""
        self._free_at = max(now, self._free_at) + size_bytes / self.link.bytes_per_s
        return self._free_at + self.link.delay_s


class Stream:
    """One direction of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
        self._reader, self._writer, self._lane = reader, writer, lane
        self._loop = asyncio.get_running_loop()
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._unacknowledged = 0
        self._window_bytes = FIRST_WINDOW_BYTES
        self._active_at = self._loop.time()
        self._room = asyncio.Event()

    async def carry(self) -> None:
        """Until the sender has closed its side and all has arrived."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._deliver())

    async def _send(self) -> None:
        ended = False
        while not ended:
            while (room := self._window_bytes - self._unacknowledged) <= 0:
                self._room.clear()
                await self._room.wait()
            data = await self._reader.read(min(room, self._lane.link.chunk_bytes))
            ended = not data
            now = self._loop.time()
            if not self._unacknowledged and now - self._active_at > IDLE_S:
                self._window_bytes = FIRST_WINDOW_BYTES
            self._active_at = now
            self._unacknowledged += len(data)
            self._under_way.put_nowait((self._lane.arrival(len(data), now), data))

    async def _deliver(self) -> None:
        while True:
            arrives_at, data = await self._under_way.get()
            await asyncio.sleep(arrives_at - self._loop.time())
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()  # who does not read is not sent more than its window
            self._loop.call_later(self._lane.link.delay_s, self._acknowledge, len(data))

    def _acknowledge(self, size_bytes: int) -> None:
        self._unacknowledged -= size_bytes
        self._window_bytes = min(self._window_bytes + size_bytes, self._lane.link.window_bytes)
        self._active_at = self._loop.time()
        self._room.set()


async def serve(target: tuple[str, int], link: Link) -> None:
    """Say the port, then carry until standard input ends."""
    up, down = Lane(link), Lane(link)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * link.delay_s)
        there: asyncio.StreamWriter | None = None
        # Whichever side breaks (or if we end), the other is told by the end of its connection: there is no more to say.
        with contextlib.suppress(OSError, ExceptionGroup, asyncio.CancelledError):
            back, there = await asyncio.open_connection(*target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Stream(reader, there, up).carry())
                tasks.create_task(Stream(back, writer, down).carry())
        for end in (writer, there):
            if end is not None:
                end.close()

    listener = socket.create_server((HOST, 0), backlog=1024)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    server = await asyncio.start_server(connect, sock=listener)
    print(listener.getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


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
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(_pair(arguments.target), link))


if __name__ == "__main__":
    main()
