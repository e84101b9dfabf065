"""What the coordinator knows of one fragment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..errors import BadRequest
from ..types import Agreement, Participant
from .rounds import Round, RoundRules
from .screen import NormScreen, Size
from .weights import UsualWeight


@dataclass(frozen=True)
class Outlier:
    """A contribution that was left out when its round closed, and how many times the usual size it had."""

    participant: Participant
    size: Size
    times: float


@dataclass(frozen=True)
class Closed:
    """A round that has ended."""

    version: int
    participants: tuple[Participant, ...]
    tokens: int
    outliers: tuple[Outlier, ...]


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

    def close(self, rules: RoundRules, expected: Iterable[str]) -> Closed:
        """The open round ends as it is, less its outliers; what it took in is part of what is usual from now on. The
        next one opens."""
        closing, ratio = self.round, rules.max_weight_ratio
        outliers = self._leave_out(closing, rules.norm_screen)
        self.screen.include(closing.sized)
        self.usual.include(closing.reported, ratio)
        tokens = self.usual_tokens.include(closing.tokens, ratio)
        self.round = Round(closing.version + 1, set(expected))
        return Closed(closing.version, tuple(closing.participants), round(sum(tokens)), outliers)

    def _leave_out(self, closing: Round, limit: float) -> tuple[Outlier, ...]:
        outliers = []
        for i, times in self.screen.left_out(closing.sized, limit).items() if limit > 0.0 else ():
            size = closing.sizes[i]
            if closing.kept[i] and size is not None:
                outliers.append(Outlier(closing.participants[i], size, times))
                closing.leave_out(i)
        return tuple(outliers)
