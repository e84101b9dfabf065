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

from ..coordination.worker.effects import Adopt, Carry, Keep, Mix, Move, Note, PutOff, Rebase, Send
from ..coordination.worker.exchange import Exchange, Outcome, Patience, Share, is_evicted, is_forgotten, overtaken
from ..coordination.worker.machine import Metrics, Offline, WorkerMachine, WorkerState
from ..digest import part_hash
from ..errors import Fenced, Kicked, OuterstepError
from ..types import Agreement, Answer, Heartbeat, HeartbeatAnswer, Leave, LeaveAnswer, Offer, Trained
from .agenda import Agenda
from .carried import CarriedFragment, CarriedWorker, Joined, SimResult, SimSent
from .carrier import CALL_TIMEOUT_S, SimCarrier
from .history import History, StepName
from .network import Network
from .scenario import Scenario
from .server import PART_BYTES, SimServer

HEAR = Share(1, range(0), speaks=True)  # of an agreement, and fetch nothing


Named = list[StepName]


@dataclass
class SimFragment(CarriedFragment[Named]):
    """`unsent`: the steps that are in the local weights and not in the anchor, with the version that each was taken
    on."""

    unsent: dict[StepName, int] = field(default_factory=dict)


@dataclass
class SimSaved:
    """A worker's state as it is on its disk."""

    run_id: str
    state: WorkerState
    fragments: list[SimFragment]
    data: dict[str, Any] = field(default_factory=dict)  # data.py


class SimWorker(CarriedWorker[Named]):
    """One start of a worker process. A restart is a new object with the same id; with `saved` it resumes from there."""

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
        run_id = saved.run_id if saved is not None else None
        super().__init__(name or f"w{index}", f"instance-{index}-{instance}", agenda, rng, run_id=run_id)
        self.index = index
        self.first_step = self.steps_taken = first_step
        self.fragments: list[SimFragment] = [SimFragment() for _ in range(scenario.fragments)]
        self.own: set[tuple[int, StepName]] = set()  # whose steps they are to account for: this process's
        self.discarded: set[tuple[int, StepName]] = set()  # too old, or overwritten by a delayed agreement
        self.abandoned: set[tuple[int, StepName]] = set()  # accepted, but it left before the round could close
        self.left = False
        self.exchanges_done = 0  # counted in a round, or told to discard
        self.saved = saved  # on its disk
        self._saved = saved
        self._paused_until = 0.0
        self._scenario, self._history = scenario, history
        self._step_s = scenario.step_s[index % len(scenario.step_s)]
        self._link = link or self.worker_id
        self._begin_data()
        self._carrier = SimCarrier(self._link, agenda, network, server, history, self._soon)
        self._asked_to_leave = self._is_training = self._is_changed = False
        self._drain = self._may_abandon = self._said_goodbye = False
        self._told = 0  # how many steps the machine said that it gave up
        if saved is None:
            self._fetch(0)
        else:
            self._ask(0, after=-1, share=HEAR, joined=lambda: self._resume(saved))
        self._soon(scenario.heartbeat_every_s, self._heartbeat)

    def _begin_data(self) -> None:
        """It has none (data.py)."""

    # --- life -----------------------------------------------------------------------------------------------------

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

    def _make_machine(self) -> WorkerMachine:
        offline = Offline(self._scenario.offline_after_s, self._scenario.offline_exchanges)
        self._machine = self.machine_type(self.worker_id, self._session.joined.plan, offline=offline)
        return self._machine

    def _overtaken(self, saved: SimSaved) -> list[int]:
        """Fragments of which the server has later contributions than the state knows of."""
        last = [state.last_sequence for state in self._session.joined.fragments]
        return sorted(overtaken([fragment.sequence for fragment in saved.fragments], last))

    def _resume(self, saved: SimSaved) -> None:
        last = [state.last_sequence for state in self._session.joined.fragments]
        behind = self._overtaken(saved)
        self._history.faults["resumed"] += 1
        self._history.faults["overtaken"] += bool(behind)
        for i, fragment in enumerate(saved.fragments):
            self.fragments[i] = SimFragment(
                max(fragment.sequence, last[i]), fragment.held, unsent=dict(fragment.unsent)
            )
            self.own |= {(i, step) for step in fragment.unsent}
        sent = [
            each for fragment in saved.fragments for each in (fragment.in_flight, fragment.late) if each is not None
        ]
        sequences = [fragment.sequence for fragment in self.fragments]
        self._history.resumed(self.worker_id, sequences, [each.offer.key for each in sent])
        late = [(i, fragment.late) for i, fragment in enumerate(saved.fragments) if fragment.late is not None]
        forgotten = [i for i, sent in late if is_forgotten(sent.offer.sequence, last[i])]
        self._history.faults["forgotten"] += bool(forgotten)
        self._drive(lambda: self._make_machine().resumed(saved.state, behind, forgotten))

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

    @property
    def _hears_leave(self) -> bool:
        return self._asked_to_leave and self._is_training

    def _violated(self, rule: str) -> None:
        self._history.violated(rule)

    # --- what the machine asks for --------------------------------------------------------------------------------

    def _saw(self, effect: Keep | PutOff | Note) -> None:
        match effect:
            case PutOff():
                self._history.faults["late"] += 1
            case Keep():
                self._history.faults["deferred"] += 1
            case Note(kind):
                self.exchanges_done += kind in ("agreed", "discarded")
                self._may_abandon = self._may_abandon or kind == "stuck"
                self._history.say(f"{self.worker_id}: {effect}")

    def _depart(self, weights: str) -> None:
        self._keep_weights(weights)
        self._goodbye()

    def _moved(self, move: Move, fragment: SimFragment, result: SimResult) -> None:
        """Weights and anchor are sets of steps here."""
        sent = fragment.in_flight
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

    def _start_over(self) -> None:
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
        for i, fragment in enumerate(self.fragments):
            if self.machine.unsent(i).steps != len(fragment.unsent):
                self._history.violated(
                    f"{self.worker_id} holds {len(fragment.unsent)} unsent steps of fragment {i}, and believes "
                    f"in {self.machine.unsent(i).steps}"
                )

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _contents(self, send: Send) -> Named:
        unsent = self.fragments[send.fragment].unsent
        oldest = min(unsent.values(), default=send.oldest_base)
        if send.oldest_base > oldest:
            self._history.violated(
                f"{self.worker_id} calls its oldest step of fragment {send.fragment} younger than it is: taken on "
                f"version {send.oldest_base}, where it was {oldest}"
            )
        return list(unsent)

    def _described(self, send: Send, steps: Named) -> dict[str, Any]:
        data = self._describe(send) or UNSET
        return {"size_bytes": self._scenario.parts * PART_BYTES, "tokens": send.steps, "data": data}

    def _part_hashes(self, offer: Offer, steps: Named) -> dict[int, str]:
        return {i: part_hash(f"{offer.key} {steps} {i}".encode()) for i in range(self._scenario.parts)}

    def _describe(self, send: Send) -> tuple[Trained, ...]:
        """Its units of data (data.py)."""
        return ()

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

    def _patience(self, *, last: bool) -> Patience:
        return Patience(
            longest_backoff_s=8.0,
            give_up_after_s=1e6,
            calls_in_flight=2,
            stuck_after_s=self._scenario.patient_exit_s if last else None,
            stay_for_own_round=last,
            damaged_parts=1000,
        )

    def _travel(
        self, index: int, exchange: Exchange, shipments: Sequence[SimSent[Named]], joined: Joined | None
    ) -> None:
        bodies = {one.offer.sequence: one.steps for one in shipments}
        self._carrier.carry(exchange, bodies, lambda: self._arrived(index, exchange, joined))

    def _drop(self, exchange: Exchange) -> None:
        self._carrier.drop(exchange)

    def _settle(self, fragment: SimFragment, sent: SimSent[Named], outcome: Outcome) -> Named | None:
        lost = super()._settle(fragment, sent, outcome)
        if fragment.late is sent:
            self._history.faults["late"] += 1
        self._history.faults["lost_late"] += lost is not None
        return lost

    def _tell(self, sent: SimSent[Named], *, counted: bool) -> None:
        self._history.told(sent.offer.key, sent.steps, counted=counted)

    def _lose(self, index: int, steps: Named) -> int:
        self.discarded |= {(index, step) for step in steps}
        return len(steps)

    def _adopted(self, index: int, made: Agreement, before: int, steps_lost: int) -> None:
        self._check_update(self.fragments[index], made)
        self._history.adopted(self.worker_id, index, made.version, made.anchor_hash, before)
        metrics = self._machine.state.metrics if self._machine is not None else Metrics()
        self._told = metrics.steps_discarded + metrics.steps_overwritten + steps_lost

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
        self._said_goodbye = True
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
        if is_evicted(answer, has_left=self._said_goodbye):
            self._carrier.fire(self._session.join_request, self._rejoined)
        if isinstance(answer, HeartbeatAnswer):
            self._inbox.heard(answer, acknowledged)

    @property
    def _is_leaving(self) -> bool:
        return self._drain or self._asked_to_leave or bool(self._inbox.asked.drain)
