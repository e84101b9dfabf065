"""What a worker does with an agreement: it takes it over, moves along with it, or starts anew from it.

Books and weights change together, or not at all: half taken over, steps that were sent would be sent again. With A the
anchor, θ′ the agreed one, and local the worker's weights:

    our steps are in it          local = θ′, mixed or carried on as the plan says        (take over)
    it came about without us     local += θ′ − A: our unsent steps are kept              (move along)
    they are too old for it      local = θ′: our unsent steps are dropped                (begin anew)

and A = θ′ in every case. If the hash says that it is not, it is fetched whole (hold).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import ExchangeFailed, Refused, ServerError
from ..topology.protocol import Agreed, Ticket
from .books import Books
from .deferring import deferred
from .progress import Flight
from .replica import Replica

log = logging.getLogger(__name__)

REPAIRS = 3


class Landing:
    """`on_reload`: the local weights were given up for the agreed ones."""

    def __init__(self, replica: Replica, books: Books, worker_id: str, on_reload: Callable[[], None]) -> None:
        self._replica = replica
        self._books = books
        self._worker_id = worker_id
        self._on_reload = on_reload

    def land(self, fragment: int) -> bool:
        """The agreement of an exchange that is over. False: some of our steps are not in it, and are kept for the next
        round."""
        books = self._books
        flight = books.flights[fragment]
        try:
            agreed = flight.ticket.finish(reload=True)
        except ExchangeFailed as failure:
            cause = failure.__cause__
            if isinstance(cause, Refused) and not isinstance(cause, ServerError):
                del books.flights[fragment]  # it never counted, and never will: nothing is in doubt
            raise
        books.note(agreed)
        for other in agreed.also:  # what is under way there stays right: a Δ is the same from whichever anchor
            with deferred():
                intact = self._move_along(other)
            self.hold(flight.ticket, other, intact)
        progress = books.fragments[fragment]
        if agreed.refused:
            del books.flights[fragment]
            self._reload(flight.ticket, agreed)
            return True
        with deferred():
            del books.flights[fragment]
            progress.late = flight.ticket if agreed.counted_in > agreed.version else None
            progress.late_in = agreed.counted_in
            intact = self._settle(flight, agreed)
        self.hold(flight.ticket, agreed, intact)
        return progress.counted.steps == books.work.steps

    def hold(self, ticket: Ticket, agreed: Agreed, intact: bool) -> None:
        """The anchor has moved. If that did not make it the agreed one, it is fetched whole, and we rebase on it."""
        for _ in range(REPAIRS):
            whole = ticket.confirm(agreed, intact)
            if whole is None:
                return
            log.warning(
                "fragment %d: the anchor was not the one agreed on as version %d; it was fetched anew",
                agreed.fragment,
                agreed.version,
            )
            self._books.metrics.anchor_repairs += 1
            self._books.note(whole)
            progress = self._books.fragments[whole.fragment]
            with deferred():
                progress.version = whole.version
                if progress.counted.steps == self._books.work.steps:
                    progress.oldest_base = whole.version
                agreed, intact = whole, self._replica.rebase(whole.update)
        raise ExchangeFailed(f"fragment {agreed.fragment}: even whole, what the server sends has not the hash it names")

    # --- books and weights, both; each says whether the anchor is now the agreed one ------------------------------

    def _settle(self, flight: Flight, agreed: Agreed) -> bool:
        if flight.catches_up:
            return self._catch_up(agreed)
        if agreed.counted:
            return self._take_over(agreed.fragment, flight, agreed)
        self._books.metrics.missed_rounds += 1
        if self._books.too_old(agreed):
            return self._discard(agreed)
        unsent = self._books.unsent(agreed.fragment).steps
        log.warning("round %d closed without this worker; %d steps go into the next", agreed.version, unsent)
        return self._move_along(agreed)

    def _take_over(self, fragment: int, flight: Flight, agreed: Agreed) -> bool:
        """What we sent is in the agreement (or in a round still open). The steps taken since then are kept, mixed or
        replaced, as the plan says; those taken while nobody answered are always kept."""
        books, progress = self._books, self._books.fragments[fragment]
        sent = (flight.work - progress.counted).steps
        progress.counted = flight.work
        progress.oldest_base = agreed.version
        books.metrics.sync_count += 1
        since = (books.work - flight.work).steps
        if sent and any(p.worker_id == self._worker_id and not p.weight for p in agreed.participants):
            log.warning(
                "fragment %d version %d was agreed without this worker's %d steps: a screen, or the rule by which the "
                "run combines contributions, left them out; the server's event log says why",
                fragment,
                agreed.version,
                sent,
            )
        if since and flight.parked and not flight.overtaken:
            progress.oldest_base = progress.version  # they were taken on the version we held all the while
            if books.too_old(agreed):
                return self._discard(agreed)
        progress.version = agreed.version
        if since and (books.plan.carry or flight.parked) and not flight.overtaken:
            assert flight.sent is not None
            intact = self._replica.carry(agreed.update, flight.sent)
        elif books.plan.alpha > 0.0:
            intact = self._replica.mix(agreed.update, books.plan.alpha)
        else:
            intact = self._replica.adopt(agreed.update)
            progress.counted = books.work
            books.metrics.steps_overwritten += since
        log.info(
            "fragment %d version %d: %s; %.1f MB up, %.1f MB down",
            fragment,
            agreed.version,
            ", ".join(p.worker_id for p in agreed.participants),
            agreed.bytes_sent / 1e6,
            agreed.bytes_received / 1e6,
        )
        return intact

    def _move_along(self, agreed: Agreed) -> bool:
        """It came about without us."""
        progress = self._books.fragments[agreed.fragment]
        progress.version = agreed.version
        progress.oldest_base = min(progress.oldest_base, agreed.version)
        return self._replica.rebase(agreed.update)

    def _begin_at(self, agreed: Agreed) -> bool:
        """What was agreed, and nothing of our own."""
        progress = self._books.fragments[agreed.fragment]
        progress.version = progress.oldest_base = agreed.version
        progress.counted = self._books.work
        return self._replica.adopt(agreed.update)

    def _discard(self, agreed: Agreed) -> bool:
        """Our unsent steps are of an age at which they would do harm: start anew from what was agreed."""
        unsent, limit = self._books.unsent(agreed.fragment).steps, self._books.plan.max_staleness
        self._books.metrics.steps_discarded += unsent
        log.warning("%d local steps were older than max_staleness=%d and are lost", unsent, limit)
        return self._begin_at(agreed)

    def _catch_up(self, agreed: Agreed) -> bool:
        """What was agreed while this worker was away (saved.py)."""
        fragment, progress = agreed.fragment, self._books.fragments[agreed.fragment]
        held, unsent = progress.version, self._books.unsent(fragment).steps
        if agreed.counted:
            log.warning(
                "fragment %d: the server has later steps of this worker than its saved state knows of; the state's %d "
                "unsent steps are among them and are dropped. Going on from version %d",
                fragment,
                unsent,
                agreed.version,
            )
            return self._begin_at(agreed)
        if not agreed.update.kinds:
            return self._replica.prove(agreed.update)
        if unsent and self._books.too_old(agreed):
            return self._discard(agreed)
        log.info("fragment %d: from version %d to %d, with %d unsent steps", fragment, held, agreed.version, unsent)
        intact = self._move_along(agreed)
        if not unsent:
            progress.oldest_base = agreed.version
        return intact

    def _reload(self, ticket: Ticket, agreed: Agreed) -> None:
        """The server has no use for what we sent, and what is wrong with one fragment seldom stops there: give the
        local weights up, all of them, and go on from what was agreed."""
        books = self._books
        books.metrics.reloads += 1
        books.metrics.steps_discarded += max(books.unsent(fragment).steps for fragment in range(len(books.fragments)))
        log.warning("%s. Going on from the agreed weights, version %d", agreed.refused, agreed.version)
        books.fragments[agreed.fragment].version = agreed.version
        self.hold(ticket, agreed, self._replica.adopt(agreed.update))
        self._replica.adopt_anchor()
        for fragment, progress in enumerate(books.fragments):
            progress.oldest_base = progress.version
            if fragment in books.flights:
                books.flights[fragment].overtaken = True
            else:
                progress.counted = books.work
        self._on_reload()
