"""A simulated worker: the real worker machine and the real exchange machine, in virtual time.

Its weights are sets of steps. What the machine asks for is carried out on those, as worker/sync.py does it on tensors;
what a server topology does for a real worker (sequences, late contributions, catching up) is done here too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET

from ..coordination.worker.effects import (
    Adopt,
    Carry,
    CatchUp,
    Depart,
    Effect,
    Finish,
    Keep,
    Mix,
    Move,
    Note,
    Prove,
    PutOff,
    Rebase,
    Recall,
    Reload,
    Reopen,
    Resume,
    Send,
    Sight,
    StartOver,
)
from ..coordination.worker.exchange import Exchange, Held, OrderInbox, Outcome, Patience, Sending, Session, Share
from ..coordination.worker.machine import LOOK_EVERY_S, Metrics, Offline, WorkerMachine, WorkerState
from ..digest import part_hash
from ..errors import Fenced, Kicked, OuterstepError, UnknownWorker
from ..types import (
    PROTOCOL_VERSION,
    Agreement,
    Answer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    LeaveAnswer,
    Offer,
    Participant,
    Plan,
    Trained,
)
from .agenda import Agenda
from .carrier import CALL_TIMEOUT_S, SimCarrier
from .history import History, StepName
from .network import Network
from .scenario import Scenario
from .server import PART_BYTES, SimServer

HEAR = Share(1, range(0), speaks=True)  # of an agreement, and fetch nothing


@dataclass
class SimSent:
    """A contribution, and the steps in it."""

    sending: Sending
    steps: list[StepName]
    deferred: bool = False
    reopened: bool = False
    overtaken: bool = False  # the local weights were given up after it was sent

    @property
    def offer(self) -> Offer:
        return self.sending.offer


@dataclass(frozen=True)
class SimResult:
    """What an exchange came to, as the machine is told (`coordination.worker.effects.Result`)."""

    fragment: int
    version: int
    counted: bool
    counted_in: int
    too_old: bool
    unchanged: bool
    above: tuple[int, ...]
    steps_lost: int
    participants: tuple[Participant, ...]
    plan: Plan
    refused: str = ""
    also: Sequence[SimResult] = ()


@dataclass
class SimFragment:
    """`unsent`: the steps that are in the local weights and not in the anchor, with the version that each was taken on.
    `in_flight`, `late`: as the machine has them; `exchange` is the one under way, `result` the last one's."""

    sequence: int = 0
    held: Held | None = None
    unsent: dict[StepName, int] = field(default_factory=dict)
    in_flight: SimSent | None = None
    late: SimSent | None = None
    exchange: Exchange | None = None
    result: SimResult | None = None


@dataclass
class SimSaved:
    """A worker's state as it is on its disk."""

    run_id: str
    state: WorkerState
    fragments: list[SimFragment]
    data: dict[str, Any] = field(default_factory=dict)  # data.py


class SimWorker:
    """One start of a worker process. A restart is a new object with the same id; with `saved` it resumes from there."""

    machine_type: type[WorkerMachine] = WorkerMachine

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
        saved: SimSaved | None = None,
        *,
        name: str = "",
        link: str = "",
    ) -> None:
        """`name`, `link`: its own, and of its way to the server; "" = by its index."""
        self.worker_id = name or f"w{index}"
        self.index = index
        self.first_step = self.steps_taken = first_step
        self.fragments = [SimFragment() for _ in range(scenario.fragments)]
        self.own: set[tuple[int, StepName]] = set()  # whose steps they are to account for: this process's
        self.discarded: set[tuple[int, StepName]] = set()  # too old, or overwritten by a delayed agreement
        self.abandoned: set[tuple[int, StepName]] = set()  # accepted, but it left before the round could close
        self.alive = True
        self.left = False
        self.exchanges_done = 0  # counted in a round, or told to discard
        self.saved = saved  # on its disk
        self._saved = saved
        self._paused_until = 0.0
        self._scenario, self._agenda, self._history, self._rng = scenario, agenda, history, rng
        self._step_s = scenario.step_s[index % len(scenario.step_s)]
        self._link = link or self.worker_id
        self._session = Session(
            Join(
                protocol=PROTOCOL_VERSION,
                worker_id=self.worker_id,
                instance=f"instance-{index}-{instance}",
                hostname=self.worker_id,
                run_id=saved.run_id if saved is not None else None,
                continues=saved is not None,
            )
        )
        self._begin_data()
        self._carrier = SimCarrier(self._link, agenda, network, server, history, self._soon)
        self._machine: WorkerMachine | None = None
        self._looks = 0
        self._asked_to_leave = self._is_training = self._is_changed = False
        self._inbox = OrderInbox()
        self._drain = self._may_abandon = False
        self._told = 0  # how many steps the machine said that it gave up
        if saved is None:
            self._fetch(0)
        else:
            self._ask(0, after=-1, share=HEAR, joined=lambda: self._resume(saved))
        self._soon(scenario.heartbeat_every_s, self._heartbeat)

    def _begin_data(self) -> None:
        """It has none (data.py)."""

    # --- life -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.alive = False

    def pause(self, seconds: float) -> None:
        """SIGSTOP: time goes on without it; then it wakes up and carries on where it was."""
        self._paused_until = self._agenda.now + seconds

    def load(self) -> None:
        """Other weights, which are in the model until its worker starts over."""
        self._is_changed = True

    def leave_when_done(self) -> None:
        """As a signal asks for it."""
        self._asked_to_leave = True

    def _soon(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.alive:
                return
            if self._agenda.now < self._paused_until:
                self._agenda.at(self._paused_until, act)
                return
            action()

        self._agenda.after(delay_s, act)

    @property
    def machine(self) -> WorkerMachine:
        assert self._machine is not None, "not joined yet"
        return self._machine

    def _make_machine(self) -> WorkerMachine:
        offline = Offline(self._scenario.offline_after_s, self._scenario.offline_exchanges)
        self._machine = self.machine_type(self.worker_id, self._session.joined.plan, offline=offline)
        return self._machine

    def _fetch(self, index: int) -> None:
        """The newest anchors, one after the other; then it begins."""
        if index < len(self.fragments):
            self._ask(index, after=-1, joined=lambda: self._fetch(index + 1))
            return
        for fragment, state in zip(self.fragments, self._session.joined.fragments, strict=True):
            fragment.sequence = state.last_sequence
        self._drive(lambda: self._make_machine().joined([self._finish(i) for i in range(len(self.fragments))]))

    def _resume(self, saved: SimSaved) -> None:
        last = [state.last_sequence for state in self._session.joined.fragments]
        overtaken = [i for i, fragment in enumerate(saved.fragments) if last[i] > fragment.sequence]
        self._history.faults["resumed"] += 1
        self._history.faults["overtaken"] += bool(overtaken)
        for i, fragment in enumerate(saved.fragments):
            self.fragments[i] = SimFragment(max(fragment.sequence, last[i]), fragment.held, dict(fragment.unsent))
            self.own |= {(i, step) for step in fragment.unsent}
        sent = [
            each for fragment in saved.fragments for each in (fragment.in_flight, fragment.late) if each is not None
        ]
        sequences = [fragment.sequence for fragment in self.fragments]
        self._history.resumed(self.worker_id, sequences, [each.offer.key for each in sent])
        late = [(i, fragment.late) for i, fragment in enumerate(saved.fragments) if fragment.late is not None]
        forgotten = [i for i, sent in late if last[i] < sent.offer.sequence]
        self._history.faults["forgotten"] += bool(forgotten)
        self._drive(lambda: self._make_machine().resumed(saved.state, overtaken, forgotten))

    def _save(self) -> None:
        """Between two steps."""
        fragments = [dataclasses.replace(fragment, exchange=None, result=None) for fragment in self.fragments]
        self.saved = deepcopy(SimSaved(self._session.joined.run_id, self.machine.state, fragments))

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """After a step: obey, then take the next."""
        machine, orders = self.machine, self._inbox.take()
        self._is_training = True  # from here on it hears signals
        machine.state.cycle.assigned = orders.sync_every
        self._drain = self._drain or bool(orders.drain)
        if self._is_leaving:
            self._drive(partial(machine.finish, changed=self._take_change()))
        elif orders.sync:
            self._drive(partial(machine.sync_all, changed=self._take_change()))
        else:
            every = self._scenario.save_every
            if every and (machine.state.work.steps % every) == 0:
                self._save()
            self._soon(self._step_s, self._step)

    def _step(self) -> None:
        self.steps_taken += 1
        for i, fragment in enumerate(self.fragments):
            assert fragment.held is not None
            fragment.unsent[self.worker_id, self.steps_taken] = fragment.held.version
            self.own.add((i, (self.worker_id, self.steps_taken)))
        self._drive(partial(self.machine.stepped, changed=self._take_change()))

    def _take_change(self) -> bool:
        changed, self._is_changed = self._is_changed, False
        return changed

    def _drive(self, event: Callable[[], list[Effect]]) -> None:
        """An event, what comes of it, and what comes after that."""
        try:
            self._do(event())
        except OuterstepError as error:
            effects = self.machine.interrupted(error)
            self._do(effects)
            if not any(isinstance(effect, Depart) for effect in effects):
                self._die(error)
        if not self.alive or self.machine.has_left:
            return
        self._looks += 1
        if self.machine.waiting:
            number = self._looks
            self._soon(LOOK_EVERY_S, lambda: self._look(number))
        else:
            self._check_weights()
            self._train()

    def _look(self, number: int) -> None:
        """While it waits; once for each number."""
        if number != self._looks or not self.machine.waiting:
            return
        sights = {i: self._sight(i) for i in self.machine.in_sight}
        asked = self._asked_to_leave and self._is_training
        self._drive(lambda: self.machine.looked(sights, asked_to_leave=asked))

    def _sight(self, index: int) -> Sight:
        exchange = self.fragments[index].exchange
        assert exchange is not None
        return Sight(
            done=exchange.done,
            wanted=exchange.wanted,
            silent_s=exchange.silent_s(self._agenda.now),
            missed=exchange.outcome is not None and not exchange.outcome.counted,
            failed=exchange.failure is not None,
        )

    def _arrived(self, index: int, exchange: Exchange, joined: Callable[[], None] | None) -> None:
        """An exchange is over: a worker that waits for it looks now."""
        failure = exchange.failure
        if failure is not None and (joined is not None or isinstance(failure, Fenced | Kicked)):
            self._die(failure)
        elif joined is not None:
            joined()
        elif index in self.machine.waiting:
            self._look(self._looks)

    def _die(self, error: OuterstepError) -> None:
        self.alive = False
        if not isinstance(error, Fenced | Kicked):  # then a newer start carries on
            self._history.violated(f"{self.worker_id} gave up: {type(error).__name__}: {error}")

    # --- what the machine asks for --------------------------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Resume(index, last):
                    if self.fragments[index].in_flight is not None:
                        self._again(index, last=last)
                    else:
                        self._catch_up(index)
                case Finish(index):
                    self._do(self.machine.outcome(self._finish(index)))
                case Adopt() | Rebase() | Carry() | Mix() | Prove():
                    self._move(effect)
                    self._do(self.machine.confirmed(effect.fragment, None))
                case Reload() | StartOver():
                    self._start_over()
                case Recall(index):
                    self.fragments[index].in_flight = self.fragments[index].late
                case CatchUp(index):
                    self._catch_up(index)
                case Reopen(index, late):
                    self._reopen(index, late=late)
                case PutOff(index):
                    self._history.faults["late"] += 1
                case Keep():
                    self._history.faults["deferred"] += 1
                case Depart(weights):
                    self._keep_weights(weights)
                    self._goodbye()
                case Note(kind):
                    self.exchanges_done += kind in ("agreed", "discarded")
                    self._may_abandon = self._may_abandon or kind == "stuck"
                    self._history.say(f"{self.worker_id}: {effect}")

    def _move(self, move: Move) -> None:
        """Of the local weights and the anchor, here sets of steps. What is lost must be said to be."""
        fragment = self.fragments[move.fragment]
        result, sent = fragment.result, fragment.in_flight
        assert result is not None
        overtaken = sent if isinstance(move, Rebase) and sent is not None and sent.overtaken else None
        if overtaken is not None and not result.counted:
            self._give_up({move.fragment: set(overtaken.steps)})
        if (isinstance(move, Adopt | Carry | Mix) or overtaken) and result.counted:
            if sent is None:  # a saved state was overtaken: its steps are in the model, or lost to another start
                self.discarded |= {(move.fragment, step) for step in fragment.unsent}
            counted = set(sent.steps if sent is not None else fragment.unsent)
            fragment.unsent = {step: on for step, on in fragment.unsent.items() if step not in counted}
        if isinstance(move, Adopt):
            self._give_up({move.fragment: set(fragment.unsent)})
        carried = (isinstance(move, Carry | Mix) or overtaken) and not (sent is not None and sent.deferred)
        for step, on in fragment.unsent.items():
            fragment.unsent[step] = result.version if carried else min(on, result.version)
        if self.machine.state.fragments[move.fragment].in_flight is None:
            fragment.in_flight = fragment.exchange = None

    def _start_over(self) -> None:
        """What is in flight was sent all the same; it is not in the weights any more."""
        unsent = {i: set(fragment.unsent) for i, fragment in enumerate(self.fragments)}
        for i, fragment in enumerate(self.fragments):
            if fragment.in_flight is not None:
                fragment.in_flight.overtaken = True
                unsent[i] -= set(fragment.in_flight.steps)
        self._give_up(unsent)

    def _give_up(self, gone: Mapping[int, set[StepName]]) -> None:
        """By fragment. A step that several of them lose is said to be lost once."""
        metrics = self.machine.state.metrics
        told, self._told = self._told, metrics.steps_discarded + metrics.steps_overwritten
        for index, steps in gone.items():
            if self._told - told >= len(steps):
                self.discarded |= {(index, step) for step in steps}
            fragment = self.fragments[index]
            fragment.unsent = {step: on for step, on in fragment.unsent.items() if step not in steps}

    def _check_weights(self) -> None:
        """State and weights change together: what the machine believes to be unsent is what the weights hold."""
        for i, fragment in enumerate(self.fragments):
            if self.machine.unsent(i).steps != len(fragment.unsent):
                self._history.violated(
                    f"{self.worker_id} holds {len(fragment.unsent)} unsent steps of fragment {i}, and believes "
                    f"in {self.machine.unsent(i).steps}"
                )

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        fragment = self.fragments[send.fragment]
        fragment.sequence = self._session.next_sequence(send.fragment, fragment.sequence)
        offer = Offer(
            **self._session.head,
            fragment=send.fragment,
            sequence=fragment.sequence,
            base_version=send.base_version,
            oldest_base=send.oldest_base,
            steps=send.steps,
            codec=self.machine.plan.codec,
            size_bytes=self._scenario.parts * PART_BYTES,
            tokens=send.steps,
            data=self._describe(send) or UNSET,
        )
        steps = list(fragment.unsent)
        hashes = (part_hash(f"{offer.key} {steps} {i}".encode()) for i in range(self._scenario.parts))
        oldest = min(fragment.unsent.values(), default=send.oldest_base)
        if send.oldest_base > oldest:
            self._history.violated(
                f"{self.worker_id} calls its oldest step of fragment {send.fragment} younger than it is: taken on "
                f"version {send.oldest_base}, where it was {oldest}"
            )
        fragment.in_flight = SimSent(Sending(offer, dict(enumerate(hashes))), steps)
        self._ready(send.fragment, last=send.last)

    def _describe(self, send: Send) -> tuple[Trained, ...]:
        """Its units of data (data.py)."""
        return ()

    def _ready(self, index: int, *, last: bool) -> None:
        """What is in flight may be offered."""
        self._again(index, last=last)

    def _again(self, index: int, *, last: bool = False) -> None:
        """Carry what is in flight, from the beginning, under the same key."""
        fragment = self.fragments[index]
        sent, late = fragment.in_flight, fragment.late
        assert sent is not None
        if fragment.exchange is not None:
            self._carrier.drop(fragment.exchange)
        earlier = late if late is not None and late.offer.key != sent.offer.key else None
        bodies = {one.offer.sequence: one.steps for one in (earlier, sent) if one is not None}
        exchange = self._ask(index, after=sent.offer.base_version, sent=sent, earlier=earlier, last=last, bodies=bodies)
        assert exchange.outbox.own is not None
        sent.sending = exchange.outbox.own

    def _catch_up(self, index: int) -> None:
        assert self._saved is not None
        last_sequence = self._session.joined.fragments[index].last_sequence
        overtaken = last_sequence > self._saved.fragments[index].sequence
        claim, after = self._session.catching_up(index, overtaken=overtaken)
        self._ask(index, after=after, claim=claim)

    def _reopen(self, index: int, *, late: bool) -> None:
        assert self._saved is not None
        saved, fragment = deepcopy(self._saved.fragments[index]), self.fragments[index]
        if late:
            assert saved.late is not None
            fragment.late = dataclasses.replace(saved.late, reopened=True)
        else:
            fragment.in_flight = saved.in_flight
            self._again(index)

    def _ask(
        self,
        index: int,
        *,
        after: int,
        sent: SimSent | None = None,
        earlier: SimSent | None = None,
        last: bool = False,
        bodies: dict[int, list[StepName]] | None = None,
        claim: int | None = None,
        share: Share | None = None,
        joined: Callable[[], None] | None = None,
    ) -> Exchange:
        exchange = Exchange(
            self._session,
            fragment=index,
            after=after,
            now=self._agenda.now,
            offer=sent.offer if sent is not None else None,
            part_hashes=tuple(sent.sending.part_hashes.values()) if sent is not None else (),
            earlier=earlier.sending if earlier is not None else None,
            held=self.fragments[index].held,
            claim=claim,
            share=share,
            patience=Patience(
                longest_backoff_s=8.0,
                give_up_after_s=1e6,
                calls_in_flight=2,
                stuck_after_s=self._scenario.patient_exit_s if last else None,
                stay_for_own_round=last,
                damaged_parts=1000,
            ),
            rng=self._rng,
        )
        self.fragments[index].exchange = exchange
        self._carrier.carry(exchange, bodies or {}, lambda: self._arrived(index, exchange, joined))
        return exchange

    def _finish(self, index: int) -> SimResult:
        """What the exchange came to; what went wrong is raised."""
        fragment = self.fragments[index]
        exchange, sent = fragment.exchange, fragment.in_flight
        assert exchange is not None
        outcome = exchange.outcome
        if outcome is None:
            assert exchange.failure is not None
            self.machine.failed(index, exchange.failure)
            raise exchange.failure
        made, lost = outcome.agreement, list[StepName]()
        if sent is not None:
            lost = self._settle(fragment, sent, outcome)
            self.discarded |= {(index, step) for step in lost}
        self._check_update(fragment, made)
        before = fragment.held.version if fragment.held is not None else 0
        self._history.adopted(self.worker_id, index, made.version, made.anchor_hash, before)
        fragment.held = Held(made.version, made.anchor_hash)
        flight = self._machine.in_flight.get(index) if self._machine is not None else None
        if sent is not None and flight is not None:
            sent.deferred = flight.deferred
        metrics = self._machine.state.metrics if self._machine is not None else Metrics()
        self._told = metrics.steps_discarded + metrics.steps_overwritten + len(lost)
        fragment.result = SimResult(
            fragment=index,
            version=made.version,
            counted=outcome.counted,
            counted_in=outcome.counted_in,
            too_old=outcome.too_old,
            unchanged=not made.payloads,
            above=made.above or (),
            steps_lost=len(lost),
            participants=made.participants,
            plan=self._session.joined.plan,
        )
        return fragment.result

    def _settle(self, fragment: SimFragment, sent: SimSent, outcome: Outcome) -> list[StepName]:
        """What is known for good now: of the contribution before, and of this one unless it is late. Returns the steps
        of a late one that does not count after all."""
        late, fragment.late = fragment.late, None
        is_this = late is not None and late.offer.key == sent.offer.key
        if late is not None and not is_this and not (late.reopened and outcome.earlier_lost):
            # (One that an earlier start sent may be called lost though it counts: to the server it is somebody else's.)
            self._history.told(late.offer.key, late.steps, counted=not outcome.earlier_lost)
        if outcome.counted_in > outcome.agreement.version:
            self._history.faults["late"] += 1  # kept until it is confirmed: a restarted server has forgotten it
            fragment.late = sent
        else:
            self._history.told(sent.offer.key, sent.steps, counted=outcome.counted)
        is_lost = outcome.late_is_lost(is_own=is_this)
        self._history.faults["lost_late"] += late is not None and is_lost
        return late.steps if late is not None and is_lost else []

    def _check_update(self, fragment: SimFragment, made: Agreement) -> None:
        """It leads on from what we hold, or is everything."""
        sent, held = [(payload.kind, payload.version) for payload in made.payloads], fragment.held
        missed = [("update", v) for v in range(held.version + 1, made.version + 1)] if held is not None else None
        if sent not in ([("full", made.version)], missed):
            self._history.violated(f"{self.worker_id} at {held} was sent {sent} for version {made.version}")

    # --- beside the exchanges -------------------------------------------------------------------------------------

    def _keep_weights(self, weights: str) -> None:
        """As `Depart` says. Nobody looks at the weights of a worker that has left."""

    def _goodbye(self) -> None:
        if not self.left:
            for i, fragment in enumerate(self.fragments if self._may_abandon else ()):
                late = fragment.late.steps if fragment.late is not None else []
                self.abandoned |= {(i, step) for step in (*fragment.unsent, *late)}
            self._carrier.fire(Leave(**self._session.head, reason="done"), self._departed)
            self._soon(CALL_TIMEOUT_S, self._goodbye)

    def _departed(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, LeaveAnswer | Fenced | Kicked):
            self.left = True
            self.alive = False

    def _heartbeat(self) -> None:
        if self._session.answer is not None:
            acknowledged = tuple(sorted(self._inbox.received))
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
        if isinstance(answer, UnknownWorker) and not self._is_leaving:
            self._carrier.fire(self._session.join_request, self._rejoined)
        if isinstance(answer, HeartbeatAnswer):
            self._inbox.heard(answer, acknowledged)

    @property
    def _is_leaving(self) -> bool:
        return self._drain or self._asked_to_leave or bool(self._inbox.asked.drain)

    def _rejoined(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, JoinAnswer):
            self._session.answer = answer
