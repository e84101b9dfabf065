"""How much of a dataset a worker may hold, without I/O: what it says of itself, as far as the run can believe it.

A worker says how fast it trains and how much of its units it has not trained yet. A lie about either would make it look
like the one that should get everything. So

    pace       at most PACE_RATIO times the median of the others', or PROVEN_RATIO times what it has brought per second
    untrained  at least what it holds, less what it can have trained at that pace since it last brought something; and
               nobody trains much more than the others before it brings something, or than it brought before
    room       for untrained units: AHEAD_S of training, and never less than a small part of an epoch

A worker that is alone is believed: there is nobody to compare it with, and nobody from whom it takes anything. (Who
comes later is given what it holds beyond that: leases.py.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf
from statistics import median

PACE_RATIO = 4.0
PROVEN_RATIO = 2.0
UNKNOWN_PACE = 16.0  # units per second that are believed while no other has a pace
AT_ONCE = 4.0  # times what the others usually bring at once
AHEAD_S = 40.0  # twice what a worker asks for (worker/units.py)
FEW, FEW_PART = 8, 4  # so many units, or an n-th of its equal part of an epoch
LEAST_INTERVAL_S = 1.0
PACE_MEMORY = 0.5


@dataclass
class _Worker:
    """`untrained`, `claimed`: as it said at `at`; `proven`: units per second that it brought; `since`: when it last
    brought some, or asked for the first time; `interval_s`: between the last two times."""

    since: float
    at: float = 0.0
    untrained: int = 0
    claimed: float = 0.0
    proven: float = 0.0
    brought: int = 0
    interval_s: float = 0.0

    def would_bring(self, now: float) -> float:
        """By now. It may wait for others."""
        return self.brought * max(1.0, (now - self.since) / self.interval_s)


class FairShares:
    """Of one dataset. `hand`: how many units the run believes a worker to hold that are in no contribution of it."""

    def __init__(self, units: int) -> None:
        """`units`: of one epoch."""
        self._units = units
        self._workers: dict[str, _Worker] = {}

    def told(self, worker_id: str, untrained: int, pace: float, now: float) -> None:
        worker = self._workers.setdefault(worker_id, _Worker(now))
        worker.at, worker.untrained, worker.claimed = now, untrained, pace

    def granted(self, worker_id: str, units: int) -> None:
        self._workers[worker_id].untrained += units

    def brought(self, worker_id: str, units: int, now: float) -> None:
        """So many that were in no contribution before are in an accepted one."""
        worker = self._workers.get(worker_id)
        if worker is None or not units:
            return
        worker.interval_s = max(now - worker.since, LEAST_INTERVAL_S)
        pace = units / worker.interval_s
        worker.proven = PACE_MEMORY * worker.proven + (1.0 - PACE_MEMORY) * pace if worker.proven else pace
        worker.since, worker.brought = now, units

    def gone(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def among(self, live: Iterable[str]) -> list[str]:
        """Those of them that train this dataset."""
        return [name for name in live if name in self._workers]

    # --- what is believed -----------------------------------------------------------------------------------------

    def pace(self, worker_id: str, live: Collection[str]) -> float:
        """Units per second; 0 = not known yet."""
        worker = self._workers[worker_id]
        others = [one.claimed for one in self._others(worker_id, live)]
        if not others:
            return worker.claimed
        known = [pace for pace in others if pace > 0.0]
        believed = PACE_RATIO * median(known) if known else UNKNOWN_PACE
        return min(worker.claimed, max(believed, PROVEN_RATIO * worker.proven))

    def untrained(self, worker_id: str, hand: int, now: float, live: Collection[str]) -> float:
        worker, others = self._workers[worker_id], self._others(worker_id, live)
        said = min(max(worker.untrained - self.pace(worker_id, live) * (now - worker.at), 0.0), float(hand))
        if not others:
            return said
        at_once = [one.would_bring(now) for one in others if one.brought]
        most = max(AT_ONCE * median(at_once), PROVEN_RATIO * worker.brought) if at_once else inf
        return max(said, hand - min(self._fastest(worker_id, live) * (now - worker.since), most))

    def room(self, worker_id: str, hand: int, now: float, live: Collection[str]) -> float:
        """How many more it may hold; negative: so many fewer."""
        others = self._others(worker_id, live)
        if not others:
            return inf
        few = max(FEW, self._units / (FEW_PART * (len(others) + 1)))
        most = max(few, AHEAD_S * self.pace(worker_id, live))
        return most - self.untrained(worker_id, hand, now, live)

    def _fastest(self, worker_id: str, live: Collection[str]) -> float:
        """It may not know its pace yet."""
        return self.pace(worker_id, live) or UNKNOWN_PACE

    def _others(self, worker_id: str, live: Collection[str]) -> list[_Worker]:
        return [one for name, one in self._workers.items() if name != worker_id and name in live]
