"""SIGTERM, SIGUSR1 and Ctrl-C, kept until the training thread is at a safe point.

A signal may come at any moment: while a contribution is encoded, or while the worker waits for its round. So its
handler takes a note and nothing more. The training thread reads the note after each optimizer step, and while it waits
for a round; there the worker contributes what it has and leaves, within `patience_s` of the signal.

    SIGUSR1    a notice that the machine will be taken away: contribute, leave, and say so in `worker.should_stop`
    SIGTERM    the same; a loop that goes on regardless is ended at its next step, with exit code 143
    Ctrl-C     the same with KeyboardInterrupt (exit code 130); a second one does not wait for a safe point

A script's own handler for a signal stays: it is called as well, and then decides about the end of the process. In a
forked process (a DataLoader's, say) a signal does what it did before there was a worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

DEFERRED: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
NAMES = {signal.SIGUSR1: "SIGUSR1", signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
LEAST_S = 2.0  # granted however late the step after the signal ends, so that a small contribution still gets through


class Interrupts:
    """A worker's signals. `asked`: the one that asks it to leave, 0 = none; a later one counts if it asks for more."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._before: dict[int, Any] = {}  # signal -> the handler that was there
        self._process = 0
        self._leave_by = 0.0
        self._pressed = False  # Ctrl-C, once
        self.asked = 0
        self.reason = ""  # for the server and the other workers

    # --- handlers -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the handlers, in the main thread (no other thread can). Ignored signals stay ignored, handlers that a
        library has set in C stay, and at a Python prompt Ctrl-C keeps its meaning."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in NAMES:
            before = signal.getsignal(number)
            at_prompt = number == signal.SIGINT and hasattr(sys, "ps1")
            if before in (None, signal.SIG_IGN) or at_prompt:
                continue
            self._before[number] = before
            signal.signal(number, self._note)

    def restore(self) -> None:
        """Restore the earlier handlers, except where another one has been installed since."""
        self._process = 0  # from here on, pass on what still arrives
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, self._prior(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._pass_on(number, frame)
            return
        self.ask(number)
        if self._is_users(number):
            self._prior(number)(number, frame)
        elif number == signal.SIGINT and self._pressed:
            signal.default_int_handler(number, frame)
        elif number == signal.SIGINT:
            self._pressed = True
            _say("Ctrl-C: contributing what is left after this step, then leaving. Once more stops at once.")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._prior(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _prior(self, number: int) -> Any:
        """The handler before ours. A handler of another worker counts only while that worker lives."""
        before = self._before.get(number, signal.SIG_DFL)
        owner = getattr(before, "__self__", None)
        return owner._prior(number) if isinstance(owner, Interrupts) and not owner._process else before

    def _is_users(self, number: int) -> bool:
        before = self._prior(number)
        return callable(before) and before is not signal.default_int_handler

    # --- for the training thread ----------------------------------------------------------------------------------

    def ask(self, number: int) -> None:
        """Note a signal. SIGTERM and Ctrl-C ask for more than SIGUSR1: the process is to end."""
        if not self.asked:
            self._leave_by = self._clock() + self._patience_s
        if self.asked in (0, signal.SIGUSR1):
            self.asked = number
            self.reason = f"interrupted by {NAMES[signal.Signals(number)]}"

    @property
    def is_late(self) -> bool:
        """Should this worker have left by now?"""
        return bool(self.asked) and self._clock() > self._leave_by

    def at_safe_point(self) -> None:
        """The worker begins to contribute what it has; it gets a little time for that in any case."""
        self._leave_by = max(self._leave_by, self._clock() + LEAST_S)

    def insist(self) -> None:
        """End a loop that takes another step after the worker has left, if the signal asked for that."""
        if self._is_users(self.asked):
            return
        if self.asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Protects what must not be interrupted half-way: signals with a handler in Python, which may raise, are handled at
    the end of the block. Only the main thread is ever interrupted; in other threads this does nothing."""
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
        for number, handler in reversed(handlers.items()):  # Ctrl-C last, so that it waits until then
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)


def _say(text: str) -> None:
    """Write to stderr directly: the signal may have come in the middle of a line of logging or print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nouterstep: {text}\n".encode())
