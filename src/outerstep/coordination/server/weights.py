"""How much a contribution counts.

    w = (1, samples or tokens, as the run weighs)  ·  (1 + staleness)^−½, if the run weighs staleness

What a worker reports is bounded by the server: to within `max_weight_ratio` of what is usual in this fragment's closed
rounds. Only *closed* rounds count as usual, so that the weights of a round do not depend on who came first. While there
is none yet, everybody counts the same. A contribution without training in it (a worker that only takes part so that
others need not wait) counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from ...errors import BadRequest
from ...types import Offer
from .pacing import staleness_factor
from .rounds import RoundRules

MEMORY = 100  # contributions in the running mean


@dataclass
class UsualWeight:
    """The running mean of what contributions of one fragment weighed, staleness aside."""

    mean: float = 0.0
    count: int = 0

    def include(self, amounts: Sequence[float], ratio: float) -> list[float]:
        """Take in what a closed round reported, none more than `ratio` times what is usual (in the first round: its
        median), so that nobody shifts it with one word. Returns them as they were taken."""
        present = [amount for amount in amounts if amount > 0.0]
        if not present:
            return []
        most = ratio * (self.mean if self.count else median_low(present))
        taken = [min(amount, most) for amount in present]
        for amount in sorted(taken):  # who came first makes no difference
            self.count += 1
            self.mean += (amount - self.mean) / min(self.count, MEMORY)
        return taken


def reported(offer: Offer, rules: RoundRules) -> float:
    """What the worker says about itself, in the run's unit. 0 = there is no training in it."""
    if offer.steps == 0:
        return 0.0
    if rules.weight_by == "equal":
        return 1.0
    amount = offer.samples if rules.weight_by == "samples" else offer.tokens
    if amount == 0:
        raise BadRequest(
            f"the run weighs contributions by {rules.weight_by}, and this one of {offer.steps} steps reports none",
            hint=f"call worker.count({rules.weight_by}=…) at each step, or start the server with --weight-by equal",
        )
    return float(amount)


def bounded(weight: float, usual: UsualWeight, rules: RoundRules) -> float:
    """Within max_weight_ratio of the usual weight; the same for all while nothing is usual yet."""
    if weight == 0.0:
        return 0.0
    if usual.count == 0 or rules.weight_by == "equal":
        return 1.0
    return min(max(weight, usual.mean / rules.max_weight_ratio), usual.mean * rules.max_weight_ratio)


def relative(weight: float, usual: UsualWeight, rules: RoundRules) -> float:
    """Beside the usual weight: what a rule that takes contributions one by one scales this one with."""
    return weight if usual.count == 0 or rules.weight_by == "equal" else weight / usual.mean


def discount(staleness: int, rules: RoundRules) -> float:
    return staleness_factor(staleness) if rules.weigh_staleness else 1.0
