"""A slow link on one machine, without root: a TCP proxy that delays and meters what passes through it.

    with EmulatedLink("127.0.0.1:8512", Link(mbit_per_s=100, rtt_ms=50)) as line:     # line.address leads to the target
        line.link = Link(mbit_per_s=10, rtt_ms=50)                                    # from now on

What it does to each direction, over all connections together:

    rate      bytes leave one after the other: a chunk of n bytes occupies the link for n / rate
    delay     half the round trip later they arrive; never reordered, never lost
    window    a connection has at most so many bytes in flight; they count until the acknowledgement is back

and to each connection:

    handshake    the first byte waits for one round trip
    slow start   its window begins with 10 segments and grows by what is acknowledged (so it doubles every round trip);
                 after a second without traffic it starts over, as on Linux

So one connection carries at most window / round trip, as over a long fat link; several share the rate. What it leaves
out: losses, and acknowledgements that queue behind data of the other direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass

from ..security.access import parse_address

LOOPBACK = "127.0.0.1"
SEGMENT_BYTES = 1460
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
IDLE_S = 1.0  # after which a connection starts slowly again
CHUNK_S = 0.001  # how long one chunk occupies the link: finer than the timer would gain nothing
SOCKET_BUFFER_BYTES = 128 << 10  # the proxy's own: what lies in them is not metered yet


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
    """One direction of the link, for all connections. `link` may be replaced at any time: it holds for the bytes that
    are handed over afterwards."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.carried_bytes = 0
        self._free_at = 0.0

    def arrival(self, size_bytes: int, now: float) -> float:
        """When bytes that are handed over now are on the other side."""
        self.carried_bytes += size_bytes
        self._free_at = max(now, self._free_at) + size_bytes / self.link.bytes_per_s
        return self._free_at + self.link.delay_s


class LinkStream:
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


class EmulatedLink:
    """A proxy to `target` that listens on `host`, in a thread of its own."""

    def __init__(self, target: str, link: Link, host: str = LOOPBACK) -> None:
        self._target = parse_address(target)
        self._up, self._down = Lane(link), Lane(link)
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="emulated-link", daemon=True)

    @property
    def link(self) -> Link:
        return self._up.link

    @link.setter
    def link(self, link: Link) -> None:
        self._up.link = self._down.link = link

    @property
    def carried_bytes(self) -> int:
        """Both ways."""
        return self._up.carried_bytes + self._down.carried_bytes

    def __enter__(self) -> EmulatedLink:
        self._thread.start()
        self._serving.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        """What is under way is lost."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connect, sock=self._listener):
            self._serving.set()
            await self._ended.wait()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self.link.delay_s)
        there: asyncio.StreamWriter | None = None
        # Whichever side breaks (or if we end), the other is told by the end of its connection: there is no more to say.
        with contextlib.suppress(OSError, ExceptionGroup, asyncio.CancelledError):
            back, there = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(LinkStream(reader, there, self._up).carry())
                tasks.create_task(LinkStream(back, writer, self._down).carry())
        for end in (writer, there):
            if end is not None:
                end.close()
