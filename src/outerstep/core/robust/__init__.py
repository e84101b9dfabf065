"""Robust aggregation: several pseudo-gradients become one, even if some are wrong or hostile.

    combining.combine       contributions read block by block: screens, then a rule (streams.py says how they are read)
    RobustAggregator     the same for tensors in memory
    attacks.ATTACKS      what to try it against

docs/concepts/robust-aggregation.md says what each rule is for, and what it costs.
"""

from __future__ import annotations

from .aggregator import RULES, RobustAggregator, make_rule
from .buckets import Bucketing
from .centres import CenteredClipping, GeometricMedian
from .combining import Candidate, Screening, ScreenVerdict, aggregate, combine
from .coordinates import Median, TrimmedMean
from .cosines import cosine_screen
from .rule import Mean, Rule
from .selection import Krum, MultiKrum
from .streams import Reader, Tensors, TensorSpan, Writer, Zeros, cut

__all__ = [
    "RULES",
    "Bucketing",
    "Candidate",
    "CenteredClipping",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "Reader",
    "RobustAggregator",
    "Rule",
    "ScreenVerdict",
    "Screening",
    "TensorSpan",
    "Tensors",
    "TrimmedMean",
    "Writer",
    "Zeros",
    "aggregate",
    "combine",
    "cosine_screen",
    "cut",
    "make_rule",
]
