"""What the coordinator knows of one fragment."""

from __future__ import annotations

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
    max_payload_bytes: int
    section_overhead_bytes: int = 0  # what each section more may add to that
    max_sections: int = 1  # more would be empty
    usual: UsualWeight = field(default_factory=UsualWeight)
    usual_tokens: UsualWeight = field(default_factory=UsualWeight)

    def check_sections(self, sections: int) -> None:
        if sections > self.max_sections:
            raise BadRequest(f"{sections} sections are too many: fragment {self.published.fragment} has fewer rows")

    @classmethod
    def at(
        cls, published: Agreement, max_payload_bytes: int, section_overhead_bytes: int = 0, max_sections: int = 1
    ) -> Fragment:
        """With the first round open on top of what is published."""
        first = Round(published.version + 1, set())
        return cls(published, first, max_payload_bytes, section_overhead_bytes, max_sections)
