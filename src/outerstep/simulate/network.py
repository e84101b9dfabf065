"""Links that delay, lose, repeat, reorder, damage and cut, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .agenda import Agenda


@dataclass
class Conditions:
    """Of every link, at this moment. Reordering follows from the spread of delays."""

    delay_s: float = 0.05
    loss: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0


class Network:
    def __init__(self, agenda: Agenda, rng: random.Random) -> None:
        self._agenda = agenda
        self._rng = rng
        self.conditions = Conditions()
        self.cut: set[tuple[str, str]] = set()  # (from, to): one direction at a time
        self.lost = self.repeated = self.damaged = self.carried = 0

    def send(self, source: str, target: str, deliver: Callable[[bool], None]) -> None:
        """Call `deliver(damaged)` at the other end: later, perhaps twice, perhaps never."""
        rng, now = self._rng, self.conditions
        copies = 1
        if rng.random() < now.repeat:
            copies, self.repeated = 2, self.repeated + 1
        for _ in range(copies):
            if (source, target) in self.cut or rng.random() < now.loss:
                self.lost += 1
                continue
            damaged = rng.random() < now.damage
            self.damaged += damaged
            self._agenda.after(rng.expovariate(1.0 / now.delay_s), self._arrival(source, target, deliver, damaged))

    def _arrival(self, source: str, target: str, deliver: Callable[[bool], None], damaged: bool) -> Callable[[], None]:
        def arrive() -> None:
            if (source, target) in self.cut:
                self.lost += 1
            else:
                self.carried += 1
                deliver(damaged)

        return arrive
