"""What a worker remembers about its exchanges."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..topology.protocol import Agreed, Sight, Ticket

log = logging.getLogger(__name__)

SAY_SO_S = 5.0  # who waits longer than this says for whom


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
    interrupted; it is settled when its fragment is due again. `overtaken`: the local weights were given up meanwhile,
    so nothing is to be carried over from them. `catches_up`: it brings no contribution, but what a worker that goes on
    from its saved state has missed."""

    ticket: Ticket
    work: Work
    land_at: int
    sent: dict[str, Tensor] | None = None
    parked: bool = False
    overtaken: bool = False
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
    reloads: int = 0  # contributions that the server had no use for: we went on from the agreed weights
    steps_overwritten: int = 0  # taken while an agreement was on its way, and replaced by it (delay without carry)
    offline_exchanges: int = 0  # exchanges that were left open because the server did not answer
    anchor_repairs: int = 0  # anchors that were not the agreed ones, and were fetched anew
    sync_retries: int = 0
    reconnections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    last_sync_s: float = 0.0

    def note(self, agreed: Agreed) -> None:
        """What came with an agreement, whatever is made of it."""
        self.bytes_sent += agreed.bytes_sent
        self.bytes_received += agreed.bytes_received
        self.sync_retries += agreed.retries
        self.reconnections += agreed.rejoins
        if agreed.steps_lost:
            self.steps_discarded += agreed.steps_lost
            log.warning(
                "%d steps are lost: the server was restarted before the round that they were late for, and they are "
                "too old for it now",
                agreed.steps_lost,
            )


def say_so(sights: Iterable[Sight], waited_s: float) -> bool:
    """Tell the user for whom we wait, once it takes long."""
    reasons = {sight.waiting_for for sight in sights} - {""}
    if not reasons or waited_s <= SAY_SO_S:
        return False
    log.info("waiting for %s", " and ".join(sorted(reasons)))
    return True
