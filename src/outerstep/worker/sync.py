"""When a fragment is due, and what happens then: delta, exchange, adopt.

This is the worker's half of one round, top to bottom: here it is decided what is sent and what is waited for, and
landing.py takes over what comes of it. Everything in it runs in the training thread; what travels, travels in the
topology's threads. With a delay τ a fragment is sent after its step and taken over τ steps later, several at a time if
they overlap; with τ = 0 the worker waits where it is. One code path.

Several processes that train in step (a torchrun job) each run this same code: every decision follows from the step
counter and from what the topology says, never from this process's own clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ..errors import RoundStuck, ServerUnreachable
from ..topology.protocol import Contribution, Joined, Sight, Topology, anchors_of
from .books import Books
from .going_on import books_of, go_on
from .landing import Landing
from .progress import Flight, Offline, Work, say_so
from .replica import Replica
from .saved import SavedState
from .signals import Interrupts, OutOfTime

log = logging.getLogger(__name__)

LOOK_AROUND_S = 0.2  # how often a waiting worker checks whether another fragment's round waits for it
LOOKS_IN_A_CIRCLE = 50  # after so many in vain, what waits for us may wait in a circle
TRIES = 2
EXIT_TRIES = 8


class Synchronizer:
    def __init__(
        self,
        topology: Topology,
        replica: Replica,
        joined: Joined,
        offline: Offline = Offline(),  # noqa: B008 - frozen
        interrupts: Interrupts | None = None,
        on_reload: Callable[[], None] = lambda: None,
        saved: SavedState | None = None,
    ) -> None:
        """`on_reload`: the local weights were given up for the agreed ones. `saved`: go on from there."""
        self._topology = topology
        self._replica = replica
        self._offline = offline
        self._interrupts = interrupts or Interrupts(0.0)  # one that nobody asks anything
        anchors = anchors_of(topology, joined) if saved is None else []
        versions = [agreed.version for _, agreed in anchors]
        self.books = Books.of(joined, versions) if saved is None else books_of(saved, joined.plan)
        self._landing = Landing(replica, self.books, joined.worker_id, on_reload)
        if saved is not None:
            replica.load_anchors(saved.anchors)
            go_on(saved, self.books, topology, joined.overtaken, lambda behind: self.sync(behind, tries=1))
            return
        for ticket, agreed in anchors:
            self._landing.hold(ticket, agreed, replica.adopt(agreed.update))
        self.books.fall_in()

    # --- training -------------------------------------------------------------------------------------------------

    def count(self, *, samples: int, tokens: int) -> None:
        self.books.work += Work(0, samples, tokens)

    def assign(self, sync_every: int | None) -> None:
        """This worker's own H, from its next cycle on; None = the plan's."""
        self.books.cycle.assigned = sync_every

    def stepped(self) -> bool:
        """One optimizer step was taken. Lands what is to land, sends what is due; says whether it did either."""
        books = self.books
        books.work += Work(steps=1)
        due = books.cycle.advance(books.plan)
        steps = books.work.steps
        landing = [f for f, flight in books.flights.items() if not flight.parked and steps >= flight.land_at]
        if landing:
            self.sync(landing, tries=1, may_park=True)
        if due is not None:
            self._send(due)
        return bool(landing) or due is not None

    def sync_all(self) -> None:
        """Every fragment that holds unsent steps, now; a new cycle begins."""
        self.books.begin_cycle()
        self.sync(self.books.open_fragments(), tries=TRIES)

    # --- sending --------------------------------------------------------------------------------------------------

    def _send(self, fragment: int) -> None:
        delay = self.books.cycle.delay(self.books.plan)
        if delay == 0:
            # Who missed the only fragment's round sends again at once; with several, the next slot comes soon enough.
            # What was left open is settled first, which is no try of this exchange.
            tries = (TRIES if len(self.books.fragments) == 1 else 1) + (fragment in self.books.flights)
            self.sync([fragment], tries=tries, may_park=True)
            return
        if fragment in self.books.flights:  # parked
            self.sync([fragment], tries=1, may_park=True)
        if fragment not in self.books.flights:
            self._take_off(fragment, None, land_at=self.books.work.steps + delay)

    def _take_off(self, fragment: int, stuck_after_s: float | None, land_at: int | None = None) -> None:
        """Send what is unsent; or carry on with what is under way already."""
        books = self.books
        flight = books.flights.get(fragment)
        if flight is not None:
            if stuck_after_s is not None or flight.ticket.look(0.0).failed:
                flight.ticket = flight.ticket.resume(stuck_after_s=stuck_after_s)
            return
        progress, unsent = books.fragments[fragment], books.unsent(fragment)
        deltas, sent = self._replica.to_send(books.plan.fragments[fragment], keep=land_at is not None)
        contribution = Contribution(
            fragment=fragment,
            base_version=progress.version,
            oldest_base=progress.oldest_base,
            steps=unsent.steps,
            samples=unsent.samples,
            tokens=unsent.tokens,
            deltas=deltas,
        )
        ticket = self._topology.begin(contribution, stuck_after_s=stuck_after_s)
        books.flights[fragment] = Flight(ticket, books.work, books.work.steps if land_at is None else land_at, sent)

    # --- waiting --------------------------------------------------------------------------------------------------

    def sync(
        self, due: Iterable[int], *, tries: int, stuck_after_s: float | None = None, may_park: bool = False
    ) -> None:
        """Contribute to the due fragments if they are not under way yet, wait for their agreements, adopt them.

        While it waits, other workers may be waiting for this one at other fragments: it contributes to those too, so
        that nobody waits in a circle. If the wait is interrupted (Ctrl-C, a server out of reach), what was sent may
        count all the same; the flight is kept, and the next sync settles it before anything new is sent. With
        `may_park` a server that does not answer is not waited for: training goes on, up to a limit. A worker that was
        asked to go waits at the end of training only, where the other fragments' steps are sent too, and not for long.
        """
        tries_left = dict.fromkeys(due, tries)
        if not tries_left:
            return
        began_at, said = time.monotonic(), False
        looks = 0  # counted, not timed: the processes of a group must decide alike
        with self._accounted(began_at):
            for fragment in tries_left:
                self._take_off(fragment, stuck_after_s)
            while tries_left:
                looks += 1
                sights = {f: self.books.flights[f].ticket.look(LOOK_AROUND_S / len(tries_left)) for f in tries_left}
                said = said or say_so(sights.values(), time.monotonic() - began_at)
                for fragment in [f for f, sight in sights.items() if sight.done]:
                    looks = 0
                    if self._landing.land(fragment) or tries_left[fragment] == 1:
                        del tries_left[fragment]
                    else:
                        tries_left[fragment] -= 1
                        self._take_off(fragment, stuck_after_s)
                if may_park and self._nobody_answers(sights.values()):
                    self._park(tries_left)
                    return
                if self._interrupts.asked and stuck_after_s is None:
                    self._leave_open(tries_left)
                    return
                if self._interrupts.is_late:
                    raise OutOfTime("no time is left to wait for the agreement")
                for fragment, version in sorted({wanted for sight in sights.values() for wanted in sight.wanted}):
                    behind = self.books.fragments[fragment].version < version
                    if behind and fragment not in tries_left and not self._is_on_its_way(fragment, looks):
                        tries_left[fragment] = 1
                        self._take_off(fragment, stuck_after_s)

    def _is_on_its_way(self, fragment: int, looks: int) -> bool:
        """It was sent, and lands when its time comes, not before; unless its round closed without it, for then nothing
        of ours is in the one that waits. Nor is it if the agreement is here already: if we have stood still for long,
        somebody may wait there for what we send next, and we, directly or not, for that somebody."""
        flight = self.books.flights.get(fragment)
        if flight is None or flight.parked:
            return False
        sight = flight.ticket.look(0.0)
        return not sight.missed and not (sight.done and looks > LOOKS_IN_A_CIRCLE)

    @contextmanager
    def _accounted(self, began_at: float) -> Iterator[None]:
        """However the wait ends: what was sent is remembered, and the time counted."""
        try:
            yield
        except BaseException:
            self._leave_open(self.books.flights)
            raise
        finally:
            metrics = self.books.metrics
            metrics.last_sync_s = time.monotonic() - began_at
            metrics.seconds_waiting += metrics.last_sync_s

    def _leave_open(self, fragments: Iterable[int]) -> None:
        """Training goes on without their agreements. (The weights are still those that were sent.)"""
        for fragment in fragments:
            flight = self.books.flights[fragment]
            flight.parked = True
            if flight.sent is None:
                flight.sent = self._replica.deltas(self.books.plan.fragments[fragment])

    def _nobody_answers(self, sights: Iterable[Sight]) -> bool:
        silent = all(not sight.done and sight.silent_s > self._offline.after_s for sight in sights)
        return silent and self.books.left_open < self._offline.exchanges

    def _park(self, fragments: Iterable[int]) -> None:
        self.books.left_open += 1
        self.books.metrics.offline_exchanges += 1
        self._leave_open(fragments)
        log.warning(
            "no answer from the server for %g s; training goes on without it (%d of at most %d exchanges left open)",
            self._offline.after_s,
            self.books.left_open,
            self._offline.exchanges,
        )

    # --- leaving --------------------------------------------------------------------------------------------------

    def finish(self, *, keep_local: bool, patience_s: float) -> None:
        """The end of training: contribute the remaining steps. What finds no round any more is counted as discarded. If
        there is no server any more, the model keeps this worker's own weights: they are all there is."""
        own = {name: p.detach().clone() for name, p in self._replica.tensors.items()} if keep_local else None
        gone = False
        self._ask_again_for_the_late()
        unsent = self.books.open_fragments()
        if unsent:
            log.info("training is over; contributing what is left")
        try:
            self.sync(unsent, tries=EXIT_TRIES, stuck_after_s=patience_s)
        except RoundStuck as error:
            log.warning("%s; leaving after %g s. The steps since the last agreement may be lost.", error, patience_s)
        except ServerUnreachable as error:
            log.warning("%s. Leaving with this worker's own weights; its last steps were not contributed.", error)
            gone = True
        except OutOfTime as error:
            log.warning("%s. What was sent until now still counts if it was sent whole.", error)
            gone = True
        left = self.books.open_fragments()
        if left:
            self.books.metrics.steps_discarded += max(self.books.unsent(f).steps for f in left)
        if own is not None:
            self._replica.restore(own)
        elif not gone:
            self._replica.adopt_anchor()  # whole, also where it was mixed with the local weights

    def _ask_again_for_the_late(self) -> None:
        """What counts in a round after the version we hold is worth having, where nothing more is to be sent anyway."""
        books = self.books
        for fragment, progress in enumerate(books.fragments):
            if progress.late is not None and progress.counted.steps == books.work.steps:
                books.flights[fragment] = Flight(progress.late, books.work, books.work.steps)
                books.metrics.sync_count -= 1  # it was counted before

    def cancel(self) -> None:
        """Stop sending; nothing more will be adopted."""
        for flight in self.books.flights.values():
            flight.ticket.cancel()
