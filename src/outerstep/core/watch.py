"""What to watch in a round, from numbers that every topology knows anyway: the norms of what was contributed and of
what came out.

    Δ_i, w_i                 what worker i contributed, and how much it counts
    Δ̄ = Σ w_i·Δ_i / W        the mean, W = Σ w_i

    Σ w_i·‖Δ_i − Δ̄‖² / W        =  Σ w_i·‖Δ_i‖² / W − ‖Δ̄‖²             how far the workers have gone apart
    Σ_{i≠j} w_i·w_j·⟨Δ_i, Δ_j⟩  =  W²·‖Δ̄‖² − Σ w_i²·‖Δ_i‖²             how much they agree

The local weights of worker i are θ − Δ_i, so the first line is the variance of the weights between the workers too.
The second, divided by Σ_{i≠j} w_i·w_j·‖Δ_i‖·‖Δ_j‖, is a mean of the cosines between them, in which each pair counts
with its norms: the plain mean where all count alike and are equally long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..types import Watched


def watched(
    own_norm: float | None,
    norms: Sequence[float],
    weights: Sequence[float],
    aggregated_norm: float,
    *,
    is_mean: bool = True,
) -> Watched:
    """Of one round of one fragment: ‖Δ_i‖ and w_i of what took part, ‖Δ̄‖ of what came out of it.

    `own_norm`: of this worker's own contribution (None = it had none, or whoever asks is no worker). `is_mean`: False
    if another rule than the mean made the aggregate; then the identities do not hold, and its norm alone does not tell
    how similar the contributions were."""
    if not is_mean:
        return Watched(pseudo_grad_norm=own_norm, aggregated_grad_norm=aggregated_norm)
    return Watched(
        pseudo_grad_norm=own_norm,
        peer_grad_similarity=_similarity(norms, weights, aggregated_norm),
        aggregated_grad_norm=aggregated_norm,
        weight_divergence=_variance(norms, weights, aggregated_norm),
    )


def _similarity(norms: Sequence[float], weights: Sequence[float], mean_norm: float) -> float | None:
    """The mean cosine; None where there are no two that moved."""
    own = sum((w * n) ** 2 for n, w in zip(norms, weights, strict=True))
    pairs = sum(w * n for n, w in zip(norms, weights, strict=True)) ** 2 - own
    if sum(n > 0.0 and w > 0.0 for n, w in zip(norms, weights, strict=True)) < 2 or pairs <= 0.0:
        return None
    cosine = ((sum(weights) * mean_norm) ** 2 - own) / pairs
    return max(-1.0, min(1.0, cosine))  # the norms are rounded, and so may be just outside


def _variance(norms: Sequence[float], weights: Sequence[float], mean_norm: float) -> float | None:
    """Σ w·‖Δ − Δ̄‖² / W; None where nothing counts."""
    total = sum(weights)
    if total <= 0.0:
        return None
    square = sum(w * n * n for n, w in zip(norms, weights, strict=True)) / total
    return max(0.0, square - mean_norm * mean_norm)


def whole_model(fragments: Iterable[Watched]) -> Watched:
    """What was watched of each fragment, as of one model: squares and variances add up, and a cosine counts with the
    mean square of what it is a cosine of, ‖Δ̄_f‖² + the variance of f."""
    parts = list(fragments)
    similar = [
        (p.peer_grad_similarity, p.aggregated_grad_norm**2 + p.weight_divergence)
        for p in parts
        if p.peer_grad_similarity is not None and p.aggregated_grad_norm is not None and p.weight_divergence is not None
    ]
    share = sum(square for _, square in similar)
    divergences = [p.weight_divergence for p in parts if p.weight_divergence is not None]
    return Watched(
        pseudo_grad_norm=_together([p.pseudo_grad_norm for p in parts]),
        peer_grad_similarity=sum(c * square for c, square in similar) / share if share > 0.0 else None,
        aggregated_grad_norm=_together([p.aggregated_grad_norm for p in parts]),
        weight_divergence=sum(divergences) if divergences else None,
    )


def _together(norms: Iterable[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return math.sqrt(sum(norm * norm for norm in known)) if known else None


def sum_of_squares(values: Tensor) -> float:
    """Σ x² of flat fp32 values in host memory. Squares of honest numbers can overflow fp32: then once more, in fp64."""
    squares = float(torch.dot(values, values))
    return squares if math.isfinite(squares) else float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


__all__ = ["sum_of_squares", "watched", "whole_model"]
