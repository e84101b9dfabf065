"""A cluster's speed, as it is reported to the layer above: its rounds per second while members train.

The worker above cannot measure this from its own steps. Its steps are rounds that others closed, and it takes all
rounds of an exchange's duration at once. So the rounds are timed where they close. Time in which members wait for the
layer above does not count, as a worker's waiting does not count as training.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

KEPT: Final = 15  # rounds; the median of their times counts


class RoundPace:
    """The median time of recent rounds. `now` comes from any monotonic clock."""

    def __init__(self) -> None:
        self._since: float | None = None  # members have trained since then, as far as is known
        self._is_held = False
        self._took_s: deque[float] = deque(maxlen=KEPT)

    def closed(self, now: float, *, held: bool) -> None:
        """A round of the first fragment has closed. `held`: members now wait for a version from above."""
        if self._since is not None and not self._is_held:
            self._took_s.append(now - self._since)
        self._since, self._is_held = now, held

    def released(self, now: float) -> None:
        if self._is_held:
            self._since, self._is_held = now, False

    @property
    def per_s(self) -> float:
        """Rounds per second; 0 = not known yet."""
        took_s = median(self._took_s) if self._took_s else 0.0
        return 1.0 / took_s if took_s > 0.0 else 0.0
