"""What a worker remembers about its exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..topology import Ticket


@dataclass(frozen=True)
class Work:
    """Training done, counted from the start of the worker."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.samples + other.samples, self.tokens + other.tokens)

    def __sub__(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.samples - other.samples, self.tokens - other.tokens)


@dataclass
class Progress:
    """One fragment: the version we hold, how much of our work is in it, and where our oldest unsent step began. `late`:
    the exchange that counts in a round after that version (`late_in`), if our last one does."""

    version: int
    counted: Work
    oldest_base: int
    late: Ticket | None = None
    late_in: int = 0


@dataclass
class Flight:
    """An exchange under way: what was done when it was sent, and the step at which its agreement is to be taken over.

    `sent` is what was sent, kept if training goes on before it lands. `parked`: the wait for it was given up or
    interrupted; it is settled when its fragment is due again. `catches_up`: it brings no contribution, but what a
    worker that goes on from its saved state has missed."""

    ticket: Ticket
    work: Work
    land_at: int
    sent: dict[str, Tensor] | None = None
    parked: bool = False
    catches_up: bool = False


@dataclass(frozen=True)
class Offline:
    """What to do when nobody answers: after `after_s` train on, and leave at most `exchanges` open like that."""

    after_s: float = 30.0
    exchanges: int = 4


@dataclass
class Metrics:
    """Counters of the exchanges so far."""

    sync_count: int = 0  # exchanges that counted
    missed_rounds: int = 0  # rounds that closed without us
    steps_discarded: int = 0  # local steps that were too old, or had no round to go to
    steps_overwritten: int = 0  # taken while an agreement was on its way, and replaced by it (delay without carry)
    offline_exchanges: int = 0  # exchanges that were left open because the server did not answer
    anchor_repairs: int = 0  # anchors that were not the agreed ones, and were fetched anew
    sync_retries: int = 0
    reconnections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    last_sync_s: float = 0.0
