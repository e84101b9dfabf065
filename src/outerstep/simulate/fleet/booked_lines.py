"""Lines that are booked ahead: when the last byte of a message is through, known when the first one leaves.

`network.Pipe` costs events for each message and can change its rate; a fleet has millions of messages and lines that
stay as they are. The rule is the same, first come first served, and so is what coordination/cost.py says of a route:
the parts of a message follow each other, so the slowest line of a way sets its time, and idle connections start slowly.

    end = max over the lines of (when it is through with what came before, and with this)  +  slow start
"""

from __future__ import annotations

from collections.abc import Sequence

from ...coordination.windows import Transfer, Windows


class BookedLine:
    """One direction of a line, or what a machine's own work lets through. `s_per_byte` 0 = no limit."""

    __slots__ = ("carried_bytes", "free_at", "s_per_byte")

    def __init__(self, s_per_byte: float) -> None:
        self.s_per_byte, self.free_at, self.carried_bytes = s_per_byte, 0.0, 0

    @classmethod
    def of_rate(cls, bytes_per_s: float) -> BookedLine:
        return cls(1.0 / bytes_per_s if bytes_per_s > 0.0 else 0.0)


def book(
    lines: Sequence[BookedLine],
    now: float,
    size_bytes: int,
    round_trip_s: float,
    connections: float,
    part_bytes: int,
    windows: Windows,
) -> float:
    """The moment at which the last of so many bytes, sent from now on, has left the last line."""
    end, slowest = now, 0.0
    for line in lines:
        line.free_at = max(line.free_at, now) + size_bytes * line.s_per_byte
        line.carried_bytes += size_bytes
        end, slowest = max(end, line.free_at), max(slowest, line.s_per_byte)
    if connections:
        transfer = Transfer.of(size_bytes, slowest, round_trip_s, connections, part_bytes)
        end += windows.closed_share(now) * transfer.slow_s
        windows.ended(end)
    return end
