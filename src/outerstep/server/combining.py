"""A round by a rule that needs all its contributions at once: read where they lie, in memory or in the spool file,
block by block, when the round closes; in the order of the worker ids.

The aggregate takes the place of the round's mean (store.py): what steps along it, writes it down or replays it need
not know which rule made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..coordination.server.aggregation import Aggregation
from ..core.robust import (
    RULES,
    Bucketing,
    Candidate,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    Rule,
    Screening,
    ScreenVerdict,
    TrimmedMean,
    Zeros,
    aggregate,
)
from ..core.robust import cut as cut_values
from ..wire.frames import Layout
from .blocks import Block


def rule_of(settings: Aggregation) -> Rule:
    """With the rule's own defaults where the settings say nothing."""
    attackers, iterations = settings.attackers or 1, settings.aggregation_iterations
    rule: Rule
    match settings.aggregation:
        case "trimmed_mean":
            rule = TrimmedMean(settings.trim_fraction)
        case "krum":
            rule = Krum(attackers)
        case "multi_krum":
            rule = MultiKrum(attackers)
        case "geometric_median":
            rule = GeometricMedian() if iterations is None else GeometricMedian(iterations)
        case "centered_clipping":
            radius = settings.clip_radius
            rule = CenteredClipping(radius) if iterations is None else CenteredClipping(radius, iterations)
        case name:
            rule = RULES[name]()
    return Bucketing(rule, settings.bucket_size) if settings.bucket_size > 1 else rule


@dataclass(frozen=True)
class Contribution:
    """One of a round: whose, what it weighs, how its values are read."""

    worker_id: str
    weight: float
    read: Callable[[Block, Tensor], None]


def combine(
    settings: Aggregation,
    contributions: Sequence[Contribution],
    refused: Sequence[str],
    of: Layout,
    out: Tensor,
    centre: Tensor | None,
    seed: str,
) -> ScreenVerdict:
    """The aggregate to `out`, flat fp32 memory laid out as the frame `of`; who is in it. `centre`: the aggregate before
    this one, laid out in the same way. `seed`: of the buckets. `refused`: workers whose contributions were offered too,
    and refused: what is not finite when it came, and what is too large by the norm screen.
    """
    rule, weight = rule_of(settings), contributions[0].weight
    return aggregate(
        [
            *(Candidate[Block](each.worker_id, each, each.weight) for each in contributions),
            *(Candidate[Block](worker_id, Zeros(), weight, refused="before") for worker_id in refused),
        ],
        _blocks(of, len(contributions)),
        _Flat(out),
        rule.reseeded(seed) if isinstance(rule, Bucketing) else rule,
        screening=Screening(cosine=settings.cosine_screen, arrived=True),
        centre=None if centre is None else _Flat(centre),
    )


def _blocks(of: Layout, rows: int) -> list[Block]:
    """So large that those of all contributions together fit in a processor's cache. In the order of the tensors' names,
    as everybody takes them who aggregates: sums over whole contributions depend on it in their last bits."""
    firsts = {entry.name: (entry.begin // 4, (entry.end - entry.begin) // 4) for entry in of.entries}
    cuts = cut_values({name: firsts[name][1] for name in sorted(firsts)}, rows)
    return [Block(block.name, block.start, block.stop, firsts[block.name][0] + block.start) for block in cuts]


class _Flat:
    """Flat memory, as the reader and writer that core/robust/ asks for."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def read(self, block: Block, out: Tensor) -> None:
        out.copy_(self._values[block.place : block.end])

    def write(self, block: Block, values: Tensor) -> None:
        self._values[block.place : block.end] = values
