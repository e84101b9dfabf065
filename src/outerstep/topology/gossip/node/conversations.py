"""What a node says to other peers, and asks of them, by itself.

*Conversations* run with every other member, in a thread of its own each, so that none waits for another's slow or dead
link. A conversation is one request and its answer, in which both sides tell all that the other may need. There is one
at once when this peer has something new of its own to tell, and one every `beat_every_s` anyway. A member that does not
answer is called less and less often, until it calls itself.

A *survey* asks where the run stands: for a peer that joins, or was away for too long to follow block by block. One
answer is enough if nobody may lie (fewer than four members); else more than f members must say the same.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace

from ....coordination.backoff import Backoff
from ....coordination.gossip.book import Book
from ....coordination.gossip.chain import witnesses
from ....coordination.gossip.meaning import wrong_with_state
from ....errors import BadRequest, Busy, OuterstepError, ServerUnreachable, TransportError
from ....security import Access
from ....security.signing import SigningKey, verify
from ....statements import Beat, ChainState, Converse, Signed
from ....types import PROTOCOL_VERSION, Dataset
from ....wire.http_transport import HttpTransport
from ....wire.peers import AskTerms, Terms
from .calls import ask, ask_member
from .hearing import hear
from .listener import Contacts, NodeListener
from .records import Recorder
from .shared import Shared

log = logging.getLogger(__name__)

# --- conversations ----------------------------------------------------------------------------------------------------


LONGEST_PAUSE_S = 30.0
DISK_PATIENCE_S = 60.0
FAILURES_OF_THE_GONE = 2
MOST_TROUBLE = 300  # characters of what another peer answered
STALLED_S = 120.0  # a worker reports several times a minute, or it has stopped to on purpose (stalled_after_s)


@dataclass(eq=False)
class _Conversation:
    """The state of the conversations with one member."""

    key: str
    height: int = -1  # of the last block that it knows; -1 = unknown
    seen: int = -1  # the number of the last news that it was told
    heard: int = -1  # the last that it has answered
    failures: int = 0
    not_before: float = 0.0
    is_wanted: bool = True
    trouble: str = ""


class Conversations:
    def __init__(self, shared: Shared, recorder: Recorder, contacts: Contacts, beat_every_s: float) -> None:
        self._shared, self._recorder, self._contacts = shared, recorder, contacts
        self._beat_every_s = beat_every_s
        self._open: dict[str, _Conversation] = {}
        self._draw = random.Random()
        self.stuck_at = -1  # a height for which nobody seems to have the next block
        self.conversations = 0

    def start(self) -> None:
        self._shared.start("peer-pulse", self._beat_always)

    def ensure(self) -> None:
        """With the lock held: a thread for each other member, and none for anybody else."""
        peer = self._shared.peer
        keys = {member.key for member in peer.state.members} - {peer.member.key}
        for key in self._open.keys() - keys:
            self._open.pop(key).is_wanted = False
        for member in peer.state.members:
            if member.key in keys and member.key not in self._open:
                talk = self._open[member.key] = _Conversation(member.key)
                self._shared.start(f"peer-conversation-{member.peer_id}", lambda talk=talk: self._converse_always(talk))  # type: ignore[misc]

    def was_heard(self, peer_id: str) -> None:
        """With the lock held: it has called, so it is there, and worth calling at once."""
        for member in self._shared.peer.state.members:
            if member.peer_id == peer_id and (talk := self._open.get(member.key)) is not None:
                talk.not_before = 0.0

    def is_gone(self, key: str) -> bool:
        """With the lock held: it does not answer any more. (It may have left just before.)"""
        talk = self._open.get(key)
        return talk is not None and talk.failures >= FAILURES_OF_THE_GONE

    def have_heard(self, news: int) -> bool:
        """With the lock held: does every member that can be reached know what was new then?"""
        return all(talk.heard >= news or talk.failures for talk in self._open.values())

    def troubles(self) -> dict[str, str]:
        """By key: why the last conversation with it failed."""
        return {key: talk.trouble for key, talk in self._open.items() if talk.trouble}

    def _beat_always(self) -> None:
        shared = self._shared
        with shared.lock:
            while not shared.is_stopping:
                if not self._is_stalled():
                    shared.peer.tick(shared.clock())
                shared.news += 1
                self._recorder.note()
                self._contacts.keep_only({member.key for member in shared.peer.state.members})
                shared.wait(lambda: False, self._beat_every_s)

    def _is_stalled(self) -> bool:
        """A peer is alive if it trains, not if it has a thread. If its training stops reporting, it falls silent, and
        the others continue without it. If it wakes up, it is admitted again."""
        at = self._shared.progress_at
        return at is not None and self._shared.clock() - at > STALLED_S

    # --- one conversation -------------------------------------------------------------------------------------------

    def _converse_always(self, talk: _Conversation) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                while not self._is_due(talk):
                    shared.wait(lambda: self._is_due(talk), self._beat_every_s)
                if shared.is_stopping or not talk.is_wanted:
                    return
                told = self._say(talk)
            if told is not None:
                self._converse(talk, told)

    def _is_due(self, talk: _Conversation) -> bool:
        if self._shared.is_stopping or not talk.is_wanted:
            return True
        return talk.seen != self._shared.news and self._shared.clock() >= talk.not_before

    def _say(self, talk: _Conversation) -> Converse | None:
        """With the lock held: what it is to be told now, once that is on the disk."""
        peer = self._shared.peer
        if talk.height < 0:
            beat = peer.contacts.get(talk.key)
            talk.height = beat.height if beat is not None else peer.state.height
        talk.seen = self._shared.news
        told = peer.say_to(talk.height)
        return told if self._recorder.wait_until_kept(DISK_PATIENCE_S) else None

    def _converse(self, talk: _Conversation, told: Converse) -> None:
        said = talk.seen
        try:
            answer = ask_member(self._contacts, talk.key, told, Converse)
        except OuterstepError as error:
            self._put_off(talk, error)
            return
        with self._shared.lock:
            self.conversations += 1
            talk.failures, talk.trouble, talk.heard = 0, "", said
            self._hear(talk, told, answer)

    def _hear(self, talk: _Conversation, told: Converse, answer: Converse) -> None:
        """With the lock held. A member that is behind, or ahead by more than fits into one answer, is called again at
        once; but only as long as that leads further."""
        peer = self._shared.peer
        before, height_before = peer.state.height, talk.height
        hear(self._shared, answer, peer.name_of(talk.key))
        talk.height = answer.height
        we_lag = answer.height > peer.state.height
        if we_lag and not answer.decisions and peer.state.height == told.height:
            self.stuck_at = told.height
        moved = peer.state.height > before or answer.height > height_before
        if (we_lag or answer.height < peer.state.height) and moved:
            talk.seen = -1
        self._recorder.note()

    def _put_off(self, talk: _Conversation, error: OuterstepError) -> None:
        """Call it later: it did not answer, or not as it should."""
        with self._shared.lock:
            backoff = Backoff(self._beat_every_s, LONGEST_PAUSE_S)
            talk.not_before = self._shared.clock() + backoff.pause_s(talk.failures, self._draw)
            talk.failures += 1
            talk.seen, talk.height = -1, -1
            if not talk.trouble:
                log.info("a peer does not answer: %s", error)
            talk.trouble = str(error)[:MOST_TROUBLE]  # it chose some of these words


# --- surveys ----------------------------------------------------------------------------------------------------------


PAUSE_S = 0.25
TIMEOUT_S = 10.0
QUIET_S = 2.0  # a peer that is just being started is not news
SAY_EVERY_S = 15.0


class Survey:
    """`pause`: wait so many seconds; False = the node stops."""

    def __init__(self, listener: NodeListener, peer_id: str, key: SigningKey, pause: Callable[[float], bool]) -> None:
        self._listener, self._peer_id, self._key, self._pause = listener, peer_id, key, pause

    def find_terms(self, places: tuple[Access, ...], patience_s: float) -> Terms:
        """Through any of these peers. What cannot be mended by asking again (a wrong token, another protocol) is raised
        at once, if it is all that any of them says."""
        give_up_at = time.monotonic() + patience_s
        say_at = time.monotonic() + QUIET_S
        why = "nobody was asked"
        while True:
            refusals: list[OuterstepError] = []
            for place in places:
                try:
                    terms = self._ask_at(place)
                    enough = self._confirm(terms)
                except (TransportError, Busy) as error:
                    why = str(error)
                    continue
                except OuterstepError as error:
                    refusals.append(error)
                    why = str(error)
                    continue
                if enough is not None:
                    return enough
                why = f"too few of {len(terms.state.members)} members say the same as {place.address}"
            if len(refusals) == len(places):
                raise refusals[0]
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_EVERY_S
                log.warning("%s; trying again, for %.0f s more", why, max(give_up_at - time.monotonic(), 0.0))
            if time.monotonic() >= give_up_at or not self._pause(PAUSE_S):
                raise ServerUnreachable(f"no run could be joined in {patience_s:g} s: {why}")

    def _ask_at(self, place: Access) -> Terms:
        transport = self._listener.reach(place, TIMEOUT_S)
        try:
            return self._ask(transport)
        finally:
            transport.close()

    def _ask(
        self, transport: HttpTransport, fragments: int | None = None, datasets: Collection[Dataset] | None = None
    ) -> Terms:
        """What it says of the run, if that can be."""
        terms = ask(transport, AskTerms(sender=self._peer_id, protocol=PROTOCOL_VERSION), Terms, timeout_s=TIMEOUT_S)
        wrong = wrong_with_state(terms.state, fragments, datasets)
        if wrong:
            raise BadRequest(f"what {transport.address} says of the run cannot be: it {wrong}", hint="ask another peer")
        return replace(terms, beats=tuple(signed for signed, _ in self._newest_beats(terms)))

    def _confirm(self, terms: Terms) -> Terms | None:
        """The same from more than f members, counting the one that we were sent to."""
        needed = witnesses(len(terms.state.members), terms.attackers)
        if needed == 1:
            return terms
        same: Counter[ChainState] = Counter()
        for _, beat in self._newest_beats(terms):
            access = self._listener.access_of(beat)
            if access is None:
                continue
            try:
                answer = self._ask_at(access)
            except OuterstepError as error:
                log.debug("%s does not say where the run stands: %s", access.address, error)
                continue
            if (answer.run_id, answer.document, answer.attackers) != (terms.run_id, terms.document, terms.attackers):
                continue
            same[answer.state] += 1
            if same[answer.state] >= needed:
                return answer
        return None

    def _newest_beats(self, terms: Terms) -> list[tuple[Signed, Beat]]:
        """Of the members, as they have signed them, the newest of each: nobody is asked twice, and counted as two."""
        book = Book(terms.run_id, self._key.public, self._key.sign, verify, fragments=len(terms.state.versions))
        keys = {member.key for member in terms.state.members}
        newest: dict[str, tuple[Signed, Beat]] = {}
        for signed in terms.beats:
            beat = book.read(signed) if signed.author in keys else None
            if isinstance(beat, Beat):
                known = newest.get(signed.author, (signed, beat))
                newest[signed.author] = max(known, (signed, beat), key=lambda one: (one[1].incarnation, one[1].number))
        return list(newest.values())

    def newest_state(
        self,
        contacts: Contacts,
        keys: list[str],
        known: tuple[str, int, Collection[Dataset]],
        needed: int,
        blame: Callable[[str, str], None],
    ) -> tuple[ChainState, tuple[Signed, ...]] | None:
        """The newest that at least `needed` of these members name. `known`: the run, how many fragments it has,
        and which datasets it leases; `blame` is told who says what cannot be, and why not."""
        named: Counter[ChainState] = Counter()
        beats: tuple[Signed, ...] = ()
        for key in keys:
            transport = contacts.transport(key)
            if transport is None:
                continue
            try:
                terms = self._ask(transport, *known[1:])
            except BadRequest as error:
                blame(key, error.message)
                continue
            except OuterstepError as error:
                log.debug("%s does not say where the run stands: %s", transport.address, error)
                continue
            if terms.run_id == known[0]:
                named[terms.state] += 1
                beats += terms.beats
        enough = [state for state, count in named.items() if count >= needed]
        return (max(enough, key=lambda state: state.height), beats) if enough else None
