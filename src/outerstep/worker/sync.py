"""When a fragment is due, and what happens then: delta, exchange, adopt.

This is the worker's half of one round, top to bottom. Everything in it runs in the training thread; what
travels, travels in the topology's threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..core.fragments import due_fragment, send_step
from ..errors import ExchangeFailed, Refused, RoundStuck
from ..topology import Agreed, Contribution, Joined, Ticket, Topology
from ..types import Plan
from .replica import Replica

log = logging.getLogger(__name__)

LOOK_AROUND_S = 0.2  # how often a waiting worker checks whether another fragment's round waits for it
SAY_SO_S = 5.0  # who waits longer than this says for whom
TRIES = 2
EXIT_TRIES = 8


@dataclass
class Progress:
    """One fragment: the version we hold, our last step that counts in it, and where our oldest unsent step began."""

    version: int
    counted_step: int
    oldest_base: int


@dataclass
class Flight:
    """An exchange under way, with the step it was sent at; `sent` is filled in if training goes on before it lands."""

    ticket: Ticket
    step: int
    sent: dict[str, Tensor] | None = None


@dataclass
class Metrics:
    """Counters of the exchanges so far."""

    sync_count: int = 0  # exchanges that counted
    missed_rounds: int = 0  # rounds that closed without us
    steps_discarded: int = 0  # local steps that were too old, or had no round to go to
    sync_retries: int = 0
    reconnections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    last_sync_s: float = 0.0


class Synchronizer:
    def __init__(self, topology: Topology, replica: Replica, joined: Joined) -> None:
        self._topology = topology
        self._replica = replica
        self.plan: Plan = joined.plan
        self.metrics = Metrics()
        self.step = 0  # local optimizer steps since start
        self.fragments = [Progress(a.version, 0, a.version) for a in joined.anchors]
        self._flights: dict[int, Flight] = {}
        for agreed in joined.anchors:
            replica.adopt(agreed.anchor)
        self._cycle_step = self._position()

    def stepped(self) -> bool:
        """One optimizer step was taken. Exchanges what is due; says whether anything was."""
        self.step += 1
        self._cycle_step += 1
        due = due_fragment(self._cycle_step, self.plan.sync_every, len(self.fragments))
        if self._cycle_step >= self.plan.sync_every:
            self._cycle_step = 0
        if due is None:
            return False
        # Who missed the only fragment's round sends again at once; with several, the next slot comes soon enough.
        self.sync([due], tries=TRIES if len(self.fragments) == 1 else 1)
        return True

    def sync_all(self) -> None:
        """Every fragment that holds unsent steps, now; a new cycle begins."""
        self._cycle_step = 0
        self.sync(self._unsent(), tries=TRIES)

    def finish(self, *, keep_local: bool, patience_s: float) -> None:
        """The end of training: contribute the remaining steps. What finds no round any more is counted as discarded."""
        own = {name: p.detach().clone() for name, p in self._replica.params.items()} if keep_local else None
        try:
            self.sync(self._unsent(), tries=EXIT_TRIES, stuck_after_s=patience_s)
        except RoundStuck as error:
            log.warning("%s; leaving after %g s. The steps since the last agreement may be lost.", error, patience_s)
        left = self._unsent()
        if left:
            self.metrics.steps_discarded += max(self.step - self.fragments[f].counted_step for f in left)
            for fragment in left:
                self._replica.adopt({n: self._replica.anchors[n] for n in self.plan.fragments[fragment]})
        if own is not None:
            for name, param in self._replica.params.items():
                param.data.copy_(own[name])

    def sync(self, due: Iterable[int], *, tries: int, stuck_after_s: float | None = None) -> None:
        """Contribute to the due fragments, wait for their agreements, adopt them.

        While it waits, other workers may be waiting for this one at other fragments: it contributes to those too, so
        that nobody waits in a circle. If the wait is interrupted (Ctrl-C, a server out of reach), what was sent may
        count all the same; the flight is kept, and the next sync settles it before anything new is sent.
        """
        tries_left = dict.fromkeys(due, tries)
        if not tries_left:
            return
        began_at = time.monotonic()
        said = False
        try:
            for fragment in tries_left:
                self._take_off(fragment, stuck_after_s)
            while tries_left:
                reasons = {self._flights[f].ticket.waiting_for for f in tries_left} - {""}
                if reasons and not said and time.monotonic() - began_at > SAY_SO_S:
                    said = True
                    log.info("waiting for %s", " and ".join(sorted(reasons)))
                look_s = LOOK_AROUND_S / len(tries_left)
                for fragment in [f for f in tries_left if self._flights[f].ticket.wait(look_s)]:
                    if self._land(fragment) or tries_left[fragment] == 1:
                        del tries_left[fragment]
                    else:
                        tries_left[fragment] -= 1
                        self._take_off(fragment, stuck_after_s)
                for fragment, version in self._wanted():
                    if fragment not in tries_left and self.fragments[fragment].version < version:
                        tries_left[fragment] = 1
                        self._take_off(fragment, stuck_after_s)
        except BaseException:
            for fragment, flight in self._flights.items():
                if flight.sent is None:  # the weights are still those that were sent: remember what that was
                    flight.sent = self._replica.deltas(self.plan.fragments[fragment])
            raise
        finally:
            self.metrics.last_sync_s = time.monotonic() - began_at
            self.metrics.seconds_waiting += self.metrics.last_sync_s

    def cancel(self) -> None:
        """Stop sending; nothing more will be adopted."""
        for flight in self._flights.values():
            flight.ticket.cancel()

    def _wanted(self) -> list[tuple[int, int]]:
        return sorted({wanted for flight in self._flights.values() for wanted in flight.ticket.wanted})

    def _take_off(self, fragment: int, stuck_after_s: float | None) -> None:
        """Send what is unsent; or carry on with what was sent before an interruption."""
        interrupted = self._flights.get(fragment)
        if interrupted is not None:
            if interrupted.ticket.wait(0.0):
                interrupted.ticket = self._topology.resume(interrupted.ticket)
            return
        progress = self.fragments[fragment]
        contribution = Contribution(
            fragment=fragment,
            base_version=progress.version,
            oldest_base=progress.oldest_base,
            steps=self.step - progress.counted_step,
            weight=1.0,
            deltas=self._replica.deltas(self.plan.fragments[fragment]),
        )
        self._flights[fragment] = Flight(self._topology.begin(contribution, stuck_after_s=stuck_after_s), self.step)

    def _land(self, fragment: int) -> bool:
        """Take an agreement over. False: some of our steps are not in it, and are kept for the next round."""
        flight = self._flights[fragment]
        try:
            agreed = self._topology.finish(flight.ticket)
        except ExchangeFailed as failure:
            if isinstance(failure.__cause__, Refused):
                del self._flights[fragment]  # it never counted, and never will: nothing is in doubt
            raise
        del self._flights[fragment]
        progress, metrics = self.fragments[fragment], self.metrics
        metrics.bytes_sent += agreed.bytes_sent
        metrics.bytes_received += agreed.bytes_received
        metrics.sync_retries += agreed.retries
        metrics.reconnections += agreed.rejoins
        progress.version = agreed.version
        if agreed.counted:
            metrics.sync_count += 1
            progress.counted_step, progress.oldest_base = flight.step, agreed.version
            if flight.sent is not None and flight.step < self.step:
                self._replica.carry(agreed.anchor, flight.sent)
                return False
        elif not self._too_old(agreed):
            metrics.missed_rounds += 1
            self._replica.rebase(agreed.anchor)
            unsent = self.step - progress.counted_step
            log.warning("round %d closed without this worker; %d steps go into the next", agreed.version, unsent)
            return False
        else:
            metrics.missed_rounds += 1
            lost = self.step - progress.counted_step
            metrics.steps_discarded += lost
            log.warning("%d local steps were older than max_staleness=%d and are lost", lost, self.plan.max_staleness)
            progress.counted_step, progress.oldest_base = self.step, agreed.version
        self._replica.adopt(agreed.anchor)
        log.info(
            "fragment %d version %d: %s; %.1f MB up, %.1f MB down",
            fragment,
            agreed.version,
            ", ".join(p.worker_id for p in agreed.participants),
            agreed.bytes_sent / 1e6,
            agreed.bytes_received / 1e6,
        )
        return True

    def _too_old(self, agreed: Agreed) -> bool:
        age = agreed.version - self.fragments[agreed.fragment].oldest_base
        return agreed.too_old or age > self.plan.max_staleness

    def _unsent(self) -> list[int]:
        return [i for i, progress in enumerate(self.fragments) if progress.counted_step < self.step]

    def _position(self) -> int:
        """Where in the cycle the others are: the fragment with the lowest version is the next to be sent."""
        versions = [progress.version for progress in self.fragments]
        return send_step(versions.index(min(versions)) - 1, self.plan.sync_every, len(versions))
