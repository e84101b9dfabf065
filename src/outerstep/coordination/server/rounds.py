"""When a round may close: one fragment's rounds, one after the other.

A round opens the moment the one before it is decided, with the workers live at that moment *expected*. It closes when

- every expected worker's contribution is in (synchronous: quorum None), or
- `quorum` workers are in and `grace_s` has passed since the quorum was complete, or
- `round_deadline_s` has passed since its first contribution,

and never with fewer than `min_workers` contributors, nor than the run's rule for combining them needs
(aggregation.py), nor before the run has started (coordinator.py).
Whoever dies or leaves is no longer expected; whoever joins is expected from the next round, and counted in this one if
its contribution comes in time.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...types import Mode, Participant, WeightBy
from .aggregation import Aggregation
from .screen import Size


@dataclass(frozen=True)
class RoundRules:
    """How rounds close. `quorum` None = all who are expected."""

    num_workers: int
    min_workers: int = 1
    quorum: int | None = None
    grace_s: float = 0.0
    round_deadline_s: float | None = None
    start_deadline_s: float | None = None
    max_staleness: int = 4
    asynchronous: bool = False  # quorum 1, and nobody waits for anybody at the start
    weigh_staleness: bool = True
    weight_by: WeightBy = "equal"
    max_weight_ratio: float = 10.0
    norm_screen: float = 2.0  # times the usual norm; 0 = off (screen.py)
    aggregation: Aggregation = Aggregation()  # noqa: RUF009 (frozen)
    dylu: bool = False
    dylu_base: int | None = None

    @property
    def floor(self) -> int:
        """No round closes with fewer contributors, unless some were turned away."""
        return self.needed(0)

    def needed(self, turned_away: int) -> int:
        """Contributors without whom no round closes, if so many others were turned away."""
        return max(1, self.min_workers, self.aggregation.needed(turned_away))

    @property
    def floor_is(self) -> str:
        """Who says so."""
        return "min_workers" if self.min_workers >= self.floor else self.aggregation.name

    @property
    def takes_late(self) -> bool:
        """With a quorum a late contribution counts in the next round; without, it is refused and its worker rebases."""
        return self.quorum is not None

    def may_start(self, live: int, first_join_at: float | None, now: float) -> bool:
        """When all announced workers are live, or at the start deadline with enough of them for a round."""
        waited_s = 0.0 if first_join_at is None else now - first_join_at
        overdue = self.start_deadline_s is not None and first_join_at is not None and waited_s >= self.start_deadline_s
        enough = live >= self.num_workers or (self.asynchronous and live > 0)
        return enough or (overdue and live >= self.floor)

    @property
    def mode(self) -> Mode:
        return "async" if self.asynchronous else "sync" if self.quorum is None else "quorum"


@dataclass(frozen=True)
class Verdict:
    """Close now, or wait: until when (None = until something happens) and for what."""

    close: bool
    wake_at: float | None = None
    waiting_for: str = ""
    stuck: bool = False  # only more workers can help


@dataclass
class Round:
    """The open round of one fragment; it will make `version`."""

    version: int
    expected: set[str]
    participants: list[Participant] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)  # what its contributions said they weigh
    tokens: list[float] = field(default_factory=list)  # and how many tokens they said are in them
    sizes: list[Size | None] = field(default_factory=list)  # and how large they are; None = not to be screened
    kept: list[bool] = field(default_factory=list)  # and whether they can still be left out
    first_at: float | None = None
    quorum_at: float | None = None

    @property
    def contributors(self) -> set[str]:
        return {p.worker_id for p in self.participants}

    @property
    def sized(self) -> list[tuple[str, Size | None]]:
        """Of each contribution, whose and how large."""
        return [(p.worker_id, size) for p, size in zip(self.participants, self.sizes, strict=True)]

    def count(
        self,
        participant: Participant,
        rules: RoundRules,
        now: float,
        *,
        reported: float = 1.0,
        tokens: int = 0,
        size: Size | None = None,
        kept: bool = False,
    ) -> None:
        self.participants.append(participant)
        self.reported.append(reported)
        self.tokens.append(float(tokens))
        self.sizes.append(size)
        self.kept.append(kept)
        if self.first_at is None:
            self.first_at = now
        if self.quorum_at is None and rules.quorum is not None and len(self.contributors) >= rules.quorum:
            self.quorum_at = now

    def leave_out(self, i: int) -> None:
        """It was there, and counts nothing."""
        self.participants[i] = replace(self.participants[i], weight=0.0)
        self.reported[i] = self.tokens[i] = 0.0
        self.sizes[i] = None

    @property
    def trained(self) -> int:
        """Workers whose contributions have training in them."""
        return len({p.worker_id for p in self.participants if p.weight > 0.0})

    def wants(self, worker_id: str, rules: RoundRules) -> bool:
        """Has somebody contributed who now waits for this worker?"""
        contributors = self.contributors
        if not contributors or worker_id in contributors:
            return False
        return worker_id in self.expected or len(contributors | self.expected) < rules.floor

    def verdict(
        self, rules: RoundRules, now: float, *, started: bool, live: frozenset[str], turned_away: int = 0
    ) -> Verdict:
        """`live`: from whom something would be taken. `turned_away`: how many were here, and were refused."""
        contributors = self.contributors
        missing = self.expected - contributors
        floor = rules.needed(turned_away)
        if len(contributors) < floor:
            able = live - contributors
            if len(contributors) + len(able) < floor:
                here = f"{len(contributors)} contributed, {len(able)} more alive"
                return Verdict(False, waiting_for=f"at least {floor} ({rules.floor_is}): {here}", stuck=True)
            awaited = "the next contribution" if rules.asynchronous else f"contributions of {_names(missing or able)}"
            return Verdict(False, waiting_for=awaited)
        least = rules.aggregation.needed(turned_away)
        if 0 < self.trained < least and live - contributors:  # some of them had nothing to bring
            needed = f"{rules.aggregation.name} needs {least} with training in them"
            return Verdict(False, waiting_for=f"contributions of {_names(live - contributors)}: {needed}")
        if not started:
            return Verdict(False, waiting_for=f"{rules.num_workers} workers to join ({len(live)} here)", stuck=True)
        if not missing:
            return Verdict(True)
        wake_at: list[float] = []
        if rules.round_deadline_s is not None and self.first_at is not None:
            wake_at.append(self.first_at + rules.round_deadline_s)
        if self.quorum_at is not None:
            wake_at.append(self.quorum_at + rules.grace_s)
        if any(moment <= now for moment in wake_at):
            return Verdict(True)
        awaited = f"contributions of {_names(missing)}"
        if self.quorum_at is not None:
            awaited = f"{rules.grace_s:g} s of grace, for {awaited}"
        return Verdict(False, min(wake_at, default=None), awaited)


def _names(workers: AbstractSet[str]) -> str:
    shown = sorted(workers)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
