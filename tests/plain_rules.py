"""Every rule in its plainest form, in fp64, over [n, m] at once: what the real ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def mean(x: Matrix, weights: Sequence[float]) -> Matrix:
    w = np.array(weights)[:, None]
    out: Matrix = (w * x).sum(0) / w.sum()
    return out


def trimmed_mean(x: Matrix, weights: Sequence[float], cut_off: int) -> Matrix:
    columns = []
    for column in x.T:
        ranked = sorted(zip(column, range(len(column)), weights, strict=True))
        kept = ranked[cut_off : len(ranked) - cut_off]
        columns.append(sum(value * w for value, _, w in kept) / sum(w for _, _, w in kept))
    return np.array(columns)


def median(x: Matrix, weights: Sequence[int]) -> Matrix:
    """Of whole weights: everybody as often as it weighs."""
    out: Matrix = np.median(np.repeat(x, weights, axis=0), axis=0)
    return out


def krum_scores(x: Matrix, attackers: int) -> list[float]:
    n = len(x)
    scores = []
    for i in range(n):
        distances = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - attackers - 2]))
    return scores


def multi_krum(x: Matrix, weights: Sequence[float], attackers: int, keep: int) -> Matrix:
    scores = krum_scores(x, attackers)
    chosen = sorted(range(len(x)), key=lambda i: scores[i])[:keep]
    return mean(x[chosen], [weights[i] for i in chosen])


def geometric_median(x: Matrix, weights: Sequence[float], iterations: int = 2000) -> Matrix:
    v = mean(x, weights)
    for _ in range(iterations):
        distances = np.maximum(np.linalg.norm(x - v, axis=1), 1e-12)
        v = mean(x, list(np.array(weights) / distances))
    return v


def centered_clipping(
    x: Matrix, weights: Sequence[float], start: Matrix, radius: float | None, iterations: int
) -> Matrix:
    v = start.astype(np.float64)
    for _ in range(iterations):
        distances = np.linalg.norm(x - v, axis=1)
        if radius is None:
            radius = float(np.median(distances))
        factors = np.minimum(1.0, radius / np.maximum(distances, 1e-300))
        v = v + mean((x - v) * factors[:, None], weights)
    return v
