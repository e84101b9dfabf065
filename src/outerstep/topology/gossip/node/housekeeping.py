"""What is to be done now and then, whether something happens or not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ....coordination.gossip.chain import witnesses
from ....coordination.gossip.meaning import leased_datasets
from ....statements import Converse
from .conversations import Survey
from .hearing import blame, hear
from .listener import Contacts

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger(__name__)


class Housekeeping:
    """Drops bytes that nobody needs any more, notes where the members are, and asks where the run stands if this peer
    is too far behind to follow."""

    def __init__(self, node: Node, contacts: Contacts, survey: Survey) -> None:
        self._node, self._contacts, self._survey = node, contacts, survey
        self._places: dict[str, str] = {}

    def start(self) -> None:
        self._node.shared.start("peer-housekeeping", self._always)

    def _always(self) -> None:
        node = self._node
        while True:
            with node.lock:
                node.shared.wait(lambda: False, node.settings.beat_every_s)
                if node.shared.is_stopping:
                    return
                node.payloads.keep_only(node.peer.needed() | node.rounds.needed())
                self._note_places()
                is_stuck = node.conversations.stuck_at == node.peer.state.height
            node.snapshots.drop_unused()
            if is_stuck:
                self._catch_up()

    def _note_places(self) -> None:
        """With the lock held."""
        contacts = self._node.peer.contacts
        keys = [member.key for member in self._node.peer.state.members]
        places = {key: contacts[key].address for key in keys if key in contacts}
        if places != self._places:
            self._places = places
            self._node.recorder.remember(self._node.peer.beats())
            self._node.shared.changed()

    def _catch_up(self) -> None:
        """More than f of the members as this peer knows them must name the same state."""
        node = self._node
        with node.lock:
            peer, height = node.peer, node.peer.state.height
            keys = [member.key for member in peer.state.members if member.key != node.key]
            needed = witnesses(len(peer.state.members), peer.rules.attackers)
            known = (peer.run_id, len(peer.state.versions), leased_datasets(peer.state))
        found = self._survey.newest_state(self._contacts, keys, known, needed, self._blame)
        if found is None:
            return
        state, beats = found
        with node.lock:
            if state.height > height == peer.state.height:  # else the next block has come meanwhile
                log.info("the run is %d blocks ahead: resuming from there", state.height - height)
                node.recorder.leap(state)
                hear(node.shared, Converse(run_id=peer.run_id, sender=node.peer_id, height=0, statements=beats))
                node.recorder.note()

    def _blame(self, key: str, why: str) -> None:
        with self._node.lock:
            blame(self._node.shared, key, why)
