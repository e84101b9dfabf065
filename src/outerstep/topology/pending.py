"""What it means that no server keeps a contribution for a worker that is away: with the process it is lost, unless the
others have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .protocol import Agreed, Sight, Ticket


@dataclass(frozen=True)
class Begun:
    """An exchange that was over before it began: there is only to take over what the others go on from."""

    fragment: int
    agreed: Agreed
    failed: bool = False

    def look(self, timeout_s: float) -> Sight:
        return Sight(done=True)

    def cancel(self) -> None:
        """There is nothing to."""


class NothingToPack:
    """Part of such a topology. Its steps are unsent when a worker is started anew; or if they did count, the run has
    moved on by then."""

    def pack(self, ticket: Ticket) -> dict[str, Any]:
        return {}

    def unpack(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> None:
        """See `pack`."""


__all__ = ["Begun", "NothingToPack"]
