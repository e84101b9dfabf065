"""What workers claim to have done, how much of it counts, and how often they may push.

    counted = min(claimed, limit · time since the worker's last counted contribution)
    limit   = `max_tokens_per_s` if the run says so, else OTHERS times the median of what the others do per second

A worker reports steps, samples and tokens about itself, and a token budget ends the run: without a bound, one word
would. The median is the others': a worker cannot raise its own limit, and a minority cannot lower that of the rest.
Nothing is known of a worker that is alone, so a lone worker is bounded by `max_tokens_per_s` only.

What exceeds the limit is not lost at once. It is *held*, and counts with later contributions as far as these leave
room: a worker that trained on through an outage brings two contributions in a row, and both are true. A worker that
claims too much gains nothing by it, for it could as well claim its limit each time.

While nobody else has contributed yet, there is no median. The claims of the first are held for those that are here and
still have to speak, for PATIENCE_S at most.

Pushes are paced in the same way where one contribution can close a round: a worker pushes at most `max_weight_ratio`
times as often as the median of the others, and BURST times in a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

OTHERS = 4.0
REMEMBERED_RATES = 8
SHORTEST_S = 1.0  # between quick rounds a moment more or less is all there is: no time counts as shorter
PATIENCE_S = 600.0
BURST = 4
MOST_HELD = 1e15


class ClaimedWork(NamedTuple):
    """How much a contribution says is in it; or, of a worker, how much that is per second."""

    steps: float
    samples: float
    tokens: float
    pushes: float = 1.0


NOTHING = ClaimedWork(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Claim:
    """A contribution to an open round: whose, when it came, and what it says of itself."""

    worker_id: str
    at: float
    work: ClaimedWork


@dataclass
class Claimant:
    """One worker's contributions to one fragment, as far as its claims are concerned."""

    last_at: float  # when the last one counted, or since when there is something to claim
    contributions: int = 0
    rates: deque[ClaimedWork] = field(default_factory=lambda: deque(maxlen=REMEMBERED_RATES))  # of the last ones
    usual: ClaimedWork = NOTHING  # their median, unit by unit
    held_tokens: float = 0.0
    free_at: float = -math.inf  # when it may push again

    def note(self, claim: Claim) -> float:
        """A contribution counts. Returns the time since the one before."""
        elapsed_s, self.last_at = claim.at - self.last_at, claim.at
        self.contributions += 1
        if self.contributions == 2:
            self.rates.clear()  # the first took time to begin, and says little
        work, within_s = claim.work, max(elapsed_s, SHORTEST_S)
        pushes = 1.0 / elapsed_s if elapsed_s > 0.0 else math.inf
        self.rates.append(ClaimedWork(work.steps / within_s, work.samples / within_s, work.tokens / within_s, pushes))
        self.usual = ClaimedWork(*(median(column) for column in zip(*self.rates, strict=True)))
        return elapsed_s

    def count_tokens(self, claimed: float, limit: float | None, elapsed_s: float, *, others_come: bool) -> int:
        """Of what is claimed now and was held before, so much counts. `others_come`: nobody knows a limit yet, but
        somebody else may still show one."""
        total = self.held_tokens + claimed
        counted = 0 if limit is None and others_come else allowed(total, limit, elapsed_s)
        self.held_tokens = min(total - counted, MOST_HELD)
        return int(counted)

    def pushed(self, at: float, limit: float) -> None:
        """It pushed, and may do so again at once unless it has pushed BURST times in a row."""
        self.free_at = max(self.free_at, at - (BURST - 1) / limit) + 1.0 / limit


def allowed(claimed: float, limit: float | None, elapsed_s: float) -> float:
    """How much of it may be true. One always may: a worker that contributes has done something."""
    if limit is None:
        return claimed
    return min(claimed, max(math.floor(limit * max(elapsed_s, SHORTEST_S)), 1))


class UsualRates:
    """What the workers of a fragment do per second."""

    def __init__(self, usual: Mapping[str, ClaimedWork]) -> None:
        self._usual = usual
        units = range(len(ClaimedWork._fields))
        self._columns = [sorted(work[unit] for work in usual.values() if work[unit] > 0.0) for unit in units]

    def others(self, worker_id: str, unit: str) -> float | None:
        """The upper median of the other workers that report this unit; None = there is none."""
        index = ClaimedWork._fields.index(unit)
        column, own = self._columns[index], self._usual.get(worker_id)
        count = place = len(column)
        if own is not None and own[index] > 0.0:
            count, place = count - 1, bisect_left(column, own[index])
        if count == 0:
            return None
        middle = count // 2
        return column[middle] if middle < place else column[middle + 1]

    def limit(self, worker_id: str, unit: str, most_per_s: float | None) -> float | None:
        """What this worker may claim per second; None = nobody knows."""
        usual = self.others(worker_id, unit)
        return most_per_s if most_per_s is not None or usual is None else OTHERS * usual


def settle(
    claims: Sequence[Claim],
    claimants: Mapping[str, Claimant],
    *,
    live: AbstractSet[str],
    others_come: bool,
    most_per_s: float | None,
    push_ratio: float,
) -> tuple[UsualRates, list[int]]:
    """A round closes: the rates to go by until the next one does, and how many tokens count of each claim.

    Tokens are compared with what the others claim in this very round too, so the first round is bounded as any other.
    The rates for the next one are of workers that have contributed twice: who came first in a round makes no
    difference to its weights, and nobody is measured by how long it took to begin."""
    elapsed = [claimants[claim.worker_id].note(claim) for claim in claims]
    here = {name: one for name, one in claimants.items() if name in live and one.contributions}
    now, tokens = UsualRates({name: one.usual for name, one in here.items()}), list[int]()
    for claim, elapsed_s in zip(claims, elapsed, strict=True):
        limit = now.limit(claim.worker_id, "tokens", most_per_s)
        claimant = claimants[claim.worker_id]
        tokens.append(claimant.count_tokens(claim.work.tokens, limit, elapsed_s, others_come=others_come))
    rates = UsualRates({name: one.usual for name, one in here.items() if one.contributions > 1})
    for claim in claims:
        often = rates.others(claim.worker_id, "pushes")
        if often is not None:
            claimants[claim.worker_id].pushed(claim.at, push_ratio * often)
    return rates, tokens
