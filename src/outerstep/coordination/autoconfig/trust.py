"""What the controller believes of what it was told.

A cluster may lie, or just be broken. What it says is checked by meaning; what is refused is left out and named. What
remains has a bounded effect:

- A link between the centre and a cluster: the centre's own measurement goes first. Between two clusters both ends must
  report it, and the worse of the two counts: nobody draws others' traffic to itself by praising its own link. Where one
  of them relays and has said so, the other's word is enough: it moves no traffic but its own.
- Reports older than the limit are refused: an old rate says nothing about the next round.
- A cluster's step and batch count at most `FAR` times off the median, and so do its samples per second; what is missing
  is the median.
- With three clusters or more, one whose link is `FAR` times slower than the median is not planned for. The plan suits
  the others, and rounds close without it, until it is nearer by far.

Of two clusters nobody can tell which one lies: there the layer's bounds are the limit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median, median_high
from typing import Final

from ..cost import Line, Lines
from .state import HYSTERESIS, ClusterState, LayerState, LinkReport

FAR: Final = 16.0
SLOWEST_BYTES_PER_S: Final = 1.0
FASTEST_BYTES_PER_S: Final = 1e12
LONGEST_LATENCY_S: Final = 60.0
SHORTEST_STEP_S: Final = 1e-6
LONGEST_STEP_S: Final = 1e7  # a unit may be a round of rounds
LARGEST_BATCH: Final = 10**9
MOST_DOUBTS: Final = 32  # that are told; all count


@dataclass(frozen=True)
class Believed:
    """One cluster."""

    name: str
    step_s: float
    batch_size: int
    most_batch_size: int  # 0 = not known


@dataclass(frozen=True)
class LayerView:
    """What is left to plan with. `clusters`: all of the layer, by name. `counted`: those that the plan is timed for;
    empty if no link or no speed can be believed. `lines`: between any two."""

    clusters: tuple[Believed, ...]
    counted: tuple[str, ...]
    lines: Lines
    not_believed: tuple[str, ...]
    not_planned_for: tuple[str, ...]

    @property
    def reference_step_s(self) -> float:
        """Of the middle cluster by speed (of two, the slower): the plan's interval is counted in its steps. So one
        cluster that claims to be very fast or very slow moves no other's interval."""
        return median_high(cluster.step_s for cluster in self.clusters)

    def local_steps(self, sync_every: int, num_fragments: int, most: int) -> dict[str, int]:
        """Of each cluster, so that all take about as long: a slow one does less. One per fragment at least."""
        middle_s = self.reference_step_s
        return {
            cluster.name: min(max(int(sync_every * (middle_s / cluster.step_s)), num_fragments), most)
            for cluster in self.clusters
        }


def view_of(layer: LayerState) -> LayerView:
    doubts: list[str] = []
    clusters = _clusters(layer, doubts)
    lines = _lines(layer, doubts)
    reachable = _reachable(layer, lines)
    far = _too_far(reachable, layer.plan.not_planned_for if layer.plan is not None else ())
    counted = tuple(sorted(reachable.keys() - far)) if any(not _step_rule(c) for c in layer.clusters) else ()
    doubts += [f"cluster {c.name!r}: no link to it is known" for c in layer.clusters if c.name not in reachable]
    if len(doubts) > MOST_DOUBTS:
        doubts[MOST_DOUBTS:] = [f"and {len(doubts) - MOST_DOUBTS} more"]
    return LayerView(clusters, counted, lines, tuple(doubts), tuple(sorted(far)))


# --- clusters ---------------------------------------------------------------------------------------------------------


def _clusters(layer: LayerState, doubts: list[str]) -> tuple[Believed, ...]:
    members = sorted(layer.clusters, key=lambda cluster: cluster.name)
    speeds = {c.name: c.step_s for c in members if _holds(_step_rule(c), c.name, doubts)}
    batches = {c.name: c.batch_size for c in members if _holds(_batch_rule(c), c.name, doubts)}
    usual_s, usual = median(speeds.values() or [1.0]), median(batches.values() or [1])
    step_s = {c.name: _near(speeds.get(c.name, usual_s), usual_s) for c in members}
    batch = {c.name: _near(batches.get(c.name, usual), usual) for c in members}
    most_per_s = FAR * median(batch[c.name] / step_s[c.name] for c in members)
    return tuple(
        Believed(
            name=c.name,
            step_s=step_s[c.name],
            batch_size=max(1, round(min(batch[c.name], most_per_s * step_s[c.name]))),
            most_batch_size=c.most_batch_size if 0 < c.most_batch_size <= LARGEST_BATCH else 0,
        )
        for c in members
    )


def _step_rule(cluster: ClusterState) -> str:
    fits = SHORTEST_STEP_S <= cluster.step_s <= LONGEST_STEP_S  # false for NaN
    return "" if fits else f"step_s must be from {SHORTEST_STEP_S:g} to {LONGEST_STEP_S:g}, got {cluster.step_s}"


def _batch_rule(cluster: ClusterState) -> str:
    fits = 1 <= cluster.batch_size <= LARGEST_BATCH
    return "" if fits else f"batch_size must be from 1 to {LARGEST_BATCH}, got {cluster.batch_size}"


def _holds(broken: str, name: str, doubts: list[str]) -> bool:
    if broken:
        doubts.append(f"cluster {name!r}: {broken}")
    return not broken


def _near(value: float, usual: float) -> float:
    return min(max(value, usual / FAR), usual * FAR)


# --- links ------------------------------------------------------------------------------------------------------------


def _lines(layer: LayerState, doubts: list[str]) -> dict[tuple[str, str], Line]:
    stale_s = _stale_after_s(layer)
    names = {cluster.name for cluster in layer.clusters} | {layer.centre}
    heard: dict[tuple[str, str], dict[str, LinkReport]] = {}
    for report in layer.links:
        broken = _report_rule(report, names, stale_s)
        if broken:
            doubts.append(f"link {report.source!r} → {report.target!r}: {broken}")
            continue
        by_end = heard.setdefault((report.source, report.target), {})
        if report.measured_by not in by_end or _newer(report, by_end[report.measured_by]):
            by_end[report.measured_by] = report
    relays = {cluster.name for cluster in layer.clusters if cluster.relays}
    lines: dict[tuple[str, str], Line] = {}
    for ends, by_end in sorted(heard.items()):
        if layer.centre in by_end:
            lines[ends] = _line([by_end[layer.centre]])
        elif layer.centre in ends or len(by_end) == 2 or relays & (set(ends) - by_end.keys()):
            lines[ends] = _line(by_end.values())
        else:
            doubts.append(f"link {ends[0]!r} → {ends[1]!r}: both ends must report it, got {next(iter(by_end))!r} alone")
    return lines


def _stale_after_s(layer: LayerState) -> float:
    """The operator's limit, or three rounds where these take longer: a link is measured once a round."""
    if layer.plan is None:
        return layer.bounds.stale_after_s
    steps = [c.step_s for c in layer.clusters if not _step_rule(c)]
    round_s = layer.plan.sync_every * min(steps, default=0.0) + layer.plan.timeout_s
    return max(layer.bounds.stale_after_s, min(3.0 * round_s, 100.0 * layer.bounds.stale_after_s))


def _report_rule(report: LinkReport, names: set[str], stale_s: float) -> str:
    if report.source not in names or report.target not in names or report.source == report.target:
        return "a link joins two members of the layer"
    if report.measured_by not in (report.source, report.target):
        return f"one of its ends must have measured it, got {report.measured_by!r}"
    if not SLOWEST_BYTES_PER_S <= report.bytes_per_s <= FASTEST_BYTES_PER_S:
        return f"bytes_per_s must be from {SLOWEST_BYTES_PER_S:g} to {FASTEST_BYTES_PER_S:g}, got {report.bytes_per_s}"
    if not 0.0 <= report.latency_s <= LONGEST_LATENCY_S:
        return f"latency_s must be from 0 to {LONGEST_LATENCY_S:g}, got {report.latency_s}"
    if not 0.0 <= report.age_s <= stale_s:
        return f"it must be at most {stale_s:.0f} s old, got {report.age_s}"
    return ""


def _newer(report: LinkReport, other: LinkReport) -> bool:
    """Of two by the same end. Of two of the same age the worse one, so that their order does not matter."""
    return (report.age_s, report.bytes_per_s, -report.latency_s) < (other.age_s, other.bytes_per_s, -other.latency_s)


def _line(reports: Iterable[LinkReport]) -> Line:
    heard = list(reports)
    return Line(min(r.bytes_per_s for r in heard), max(r.latency_s for r in heard))


def _reachable(layer: LayerState, lines: Lines) -> dict[str, float]:
    """By cluster: seconds per byte there and back, directly or over one relay. Those that no way leads to are not in
    it. Only lines that are known are looked at: of thousands of clusters most have one, and a member may make many."""
    near: dict[str, list[str]] = {}
    for source, target in lines:
        near.setdefault(source, []).append(target)
    direct = {cluster.name: _there_and_back(cluster.name, layer.centre, lines) for cluster in layer.clusters}
    ways = {
        name: min(
            [
                straight,
                *(
                    max(_there_and_back(name, relay, lines), direct[relay])
                    for relay in near.get(name, ())
                    if relay in direct
                ),
            ]
        )
        for name, straight in direct.items()
    }
    return {name: best for name, best in ways.items() if best < math.inf}


def _there_and_back(one: str, other: str, lines: Lines) -> float:
    there, back = lines.get((one, other)), lines.get((other, one))
    return math.inf if there is None or back is None else 1.0 / there.bytes_per_s + 1.0 / back.bytes_per_s


def _too_far(reachable: dict[str, float], before: Collection[str]) -> set[str]:
    """`before`: those that the plan in force was not made for. One of them must be nearer by far before it is planned
    for again: at the limit itself noise would change the plan back and forth."""
    if len(reachable) < 3:
        return set()
    limit = FAR * median(reachable.values())
    return {
        name
        for name, s_per_byte in reachable.items()
        if s_per_byte > (limit / HYSTERESIS**2 if name in before else limit)
    }
