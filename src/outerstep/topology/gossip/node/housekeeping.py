"""The periodic work of a node."""

from __future__ import annotations

import logging

from ....coordination.gossip.chain import witnesses
from ....coordination.gossip.meaning import leased_datasets
from ....statements import Converse
from .contributions import DecidedRounds, Payloads
from .conversations import Conversations, Survey
from .hearing import blame, hear
from .listener import Contacts
from .records import Recorder
from .shared import Shared
from .snapshots import SnapshotExchange

log = logging.getLogger(__name__)


class Housekeeping:
    """A thread that drops bytes nobody needs any more, notes where the members are, and asks for the state of the run
    if this peer is too far behind to follow."""

    def __init__(
        self,
        shared: Shared,
        recorder: Recorder,
        conversations: Conversations,
        payloads: Payloads,
        rounds: DecidedRounds,
        snapshots: SnapshotExchange,
        contacts: Contacts,
        survey: Survey,
        every_s: float,
    ) -> None:
        self._shared, self._recorder, self._conversations = shared, recorder, conversations
        self._payloads, self._rounds, self._snapshots = payloads, rounds, snapshots
        self._contacts, self._survey, self._every_s = contacts, survey, every_s
        self._places: dict[str, str] = {}

    def start(self) -> None:
        self._shared.start("peer-housekeeping", self._always)

    def _always(self) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                shared.wait(lambda: False, self._every_s)
                if shared.is_stopping:
                    return
                self._payloads.keep_only(shared.peer.needed() | self._rounds.needed())
                self._note_places()
                is_stuck = self._conversations.stuck_at == shared.peer.state.height
            self._snapshots.drop_unused()
            if is_stuck:
                self._catch_up()

    def _note_places(self) -> None:
        """With the lock held."""
        peer = self._shared.peer
        keys = [member.key for member in peer.state.members]
        places = {key: peer.contacts[key].address for key in keys if key in peer.contacts}
        if places != self._places:
            self._places = places
            self._recorder.remember(peer.beats())
            self._shared.changed()

    def _catch_up(self) -> None:
        """Leap to a newer state that more than f of the members, as this peer knows them, name."""
        shared = self._shared
        with shared.lock:
            peer, height = shared.peer, shared.peer.state.height
            keys = [member.key for member in peer.state.members if member.key != peer.member.key]
            needed = witnesses(len(peer.state.members), peer.rules.attackers)
            known = (peer.run_id, len(peer.state.versions), leased_datasets(peer.state))
        found = self._survey.newest_state(self._contacts, keys, known, needed, self._blame)
        if found is None:
            return
        state, beats = found
        with shared.lock:
            if state.height > height == peer.state.height:  # else the next block has come meanwhile
                log.info("the run is %d blocks ahead: resuming from there", state.height - height)
                self._recorder.leap(state)
                hear(shared, Converse(run_id=peer.run_id, sender=peer.member.peer_id, height=0, statements=beats))
                self._recorder.note()

    def _blame(self, key: str, why: str) -> None:
        with self._shared.lock:
            blame(self._shared, key, why)
