"""How many parts of an exchange travel at a time, each on a connection of its own.

A connection has at most its window under way, then waits for the acknowledgement: over a long link it carries
window / round trip, however fat the link is. A part that waits for its answer leaves its connection idle for a round
trip, and a new connection begins with a few packets. More connections help against all three. So there are as many as
the link holds windows, bandwidth × round trip / `WINDOW_BYTES`, and as many again: to find out that it holds more than
was measured, and to fill it while some wait. On a near link that is less than one, and four overlap what the ends do.

The bandwidth is what the worker's own exchanges reached. Workers that share the server's link measure their share of
it, so the connections of all of them together do not grow with their number, but for the fewest of each.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from .defaults import PART_SIZE_BYTES

FEWEST: Final = 4
MOST: Final = 32
UNMEASURED: Final = 8  # over a long link
HEADROOM: Final = 2.0
WINDOW_BYTES: Final = 512 << 10  # what one connection surely may have under way
LONG_S: Final = 0.005  # a shorter round trip is the ends' own time as much as the link's
PARTS: Final = 64  # of the largest contribution
SMALLEST_PART_BYTES: Final = 1 << 20


def lanes(bytes_per_s: float, round_trip_s: float) -> int:
    """bytes_per_s 0 = not measured."""
    if round_trip_s < LONG_S:
        return FEWEST
    if bytes_per_s <= 0.0:
        return UNMEASURED
    return max(FEWEST, ceil(min(HEADROOM * bytes_per_s * round_trip_s / WINDOW_BYTES, float(MOST))))


def in_whole_rows(count: int, parts: int) -> int:
    """A few connections more, if the last parts of so many would else travel in a row of few, which leaves the link
    half empty: 51 over 16 are three rows and three parts, over 17 three rows."""
    rows = parts // count
    return min(ceil(parts / rows), max(MOST, count)) if rows else count


def part_size(largest_bytes: int) -> int:
    """A power of two, by which the largest contribution has at most `PARTS` parts. Over a long link many travel at a
    time, and the last of them should not travel alone for long; but each costs both ends a request."""
    return min(max(1 << (-(-largest_bytes // PARTS) - 1).bit_length(), SMALLEST_PART_BYTES), PART_SIZE_BYTES)


__all__ = ["FEWEST", "LONG_S", "MOST", "PARTS", "SMALLEST_PART_BYTES", "in_whole_rows", "lanes", "part_size"]
