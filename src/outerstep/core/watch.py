"""The metrics of a round, computed from numbers that every topology already knows: the norms of the contributions and
of their mean. (Under another rule than the mean they are taken while the rule reads the contributions.)

    Δ_i, w_i                 worker i's contribution, and its weight
    Δ̄ = Σ w_i·Δ_i / W        the mean, W = Σ w_i

    Σ w_i·‖Δ_i − Δ̄‖² / W        =  Σ w_i·‖Δ_i‖² / W − ‖Δ̄‖²             how far the workers have drifted apart
    Σ_{i≠j} w_i·w_j·⟨Δ_i, Δ_j⟩  =  W²·‖Δ̄‖² − Σ w_i²·‖Δ_i‖²             how much they agree

The local weights of worker i are θ − Δ_i, so the first line is also the variance of the weights between the workers.
The second, divided by Σ_{i≠j} w_i·w_j·‖Δ_i‖·‖Δ_j‖, is a mean of the cosines between them, each pair weighted by its
norms: the plain mean if all have equal weight and length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from ..types import Agreement, Watched


def watched(
    own_norm: float | None,
    norms: Sequence[float],
    weights: Sequence[float],
    mean_norm: float | None,
    aggregated_norm: float | None = None,
) -> Watched:
    """The metrics of one round of one fragment, from ‖Δ_i‖ and w_i of the contributions and ‖Δ̄‖ of their mean.

    `own_norm`: of this worker's own contribution (None = it had none, or the caller is not a worker). `mean_norm`: None
    if it is not known; then nobody can tell how similar the contributions were. `aggregated_norm`: of what another rule
    than the mean made of them; None = the mean is the aggregate."""
    made = mean_norm if aggregated_norm is None else aggregated_norm
    if not all(map(math.isfinite, (*norms, mean_norm or 0.0, made or 0.0))):
        return Watched()
    if mean_norm is None:
        return Watched(pseudo_grad_norm=own_norm, aggregated_grad_norm=made)
    weighted, total, cosine, variance = list(zip(norms, weights, strict=True)), sum(weights), None, None
    own = sum((w * n) ** 2 for n, w in weighted)
    pairs = sum(w * n for n, w in weighted) ** 2 - own
    if pairs > 0.0:  # at least two count
        # The norms are rounded, so the cosine may be just outside.
        cosine = max(-1.0, min(1.0, ((total * mean_norm) ** 2 - own) / pairs))
    if total > 0.0:
        variance = max(0.0, sum(w * n * n for n, w in weighted) / total - mean_norm * mean_norm)
    return Watched(
        pseudo_grad_norm=own_norm,
        peer_grad_similarity=cosine,
        aggregated_grad_norm=made,
        weight_divergence=variance,
    )


def as_seen_by(worker_id: str, agreement: Agreement) -> Watched | None:
    """The server's metrics of a round, with the norm of this worker's own (last) contribution to it, if any."""
    if agreement.watched is None:
        return None
    own = [p.norm for p in agreement.participants if p.worker_id == worker_id]
    return replace(agreement.watched, pseudo_grad_norm=own[-1]) if own else agreement.watched


def whole_model(fragments: Iterable[Watched]) -> Watched:
    """The metrics of all fragments combined: squares and variances add up, and a cosine is weighted by the mean square
    of its contributions, ‖Δ̄_f‖² + the variance of f."""
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


def norm_of(tensors: Iterable[Tensor]) -> float:
    """‖Δ‖ of fp32 tensors that together are one Δ."""
    return math.sqrt(sum(sum_of_squares(tensor.reshape(-1)) for tensor in tensors))


def sum_of_squares(values: Tensor) -> float:
    """Σ x² of flat fp32 values. Squares of honest numbers can overflow fp32; then it is computed again in fp64."""
    squares = float(torch.dot(values, values))
    return squares if math.isfinite(squares) else float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
