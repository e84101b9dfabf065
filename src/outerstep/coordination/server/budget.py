"""How many tokens are in the model, how fast they come, and when there will be enough."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REMEMBERED = 64  # moments from which the rate is computed


@dataclass
class TokenBudget:
    """Each fragment sees every token once; a token is in the model when all fragments have it."""

    limit: int | None = None  # None = no end
    per_fragment: dict[int, int] = field(default_factory=dict)
    announced: bool = False  # the workers have been told to finish
    _moments: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def fix(self, fragments: int) -> None:
        self.per_fragment = {i: self.per_fragment.get(i, 0) for i in range(fragments)}

    @property
    def total(self) -> int:
        return min(self.per_fragment.values(), default=0)

    @property
    def is_spent(self) -> bool:
        return self.limit is not None and self.total >= self.limit

    def add(self, fragment: int, tokens: int, now: float) -> None:
        self.per_fragment[fragment] = self.per_fragment.get(fragment, 0) + tokens
        if not self._moments or self._moments[-1][1] != self.total:
            self._moments.append((now, self.total))

    @property
    def per_second(self) -> float:
        """Over the remembered moments; 0 while there are too few."""
        if len(self._moments) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._moments[0], self._moments[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None = no end in sight: no limit, or no rate yet."""
        if self.limit is None or self.per_second <= 0.0:
            return None
        return max(self.limit - self.total, 0) / self.per_second
