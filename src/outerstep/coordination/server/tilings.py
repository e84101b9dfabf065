"""The tilings of the workers that are here: those that say the same are one, and there is a bound for all.

A tiling is small or some megabytes, as its worker likes. It is kept for as long as a worker has it. Workers whose
tilings say the same share one, so that jobs of one shape cost a server what one of them does. What newcomers with one
token may have it keep is bounded, as are their other costs (quotas.py): a worker that has contributed has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from ...errors import QuotaExceeded
from ...tiling import ModelTiling
from ...types import MOST_HELD
from .membership import KnownWorker
from .quotas import REMEDY, named

MOST_OF_NEWCOMERS = 4 * MOST_HELD  # of a tiling's weight: some hundred megabytes at the very most
RETRY_S = 5.0


class Tilings:
    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, ModelTiling] = WeakValueDictionary()

    def shared(self, tiling: ModelTiling) -> ModelTiling:
        """The one that says the same, if a worker has it; else this one, from now on. (Its digest is no proof: whoever
        wants to, finds two tilings with the same.)"""
        known = self._known.get(tiling.digest)
        if known is None:
            known = self._known[tiling.digest] = tiling
        return known if known is tiling or known.says_the_same(tiling) else tiling

    def check_room(self, tiling: ModelTiling, token: str, worker_id: str, workers: Iterable[KnownWorker]) -> None:
        """May this newcomer have the server keep one more?"""
        kept = {
            worker.tiling
            for worker in workers
            if worker.tiling is not None
            and worker.token == token
            and worker.is_newcomer
            and worker.worker_id != worker_id
        }
        weight = sum(one.weight for one in kept)
        if kept and self.shared(tiling) not in kept and weight + tiling.weight > MOST_OF_NEWCOMERS:
            raise QuotaExceeded(
                f"the jobs of newcomers with {named(token)} may hold {MOST_OF_NEWCOMERS} boxes, counted with their "
                f"patterns; they have {weight}, and this one has {tiling.weight}",
                hint=f"ask again when they have contributed; or ask the operator for {REMEDY}",
                retry_after_s=RETRY_S,
            )
