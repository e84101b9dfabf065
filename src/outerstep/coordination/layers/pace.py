"""How fast a cluster is to the layer above: its rounds per second, while its members train.

The worker above cannot tell by its own steps. They are rounds that others closed, and those that closed while it
exchanged are taken all at once. So it is measured where they close. Time in which members are held for the layer above
is not theirs, as a worker's waiting is not its training.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

KEPT: Final = 15  # rounds; of their times the median counts


class RoundPace:
    """`now` is any clock that goes forward."""

    def __init__(self) -> None:
        self._since: float | None = None  # members have trained from then on, as far as is known
        self._is_held = False
        self._took_s: deque[float] = deque(maxlen=KEPT)

    def closed(self, now: float, *, held: bool) -> None:
        """A round of the first fragment. `held`: members wait for what comes from above."""
        if self._since is not None and not self._is_held:
            self._took_s.append(now - self._since)
        self._since, self._is_held = now, held

    def released(self, now: float) -> None:
        if self._is_held:
            self._since, self._is_held = now, False

    @property
    def per_s(self) -> float:
        """0 = not known yet."""
        took_s = median(self._took_s) if self._took_s else 0.0
        return 1.0 / took_s if took_s > 0.0 else 0.0
