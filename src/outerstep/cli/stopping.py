"""SIGTERM and Ctrl-C for a command that has something to finish.

with Stopping() as stopping:
    …                              # nothing to finish yet: a signal ends the process with exit code 128 + its number
    stopping.gently(server.request_stop)
    …                              # the first signal asks to stop, a second Ctrl-C ends the process

A thread reacts, not the handlers: those run only between two bytecodes of the main thread, which may be busy for
minutes with a large file, and must not take a lock that it holds. The process writes every file under a temporary name
first, so it can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """`say`: how people are told; None = as text on standard error."""
        self._say = say or _say
        self._stop: Callable[[], None] | None = None
        self._at_once: Callable[[], None] = lambda: None
        self.asked: signal.Signals | None = None  # the first signal that came
        self._pressed = False  # Ctrl-C, while it was stopping gently
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._ear, self._mouth = -1, -1

    def __enter__(self) -> Stopping:
        """In the main thread; in any other this does nothing, because no signal arrives there."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._wakeup_before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: None)  # a handler must exist for the wakeup fd
        threading.Thread(target=self._listen, name="outerstep-signals", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, before in self._before.items():
                signal.signal(number, before)
            os.close(self._mouth)  # which ends the thread

    def gently(self, stop: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
        """From here on there is something to finish; `stop` requests it and returns at once. `at_once`: what else must
        end with this process if nothing is to be finished."""
        self._at_once, self._stop = at_once, stop

    def _listen(self) -> None:
        while heard := os.read(self._ear, 1):
            if heard[0] in SIGNALS:
                self._react(signal.Signals(heard[0]))
        os.close(self._ear)

    def _react(self, number: signal.Signals) -> None:
        pressed = number == signal.SIGINT
        if self._stop is None or (pressed and self._pressed):
            self._say("stopped at once")
            self._at_once()
            os._exit(128 + number)
        self._pressed, self.asked = self._pressed or pressed, self.asked or number
        more = " Once more stops at once." if pressed else ""
        self._say(f"{'Ctrl-C' if pressed else number.name}: finishing what was decided, then stopping.{more}")
        self._stop()


def _say(text: str) -> None:
    """Print if possible: a full or closed log must not keep a server from stopping."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
