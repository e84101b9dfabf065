"""What a worker sends to its server: contributions, numbered, and encoded with what earlier ones left out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from ...coordination.weights import check_reported
from ...core.codecs import Dither
from ...core.feedback import ErrorFeedback
from ...types import Offer
from ...wire.frames import Layout
from ..encode import Excerpt, Sender, as_deltas, write_frame
from ..memory import Memory
from ..payload import Payload
from ..protocol import Contribution, Deltas
from .member import Member
from .ticket import ServerTicket


class Outgoing:
    """`sequences`: of each fragment, the last that was used. `feedback`: what the codec owes."""

    def __init__(self, member: Member, feedback: ErrorFeedback, memory: Memory) -> None:
        self.sequences: list[int] = []
        self._member = member
        self._feedback = feedback
        self._memory = memory

    def make_offer(self, contribution: Contribution, section_bytes: tuple[int, ...]) -> Offer:
        """The next one of its fragment: its key is fixed here. (A resumed server that had forgotten us may have taken
        later ones from another start of this worker; it said so when we joined again.)"""
        session = self._member.session
        check_reported(contribution, session.joined.plan.weight_by)
        fragment = contribution.fragment
        known = session.joined.fragments[fragment].last_sequence
        self.sequences[fragment] = max(self.sequences[fragment], known) + 1
        return Offer(
            **session.head,
            fragment=fragment,
            sequence=self.sequences[fragment],
            base_version=contribution.base_version,
            oldest_base=contribution.oldest_base,
            steps=contribution.steps,
            samples=contribution.samples,
            tokens=contribution.tokens,
            codec=self._member.forms[fragment].up.header.codec,
            size_bytes=sum(section_bytes),
            section_bytes=section_bytes if len(section_bytes) > 1 else (),
        )

    def new_payload(self, deltas: Deltas | Mapping[str, Tensor], layout: Layout | None, first_part: int = 0) -> Payload:
        """Room for a frame, or for none; a GPU writes to pinned memory."""
        blocks, entries = as_deltas(deltas), layout.entries if layout is not None else ()
        pinned = any(blocks.device(entry.name).type != "cpu" for entry in entries)
        size = self._member.session.joined.plan.part_size_bytes
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
        fragment, worker_id = contribution.fragment, self._member.worker_id
        run_id = self._member.session.joined.run_id
        self._feedback.begin(fragment, sequence)
        sender = Sender(
            fragment=fragment,
            deltas=as_deltas(contribution.deltas),
            rules=self._member.forms[fragment].rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, fragment, sequence, f"{worker_id}/{name}"),
            excerpts=excerpts,
        )
        write_frame(payload, layout, sender)

    def settle(self, ticket: ServerTicket, *, counted: bool) -> None:
        """What became of a contribution is known: what its codec left out is owed from now on, or it is not."""
        if ticket.offer is not None:
            self._feedback.settle(ticket.fragment, ticket.offer.sequence, counted=counted)
        elif ticket.claim is not None and counted:
            self.owe_nothing(ticket.fragment)

    def owe_nothing(self, fragment: int) -> None:
        """What was owed went with contributions of which nothing is known here."""
        self._feedback.forget(fragment, self._member.forms[fragment].rules)
