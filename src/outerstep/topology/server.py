"""Contributions become agreements at a parameter server: the tensor side of the wire."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..coordination.exchange import Exchange, Patience, Share
from ..coordination.fetch import Held, Piece, Wanted
from ..coordination.session import Session
from ..core.codecs import Dither
from ..core.feedback import ErrorFeedback
from ..core.watch import as_seen_by
from ..errors import ExchangeFailed, OtherRun, OuterstepError, Refused, UnknownWorker, UntrustedServer
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
    Wishes,
)
from ..wire.frames import Layout
from ..wire.transport import Transport
from . import Agreed, Contribution, Deltas, Joined, Orders, Ticket
from .courier import Courier
from .door import LEAVE_TIMEOUT_S, Door
from .encode import Excerpt, Sender, as_deltas, write_frame
from .forms import Form, forms_of
from .memory import Memory
from .news import leads_on, read_news, release
from .orders import OrderBook
from .payload import Payload
from .saved import SavedTopology, pack, unpack_offer, unpack_payload, write_fragments
from .terms import check_reported
from .ticket import ServerTicket
from .unconfirmed import Unconfirmed

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
EXIT_FACTOR = 10  # how many times longer than for a stuck round a leaving worker waits for a silent server
HEAR = Share(1, range(0), speaks=True)  # of an agreement, and fetch nothing
FORGET_STATE = "the loaded state is of that run: resume its server, or start without load_state_dict to join this one"


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
        self._door = Door(transport)
        self._worker_id, self._instance, self._hostname = worker_id, instance, hostname
        self._patience = patience
        self._join_timeout_s = join_timeout_s
        self._rng = random.Random(instance)
        self._memory = memory or Memory()
        self._session: Session | None = None
        self.forms: list[Form] = []
        self._feedback = ErrorFeedback()
        self._restored: SavedTopology | None = None
        self.overtaken: frozenset[int] = frozenset()
        self._held: dict[int, Held] = {}  # per fragment, the anchor as it is now, if it was proven
        self._sequence: list[int] = []
        self.unconfirmed = Unconfirmed()
        self._orders = OrderBook()

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Introduce ourselves and fetch the newest anchor of every fragment."""
        tickets = self.introduce(manifest, wishes)
        anchors = tuple(self.finish(ticket) for ticket in tickets)
        answer = self.session.joined
        return Joined(self._worker_id, answer.plan, answer.manifest, anchors, self.overtaken)

    def introduce(self, manifest: Manifest | None, wishes: Wishes, share: Share | None = None) -> list[ServerTicket]:
        """Join, and ask for the newest agreement of every fragment; with a `share`, ask only and fetch nothing. With a
        loaded state it is only joined: what to ask for then depends on what is under way."""
        restored = self._restored
        join = Join(
            protocol=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            instance=self._instance,
            hostname=self._hostname,
            manifest=manifest,
            wishes=wishes,
            run_id=restored.run_id if restored is not None else None,
            continues=restored is not None,
        )
        self._session = Session(join)
        # The first fetch does the joining; only then is it known how many fragments there are.
        patience = _with_limit(self._patience, self._join_timeout_s)
        first = self._ask(0, share if restored is None else HEAR, patience, self._held.get(0))
        first.join()
        try:
            first.outcome()
        except ExchangeFailed as failure:
            if isinstance(failure.__cause__, OtherRun) and restored is not None:
                raise OtherRun(failure.__cause__.message, hint=FORGET_STATE) from None
            if isinstance(failure.__cause__, Refused | UntrustedServer):
                raise failure.__cause__ from None  # "no" at join is said as the server said it
            raise
        self._adopt_plan(self.session.joined)
        if restored is not None:
            return []
        return [first, *(self._ask(fragment, share, self._patience) for fragment in range(1, len(self.forms)))]

    def follow(self, join: Join, answer: JoinAnswer) -> None:
        """Speak for a worker that another process of its group has joined."""
        self._session = Session(join)
        self._session.answer = answer
        self._adopt_plan(answer)

    def ask(self, fragment: int, share: Share) -> ServerTicket:
        """The newest agreement, as if we held nothing; with nothing fetched."""
        return self._ask(fragment, share, self._patience)

    def _ask(self, fragment: int, share: Share | None, patience: Patience, held: Held | None = None) -> ServerTicket:
        assert self._session is not None
        now = time.monotonic()
        exchange = Exchange(
            self._session, fragment=fragment, after=-1, now=now, share=share, held=held, patience=patience
        )
        return self._start(exchange, fragment)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A stalled heartbeat must not keep the next one waiting, so it is not given long."""
        self._memory.rest()
        session = self.session
        acknowledged = self._orders.acknowledged
        message = Heartbeat(
            **session.head, step=step, steps_per_second=steps_per_second, loss=loss, acknowledged=acknowledged
        )
        try:
            answer = self._door.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(answer, HeartbeatAnswer)
            self._orders.heard(answer, acknowledged)
        except UnknownWorker:
            if self._door.is_shut:  # it arrived after our own goodbye
                return
            log.warning("the server had given this worker up; joining again, local progress is kept")
            joined = self._door.call(session.join_request, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(joined, JoinAnswer)
            session.answer = joined

    def orders(self, *, at_exchange: bool) -> Orders:
        return self._orders.take()

    def leave(self, reason: str) -> None:
        """Best effort, and short: a server that does not hear it finds out by itself."""
        self._door.is_shut = True
        if self._session is not None and self._session.answer is not None:
            printable = reason.encode("utf-8", "replace").decode("utf-8")[:256]
            try:
                self._door.call(Leave(**self._session.head, reason=printable), timeout_s=LEAVE_TIMEOUT_S)
            except OuterstepError as error:
                log.info("the server was not told that this worker leaves: %s", error)
        self._transport.close()

    def close(self) -> None:
        """Without a word to the server: another process speaks for this worker."""
        self._door.is_shut = True
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
        check_reported(contribution, self.session.joined.plan.weight_by)
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
        held, earlier = self._held.get(offer.fragment), self.unconfirmed.before(offer)
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
            offer=offer,
            again=again,
        )

    def catch_up(self, fragment: int, share: Share | None = None) -> ServerTicket:
        """What has been agreed since the anchor of the loaded state; if the server has accepted later contributions
        than that knows of, the agreement that holds the last of them."""
        held, state = self._held.get(fragment), self.session.joined.fragments[fragment]
        claim = state.last_sequence if fragment in self.overtaken else None
        exchange = Exchange(
            self.session,
            fragment=fragment,
            after=-1 if claim is None else state.counted_in - 1,
            now=time.monotonic(),
            share=share,
            held=held,
            claim=claim,
            patience=self._patience,
            rng=self._rng,
        )
        return self._start(exchange, fragment, held=held, claim=claim, again=lambda _: self.catch_up(fragment, share))

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
        outcome, steps_lost = ticket.outcome(), self.unconfirmed.steps_lost(ticket)
        self.settle(ticket, counted=outcome.counted)
        agreed = self._agreed(ticket)
        if agreed is not None:
            self.unconfirmed.settle(ticket, agreed)
            return dataclasses.replace(agreed, steps_lost=steps_lost)
        whole, courier = self._whole(ticket.fragment), ticket.courier
        self.unconfirmed.settle(ticket, dataclasses.replace(whole, counted_in=outcome.counted_in))
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
        if ticket.offer is not None:
            self._feedback.settle(ticket.fragment, ticket.offer.sequence, counted=counted)
        elif ticket.claim is not None and counted:
            self.owe_nothing(ticket.fragment)

    def owe_nothing(self, fragment: int) -> None:
        """What was owed went with contributions of which nothing is known here."""
        self._feedback.forget(fragment, self.forms[fragment].rules)

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
            watched=as_seen_by(self._worker_id, agreement),
        )

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        return {
            "worker_id": self._worker_id,
            "run_id": self.session.joined.run_id,
            "fragments": write_fragments(self._sequence, self._held),
            "feedback": self._feedback.state_dict(under_way),
            "sync_every": self._orders.sync_every or 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = SavedTopology.read(state)
        self._worker_id = saved.worker_id
        self._held = saved.held
        self._orders.sync_every = saved.sync_every or None
        self._feedback.load_state_dict(saved.feedback)
        self._restored = saved

    def pack(self, ticket: Ticket) -> dict[str, Any]:
        assert isinstance(ticket, ServerTicket)
        offer, courier = ticket.offer, ticket.courier
        assert offer is not None, "only a contribution can be carried on elsewhere"
        assert courier.payload is not None
        return pack(offer, courier.payload)

    def unpack(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> ServerTicket:
        offer = unpack_offer(packed, self.session.head, fragment)
        ticket = self.carry(offer, self.unpack_payload(packed, self.forms[fragment].up), None)
        if late:
            self.unconfirmed.put_off(ticket)
        return ticket

    def unpack_payload(self, packed: Mapping[str, Any], layout: Layout | None, first_part: int = 0) -> Payload:
        return unpack_payload(packed, layout, self.session.joined.plan.part_size_bytes, first_part, self._memory)

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
        offer: Offer | None = None,
        claim: int | None = None,
        again: Callable[[float | None], ServerTicket] | None = None,
    ) -> ServerTicket:
        session = self._session
        assert session is not None
        courier = Courier(
            self._door,
            exchange,
            part_size_bytes=lambda: session.joined.plan.part_size_bytes,
            memory=self._memory,
            payload=payload,
            earlier=earlier,
            pinned=payload is not None and payload.data.is_pinned(),
            max_download_bytes=lambda: self.forms[fragment].full.size_bytes if self.forms else None,
        )
        again = again or (lambda _: self._start(exchange, fragment))
        return ServerTicket(fragment, courier, held=held, offer=offer, claim=claim, again=again)

    def _adopt_plan(self, answer: JoinAnswer) -> None:
        self.forms = forms_of(answer.plan, answer.manifest)
        last = [state.last_sequence for state in answer.fragments]
        if self._restored is None:
            self._sequence = last
            return
        self.overtaken = self._restored.overtaken(last)
        self._sequence = [max(pair) for pair in zip(last, self._restored.sequences, strict=True)]


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
