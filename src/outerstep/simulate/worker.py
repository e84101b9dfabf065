"""A simulated worker: trains in virtual time and drives the real exchange machine through the simulated network."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..coordination.worker.exchange import Exchange, Outcome, Patience, Session
from ..coordination.worker.fetch import Held
from ..errors import Fenced, Kicked, OuterstepError, RoundStuck, UnknownWorker
from ..types import (
    PROTOCOL_VERSION,
    Answer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    LeaveAnswer,
    Offer,
)
from .agenda import Agenda
from .carrier import CALL_TIMEOUT_S, Carrier
from .history import History, StepName
from .network import Network
from .progress import LocalFragment, Sent, SimFlight
from .scenario import Scenario
from .server import PART_BYTES, SimServer, contribution_part

RESYNC_TRIES = 2
EXIT_TRIES = 8
CIRCLE_S = 10.0


class SimWorker:
    """One start of a worker process. A restart is a new object with the same id."""

    def __init__(
        self,
        index: int,
        instance: int,
        first_step: int,
        scenario: Scenario,
        agenda: Agenda,
        network: Network,
        server: SimServer,
        history: History,
        rng: random.Random,
    ) -> None:
        self.worker_id = f"w{index}"
        self.index = index
        self.first_step = first_step
        self.steps_taken = first_step
        self.fragments: list[LocalFragment] = []
        self.discarded: set[tuple[int, StepName]] = set()  # too old, or overwritten by a delayed agreement
        self.abandoned: set[tuple[int, StepName]] = set()  # accepted, but it left before the round could close
        self.alive = True
        self.left = False
        self.leaving = False
        self.exchanges_done = 0  # counted in a round, or told to discard
        self._paused_until = 0.0
        self._scenario, self._agenda, self._history, self._rng = scenario, agenda, history, rng
        self._step_s = scenario.step_s[index % len(scenario.step_s)]
        self._cycle_step = 0
        self._link = f"w{index}"
        self._session = Session(
            Join(
                protocol=PROTOCOL_VERSION,
                worker_id=self.worker_id,
                instance=f"instance-{index}-{instance}",
                hostname=self._link,
            )
        )
        self._carrier = Carrier(self._link, agenda, network, server, history, self._soon)
        self._flights: dict[int, SimFlight] = {}
        self._waiting: dict[int, int] = {}  # fragments that are waited for -> tries left
        self._then: Callable[[], None] = self._train
        self._standing_since = 0.0
        self._left_open = 0
        self._sync_every = scenario.sync_every
        self._assigned: int | None = None
        self._sync_now = False
        self._obeyed: set[int] = set()
        self._begin(fragment=0, after=-1, on_outcome=self._joined)
        self._soon(scenario.heartbeat_every_s, self._heartbeat)

    # --- life -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.alive = False

    def pause(self, seconds: float) -> None:
        """SIGSTOP: time goes on without it; then it wakes up and carries on where it was."""
        self._paused_until = self._agenda.now + seconds

    def leave_when_done(self) -> None:
        """From now on it does not wait for ever: what is under way is carried on with a limit, under the same key."""
        self.leaving = True
        for index, flight in list(self._flights.items()):
            if flight.outcome is None and flight.exchange is not None and flight.exchange.outbox.own is not None:
                self._carrier.drop(flight.exchange)
                earlier = self.fragments[index].unconfirmed
                if earlier is not None and earlier.key == flight.key:
                    earlier = None
                self._fly(index, flight, flight.exchange.outbox.own.offer, earlier)

    def _soon(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.alive:
                return
            if self._agenda.now < self._paused_until:
                self._agenda.at(self._paused_until, act)
                return
            action()

        self._agenda.after(delay_s, act)

    def _joined(self, outcome: Outcome) -> None:
        for i, state in enumerate(self._session.joined.fragments):
            self.fragments.append(LocalFragment(0, state.last_sequence, [], 0))
            if i == 0:
                self._adopt(self.fragments[0], outcome)
        self._fetch_rest(1)

    def _fetch_rest(self, index: int) -> None:
        if index == len(self.fragments):
            self._cycle_step = self._position()
            self._train()
            return

        def fetched(outcome: Outcome) -> None:
            self._adopt(self.fragments[index], outcome)
            self._fetch_rest(index + 1)

        self._begin(fragment=index, after=-1, on_outcome=fetched)

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self.leaving:
            self._wait_for([i for i in range(len(self.fragments)) if self._is_open(i)], EXIT_TRIES, self._goodbye)
            return
        if self._sync_now:
            self._sync_now = False
            self._new_cycle()
            self._wait_for([i for i in range(len(self.fragments)) if self._is_open(i)], RESYNC_TRIES, self._train)
            return
        self._soon(self._step_s, self._stepped)

    def _is_open(self, index: int) -> bool:
        """Is something of ours in no agreement that we hold?"""
        fragment = self.fragments[index]
        return bool(fragment.unsent) or index in self._flights or (self.leaving and fragment.unconfirmed is not None)

    def _position(self) -> int:
        """Where in the cycle the others are: the fragment with the lowest version is the next to be sent."""
        versions = [fragment.version for fragment in self.fragments]
        return versions.index(min(versions)) * self._scenario.sync_every // self._scenario.fragments

    def _new_cycle(self) -> None:
        self._cycle_step = 0
        self._sync_every = self._assigned or self._session.joined.plan.sync_every

    def _stepped(self) -> None:
        self.steps_taken += 1
        self._cycle_step += 1
        for fragment in self.fragments:
            fragment.unsent.append((self.worker_id, self.steps_taken))
        h, p = self._sync_every, self._scenario.fragments
        due = next((f for f in range(p) if (f + 1) * h // p == self._cycle_step), None)
        if self._cycle_step >= h:
            self._new_cycle()
        landing = [f for f, flight in self._flights.items() if not flight.parked and flight.land_at <= self.steps_taken]
        self._wait_for(landing, 1, lambda: self._send(due))

    def _send(self, due: int | None) -> None:
        """A fragment's step has come. With a delay its agreement is taken over later; without, now."""
        delay = min(self._scenario.delay, self._sync_every - 1)
        if due is None:
            self._train()
        elif delay == 0:
            # Who missed the only fragment's round sends again at once; with several, its next slot comes soon enough.
            self._wait_for([due], RESYNC_TRIES if self._scenario.fragments == 1 else 1, self._train)
        elif due in self._flights:  # parked
            self._wait_for([due], 1, lambda: self._take_off_and_train(due, delay))
        else:
            self._take_off_and_train(due, delay)

    def _take_off_and_train(self, index: int, delay: int) -> None:
        if index not in self._flights:
            self._take_off(index, land_at=self.steps_taken + delay)
        self._train()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait_for(self, due: list[int], tries: int, then: Callable[[], None]) -> None:
        """Contribute to the due fragments, and to whatever else waits for this worker meanwhile; then go on."""
        self._waiting = dict.fromkeys(due, tries)
        self._standing_since = self._agenda.now
        self._then = then
        for index in due:
            self._take_off(index, land_at=self.steps_taken)
        self._look()
        if self._waiting:
            self._watch_silence(self._waiting)

    def _look(self) -> None:
        """Land what has arrived; when nothing is left to wait for, go on (once)."""
        for index in list(self._waiting):
            flight = self._flights.get(index)
            if flight is None or flight.outcome is None:
                continue
            landed = self._land(index, flight, flight.outcome)
            self._standing_since = self._agenda.now
            if landed or self._waiting[index] == 1:
                del self._waiting[index]
            else:
                self._waiting[index] -= 1
                self._take_off(index, land_at=self.steps_taken)
        if not self._waiting:
            then, self._then = self._then, _nothing
            then()

    def _watch_silence(self, waiting: dict[int, int]) -> None:
        """If nobody answers for too long, train on and leave the exchanges open."""
        if self._waiting is not waiting or not waiting or self.leaving:
            return
        now, limit_s = self._agenda.now, self._scenario.offline_after_s
        exchanges = [self._flights[i].exchange for i in waiting if i in self._flights]
        silent = all(exchange is not None and exchange.silent_s(now) > limit_s for exchange in exchanges)
        if exchanges and silent and self._left_open < self._scenario.offline_exchanges:
            self._left_open += 1
            self._history.faults["parked"] += 1
            for index in waiting:
                self._flights[index].parked = True
            waiting.clear()
            self._look()
            return
        self._soon(1.0, lambda: self._watch_silence(waiting))

    def _also_wanted(self, exchange: Exchange) -> None:
        """Who stands still contributes to the rounds that wait for it, so that nobody waits in a circle."""
        if not self._waiting:
            return
        for index, version in sorted(exchange.wanted):
            behind = self.fragments[index].version < version
            if behind and index not in self._waiting and not self._is_on_its_way(index):
                self._waiting[index] = 1
                self._take_off(index, land_at=self.steps_taken)
                if self._flights[index].outcome is not None:
                    self._soon(0.0, self._look)

    def _is_on_its_way(self, index: int) -> bool:
        """Sent, and to land when its time comes; unless its round closed without it, or we may stand in a circle."""
        flight = self._flights.get(index)
        if flight is None or flight.parked:
            return False
        if flight.outcome is None:
            return True
        return flight.outcome.counted and self._agenda.now - self._standing_since < CIRCLE_S

    # --- one exchange -----------------------------------------------------------------------------------------------

    def _take_off(self, index: int, *, land_at: int) -> None:
        if index in self._flights:
            return
        fragment = self.fragments[index]
        late = fragment.unconfirmed
        if self.leaving and late is not None and not fragment.unsent:
            # Nothing more is to be sent: stay for the agreement that holds it.
            self._send_off(index, late.sending.offer, late.steps, land_at)
            return
        fragment.sequence = max(fragment.sequence, self._session.joined.fragments[index].last_sequence) + 1
        offer = Offer(
            **self._session.head,
            fragment=index,
            sequence=fragment.sequence,
            base_version=fragment.version,
            oldest_base=fragment.oldest_base,
            steps=len(fragment.unsent),
            codec="fp32",
            size_bytes=self._scenario.parts * PART_BYTES,
        )
        self._send_off(index, offer, list(fragment.unsent), land_at, late)

    def _send_off(
        self, index: int, offer: Offer, steps: list[StepName], land_at: int, earlier: Sent | None = None
    ) -> None:
        flight = self._flights[index] = SimFlight(offer.key, steps, land_at)
        self._fly(index, flight, offer, earlier)

    def _fly(self, index: int, flight: SimFlight, offer: Offer, earlier: Sent | None) -> None:
        def arrived(outcome: Outcome) -> None:
            flight.outcome = outcome
            if index in self._waiting:
                self._look()

        flight.exchange = self._begin(
            fragment=index,
            after=self.fragments[index].version,
            on_outcome=arrived,
            offer=offer,
            steps=flight.steps,
            earlier=earlier,
        )

    def _land(self, index: int, flight: SimFlight, outcome: Outcome) -> bool:
        """True: no step of ours is left unsent."""
        del self._flights[index]
        self._left_open = 0
        fragment = self.fragments[index]
        self._settle(index, flight, outcome)
        if outcome.counted:
            sent = set(flight.steps)
            fragment.unsent = [step for step in fragment.unsent if step not in sent]
            self.exchanges_done += 1
            if fragment.unsent and not self._scenario.carry and not flight.parked:
                self._discard(index)  # the delayed agreement overwrites what was done meanwhile
            # What was done while the exchange was left open was done on the version held all the while.
            held = fragment.version if flight.parked and fragment.unsent else outcome.agreement.version
            fragment.oldest_base = held
        self._adopt(fragment, outcome)  # not counted = a rebase: the unsent steps stay
        fragment.oldest_base = min(fragment.oldest_base, fragment.version)  # a resumed server may be behind us
        age = fragment.version - fragment.oldest_base
        if outcome.too_old or age > self._scenario.rules.max_staleness:
            self._discard(index)
            fragment.oldest_base = fragment.version
            self.exchanges_done += 1
        return not fragment.unsent

    def _settle(self, index: int, flight: SimFlight, outcome: Outcome) -> None:
        """What is known for good now: of the contribution before, and of this one unless it is late."""
        fragment, exchange = self.fragments[index], flight.exchange
        earlier, fragment.unconfirmed = fragment.unconfirmed, None
        if earlier is not None and earlier.key != flight.key:
            self._history.told(earlier.key, earlier.steps, counted=not outcome.earlier_lost)
            if outcome.earlier_lost:
                self.discarded |= {(index, step) for step in earlier.steps}
                self._history.faults["lost_late"] += 1
        if outcome.counted_in > outcome.agreement.version:
            assert exchange is not None
            assert exchange.outbox.own is not None
            self._keep(fragment, Sent(exchange.outbox.own, flight.steps))
        else:
            self._history.told(flight.key, flight.steps, counted=outcome.counted)
            if earlier is not None and earlier.key == flight.key and not outcome.counted:
                self.discarded |= {(index, step) for step in flight.steps}

    def _keep(self, fragment: LocalFragment, late: Sent) -> None:
        """Until it is confirmed: a server that is restarted has forgotten it."""
        self._history.faults["late"] += 1
        fragment.unconfirmed = late

    def _discard(self, index: int) -> None:
        self.discarded |= {(index, step) for step in self.fragments[index].unsent}
        self.fragments[index].unsent = []

    def _adopt(self, fragment: LocalFragment, outcome: Outcome) -> None:
        made = outcome.agreement
        sent = [(payload.kind, payload.version) for payload in made.payloads]
        missed = [("update", v) for v in range(fragment.held.version + 1, made.version + 1)] if fragment.held else None
        if sent not in ([("full", made.version)], missed):
            self._history.violated(f"{self.worker_id} at {fragment.held} was sent {sent} for version {made.version}")
        fragment.held = Held(made.version, made.anchor_hash)
        self._history.adopted(self.worker_id, made.fragment, made.version, made.anchor_hash, fragment.version)
        fragment.version = made.version
        if not fragment.unsent:
            fragment.oldest_base = made.version

    def _goodbye(self) -> None:
        if not self.left:
            for i, fragment in enumerate(self.fragments):
                late = fragment.unconfirmed.steps if fragment.unconfirmed is not None else []
                self.abandoned |= {(i, step) for step in (*fragment.unsent, *late)}
            self._carrier.fire(Leave(**self._session.head, reason="done"), self._departed)
            self._soon(CALL_TIMEOUT_S, self._goodbye)

    def _departed(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, LeaveAnswer | Fenced | Kicked):
            self.left = True
            self.alive = False

    def _heartbeat(self) -> None:
        if self._session.answer is not None:
            acknowledged = tuple(sorted(self._obeyed))
            self._carrier.fire(
                Heartbeat(
                    **self._session.head,
                    step=self.steps_taken,
                    steps_per_second=1.0 / self._step_s,
                    acknowledged=acknowledged,
                ),
                lambda answer: self._ordered(answer, acknowledged),
            )
        self._soon(self._scenario.heartbeat_every_s, self._heartbeat)

    def _ordered(self, answer: Answer | OuterstepError, acknowledged: tuple[int, ...]) -> None:
        if isinstance(answer, UnknownWorker) and not self.leaving:
            self._carrier.fire(self._session.join_request, self._rejoined)
        if not isinstance(answer, HeartbeatAnswer):
            return
        self._assigned = answer.sync_every
        self._obeyed -= set(acknowledged)
        for command in answer.commands:
            if command.kind == "drain":
                self.leaving = True
            elif command.id not in self._obeyed:
                self._sync_now = True
            self._obeyed.add(command.id)

    def _rejoined(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, JoinAnswer):
            self._session.answer = answer

    # --- the exchange machine -------------------------------------------------------------------------------------

    def _begin(
        self,
        *,
        fragment: int,
        after: int,
        on_outcome: Callable[[Outcome], None],
        offer: Offer | None = None,
        steps: list[StepName] | None = None,
        earlier: Sent | None = None,
    ) -> Exchange:
        bodies: dict[int, list[StepName]] = {}
        hashes: tuple[str, ...] = ()
        if offer is not None:
            bodies[offer.sequence] = steps or []
            hashes = tuple(contribution_part(offer.key, steps or [], i) for i in range(self._scenario.parts))
        if earlier is not None:
            bodies[earlier.key.sequence] = earlier.steps
        exchange = Exchange(
            self._session,
            fragment=fragment,
            after=after,
            now=self._agenda.now,
            offer=offer,
            part_hashes=hashes,
            earlier=earlier.sending if earlier is not None else None,
            held=self.fragments[fragment].held if self.fragments else None,
            patience=Patience(
                longest_backoff_s=8.0,
                give_up_after_s=1e6,
                calls_in_flight=2,
                stuck_after_s=self._scenario.patient_exit_s if self.leaving else None,
                stay_for_own_round=self.leaving,
                damaged_parts=1000,
            ),
            rng=self._rng,
        )
        self._carrier.carry(
            exchange, bodies, on_outcome=on_outcome, on_failure=self._gave_up, meanwhile=self._also_wanted
        )
        return exchange

    def _gave_up(self, failure: OuterstepError) -> None:
        if isinstance(failure, Fenced | Kicked):
            self.alive = False  # a newer start carries on
        elif isinstance(failure, RoundStuck):
            self._goodbye()
        else:
            self._history.violated(f"{self.worker_id} gave up: {type(failure).__name__}: {failure}")
            self.alive = False


def _nothing() -> None:
    """There is nothing to go on with: somebody else has."""
