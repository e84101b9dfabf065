"""Workers that send what cannot be used, again and again.

Each such contribution is refused by itself and does no harm. But it costs, somebody waits for it, and it seldom is the
last. So the third *offence* within WINDOW_S puts its worker id into quarantine: nothing is taken from it and no round
waits for it; it may go on fetching what is agreed, and training.

The way back:

- time: FIRST_S, and twice as long each time again, up to LONGEST_S. Then it may contribute as before; but from the same
  process the next offence is enough for another spell;
- a new process under this id that joins after that time: it begins with a clean sheet;
- an operator: `outerstep control pardon WORKER`, at once and with a clean sheet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import Absurd, BadFrame, BadTensors, Conflict, NotFinite, Quarantined, Refused, UnsupportedMedia
from ..backoff import Backoff

OFFENCES = 3
WINDOW_S = 4 * 3600.0
FIRST_S = 600.0
LONGEST_S = 24 * 3600.0
SPELLS = Backoff(FIRST_S, LONGEST_S)

KINDS = (NotFinite, Absurd, BadTensors, BadFrame, UnsupportedMedia, Conflict)
"""What no healthy worker is refused for. (A part that changed on its way, a closed round or a full pool is no fault of
the worker's.)"""


def is_offence(refusal: Refused) -> bool:
    return isinstance(refusal, KINDS)


@dataclass
class Conduct:
    """One worker id's. Times are the coordinator's clock."""

    offences: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=OFFENCES))  # when, and what
    total: int = 0
    spells: int = 0  # of quarantine, so far
    until: float = 0.0
    reason: str = ""

    def is_quarantined(self, now: float) -> bool:
        return now < self.until

    def offend(self, refusal: Refused, now: float) -> bool:
        """Take note; True: that was one too many."""
        self.total += 1
        self.offences.append((now, refusal.code))
        recent = sum(now - at <= WINDOW_S for at, _ in self.offences)
        if self.is_quarantined(now) or recent < (1 if self.spells else OFFENCES):
            return False
        self.until = now + SPELLS.longest_pause_s(self.spells)
        self.spells = min(self.spells + 1, 32)
        codes = ", ".join(code for _, code in self.offences)
        self.reason = f"refused for {codes}; the last time because {refusal.message}"[:256]
        return True

    def check(self, worker_id: str, now: float) -> None:
        if self.is_quarantined(now):
            raise Quarantined(
                f"worker {worker_id!r} is in quarantine for {self.until - now:.0f} s more: {self.reason}",
                hint="nothing of it is taken until then: let it reload the agreed weights and look for the cause; an "
                f"operator can end it with `outerstep control pardon {worker_id}`",
                retry_after_s=self.until - now,
            )

    def started_anew(self, now: float) -> None:
        """A new process goes by this id."""
        if not self.is_quarantined(now):
            self.clear()

    def forgive(self, refusal: Refused) -> None:
        """The last offence of this kind was none."""
        found = next((offence for offence in reversed(self.offences) if offence[1] == refusal.code), None)
        if found is not None:
            self.offences.remove(found)
            self.total -= 1

    def clear(self) -> None:
        self.offences.clear()
        self.total = self.spells = 0
        self.until, self.reason = 0.0, ""

    # --- over a restart -------------------------------------------------------------------------------------------

    def remembered(self, now: float) -> dict[str, Any]:
        """Clocks begin anew with a process: times are kept as ages. {} = nothing is held against it."""
        if not self.total:
            return {}
        return {
            "offences": [[now - at, code] for at, code in self.offences],
            "total": self.total,
            "spells": self.spells,
            "left_s": max(self.until - now, 0.0),
            "reason": self.reason,
        }

    @classmethod
    def resumed(cls, facts: Mapping[str, Any], now: float) -> Conduct:
        conduct = cls()
        if facts:
            conduct.offences.extend((now - float(age_s), str(code)) for age_s, code in facts["offences"])
            conduct.total, conduct.spells = int(facts["total"]), int(facts["spells"])
            conduct.until, conduct.reason = now + float(facts["left_s"]), str(facts["reason"])
        return conduct
