"""What must not be done by half: Ctrl-C and SIGTERM wait until it is whole.

signals.py says what they ask of a worker then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

DEFERRED: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, nothing is interrupted: a signal with a handler in Python (which may raise) is answered at the end. Only
    the main thread is ever interrupted; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    try:
        for number in DEFERRED:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in reversed(handlers.items()):  # Ctrl-C last: until then it waits
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
