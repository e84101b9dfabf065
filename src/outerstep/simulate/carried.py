"""What a simulated worker does with the effects of the real worker machine, whatever its steps are held in.

The machine decides, and the real exchange machine says what is to be sent; here both are carried out in virtual time,
as worker/sync.py does it on tensors and topology/server/ on sockets. Of the schedules' workers (worker.py) each step
has a name, and every message can be lost; of a fleet's (fleet/member.py) steps are counted, and lines are booked ahead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from ..coordination.worker.exchange import (
    Exchange,
    Held,
    OrderInbox,
    Outcome,
    Patience,
    Sending,
    Session,
    Share,
    lost_late,
    sent_along,
    stays_late,
)
from ..coordination.worker.machine import LOOK_EVERY_S, WorkerMachine
from ..errors import Fenced, Kicked, OuterstepError
from ..types import PROTOCOL_VERSION, Agreement, Answer, Join, JoinAnswer, Offer, Participant, Plan
from .agenda import Agenda

Steps = TypeVar("Steps")
Joined = Callable[[], None]


@dataclass
class SimSent(Generic[Steps]):
    """A contribution, and the steps in it."""

    sending: Sending
    steps: Steps
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
class CarriedFragment(Generic[Steps]):
    """`in_flight`, `late`: as the machine has them; `exchange` is the one under way, `result` the last one's.
    `refused`: why nobody has any use for what is in flight."""

    sequence: int = 0
    held: Held | None = None
    in_flight: SimSent[Steps] | None = None
    late: SimSent[Steps] | None = None
    exchange: Exchange | None = None
    result: SimResult | None = None
    refused: str = ""


class CarriedWorker(Generic[Steps]):
    """One start of a worker process."""

    machine_type: type[WorkerMachine] = WorkerMachine
    fragments: Sequence[CarriedFragment[Steps]]

    def __init__(
        self, worker_id: str, instance: str, agenda: Agenda, rng: random.Random, *, run_id: str | None = None
    ) -> None:
        """`run_id`: of a run that it continues."""
        self.worker_id = worker_id
        self.alive = True
        self._agenda, self._rng = agenda, rng
        self._session = Session(
            Join(
                protocol=PROTOCOL_VERSION,
                worker_id=worker_id,
                instance=instance,
                hostname=worker_id,
                run_id=run_id,
                continues=run_id is not None,
            )
        )
        self._machine: WorkerMachine | None = None
        self._inbox = OrderInbox()
        self._looks = 0

    # --- what its steps are, and how it lives: each kind's own ----------------------------------------------------

    def _soon(self, delay_s: float, action: Callable[[], None]) -> None:
        """Later, if it still lives."""
        raise NotImplementedError

    def _train(self) -> None:
        """After a step: obey, then take the next."""
        raise NotImplementedError

    def _contents(self, send: Send) -> Steps:
        """What is unsent."""
        raise NotImplementedError

    def _described(self, send: Send, steps: Steps) -> dict[str, Any]:
        """What else an offer says: its size, its tokens, its data."""
        raise NotImplementedError

    def _part_hashes(self, offer: Offer, steps: Steps) -> dict[int, str]:
        raise NotImplementedError

    def _patience(self, *, last: bool) -> Patience:
        raise NotImplementedError

    def _travel(
        self, index: int, exchange: Exchange, shipments: Sequence[SimSent[Steps]], joined: Joined | None
    ) -> None:
        """Carry the exchange until it is over; then `_arrived`."""
        raise NotImplementedError

    def _drop(self, exchange: Exchange) -> None:
        """Nobody waits for it any more."""

    def _moved(self, move: Move, fragment: Any, result: SimResult) -> None:
        """Of the local weights and the anchor. What is lost must be said to be."""
        raise NotImplementedError

    def _start_over(self) -> None:
        """What is unsent goes with the local weights; what is in flight was sent all the same."""
        raise NotImplementedError

    def _check_weights(self) -> None:
        """State and weights change together: what the machine believes to be unsent is what the weights hold."""
        raise NotImplementedError

    def _adopted(self, index: int, made: Agreement, before: int, steps_lost: int) -> None:
        raise NotImplementedError

    def _tell(self, sent: SimSent[Steps], *, counted: bool) -> None:
        """It is known for good what became of a contribution."""
        raise NotImplementedError

    def _lose(self, index: int, steps: Steps) -> int:
        """They were late, and do not count after all. Returns how many they are."""
        raise NotImplementedError

    def _depart(self, weights: str) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """This life is over."""
        self.alive = False

    def kill(self) -> None:
        """The process dies."""
        self.end()

    def _violated(self, rule: str) -> None:
        raise NotImplementedError

    def _saw(self, effect: Keep | PutOff | Note) -> None:
        """Nothing is copied or said here."""

    def _catch_up(self, index: int) -> None:
        raise AssertionError(f"{self.worker_id} resumed nothing, and is asked to catch up")

    def _reopen(self, index: int, *, late: bool) -> None:
        raise AssertionError(f"{self.worker_id} resumed nothing, and is asked to reopen fragment {index}")

    @property
    def _hears_leave(self) -> bool:
        """It is asked to leave, and may hear it."""
        raise NotImplementedError

    # --- joining ------------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> WorkerMachine:
        assert self._machine is not None, "not joined yet"
        return self._machine

    def _make_machine(self) -> WorkerMachine:
        self._machine = self.machine_type(self.worker_id, self._session.joined.plan)
        return self._machine

    def _fetch(self, index: int) -> None:
        """The newest anchors, one after the other; then it begins."""
        if index < len(self.fragments):
            self._ask(index, after=-1, joined=lambda: self._fetch(index + 1))
            return
        for fragment, state in zip(self.fragments, self._session.joined.fragments, strict=True):
            fragment.sequence = state.last_sequence
        self._drive(lambda: self._make_machine().joined([self._finish(i) for i in range(len(self.fragments))]))

    def _rejoined(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, JoinAnswer):
            self._session.answer = answer

    # --- an event, and what comes of it -------------------------------------------------------------------------------

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
            self._wait(self._looks)
        else:
            self._check_weights()
            self._train()

    def _wait(self, number: int) -> None:
        self._soon(LOOK_EVERY_S, lambda: self._look(number))

    def _look(self, number: int) -> None:
        """While it waits; once for each number."""
        if number != self._looks or not self.machine.waiting:
            return
        sights = {i: self._sight(i) for i in self.machine.in_sight}
        self._drive(lambda: self.machine.looked(sights, asked_to_leave=self._hears_leave))

    def _sight(self, index: int) -> Sight:
        exchange = self.fragments[index].exchange
        assert exchange is not None
        return Sight(
            done=exchange.done,
            wanted=exchange.wanted,
            silent_s=self._silent_s(index, exchange),
            missed=exchange.outcome is not None and not exchange.outcome.counted,
            failed=exchange.failure is not None,
        )

    def _silent_s(self, index: int, exchange: Exchange) -> float:
        return exchange.silent_s(self._agenda.now)

    def _die(self, error: OuterstepError) -> None:
        if self.alive:
            self.end()
            if not isinstance(error, Fenced | Kicked):  # then a newer start carries on
                self._violated(f"{self.worker_id} gave up: {type(error).__name__}: {error}")

    # --- what the machine asks for ------------------------------------------------------------------------------------

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
                case Depart(weights):
                    self._depart(weights)
                case Keep() | PutOff() | Note():
                    self._saw(effect)

    def _move(self, move: Move) -> None:
        fragment = self.fragments[move.fragment]
        assert fragment.result is not None
        self._moved(move, fragment, fragment.result)
        if self.machine.state.fragments[move.fragment].in_flight is None:
            fragment.in_flight = fragment.exchange = None

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        fragment = self.fragments[send.fragment]
        fragment.sequence = self._session.next_sequence(send.fragment, fragment.sequence)
        steps = self._contents(send)
        offer = Offer(
            **self._session.head,
            fragment=send.fragment,
            sequence=fragment.sequence,
            base_version=send.base_version,
            oldest_base=send.oldest_base,
            steps=send.steps,
            codec=self.machine.plan.codec,
            **self._described(send, steps),
        )
        fragment.in_flight = SimSent(Sending(offer, self._part_hashes(offer, steps)), steps)
        self._ready(send.fragment, last=send.last)

    def _ready(self, index: int, *, last: bool) -> None:
        """What is in flight may be offered."""
        self._again(index, last=last)

    def _again(self, index: int, *, last: bool = False) -> None:
        """Carry what is in flight, from the beginning, under the same key."""
        fragment = self.fragments[index]
        sent, late = fragment.in_flight, fragment.late
        assert sent is not None
        if fragment.exchange is not None:
            self._drop(fragment.exchange)
        earlier = sent_along(late, sent.offer)
        exchange = self._ask(index, after=sent.offer.base_version, sent=sent, earlier=earlier, last=last)
        assert exchange.outbox.own is not None
        sent.sending = exchange.outbox.own

    def _ask(
        self,
        index: int,
        *,
        after: int,
        sent: SimSent[Steps] | None = None,
        earlier: SimSent[Steps] | None = None,
        last: bool = False,
        claim: int | None = None,
        share: Share | None = None,
        joined: Joined | None = None,
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
            patience=self._patience(last=last),
            rng=self._rng,
        )
        self.fragments[index].exchange = exchange
        self._travel(index, exchange, [one for one in (earlier, sent) if one is not None], joined)
        return exchange

    def _arrived(self, index: int, exchange: Exchange, joined: Joined | None) -> None:
        """An exchange is over: a worker that waits for it looks now."""
        failure = exchange.failure
        if failure is not None and (joined is not None or isinstance(failure, Fenced | Kicked)):
            self._die(failure)
        elif joined is not None:
            joined()
        elif index in self.machine.waiting:
            self._look(self._looks)

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
        made, refused, fragment.refused = outcome.agreement, fragment.refused, ""
        lost = self._settle(fragment, sent, outcome) if sent is not None and not refused else None
        steps_lost = self._lose(index, lost) if lost is not None else 0
        self._adopted(index, made, fragment.held.version if fragment.held is not None else 0, steps_lost)
        fragment.held = Held(made.version, made.anchor_hash)
        flight = self._machine.in_flight.get(index) if self._machine is not None else None
        if sent is not None and flight is not None:
            sent.deferred = flight.deferred
        fragment.result = SimResult(
            fragment=index,
            version=made.version,
            counted=outcome.counted,
            counted_in=outcome.counted_in,
            too_old=outcome.too_old,
            unchanged=not made.payloads,
            above=made.above or (),
            steps_lost=steps_lost,
            participants=made.participants,
            plan=self._session.joined.plan,
            refused=refused,
        )
        return fragment.result

    def _settle(self, fragment: Any, sent: SimSent[Steps], outcome: Outcome) -> Steps | None:
        """What is known for good now: of the contribution before, and of this one unless it is late. Returns the steps
        of a late one that does not count after all."""
        late, fragment.late = fragment.late, None
        earlier, lost = sent_along(late, sent.offer), lost_late(late, sent, outcome)
        if earlier is not None and not (earlier.reopened and lost is earlier):
            # (One that an earlier start sent may be called lost though it counts: to the server it is somebody else's.)
            self._tell(earlier, counted=lost is None)
        if stays_late(outcome.counted_in, outcome.agreement.version):
            fragment.late = sent
        else:
            self._tell(sent, counted=outcome.counted)
        return lost.steps if lost is not None else None
