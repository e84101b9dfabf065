"""Contributions become agreements at a parameter server: the tensor side of the wire."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..coordination.exchange import Exchange, Patience, Share
from ..coordination.fetch import Held, Piece, Wanted
from ..coordination.session import Session
from ..core.codecs import Dither
from ..core.feedback import ErrorFeedback
from ..errors import ConfigError, ExchangeFailed, OuterstepError, Refused, UnknownWorker, UntrustedServer, WorkerError
from ..types import (
    PROTOCOL_VERSION,
    Agreement,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    Manifest,
    Offer,
    WeightBy,
    Wishes,
)
from ..wire.frames import Layout
from ..wire.transport import Transport
from . import Agreed, Contribution, Deltas, Joined, Orders, Ticket
from .courier import Courier
from .encode import Excerpt, Sender, as_deltas, write_frame
from .forms import Form, forms_of
from .memory import Memory
from .news import leads_on, read_news, release
from .payload import Payload
from .ticket import ServerTicket

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 3.0
EXIT_FACTOR = 10  # how many times longer than for a stuck round a leaving worker waits for a silent server
NO_ORDERS = Orders()


class ServerTopology:
    def __init__(
        self,
        transport: Transport,
        *,
        worker_id: str,
        instance: str,
        hostname: str,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        join_timeout_s: float = 120.0,
        memory: Memory | None = None,
    ) -> None:
        """`memory`: where frames are kept; None = nothing is kept for the next one."""
        self._transport = transport
        self._worker_id, self._instance, self._hostname = worker_id, instance, hostname
        self._patience = patience
        self._join_timeout_s = join_timeout_s
        self._rng = random.Random(instance)
        self._memory = memory or Memory()
        self._session: Session | None = None
        self.forms: list[Form] = []
        self._feedback = ErrorFeedback()
        self._loaded_run_id: str | None = None
        self._held: dict[int, Held] = {}  # per fragment, the anchor as it is now, if it was proven
        self._sequence: list[int] = []
        self._unconfirmed: dict[int, ServerTicket] = {}  # per fragment, a late one that no agreement we hold includes
        self._leaving = threading.Lock()
        self._left = False
        self._asked = NO_ORDERS
        self._asked_lock = threading.Lock()
        self._seen: set[int] = set()  # commands that were passed on
        self._obeyed: set[int] = set()  # and those the server has not been told about yet

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Introduce ourselves and fetch the newest anchor of every fragment."""
        tickets = self.introduce(manifest, wishes)
        anchors = tuple(self.finish(ticket) for ticket in tickets)
        return Joined(self._worker_id, self.session.joined.plan, self.session.joined.manifest, anchors)

    def introduce(self, manifest: Manifest | None, wishes: Wishes, share: Share | None = None) -> list[ServerTicket]:
        """Join, and ask for the newest agreement of every fragment; with a `share`, ask only and fetch nothing."""
        join = Join(
            protocol=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            instance=self._instance,
            hostname=self._hostname,
            manifest=manifest,
            wishes=wishes,
        )
        self._session = Session(join)
        # The first fetch does the joining; only then is it known how many fragments there are.
        first = self._ask(0, share, _with_limit(self._patience, self._join_timeout_s))
        first.join()
        try:
            first.outcome()
        except ExchangeFailed as failure:
            if isinstance(failure.__cause__, Refused | UntrustedServer):
                raise failure.__cause__ from None  # "no" at join is said as the server said it
            raise
        self._adopt_plan(self.session.joined)
        return [first, *(self._ask(fragment, share, self._patience) for fragment in range(1, len(self.forms)))]

    def follow(self, join: Join, answer: JoinAnswer) -> None:
        """Speak for a worker that another process of its group has joined."""
        self._session = Session(join)
        self._session.answer = answer
        self._adopt_plan(answer)

    def ask(self, fragment: int, share: Share) -> ServerTicket:
        """The newest agreement, as if we held nothing; with nothing fetched."""
        return self._ask(fragment, share, self._patience)

    def _ask(self, fragment: int, share: Share | None, patience: Patience) -> ServerTicket:
        assert self._session is not None
        exchange = Exchange(
            self._session, fragment=fragment, after=-1, now=time.monotonic(), share=share, patience=patience
        )
        return self._start(exchange, fragment)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A stalled heartbeat must not keep the next one waiting, so it is not given long."""
        self._memory.rest()
        session = self.session
        message = Heartbeat(
            **session.head, step=step, steps_per_second=steps_per_second, loss=loss, acknowledged=tuple(self._obeyed)
        )
        try:
            answer = self._transport.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(answer, HeartbeatAnswer)
            self._heard(answer, message.acknowledged)
        except UnknownWorker:
            with self._leaving:  # a heartbeat that arrives after our own goodbye must not bring us back
                if self._left:
                    return
                log.warning("the server had given this worker up; joining again, local progress is kept")
                joined = self._transport.call(session.join_request, timeout_s=HEARTBEAT_TIMEOUT_S)
                assert isinstance(joined, JoinAnswer)
                session.answer = joined

    def _heard(self, answer: HeartbeatAnswer, acknowledged: tuple[int, ...]) -> None:
        """Remember what is asked of us. A command comes again until our "got it" arrives, and is obeyed once."""
        with self._asked_lock:
            self._asked = dataclasses.replace(self._asked, sync_every=answer.sync_every)
            self._obeyed -= set(acknowledged)
            for command in answer.commands:
                if command.id not in self._seen:
                    self._seen.add(command.id)
                    reason = command.reason or command.kind
                    if command.kind == "drain":
                        self._asked = dataclasses.replace(self._asked, drain=reason)
                    else:
                        self._asked = dataclasses.replace(self._asked, sync=reason)
                self._obeyed.add(command.id)

    def orders(self, *, at_exchange: bool) -> Orders:
        if self._asked is not NO_ORDERS:
            with self._asked_lock:
                asked = self._asked
                self._asked = dataclasses.replace(asked, drain="", sync="")
                return asked
        return NO_ORDERS

    def leave(self, reason: str) -> None:
        """Best effort, and short: a server that does not hear it finds out by itself."""
        with self._leaving:
            self._left = True
        if self._session is not None and self._session.answer is not None:
            printable = reason.encode("utf-8", "replace").decode("utf-8")[:256]
            try:
                self._transport.call(Leave(**self._session.head, reason=printable), timeout_s=LEAVE_TIMEOUT_S)
            except OuterstepError as error:
                log.info("the server was not told that this worker leaves: %s", error)
        self._transport.close()

    # --- exchanges ------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> ServerTicket:
        """Offer at once; encode now (the weights will change), and send each part while the next is encoded."""
        up = self.forms[contribution.fragment].up
        offer = self.make_offer(contribution, (up.size_bytes,))
        payload = self.new_payload(contribution.deltas, up)
        ticket = self.carry(offer, payload, stuck_after_s)
        with ticket.cancelled_on_error():
            self.encode(contribution, offer.sequence, payload, up)
        return ticket

    def new_payload(self, deltas: Deltas | Mapping[str, Tensor], layout: Layout | None, first_part: int = 0) -> Payload:
        """Room for a frame, or for none; a GPU writes to pinned memory."""
        blocks, entries = as_deltas(deltas), layout.entries if layout is not None else ()
        pinned = any(blocks.device(entry.name).type != "cpu" for entry in entries)
        size = self.session.joined.plan.part_size_bytes
        return Payload(layout, size, first_part, memory=self._memory, pinned=pinned)

    def encode(
        self,
        contribution: Contribution,
        sequence: int,
        payload: Payload,
        layout: Layout,
        excerpts: Mapping[str, Excerpt] = MappingProxyType({}),
    ) -> None:
        """Write what we send of a contribution."""
        fragment, run_id = contribution.fragment, self.session.joined.run_id
        self._feedback.begin(fragment, sequence)
        sender = Sender(
            fragment=fragment,
            deltas=as_deltas(contribution.deltas),
            rules=self.forms[fragment].rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, fragment, sequence, f"{self._worker_id}/{name}"),
            excerpts=excerpts,
        )
        write_frame(payload, layout, sender)

    def make_offer(self, contribution: Contribution, section_bytes: tuple[int, ...]) -> Offer:
        """The next one of its fragment: its key is fixed here. (A resumed server that had forgotten us may have taken
        later ones from another start of this worker; it said so when we joined again.)"""
        _check_reported(contribution, self.session.joined.plan.weight_by)
        fragment = contribution.fragment
        known = self.session.joined.fragments[fragment].last_sequence
        self._sequence[fragment] = max(self._sequence[fragment], known) + 1
        return Offer(
            **self.session.head,
            fragment=fragment,
            sequence=self._sequence[fragment],
            base_version=contribution.base_version,
            oldest_base=contribution.oldest_base,
            steps=contribution.steps,
            samples=contribution.samples,
            tokens=contribution.tokens,
            codec=self.forms[fragment].up.header.codec,
            size_bytes=sum(section_bytes),
            section_bytes=section_bytes if len(section_bytes) > 1 else (),
        )

    def resume(self, ticket: Ticket, *, stuck_after_s: float | None = None) -> ServerTicket:
        assert isinstance(ticket, ServerTicket)
        ticket.cancel()
        return ticket.again(stuck_after_s)

    def carry(
        self, offer: Offer, payload: Payload, stuck_after_s: float | None, share: Share | None = None
    ) -> ServerTicket:
        """Send what was offered, or our share of it; wait for the agreement, and fetch it unless it is shared."""
        held, earlier = self._held.get(offer.fragment), self._before(offer)
        exchange = Exchange(
            self.session,
            fragment=offer.fragment,
            after=offer.base_version,
            now=time.monotonic(),
            offer=offer,
            earlier=earlier.sending if earlier is not None else None,
            share=share,
            held=held,
            patience=_with_limit(self._patience, self._patience.give_up_after_s, stuck_after_s),
            rng=self._rng,
        )

        def again(stuck_after_s: float | None) -> ServerTicket:
            return self.carry(offer, payload, stuck_after_s, share)

        return self._start(
            exchange,
            offer.fragment,
            payload=payload,
            earlier=earlier.courier.payload if earlier is not None else None,
            held=held,
            sequence=offer.sequence,
            again=again,
        )

    def _before(self, offer: Offer) -> ServerTicket | None:
        """The contribution before this one, if it is not confirmed (coordination/sending.py)."""
        late = self._unconfirmed.get(offer.fragment)
        return late if late is not None and late.sending is not None and late.sending.offer.key != offer.key else None

    def fetch(self, agreement: Agreement, pieces: tuple[Piece, ...]) -> ServerTicket:
        """Some pieces of an agreement."""
        exchange = Exchange(
            self.session,
            fragment=agreement.fragment,
            after=agreement.version,
            now=time.monotonic(),
            fetch=Wanted(agreement, pieces),
            patience=self._patience,
            rng=self._rng,
        )
        return self._start(exchange, agreement.fragment)

    def finish(self, ticket: Ticket, *, reload: bool = False) -> Agreed:
        assert isinstance(ticket, ServerTicket)
        ticket.join()
        if reload and ticket.useless is not None:
            return self._reload(ticket, ticket.useless)
        outcome, steps_lost = ticket.outcome(), self.steps_lost(ticket)
        self.settle(ticket, counted=outcome.counted)
        agreed = self._agreed(ticket)
        if agreed is not None:
            self.let_go(ticket, agreed)
            return dataclasses.replace(agreed, steps_lost=steps_lost)
        whole, courier = self._whole(ticket.fragment), ticket.courier
        self.let_go(ticket, dataclasses.replace(whole, counted_in=outcome.counted_in))
        return dataclasses.replace(
            whole,
            steps_lost=steps_lost,
            counted=outcome.counted,
            too_old=outcome.too_old,
            counted_in=outcome.counted_in,
            bytes_sent=courier.bytes_sent,
            bytes_received=whole.bytes_received + courier.bytes_received,
            retries=whole.retries + courier.exchange.retries,
            rejoins=whole.rejoins + courier.exchange.rejoins,
        )

    def _reload(self, ticket: ServerTicket, refusal: Refused) -> Agreed:
        self.settle(ticket, counted=False)
        self.told(ticket.fragment)
        ticket.courier.let_go()
        whole, sent = self._whole(ticket.fragment), ticket.courier.bytes_sent
        return dataclasses.replace(whole, refused=str(refusal), bytes_sent=sent)

    def settle(self, ticket: ServerTicket, *, counted: bool) -> None:
        """What became of a contribution is known: what its codec left out is owed from now on, or it is not."""
        if ticket.sequence is not None:
            self._feedback.settle(ticket.fragment, ticket.sequence, counted=counted)

    def let_go(self, ticket: ServerTicket, agreed: Agreed) -> None:
        """What was sent is not needed any more, unless it counts in a round still to come: a server that is restarted
        before that has to be sent it again, before the next one. What became of the one before this is known."""
        before = self._unconfirmed.pop(ticket.fragment, None)
        if before is not None and before.courier.payload is not ticket.courier.payload:
            before.courier.let_go()
        if agreed.counted_in > agreed.version:
            self._unconfirmed[ticket.fragment] = ticket
        else:
            ticket.courier.let_go()

    def steps_lost(self, ticket: ServerTicket) -> int:
        """In a late contribution that was said to count, and does not after all."""
        late, outcome = self._unconfirmed.get(ticket.fragment), ticket.outcome()
        if late is None or late.sending is None or ticket.sending is None:
            return 0
        is_this = late.sending.offer.key == ticket.sending.offer.key
        lost = not outcome.counted if is_this else outcome.earlier_lost
        return late.sending.offer.steps if lost else 0

    def told(self, fragment: int) -> Held | None:
        """The anchor that the server was told of. What it is, is not known from here on until it is confirmed."""
        return self._held.pop(fragment, None)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        if intact:
            self._held[agreed.fragment] = Held(agreed.version, agreed.anchor_hash)
        release(agreed.news, self.forms[agreed.fragment], self._memory)
        return None if intact else self._whole(agreed.fragment)

    def _whole(self, fragment: int) -> Agreed:
        """The newest anchor, all of it."""
        ticket = self._ask(fragment, None, self._patience)
        ticket.join()
        agreed = self._agreed(ticket)
        if agreed is None:
            raise ExchangeFailed(f"the server was asked for the whole of fragment {fragment}, and sent something else")
        return agreed

    def _agreed(self, ticket: ServerTicket) -> Agreed | None:
        """What the exchange brought; None if that does not lead on from the anchor that we hold."""
        outcome, courier = ticket.outcome(), ticket.courier
        agreement, held = outcome.agreement, self.told(ticket.fragment)
        if not leads_on(agreement, ticket.held if ticket.held == held else None):
            return None
        kinds = tuple(payload.kind for payload in agreement.payloads)
        return Agreed(
            fragment=ticket.fragment,
            version=agreement.version,
            counted=outcome.counted,
            too_old=outcome.too_old,
            news=read_news(self.forms[ticket.fragment], kinds, courier.frames, agreement.anchor_hash),
            anchor_hash=agreement.anchor_hash,
            participants=agreement.participants,
            bytes_sent=courier.bytes_sent,
            bytes_received=courier.bytes_received,
            retries=courier.exchange.retries,
            rejoins=courier.exchange.rejoins,
            plan=self.session.joined.plan,
            counted_in=outcome.counted_in,
        )

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, sent: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Any]:
        run_id = self.session.joined.run_id
        return {"worker_id": self._worker_id, "run_id": run_id, "feedback": self._feedback.state_dict(sent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["worker_id"] != self._worker_id and state["feedback"]["pending"]:
            raise ConfigError(
                f"the state is of worker {state['worker_id']!r}, with a contribution under way, and this is "
                f"{self._worker_id!r}, who cannot ask what became of it: start with worker_id={state['worker_id']!r}"
            )
        self._feedback.load_state_dict(state["feedback"])
        self._loaded_run_id = state["run_id"]

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        if self._session is None or self._session.answer is None:
            raise ExchangeFailed("not joined yet: call join first")
        return self._session

    def _start(
        self,
        exchange: Exchange,
        fragment: int,
        *,
        payload: Payload | None = None,
        earlier: Payload | None = None,
        held: Held | None = None,
        sequence: int | None = None,
        again: Callable[[float | None], ServerTicket] | None = None,
    ) -> ServerTicket:
        session = self._session
        assert session is not None
        courier = Courier(
            self._transport,
            exchange,
            part_size_bytes=lambda: session.joined.plan.part_size_bytes,
            memory=self._memory,
            payload=payload,
            earlier=earlier,
            pinned=payload is not None and payload.data.is_pinned(),
            max_download_bytes=lambda: self.forms[fragment].full.size_bytes if self.forms else None,
        )
        again = again or (lambda _: self._start(exchange, fragment))
        return ServerTicket(fragment, courier, held=held, sequence=sequence, again=again)

    def _adopt_plan(self, answer: JoinAnswer) -> None:
        self.forms = forms_of(answer.plan, answer.manifest)
        if self._loaded_run_id not in (None, answer.run_id):
            log.warning("the loaded state is of run %s, this is %s: it is not used", self._loaded_run_id, answer.run_id)
            self._feedback = ErrorFeedback()
        self._feedback.resume([state.last_sequence for state in answer.fragments])
        self._sequence = [state.last_sequence for state in answer.fragments]


def _check_reported(contribution: Contribution, unit: WeightBy) -> None:
    """Said here, where the amounts of all processes of a group are known, rather than by a refusal."""
    if unit != "equal" and contribution.steps and not getattr(contribution, unit):
        raise WorkerError(
            f"the run weighs contributions by {unit}, and none were reported in {contribution.steps} steps: "
            f"call worker.count({unit}=…) at each step"
        )


def _with_limit(patience: Patience, give_up_after_s: float, stuck_after_s: float | None = None) -> Patience:
    """With a limit on being stuck it is the worker's last contribution, which is worth waiting for; but not for hours
    if there is no server any more."""
    if stuck_after_s is not None:
        give_up_after_s = min(give_up_after_s, EXIT_FACTOR * stuck_after_s)
    return dataclasses.replace(
        patience,
        give_up_after_s=give_up_after_s,
        stuck_after_s=stuck_after_s,
        stay_for_own_round=stuck_after_s is not None,
    )
