"""Who speaks for a cluster of equals: one rule, which every member applies to what it sees.

- Whoever is named leads: by an operator, by the plan of the layer above.
- Else whoever leads goes on. It gives way if it is about to leave, if it cannot reach the layer above, or if another
  member's line up is faster by far. A change costs a join and a pause, so a little is not enough, and a line that is
  fast enough for anything is never slow.
- If nobody leads, the lowest name does.

Only members that reach the layer above and do not leave are asked; if there is none, the lowest of those that stay
goes on trying. A server is its cluster's only candidate.

Members may see different things for a while, and an ex-leader may have slept through its own replacement. Nobody is
asked to be sure: the layer above fences every instance but the newest, and the layer below keeps only the record of
whoever leads the present quorum. So the rule decides who *tries*; those two decide who succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

FASTER_BY_FAR: Final = 1.5625  # hysteresis, twice
FAST_ENOUGH: Final = 125e6  # bytes per second, a line of 1 Gbit/s


@dataclass(frozen=True)
class MemberInSight:
    """A member, as another sees it. `leaves`: it is about to. `bytes_per_s`: of its line up; 0 = not measured."""

    name: str
    reaches_above: bool = True
    leaves: bool = False
    bytes_per_s: float = 0.0


def who_leads(
    healthy: Iterable[MemberInSight], named: str = "", leading: str = "", *, compares_lines: bool = True
) -> str | None:
    """`named`: by an order, "" = nobody. `leading`: who leads now. `compares_lines`: False = it has led too shortly for
    that. None: there is nobody at all."""
    members = {member.name: member for member in healthy}
    stay = {name: member for name, member in members.items() if not member.leaves} or members
    able = {name: member for name, member in stay.items() if member.reaches_above} or stay
    if named in able:
        return named
    if leading not in able:
        return min(able, default=None)
    rates = {name: _rate(member) for name, member in able.items()}
    fastest = max(sorted(rates), key=lambda name: rates[name])  # of equals the first by name
    is_slow = 0.0 < FASTER_BY_FAR * rates[leading] < rates[fastest]
    return fastest if is_slow and compares_lines else leading


def _rate(member: MemberInSight) -> float:
    """0 for what nobody can have measured."""
    return min(member.bytes_per_s, FAST_ENOUGH) if 0.0 < member.bytes_per_s < float("inf") else 0.0
