"""What a logger draws: of an event a step, and numbers by name. Names are the same wherever they are drawn.

    server    outerstep/loss, outerstep/loss_of/WORKER, outerstep/waited_s, outerstep/bytes, … at the round's number
    worker    outerstep/inner_loss, outerstep/waited_s, outerstep/bytes_sent, …              at its optimizer step

Of a fragment other than the first, names begin with outerstep/fragment_N.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..events import Event, RoundReport, VersionPublished, known

MOST_WORKERS = 64
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Point:
    step: int
    values: dict[str, float]


def point_of(event: Event) -> Point | None:
    """None: there is nothing to draw."""
    match event:
        case VersionPublished(agreement, summary) if summary is not None:
            found: dict[str, float | None] = {
                "loss": summary.loss,
                "waited_s": summary.waited_s,
                "bytes": summary.size_bytes,
                "workers": len({p.worker_id for p in agreement.participants}),
                **(known(agreement.watched) if agreement.watched is not None else {}),
            }
            if summary.tokens:
                found["tokens"] = summary.tokens
            pairs = zip(agreement.participants, summary.losses, strict=False)
            found |= {f"loss_of/{_UNUSUAL.sub('_', p.worker_id)}": loss for p, loss in list(pairs)[:MOST_WORKERS]}
            return _point(agreement.version, agreement.fragment, found)
        case RoundReport():
            found = {
                **event.metrics,
                "round": event.version,
                "waited_s": event.waited_s,
                "bytes_sent": event.bytes_sent,
                "bytes_received": event.bytes_received,
                "steps_sent": event.steps_sent,
                "steps_discarded": event.steps_discarded,
                "workers": len({p.worker_id for p in event.participants}),
            }
            return _point(event.step, event.fragment, found)
    return None


def _point(step: int, fragment: int, found: dict[str, float | None]) -> Point:
    begin = f"outerstep/fragment_{fragment}" if fragment else "outerstep"
    known_ = {name: float(value) for name, value in found.items() if value is not None}
    return Point(step, {f"{begin}/{name}": value for name, value in known_.items() if math.isfinite(value)})
