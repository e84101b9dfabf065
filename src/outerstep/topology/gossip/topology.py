"""Contributions become agreements among peers without a server, some of which may fail or lie.

Each peer offers what it learned to all others. Together they decide which contributions make a round
(coordination/gossip, carried by node/node.py). Each reads those in the order of the peers' ids, combines them by the
run's rule (state.py), and takes the outer step on its own copy, with arithmetic that gives the same bits on every
machine (core/state.py). The next contribution names the hash of the anchor it started from. A peer with another anchor
is not counted; it notices, and takes the others' anchor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ...coordination.shared_leases import MOST_TRAINED, SharedLeases, shortened
from ...coordination.worker.units import LeaseRequest
from ...core.state import FragmentSnapshot
from ...errors import ConfigError, ExchangeFailed, NotFinite, PeerLost, PlanMismatch, RoundStuck, WorkerError
from ...statements import ChainState
from ...types import LeaseAnswer, LeaseStatement, Manifest, Trained, Wishes
from ..encode import Encoded
from ..protocol import Agreed, Contribution, DataVoice, Joined, Sight
from ..update import MeanStep, StepChain
from .base import LOOK_S, GossipSettings, PeerTopology
from .node import DecidedRound
from .terms import GossipTerms

log = logging.getLogger(__name__)

MOST_DATASETS_OF_PEERS = 2
LEAST_BEATS = 3  # that a peer must miss to be declared dead


class GossipTicket:
    """A contribution under way. `offered`: what the others were told of it; None: the fragment had moved on before."""

    def __init__(
        self, topology: GossipTopology, contribution: Contribution, sequence: int, stuck_after_s: float | None
    ) -> None:
        self.fragment, self.base_version = contribution.fragment, contribution.base_version
        self.sequence, self.stuck_after_s = sequence, stuck_after_s
        self.is_offered = threading.Event()
        self.offered_sequence = 0  # the number under which the others know it; 0: it was not offered
        self.said: tuple[LeaseStatement, ...] = ()  # of leased data
        self.refusal = ""  # why its own peer cannot use it
        self.error: BaseException | None = None
        self.short_since: float | None = None
        self._topology = topology

    def look(self, timeout_s: float) -> Sight:
        return self._topology.look(self, timeout_s)

    def finish(self, *, reload: bool = False) -> Agreed:
        return self._topology.settle(self, reload=reload)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._topology.adopted(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> GossipTicket:
        """Wait again. The exchange itself has continued meanwhile."""
        self.stuck_after_s, self.short_since = stuck_after_s, None
        if isinstance(self.error, RoundStuck):
            self.error = None
        return self

    def pack(self) -> dict[str, Any]:
        """No server keeps a contribution for a peer that is away."""
        return {}

    def cancel(self) -> None:
        """Nothing to cancel: an offer cannot be taken back. It counts if the others decide so."""


class GossipTopology(PeerTopology):
    def _enter(self, manifest: Manifest, wishes: Wishes) -> Joined:
        node, state = self._node, self._state
        terms, known = self._find_terms(manifest, wishes)
        if terms.pattern != "all":
            raise PlanMismatch(
                f"the run has pattern={terms.pattern}, which a peer must know before it begins",
                hint=f"start this peer with pattern={terms.pattern!r} (--pattern {terms.pattern})",
            )
        beat_s = node.settings.beat_every_s
        if terms.heartbeat_timeout_s < LEAST_BEATS * beat_s:
            raise ConfigError(
                f"heartbeat_timeout_s must be at least {LEAST_BEATS} beats, got {terms.heartbeat_timeout_s:g} s and a "
                f"beat every {beat_s:g} s; raise it where the run is founded, or lower heartbeat_interval_s"
            )
        state.prepare(terms, self._settings.wishes.own_outer)
        loaded, fragments = state.loaded, range(len(state.forms))
        versions = loaded.versions if known is None and loaded is not None else ()
        sizes = [form.up.size_bytes for form in state.forms]
        data = self._found_data(terms) if known is None and self._voice is not None else b""
        node.begin(terms.encode(), terms.rules, sizes, self, terms=known, versions=versions, data=data)
        self._settings.announce(node)
        founding = known is None or self._is_alone(known.state)
        wholes = [state.found(f) if founding else self._fetch(f, after=-1) for f in fragments]
        begin = self._as_agreed if loaded is None else self._beside_loaded
        self._begins = {f: begin(f, whole) for f, whole in enumerate(wholes)}
        return Joined(node.peer_id, terms.plan, manifest, frozenset(fragments if loaded is not None else ()))

    def _is_alone(self, state: ChainState) -> bool:
        """Is this peer the only one left of its run? Its folder keeps what the peer said, not what it held."""
        if any(member.key != self._node.key for member in state.members):
            return False
        loaded = self._state.loaded
        if any(state.versions) and (loaded is None or loaded.versions != state.versions):
            raise ConfigError(
                f"peer_dir {self._node.settings.folder!r} is that of a run at version {max(state.versions)} of which "
                "nobody else is left, and the weights are not kept there: load a state of that version "
                "(load_state_dict), or found a new run with an empty peer_dir"
            )
        return True

    def _beside_loaded(self, fragment: int, whole: FragmentSnapshot) -> Agreed:
        """Let a loaded state yield to the run: where the run has moved on, unsent steps of the state are dropped. (They
        may have been sent and counted after the state was saved.)"""
        names = tuple(self._state[fragment].roles)
        if self._state.is_as_loaded(fragment, whole):
            return self._agreed(fragment, whole.version, StepChain(names), whole.anchor_hash)
        self._feedback.forget(fragment, names)
        return self._as_agreed(fragment, whole, counted=True)

    # --- leased data (SharesData) -------------------------------------------------------------------------------------

    _voice: DataVoice | None = None
    _read: tuple[bytes, SharedLeases] | None = None  # the table as it was last

    @property
    def data_part(self) -> tuple[int, int]:
        """Each peer trains its own units."""
        return 0, 1

    def share_data(self, voice: DataVoice) -> None:
        self._voice, self._datasets = voice, tuple(voice.datasets)
        if len(self._datasets) > MOST_DATASETS_OF_PEERS:
            raise ConfigError(
                f"peers lease at most {MOST_DATASETS_OF_PEERS} datasets, got {len(self._datasets)}: what they say of "
                "them is in every block"
            )

    def _found_data(self, terms: GossipTerms) -> bytes:
        """The lease table of a run that this peer founds."""
        assert self._voice is not None
        leases, own = SharedLeases(self._datasets), self._node.peer_id
        said = self._voice.say(lambda request: leases.answer(own, request), terms.plan.sync_every, 0)
        leases.decide({own: self._node.key}, {own: said}, {})
        return leases.encode()

    def _table(self) -> SharedLeases:
        """The lease table after the last block."""
        with self._node.lock:
            state = self._node.peer.state
        assert state.data is not UNSET
        read = self._read
        if read is None or read[0] != state.data:
            read = self._read = state.data, SharedLeases.decode(state.data)
        return read[1]

    def leased(self, request: LeaseRequest) -> LeaseAnswer:
        return self._table().answer(self._node.peer_id, request)

    def is_admitted(self) -> bool:
        self._node.shared.check()
        with self._node.lock:
            return self._node.peer.is_member

    def wait_for_data(self) -> None:
        """The others wait for this worker's steps."""

    def data_progress(self) -> list[dict[str, Any]]:
        return self._table().progress()

    def _say(self) -> tuple[LeaseStatement, ...]:
        """State what this peer holds. Not under the node's lock: a thread that draws data holds the worker's lock, and
        then asks the node."""
        if self._voice is None:
            return ()
        table, own = self._table(), self._node.peer_id
        said = self._voice.say(lambda request: table.answer(own, request), self._state.run.plan.sync_every, table.turn)
        return shortened(said)

    def _trained(self, contribution: Contribution) -> tuple[Trained, ...]:
        return tuple(replace(one, places=one.places[:MOST_TRAINED]) for one in contribution.data)

    # --- what the node asks, in its own threads -----------------------------------------------------------------------

    def check(self, fragment: int, data: memoryview) -> str:
        return self._state.contents[fragment].check(data)

    def snapshot(self, fragment: int) -> tuple[int, memoryview] | None:
        return self._state.write(fragment)

    def most_snapshot_bytes(self, fragment: int) -> int:
        return self._state.most_bytes(fragment)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> GossipTicket:
        """Encode now, because the weights will change; check and offer in the background."""
        self._begun += 1
        ticket = GossipTicket(self, contribution, self._begun, stuck_after_s)
        payload = self._encode(contribution, ticket.sequence)
        base_hash = self._state[contribution.fragment].anchor_hash
        self._thread.submit(lambda: self._offer(ticket, contribution, payload, base_hash))
        return ticket

    def _offer(self, ticket: GossipTicket, contribution: Contribution, payload: Encoded, base_hash: str) -> None:
        """In the carrying thread."""
        try:
            ticket.said = self._say()
            data, ticket.refusal = self._check_own(contribution.fragment, payload)
            offered = self._node.offer(
                contribution.fragment,
                data,
                base_version=contribution.base_version,
                base_hash=base_hash,
                steps=0 if ticket.refusal else contribution.steps,
                samples=0 if ticket.refusal else contribution.samples,
                tokens=0 if ticket.refusal else contribution.tokens,
                said=ticket.said,
                trained=() if ticket.refusal else self._trained(contribution),
            )
            ticket.offered_sequence = 0 if offered is None else offered.sequence
        except BaseException as error:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            ticket.error = error
        finally:
            ticket.is_offered.set()

    def look(self, ticket: GossipTicket, timeout_s: float) -> Sight:
        give_up_at = time.monotonic() + timeout_s
        while True:
            over = self._is_over(ticket)
            if over is not None:
                return over
            left_s = give_up_at - time.monotonic()
            if left_s <= 0.0:
                break
            if not ticket.is_offered.is_set():
                ticket.is_offered.wait(min(left_s, LOOK_S))
            else:
                self._node.watch(min(left_s, LOOK_S))
        with self._node.lock:
            peer, now = self._node.peer, time.monotonic()
            wanted = frozenset((f, v) for f, v in peer.rounds_waiting() if f != ticket.fragment)
            return Sight(done=False, wanted=wanted, waiting_for=peer.waiting_for(ticket.fragment, now))

    def _is_over(self, ticket: GossipTicket) -> Sight | None:
        if ticket.error is None:
            ticket.error = self._trouble(ticket)
        if ticket.error is not None:
            return Sight(done=True, failed=True)
        if not ticket.is_offered.is_set():
            return None
        version = ticket.base_version + 1
        decided = self._node.round_of(ticket.fragment, version)
        if decided is not None:
            return Sight(done=True, missed=not self._counts(ticket, decided))
        return Sight(done=True, missed=True) if self._node.is_lost(ticket.fragment, version) else None

    def _trouble(self, ticket: GossipTicket) -> WorkerError | None:
        """Why waiting is in vain; None = it is not."""
        with self._node.lock:
            peer, now = self._node.peer, time.monotonic()
            if peer.is_expelled:
                withdrawn = "its invitation was withdrawn, or " if peer.rules.inviter else ""
                return PeerLost(
                    f"the others have excluded this peer ({self._node.peer_id}): {withdrawn}it is proven to have "
                    "signed two things that exclude each other. Was its folder (peer_dir) copied, or restored from a "
                    "backup? Start it under another worker_id with an empty folder"
                )
            if not peer.is_short_of_peers(now):
                ticket.short_since = None
                return None
            ticket.short_since = now if ticket.short_since is None else ticket.short_since
            if ticket.stuck_after_s is not None and now - ticket.short_since > ticket.stuck_after_s:
                return RoundStuck(f"fragment {ticket.fragment} waits for {peer.waiting_for(ticket.fragment, now)}")
        return None

    def _counts(self, ticket: GossipTicket, decided: DecidedRound) -> bool:
        own = (self._node.peer_id, ticket.offered_sequence)
        return own in [(peer_id, offered.sequence) for peer_id, offered, _ in decided.contributions]

    def settle(self, ticket: GossipTicket, *, reload: bool) -> Agreed:
        """Wait for the round, and read what was agreed."""
        while not self.look(ticket, LOOK_S).done:
            pass
        if ticket.error is not None:
            raise ticket.error
        if ticket.refusal and not reload:
            self._feedback.settle(ticket.fragment, ticket.sequence, counted=False)
            raise ExchangeFailed("this peer's own contribution cannot be used") from NotFinite(self._reproach(ticket))
        return self._take_over(ticket)

    def _reproach(self, ticket: GossipTicket) -> str:
        if not ticket.refusal:
            return ""
        return f"{ticket.refusal}, so it was not offered: lower the learning rate, or clip the gradients"

    # --- what was agreed ----------------------------------------------------------------------------------------------

    def _take_over(self, ticket: GossipTicket) -> Agreed:
        """All decided rounds whose bytes are here, as one update; or a snapshot, if they do not continue from our
        anchor."""
        fragment, held = ticket.fragment, self._state.begin_to_move(ticket.fragment)
        steps: list[tuple[str, MeanStep]] = []
        counted, version, last = False, ticket.base_version, None
        while (decided := self._node.round_of(fragment, version + 1)) is not None:
            base_hash = decided.block.base_hash
            if version == held.version and base_hash != held.anchor_hash:
                log.warning(
                    "fragment %d version %d: the others hold another anchor (%s) than this peer (%s); taking theirs",
                    *(fragment, version, base_hash, held.anchor_hash),
                )
                return self._take_whole(ticket, counted=False)
            last = self._state.combine(fragment, decided, self._node.peer.run_id, self._node.peer_id)
            if last.step is not None:
                steps.append((base_hash, last.step))
                counted = counted or self._counts(ticket, decided)
            version += 1
        if counted and self._voice is not None:
            self._voice.decided(ticket.said, ())
        if last is None:
            return self._take_whole(ticket, counted=self._is_counted_in_lost(ticket))
        if self._feedback.is_used:
            self._feedback.settle(fragment, ticket.sequence, counted=counted)
        return self._agreed(
            fragment,
            version,
            StepChain(tuple(self._state[fragment].roles), steps),
            counted=counted,
            refused=self._reproach(ticket),
            participants=last.participants,
            watched=last.watched,
        )

    def _is_counted_in_lost(self, ticket: GossipTicket) -> bool:
        """Did this contribution count in a round whose bytes are gone? What was decided is still known."""
        with self._node.lock:
            taken = self._node.rounds.find(ticket.fragment, ticket.base_version + 1)
            key = self._node.peer.member.key
        if taken is None or not ticket.offered_sequence:
            return False
        return any(signed.author == key for signed in taken.block.offers)

    def _take_whole(self, ticket: GossipTicket, *, counted: bool) -> Agreed:
        if self._feedback.is_used:
            self._feedback.settle(ticket.fragment, ticket.sequence, counted=counted)
        whole = self._fetch(ticket.fragment, after=ticket.base_version)
        return self._as_agreed(ticket.fragment, whole, counted=counted, refused=self._reproach(ticket))

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        fragment = agreed.fragment
        if not intact:
            log.warning("fragment %d: the anchor is not the others'; taking theirs", fragment)
            return self._as_agreed(fragment, self._fetch(fragment, after=agreed.version - 1))
        self._rest(fragment, agreed.version, agreed.update.digest)
        self._node.release(fragment, agreed.version)
        return None

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Includes anchor and momentum, so that a run can be founded from it."""
        kept = {**self._state.state_dict(), **self._state.rounds_dict()}
        return {**kept, "feedback": self._feedback.state_dict(under_way)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "histories" not in state:
            raise ConfigError("the state was not saved with topology='gossip': load it where it was saved")
        self._state.load_state_dict(state)
        self._feedback.load_state_dict(state["feedback"])


__all__ = ["GossipSettings", "GossipTopology"]
