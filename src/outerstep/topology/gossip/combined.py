"""How the contributions of an agreed round become one, the same bits on every peer.

    screens:   finite, norm against the last rounds; cosine by choice           screens.py, core/robust/cosines.py
    rule:      the mean, or a robust one                                        core/robust/
    weights:   1, or what a contribution says of itself, within a factor of the round's median

Contributions are read in the order of their peers' ids, in blocks; nothing here depends on who received what first.
What is remembered from one round to the next (norms, and for centered clipping the last aggregate) is part of the run:
a peer that joins gets it together with the anchor (standing.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...coordination.weights import peer_weights
from ...core.robust import (
    Bucketing,
    Candidate,
    RobustAggregator,
    Screening,
    Tensors,
    TensorSpan,
    aggregate,
    cut,
)
from ...core.views import fp32_views
from ...core.watch import sum_of_squares, watched
from ...errors import ConfigError
from ...screens import History, remember
from ...statements import Offered
from ...types import Participant, Watched, WeightBy
from ..forms import Form
from .contents import Contents


@dataclass(frozen=True)
class Combined:
    """`frame`: the aggregate in the form of an update, fp32; None: there was too little in the round for the rule, and
    nothing moves. `participants` with the weight that each had, 0 = left out (`refused` says why)."""

    frame: Tensor | None
    participants: tuple[Participant, ...]
    refused: dict[str, str]
    history: History
    centre: dict[str, Tensor] | None
    watched: Watched | None


@dataclass(frozen=True)
class Combiner:
    """Of one fragment. `aggregator` says the rule and the screens."""

    form: Form
    contents: Contents
    aggregator: RobustAggregator
    weight_by: WeightBy = "equal"

    def combine(
        self,
        round_id: str,
        contributions: Sequence[tuple[str, Offered, memoryview]],
        history: History,
        centre: dict[str, Tensor] | None,
        own_id: str,
    ) -> Combined:
        """`round_id` seeds the buckets. Contributions without training in them count nothing."""
        weights = peer_weights([offered for _, offered, _ in contributions], self.weight_by)
        candidates = [
            Candidate[TensorSpan](peer_id, self.contents.reader(data), weight, offered.steps)
            for (peer_id, offered, data), weight in zip(contributions, weights, strict=True)
            if weight > 0.0
        ]
        if not self._is_enough(candidates):
            participants = _participants(contributions, dict.fromkeys((p for p, _, _ in contributions), 0.0))
            return Combined(None, participants, {}, history, centre, None)
        layout, rule = self.form.update, self.aggregator.rule
        frame = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        made = fp32_views(frame.numpy().data, layout.places, layout.data_begin)
        verdict = aggregate(
            candidates,
            cut(self.contents.sizes, len(candidates)),
            Tensors(made),
            rule.reseeded(round_id) if isinstance(rule, Bucketing) else rule,
            screening=Screening(history, self.aggregator.cosine_screen),
            centre=None if centre is None else Tensors(centre),
        )
        by_id = {c.worker_id: c for c in candidates}
        counted = {peer_id: by_id[peer_id].weight for peer_id in verdict.accepted}
        norms = [rate * math.sqrt(by_id[p].steps) for p, rate in zip(verdict.accepted, verdict.rates, strict=True)]
        found = watched(
            dict(zip(verdict.accepted, norms, strict=True)).get(own_id),
            norms,
            list(counted.values()),
            math.sqrt(sum(sum_of_squares(values.view(-1)) for values in made.values() if values.numel())),
            is_mean=rule.name == "mean",
        )
        return Combined(
            frame,
            _participants(contributions, counted),
            dict(verdict.refused),
            remember(history, verdict.rates),
            {name: values.clone() for name, values in made.items()} if rule.needs_centre else None,
            found,
        )

    def _is_enough(self, candidates: Sequence[Candidate[TensorSpan]]) -> bool:
        if not candidates:
            return False
        try:
            self.aggregator.rule.check(len(candidates), [candidate.weight for candidate in candidates])
            Screening(cosine=self.aggregator.cosine_screen).check(len(candidates))
        except ConfigError:
            return False
        return True


def _participants(
    contributions: Sequence[tuple[str, Offered, memoryview]], counted: dict[str, float]
) -> tuple[Participant, ...]:
    return tuple(
        Participant(worker_id=peer_id, sequence=offered.sequence, weight=counted.get(peer_id, 0.0))
        for peer_id, offered, _ in contributions
    )


__all__ = ["Combined", "Combiner"]
