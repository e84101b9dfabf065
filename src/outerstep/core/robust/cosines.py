"""The cosine screen: which contributions point away from the mean of the others.

    cos(Δ_i, S − Δ_i) < −0.05,    S = Σ Δ_j

at most ⌊(n − 1)/2⌋ of them are refused, lowest first. Honest pseudo-gradients are nearly orthogonal, but not less than
that; with fewer than five, chance alone would put one below the limit. (The norm screen goes before it:
outerstep/screens.py. Norms that a server judged on arrival are not judged again: `combining.Screening.arrived`.)
"""

from __future__ import annotations

import math

from ...errors import ConfigError
from ...screens import LEAST_FOR_COSINES
from .products import Products

COSINE_LIMIT = -0.05


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
    """Which contributions are refused, and why."""
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
