"""What the coordinator knows of one fragment."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    usual: UsualWeight = field(default_factory=UsualWeight)

    @classmethod
    def at(cls, published: Agreement, max_payload_bytes: int, section_overhead_bytes: int = 0) -> Fragment:
        """With the first round open on top of what is published."""
        return cls(published, Round(published.version + 1, set()), max_payload_bytes, section_overhead_bytes)
