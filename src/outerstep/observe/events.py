"""The event log: one JSON object per line, appended, never rewritten.

    {"time": 1763190000.123, "event": "round", "fragment": 0, "version": 7, "workers": ["a", "b"]}

It records what happened in a run. Training never suffers for it: if the disk is full it warns once in the log, counts
the events it could not write, and keeps trying.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from .per_minute import PerMinute

log = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 60  # a stranger must not be able to fill the disk; the rest are counted


class EventLog:
    """Safe to use from several threads. `path` None = nothing is written."""

    def __init__(self, path: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._file = None
        self.lost = 0  # events that could not be written
        self._refusals = PerMinute(REFUSALS_PER_MINUTE, clock)
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in close()
            except OSError as error:
                raise ConfigError(f"event_log cannot be written at {path!r}: {error.strerror}") from error

    def write(self, event: str, **facts: object) -> None:
        if self._file is None:
            return
        with self._lock:
            if event == "refused":
                may = self._refusals.admit()
                self._write_suppressed()
                if not may:
                    return
            self._append(event, facts)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._write_suppressed(everything=True)
                with suppress(OSError):  # the disk is still full
                    self._file.close()

    def _write_suppressed(self, *, everything: bool = False) -> None:
        """Write how many refusals of past minutes were over the limit."""
        count = self._refusals.take_suppressed(everything=everything)
        if count:
            self._append("refused", {"code": "suppressed", "count": count})

    def _append(self, event: str, facts: dict[str, object]) -> None:
        assert self._file is not None
        line = json.dumps({"time": round(self._clock(), 3), "event": event, **facts}, default=str, ensure_ascii=False)
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
