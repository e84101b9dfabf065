"""The clock's hand in the server: notices silent workers and passing deadlines. Monotonic time only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LONGEST_NAP_S = 1.0


class HealthMonitor:
    """Calls `tick(now)` at least every `check_interval` seconds, and sooner when `next_wake(now)` says so."""

    def __init__(
        self,
        tick: Callable[[float], None],
        next_wake: Callable[[float], float | None],
        *,
        check_interval: float = LONGEST_NAP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tick = tick
        self._next_wake = next_wake
        self._check_interval = check_interval
        self._clock = clock
        self._nudge = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outerstep-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Something changed: look at the clock again."""
        self._nudge.set()

    def stop(self) -> None:
        self._stopping = True
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            now = self._clock()
            wake_at = None
            try:
                self._tick(now)
                wake_at = self._next_wake(now)
            except Exception:  # a server without this thread would wait for the dead for ever
                log.exception("health check failed; going on")
            nap_s = self._check_interval if wake_at is None else min(self._check_interval, max(wake_at - now, 0.005))
            self._nudge.wait(nap_s)
            self._nudge.clear()
