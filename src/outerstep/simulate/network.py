"""Links that delay, lose, repeat, reorder, damage and cut, all drawn from one seed; and that take time to carry bytes.

A direction without a limit carries any number of bytes at once: only the delay counts. With `limit` it is a `Pipe`.
"""

from __future__ import annotations

import random
from collections import deque
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


class Pipe:
    """One direction of a link: bytes leave in order, one message after the other, at `bytes_per_s`.

    First come, first served, not shared fairly: a message costs one event, whatever else travels, where fair shares are
    recomputed for every message at each arrival. A round closes with its *last* contribution, and that one arrives at
    the same moment either way, because both keep the link busy until everything is through. Messages without a size
    (heartbeats, polls) do not queue: on a real link they have connections of their own.
    """

    def __init__(self, agenda: Agenda, bytes_per_s: float) -> None:
        self._agenda = agenda
        self._bytes_per_s = bytes_per_s
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._since = 0.0  # the moment for which the size at the head of the queue is true
        self._turn = 0  # an end that was scheduled before the last change of pace is void

    def carry(self, size_bytes: float, then: Callable[[], None]) -> None:
        self._queue.append((size_bytes, then))
        if len(self._queue) == 1:
            self._begin()

    def set_rate(self, bytes_per_s: float) -> None:
        """What has left has left; the rest leaves at the new pace. 0: nothing moves until the next change."""
        if self._queue:
            left, then = self._queue[0]
            self._queue[0] = max(0.0, left - (self._agenda.now - self._since) * self._bytes_per_s), then
        self._bytes_per_s = bytes_per_s
        if self._queue:
            self._begin()

    def _begin(self) -> None:
        self._since = self._agenda.now
        self._turn += 1
        turn = self._turn
        if self._bytes_per_s > 0.0:
            self._agenda.after(self._queue[0][0] / self._bytes_per_s, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        _, then = self._queue.popleft()
        if self._queue:
            self._begin()
        then()


class Network:
    def __init__(self, agenda: Agenda, rng: random.Random) -> None:
        self._agenda = agenda
        self._rng = rng
        self._pipes: dict[tuple[str, str], Pipe] = {}
        self.conditions = Conditions()
        self.cut: set[tuple[str, str]] = set()  # (from, to): one direction at a time
        self.lost = self.repeated = self.damaged = self.carried = 0

    def limit(self, source: str, target: str, bytes_per_s: float) -> None:
        """From now on. "" as the target: all that `source` sends shares it; "" as the source: all that `target`
        gets."""
        if not 0.0 <= bytes_per_s < float("inf"):
            raise ValueError(f"bytes_per_s must be finite and not negative, got {bytes_per_s}; 0 stops the link")
        if (source, target) in self._pipes:
            self._pipes[source, target].set_rate(bytes_per_s)
        else:
            self._pipes[source, target] = Pipe(self._agenda, bytes_per_s)

    def send(self, source: str, target: str, deliver: Callable[[bool], None], *, size_bytes: int = 0) -> None:
        """Call `deliver(damaged)` at the other end: later, perhaps twice, perhaps never. What is lost takes none of
        the bandwidth."""
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
            delay_s = rng.expovariate(1.0 / now.delay_s)
            arrive = self._arrival(source, target, deliver, damaged)
            self._carry(self._on_the_way(source, target) if size_bytes else [], size_bytes, delay_s, arrive)

    def _on_the_way(self, source: str, target: str) -> list[Pipe]:
        """Out of the sender, over the link, into the receiver."""
        return [self._pipes[key] for key in ((source, ""), (source, target), ("", target)) if key in self._pipes]

    def _carry(self, pipes: list[Pipe], size_bytes: int, delay_s: float, arrive: Callable[[], None]) -> None:
        if pipes:
            pipes[0].carry(size_bytes, lambda: self._carry(pipes[1:], size_bytes, delay_s, arrive))
        else:
            self._agenda.after(delay_s, arrive)

    def _arrival(self, source: str, target: str, deliver: Callable[[bool], None], damaged: bool) -> Callable[[], None]:
        def arrive() -> None:
            if (source, target) in self.cut:
                self.lost += 1
            else:
                self.carried += 1
                deliver(damaged)

        return arrive
