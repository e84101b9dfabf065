"""A contribution on its way among peers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..protocol import Contribution, Sight


class GossipTicket:
    """A contribution under way. `offered`: what was said of it; None: the fragment had moved on before."""

    def __init__(
        self,
        contribution: Contribution,
        sequence: int,
        stuck_after_s: float | None,
        look: Callable[[GossipTicket, float], Sight],
    ) -> None:
        self.fragment, self.base_version = contribution.fragment, contribution.base_version
        self.sequence, self.stuck_after_s = sequence, stuck_after_s
        self.is_offered = threading.Event()
        self.offered_sequence = 0  # by which the others know it; 0: it was not offered
        self.refusal = ""  # why its own peer has no use for it
        self.error: BaseException | None = None
        self.short_since: float | None = None
        self._look = look

    @property
    def failed(self) -> bool:
        return self.error is not None

    def look(self, timeout_s: float) -> Sight:
        return self._look(self, timeout_s)

    def cancel(self) -> None:
        """Too late: what was said cannot be unsaid. It counts if the others decide so."""


__all__ = ["GossipTicket"]
