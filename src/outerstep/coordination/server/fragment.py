"""What the coordinator knows of one fragment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import BadRequest
from ...types import Agreement, Participant
from .rounds import Round, RoundRules
from .screen import NormScreen
from .weights import UsualWeight


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
    round: Round
    max_payload_bytes: Callable[[int], int]  # of a contribution in so many sections
    max_sections: int = 1  # more would be empty
    usual: UsualWeight = field(default_factory=UsualWeight)
    usual_tokens: UsualWeight = field(default_factory=UsualWeight)
    screen: NormScreen = field(default_factory=NormScreen)

    def check_sections(self, sections: int) -> None:
        if sections > self.max_sections:
            raise BadRequest(f"{sections} sections are too many: fragment {self.published.fragment} has fewer rows")

    @classmethod
    def at(cls, published: Agreement, max_payload_bytes: int | Callable[[int], int], max_sections: int = 1) -> Fragment:
        """With the first round open on top of what is published. A number holds for any number of sections."""
        first = Round(published.version + 1, set())
        limit = max_payload_bytes if callable(max_payload_bytes) else lambda sections: max_payload_bytes
        return cls(published, first, limit, max_sections)

    def close(self, rules: RoundRules, expected: Iterable[str], turned_away: int = 0) -> Closed:
        """The open round ends as it is, less what is left out of it; what it took in is part of what is usual from now
        on. The next one opens."""
        closing, ratio = self.round, rules.max_weight_ratio
        outliers, trained, needed = [], closing.trained, rules.aggregation.needed(turned_away)
        too_few = 0 < trained < needed
        if not rules.aggregation.is_plain:
            outliers = _too_few(closing, rules, needed) if too_few else _repeated(closing)
        if rules.norm_screen > 0.0:
            outliers += self._too_large(closing, rules.norm_screen)
        self.screen.include(closing.sized)
        self.usual.include(closing.reported, ratio)
        tokens = self.usual_tokens.include(closing.tokens, ratio)
        self.round = Round(closing.version + 1, set(expected))
        return Closed(
            closing.version, tuple(closing.participants), round(sum(tokens)), tuple(outliers), trained if too_few else 0
        )

    def _too_large(self, closing: Round, limit: float) -> list[Outlier]:
        outliers = []
        for i, times in self.screen.left_out(closing.sized, limit).items():
            size = closing.sizes[i]
            if closing.kept[i] and size is not None:
                facts = {"norm": size.norm, "steps": size.steps, "times_usual": round(times, 2)}
                outliers.append(Outlier(closing.participants[i], facts))
                closing.leave_out(i)
        return outliers


def _too_few(closing: Round, rules: RoundRules, needed: int) -> list[Outlier]:
    """Nobody is left to come, and too few had trained for the rule to mean anything: it would be the plain mean of
    whoever was there. Nothing of it is taken."""
    why = f"{closing.trained} had trained, and {rules.aggregation.name} needs {needed}"
    return [_left_out(closing, i, why) for i, p in enumerate(closing.participants) if p.weight > 0.0]


def _repeated(closing: Round) -> list[Outlier]:
    """A worker that was started again may contribute twice to a round. To a rule everybody is one: the last counts."""
    last = {p.worker_id: i for i, p in enumerate(closing.participants) if p.weight > 0.0}
    return [
        _left_out(closing, i, "its worker was started again and contributed once more")
        for i, p in enumerate(closing.participants)
        if p.weight > 0.0 and last[p.worker_id] != i
    ]


def _left_out(closing: Round, i: int, why: str) -> Outlier:
    outlier = Outlier(closing.participants[i], {"why": why})
    closing.leave_out(i)
    return outlier
