"""A line that misbehaves: a TCP proxy on the loopback between a worker and a server.

    with Proxy(server.address, up=CutAfter(300_000)) as line: …           # line.address is where the worker connects

It passes bytes on in both directions, counts them, and asks for each piece what to do with it (`Judge`): pass it on,
pass something else on, or cut the connection. TLS goes through it as it is. With a `Link` it is a slow line too: bytes
leave one after the other at its rate, arrive half a round trip later, and a connection has a bounded amount under way.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PIECE_BYTES = 16 << 10
BUFFER_BYTES = 64 << 10  # the proxy's own sockets': what lies in them is neither counted nor metered yet


@dataclass(frozen=True)
class Link:
    """What is emulated, the same both ways; all connections share the rate."""

    mbit_per_s: float
    rtt_s: float
    window_bytes: int = 1 << 20

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_per_s * 1e6 / 8


@dataclass(eq=False)
class Flow:
    """One connection: its two ends, and what it has carried."""

    near: socket.socket
    far: socket.socket
    carried: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def cut(self) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


Judge = Callable[[Flow, bytes], bytes | None]
"""What to pass on of a piece; None = cut the connection here."""


def pass_on(flow: Flow, piece: bytes) -> bytes | None:
    return piece


class Proxy:
    """`up` judges what the worker sends, `down` what the server answers; both may be replaced at any time."""

    def __init__(self, target: str, *, up: Judge = pass_on, down: Judge = pass_on, link: Link | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up, self.down = up, down
        self._lanes = {"up": _Lane(link), "down": _Lane(link)}
        self._lock = threading.Lock()
        self.carried = {"up": 0, "down": 0}
        self.accepted = 0  # connections
        self.cuts = 0
        self.is_open = True  # if not, whoever connects is turned away
        self.passing = threading.Event()  # while it is not set, nothing moves, and nobody is told
        self.passing.set()
        self._flows: set[Flow] = set()
        self._listener = _listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self.passing.set()
        self.cut_all()
        self._thread.join(5.0)

    def cut_all(self) -> None:
        """Everything that is under way is lost."""
        with self._lock:
            flows = list(self._flows)
        for flow in flows:
            self._cut(flow)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if not self.is_open:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, timeout=20)
                far.settimeout(None)
            except OSError:  # nobody is there: the worker sees what it would see without us
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = Flow(near, far)
            with self._lock:
                self._flows.add(flow)
            threading.Thread(target=self._carry_both, args=(flow,), name="proxy-flow", daemon=True).start()

    def _carry_both(self, flow: Flow) -> None:
        back = threading.Thread(target=self._carry, args=(flow, "down"), name="proxy-down", daemon=True)
        back.start()
        self._carry(flow, "up")
        back.join()
        with self._lock:
            self._flows.discard(flow)
        flow.near.close()
        flow.far.close()

    def _carry(self, flow: Flow, way: str) -> None:
        """Until the sender has ended its half, or the connection is cut."""
        source, sink = (flow.near, flow.far) if way == "up" else (flow.far, flow.near)
        under_way = self._lanes[way].open(sink)
        try:
            while piece := source.recv(PIECE_BYTES):
                self.passing.wait()
                with self._lock:
                    judged = (self.up if way == "up" else self.down)(flow, piece)
                    if judged is not None:
                        flow.carried[way] += len(judged)
                        self.carried[way] += len(judged)
                if judged is None:
                    self._cut(flow)
                    break
                under_way.send(judged)
            under_way.end()
        except OSError:
            flow.cut()  # one end has gone: so does the other
            under_way.end()

    def _cut(self, flow: Flow) -> None:
        self.cuts += 1
        flow.cut()


class _Lane:
    """One direction of the line, for all connections."""

    def __init__(self, link: Link | None) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._free_at = 0.0

    def open(self, sink: socket.socket) -> _Plain | _Slow:
        return _Plain(sink) if self.link is None else _Slow(sink, self, self.link)

    def arrival(self, size_bytes: int) -> float:
        assert self.link is not None
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + size_bytes / self.link.bytes_per_s
            return self._free_at + self.link.rtt_s / 2


class _Plain:
    def __init__(self, sink: socket.socket) -> None:
        self._sink = sink

    def send(self, piece: bytes) -> None:
        self._sink.sendall(piece)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)


class _Slow:
    """What is under way arrives in its order, when it is time; more than the window may not be under way."""

    def __init__(self, sink: socket.socket, lane: _Lane, link: Link) -> None:
        self._plain, self._lane = _Plain(sink), lane
        self._room = threading.Semaphore(max(link.window_bytes // PIECE_BYTES, 1))
        self._pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._broken = False
        self._thread = threading.Thread(target=self._deliver, name="proxy-link", daemon=True)
        self._thread.start()

    def send(self, piece: bytes) -> None:
        self._room.acquire()
        if self._broken:
            raise OSError("the other end has gone")
        self._pieces.put((self._lane.arrival(len(piece)), piece))

    def end(self) -> None:
        self._pieces.put((self._lane.arrival(0), b""))
        self._thread.join()

    def _deliver(self) -> None:
        while True:
            due, piece = self._pieces.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            if not piece:
                self._plain.end()
                return
            try:
                if not self._broken:
                    self._plain.send(piece)
            except OSError:
                self._broken = True
            self._room.release()


def _listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)  # its connections inherit it
    return listener


# --- judges -----------------------------------------------------------------------------------------------------------


class CutAfter:
    """When so many bytes have gone this way over all connections together, each of them is cut at its next piece; those
    that are made afterwards are left alone."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._seen: set[Flow] = set()
        self.fired = 0

    def __call__(self, flow: Flow, piece: bytes) -> bytes | None:
        if self._left > 0:
            self._left -= len(piece)
            self._seen.add(flow)
        if self._left > 0 or flow not in self._seen:
            return piece
        self.fired += 1
        return None


class Flapping:
    """No connection carries more than some hundred kilobytes: it is cut at a place drawn anew for each."""

    def __init__(self, seed: int, least: int, most: int) -> None:
        self._random = random.Random(seed)
        self._range = (least, most)
        self._limits: dict[Flow, int] = {}
        self.fired = 0

    def __call__(self, flow: Flow, piece: bytes) -> bytes | None:
        limit = self._limits.setdefault(flow, self._random.randint(*self._range))
        if flow.carried["up"] + flow.carried["down"] + len(piece) <= limit:
            return piece
        self.fired += 1
        return None


class FlipOnce:
    """Changes one bit of the first full piece: that is inside a part, and nowhere near a head."""

    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, flow: Flow, piece: bytes) -> bytes | None:
        if self.fired or len(piece) < PIECE_BYTES:
            return piece
        self.fired += 1
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 0x10]) + piece[middle + 1 :]


class LoseAnswers:
    """Cuts the connection where the server begins to answer, each time with this probability. What the server was asked
    to do it has done."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random, self._probability = random.Random(seed), probability
        self._carried: dict[Flow, int] = {}
        self.fired = 0

    def __call__(self, flow: Flow, piece: bytes) -> bytes | None:
        begins = self._carried.get(flow) != flow.carried["up"]  # something was asked since the last piece
        self._carried[flow] = flow.carried["up"]
        if not begins or self._random.random() >= self._probability:
            return piece
        self.fired += 1
        return None


__all__ = ["CutAfter", "Flapping", "FlipOnce", "Flow", "Judge", "Link", "LoseAnswers", "Proxy", "pass_on"]
