"""Contributions become agreements at a parameter server: the tensor side of the wire.

    link.py        the connection to the server, who we are there, and the server's orders
    exchange.py    one exchange: the threads that carry it, and what the training thread sees of it

This file starts exchanges, settles them, and saves what a restart needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from torch import Tensor

from ...coordination.weights import check_reported
from ...coordination.worker.exchange import (
    Exchange,
    Held,
    Patience,
    Piece,
    Session,
    Share,
    Wanted,
    lost_late,
    sent_along,
    stays_late,
)
from ...core.codecs import Dither
from ...core.feedback import ErrorFeedback
from ...core.watch import as_seen_by
from ...defaults import JOIN_TIMEOUT_S
from ...errors import ExchangeFailed, OtherRun, Refused, UntrustedServer
from ...types import (
    PROTOCOL_VERSION,
    Agreement,
    HeartbeatAnswer,
    InfoValue,
    Join,
    JoinAnswer,
    Manifest,
    MemberFacts,
    Offer,
    Plan,
    Tiling,
    Wishes,
)
from ...versions import fields_of
from ...wire.frames import Layout
from ...wire.transport import Transport
from ..encode import Excerpt, Sender, as_deltas, write_frame
from ..forms import Form
from ..payload import Memory, OutgoingFrame
from ..protocol import Agreed, Contribution, Deltas, Joined
from ..update import leads_on, read_update
from .exchange import USELESS, ServerTicket
from .link import ServerLink
from .saved import SavedTopology, is_without_bytes, unpack_offer, unpack_payload, write_fragments

HEAR = Share(1, range(0), speaks=True)  # of an agreement, and fetch nothing
LONGEST_JOIN_PAUSE_S = 5.0  # between two attempts to join; later they are further apart
EXIT_FACTOR = 10.0  # what a leaving worker has not brought is lost if the server does not come back
FORGET_STATE = "the loaded state is of that run: resume its server, or start without load_state_dict to join this one"


class ServerTopology:
    """`sequences`: the last one used, per fragment; `overtaken`: the fragments of which the server has accepted later
    contributions than a loaded state knows of."""

    def __init__(
        self,
        transport: Transport,
        *,
        worker_id: str,
        instance: str,
        hostname: str,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        join_timeout_s: float = JOIN_TIMEOUT_S,
        memory: Memory | None = None,
        info: Mapping[str, InfoValue] | None = None,
        facts: Callable[[], MemberFacts] = MemberFacts,
        exit_factor: float = EXIT_FACTOR,
    ) -> None:
        """`memory`: where frames are kept; None = no memory is reused. `info` and `facts`: what the worker reports of
        itself when it joins and with each heartbeat. `exit_factor`: how many times longer than for a stuck round it
        waits for a silent server when it leaves."""
        self._link = ServerLink(transport, worker_id, facts)
        self.follow_plan, self.form_of = self._link.follow, self._link.form_of
        self.orders, self.leave, self.close = self._link.orders, self._link.leave, self._link.close
        self.lease = self._link.lease
        self._instance, self._hostname = instance, hostname
        self._info = dict(info) if info else UNSET
        self._patience, self._join_timeout_s, self._exit_factor = patience, join_timeout_s, exit_factor
        self._rng = random.Random(instance)  # of the pauses between tries
        self._memory = memory or Memory()
        self._feedback = ErrorFeedback()
        self._restored: SavedTopology | None = None
        self._asked: dict[int, ServerTicket] = {}  # for the newest anchors, on joining
        self._held: dict[int, Held] = {}  # per fragment, the anchor as it is now, if it was proven
        self._late: dict[int, ServerTicket] = {}  # per fragment, the contribution that counts in a round to come
        self.tiling: Tiling | UnsetType = UNSET  # what the processes of our group hold, if not rows (group/tiled.py)
        self.sequences: list[int] = []
        self.overtaken: frozenset[int] = frozenset()

    @property
    def session(self) -> Session:
        return self._link.session

    @property
    def forms(self) -> list[Form]:
        return self._link.forms

    @property
    def plan(self) -> Plan | None:
        """The plan as it was when we joined; None = not joined yet."""
        introduced = self._link.introduced
        return None if introduced is None or introduced.answer is None else introduced.answer.plan

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        self.introduce(manifest, wishes)
        answer = self.session.joined
        last = tuple(state.last_sequence for state in answer.fragments)
        return Joined(self._link.worker_id, answer.plan, answer.manifest, self.overtaken, last)

    def introduce(self, manifest: Manifest | None, wishes: Wishes, share: Share | None = None) -> None:
        """Join, and ask for the newest agreement of every fragment; with a `share`, only ask, and fetch nothing. With a
        loaded state, only join: what to ask for then depends on what is under way."""
        restored = self._restored
        join = Join(
            protocol=PROTOCOL_VERSION,
            worker_id=self._link.worker_id,
            instance=self._instance,
            hostname=self._hostname,
            manifest=manifest,
            wishes=wishes,
            run_id=restored.run_id if restored is not None else None,
            continues=restored is not None,
            info=self._info,
            tiling=self.tiling,
        )
        self._link.introduce(join)
        # The first fetch does the joining; only then is it known how many fragments there are.
        # All of a new run wait for its last worker, and a server that is being started refuses those that come early.
        pause_s = min(self._patience.longest_backoff_s, LONGEST_JOIN_PAUSE_S)
        patience = replace(self._patience, give_up_after_s=self._join_timeout_s, longest_backoff_s=pause_s)
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
        self._admitted()
        if restored is None:
            others = range(1, len(self.forms))
            self._asked = {0: first, **{fragment: self._ask(fragment, share, self._patience) for fragment in others}}

    def follow(self, join: Join, answer: JoinAnswer) -> None:
        """Speak for a worker that another process of its group has joined."""
        self._link.introduce(join, answer)
        self._admitted()

    def _admitted(self) -> None:
        last = [state.last_sequence for state in self._link.admitted().fragments]
        if self._restored is None:
            self.sequences = last
            return
        self.overtaken = self._restored.overtaken(last)
        self.sequences = [max(pair) for pair in zip(last, self._restored.sequences, strict=True)]

    def learn_plan(self) -> Plan:
        """Ask for the plan again. A run without a manifest settles its fragments when it knows what is trained; what is
        under way here belongs to fragments that stay."""
        answer = self._link.call(self.session.join_request)
        assert isinstance(answer, JoinAnswer)
        self.session.answer = answer
        last = [state.last_sequence for state in self._link.admitted().fragments]
        used = self.sequences[: len(last)]
        self.sequences[:] = [max(pair) for pair in zip(last, [*used, *last[len(used) :]], strict=True)]
        self._held.clear()
        return answer.plan

    @property
    def last_heard(self) -> HeartbeatAnswer | None:
        """The server's answer to the last heartbeat."""
        return self._link.last_heard

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._memory.rest()
        self._link.heartbeat(step, steps_per_second, loss)

    @property
    def takes_tilings(self) -> bool:
        """A server of release 0.2 knows sections by rows only."""
        return self._link.protocol >= fields_of(Join)["tiling"]

    @property
    def tells_loss(self) -> bool:
        """Does a contribution carry its loss? A server of release 0.2 learns it from heartbeats alone."""
        return self._link.protocol >= fields_of(Offer)["loss"]

    # --- a contribution -------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> ServerTicket:
        """Offer at once; encode now (the weights will change), and send each part while the next is encoded."""
        form = self._link.forms[contribution.fragment]
        offer = self.make_offer(contribution, form, (form.up.size_bytes,))
        if contribution.loss is not None:
            offer = msgspec.structs.replace(offer, loss=contribution.loss)
        payload = self.new_payload(contribution.deltas, form.up)
        ticket = self.carry(offer, payload, stuck_after_s)
        try:
            self.encode(contribution, offer.sequence, payload, form)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def make_offer(self, contribution: Contribution, form: Form, section_bytes: tuple[int, ...]) -> Offer:
        """The offer of the fragment's next contribution: its key and its codec are fixed here."""
        session, fragment = self._link.session, contribution.fragment
        if session.joined.plan.weight_by != "equal":
            check_reported(contribution, session.joined.plan.weight_by)
        self.sequences[fragment] = session.next_sequence(fragment, self.sequences[fragment])
        return Offer(
            **session.head,
            fragment=fragment,
            sequence=self.sequences[fragment],
            base_version=contribution.base_version,
            oldest_base=contribution.oldest_base,
            steps=contribution.steps,
            samples=contribution.samples,
            tokens=contribution.tokens,
            codec=form.up.header.codec,
            size_bytes=sum(section_bytes),
            section_bytes=section_bytes if len(section_bytes) > 1 else (),
            data=contribution.data or UNSET,
            tiled=True if self.tiling is not UNSET else UNSET,
        )

    def new_payload(
        self, deltas: Deltas | Mapping[str, Tensor], layout: Layout | None, first_part: int = 0
    ) -> OutgoingFrame:
        """Memory for a frame (an empty one without a layout); pinned if a GPU writes to it."""
        blocks, entries = as_deltas(deltas), layout.entries if layout is not None else ()
        pinned = any(blocks.device(entry.name).type != "cpu" for entry in entries)
        size = self._link.session.joined.plan.part_size_bytes
        return OutgoingFrame(layout, size, first_part, memory=self._memory, pinned=pinned)

    def encode(
        self,
        contribution: Contribution,
        sequence: int,
        payload: OutgoingFrame,
        form: Form,
        section: Layout | None = None,
        excerpts: Mapping[str, Excerpt] = MappingProxyType({}),
    ) -> None:
        """Write what we send of a contribution: all of it, or a section."""
        fragment, worker_id = contribution.fragment, self._link.worker_id
        run_id = self._link.session.joined.run_id
        if contribution.owes_nothing:
            self.owe_nothing(fragment)
        if form.feeds_back or self._feedback.is_used:
            self._feedback.begin(fragment, sequence)
        sender = Sender(
            fragment=fragment,
            deltas=as_deltas(contribution.deltas),
            rules=form.rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, fragment, sequence, f"{worker_id}/{name}"),
            excerpts=excerpts,
        )
        write_frame(payload, section or form.up, sender)

    # --- exchanges ------------------------------------------------------------------------------------------------

    def carry(
        self, offer: Offer, payload: OutgoingFrame, stuck_after_s: float | None, share: Share | None = None
    ) -> ServerTicket:
        """Send what was offered, or our share of it; wait for the agreement, and fetch it unless it is shared."""
        patience = self._patience
        if stuck_after_s is not None:
            # The worker's last contribution is worth waiting for; but not for hours if there is no server any more.
            give_up_after_s = min(patience.give_up_after_s, self._exit_factor * stuck_after_s)
            patience = replace(
                patience, give_up_after_s=give_up_after_s, stuck_after_s=stuck_after_s, stay_for_own_round=True
            )
        return self._start(
            offer.fragment,
            after=offer.base_version,
            patience=patience,
            again=lambda stuck_after_s: self.carry(offer, payload, stuck_after_s, share),
            share=share,
            held=self._held.get(offer.fragment),
            offer=offer,
            payload=payload,
        )

    def catch_up(self, fragment: int, share: Share | None = None) -> ServerTicket:
        """The newest anchor, which was requested on joining. With a loaded state, what has been agreed since."""
        asked = self._asked.pop(fragment, None)
        if asked is not None:
            return asked
        claim, after = self.session.catching_up(fragment, overtaken=fragment in self.overtaken)
        return self._start(
            fragment,
            after=after,
            patience=self._patience,
            again=lambda _: self.catch_up(fragment, share),
            share=share,
            held=self._held.get(fragment),
            claim=claim,
        )

    def ask(self, fragment: int, share: Share | None = None) -> ServerTicket:
        """The newest agreement, as if we held nothing; with a `share`, nothing is fetched."""
        return self._ask(fragment, share, self._patience)

    def _ask(self, fragment: int, share: Share | None, patience: Patience, held: Held | None = None) -> ServerTicket:
        return self._start(
            fragment,
            after=-1,
            patience=patience,
            again=lambda _: self._ask(fragment, share, patience, held),
            share=share,
            held=held,
        )

    def fetch(self, agreement: Agreement, pieces: tuple[Piece, ...]) -> ServerTicket:
        """Some pieces of an agreement."""
        return self._start(
            agreement.fragment,
            after=agreement.version,
            patience=self._patience,
            again=lambda _: self.fetch(agreement, pieces),
            fetch=Wanted(agreement, pieces),
        )

    def _start(
        self,
        fragment: int,
        *,
        after: int,
        patience: Patience,
        again: Callable[[float | None], ServerTicket],
        share: Share | None = None,
        held: Held | None = None,
        fetch: Wanted | None = None,
        claim: int | None = None,
        offer: Offer | None = None,
        payload: OutgoingFrame | None = None,
    ) -> ServerTicket:
        """Start an exchange; the arguments are those of `Exchange` and `ServerTicket`. A late contribution that is not
        confirmed yet is sent along with the next one of its fragment."""
        assert self._link.introduced is not None
        earlier = sent_along(self._late.get(fragment), offer) if self._late and offer is not None else None
        exchange = Exchange(
            self._link.introduced,
            fragment=fragment,
            after=after,
            now=time.monotonic(),
            offer=offer,
            earlier=earlier.sending if earlier is not None else None,
            share=share,
            fetch=fetch,
            held=held,
            claim=claim,
            patience=patience,
            rng=self._rng,
        )
        return ServerTicket(
            self,
            self._link,
            self._memory,
            exchange,
            fragment,
            again=again,
            held=held,
            offer=offer,
            claim=claim,
            payload=payload,
            earlier=earlier.payload if earlier is not None else None,
        )

    # --- what comes of them ---------------------------------------------------------------------------------------

    def settle(self, ticket: ServerTicket, *, reload: bool) -> Agreed:
        """The result of an exchange that is over."""
        failure = ticket.exchange.failure
        if reload and isinstance(failure, USELESS):
            return self._reload(ticket, failure)
        outcome, steps_lost = ticket.outcome(), self.steps_lost(ticket) if ticket.fragment in self._late else 0
        agreed = self._agreed(ticket)
        if agreed is None:
            whole = self._whole(ticket.fragment)
            agreed = replace(
                whole,
                counted=outcome.counted,
                too_old=outcome.too_old,
                counted_in=outcome.counted_in,
                bytes_sent=ticket.bytes_sent,
                bytes_received=whole.bytes_received + ticket.bytes_received,
                retries=whole.retries + ticket.exchange.retries,
                rejoins=whole.rejoins + ticket.exchange.rejoins,
            )
        self.conclude(ticket, agreed)
        return replace(agreed, steps_lost=steps_lost)

    def conclude(self, ticket: ServerTicket, agreed: Agreed) -> None:
        """The outcome of a contribution is known. If it counted, what its codec left out is owed from now on. Its bytes
        are released, unless it counts in a later round: a server that is restarted before that round closes needs them
        again (coordination/worker/exchange.py). The outcome of the contribution before it is known too."""
        fragment = ticket.fragment
        if ticket.offer is not None:
            if self._feedback.is_used:
                self._feedback.settle(fragment, ticket.offer.sequence, counted=agreed.counted)
        elif ticket.claim is not None and agreed.counted:
            self.claimed(fragment, ticket.claim)
        before = self._late.pop(fragment, None)
        if before is not None and before.payload is not None and before.payload is not ticket.payload:
            before.payload.release()
        if stays_late(agreed.counted_in, agreed.version):
            self._late[fragment] = ticket
        elif ticket.payload is not None:
            ticket.payload.release()

    def claimed(self, fragment: int, sequence: int) -> None:
        """This contribution of an earlier start counts. Is it the one whose left over values the state knows?"""
        if self._feedback.is_pending(fragment, sequence):
            self._feedback.settle(fragment, sequence, counted=True)
        else:
            self.owe_nothing(fragment)

    def keep_owed(self, sent: Mapping[str, range]) -> None:
        """Of a loaded state: of what we hold of each tensor we owe at most the values that we send."""
        self._feedback.keep(sent)

    def owe_nothing(self, fragment: int) -> None:
        """Forget the residuals: they were sent with contributions that this process does not know of."""
        self._feedback.forget(fragment, self.forms[fragment].rules)

    def steps_lost(self, ticket: ServerTicket) -> int:
        """Steps in a late contribution that was announced to count, and does not after all."""
        lost = lost_late(self._late.get(ticket.fragment), ticket, ticket.outcome())
        return lost.sending.offer.steps if lost is not None and lost.sending is not None else 0

    def _reload(self, ticket: ServerTicket, refusal: Refused) -> Agreed:
        if ticket.offer is not None:
            self._feedback.settle(ticket.fragment, ticket.offer.sequence, counted=False)
        self.told(ticket.fragment)
        if ticket.payload is not None:
            ticket.payload.release()
        return replace(self._whole(ticket.fragment), refused=str(refusal), bytes_sent=ticket.bytes_sent)

    def told(self, fragment: int) -> Held | None:
        """The anchor that the server was told of. From here on it is unknown until it is confirmed."""
        return self._held.pop(fragment, None)

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        if intact:
            self._held[agreed.fragment] = Held(agreed.version, agreed.anchor_hash)
        self._memory.recycle(agreed.update.frames, self._link.forms[agreed.fragment].update.size_bytes)
        return None if intact else self._whole(agreed.fragment)

    def _whole(self, fragment: int) -> Agreed:
        """The newest anchor, as a whole."""
        ticket = self.ask(fragment)
        ticket.join()
        agreed = self._agreed(ticket)
        if agreed is None:
            raise ExchangeFailed(f"the server was asked for the whole of fragment {fragment}, and sent something else")
        return agreed

    def _agreed(self, ticket: ServerTicket) -> Agreed | None:
        """The agreement that the exchange brought; None if it does not continue from the anchor that we hold."""
        outcome, fragment = ticket.outcome(), ticket.fragment
        agreement, held = outcome.agreement, self._held.pop(fragment, None)
        if not leads_on(agreement, ticket.held if ticket.held == held else None):
            return None
        kinds, plan = tuple(payload.kind for payload in agreement.payloads), self._link.session.joined.plan
        self._link.follow(plan)
        return Agreed(
            fragment=fragment,
            version=agreement.version,
            counted=outcome.counted,
            too_old=outcome.too_old,
            update=read_update(self._link.forms[fragment], kinds, ticket.frames, agreement.anchor_hash),
            anchor_hash=agreement.anchor_hash,
            participants=agreement.participants,
            above=agreement.above or (),
            bytes_sent=ticket.bytes_sent,
            bytes_received=ticket.bytes_received,
            retries=ticket.exchange.retries,
            rejoins=ticket.exchange.rejoins,
            plan=plan,
            counted_in=outcome.counted_in,
            watched=as_seen_by(self._link.worker_id, agreement),
        )

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        return {
            "worker_id": self._link.worker_id,
            "run_id": self.session.joined.run_id,
            "fragments": write_fragments(self.sequences, self._held),
            "feedback": self._feedback.state_dict(under_way),
            "sync_every": self._link.sync_every or 0,
            "session": self.session.joined.session or "",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = SavedTopology.read(state)
        self._link.resume(saved.worker_id, saved.session)
        self._held = saved.held
        self._link.sync_every = saved.sync_every or None
        self._feedback.load_state_dict(saved.feedback)
        self._restored = saved

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> ServerTicket | None:
        if is_without_bytes(packed):
            return None if late else self.reclaim(fragment, packed["sequence"])
        offer = unpack_offer(packed, self.session.head, fragment)
        ticket = self.carry(offer, self.unpack_payload(packed, self._link.form_of(fragment, offer.codec).up), None)
        if late:
            self.put_off(ticket)
        return ticket

    def reclaim(self, fragment: int, sequence: int, share: Share | None = None) -> ServerTicket | None:
        """A contribution under way whose bytes are not here, because the job had another shape: the agreement that
        holds it, if the server has it. None: it does not, and its steps come again."""
        known = self.session.joined.fragments[fragment]
        if known.last_sequence < sequence:
            self.give_up(fragment, sequence)
            return None
        return self._start(
            fragment,
            after=known.counted_in - 1,
            patience=self._patience,
            again=lambda _: _known(self.reclaim(fragment, sequence, share)),
            share=share,
            held=self._held.get(fragment),
            claim=sequence,
        )

    def give_up(self, fragment: int, sequence: int) -> None:
        """It did not arrive."""
        self._feedback.settle(fragment, sequence, counted=False)

    def put_off(self, ticket: ServerTicket) -> None:
        """Set aside a late contribution from a loaded state: the next exchange of its fragment asks about it first."""
        ticket.cancel()
        sending, payload = ticket.sending, ticket.payload
        assert sending is not None
        assert payload is not None
        sending.part_hashes.update(payload.known_hashes)
        self._late[ticket.fragment] = ticket

    def unpack_payload(self, packed: Mapping[str, Any], layout: Layout | None, first_part: int = 0) -> OutgoingFrame:
        return unpack_payload(packed, layout, self.session.joined.plan.part_size_bytes, first_part, self._memory)


def _known(ticket: ServerTicket | None) -> ServerTicket:
    assert ticket is not None, "the server had it when the exchange began"
    return ticket
