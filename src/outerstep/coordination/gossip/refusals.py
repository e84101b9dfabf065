"""How often a peer was told what cannot be, and by whom.

It is the teller's trouble, and never the listener's: it is counted, shown and logged, and nothing else happens. The
blame is the author's where its signature holds; else that of the peer that passed it on, as it calls itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_NAMES = 128  # anybody can call itself anything
OTHERS = "others"
MOST_LETTERS = 200


@dataclass(frozen=True)
class GossipRefusal:
    """Worth telling the operator: the first of somebody's, the second, the fourth and so on."""

    who: str
    why: str
    count: int


@dataclass
class GossipRefusals:
    counts: dict[str, int] = field(default_factory=dict)
    _news: list[GossipRefusal] = field(default_factory=list)

    def note(self, who: str, why: str) -> None:
        if who not in self.counts and len(self.counts) >= MOST_NAMES:
            who = OTHERS
        count = self.counts[who] = self.counts.get(who, 0) + 1
        if count & (count - 1) == 0:
            self._news.append(GossipRefusal(who, why[:MOST_LETTERS], count))

    def news(self) -> list[GossipRefusal]:
        """Each is told once."""
        told, self._news = self._news, []
        return told
