"""What the threads of a node share: one lock, the state machine under it, and how each of them learns of the others.

A thread that has done something with the peer, under the lock, calls `Recorder.note` (records.py); that counts up
`changes` and, if there is something to tell the other peers, `news`, and wakes the threads that wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....coordination.gossip import GossipPeer
from ....errors import ExchangeFailed
from ....events import EventSink
from .watchdog import Watchdog


class Shared:
    """The state that the threads share. `lock` guards all of it, the peer above all."""

    def __init__(self, clock: Callable[[], float], events: EventSink = lambda event: None) -> None:
        self.lock = threading.Condition()
        self.clock, self.events = clock, events
        self.changes = 0
        self.news = 0
        self.failure = ""  # why the node has stopped
        self.trouble = ""  # why it has to wait
        self.is_stopping = False
        self.progress_at: float | None = None  # when the training last reported; None = it never did
        self._peer: GossipPeer | None = None
        self.watchdog = Watchdog(events, self._end)

    @property
    def peer(self) -> GossipPeer:
        """The state machine; from `begin` on."""
        if self._peer is None:
            raise ExchangeFailed("this node has not begun yet: call begin() first")
        return self._peer

    @property
    def has_begun(self) -> bool:
        return self._peer is not None

    def begin(self, peer: GossipPeer) -> None:
        self._peer = peer

    def changed(self) -> None:
        """With the lock held: wake the threads, because something has changed."""
        self.changes += 1
        self.lock.notify_all()

    def wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """With the lock held: wait until it is so, or the node stops."""
        return self.lock.wait_for(lambda: self.is_stopping or is_so(), timeout_s) and not self.is_stopping

    # --- threads ----------------------------------------------------------------------------------------------------

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Start a thread. If it ends with an exception, the node stops (watchdog.py)."""
        if not self.is_stopping:
            self.watchdog.start(name, job)

    def _end(self, why: str) -> None:
        with self.lock:
            self.failure = self.failure or why
            self.is_stopping = True
            self.changed()

    def check(self) -> None:
        if self.failure or self.is_stopping:
            raise ExchangeFailed(f"this node has stopped: {self.failure or 'it was asked to'}")

    def stop(self, patience_s: float) -> list[str]:
        """End all threads. Returns the names of those that have not ended in time."""
        with self.lock:
            self.is_stopping = True
            self.changed()
        return self.watchdog.call_off(patience_s)
