"""Where events go (events.py): into files, into memory as they are or as counts, to several places. Safe to use from
several threads.

The event log and metrics.jsonl have one JSON object per line; they are appended to, never rewritten:

    {"time": 1763190000.123, "event": "round", "fragment": 0, "version": 7, "workers": ["a", "b"]}

Training never suffers for any of them. If the disk is full, a file warns once, counts the events it could not write,
and keeps trying; a sink that raises is treated the same way.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError, Refused
from ..events import (
    Event,
    EventSink,
    Refusal,
    RefusalsSuppressed,
    RoundReport,
    RoundSummary,
    RunEnded,
    VersionPublished,
)
from ..printable import json_line, printable
from .per_minute import PerMinute

log = logging.getLogger(__name__)

OTHER = "other"
METRICS_FILE = "metrics.jsonl"
MOST_METRICS_BYTES = 64 << 20
IN_METRICS = (VersionPublished, RoundReport, RunEnded)
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


class MetricsFile:
    """metrics.jsonl: every round with its numbers, in the same form. A server keeps it in the run's folder, a worker in
    its metrics folder. At 64 MiB it becomes metrics.1.jsonl, in the place of an earlier one, so that both together stay
    below 128 MiB. `lost`: lines that could not be written."""

    def __init__(
        self, path: Path, *, most_bytes: int = MOST_METRICS_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self.path, self.lost = path, 0
        self._most_bytes, self._clock = most_bytes, clock
        self._lock = threading.Lock()
        self._is_torn = False  # the last line is there in part

    def __call__(self, event: Event) -> None:
        if not isinstance(event, IN_METRICS):
            return
        line = json_line({"time": round(self._clock(), 3), "event": event.kind, **event.facts})
        with self._lock:
            try:
                self._append(line.encode("utf-8", "replace") + b"\n")
            except OSError as error:
                if self.lost == 0:
                    log.warning("%s cannot be written: %s; the run continues without it", self.path, error)
                self.lost += 1

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            line = b"\n" + line if self._is_torn else line
            written = os.write(file, line)
            self._is_torn = written < len(line)
            if self._is_torn:
                raise OSError(f"{written} of {len(line)} bytes were written")
            is_full = os.fstat(file).st_size >= self._most_bytes
        finally:
            os.close(file)
        if is_full:
            os.replace(self.path, self.path.with_name(f"{self.path.stem}.1{self.path.suffix}"))


@dataclass(frozen=True)
class NumberedEvent:
    """`number` counts the events of a ring from 1; `time_s` is in seconds since 1970."""

    number: int
    time_s: float
    event: Event


class EventRing:
    """The newest `size` events, in memory: for a page or a test that looks now and then.

    for seen in ring.since(last): ...           # then last = seen.number
    for seen in ring.take(): ...                # for the only reader: the ring is empty then
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

    def take(self) -> list[NumberedEvent]:
        """All that are here, oldest first, and keep them no longer."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
            return taken

    @property
    def is_empty(self) -> bool:
        return not self._events


def _codes(kind: type[Refused] = Refused) -> set[str]:
    return {kind.code, *(code for each in kind.__subclasses__() for code in _codes(each))}


@dataclass
class EventCounts:
    """Numbers and no text, for metrics. `events` by kind and `refusals` by code. `waited_s` and `round_bytes`: of all
    rounds since this start; `last`: the newest of them. What is kept is bounded, whoever causes the events: kinds are
    classes of events.py, and codes those of errors.py."""

    events: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0
    round_bytes: int = 0
    last: RoundSummary | None = None
    _known: set[str] = field(default_factory=lambda: _codes() | {OTHER})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.events[event.kind] += 1
            if isinstance(event, Refusal) and not isinstance(event, RefusalsSuppressed):
                code = getattr(event, "code", OTHER)
                self.refusals[code if code in self._known else OTHER] += 1
            if isinstance(event, VersionPublished) and event.summary is not None:
                self.last = event.summary
                self.waited_s += event.summary.waited_s
                self.round_bytes += event.summary.size_bytes

    def copy(self) -> EventCounts:
        with self._lock:
            return EventCounts(
                Counter(self.events), Counter(self.refusals), self.waited_s, self.round_bytes, self.last, self._known
            )


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
