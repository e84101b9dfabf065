"""Contributions become agreements at a parameter server: the tensor side of the wire.

    member.py      who we are there, and what we were told on joining
    outgoing.py    what we send
    dispatch.py    how an exchange is set going
    courier.py     what carries it; ticket.py is what the training thread sees of it
    news.py        what comes back

Here they are put together: which exchange, what becomes of it, and what must not be forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ...coordination.worker.exchange import Patience, Share
from ...coordination.worker.fetch import Held, Piece, Wanted
from ...coordination.worker.session import Session
from ...core.feedback import ErrorFeedback
from ...core.watch import as_seen_by
from ...errors import ExchangeFailed, OtherRun, Refused, UntrustedServer
from ...types import PROTOCOL_VERSION, Agreement, Join, JoinAnswer, Manifest, Offer, Wishes
from ...wire.frames import Layout
from ...wire.transport import Transport
from ..forms import Form
from ..memory import Memory
from ..news import leads_on, read_news, release
from ..payload import Payload
from ..protocol import Agreed, Contribution, Joined, Orders
from .dispatch import Dispatch, with_limit
from .door import Door
from .member import Member
from .outgoing import Outgoing
from .saved import SavedTopology, unpack_offer, unpack_payload, write_fragments
from .ticket import ServerTicket
from .unconfirmed import Unconfirmed

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
        self._instance, self._hostname = instance, hostname
        self._patience = patience
        self._join_timeout_s = join_timeout_s
        self._memory = memory or Memory()
        self._feedback = ErrorFeedback()
        self._member = Member(self._door, worker_id)
        self._dispatch = Dispatch(self._door, self._member, self._memory, home=self, seed=instance)
        self.outgoing = Outgoing(self._member, self._feedback, self._memory)
        self.unconfirmed = Unconfirmed()
        self.overtaken: frozenset[int] = frozenset()
        self._restored: SavedTopology | None = None
        self._asked: dict[int, ServerTicket] = {}  # for the newest anchors, on joining
        self._held: dict[int, Held] = {}  # per fragment, the anchor as it is now, if it was proven

    @property
    def session(self) -> Session:
        return self._member.session

    @property
    def forms(self) -> list[Form]:
        return self._member.forms

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        self.introduce(manifest, wishes)
        answer = self.session.joined
        return Joined(self._member.worker_id, answer.plan, answer.manifest, self.overtaken)

    def introduce(self, manifest: Manifest | None, wishes: Wishes, share: Share | None = None) -> None:
        """Join, and ask for the newest agreement of every fragment; with a `share`, ask only and fetch nothing. With a
        loaded state it is only joined: what to ask for then depends on what is under way."""
        restored = self._restored
        join = Join(
            protocol=PROTOCOL_VERSION,
            worker_id=self._member.worker_id,
            instance=self._instance,
            hostname=self._hostname,
            manifest=manifest,
            wishes=wishes,
            run_id=restored.run_id if restored is not None else None,
            continues=restored is not None,
        )
        self._member.introduce(join)
        # The first fetch does the joining; only then is it known how many fragments there are.
        patience = with_limit(self._patience, self._join_timeout_s)
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
        self._adopt_plan()
        if restored is None:
            others = range(1, len(self.forms))
            self._asked = {0: first, **{fragment: self._ask(fragment, share, self._patience) for fragment in others}}

    def follow(self, join: Join, answer: JoinAnswer) -> None:
        """Speak for a worker that another process of its group has joined."""
        self._member.introduce(join, answer)
        self._adopt_plan()

    def _adopt_plan(self) -> None:
        last = [state.last_sequence for state in self._member.admitted().fragments]
        if self._restored is None:
            self.outgoing.sequences = last
            return
        self.overtaken = self._restored.overtaken(last)
        self.outgoing.sequences = [max(pair) for pair in zip(last, self._restored.sequences, strict=True)]

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._memory.rest()
        self._member.heartbeat(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        return self._member.orders.take()

    def leave(self, reason: str) -> None:
        self._member.leave(reason)
        self._transport.close()

    def close(self) -> None:
        """Without a word to the server: another process speaks for this worker."""
        self._door.is_shut = True
        self._transport.close()

    # --- exchanges ------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> ServerTicket:
        """Offer at once; encode now (the weights will change), and send each part while the next is encoded."""
        up = self.forms[contribution.fragment].up
        offer = self.outgoing.make_offer(contribution, (up.size_bytes,))
        payload = self.outgoing.new_payload(contribution.deltas, up)
        ticket = self.carry(offer, payload, stuck_after_s)
        with ticket.cancelled_on_error():
            self.outgoing.encode(contribution, offer.sequence, payload, up)
        return ticket

    def carry(
        self, offer: Offer, payload: Payload, stuck_after_s: float | None, share: Share | None = None
    ) -> ServerTicket:
        """Send what was offered, or our share of it; wait for the agreement, and fetch it unless it is shared."""
        return self._dispatch.start(
            offer.fragment,
            after=offer.base_version,
            patience=with_limit(self._patience, self._patience.give_up_after_s, stuck_after_s),
            again=lambda stuck_after_s: self.carry(offer, payload, stuck_after_s, share),
            share=share,
            held=self._held.get(offer.fragment),
            offer=offer,
            payload=payload,
            earlier=self.unconfirmed.before(offer),
        )

    def ask(self, fragment: int, share: Share) -> ServerTicket:
        """The newest agreement, as if we held nothing; with nothing fetched."""
        return self._ask(fragment, share, self._patience)

    def _ask(self, fragment: int, share: Share | None, patience: Patience, held: Held | None = None) -> ServerTicket:
        return self._dispatch.start(
            fragment,
            after=-1,
            patience=patience,
            again=lambda _: self._ask(fragment, share, patience, held),
            share=share,
            held=held,
        )

    def catch_up(self, fragment: int, share: Share | None = None) -> ServerTicket:
        """The newest anchor, which was asked for on joining. With a loaded state, what has been agreed since; if the
        server has accepted later contributions than that knows of, the agreement that holds the last of them."""
        asked = self._asked.pop(fragment, None)
        if asked is not None:
            return asked
        state = self.session.joined.fragments[fragment]
        claim = state.last_sequence if fragment in self.overtaken else None
        return self._dispatch.start(
            fragment,
            after=-1 if claim is None else state.counted_in - 1,
            patience=self._patience,
            again=lambda _: self.catch_up(fragment, share),
            share=share,
            held=self._held.get(fragment),
            claim=claim,
        )

    def fetch(self, agreement: Agreement, pieces: tuple[Piece, ...]) -> ServerTicket:
        """Some pieces of an agreement."""
        return self._dispatch.start(
            agreement.fragment,
            after=agreement.version,
            patience=self._patience,
            again=lambda _: self.fetch(agreement, pieces),
            fetch=Wanted(agreement, pieces),
        )

    # --- what comes of them ---------------------------------------------------------------------------------------

    def settle(self, ticket: ServerTicket, *, reload: bool) -> Agreed:
        if reload and ticket.useless is not None:
            return self._reload(ticket, ticket.useless)
        outcome, steps_lost = ticket.outcome(), self.unconfirmed.steps_lost(ticket)
        self.outgoing.settle(ticket, counted=outcome.counted)
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
        self.outgoing.settle(ticket, counted=False)
        self.told(ticket.fragment)
        ticket.courier.let_go()
        whole, sent = self._whole(ticket.fragment), ticket.courier.bytes_sent
        return dataclasses.replace(whole, refused=str(refusal), bytes_sent=sent)

    def told(self, fragment: int) -> Held | None:
        """The anchor that the server was told of. What it is, is not known from here on until it is confirmed."""
        return self._held.pop(fragment, None)

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
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
            watched=as_seen_by(self._member.worker_id, agreement),
        )

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        return {
            "worker_id": self._member.worker_id,
            "run_id": self.session.joined.run_id,
            "fragments": write_fragments(self.outgoing.sequences, self._held),
            "feedback": self._feedback.state_dict(under_way),
            "sync_every": self._member.orders.sync_every or 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = SavedTopology.read(state)
        self._member.worker_id = saved.worker_id
        self._held = saved.held
        self._member.orders.sync_every = saved.sync_every or None
        self._feedback.load_state_dict(saved.feedback)
        self._restored = saved

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> ServerTicket:
        offer = unpack_offer(packed, self.session.head, fragment)
        ticket = self.carry(offer, self.unpack_payload(packed, self.forms[fragment].up), None)
        if late:
            self.unconfirmed.put_off(ticket)
        return ticket

    def unpack_payload(self, packed: Mapping[str, Any], layout: Layout | None, first_part: int = 0) -> Payload:
        return unpack_payload(packed, layout, self.session.joined.plan.part_size_bytes, first_part, self._memory)
