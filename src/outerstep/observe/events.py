"""The event log: one JSON object per line, appended, never rewritten.

    {"time": 1763190000.123, "event": "round", "fragment": 0, "version": 7, "workers": ["a", "b"]}

It serves whoever wants to know afterwards what the run went through. Training never suffers for it: if the disk is full
it says so once in the log, counts what it could not write, and goes on trying.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError

log = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 60  # a stranger knocking at the door must not fill the disk


class EventLog:
    """Safe to use from several threads. `path` None = nothing is written."""

    def __init__(self, path: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._file = None
        self.lost = 0  # events that could not be written
        self._refusals = 0
        self._minute = 0
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in close()
            except OSError as error:
                raise ConfigError(f"event_log cannot be written at {path!r}: {error.strerror}") from error

    def write(self, event: str, **facts: object) -> None:
        if self._file is None:
            return
        now = self._clock()
        with self._lock:
            if event == "refused" and not self._may_log_refusal(now):
                return
            line = json.dumps({"time": round(now, 3), "event": event, **facts}, default=str, ensure_ascii=False)
            try:
                self._file.write(line + "\n")
            except (OSError, ValueError) as error:
                if self.lost == 0:
                    log.warning("the event log cannot be written: %s; the run goes on without it", error)
                self.lost += 1

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _may_log_refusal(self, now: float) -> bool:
        if int(now // 60) != self._minute:
            self._minute, self._refusals = int(now // 60), 0
        self._refusals += 1
        return self._refusals <= REFUSALS_PER_MINUTE

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
