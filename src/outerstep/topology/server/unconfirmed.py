"""Late contributions: said to count in a round still to come. Until an agreement is held that includes it, one of each
fragment is kept (coordination/worker/sending.py): a server that is restarted before that has to be sent it again."""

from __future__ import annotations

from ...types import Offer
from ..protocol import Agreed
from .ticket import ServerTicket


class Unconfirmed:
    def __init__(self) -> None:
        self._late: dict[int, ServerTicket] = {}  # by fragment

    def before(self, offer: Offer) -> ServerTicket | None:
        """The contribution before this one, if it is not confirmed."""
        late = self._late.get(offer.fragment)
        return late if late is not None and late.sending is not None and late.sending.offer.key != offer.key else None

    def settle(self, ticket: ServerTicket, agreed: Agreed) -> None:
        """What was sent is not needed any more, unless it counts in a round to come. What became of the one before it
        is known."""
        before = self._late.pop(ticket.fragment, None)
        if before is not None and before.courier.payload is not ticket.courier.payload:
            before.courier.let_go()
        if agreed.counted_in > agreed.version:
            self._late[ticket.fragment] = ticket
        else:
            ticket.courier.let_go()

    def put_off(self, ticket: ServerTicket) -> None:
        """A late one, from a loaded state: the next exchange of its fragment asks for it first, so it need not."""
        ticket.cancel()
        sending, payload = ticket.sending, ticket.courier.payload
        assert sending is not None
        assert payload is not None
        sending.part_hashes.update(payload.known_hashes)
        self._late[ticket.fragment] = ticket

    def steps_lost(self, ticket: ServerTicket) -> int:
        """In a late contribution that was said to count, and does not after all."""
        late, outcome = self._late.get(ticket.fragment), ticket.outcome()
        if late is None or late.sending is None or ticket.sending is None:
            return 0
        is_this = late.sending.offer.key == ticket.sending.offer.key
        lost = not outcome.counted if is_this else outcome.earlier_lost
        return late.sending.offer.steps if lost else 0
