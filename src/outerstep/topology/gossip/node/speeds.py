"""How fast other peers were: whom to ask first, how long to wait, and how many threads one of them may keep.

A peer that drips its answers looks like one on a bad link. So no peer is waited for without end. Each gets the time
that its bytes take at the speed it has shown, and a minute more. A peer that takes longer is asked after the others,
and then gets twice the time. So a slow but honest peer fails once, and from then on gets the time it needs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 60.0
FASTEST, SLOWEST = 64 << 10, 256  # bytes a second that are expected of anybody at first, and at last
MOST_AT_ONE = 2  # threads that may fetch from one peer at a time


class Speeds:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, float] = {}
        self._busy: Counter[str] = Counter()

    def expected(self, key: str) -> float:
        """The speed that is expected of it, in bytes per second."""
        return self._expected.get(key, FASTEST)

    def limit_s(self, key: str, size_bytes: int) -> float:
        return GRACE_S + size_bytes / self.expected(key)

    def note(self, key: str, size_bytes: int, seconds: float) -> None:
        """It made it in so long; next time it may take twice as long, and who was fast is believed a little more."""
        self._expect(key, size_bytes / seconds / 2.0 if seconds > GRACE_S else self.expected(key) * 2.0)

    def was_too_slow(self, key: str) -> None:
        self._expect(key, self.expected(key) / 2.0)

    def _expect(self, key: str, speed: float) -> None:
        with self._lock:
            self._expected[key] = min(max(speed, SLOWEST), FASTEST)

    @contextmanager
    def place_at(self, key: str) -> Iterator[bool]:
        """Take a place among the threads that fetch from it. False: all are taken."""
        with self._lock:
            is_free = self._busy[key] < MOST_AT_ONE
            self._busy[key] += is_free
        try:
            yield is_free
        finally:
            with self._lock:
                self._busy[key] -= is_free
                if not self._busy[key]:
                    del self._busy[key]

    def keep_only(self, keys: set[str]) -> None:
        with self._lock:
            for key in self._expected.keys() - keys:
                del self._expected[key]
