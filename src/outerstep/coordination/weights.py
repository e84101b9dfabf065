"""How much a contribution counts: the rules of every topology, in plain numbers.

    w = (1, samples or tokens, as the run weighs)  ·  (1 + staleness)^−½, if the run weighs staleness

A contribution without training in it (a worker that only takes part so that others need not wait) counts nothing. What
a worker reports about itself is bounded where it is not trusted: to within a ratio of what is *usual*.

    server      usual = the running mean over the fragment's closed rounds, so that the weights of a round do not depend
                on who came first; while there is none yet, everybody counts the same
    peers       usual = the lower median of the round, which all of them know
    ranks       as reported: they are one program
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from ..errors import BadRequest, ConfigError, WorkerError
from ..types import WeightBy

MEMORY = 100  # contributions in the running mean
MAX_WEIGHT_RATIO = 10.0  # between a contribution's weight and the usual one, unless the run says otherwise


class WorkReport(Protocol):
    """What a contribution says is in it."""

    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def amount(work: WorkReport, unit: WeightBy) -> float:
    """What a contribution reports, in the run's unit."""
    return 1.0 if unit == "equal" else float(work.samples if unit == "samples" else work.tokens)


def within(weight: float, usual: float, ratio: float) -> float:
    """The weight, no further from the usual one than `ratio`."""
    return min(max(weight, usual / ratio), usual * ratio)


def staleness_factor(staleness: int) -> float:
    """(1 + s)^(−1/2): what a pseudo-gradient that is s versions old is multiplied with; 1 for a fresh one.

    (Polynomial staleness discount, a = 1/2: Xie et al. 2019, "Asynchronous Federated Optimization".)
    """
    if staleness < 0:
        raise ConfigError(f"staleness must be >= 0 versions, got {staleness}")
    return 1.0 / math.sqrt(1 + staleness)


# --- a server ---------------------------------------------------------------------------------------------------------


def reported(work: WorkReport, unit: WeightBy) -> float:
    """What a worker tells the server about its contribution. 0 = there is no training in it."""
    if work.steps == 0:
        return 0.0
    said = amount(work, unit)
    if said == 0.0:
        raise BadRequest(
            f"the run weighs contributions by {unit}, and this one of {work.steps} steps reports none",
            hint=f"call worker.count({unit}=…) at each step, or start the server with --weight-by equal",
        )
    return said


@dataclass
class UsualWeight:
    """The running mean of what contributions of one fragment weighed, staleness aside."""

    mean: float = 0.0
    count: int = 0

    def include(self, amounts: Sequence[float], ratio: float) -> list[float]:
        """Take in what a closed round reported, none more than `ratio` times what is usual (in the first round: its
        median), so that nobody shifts it with one word. Returns them as they were taken."""
        present = [each for each in amounts if each > 0.0]
        if not present:
            return []
        most = ratio * (self.mean if self.count else median_low(present))
        taken = [min(each, most) for each in present]
        for each in sorted(taken):  # who came first makes no difference
            self.count += 1
            self.mean += (each - self.mean) / min(self.count, MEMORY)
        return taken

    def bounded(self, weight: float, unit: WeightBy, ratio: float) -> float:
        """Within `ratio` of the usual weight; the same for all while nothing is usual yet."""
        if weight == 0.0:
            return 0.0
        return 1.0 if unit == "equal" or self.count == 0 else within(weight, self.mean, ratio)

    def most(self, unit: WeightBy, ratio: float) -> float:
        """What a worker weighs in one round, however many contributions make it up."""
        return ratio if unit == "equal" or self.count == 0 else ratio * self.mean

    def relative(self, weight: float, unit: WeightBy) -> float:
        """Beside the usual weight: what a rule that takes contributions one by one scales this one with."""
        return weight if unit == "equal" or self.count == 0 else weight / self.mean


# --- peers and ranks --------------------------------------------------------------------------------------------------


def peer_weights(works: Sequence[WorkReport], unit: WeightBy) -> list[float]:
    """Of the contributions of a round among peers. A peer that trained and reports nothing counts as the least."""
    said = [amount(work, unit) if work.steps else 0.0 for work in works]
    present = [weight for weight in said if weight > 0.0]
    if not present:
        return [1.0 if work.steps else 0.0 for work in works]
    usual = median_low(present)
    return [
        within(weight, usual, MAX_WEIGHT_RATIO) if work.steps else 0.0 for weight, work in zip(said, works, strict=True)
    ]


def rank_weights(works: Sequence[WorkReport], unit: WeightBy) -> tuple[float, ...]:
    """Of the contributions of all ranks of one program. If none has trained, their mean is that of nothing."""
    weights = tuple(amount(work, unit) if work.steps else 0.0 for work in works)
    for rank, (work, weight) in enumerate(zip(works, weights, strict=True)):
        if work.steps and not weight:
            raise WorkerError(
                f"the run weighs contributions by {unit}, and rank {rank} reported none in {work.steps} steps: "
                f"call worker.count({unit}=…) at each step"
            )
    return weights if any(weights) else (1.0,) * len(weights)


def check_reported(work: WorkReport, unit: WeightBy) -> None:
    """Raise on a worker what a server would refuse: here the amounts of all processes of a group are known."""
    if work.steps and not amount(work, unit):
        raise WorkerError(
            f"the run weighs contributions by {unit}, and none were reported in {work.steps} steps: "
            f"call worker.count({unit}=…) at each step"
        )
