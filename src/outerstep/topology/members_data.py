"""The leased data of members without a server that are a cluster: between the thread in which they decide and the
leader's, in the process of the one that leads (coordination/shared_sub_leases.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from ..coordination.shared_sub_leases import HeardLeases, LeaseNews, SharedSubLeases
from ..coordination.sub_leases import LONGEST_REASON

Change = Callable[[float, Collection[str]], bool]


class MembersData:
    """(`LeasesBelow`.) `begin` for each leader: what one has heard and nobody has decided on ends with it."""

    def __init__(self, decided: SharedSubLeases) -> None:
        """`decided`: the table of this member."""
        self._decided = decided
        self._changed = threading.Condition()
        self.leases = HeardLeases(decided)

    def begin(self) -> MembersData:
        with self._changed:
            self.leases = HeardLeases(self._decided)
        return self

    # --- for the leader, from its own threads -----------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """(Nothing need be recorded: members hear of it when they decide next.)"""
        with self._changed:
            change(time.monotonic(), ())
            self._changed.notify_all()

    # --- for the thread that decides ----------------------------------------------------------------------------------

    def news(self, wait_s: float = 0.0) -> tuple[LeaseNews, ...]:
        """What members have not heard yet. `wait_s`: for the first of it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.leases.news), wait_s)
            return self.leases.news

    @property
    def waiting_for(self) -> str:
        """What nothing is granted for, in words."""
        with self._changed:
            return next((table.waits_above for table in self.leases.sub_tables.values()), "")[:LONGEST_REASON]

    def has_decided(self) -> None:
        """The table is another."""
        with self._changed:
            self.leases.decided(self._decided, time.monotonic())
