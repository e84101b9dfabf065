"""The matrix of links, from the transfers that happen anyway.

Parts of one contribution travel side by side, and each has a part of the link. So what counts is the time in which
anything of it was under way (`part`), and all bytes of that time.

The median of the last five: two transfers that were stopped by something else change nothing, and a link that became
slower is seen after three. Bandwidth comes from large transfers only; a small one measures the latency, of which the
shortest of five counts: the others may have waited behind a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from .state import LinkReport

KEPT: Final = 5
SMALLEST_BYTES: Final = 32 * 1024  # below, a model's contributions would stop measuring once a plan makes them small
MOST_LINKS: Final = 10_000


@dataclass
class _LinkTimes:
    s_per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    latency_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    measured_at: float = 0.0
    under_way: int = 0
    busy_since: float = 0.0
    busy_bytes: int = 0


class LinkMeter:
    """What one end has measured. `now` is any clock that goes forward."""

    def __init__(self, measured_by: str) -> None:
        self._measured_by = measured_by
        self._links: dict[tuple[str, str], _LinkTimes] = {}

    def transferred(self, source: str, target: str, size_bytes: int, seconds: float, now: float) -> None:
        """`seconds`: from the first byte to the last. What cannot be is not noted."""
        if not 0.0 < seconds < float("inf") or size_bytes < SMALLEST_BYTES:
            return
        link = self._link(source, target)
        if link is not None:
            link.s_per_byte.append(seconds / size_bytes)
            link.measured_at = now

    @contextmanager
    def part(
        self,
        source: str,
        target: str,
        size_bytes: int,
        clock: Callable[[], float],
        lock: AbstractContextManager[object],
    ) -> Iterator[None]:
        """Around the transfer of a part. `lock` guards the meter; if the link was forgotten meanwhile, so is this."""
        arrived = 0
        with lock:
            link = self._link(source, target)
            if link is not None:
                if not link.under_way:
                    link.busy_since, link.busy_bytes = clock(), 0
                link.under_way += 1
        try:
            yield
            arrived = size_bytes
        finally:
            with lock:
                link, now = self._links.get((source, target)), clock()
                if link is not None and link.under_way:
                    link.under_way -= 1
                    link.busy_bytes += arrived
                    if not link.under_way:
                        self.transferred(source, target, link.busy_bytes, now - link.busy_since, now)

    def answered(self, source: str, target: str, latency_s: float) -> None:
        link = self._link(source, target) if 0.0 <= latency_s < float("inf") else None
        if link is not None:
            link.latency_s.append(latency_s)

    def latency_s(self, source: str, target: str) -> float:
        """0 = not measured."""
        link = self._links.get((source, target))
        return min(link.latency_s) if link is not None and link.latency_s else 0.0

    def best_bytes_per_s(self, source: str, target: str) -> float:
        """What the link has carried: the fastest of the last five. 0 = not measured."""
        link = self._links.get((source, target))
        return 1.0 / min(link.s_per_byte) if link is not None and link.s_per_byte else 0.0

    def reports(self, now: float) -> tuple[LinkReport, ...]:
        return tuple(
            LinkReport(
                source=source,
                target=target,
                measured_by=self._measured_by,
                bytes_per_s=1.0 / median(link.s_per_byte),
                latency_s=self.latency_s(source, target),
                age_s=max(0.0, now - link.measured_at),
            )
            for (source, target), link in sorted(self._links.items())
            if link.s_per_byte
        )

    def forget(self, name: str) -> None:
        """It left, or another leads it now."""
        self._links = {ends: link for ends, link in self._links.items() if name not in ends}

    def _link(self, source: str, target: str) -> _LinkTimes | None:
        """None if there are too many: names come from outside."""
        if (source, target) not in self._links and len(self._links) >= MOST_LINKS:
            return None
        return self._links.setdefault((source, target), _LinkTimes())
