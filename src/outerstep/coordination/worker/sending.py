"""A contribution on its way, as its worker sees it: what it is, and what the server has said of it.

"Accepted" is no promise: a server that is killed before the round is on disk has forgotten it. So a contribution stays
with its worker until an agreement is held that includes it. One that was late counts in a round after the agreement its
exchange ended with; it is *unconfirmed*, and goes along with the next exchange of its fragment as `earlier`:

    offer the earlier again ──▶ accepted, still or anew ──▶ offer the new one ──▶ … ──▶ an agreement with the earlier

So at most one is kept beside the one under way, and no step is lost that was reported as counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from ...digest import Parts, payload_hash
from ...types import Agreement, OfContribution, Offer


@dataclass(eq=False)
class Sending:
    """`counted_in`: the version that the server said it counts in; 0 = not accepted, or not any more."""

    offer: Offer
    part_hashes: dict[int, str] = field(default_factory=dict)  # as far as it is encoded
    counted_in: int = 0
    refused: bool = False  # it will not count
    too_old: bool = False  # because of its age

    @property
    def is_open(self) -> bool:
        """Is it still to be sent, or to be asked about?"""
        return not self.counted_in and not self.refused

    def accepted(self, version: int, incarnation: int) -> None:
        """By a server that knows us by this number."""
        self.counted_in, self.offer = version, replace(self.offer, incarnation=incarnation)

    def ask_again(self) -> None:
        """Whether it counts is not known any more."""
        self.counted_in = 0

    def part_count(self, part_size_bytes: int) -> int:
        return Parts(self.offer.section_bytes or (self.offer.size_bytes,), part_size_bytes).count

    def proof(self, part_size_bytes: int) -> str | None:
        """The hash over all parts; None while some are not encoded yet."""
        count = self.part_count(part_size_bytes)
        if len(self.part_hashes) < count:
            return None
        return payload_hash([self.part_hashes[part] for part in range(count)])


class Outbox:
    """What one exchange has to send, in order: an earlier contribution that is not confirmed, and its own. Or, instead,
    the sequence that it `claims`: of a contribution that was accepted from an earlier start of this worker."""

    def __init__(self, earlier: Sending | None, own: Sending | None, claim: int | None = None) -> None:
        self.earlier, self.own = earlier, own
        self._claim = claim
        self._all = [sending for sending in (earlier, own) if sending is not None]
        if earlier is not None:
            earlier.ask_again()

    @property
    def current(self) -> Sending | None:
        """The one that we are at; None = of each it is known whether it counts."""
        return next((sending for sending in self._all if sending.is_open), None)

    @property
    def at(self) -> Sending:
        current = self.current
        assert current is not None
        return current

    def of(self, request: OfContribution) -> Sending:
        return next(sending for sending in self._all if sending.offer.sequence == request.sequence)

    def offer(self, incarnation: int) -> Offer:
        """Of the current one. The key stays for ever; only the incarnation that speaks for it may be another after a
        re-join."""
        follows = 0
        if self.earlier is not None and self.earlier.counted_in and self.at is self.own:
            follows = self.earlier.offer.sequence
        return replace(self.at.offer, incarnation=incarnation, follows=follows)

    def awaited(self, after: int, *, stays: bool) -> int:
        """Wait for an agreement newer than this one.

        Newer than what we hold (`after`): on time that is the agreement we are in. A late contribution counts in a
        later one; its worker takes the newest there is and goes on, for its steps will come back to it. It is the
        `earlier` one of the next exchange, which waits for the agreement that holds it. `stays`: wait for our own."""
        for sending in self._all:
            if sending.counted_in and (stays or sending is self.earlier):
                after = max(after, sending.counted_in - 1)
        return after

    def forgotten(self, last_sequence: int) -> bool:
        """The server said "accepted" and no longer knows: it was restarted. Then they are sent again."""
        lost = [s for s in self._all if s.counted_in and s.offer.sequence > last_sequence]
        for sending in lost:
            sending.ask_again()
        return bool(lost)

    def claim_forgotten(self, last_sequence: int) -> bool:
        """So it may be with what we claim; but that, we cannot send again."""
        forgotten = self._claim is not None and last_sequence < self._claim
        if forgotten:
            self._claim = None
        return forgotten

    def try_again(self) -> bool:
        """Ours was refused because of a round that is not there: that is about to be published, or the server was
        killed before, has forgotten it, and waits for our contribution while we wait for the round."""
        if self.own is None or not self.own.refused:
            return False
        for sending in self._all:
            sending.refused = sending.too_old = False
        return True

    def outcome(self, agreement: Agreement) -> Outcome:
        own = self.own
        return Outcome(
            agreement,
            counted=own.counted_in > 0 if own is not None else self._claim is not None,
            too_old=own is not None and own.too_old,
            counted_in=own.counted_in if own is not None else 0,
            earlier_lost=self.earlier is not None and self.earlier.refused,
        )


@dataclass(frozen=True)
class Share:
    """What one process of a group does of an exchange: its own `parts`; and, if it `speaks`, the commit."""

    sections: int
    parts: range
    speaks: bool


@dataclass(frozen=True)
class Outcome:
    """The newest agreement, its payload complete and checked; whether our contribution is counted, and in which version
    (a late one: in one still to come); and, if it is not, whether the server called it too old to ever count.
    `earlier_lost`: the earlier one does not count after all; the server forgot it, and would not have it again."""

    agreement: Agreement
    counted: bool
    too_old: bool = False
    counted_in: int = 0
    earlier_lost: bool = False
