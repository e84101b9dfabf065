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

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

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
    """Of one dataset: what its workers said and brought."""

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

    def said(self, worker_id: str) -> tuple[int, float]:
        """How many it had not trained, as it said last, and when."""
        worker = self._workers[worker_id]
        return worker.untrained, worker.at

    @property
    def names(self) -> Collection[str]:
        """Of those that have said something."""
        return self._workers.keys()

    def gone(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def remembered(self) -> dict[str, dict[str, float]]:
        return {name: asdict(worker) for name, worker in sorted(self._workers.items())}

    @classmethod
    def resumed(cls, units: int, facts: Mapping[str, Mapping[str, Any]]) -> FairShares:
        made = cls(units)
        made._workers = {str(name): _Worker(**worker) for name, worker in facts.items()}
        return made

    def among(self, live: Collection[str], now: float, ratio: float = inf) -> Crowd:
        """Those of them that train this dataset. `ratio`: times the median of the others', above which nobody counts,
        whatever it has brought before."""
        here = {name: one for name, one in self._workers.items() if name in live}
        return Crowd(here, self._units, now, ratio, len(live))


class Crowd:
    """Workers that train one dataset, as they are now. `hand`: how many units the run believes a worker to hold that
    are in no contribution of it. Every question takes time in the logarithm of their number."""

    def __init__(
        self, workers: Mapping[str, _Worker], units: int, now: float, ratio: float = inf, count: int = 0
    ) -> None:
        """`count`: with those of which nothing is known."""
        self._workers, self._units, self._now, self._ratio = workers, units, now, ratio
        self._count = max(count, len(workers), 1)
        self._paces = sorted(one.claimed for one in workers.values() if one.claimed > 0.0)
        self._at_once = sorted(one.would_bring(now) for one in workers.values() if one.brought)

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def pace(self, worker_id: str) -> float:
        """Units per second; 0 = not known yet."""
        worker = self._workers[worker_id]
        if len(self._workers) == 1:
            return worker.claimed
        others = _median_without(self._paces, worker.claimed if worker.claimed > 0.0 else None)
        if others is None:
            return min(worker.claimed, max(UNKNOWN_PACE, PROVEN_RATIO * worker.proven))
        return min(worker.claimed, self._bounded(worker, others))

    def _bounded(self, worker: _Worker, others: float) -> float:
        """Units per second: so many times the others', or what it has shown."""
        return max(PACE_RATIO * others, min(PROVEN_RATIO * worker.proven, self._ratio * others))

    def believable(self, worker_id: str) -> float:
        """How many units it can have trained since it last brought some."""
        if self._count == 1:
            return inf
        worker = self._workers.get(worker_id)
        if worker is None:
            return self._few
        elapsed_s = max(self._now - worker.since, LEAST_INTERVAL_S)
        proven = sorted(one.proven for one in self._workers.values() if one.proven > 0.0)
        others = _median_without(proven, worker.proven if worker.proven > 0.0 else None)
        if others is None:
            return max(self._few, PROVEN_RATIO * worker.proven * elapsed_s)
        return self._bounded(worker, others) * elapsed_s

    def untrained(self, worker_id: str, hand: int) -> float:
        worker, pace = self._workers[worker_id], self.pace(worker_id)
        said = min(max(worker.untrained - pace * (self._now - worker.at), 0.0), float(hand))
        if len(self._workers) == 1:
            return said
        others = _median_without(self._at_once, worker.would_bring(self._now) if worker.brought else None)
        most = inf if others is None else max(AT_ONCE * others, PROVEN_RATIO * worker.brought)
        trained = (pace or UNKNOWN_PACE) * (self._now - worker.since)  # it may not know its pace yet
        return max(said, hand - min(trained, most))

    def room(self, worker_id: str, hand: int) -> float:
        """How many more it may hold; negative: so many fewer."""
        if len(self._workers) == 1:
            return inf
        return max(self._few, AHEAD_S * self.pace(worker_id)) - self.untrained(worker_id, hand)

    @property
    def _few(self) -> float:
        return max(FEW, self._units / (FEW_PART * self._count))


def _median_without(values: Sequence[float], one: float | None) -> float | None:
    """Of sorted values, less one of them; None if none is left."""
    at = len(values) if one is None else bisect_left(values, one)
    count = len(values) - (one is not None)
    if count == 0:
        return None

    def kept(i: int) -> float:
        return values[i if i < at else i + 1]

    return (kept((count - 1) // 2) + kept(count // 2)) / 2
