"""Metrics as Prometheus reads them: `GET /metrics`, text format 0.0.4 (docs/operating/monitoring.md).

# HELP outerstep_worker_loss The loss that a worker last reported.
# TYPE outerstep_worker_loss gauge
outerstep_worker_loss{worker="left"} 1.29
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..printable import printable
from .families import Family, Labels

METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONGEST_LABEL = 128  # characters
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def write_metrics(families: Iterable[Family]) -> bytes:
    lines: list[str] = []
    for family in families:
        help_ = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {help_}", f"# TYPE {family.name} {family.kind}"]
        lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in _unique(family.samples)]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _unique(samples: Iterable[tuple[Labels, float]]) -> Iterable[tuple[Labels, float]]:
    """Names that are the same once they are cut would be one series twice, for which Prometheus refuses the page."""
    return {tuple((name, shown(value)) for name, value in labels): number for labels, number in samples}.items()


def shown(text: str) -> str:
    """A label's value: as it is shown everywhere, and no longer than a page can bear."""
    return printable(text)[:LONGEST_LABEL]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels) + "}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
