"""Who is left out before any rule sees it. Plain numbers in, plain numbers out.

The **norm screen** refuses a contribution that is far longer than usual:

    ‖Δ‖/√steps  >  2 × the median over those accepted in the last 8 rounds

(noisy steps add up like a random walk, hence the root). Without history the round's own median is taken. A minority
cannot move a median by much; a majority that has grown is no attack: when more than half of a round exceed the limit,
as they do while the learning rate warms up, the round's own median counts. With fewer than three there is no majority,
and nothing is refused.

The **cosine screen** refuses a contribution that points away from the mean of the others:

    cos(Δ_i, S − Δ_i) < −0.05,    S = Σ Δ_j

at most ⌊(n − 1)/2⌋ of them, lowest first. Honest pseudo-gradients are nearly orthogonal, but not less than that; with
fewer than five, chance alone would put one below the limit.

A server has a norm screen of its own (coordination/server/screen.py, which says why there are two): it judges
contributions one by one while they arrive, and what it let through is not judged again here
(`stream.Screening.arrived`). The cosine screen is one and the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from .products import Products

NORM_FACTOR = 2.0
HISTORY_ROUNDS = 8
LEAST_FOR_NORMS = 3
COSINE_LIMIT = -0.05
LEAST_FOR_COSINES = 5

History = tuple[tuple[float, ...], ...]
"""‖Δ‖/√steps of those accepted, of the last rounds, the newest last"""


def rate(norm: float, steps: int) -> float:
    """‖Δ‖/√steps: what the norm screen compares."""
    if steps < 1:
        raise ConfigError(f"a contribution must have at least one step in it, got {steps}; leave it out")
    return norm / math.sqrt(steps)


def remember(history: History, accepted: Sequence[float]) -> History:
    """With one more round, and without those that are too old. A round that accepted nobody says nothing."""
    return (*history, tuple(accepted))[-HISTORY_ROUNDS:] if accepted else history


def norm_screen(rates: Sequence[float], history: History = ()) -> dict[int, str]:
    """Who is refused, and why. `rates`: of the finite contributions of this round, all ≥ 0."""
    if len(rates) < LEAST_FOR_NORMS:
        return {}
    own = statistics.median(rates)
    usual = statistics.median([each for accepted in history for each in accepted]) if history else own
    if sum(each > NORM_FACTOR * usual for each in rates) > len(rates) // 2:
        usual = own
    return {
        i: f"its ‖Δ‖/√steps is {each:.3g}, more than {NORM_FACTOR:g} times the usual {usual:.3g}"
        for i, each in enumerate(rates)
        if each > NORM_FACTOR * usual
    }


def cosines(products: Products) -> list[float]:
    """cos(Δ_i, S − Δ_i) for each; 0 where either is zero."""
    found, sums = [], [math.fsum(row) for row in products.rows]
    everything = math.fsum(sums)
    for i, with_all in enumerate(sums):
        square = products.rows[i][i]
        others = everything - 2.0 * with_all + square  # ‖S − Δ_i‖²
        length = math.sqrt(square) * math.sqrt(max(0.0, others))
        found.append((with_all - square) / length if length > 0.0 else 0.0)
    return found


def cosine_screen(products: Products) -> dict[int, str]:
    """Who is refused, and why."""
    n = len(products)
    check_enough_for_cosines(n)
    found = cosines(products)
    below = sorted((cosine, i) for i, cosine in enumerate(found) if cosine < COSINE_LIMIT)
    return {
        i: f"its cosine with the mean of the others is {cosine:.2f}, below {COSINE_LIMIT:g}"
        for cosine, i in below[: (n - 1) // 2]
    }


def check_enough_for_cosines(n: int) -> None:
    if n < LEAST_FOR_COSINES:
        raise ConfigError(
            f"the cosine screen needs at least {LEAST_FOR_COSINES} contributions, got {n}: with fewer it would refuse "
            "honest ones; leave it off, or wait for more"
        )


def check_history(history: Mapping[str, History]) -> None:
    """Of a saved state: everything must be a number that a screen could have accepted."""
    for fragment, rounds in history.items():
        wrong = [each for accepted in rounds for each in accepted if not 0.0 <= each < math.inf]
        if wrong or len(rounds) > HISTORY_ROUNDS or not all(rounds):
            raise ConfigError(
                f"the norm history of fragment {fragment} must be at most {HISTORY_ROUNDS} rounds of numbers ≥ 0, got "
                f"{len(rounds)} rounds{f' with {wrong[0]} in one' if wrong else ''}"
            )
