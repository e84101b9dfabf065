"""Virtual time: a list of things to do, each at its moment. An hour of waiting costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        self._count += 1  # breaks ties by order of arrival, so that a seed replays exactly
        heapq.heappush(self._heap, (max(moment, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run_until(self, stop: Callable[[], bool], *, limit_s: float) -> bool:
        """Advance until `stop()` holds (True), or until nothing is left to do before `limit_s` (False)."""
        while self._heap and not stop():
            moment, _, action = self._heap[0]
            if moment > limit_s:
                break
            heapq.heappop(self._heap)
            self.now = moment
            action()
        return stop()
