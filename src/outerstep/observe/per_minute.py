"""A limit per minute and a count of the rest, for log lines that strangers can cause."""

from __future__ import annotations

from collections.abc import Callable


class PerMinute:
    """Not thread-safe. A minute begins with the first event after the end of the previous minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._began: float | None = None
        self._count = 0
        self._suppressed = 0  # of minutes that are over

    def admit(self) -> bool:
        """Whether this one is within the limit."""
        now = self._clock()
        if self._began is None or not 0.0 <= now - self._began < 60.0:
            self._suppressed += self._excess
            self._began, self._count = now, 0
        self._count += 1
        return self._count <= self._limit

    def take_suppressed(self, *, everything: bool = False) -> int:
        """How many were not, since the last call: in past minutes, or with `everything` up to now."""
        taken, self._suppressed = self._suppressed, 0
        if everything:
            taken += self._excess
            self._count = min(self._count, self._limit)
        return taken

    @property
    def _excess(self) -> int:
        return max(self._count - self._limit, 0)
