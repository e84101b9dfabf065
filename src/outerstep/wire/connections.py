"""Which connections there are, and which has to go when there is no more room: a stranger's, never a worker's
(limits.py)."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..errors import Busy
from .limits import ServiceLimits

ADDRESSES = 4096  # of which refusals are remembered; the longest unheard of are forgotten first


@dataclass(eq=False)
class Connection:
    """`waits`: for the peer to send or to take bytes, inside a request. `request`: how many it has begun."""

    sock: socket.socket
    address: str
    since: float
    idle_since: float | None = None  # between two requests
    is_known: bool = False  # a valid token was shown
    waits: Literal["", "in", "out"] = ""
    request: int = 0
    is_gone: bool = False  # not on the list any more
    is_served: bool = False  # its head is here, its answer is not out yet
    is_handed_over: bool = False  # its socket belongs to somebody else, who closes it
    on_ended: Callable[[bool], None] | None = None  # to be told whether the last answer has arrived

    def answer_ended(self, *, arrived: bool) -> None:
        if self.on_ended is not None:
            on_ended, self.on_ended = self.on_ended, None
            on_ended(arrived)


@dataclass
class Admission:
    """None = no; `dropped`: which has to go for it."""

    connection: Connection | None
    dropped: Connection | None = None


class Allowance:
    """How many bytes of messages may be in memory at a time. A small one is always taken: there are as many as there
    are connections."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            if count > self._left:
                raise Busy("too many large messages at a time", retry_after_s=1.0)
            self._left -= count

    def give_back(self, count: int) -> None:
        with self._lock:
            self._left += count


class Connections:
    def __init__(self, limits: ServiceLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self.open: dict[Connection, None] = {}  # in the order of arrival
        self._strangers: dict[Connection, None] = {}
        self.refusals = Refusals(limits, clock)
        self.messages = Allowance(limits.message_bytes)
        self.counts: Counter[str] = Counter()  # of what was done to whom

    def list(self) -> list[Connection]:
        with self._lock:
            return list(self.open)

    def summary(self) -> dict[str, int]:
        with self._lock:
            return {"open": len(self.open), "strangers": len(self._strangers), **self.counts}

    def admit(self, sock: socket.socket, peer: str) -> Admission:
        """Take it in as a stranger, if there is room or somebody to make some."""
        now, address = self._clock(), group_of(peer)
        newcomer = Connection(sock, address, now)
        with self._lock:
            dropped = None
            if self._is_full(address):
                dropped = self._who_goes(newcomer)
                if dropped is None:
                    self.counts["turned_away"] += 1
                    return Admission(None)
                self._remove(dropped)
                self.counts["strangers_dropped"] += 1
            self.open[newcomer] = self._strangers[newcomer] = None
        return Admission(newcomer, dropped)

    def greet(self, connection: Connection) -> None:
        """It has shown a valid token."""
        if not connection.is_known:
            with self._lock:
                connection.is_known = True
                self._strangers.pop(connection, None)

    def doubt(self, connection: Connection) -> None:
        """It has not, or shows one that is no longer valid. Its time as a stranger starts again if it was known."""
        with self._lock:
            if connection.is_known and connection in self.open:
                connection.is_known, connection.since = False, self._clock()
                self._strangers[connection] = None

    def leave(self, connection: Connection) -> None:
        with self._lock:
            self._remove(connection)

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _remove(self, connection: Connection) -> None:
        connection.is_gone = True
        self.open.pop(connection, None)
        self._strangers.pop(connection, None)

    def _is_full(self, address: str) -> bool:
        limits = self._limits
        if len(self.open) >= limits.max_connections or len(self._strangers) >= limits.max_strangers:
            return True
        return self.refusals.is_doubtful(address) and self._strangers_of(address) >= limits.doubtful_strangers

    def _strangers_of(self, address: str) -> int:
        return sum(stranger.address == address for stranger in self._strangers)

    def _who_goes(self, newcomer: Connection) -> Connection | None:
        """The oldest of the address that has most strangers; of the newcomer's own only if it has had time enough: in
        an honest rush those who came first are served first."""
        if not self._strangers:
            return None
        per_address = Counter(stranger.address for stranger in self._strangers)
        crowd, size = per_address.most_common(1)[0]
        if self.refusals.is_doubtful(newcomer.address) or per_address[newcomer.address] >= size:
            crowd = newcomer.address
        oldest = next((stranger for stranger in self._strangers if stranger.address == crowd), None)
        if oldest is None or (crowd == newcomer.address and newcomer.since - oldest.since < self._limits.settling_s):
            return None
        return oldest


@dataclass
class _LeakyBucket:
    level: float = 0.0
    at: float = 0.0


@dataclass
class Refusals:
    """How often each address was refused lately: a level that each refusal raises and time lowers. Not for counting
    exactly: when there are too many addresses, the longest unheard of is forgotten."""

    limits: ServiceLimits
    clock: Callable[[], float]
    _accounts: OrderedDict[str, _LeakyBucket] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._accounts)

    def note(self, address: str) -> None:
        with self._lock:
            account = self._accounts.setdefault(address, _LeakyBucket())
            account.level, account.at = self._level(account) + 1.0, self.clock()
            self._accounts.move_to_end(address)
            if len(self._accounts) > ADDRESSES:
                self._accounts.popitem(last=False)

    def is_doubtful(self, address: str) -> bool:
        with self._lock:
            account = self._accounts.get(address)
            return account is not None and self._level(account) > self.limits.free_refusals

    def _level(self, account: _LeakyBucket) -> float:
        passed_s = self.clock() - account.at
        level = max(account.level - passed_s * self.limits.refusals_per_s, 0.0)
        return min(level, 2.0 * self.limits.free_refusals)  # an address that stops is believed again within minutes


def group_of(peer: str) -> str:
    """Those that count as one: an IPv4 address, or the 64 bits of an IPv6 address that one customer is given."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
