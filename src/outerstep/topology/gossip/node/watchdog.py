"""Watches the threads of a node. Half a peer would mislead the others, so if one thread ends the whole node does.

Nothing that another peer says, answers or sends may come so far: whatever goes wrong with one peer is caught where that
peer is dealt with, and held against it (hearing.py, calls.py). What ends a thread is this machine's fault or this
program's, and the last word of the node says which.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from ....events import EventSink, PeerStopped

log = logging.getLogger(__name__)

StopCause = Literal["machine", "bug"]

REMEDIES: dict[StopCause, str] = {
    "machine": "its disk, its memory or its system refused something: mend that, and start the peer again",
    "bug": "this is a mistake in outerstep: please report it with the lines above, and start the peer again",
}


def cause_of(error: BaseException) -> StopCause:
    """The cause in words: did this machine refuse something, or is it a bug?"""
    return "machine" if isinstance(error, OSError | MemoryError) else "bug"


class Watchdog:
    """Watches threads. `on_end` is called once, with the reason, when a thread has ended with an error."""

    def __init__(self, events: EventSink, on_end: Callable[[str], None]) -> None:
        self._events, self._on_end = events, on_end
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_stopping = False

    def start(self, name: str, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except BaseException as error:
                log.exception("%s failed", name)
                self.bark(name, error)

        thread = threading.Thread(target=run, name=f"outerstep-{name}", daemon=True)
        with self._lock:
            if self._is_stopping:
                return
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
            thread.start()

    def bark(self, where: str, error: BaseException) -> None:
        """End the node, and say why, once."""
        with self._lock:
            is_first, self._is_stopping = not self._is_stopping, True
        if not is_first:
            return
        cause = cause_of(error)
        why = f"{where}: {type(error).__name__}: {error} ({REMEDIES[cause]})"
        log.critical("this peer stops: %s", why)
        self._events(PeerStopped(cause, why))
        self._on_end(why)

    def call_off(self, patience_s: float) -> list[str]:
        """Stop watching: all threads are to end. Returns the names of those that have not ended in time."""
        with self._lock:
            self._is_stopping = True
            threads = list(self._threads)
        give_up_at = time.monotonic() + patience_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]
