"""When a fragment is due, and what happens then: delta, exchange, adopt.

This is the worker's half of one round, top to bottom. Everything in it runs in the training thread; what
travels, travels in the topology's threads. With a delay τ a fragment is sent after its step and taken over τ steps
later, several at a time if they overlap; with τ = 0 the worker waits where it is. One code path.

Several processes that train in step (a torchrun job) each run this same code: every decision follows from the step
counter and from what the topology says, never from this process's own clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..core.fragments import due_fragment, send_step
from ..errors import ExchangeFailed, Refused, RoundStuck, ServerError, ServerUnreachable
from ..topology import Agreed, Contribution, Joined, Sight, Topology
from ..types import Plan
from .deferring import deferred
from .progress import Flight, Metrics, Offline, Progress, Work, say_so
from .replica import Replica
from .saved import SavedFragment, SavedState, check_plan
from .signals import Interrupts, OutOfTime
from .watching import Watching

log = logging.getLogger(__name__)

LOOK_AROUND_S = 0.2  # how often a waiting worker checks whether another fragment's round waits for it
LOOKS_IN_A_CIRCLE = 50  # after so many in vain, what waits for us may wait in a circle
TRIES = 2
EXIT_TRIES = 8
REPAIRS = 3


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
        self._on_reload = on_reload
        self._worker_id = joined.worker_id
        self.plan: Plan = joined.plan
        self.metrics = Metrics()
        self.watching = Watching(saved.work.steps if saved is not None else joined.work[0])
        self.work = Work(*joined.work)
        self.fragments = [Progress(a.version, self.work, a.version) for a in joined.anchors]
        self.flights: dict[int, Flight] = {}
        self._left_open = 0  # exchanges since the server was last heard from
        self.assigned: int | None = None  # this worker's own H
        self.sync_every = self.plan.sync_every
        self.cycle_step = 0
        if saved is not None:
            self._go_on(saved, joined.overtaken)
            return
        for agreed in joined.anchors:
            self._hold(agreed, replica.adopt(agreed.news))
        self.cycle_step = self._position()

    # --- after a restart (saved.py) -------------------------------------------------------------------------------

    def _go_on(self, saved: SavedState, overtaken: frozenset[int]) -> None:
        check_plan(saved, self.plan)
        self.work, cycle = saved.work, saved.cycle
        self.cycle_step, self.sync_every, self.assigned = cycle.step, cycle.sync_every, cycle.assigned or None
        known = {name: value for name, value in saved.metrics.items() if name in Metrics.__dataclass_fields__}
        self.metrics = replace(self.metrics, **known)  # type: ignore[arg-type]
        self.fragments = [Progress(f.version, f.counted, f.oldest_base) for f in saved.fragments]
        self._replica.load_anchors(saved.anchors)
        behind = {i for i, fragment in enumerate(saved.fragments) if fragment.awaited is None} | overtaken
        for i in range(len(self.fragments)):
            if i in behind:
                self.flights[i] = Flight(self._topology.catch_up(i), self.work, self.work.steps, catches_up=True)
            else:
                self._go_on_with(i, saved.fragments[i])
        self.sync(sorted(behind), tries=1)
        # (The server may have been restarted meanwhile, and forgotten what overtook us.)
        dropped = {i for i in overtaken if self.fragments[i].counted == self.work}
        for i in sorted(behind - dropped):
            self._go_on_with(i, saved.fragments[i])
        if dropped:
            self._new_cycle()
            self.cycle_step = self._position()

    def _go_on_with(self, index: int, saved: SavedFragment) -> None:
        """Carry on with what was sent and is in no agreement that we hold, in the order in which it was."""
        flight, late, progress = saved.awaited, saved.late, self.fragments[index]
        if late is not None and late.counted_in > progress.version:
            progress.late, progress.late_in = self._topology.unpack(index, late.exchange, late=True), late.counted_in
        if flight is not None:
            ticket = self._topology.unpack(index, flight.exchange)
            if ticket is not None:
                self.flights[index] = Flight(ticket, flight.work, flight.land_at, flight.sent or None, flight.parked)

    def _catch_up(self, agreed: Agreed) -> bool:
        """What was agreed while this worker was away. Says whether the anchor is now the agreed one."""
        fragment, progress = agreed.fragment, self.fragments[agreed.fragment]
        held, unsent = progress.version, (self.work - progress.counted).steps
        if agreed.counted:
            log.warning(
                "fragment %d: the server has later steps of this worker than its saved state knows of; the state's %d "
                "unsent steps are among them and are dropped. Going on from version %d",
                fragment,
                unsent,
                agreed.version,
            )
            return self._begin_at(agreed)
        if not agreed.news.kinds:
            return self._replica.prove(agreed.news)
        if unsent and self._too_old(agreed):
            return self._discard(agreed)
        log.info("fragment %d: from version %d to %d, with %d unsent steps", fragment, held, agreed.version, unsent)
        intact = self._move_along(agreed)
        if not unsent:
            progress.oldest_base = agreed.version
        return intact

    # --- training -------------------------------------------------------------------------------------------------

    def count(self, *, samples: int, tokens: int) -> None:
        self.work += Work(0, samples, tokens)

    def assign(self, sync_every: int | None) -> None:
        """This worker's own H, from its next cycle on; None = the plan's."""
        self.assigned = sync_every

    def stepped(self) -> bool:
        """One optimizer step was taken. Lands what is to land, sends what is due; says whether it did either."""
        self.work += Work(steps=1)
        self.cycle_step += 1
        due = due_fragment(self.cycle_step, self.sync_every, len(self.fragments))
        if self.cycle_step >= self.sync_every:
            self._new_cycle()
        landing = [f for f, flight in self.flights.items() if not flight.parked and self.work.steps >= flight.land_at]
        if landing:
            self.sync(landing, tries=1, may_park=True)
        if due is not None:
            self._send(due)
        return bool(landing) or due is not None

    def sync_all(self) -> None:
        """Every fragment that holds unsent steps, now; a new cycle begins."""
        self._new_cycle()
        self.sync(self._unsent(), tries=TRIES)

    def finish(self, *, keep_local: bool, patience_s: float) -> None:
        """The end of training: contribute the remaining steps. What finds no round any more is counted as discarded. If
        there is no server any more, the model keeps this worker's own weights: they are all there is."""
        own = {name: p.detach().clone() for name, p in self._replica.tensors.items()} if keep_local else None
        gone = False
        self._ask_again_for_the_late()
        unsent = self._unsent()
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
        left = self._unsent()
        if left:
            self.metrics.steps_discarded += max((self.work - self.fragments[f].counted).steps for f in left)
        if own is not None:
            self._replica.restore(own)
        elif not gone:
            self._replica.adopt_anchor()  # whole, also where it was mixed with the local weights

    def _ask_again_for_the_late(self) -> None:
        """What counts in a round after the version we hold is worth having, where nothing more is to be sent anyway."""
        for fragment, progress in enumerate(self.fragments):
            if progress.late is not None and progress.counted.steps == self.work.steps:
                self.flights[fragment] = Flight(progress.late, self.work, self.work.steps)
                self.metrics.sync_count -= 1  # it was counted before

    def cancel(self) -> None:
        """Stop sending; nothing more will be adopted."""
        for flight in self.flights.values():
            flight.ticket.cancel()

    def _new_cycle(self) -> None:
        self.cycle_step = 0
        self.sync_every = self.assigned or self.plan.sync_every

    @property
    def _delay(self) -> int:
        """τ. A worker with few steps of its own must still land a fragment before it is sent again."""
        return min(self.plan.delay, self.sync_every - 1)

    def _send(self, fragment: int) -> None:
        if self._delay == 0:
            # Who missed the only fragment's round sends again at once; with several, the next slot comes soon enough.
            # What was left open is settled first, which is no try of this exchange.
            tries = (TRIES if len(self.fragments) == 1 else 1) + (fragment in self.flights)
            self.sync([fragment], tries=tries, may_park=True)
            return
        if fragment in self.flights:  # parked
            self.sync([fragment], tries=1, may_park=True)
        if fragment not in self.flights:
            self._take_off(fragment, None, land_at=self.work.steps + self._delay)

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
                sights = {f: self.flights[f].ticket.look(LOOK_AROUND_S / len(tries_left)) for f in tries_left}
                said = said or say_so(sights.values(), time.monotonic() - began_at)
                for fragment in [f for f, sight in sights.items() if sight.done]:
                    looks = 0
                    if self._land(fragment) or tries_left[fragment] == 1:
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
                    behind = self.fragments[fragment].version < version
                    if behind and fragment not in tries_left and not self._is_on_its_way(fragment, looks):
                        tries_left[fragment] = 1
                        self._take_off(fragment, stuck_after_s)

    def _is_on_its_way(self, fragment: int, looks: int) -> bool:
        """It was sent, and lands when its time comes, not before; unless its round closed without it, for then nothing
        of ours is in the one that waits. Nor is it if the agreement is here already: if we have stood still for long,
        somebody may wait there for what we send next, and we, directly or not, for that somebody."""
        flight = self.flights.get(fragment)
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
            self._leave_open(self.flights)
            raise
        finally:
            self.metrics.last_sync_s = time.monotonic() - began_at
            self.metrics.seconds_waiting += self.metrics.last_sync_s

    def _leave_open(self, fragments: Iterable[int]) -> None:
        """Training goes on without their agreements. (The weights are still those that were sent.)"""
        for fragment in fragments:
            flight = self.flights[fragment]
            flight.parked = True
            if flight.sent is None:
                flight.sent = self._replica.deltas(self.plan.fragments[fragment])

    def _nobody_answers(self, sights: Iterable[Sight]) -> bool:
        silent = all(not sight.done and sight.silent_s > self._offline.after_s for sight in sights)
        return silent and self._left_open < self._offline.exchanges

    def _park(self, fragments: Iterable[int]) -> None:
        self._left_open += 1
        self.metrics.offline_exchanges += 1
        self._leave_open(fragments)
        log.warning(
            "no answer from the server for %g s; training goes on without it (%d of at most %d exchanges left open)",
            self._offline.after_s,
            self._left_open,
            self._offline.exchanges,
        )

    # --- one exchange ---------------------------------------------------------------------------------------------

    def _take_off(self, fragment: int, stuck_after_s: float | None, land_at: int | None = None) -> None:
        """Send what is unsent; or carry on with what is under way already."""
        flight = self.flights.get(fragment)
        if flight is not None:
            if stuck_after_s is not None or (flight.ticket.look(0.0).done and flight.ticket.failed):
                flight.ticket = self._topology.resume(flight.ticket, stuck_after_s=stuck_after_s)
            return
        progress = self.fragments[fragment]
        unsent = self.work - progress.counted
        deltas, sent = self._replica.to_send(self.plan.fragments[fragment], keep=land_at is not None)
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
        self.flights[fragment] = Flight(ticket, self.work, self.work.steps if land_at is None else land_at, sent)

    def _land(self, fragment: int) -> bool:
        """Take an agreement over. False: some of our steps are not in it, and are kept for the next round."""
        flight = self.flights[fragment]
        try:
            agreed = self._topology.finish(flight.ticket, reload=True)
        except ExchangeFailed as failure:
            cause = failure.__cause__
            if isinstance(cause, Refused) and not isinstance(cause, ServerError):
                del self.flights[fragment]  # it never counted, and never will: nothing is in doubt
            raise
        self._left_open = 0
        self._note(agreed)
        for other in agreed.also:  # what is under way there stays right: a Δ is the same from whichever anchor
            with deferred():
                intact = self._move_along(other)
            self._hold(other, intact)
        progress = self.fragments[fragment]
        if agreed.refused:
            del self.flights[fragment]
            self._reload(agreed)
            return True
        with deferred():  # half taken over, steps that were sent would be sent again
            del self.flights[fragment]
            progress.late = flight.ticket if agreed.counted_in > agreed.version else None
            progress.late_in = agreed.counted_in
            intact = self._settle(flight, agreed)
        self._hold(agreed, intact)
        return progress.counted.steps == self.work.steps

    def _settle(self, flight: Flight, agreed: Agreed) -> bool:
        """Books and weights, both. Says whether the anchor is now the agreed one."""
        if flight.catches_up:
            return self._catch_up(agreed)
        if agreed.counted:
            return self._take_over(agreed.fragment, flight, agreed)
        self.metrics.missed_rounds += 1
        if self._too_old(agreed):
            return self._discard(agreed)
        unsent = (self.work - self.fragments[agreed.fragment].counted).steps
        log.warning("round %d closed without this worker; %d steps go into the next", agreed.version, unsent)
        return self._move_along(agreed)

    def _move_along(self, agreed: Agreed) -> bool:
        """It came about without us."""
        progress = self.fragments[agreed.fragment]
        progress.version = agreed.version
        progress.oldest_base = min(progress.oldest_base, agreed.version)
        return self._replica.rebase(agreed.news)

    def _take_over(self, fragment: int, flight: Flight, agreed: Agreed) -> bool:
        """What we sent is in the agreement (or in a round still open). The steps taken since then are kept, mixed or
        replaced, as the plan says; those taken while nobody answered are always kept."""
        progress = self.fragments[fragment]
        sent = (flight.work - progress.counted).steps
        progress.counted = flight.work
        progress.oldest_base = agreed.version
        self.metrics.sync_count += 1
        since = (self.work - flight.work).steps
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
            if self._too_old(agreed):
                return self._discard(agreed)
        progress.version = agreed.version
        if since and (self.plan.carry or flight.parked) and not flight.overtaken:
            assert flight.sent is not None
            intact = self._replica.carry(agreed.news, flight.sent)
        elif self.plan.alpha > 0.0:
            intact = self._replica.mix(agreed.news, self.plan.alpha)
        else:
            intact = self._replica.adopt(agreed.news)
            progress.counted = self.work
            self.metrics.steps_overwritten += since
        log.info(
            "fragment %d version %d: %s; %.1f MB up, %.1f MB down",
            fragment,
            agreed.version,
            ", ".join(p.worker_id for p in agreed.participants),
            agreed.bytes_sent / 1e6,
            agreed.bytes_received / 1e6,
        )
        return intact

    def _discard(self, agreed: Agreed) -> bool:
        """Our unsent steps are of an age at which they would do harm: start anew from what was agreed."""
        progress = self.fragments[agreed.fragment]
        unsent = (self.work - progress.counted).steps
        self.metrics.steps_discarded += unsent
        log.warning("%d local steps were older than max_staleness=%d and are lost", unsent, self.plan.max_staleness)
        return self._begin_at(agreed)

    def _begin_at(self, agreed: Agreed) -> bool:
        """What was agreed, and nothing of our own."""
        progress = self.fragments[agreed.fragment]
        progress.version = progress.oldest_base = agreed.version
        progress.counted = self.work
        return self._replica.adopt(agreed.news)

    def _reload(self, agreed: Agreed) -> None:
        """The server has no use for what we sent, and what is wrong with one fragment seldom stops there: give the
        local weights up, all of them, and go on from what was agreed."""
        self.metrics.reloads += 1
        self.metrics.steps_discarded += max((self.work - progress.counted).steps for progress in self.fragments)
        log.warning("%s. Going on from the agreed weights, version %d", agreed.refused, agreed.version)
        self.fragments[agreed.fragment].version = agreed.version
        self._hold(agreed, self._replica.adopt(agreed.news))
        self._replica.adopt_anchor()
        for fragment, progress in enumerate(self.fragments):
            progress.oldest_base = progress.version
            if fragment in self.flights:
                self.flights[fragment].overtaken = True
            else:
                progress.counted = self.work
        self._on_reload()

    def _hold(self, agreed: Agreed, intact: bool) -> None:
        """The anchor has moved. If that did not make it the agreed one, it is fetched whole, and we rebase on it."""
        for _ in range(REPAIRS):
            whole = self._topology.confirm(agreed, intact)
            if whole is None:
                return
            log.warning(
                "fragment %d: the anchor was not the one agreed on as version %d; it was fetched anew",
                agreed.fragment,
                agreed.version,
            )
            self.metrics.anchor_repairs += 1
            self._note(whole)
            progress = self.fragments[whole.fragment]
            with deferred():
                progress.version = whole.version
                if progress.counted.steps == self.work.steps:
                    progress.oldest_base = whole.version
                agreed, intact = whole, self._replica.rebase(whole.news)
        raise ExchangeFailed(f"fragment {agreed.fragment}: even whole, what the server sends has not the hash it names")

    def _note(self, agreed: Agreed) -> None:
        self.metrics.note(agreed)
        self.watching.adopted(agreed.fragment, agreed.watched, self.work.steps)
        if agreed.plan.revision != self.plan.revision:
            log.info("the plan changed: sync_every=%d, delay=%d", agreed.plan.sync_every, agreed.plan.delay)
            self.plan = agreed.plan
            if self.cycle_step == 0:
                self._new_cycle()

    def _too_old(self, agreed: Agreed) -> bool:
        age = agreed.version - self.fragments[agreed.fragment].oldest_base
        return agreed.too_old or age > self.plan.max_staleness

    def _unsent(self) -> list[int]:
        """Fragments with steps that no agreement holds, or with an exchange still open."""
        behind = {i for i, progress in enumerate(self.fragments) if progress.counted.steps < self.work.steps}
        return sorted(behind | set(self.flights))

    def _position(self) -> int:
        """Where in the cycle the others are: the fragment with the lowest version is the next to be sent."""
        versions = [progress.version for progress in self.fragments]
        return send_step(versions.index(min(versions)) - 1, self.plan.sync_every, len(versions))
