"""SIGTERM, SIGUSR1 and Ctrl-C, kept until the training thread is at a safe point.

A signal may come in the middle of anything: while a contribution is encoded, while its round is waited for. So its
handler takes a note and nothing more. The training thread reads the note after each optimizer step, and while it waits
for a round; there the worker contributes what it has and leaves, within `patience_s` of the signal.

    SIGUSR1    a notice that the machine will be taken away: contribute, leave, and say so in `worker.should_stop`
    SIGTERM    the same; a loop that goes on regardless is ended at its next step, with exit code 143
    Ctrl-C     the same with KeyboardInterrupt (exit code 130); a second one does not wait for a safe point

Whoever has a handler of their own for a signal keeps it: it is called as well, and the end of the process is theirs. In
a process that was forked (a DataLoader's, say) a signal does what it did before there was a worker.
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
LEAST_S = 2.0  # however late the step after the signal ends: a small contribution still gets through


class Interrupts:
    """`asked`: the signal that asks this worker to go, 0 = none. A later one counts only if it asks for more."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._before: dict[int, Any] = {}  # signal -> the handler that was there
        self._process = 0
        self._leave_by = 0.0
        self._pressed = False  # Ctrl-C, once
        self.asked = 0
        self.reason = ""  # what the others are told

    # --- handlers -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """In the main thread; in any other nobody hears signals. What is ignored stays ignored, what a library handles
        in C stays its own, and at a Python prompt Ctrl-C keeps its meaning."""
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
        """As it was before, unless somebody has put another handler there since."""
        self._process = 0  # from here on we pass on what still comes to us
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
        """The handler that was there before: of those that other workers put there, one whose worker still lives."""
        before = self._before.get(number, signal.SIG_DFL)
        owner = getattr(before, "__self__", None)
        return owner._prior(number) if isinstance(owner, Interrupts) and not owner._process else before

    def _is_users(self, number: int) -> bool:
        before = self._prior(number)
        return callable(before) and before is not signal.default_int_handler

    # --- for the training thread ----------------------------------------------------------------------------------

    def ask(self, number: int) -> None:
        """SIGTERM asks for more than SIGUSR1, and Ctrl-C for as much: the process is to end."""
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
        """What is to be contributed is contributed from here on: there is a little time for it in any case."""
        self._leave_by = max(self._leave_by, self._clock() + LEAST_S)

    def insist(self) -> None:
        """The worker has left, and the loop has taken another step: end it, if that was what the signal asked for."""
        if self._is_users(self.asked):
            return
        if self.asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """For what must not be done by half: inside, a signal with a handler in Python (which may raise) is answered at the
    end. Only the main thread is ever interrupted; elsewhere this does nothing."""
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


def _say(text: str) -> None:
    """Not through logging or print: the signal may have come in the middle of one of their lines."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nouterstep: {text}\n".encode())
