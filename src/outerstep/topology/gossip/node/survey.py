"""Where does the run stand? For who comes anew, and for who was away for too long to follow block by block.

One answer is enough if nobody may lie (fewer than four members); else more than f members must say the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from ....coordination.gossip.book import Book
from ....coordination.gossip.chain import liars_among
from ....errors import Busy, OuterstepError, ServerUnreachable, TransportError
from ....security import Access
from ....security.signing import SigningKey, verify
from ....statements import Beat, ChainState, Signed
from ....types import PROTOCOL_VERSION
from ....wire.http_transport import HttpTransport
from ....wire.peers import AskTerms, Terms
from .door import Contacts, Door

log = logging.getLogger(__name__)

PAUSE_S = 0.25
TIMEOUT_S = 10.0
QUIET_S = 2.0  # a peer that is just being started is not news
SAY_EVERY_S = 15.0


class Survey:
    """`pause`: wait so many seconds; False = the node stops."""

    def __init__(self, door: Door, peer_id: str, key: SigningKey, pause: Callable[[float], bool]) -> None:
        self._door, self._peer_id, self._key, self._pause = door, peer_id, key, pause

    def find_terms(self, places: tuple[Access, ...], patience_s: float) -> Terms:
        """Through any of these peers. What cannot be mended by asking again (a wrong token, another protocol) is raised
        at once."""
        give_up_at = time.monotonic() + patience_s
        say_at = time.monotonic() + QUIET_S
        why = "nobody was asked"
        while True:
            for place in places:
                try:
                    terms = self._ask(self._door.reach(place, TIMEOUT_S))
                    enough = self._confirm(terms)
                except (TransportError, Busy) as error:
                    why = str(error)
                    continue
                if enough is not None:
                    return enough
                why = f"too few of {len(terms.state.members)} members say the same as {place.address}"
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_EVERY_S
                log.warning("%s; trying again, for %.0f s more", why, max(give_up_at - time.monotonic(), 0.0))
            if time.monotonic() >= give_up_at or not self._pause(PAUSE_S):
                raise ServerUnreachable(f"no run could be joined in {patience_s:g} s: {why}")

    def _ask(self, transport: HttpTransport) -> Terms:
        answer = transport.ask(AskTerms(sender=self._peer_id, protocol=PROTOCOL_VERSION), timeout_s=TIMEOUT_S)
        transport.close()
        if not isinstance(answer, Terms):
            raise TransportError(f"{transport.address} answered with something else")
        return answer

    def _confirm(self, terms: Terms) -> Terms | None:
        """The same from more than f members, counting the one that we were sent to."""
        needed = liars_among(len(terms.state.members), terms.liars) + 1
        if needed == 1:
            return terms
        same: Counter[ChainState] = Counter()
        for beat in self.beats_of(terms):
            access = self._door.access_of(beat)
            if access is None:
                continue
            try:
                answer = self._ask(self._door.reach(access, TIMEOUT_S))
            except OuterstepError as error:
                log.debug("%s does not say where the run stands: %s", access.address, error)
                continue
            if (answer.run_id, answer.document, answer.liars) != (terms.run_id, terms.document, terms.liars):
                continue
            same[answer.state] += 1
            if same[answer.state] >= needed:
                return answer
        return None

    def beats_of(self, terms: Terms) -> list[Beat]:
        """Of the members, as they have signed them."""
        book = Book(terms.run_id, self._key.public, self._key.sign, verify)
        keys = {member.key for member in terms.state.members}
        read = [book.read(signed) for signed in terms.beats if signed.author in keys]
        return [beat for beat in read if isinstance(beat, Beat)]

    def newest_state(
        self, contacts: Contacts, keys: list[str], run_id: str, needed: int
    ) -> tuple[ChainState, tuple[Signed, ...]] | None:
        """The newest that at least `needed` of these members name."""
        named: Counter[ChainState] = Counter()
        beats: tuple[Signed, ...] = ()
        for key in keys:
            transport = contacts.transport(key)
            if transport is None:
                continue
            try:
                terms = transport.ask(AskTerms(sender=self._peer_id, protocol=PROTOCOL_VERSION), timeout_s=TIMEOUT_S)
            except OuterstepError:
                continue
            if isinstance(terms, Terms) and terms.run_id == run_id:
                named[terms.state] += 1
                beats += terms.beats
        enough = [state for state, count in named.items() if count >= needed]
        return (max(enough, key=lambda state: state.height), beats) if enough else None


__all__ = ["Survey"]
