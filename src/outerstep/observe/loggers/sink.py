"""A logger behind a queue: events come in from training or serving threads, a thread of its own writes.

Nothing that a logger does reaches the run. If it cannot be made, it is dead; if a write raises, that point is lost; if
it hangs, the queue fills and what comes is lost. Each is said once, all of it is counted in `lost`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from ...events import Event
from ..points import Point, point_of
from ..quantities import counted

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # points
CLOSE_S = 10.0  # how long the end of a run waits for what is still to be written


class MetricWriter(Protocol):
    """Writes numbers of a step, by name. One thread calls it."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class LoggerSink:
    """An event sink. `make` opens the logger; it is called in the thread, and may take its time."""

    def __init__(self, name: str, make: Callable[[], MetricWriter], *, close_s: float = CLOSE_S) -> None:
        self.name, self.lost = name, 0
        self._make, self._close_s = make, close_s
        self._queue: queue.Queue[Point | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._closed = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"outerstep-log-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        point = point_of(event)
        if point is None or self._closed:
            return
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self._lose("it is too slow")

    def close(self) -> None:
        """What is waiting is written, unless that takes too long."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):  # it hangs: its thread ends with the process
            self._queue.put(None, timeout=self._close_s)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("the logger %s did not end within %g s; the run ends without it", self.name, self._close_s)
        if self.lost:
            log.warning("the logger %s has lost %s", self.name, counted(self.lost, "point"))

    def _run(self) -> None:
        writer: MetricWriter | None = None
        try:
            writer = self._make()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the training goes on, whatever a logger does
            self._lose(f"it could not be opened: {type(error).__name__}: {error}", count=0)
        while (point := self._queue.get()) is not None:
            if writer is None:
                self._lose("it could not be opened")
                continue
            try:
                writer.write(point.step, point.values)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._lose(f"{type(error).__name__}: {error}")
        if writer is not None:
            try:
                writer.close()
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._lose(f"{type(error).__name__}: {error}", count=0)

    def _lose(self, why: str, count: int = 1) -> None:
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
            self.lost += count
        if is_first:
            log.warning("the logger %s fails (%s); the run continues without what it cannot take", self.name, why)
