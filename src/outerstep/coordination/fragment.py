"""What the coordinator knows of one fragment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import BadRequest
from ..types import Agreement
from .rounds import Round
from .weights import UsualWeight


@dataclass
class Fragment:
    """Its newest agreement, the round that is open on top of it, and what contributions to it usually weigh."""

    published: Agreement
    round: Round
    max_payload_bytes: Callable[[int], int]  # of a contribution in so many sections
    max_sections: int = 1  # more would be empty
    usual: UsualWeight = field(default_factory=UsualWeight)
    usual_tokens: UsualWeight = field(default_factory=UsualWeight)

    def check_sections(self, sections: int) -> None:
        if sections > self.max_sections:
            raise BadRequest(f"{sections} sections are too many: fragment {self.published.fragment} has fewer rows")

    @classmethod
    def at(cls, published: Agreement, max_payload_bytes: int | Callable[[int], int], max_sections: int = 1) -> Fragment:
        """With the first round open on top of what is published. A number holds for any number of sections."""
        first = Round(published.version + 1, set())
        limit = max_payload_bytes if callable(max_payload_bytes) else lambda sections: max_payload_bytes
        return cls(published, first, limit, max_sections)
