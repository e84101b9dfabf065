"""The rule that chooses the leader of a cluster of equals. Every member applies it to what it sees.

- A member that is named leads. An operator or the plan of the layer above names it.
- Otherwise the current leader stays. It gives way if it is about to leave, if it cannot reach the layer above, or if
  another member's line up is much faster. A change costs a join and a pause, so a small advantage is not enough, and a
  line above a fixed speed never counts as slow.
- If there is no leader, the member with the lowest name leads.

Candidates are the members that reach the layer above and are not leaving. If there are none, the lowest member that
stays keeps trying. In a cluster with a server, the server is the only candidate.

Members may see different things for a while, and an old leader may sleep through its own replacement. Certainty is not
needed: the layer above fences every instance but the newest, and the layer below stores only the record of the present
quorum's leader. So the rule decides who *tries*, and those two decide who succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

FASTER_BY_FAR: Final = 1.5625  # hysteresis, twice
FAST_ENOUGH: Final = 125e6  # bytes per second, a line of 1 Gbit/s


@dataclass(frozen=True)
class MemberInSight:
    """A member, as another member sees it. `leaves`: soon. `bytes_per_s`: the rate of its line up; 0 = unknown."""

    name: str
    reaches_above: bool = True
    leaves: bool = False
    bytes_per_s: float = 0.0


def who_leads(
    healthy: Iterable[MemberInSight], named: str = "", leading: str = "", *, compares_lines: bool = True
) -> str | None:
    """The member that should lead; None = there are no members. `named`: by an order; "" = nobody. `leading`: the
    current leader. `compares_lines`: False = the leader has not led long enough to be replaced for speed."""
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
    """The rate that counts. An impossible measurement is 0."""
    return min(member.bytes_per_s, FAST_ENOUGH) if 0.0 < member.bytes_per_s < float("inf") else 0.0
