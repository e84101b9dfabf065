"""Quantities in words: how long, how much, where it goes. Of any command, without the events of a run."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The newest of them as bars between the smallest and the largest."""
    shown = [value / 2 for value in list(values)[-width:]]  # of whatever a worker says, the difference is finite, too
    least, most = min(shown, default=0.0), max(shown, default=0.0)
    span = most - least or 1.0
    return "".join(BARS[round((len(BARS) - 1) * ((value - least) / span))] for value in shown)


def counted(number: int, noun: str) -> str:
    """1 round, 2 rounds. Of nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
