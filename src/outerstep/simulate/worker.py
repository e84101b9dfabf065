"""A simulated worker: trains in virtual time and drives the real exchange machine through the simulated network."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..coordination.exchange import Call, Exchange, Outcome, Patience, Session
from ..errors import Fenced, OuterstepError, Refused, RoundStuck, TransportError
from ..types import (
    PROTOCOL_VERSION,
    Answer,
    GetPartAnswer,
    Heartbeat,
    Join,
    Leave,
    Offer,
    Request,
)
from .agenda import Agenda
from .history import History, StepName
from .network import Network
from .scenario import Scenario
from .server import PART_BYTES, SimServer, contribution_part

CALL_TIMEOUT_S = 6.0
RESYNC_TRIES = 2
EXIT_TRIES = 8


@dataclass
class LocalFragment:
    """What a worker knows of one fragment: the version it holds, and its own steps that nobody has counted yet."""

    version: int
    sequence: int
    unsent: list[StepName]
    oldest_base: int


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
        self.discarded: list[StepName] = []
        self.abandoned: list[StepName] = []  # accepted, but this worker left before the round could close
        self.alive = True
        self.left = False
        self.leaving = False
        self.exchanges_done = 0  # counted in a round, or told to discard
        self._paused_until = 0.0
        self._scenario, self._agenda, self._network, self._server = scenario, agenda, network, server
        self._history, self._rng = history, rng
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
        self._finished: set[Exchange] = set()
        self._waiting: set[int] = set()
        self._then: Callable[[], None] = self._train
        self._begin(fragment=0, after=-1, on_outcome=self._joined)
        self._soon(scenario.heartbeat_every_s, self._heartbeat)

    # --- life -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.alive = False

    def pause(self, seconds: float) -> None:
        """SIGSTOP: time goes on without it; then it wakes up and carries on where it was."""
        self._paused_until = self._agenda.now + seconds

    def leave_when_done(self) -> None:
        self.leaving = True

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
            self.fragments.append(LocalFragment(state.version, state.last_sequence, [], state.version))
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
            self._contribute_rest()
            return
        self._soon(self._step_s, self._stepped)

    def _position(self) -> int:
        """Where in the cycle the others are: the fragment with the lowest version is the next to be sent."""
        versions = [fragment.version for fragment in self.fragments]
        return versions.index(min(versions)) * self._scenario.sync_every // self._scenario.fragments

    def _stepped(self) -> None:
        self.steps_taken += 1
        self._cycle_step += 1
        for fragment in self.fragments:
            fragment.unsent.append((self.worker_id, self.steps_taken))
        h, p = self._scenario.sync_every, self._scenario.fragments
        due = [f for f in range(p) if (f + 1) * h // p == self._cycle_step]
        if self._cycle_step == h:
            self._cycle_step = 0
        self._sync(due, self._train)

    def _sync(self, due: list[int], then: Callable[[], None]) -> None:
        """Contribute to the due fragments, and to whatever else waits for this worker meanwhile; then go on."""
        self._waiting = set(due)
        self._then = then
        if not due:
            then()
        for index in due:
            # Who missed the only fragment's round sends again at once; with several, its next slot comes soon enough.
            tries = EXIT_TRIES if self.leaving else RESYNC_TRIES if self._scenario.fragments == 1 else 1
            self._contribute(index, tries)

    def _synced(self, index: int) -> None:
        self._waiting.discard(index)
        if not self._waiting:
            self._then()

    def _also_wanted(self, exchange: Exchange) -> None:
        for index, version in sorted(exchange.wanted):
            if index not in self._waiting and self.fragments[index].version < version:
                self._waiting.add(index)
                self._contribute(index, 1)

    def _contribute_rest(self) -> None:
        self._sync([i for i, fragment in enumerate(self.fragments) if fragment.unsent], self._goodbye)

    def _contribute(self, index: int, tries: int) -> None:
        fragment = self.fragments[index]
        fragment.sequence += 1
        steps = list(fragment.unsent)
        offer = Offer(
            **self._session.head,
            fragment=index,
            sequence=fragment.sequence,
            base_version=fragment.version,
            oldest_base=fragment.oldest_base,
            steps=len(steps),
            codec="fp32",
            size_bytes=self._scenario.parts * PART_BYTES,
        )
        key = offer.key

        def agreed(outcome: Outcome) -> None:
            self._history.told(key, steps, counted=outcome.counted)
            if outcome.counted:
                fragment.unsent = []
                self.exchanges_done += 1
            self._adopt(fragment, outcome)  # not counted = a rebase: the unsent steps stay
            age = fragment.version - fragment.oldest_base
            if outcome.too_old or age > self._scenario.rules.max_staleness:
                self.discarded += fragment.unsent
                fragment.unsent, fragment.oldest_base = [], fragment.version
                self.exchanges_done += 1
            if tries > 1 and fragment.unsent:
                self._contribute(index, tries - 1)
            else:
                self._synced(index)

        self._begin(fragment=index, after=fragment.version, on_outcome=agreed, offer=offer, steps=steps)

    def _adopt(self, fragment: LocalFragment, outcome: Outcome) -> None:
        made = outcome.agreement
        self._history.adopted(self.worker_id, made.fragment, made.version, made.anchor_hash, fragment.version)
        fragment.version = made.version
        if not fragment.unsent:
            fragment.oldest_base = made.version

    def _goodbye(self) -> None:
        if not self.left:
            self.abandoned = [step for fragment in self.fragments for step in fragment.unsent]
            self._fire(Leave(**self._session.head, reason="done"), self._departed)
            self._soon(CALL_TIMEOUT_S, self._goodbye)

    def _departed(self, answer: Answer | Refused) -> None:
        self.left = True
        self.alive = False

    def _heartbeat(self) -> None:
        if self._session.answer is not None:
            self._fire(
                Heartbeat(**self._session.head, step=self.steps_taken, steps_per_second=1.0 / self._step_s),
                lambda answer: None,
            )
        self._soon(self._scenario.heartbeat_every_s, self._heartbeat)

    # --- driving the exchange machine -----------------------------------------------------------------------------

    def _begin(
        self,
        *,
        fragment: int,
        after: int,
        on_outcome: Callable[[Outcome], None],
        offer: Offer | None = None,
        steps: list[StepName] | None = None,
    ) -> None:
        body = steps or []
        hashes = tuple(contribution_part(offer.key, body, i) for i in range(self._scenario.parts)) if offer else ()
        exchange = Exchange(
            self._session,
            fragment=fragment,
            after=after,
            now=self._agenda.now,
            offer=offer,
            part_hashes=hashes,
            patience=Patience(
                longest_backoff_s=8.0,
                give_up_after_s=1e6,
                calls_in_flight=2,
                stuck_after_s=self._scenario.patient_exit_s if self.leaving else None,
                damaged_parts=1000,
            ),
            rng=self._rng,
        )
        self._drive(exchange, body, on_outcome)

    def _drive(self, exchange: Exchange, body: list[StepName], on_outcome: Callable[[Outcome], None]) -> None:
        if exchange in self._finished:
            return
        if exchange.done:
            self._finished.add(exchange)
            if exchange.outcome is not None:
                on_outcome(exchange.outcome)
            elif exchange.failure is not None:
                self._gave_up(exchange.failure)
            return
        self._also_wanted(exchange)
        now = self._agenda.now
        for call in exchange.calls(now):
            self._call(exchange, call, body, on_outcome)
        if exchange.wake_at > now:
            self._soon(exchange.wake_at - now, lambda: self._drive(exchange, body, on_outcome))

    def _gave_up(self, failure: OuterstepError) -> None:
        if isinstance(failure, Fenced):
            self.alive = False  # a newer start carries on
        elif isinstance(failure, RoundStuck):
            self._goodbye()
        else:
            self._history.violated(f"{self.worker_id} gave up: {type(failure).__name__}: {failure}")
            self.alive = False

    def _call(
        self, exchange: Exchange, call: Call, body: list[StepName], on_outcome: Callable[[Outcome], None]
    ) -> None:
        def answered(answer: Answer | Refused, damaged: bool) -> None:
            if isinstance(answer, Refused):
                exchange.failed(call, answer, self._agenda.now)
            else:
                received = None
                if isinstance(answer, GetPartAnswer):
                    received = "0" * 16 if damaged else answer.hash
                exchange.answered(call, answer, self._agenda.now, received_hash=received)
            self._drive(exchange, body, on_outcome)

        def timed_out() -> None:
            exchange.failed(call, TransportError("no answer"), self._agenda.now)
            self._drive(exchange, body, on_outcome)

        self._request(call.request, body, answered)
        self._soon(CALL_TIMEOUT_S, timed_out)

    def _fire(self, request: Request, on_answer: Callable[[Answer | Refused], None]) -> None:
        self._request(request, [], lambda answer, damaged: on_answer(answer))

    def _request(
        self, request: Request, body: list[StepName], on_answer: Callable[[Answer | Refused, bool], None]
    ) -> None:
        """There and back again, each way at the network's mercy."""

        def at_server(damaged: bool) -> None:
            answer = self._server.handle(request, body, damaged=damaged)

            def back(damaged_back: bool) -> None:
                self._soon(0.0, lambda: on_answer(answer, damaged_back))

            self._network.send("server", self._link, back)

        self._network.send(self._link, "server", at_server)
