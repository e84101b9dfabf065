"""One fragment's rounds, one after the other: when a round may close, and what it leaves behind when it does.

A round opens the moment the one before it is decided, with the workers live at that moment *expected*. It closes when

- every expected worker's contribution is in (synchronous: quorum None), or
- `quorum` workers are in and `grace_s` has passed since the quorum was complete, or
- `round_deadline_s` has passed since its first contribution,

and never with fewer than `min_workers` contributors, nor than the run's rule for combining them needs
(aggregation.py), nor before the run has started (coordinator.py). A worker that dies or leaves is no longer expected; a
worker that joins is expected from the next round, and counted in this one if its contribution comes in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...screens import FACTOR, NormScreen, Size
from ...types import Agreement, Mode, Participant, WeightBy
from ..weights import MAX_WEIGHT_RATIO, UsualWeight
from .aggregation import Aggregation


@dataclass(frozen=True)
class RoundRules:
    """How rounds close. `quorum` None = all that are expected."""

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
    max_weight_ratio: float = MAX_WEIGHT_RATIO
    norm_screen: float = FACTOR  # times the usual norm; 0 = off
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
        """The setting that `floor` comes from."""
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
class RoundVerdict:
    """Close now, or wait: until when (None = until something happens) and for what."""

    close: bool
    wake_at: float | None = None
    waiting_for: str = ""
    stuck: bool = False  # only more workers can help


@dataclass
class OpenRound:
    """A fragment's round that collects contributions; it will make `version`."""

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
        """Does a contributor wait for this worker?"""
        contributors = self.contributors
        if not contributors or worker_id in contributors:
            return False
        return worker_id in self.expected or len(contributors | self.expected) < rules.floor

    def verdict(
        self, rules: RoundRules, now: float, *, started: bool, live: frozenset[str], turned_away: int = 0
    ) -> RoundVerdict:
        """`live`: from whom something would be taken. `turned_away`: how many were here, and were refused."""
        contributors = self.contributors
        missing = self.expected - contributors
        floor = rules.needed(turned_away)
        if len(contributors) < floor:
            able = live - contributors
            if len(contributors) + len(able) < floor:
                here = f"{len(contributors)} contributed, {len(able)} more alive"
                return RoundVerdict(False, waiting_for=f"at least {floor} ({rules.floor_is}): {here}", stuck=True)
            awaited = "the next contribution" if rules.asynchronous else f"contributions of {_names(missing or able)}"
            return RoundVerdict(False, waiting_for=awaited)
        least = rules.aggregation.needed(turned_away)
        if 0 < self.trained < least and live - contributors:  # some of them had nothing to bring
            needed = f"{rules.aggregation.name} needs {least} with training in them"
            return RoundVerdict(False, waiting_for=f"contributions of {_names(live - contributors)}: {needed}")
        if not started:
            return RoundVerdict(
                False, waiting_for=f"{rules.num_workers} workers to join ({len(live)} here)", stuck=True
            )
        if not missing:
            return RoundVerdict(True)
        wake_at: list[float] = []
        if rules.round_deadline_s is not None and self.first_at is not None:
            wake_at.append(self.first_at + rules.round_deadline_s)
        if self.quorum_at is not None:
            wake_at.append(self.quorum_at + rules.grace_s)
        if any(moment <= now for moment in wake_at):
            return RoundVerdict(True)
        awaited = f"contributions of {_names(missing)}"
        if self.quorum_at is not None:
            awaited = f"{rules.grace_s:g} s of grace, for {awaited}"
        return RoundVerdict(False, min(wake_at, default=None), awaited)


@dataclass(frozen=True)
class Outlier:
    """A contribution that was left out when its round closed, and why."""

    participant: Participant
    facts: Mapping[str, object]


@dataclass(frozen=True)
class Closed:
    """A round that has ended."""

    version: int
    participants: tuple[Participant, ...]
    tokens: int
    outliers: tuple[Outlier, ...]
    too_few: int = 0  # so many had trained, fewer than the run's rule needs: all were left out


@dataclass
class Fragment:
    """Its newest agreement, the round that is open on top of it, and how much and how large contributions to it are."""

    published: Agreement
    round: OpenRound
    max_payload_bytes: Callable[[int], int]  # of a contribution in so many sections
    max_sections: int = 1  # more would be empty
    usual: UsualWeight = field(default_factory=UsualWeight)
    usual_tokens: UsualWeight = field(default_factory=UsualWeight)
    screen: NormScreen = field(default_factory=NormScreen)

    @classmethod
    def at(cls, published: Agreement, max_payload_bytes: int | Callable[[int], int], max_sections: int = 1) -> Fragment:
        """With the first round open on top of what is published. A number holds for any number of sections."""
        first = OpenRound(published.version + 1, set())
        limit = max_payload_bytes if callable(max_payload_bytes) else lambda sections: max_payload_bytes
        return cls(published, first, limit, max_sections)

    def close(self, rules: RoundRules, expected: Iterable[str], turned_away: int) -> Closed:
        """The open round ends as it is, less what is left out of it; what it took in is part of what is usual from now
        on. The next one opens."""
        closing, ratio = self.round, rules.max_weight_ratio
        outliers, trained, needed = [], closing.trained, rules.aggregation.needed(turned_away)
        too_few = trained < needed
        if not rules.aggregation.is_plain:
            outliers = _too_few(closing, rules, needed) if too_few else _repeated(closing)
        if rules.norm_screen > 0.0:
            for i, times in self.screen.left_out(closing.sized, rules.norm_screen).items():
                size = closing.sizes[i]
                if closing.kept[i] and size is not None:
                    facts = {"norm": size.norm, "steps": size.steps, "times_usual": round(times, 2)}
                    outliers.append(_left_out(closing, i, facts))
        self.screen.include(closing.sized)
        self.usual.include(closing.reported, ratio)
        tokens = self.usual_tokens.include(closing.tokens, ratio)
        self.round = OpenRound(closing.version + 1, set(expected))
        return Closed(
            closing.version, tuple(closing.participants), round(sum(tokens)), tuple(outliers), trained if too_few else 0
        )


def _too_few(closing: OpenRound, rules: RoundRules, needed: int) -> list[Outlier]:
    """Nobody is left to come, and too few had trained for the rule to mean anything: it would be the plain mean of
    those there. Nothing of it is taken."""
    why = f"{closing.trained} had trained, and {rules.aggregation.name} needs {needed}"
    return [_left_out(closing, i, {"why": why}) for i, p in enumerate(closing.participants) if p.weight > 0.0]


def _repeated(closing: OpenRound) -> list[Outlier]:
    """A worker that was started again may contribute twice to a round. To a rule everybody is one: the last counts."""
    last = {p.worker_id: i for i, p in enumerate(closing.participants) if p.weight > 0.0}
    why = {"why": "its worker was started again and contributed once more"}
    return [
        _left_out(closing, i, why)
        for i, p in enumerate(closing.participants)
        if p.weight > 0.0 and last[p.worker_id] != i
    ]


def _left_out(closing: OpenRound, i: int, facts: Mapping[str, object]) -> Outlier:
    outlier = Outlier(closing.participants[i], facts)
    closing.leave_out(i)
    return outlier


def _names(workers: AbstractSet[str]) -> str:
    shown = sorted(workers)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
