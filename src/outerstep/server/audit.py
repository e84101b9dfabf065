"""The account of refusals: one line in the log and one in the event log for each, but no flood of either."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..events import EventSink, RequestRefused
from ..observe.per_minute import PerMinute
from ..wire.http_server import RefusedRequest, log_refusal

log = logging.getLogger(__name__)

LINES_PER_MINUTE = 60
EVERYDAY = (409, 503)  # "too late" and "ask again"


class Audit:
    """Says who was refused, what and why; never what they showed."""

    def __init__(self, events: EventSink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._lines = PerMinute(LINES_PER_MINUTE, clock)
        self._lock = threading.Lock()

    def __call__(self, refused: RefusedRequest) -> None:
        refusal = refused.refusal
        if refusal.status in EVERYDAY:
            log_refusal(refused)
            return
        with self._lock:
            may, suppressed = self._lines.admit(), self._lines.take_suppressed()
        if suppressed:
            log.warning("%d more requests were refused in the last minute", suppressed)
        if may:
            log_refusal(refused)
        if not refused.by_service:
            what, who = (refused.path, refused.request_id, refusal.message), (refused.token, refused.worker)
            self._events(RequestRefused(refusal.code, refused.peer, *what, *who))
