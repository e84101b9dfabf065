"""Slow starts of transfers that follow each other: which connections are still open wide.

A part travels on one connection. Its window begins with a few packets and doubles each round trip until it fills the
line; in IDLE_S without a message it closes again. A transfer of p parts has p connections, at most as many as an
exchange uses, out of one more: heartbeats and small requests take the other, and which one that is changes by chance.
So a transfer finds windows open if it follows soon after another, and on the connections that one had filled.

A planner plays a hundred exchanges one after the other; the simulator asks at each transfer.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

FIRST_WINDOW_BYTES: Final = 10 * 1460  # of a connection that was idle, as kernels have it
IDLE_S: Final = 1.0  # after which it was: kernels halve a window with every timeout of silence
PLAYED: Final = 96  # exchanges
WARM_UP: Final = 24  # of them
NEVER_S: Final = -math.inf


def slow_start_s(size_bytes: float, s_per_byte: float, round_trip_s: float, connections: float) -> float:
    """How much longer a transfer takes because its connections were idle: their windows, w bytes together, double each
    round trip r until they fill the line, after n = ⌈log2(r / (w·s/byte))⌉ of them, or until all is sent.

        n·r − w·(2ⁿ − 1)·(s/byte)
    """
    first = connections * FIRST_WINDOW_BYTES
    if min(first, size_bytes, s_per_byte, round_trip_s) <= 0.0:
        return 0.0
    fills_after = math.ceil(math.log2(max(round_trip_s / (first * s_per_byte), 1.0)))
    sent_after = math.ceil(math.log2(size_bytes / first + 1.0)) - 1
    trips = max(min(fills_after, sent_after), 0)
    return max(trips * round_trip_s - first * (2.0**trips - 1.0) * s_per_byte, 0.0)


@dataclass(frozen=True)
class Transfer:
    """One direction of an exchange. `parts`: that travel side by side, the last of them perhaps a fraction. `slow_s`:
    what it takes longer if all of their windows are closed."""

    parts: float
    moves_s: float
    slow_s: float

    @classmethod
    def of(
        cls, size_bytes: float, s_per_byte: float, round_trip_s: float, connections: float, part_bytes: float
    ) -> Transfer:
        """`connections`: the most; 0 = no slow start is counted."""
        parts = min(max(size_bytes / part_bytes, 1.0), connections)
        return cls(parts, size_bytes * s_per_byte, slow_start_s(size_bytes, s_per_byte, round_trip_s, parts))


class Windows:
    """Of the connections that carry one direction of a worker's exchanges, each transfer of as many parts."""

    __slots__ = ("_are_open", "_in_use", "_parts", "_rng", "_used_at")

    def __init__(self, parts: float, rng: random.Random) -> None:
        count = math.ceil(parts) + 1
        self._parts, self._rng = parts, rng
        self._used_at, self._are_open = [NEVER_S] * count, [False] * count
        self._in_use: list[int] = []

    def closed_share(self, now: float) -> float:
        """A transfer begins: the share of its bytes that meets closed windows. It opens them."""
        count, closed = len(self._used_at), 0.0
        first = self._rng.randrange(count)
        self._in_use = [(first + i) % count for i in range(count - 1)]
        for i, connection in enumerate(self._in_use):
            carried = min(1.0, self._parts - i)
            if not (self._are_open[connection] and now - self._used_at[connection] <= IDLE_S):
                closed += carried
            self._are_open[connection] = carried > 0.5  # the rest of a part fills nothing
        return closed / self._parts

    def ended(self, at: float) -> None:
        """The transfer, or what is asked and answered behind it on the same connections."""
        for connection in self._in_use:
            self._used_at[connection] = at

    def touched(self, now: float) -> None:
        """By a small message: windows that are still open stay so."""
        for connection in self._in_use:
            if now - self._used_at[connection] > IDLE_S:
                self._are_open[connection] = False
            self._used_at[connection] = now


def felt_s(plain_s: float, up: Transfer, down: Transfer, *, trip_s: float, between_s: float, hidden_s: float) -> float:
    """How long an exchange takes that is one of many, of which each begins when so much was trained since the one
    before. Where some are waited for: on average, with those that end within `hidden_s` counted as that.

    A direction is silent from the last message of one exchange to the first of the next: down from the last byte to the
    first answer, up from the request for those bytes to the next offer.
    """
    longest_s = plain_s + up.slow_s + down.slow_s
    if between_s - min(longest_s, hidden_s) + trip_s > IDLE_S or longest_s == plain_s:
        return longest_s
    rng = random.Random(0)
    ways_up, ways_down = Windows(up.parts, rng), Windows(down.parts, rng)
    now = travelled_s = waited_s = 0.0
    for number in range(PLAYED):
        up_s = up.slow_s * ways_up.closed_share(now)
        down_s = down.slow_s * ways_down.closed_share(now + trip_s)
        travels_s = plain_s + up_s + down_s
        ways_up.ended(now + travels_s - trip_s - down.moves_s - down_s)
        ways_down.ended(now + travels_s)
        waits_s = max(0.0, travels_s - hidden_s)
        if number >= WARM_UP:
            travelled_s, waited_s = travelled_s + travels_s, waited_s + waits_s
        now += between_s + waits_s
    counted = PLAYED - WARM_UP
    return hidden_s + waited_s / counted if waited_s else travelled_s / counted
