"""What failures take from a run: the share of time whose steps never come into a model. Plain arithmetic, as cost.py.

Of n members each dies at random, on average after 1/λ seconds, and is back r seconds later with nothing that it had not
sent. A round takes W seconds, and a death is noticed (by missed heartbeats) after T.

    a member's own loss    λ·(r + W/2)                    it is away; half a round of steps dies with it
    waiting for all        E[D], D = max(0, u + T − W)    u: when the last of those died that died in this round;
                                                          before it is known that it will not come, nobody goes on
    waiting for a quorum   E[min(D, G)]                   G: the grace
    as one job             n·λ·(r + W/2)                  one dies, all go back to the states of a round

The first is a loss of one in n, the last of all of them at once: a job of a hundred ranks that each fail once in twenty
hours ends every twelve minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ..errors import ConfigError

LEAST_FOR_QUORUM: Final = 4  # fewer than these, and one that is out of step closes rounds alone
CERTAIN: Final = 3.0  # standard deviations of how many are away at once
GRACE_SHARE: Final = 0.02  # of a round, for those that are slower
LEAST_GRACE_S, MOST_GRACE_S = 1.0, 60.0
WORTH_A_QUORUM: Final = 0.005  # of a round: less waiting than this is no reason to close one without somebody


@dataclass(frozen=True)
class Failures:
    """Of each worker, at random times: `per_hour` on average. Its process dies and a new one starts `restart_s` later,
    with nothing of the old one's."""

    per_hour: float = 0.0
    restart_s: float = 600.0

    def __post_init__(self) -> None:
        for what, holds, rule, got in (
            ("per_hour", 0.0 <= self.per_hour <= 60.0, "from 0 to 60, of each worker", self.per_hour),
            ("restart", 0.0 <= self.restart_s <= 7 * 86_400.0, "at most a week", self.restart_s),
        ):
            if not holds:
                raise ConfigError(f"failures: {what} must be {rule}, got {got}")

    @property
    def per_s(self) -> float:
        """λ."""
        return self.per_hour / 3600.0


NEVER: Final = Failures()


@dataclass(frozen=True)
class RoundClosing:
    """When a round closes. `quorum` None: when all are in."""

    quorum: int | None = None
    grace_s: float = 0.0

    def of(self, members: int, planned: int) -> RoundClosing:
        """Of fewer members than it was planned for: with the same share of them, as far as that is a quorum."""
        if self.quorum is None or members == planned:
            return self
        quorum = math.floor(self.quorum * members / planned)
        return replace(self, quorum=quorum) if _is_quorum(quorum, members) else ALL


ALL: Final = RoundClosing()


def _is_quorum(quorum: int, members: int) -> bool:
    return members >= LEAST_FOR_QUORUM and members / 2 < quorum < members


@dataclass(frozen=True)
class Losses:
    """What failures take from the rounds of one layer. `noticed_s`: T. `is_one_job`: if one dies, all end. `ranks`: of
    each member, which is a job of so many; what it loses with itself is counted in the layer of its ranks."""

    failures: Failures
    members: int
    noticed_s: float
    is_one_job: bool = False
    ranks: int = 1
    may_close_early: bool = True  # with a quorum

    @property
    def _deaths_per_s(self) -> float:
        return self.members * self.ranks * self.failures.per_s

    def lost_s(self, round_s: float) -> float:
        """Of a round, for the mean member: the time that it is away, and its steps that are lost."""
        if self.ranks > 1:
            return 0.0
        ended = self._deaths_per_s if self.is_one_job else self.failures.per_s
        return ended * round_s * (self.failures.restart_s + round_s / 2)

    def waiting_s(self, round_s: float) -> float:
        """In a round of so many seconds, for those that died in it."""
        closing = self.closing(round_s)
        return self._waiting_s(round_s, math.inf if closing.quorum is None else closing.grace_s)

    def closing(self, round_s: float) -> RoundClosing:
        """A quorum, if waiting for all costs more: so many as are there at nearly every moment, and a majority."""
        grace_s = float(round(min(max(GRACE_SHARE * round_s, LEAST_GRACE_S), MOST_GRACE_S)))
        saved_s = self._waiting_s(round_s, math.inf) - self._waiting_s(round_s, grace_s)
        quorum = self._quorum(round_s) if saved_s > WORTH_A_QUORUM * round_s else None
        return ALL if quorum is None else RoundClosing(quorum, grace_s)

    def _quorum(self, round_s: float) -> int | None:
        if not self.may_close_early or self.is_one_job:
            return None
        away = self._away(round_s)
        quorum = math.floor(self.members - away - CERTAIN * math.sqrt(away))
        return quorum if _is_quorum(quorum, self.members) else None

    def _away(self, round_s: float) -> float:
        """How many are away, or back and out of step with the others, at a moment."""
        return self._deaths_per_s * (self.failures.restart_s + round_s)

    def _waiting_s(self, round_s: float, at_most_s: float) -> float:
        """E min(D, G) = ∫ P(D > d) dd = ∫ P(somebody died in the last x seconds of the round) dx, x from T − G to T."""
        if self.is_one_job:
            return 0.0
        return self._died_s(self.noticed_s, round_s) - self._died_s(max(self.noticed_s - at_most_s, 0.0), round_s)

    def _died_s(self, until_s: float, round_s: float) -> float:
        """The same from 0 on. Deaths lie within the round."""
        per_s, within_s = self._deaths_per_s, min(until_s, round_s)
        if per_s <= 0.0:
            return 0.0
        died = -math.expm1(-per_s * within_s)
        return within_s - died / per_s + (until_s - within_s) * died
