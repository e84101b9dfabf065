"""What the page remembers of a run, so that it can be opened late: curves, rounds, and what happened.

All of it is bounded. A curve that is full loses every second point and takes in half as many from then on, so it always
shows the whole run. Names and texts come from workers: they are cut, kept as text, and escaped by nobody but the page,
which never takes any of them for markup.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..events import (
    Event,
    PeerExpelled,
    Refusal,
    RefusalsSuppressed,
    RoundDecided,
    VersionPublished,
    WorkerDied,
    WorkerJoined,
    WorkerKicked,
    WorkerLeft,
)
from ..observe.status import ServerStatus, Status

MOST_POINTS = 480  # of a curve
MOST_CURVES = 64
MOST_ROUNDS = 240
MOST_TOLD = 120
MOST_REFUSED = 40
MOST_CODES = 32  # kinds of refusals
MOST_GONE = 64
MOST_CHARACTERS = 240
MOST_ITEMS = 16
UNTOLD = ("state", "round", "report")  # seen elsewhere on the page
ROUND_FACTS = (
    *("peer_grad_similarity", "weight_divergence", "aggregated_grad_norm", "pseudo_grad_norm"),
    *("loss", "waited_s", "bytes"),
)

Point = tuple[float, ...]


@dataclass
class PageCurve:
    """`stride`: of so many points one is kept. A point begins with its time."""

    points: list[Point] = field(default_factory=list)
    stride: int = 1
    _skipped: int = 0

    def add(self, point: Point) -> bool:
        """Is it kept?"""
        self._skipped += 1
        if self._skipped < self.stride:
            return False
        self._skipped = 0
        self.points.append(point)
        if len(self.points) >= MOST_POINTS:
            self.points = self.points[::2]
            self.stride *= 2
        return True


@dataclass
class Fresh:
    """What came in since the last time somebody was told."""

    losses: dict[str, list[Point]] = field(default_factory=dict)
    mean: list[Point] = field(default_factory=list)
    traffic: list[Point] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)


class PageHistory:
    """Not thread-safe: one thread hears, samples and shows."""

    def __init__(self) -> None:
        self.losses: dict[str, PageCurve] = {}
        self.mean, self.traffic = PageCurve(), PageCurve()
        self.rounds: deque[dict[str, Any]] = deque(maxlen=MOST_ROUNDS)
        self.told: deque[dict[str, Any]] = deque(maxlen=MOST_TOLD)
        self.refused: deque[dict[str, Any]] = deque(maxlen=MOST_REFUSED)
        self.refusals: Counter[str] = Counter()  # by code
        self.gone: dict[str, dict[str, Any]] = {}
        self.fresh = Fresh()
        self._last_step: dict[str, int | None] = {}
        self._bytes: tuple[float, int, int] | None = None
        self._is_round_new = False

    # --- events -------------------------------------------------------------------------------------------------------

    def hear(self, event: Event, time_s: float) -> None:
        match event:
            case RefusalsSuppressed():
                self._count("suppressed", event.count)
            case Refusal():
                self._refuse(event, time_s)
            case VersionPublished() | RoundDecided():
                self._note_round(event, time_s)
            case WorkerJoined():
                self.gone.pop(event.worker, None)
            case WorkerDied() | WorkerKicked() | PeerExpelled():
                self._note_gone(event.worker, event.kind, bounded(event.facts), time_s)
            case WorkerLeft():
                self._note_gone(event.worker, event.kind, bounded(event.facts), time_s)
        if event.kind not in UNTOLD and not isinstance(event, Refusal):
            told = {"time": round(time_s, 2), "kind": event.kind, **bounded(event.facts)}
            self.told.append(told)
            self.fresh.told.append(told)

    def _refuse(self, event: Event, time_s: float) -> None:
        facts = bounded(event.facts)
        self._count(str(facts.get("code", event.kind)), 1)
        told = {"time": round(time_s, 2), **facts}
        self.refused.append(told)
        self.fresh.refused = [*self.fresh.refused, told][-MOST_REFUSED:]

    def _count(self, code: str, count: int) -> None:
        self.refusals[code if code in self.refusals or len(self.refusals) < MOST_CODES else "other"] += count

    def _note_gone(self, worker: str, how: str, facts: Mapping[str, Any], time_s: float) -> None:
        self.gone.pop(worker, None)
        self.gone[worker] = {"time": round(time_s, 2), "how": how, **facts}
        while len(self.gone) > MOST_GONE:
            del self.gone[next(iter(self.gone))]

    def _note_round(self, event: VersionPublished | RoundDecided, time_s: float) -> None:
        facts = event.facts
        workers, staleness = facts["workers"], facts.get("staleness", ())
        loss = facts.get("loss")
        if loss is not None and math.isfinite(loss):
            self._add_mean((round(time_s, 2), facts["version"], _short(loss)))
        told = {
            "time": round(time_s, 2),
            "fragment": facts["fragment"],
            "version": facts["version"],
            "workers": bounded_value(workers),
            "count": len(workers),
            "staleness": max(staleness, default=0),
            **{
                name: facts[name]
                for name in ROUND_FACTS
                if isinstance(facts.get(name), int | float) and math.isfinite(facts[name])
            },
        }
        self.rounds.append(told)
        self.fresh.rounds.append(told)
        self._is_round_new = loss is None

    def _add_mean(self, point: Point) -> None:
        if self.mean.add(point):
            self.fresh.mean.append(point)

    # --- the status ---------------------------------------------------------------------------------------------------

    def sample(self, status: Status, time_s: float) -> None:
        """Add a point to each curve that has something new."""
        now, losses = round(time_s, 2), []
        for name, member in status.participants.items():
            loss = member.loss
            if loss is None or not math.isfinite(loss):
                continue
            losses.append(loss)
            if self._last_step.get(name, -1) != member.step:
                point = now, member.step or 0, _short(loss)
                if self._add_loss(name, point, status.participants.keys()):
                    self._last_step[name] = member.step
        if losses and (self._is_round_new or not self.mean.points):
            self._add_mean((now, status_version(status), _short(math.fsum(loss / len(losses) for loss in losses))))
            self._is_round_new = False
        self._add_traffic(now, status.bytes_received, status.bytes_sent)

    def _add_loss(self, name: str, point: Point, here: Iterable[str]) -> bool:
        """Has it a curve?"""
        curve = self.losses.get(name)
        if curve is None:
            if len(self.losses) >= MOST_CURVES:
                absent = [other for other in self.losses if other not in here]
                if not absent:
                    return False
                del self.losses[absent[0]]
                self._last_step.pop(absent[0], None)
            curve = self.losses[name] = PageCurve()
        if curve.add(point):
            self.fresh.losses.setdefault(name, []).append(point)
        return True

    def _add_traffic(self, now: float, received: int, sent: int) -> None:
        """Bytes a second, since the last sample."""
        if self._bytes is not None:
            before, in_before, out_before = self._bytes
            passed_s = now - before
            if passed_s <= 0.0:
                return
            point = now, round(max(received - in_before, 0) / passed_s), round(max(sent - out_before, 0) / passed_s)
            if self.traffic.add(point):
                self.fresh.traffic.append(point)
        self._bytes = now, received, sent

    # --- shown --------------------------------------------------------------------------------------------------------

    def everything(self) -> dict[str, Any]:
        return {
            "losses": {name: curve.points for name, curve in self.losses.items()},
            "mean": self.mean.points,
            "traffic": self.traffic.points,
            "rounds": list(self.rounds),
            "told": list(self.told),
            "refused": list(self.refused),
            **self._counts(),
        }

    def take_fresh(self) -> dict[str, Any]:
        fresh, self.fresh = self.fresh, Fresh()
        found = {name: value for name, value in vars(fresh).items() if value}
        return {**found, **self._counts()}

    def _counts(self) -> dict[str, Any]:
        return {"refusals": dict(self.refusals), "gone": self.gone}


def status_version(status: Status) -> int:
    """Of the model: the least of its fragments'."""
    if isinstance(status, ServerStatus):
        return status.sync_round
    return min((fragment.version for fragment in status.fragments), default=0)


def bounded(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name)[:64]: bounded_value(value) for name, value in list(facts.items())[:MOST_ITEMS]}


def bounded_value(value: Any) -> Any:
    """As JSON has it, and short."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k)[:64]: str(v)[:MOST_CHARACTERS] for k, v in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list | tuple):
        return [bounded_value(each) if not isinstance(each, Mapping) else str(each)[:64] for each in value[:MOST_ITEMS]]
    return str(value)[:MOST_CHARACTERS]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
