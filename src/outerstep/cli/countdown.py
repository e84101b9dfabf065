"""Who is silent: told each second on a terminal, now and then elsewhere, until it is heard from or counts as dead."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from ..observe.log_lines import WAITING

log = logging.getLogger(__name__)

LOOK_S = 1.0
AGAIN_S = 30.0


class Countdown:
    """with Countdown(server.silence): …"""

    def __init__(
        self, silence: Callable[[], str], clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S
    ) -> None:
        self._silence, self._clock, self._look_s = silence, clock, look_s
        self._say_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outerstep-countdown", daemon=True)

    def __enter__(self) -> Countdown:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            try:
                self.look()
            except Exception:  # a line on a terminal is no reason to stop
                log.exception("the countdown ends")
                return

    def look(self) -> None:
        text, now = self._silence(), self._clock()
        log.log(WAITING, "%s", text)
        if text and now >= self._say_at:
            self._say_at = now + AGAIN_S
            log.info("%s", text)
        elif not text:
            self._say_at = now
