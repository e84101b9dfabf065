"""A peer as a process: the state machine of coordination/gossip with a place to be reached at, a memory and a disk.

    node = Node(NodeSettings(peer_id="anna", join=("outerstep://…",), folder="peer"))
    terms = node.ask_terms(patience_s=60)           # None: there is no run yet, found one
    node.begin(document, rules, sizes, callbacks, terms=terms)
    version, data = node.fetch_snapshot(0, patience_s=60)
    node.hold_anchor(0, version, anchor_hash)
    node.belong()                                   # the others wait for this peer from now on
    node.offer(0, data, base_version=version, base_hash=anchor_hash, steps=500)
    while (decided := node.round_of(0, version + 1)) is None:
        node.watch(timeout_s=5)
    node.release(0, version + 1)
    node.leave("done", patience_s=30)

Its threads: pulse and conversations (conversations.py), looking and fetching (contributions.py), recording
(records.py), and those of the HTTP service. Whatever goes wrong with another peer is that peer's trouble (hearing.py,
calls.py). If a thread ends all the same, the node stops (`failure`): a peer that still beats but no longer fetches or
records would keep the others waiting; watchdog.py says whose fault it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from msgspec import UNSET
from msgspec.structs import replace

from ....coordination.gossip import GossipPeer, GossipRules, Keepsake
from ....coordination.gossip.chain import found, unseen
from ....coordination.gossip.names import is_anothers, vouched
from ....dashboard import Dashboard, link_to
from ....defaults import RECENT_LOSSES
from ....errors import (
    Busy,
    ConfigError,
    ExchangeFailed,
    ProtocolMismatch,
    Refused,
    ServerUnreachable,
    UntrustedServer,
)
from ....events import Event, EventSink, PeerExpelled, RoundDecided, WorkerDied, WorkerJoined, WorkerLeft, mean_loss
from ....observe import FanOut
from ....observe.status import PEER_MODE, PeerMemberStatus, PeerStatus
from ....security import Credentials
from ....security.signing import make_key, verify
from ....statements import Beat, ChainState, Converse, Decision, Member, Offered, Ownership, Round, invitation_body
from ....types import LeaseStatement, Trained
from ....versions import OLDEST_PROTOCOL, as_spoken
from ....wire.peers import MOST_DOCUMENT_BYTES, Terms, about_contribution
from .contributions import DecidedRounds, Fetcher, Payloads
from .conversations import Conversations, Survey
from .hearing import blame, hear
from .housekeeping import Housekeeping
from .listener import Contacts, NodeListener
from .records import PeerFolder, PeerRunFacts, Recorder
from .service import PeerService
from .settings import Callbacks, DecidedRound, NodeSettings
from .shared import Shared
from .snapshots import CheckSnapshot, SnapshotExchange
from .status import with_run

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 5.0
CHECK_S = 1.0  # how often a thread that waits for blocks looks whether the node has failed
LONGEST_SILENCE_S = 10.0  # of another peer in the middle of an answer


class Node:
    """A peer as a process. It listens from the start and speaks from `begin` on. Others may use `peer` under `lock`."""

    # made by `begin`
    recorder: Recorder
    conversations: Conversations
    snapshots: SnapshotExchange
    rounds: DecidedRounds
    _fetcher: Fetcher
    _housekeeping: Housekeeping

    def __init__(
        self,
        settings: NodeSettings,
        clock: Callable[[], float] = time.monotonic,
        event_sink: EventSink | None = None,
    ) -> None:
        self.settings, self.clock = settings, clock
        self.events = FanOut(event_sink)
        self.shared = Shared(clock, self.events)
        self.lock = self.shared.lock
        self._folder = PeerFolder(settings.folder) if settings.folder is not None else None
        try:
            facts = self._folder.facts if self._folder is not None else None
            if facts is not None and facts.peer_id != settings.peer_id:
                raise ConfigError(
                    f"the folder {settings.folder!r} is that of peer {facts.peer_id!r}, got peer_id "
                    f"{settings.peer_id!r}: take that id, or another folder"
                )
            self._key = self._folder.key if self._folder is not None else make_key()
            self.service = PeerService(self)
            self.events.add(self.service.counts)
            self.dashboard = self._make_dashboard() if settings.page else None
            token = facts.token if facts is not None else None
            self._listener = NodeListener(settings, self.service, token, self.dashboard)
        except BaseException:
            self._close_folder()
            raise
        self.started_at = clock()
        self.payloads = Payloads(settings.memory_bytes)
        self._survey = Survey(self._listener, settings.peer_id, self._key, self._pause)
        self.progress: tuple[int, float, float | None] = (0, 0.0, None)
        self.losses: deque[float] = deque(maxlen=RECENT_LOSSES)  # of the last rounds, the newest last
        self._document = b""
        self._is_stopped = False
        if self.dashboard is not None:
            self.dashboard.start()
        _alive.add(self)

    def _make_dashboard(self) -> Dashboard:
        made = Dashboard(self.status)
        self.events.add(made.happened)
        self.service.routes |= made.routes
        return made

    @property
    def peer_id(self) -> str:
        return self.settings.peer_id

    @property
    def key(self) -> str:
        """The public key: who this peer is."""
        return self._key.public

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def join_string(self) -> str:
        """What to type on the next machine. Holds the run's token: not for logs."""
        return self._listener.join_string

    def page_link(self) -> str:
        """A link to this peer's page: it logs one browser in, once. "" = it has none."""
        if self.dashboard is None:
            return ""
        return link_to(self.address, self.dashboard.make_link("run").code, plain=self.settings.insecure)

    @property
    def failure(self) -> str:
        return self.shared.failure

    @property
    def peer(self) -> GossipPeer:
        return self.shared.peer

    # --- beginning --------------------------------------------------------------------------------------------------

    def ask_terms(self, patience_s: float) -> Terms | None:
        """The terms of the run to join, or of the run in the folder. None: there is no run yet, so found one."""
        kept = self._kept_terms()
        if not self._listener.joins:
            return kept
        try:
            terms = self._survey.find_terms(self._listener.joins, patience_s if kept is None else min(patience_s, 1.0))
        except (ServerUnreachable, Refused, UntrustedServer) as error:
            if kept is None:
                raise
            log.warning("%s; resuming from what the folder holds", error)
            return kept
        if kept is not None and kept.run_id != terms.run_id:
            raise ConfigError(
                f"the folder {self.settings.folder!r} holds run {kept.run_id}, the peers to join run {terms.run_id}: "
                "give this peer an empty folder, or leave join out to resume the run in it"
            )
        return terms if kept is None else self._resumed(kept, terms)

    def _resumed(self, kept: Terms, told: Terms) -> Terms:
        """The terms of a peer that was in the run before. It believes its own folder; of the peer to join it asks only
        where the members are. They say where the run stands, as after any absence (housekeeping.py)."""
        before = {member.key for member in kept.state.members} - {self.key}
        if before and not before & {member.key for member in told.state.members}:
            raise ConfigError(
                f"of the members that the folder {self.settings.folder!r} knows, none is left in the run to join, so "
                "nobody can tell how it went on: give this peer an empty folder, with which it joins as somebody new"
            )
        return replace(kept, beats=(*kept.beats, *told.beats))

    def _kept_terms(self) -> Terms | None:
        folder = self._folder
        if folder is None or folder.facts is None or folder.keepsake is None:
            return None
        return Terms(
            run_id=folder.facts.run_id,
            document=folder.document,
            state=folder.keepsake.state,
            attackers=folder.facts.attackers,
            beats=folder.beats,
        )

    def begin(
        self,
        document: bytes,
        rules: GossipRules,
        sizes: Sequence[int],
        callbacks: Callbacks,
        *,
        terms: Terms | None,
        versions: Sequence[int] = (),
        data: bytes = b"",
    ) -> None:
        """Found the run (`terms` None; `versions`: those of a saved state), or take part in it: watching, until
        `belong`. `sizes`: how many bytes a contribution to each fragment has."""
        if self.shared.has_begun:
            raise ConfigError("this node has begun before; make a new one")
        if len(document) > MOST_DOCUMENT_BYTES:
            raise ConfigError(f"the terms of a run have at most {MOST_DOCUMENT_BYTES} bytes, got {len(document)}")
        member = Member(peer_id=self.peer_id, key=self.key)
        owner = Credentials(self.settings.credentials).worker_key(self.peer_id)
        if terms is None:
            state = found(
                member, len(sizes), tuple(versions), owner=owner.public, protocol=rules.protocol, data=data or UNSET
            )
            terms = Terms(run_id=secrets.token_hex(8), document=document, state=state, attackers=rules.attackers)
        if len(terms.state.versions) != len(sizes):
            raise ConfigError(f"the run has {len(terms.state.versions)} fragments, got sizes for {len(sizes)}")
        if is_anothers(member, owner.public, terms.state):
            raise ConfigError(
                f"in this run the name {self.peer_id!r} belongs to another peer, here or away: choose another "
                "worker_id; or, if it is this peer's, start it with the folder (peer_dir) or the credentials it had"
            )
        body = vouched(terms.run_id, self.peer_id, self.key)
        invitation = self._check_invited(terms.run_id, rules)
        self._document, self._sizes = document, tuple(sizes)
        keepsake = self._take_up(terms, document, rules, invitation)
        peer = GossipPeer(
            terms.run_id,
            member,
            self._key.sign,
            verify,
            rules,
            keepsake,
            sizes,
            self.clock(),
            address=self._listener.address,
            fingerprint=self._listener.fingerprint,
            invitation=invitation,
            can_call=self._listener.can_call,
            owner=Ownership(key=owner.public, signature=owner.sign(body)),
        )
        with self.lock:
            self._furnish(peer, callbacks)
            for event in unseen(None, keepsake.state) if keepsake.incarnation <= 1 else ():
                self.events(event)
            greeting = Converse(run_id=terms.run_id, sender=self.peer_id, height=0, statements=terms.beats)
            hear(self.shared, greeting)
            self._after_members()
            self.recorder.note()
        self.recorder.start()
        self.conversations.start()
        self._fetcher.start()
        self._housekeeping.start()
        self._warn_of_namesake(terms.state)
        self._warn_of_lost(terms.state)

    def _check_invited(self, run_id: str, rules: GossipRules) -> str:
        """This peer's invitation, if the run wants one. Refused without: the peer would wait for ever."""
        kept = self._folder.facts if self._folder is not None else None
        invitation = self.settings.invitation or ("" if kept is None or kept.invitation is UNSET else kept.invitation)
        if not rules.inviter or rules.inviter == self.key:
            return ""
        body = invitation_body(run_id, self.peer_id, self.key)
        if not invitation or not verify(rules.inviter, body, bytes.fromhex(invitation)):
            raise ConfigError(
                f"this run takes invited peers only, and {self.peer_id!r} has "
                f"{'another invitation' if invitation else 'none'}: let its founder run "
                f"`outerstep invite {self.peer_id} {self.key}`, and pass what that prints as --invitation, with the "
                "same --worker-id and --peer-dir"
            )
        return invitation

    def _take_up(self, terms: Terms, document: bytes, rules: GossipRules, invitation: str) -> Keepsake:
        """What this peer must not forget, from the folder if there is one."""
        if self._folder is None:
            return Keepsake(run_id=terms.run_id, state=terms.state)
        facts = PeerRunFacts(
            run_id=terms.run_id,
            peer_id=self.peer_id,
            token=self._listener.token,
            attackers=rules.attackers,
            protocol=rules.protocol,
            invitation=invitation or UNSET,
        )
        try:
            return self._folder.take_up(as_spoken(facts, rules.protocol), document, terms.state, terms.beats)
        except OSError as error:
            raise ConfigError(f"the folder {self.settings.folder!r} cannot be written: {error.strerror}") from error

    def _furnish(self, peer: GossipPeer, callbacks: Callbacks) -> None:
        self.shared.begin(peer)
        self.rounds = DecidedRounds(peer.state)
        self._members = peer.state.members
        self.recorder = Recorder(self.shared, self._folder, self._on_decided, self._on_leap)
        self._contacts = Contacts(self._listener, self._find_beat, LONGEST_SILENCE_S)
        self.conversations = Conversations(self.shared, self.recorder, self._contacts, self.settings.beat_every_s)
        self.snapshots = SnapshotExchange(self.shared, self._contacts, callbacks)
        self._fetcher = Fetcher(self.shared, self.recorder, self._contacts, self.payloads, self.rounds, callbacks)
        self._housekeeping = Housekeeping(
            self.shared,
            self.recorder,
            self.conversations,
            self.payloads,
            self.rounds,
            self.snapshots,
            self._contacts,
            self._survey,
            self.settings.beat_every_s,
        )

    @property
    def protocol(self) -> int:
        """The run's protocol."""
        if self.shared.has_begun:
            return self.peer.rules.protocol
        facts = self._folder.facts if self._folder is not None else None
        return OLDEST_PROTOCOL if facts is None or facts.protocol is UNSET else facts.protocol

    def terms(self, protocol: int) -> Terms:
        """The terms, for a peer that wants to join and speaks this protocol."""
        with self.lock:
            if protocol < self.protocol:
                raise ProtocolMismatch(
                    f"this run speaks protocol {self.protocol}, the peer that asks {protocol}",
                    hint="update outerstep at that peer, or found the run with --protocol 1",
                )
            if not self.shared.has_begun:
                kept = self._kept_terms()
                if kept is None:
                    raise Busy("this peer has not begun yet", hint="ask again", retry_after_s=1.0)
                return kept
            peer = self.peer
            return Terms(
                run_id=peer.run_id,
                document=self._document,
                state=peer.state,
                attackers=peer.rules.attackers,
                beats=peer.beats(),
            )

    # --- the topology's side ----------------------------------------------------------------------------------------

    def belong(self) -> None:
        """Ask to become a member, for whom rounds wait: this peer holds the anchors now."""
        self.shared.check()
        with self.lock:
            self.peer.belong(self.clock())
            self.recorder.note()

    def hold_anchor(self, fragment: int, version: int, anchor_hash: str) -> None:
        with self.lock:
            self.peer.hold_anchor(fragment, version, anchor_hash)
            self.recorder.note()

    def offer(
        self,
        fragment: int,
        data: memoryview,
        *,
        base_version: int,
        base_hash: str,
        steps: int,
        samples: int = 0,
        tokens: int = 0,
        said: tuple[LeaseStatement, ...] = (),
        trained: tuple[Trained, ...] = (),
    ) -> Offered | None:
        """Contribute to the round after `base_version`; the bytes are copied. None: that round is decided already. A
        peer that has just come back may hold a newer anchor than its blocks lead to; it waits for those first."""
        self.shared.check()
        data = memoryview(data).cast("B")
        if len(data) != self._sizes[fragment]:
            raise ExchangeFailed(
                f"a contribution to fragment {fragment} has {self._sizes[fragment]} bytes, got {len(data)}"
            )
        about = about_contribution(self.peer.run_id, fragment)
        digest = self.payloads.put(about, data, self.settings.part_size_bytes)
        try:
            with self.lock:
                while not self.shared.wait(lambda: self.peer.state.versions[fragment] >= base_version, CHECK_S):
                    self.shared.check()
                if self.peer.state.versions[fragment] > base_version:
                    return None
                says = self.peer.offer(
                    fragment,
                    digest,
                    base_hash,
                    self.clock(),
                    steps=steps,
                    samples=samples,
                    tokens=tokens,
                    data=said,
                    trained=trained,
                )
                self.recorder.note()
            return says
        finally:
            self.payloads.unpin(digest)

    def round_of(self, fragment: int, version: int) -> DecidedRound | None:
        """The decided round with all its bytes; None: it is not decided, or bytes are missing."""
        self.shared.check()
        with self.lock:
            taken = self.rounds.find(fragment, version)
        if taken is None:
            return None
        held = [self.payloads.get(says.digest) for _, _, says in taken.offers]
        pairs = zip(taken.offers, held, strict=True)
        here = [(peer_id, says, payload.data) for (peer_id, _, says), payload in pairs if payload is not None]
        return DecidedRound(taken.block, tuple(here)) if len(here) == len(held) else None

    def is_lost(self, fragment: int, version: int) -> bool:
        """It was decided, but its bytes can no longer be had: take a snapshot instead."""
        with self.lock:
            return self.rounds.is_lost(fragment, version)

    def release(self, fragment: int, version: int) -> None:
        """All rounds up to this one are adopted. Others may ask for their bytes until two more rounds are decided."""
        with self.lock:
            self.rounds.release(fragment, version)

    def fetch_snapshot(
        self, fragment: int, *, patience_s: float, check: CheckSnapshot = lambda version, data: ""
    ) -> tuple[int, memoryview]:
        """The newest version of a fragment that more than f members name the same digest for (or all that can be heard,
        if those are fewer), and its bytes. `check` says why they cannot be used: then others are asked."""
        self.shared.check()
        return self.snapshots.fetch(fragment, patience_s, check)

    def blame(self, key: str, why: str) -> None:
        """Count, show and log that the member with this key has sent something unusable."""
        with self.lock:
            blame(self.shared, key, why)

    def watch(self, timeout_s: float, since: int | None = None) -> int:
        """Wait until something has changed. Returns a number to pass as `since` the next time, so that nothing that
        happens in between is missed; raises if the node has failed."""
        with self.lock:
            seen = self.shared.changes if since is None else since
            self.shared.wait(lambda: self.shared.changes != seen, timeout_s)
            self.shared.check()
            return self.shared.changes

    def note_progress(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """Note the training's progress, which travels with the next beat. Training that has reported once must keep
        reporting, or this peer falls silent (conversations.py)."""
        with self.lock:
            self.shared.progress_at = self.clock()
            self.progress = (step, steps_per_second, loss)
            self.peer.note_progress(step, steps_per_second, loss)

    def status(self) -> PeerStatus:
        with self.lock:
            now = self.clock()
            status = PeerStatus(
                mode=PEER_MODE,
                peer_id=self.peer_id,
                address=self.address,
                uptime_s=now - self.started_at,
                failure=self.failure,
                trouble=self.shared.trouble,
                bytes_sent=self.service.bytes_sent,
                bytes_received=self.counts.get("fetched_bytes", 0),
            )
            if not self.shared.has_begun:
                return status
            step, speed, loss = self.progress
            own = PeerMemberStatus(
                peer_id=self.peer_id, address=self.address, step=step, steps_per_second=speed, loss=loss, is_self=True
            )
            return replace(
                with_run(status, self.peer, own, self.conversations.troubles(), now),
                losses=[float(f"{loss:.6g}") for loss in self.losses],
                held_bytes=self.payloads.memory_bytes,
                spooled_bytes=self.payloads.spooled_bytes,
                fetches=self.counts,
                conversations=self.conversations.conversations,
            )

    @property
    def counts(self) -> dict[str, int]:
        """Counters of fetched contributions."""
        return dict(self._fetcher.counts) if self.shared.has_begun else {}

    # --- ending -----------------------------------------------------------------------------------------------------

    def leave(self, reason: str, patience_s: float) -> None:
        """Leave the run: say so, stay until the others know all that this peer knows, stop."""
        log.info("leaving: %s", reason)
        if self.shared.has_begun and not self.failure:
            with self.lock:
                self.peer.leave(self.clock())
                self.recorder.note()
                said = self.shared.news
                self.shared.wait(lambda: self._is_dispensable() and self.conversations.have_heard(said), patience_s)
        self.stop()

    def _is_dispensable(self) -> bool:
        """With the lock held: nobody waits for this peer, or needs anything that it has."""
        peer, now = self.peer, self.clock()
        others = [m.key for m in peer.state.members if m.key != self.key and not peer.is_silent(m.key, now)]
        beats = [peer.contacts.get(key) for key in others if not self.conversations.is_gone(key)]
        if peer.is_member and any(beat is None or beat.wants != "leave" for beat in beats):
            return False
        return all(beat is not None and self._knows_all(beat) for beat in beats)

    def _knows_all(self, beat: Beat) -> bool:
        """Does every other member know all that this peer knows? (One that leaves need not.)"""
        if beat.wants == "leave" or beat.height < self.peer.state.height:
            return beat.wants == "leave"
        held = [version for version, _ in beat.held]
        return beat.wants != "belong" or all(h >= v for h, v in zip(held, self.peer.state.versions, strict=False))

    def stop(self) -> None:
        """Stop at once, without a goodbye: the others will notice. Safe to call twice."""
        with self.lock:
            is_first, self._is_stopped = not self._is_stopped, True
        if not is_first:
            return
        left = self.shared.stop(STOP_PATIENCE_S)
        self._listener.stop(STOP_PATIENCE_S if not self.failure else 0.0)
        if self.dashboard is not None:
            self.dashboard.stop()
        if self.shared.has_begun:
            self._contacts.close()
        if left:
            log.info("still in the middle of something, and ending with the process: %s", ", ".join(left))
        self._close_folder()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _on_decided(self, decision: Decision) -> None:
        self.rounds.add(decision)
        for event in self.peer.told:
            self.events(event)
        if isinstance(decision.block, Round):
            fragment, version = decision.block.fragment, decision.block.version
            taken = self.rounds.find(fragment, version)
            workers = [peer_id for peer_id, _, _ in taken.offers] if taken is not None else []
            if fragment == 0:
                self._note_losses(workers)
            self.events(RoundDecided(fragment, version, workers))
        if self.peer.state.members != self._members:
            self._after_members()

    def _note_losses(self, workers: Sequence[str]) -> None:
        """Note the members' losses, as far as their beats report one."""
        known = {self.peer_id: self.progress[2]}
        for member in self.peer.state.members:
            if (beat := self.peer.contacts.get(member.key)) is not None and member.key != self.key:
                known[member.peer_id] = beat.loss
        if (mean := mean_loss(map(known.get, workers))) is not None:
            self.losses.append(mean)

    def _on_leap(self, state: ChainState) -> None:
        self.rounds.leap(state)
        for event in self.peer.unseen:
            self.events(event)
        self.peer.unseen = []
        self._after_members()

    def _after_members(self) -> None:
        """With the lock held: follow a change of members."""
        before, self._members = self._members, self.peer.state.members
        if before != self._members:
            log.info("members: %s", ", ".join(member.peer_id for member in self._members))
        for member in self._members:
            if member not in before:
                beat = self.peer.contacts.get(member.key)
                where, started = (beat.address, beat.incarnation) if beat is not None else ("", 0)
                self.events(WorkerJoined(member.peer_id, where, started))
        for member in before:
            if member not in self._members:
                self.events(self._why_gone(member))
        self.recorder.remember(self.peer.beats())
        self.conversations.ensure()

    def _why_gone(self, member: Member) -> Event:
        beat, key = self.peer.contacts.get(member.key), member.key
        if any(expelled.key == key for expelled in self.peer.state.expelled):
            return PeerExpelled(member.peer_id)
        if key == self.key or (beat is not None and beat.wants == "leave"):
            return WorkerLeft(member.peer_id, "it left the run")
        return WorkerDied(member.peer_id, round(self.peer.silent_s(key, self.clock()), 1))

    def _find_beat(self, key: str) -> Beat | None:
        with self.lock:
            return self.peer.contacts.get(key)

    def _warn_of_namesake(self, state: ChainState) -> None:
        if any(m.peer_id == self.peer_id and m.key != self.key for m in state.members):
            log.warning(
                "a member of the run is called %r already. If it is this peer, started without its folder, it is let "
                "in when that one has been silent for long enough; if another of this user's, choose another id",
                self.peer_id,
            )

    def _warn_of_lost(self, state: ChainState) -> None:
        lost = [m.peer_id for m in state.members if m.key != self.key and m.key not in self.peer.contacts]
        if lost and self._folder is not None:
            log.warning(
                "nobody has said in a way that is of use where %s can be called: until they call, they count as "
                "silent (`outerstep repair %s` looks through the folder)",
                *(", ".join(lost), self._folder.place),
            )

    def _pause(self, seconds: float) -> bool:
        with self.lock:
            self.shared.wait(lambda: False, seconds)
            return not self.shared.is_stopping

    def _close_folder(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.close()


_alive: weakref.WeakSet[Node] = weakref.WeakSet()


def _let_go() -> None:
    """A training process forks, for its data say. If it is killed, its children live on for a while: they must not
    keep the port and the folder from the process that comes in its place."""
    for node in _alive:
        node._listener.let_go()
        if node.dashboard is not None:
            node.dashboard.let_go()
        node._close_folder()


os.register_at_fork(after_in_child=_let_go)
