"""Where events go (events.py): into a file, into memory, to several places. Safe to use from several threads.

The event log has one JSON object per line; it is appended to, never rewritten:

    {"time": 1763190000.123, "event": "round", "fragment": 0, "version": 7, "workers": ["a", "b"]}

Training never suffers for any of them. If the disk is full, the log warns once, counts the events it could not write,
and keeps trying; a sink that raises is treated the same way.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from ..events import Event, EventSink, Refusal, RefusalsSuppressed
from ..printable import printable
from .per_minute import PerMinute

log = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 60  # a stranger must not be able to fill the disk; the rest are counted


class EventLog:
    """A file."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.lost = 0  # events that could not be written
        self._refusals = PerMinute(REFUSALS_PER_MINUTE, clock)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in close()
        except OSError as error:
            raise ConfigError(f"event_log cannot be written at {path!r}: {error.strerror}") from error

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Refusal):
                may = self._refusals.admit()
                self._write_suppressed()
                if not may:
                    return
            self._append(event)

    def close(self) -> None:
        with self._lock:
            self._write_suppressed(everything=True)
            with suppress(OSError):  # the disk is still full
                self._file.close()

    def _write_suppressed(self, *, everything: bool = False) -> None:
        """Write how many refusals of past minutes were over the limit."""
        count = self._refusals.take_suppressed(everything=everything)
        if count:
            self._append(RefusalsSuppressed(count=count))

    def _append(self, event: Event) -> None:
        facts = {"time": round(self._clock(), 3), "event": event.kind, **event.facts}
        line = printable(json.dumps(facts, default=str, ensure_ascii=False))
        try:
            self._file.write(line + "\n")
        except (OSError, ValueError) as error:
            if self.lost == 0:
                log.warning("the event log cannot be written: %s; the run continues without it", error)
            self.lost += 1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class NumberedEvent:
    """`number` counts the events of a ring from 1; `time_s` is in seconds since 1970."""

    number: int
    time_s: float
    event: Event


class EventRing:
    """The newest `size` events, in memory: for a page or a test that looks now and then.

    for seen in ring.since(last): ...           # then last = seen.number
    """

    def __init__(self, size: int = 1000, *, clock: Callable[[], float] = time.time) -> None:
        if size < 1:
            raise ConfigError(f"an event ring must have room for an event, got size={size}")
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[NumberedEvent] = deque(maxlen=size)
        self._last = 0

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._last += 1
            self._events.append(NumberedEvent(self._last, self._clock(), event))

    def since(self, number: int = 0) -> list[NumberedEvent]:
        """Those after event `number`, oldest first. A gap in the numbers: the ring was too small to keep them."""
        with self._lock:
            kept = len(self._events)
            return list(islice(self._events, max(0, kept - max(0, self._last - number)), None))


class FanOut:
    """Tells each sink. One that raises is logged the first time, counted in `failures`, and called again."""

    def __init__(self, *sinks: EventSink | None) -> None:
        self.sinks = [sink for sink in sinks if sink is not None]
        self._said: set[int] = set()
        self.failures = 0
        self.add = self.sinks.append

    def __call__(self, event: Event) -> None:
        for place, sink in enumerate(self.sinks):
            try:
                sink(event)
            except Exception:
                self.failures += 1
                if place not in self._said:
                    self._said.add(place)
                    log.exception(
                        "an event sink failed at a %r event; the run continues, and calls it again at the next",
                        event.kind,
                    )
