"""Contributions become agreements among peers that nobody is in the middle of, and of which some may fail or lie.

Each peer offers what it learned to all others. They decide which contributions a round is made of (coordination/gossip,
carried by peer/node.py), read those in the order of the peers' ids, combine them by the run's rule (combined.py), and
take the outer step each on its own copy, with arithmetic that gives the same bits on every machine (stepped.py). The
next contribution names the hash of the anchor it started from: whoever got somewhere else is not counted, sees that,
and takes the others' anchor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.codecs import Dither
from ..core.feedback import ErrorFeedback
from ..errors import ConfigError, ExchangeFailed, NotFinite, PeerLost, PlanMismatch, RoundStuck, WorkerError
from ..peer import DecidedRound, Node
from ..statements import ChainState
from ..types import Manifest, Participant, Plan, Watched, Wishes
from . import Agreed, Contribution, Joined, Orders, Sight, Ticket
from .begun import Begun, NothingToPack
from .carrying import CarryingThread
from .encode import Sender, as_deltas, encode_frame, write_frame
from .gossip_terms import GossipTerms, GossipWishes, check_joiner, found
from .gossip_ticket import GossipTicket
from .holdings import Found, Holdings
from .memory import Memory
from .news import Whole
from .payload import Payload
from .stepped import Stepped
from .steps import Steps

log = logging.getLogger(__name__)

LEAST_BEATS = 3  # that a peer must miss to be declared dead
LOOK_S = 1.0  # who waits looks at least so often, so that Ctrl-C gets through
WHOLE_PATIENCE_S = 60.0  # for one try to get a whole fragment; it is tried as long as somebody may have it


@dataclass(frozen=True)
class GossipSettings:
    """`join_timeout_s`: how long to look for the peers to join. `leave_patience_s`: how long a peer that leaves stays
    to tell the others what they may have missed. `announce` is called when this peer can be joined through."""

    wishes: GossipWishes
    join_timeout_s: float = 120.0
    leave_patience_s: float = 10.0
    announce: Callable[[Node], None] = lambda node: None


class GossipTopology(NothingToPack):
    def __init__(
        self,
        node: Node,
        *,
        tensors: Mapping[str, Tensor],
        anchors: Mapping[str, Tensor],
        settings: GossipSettings,
    ) -> None:
        """`tensors`: the model's by name, of which the founder's are what the run begins with; `anchors`: where the
        last agreed ones are found."""
        self._node, self._settings = node, settings
        self._holdings, self._feedback = Holdings(tensors, anchors), ErrorFeedback()
        self._plan: Plan | None = None
        self._begins: tuple[Agreed, ...] = ()
        self._begun = 0
        self._belongs = False
        self._traffic = (0, 0)  # bytes sent and received that were told of
        self._thread = CarryingThread("outerstep-gossip")

    # --- membership ---------------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Found a run, or join the one that the known peers are in, with its newest anchor."""
        try:
            return self._join(manifest, wishes)
        except BaseException:
            self._node.stop()  # nobody shall find a peer there that is none
            raise

    def _join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        node, holdings = self._node, self._holdings
        known = node.ask_terms(self._settings.join_timeout_s)
        if known is None:
            terms = found(manifest, wishes, self._settings.wishes, node.peer_id)
        else:
            terms = GossipTerms.decode(known.document)
            check_joiner(terms, manifest, wishes, self._settings.wishes)
            if terms.pattern != "all":
                raise PlanMismatch(
                    f"the run has pattern={terms.pattern}, which a peer must know before it begins",
                    hint=f"start this peer with pattern={terms.pattern!r} (--pattern {terms.pattern})",
                )
        beat_s = node.settings.beat_every_s
        if terms.heartbeat_timeout_s < LEAST_BEATS * beat_s:
            raise ConfigError(
                f"heartbeat_timeout must be at least {LEAST_BEATS} beats, got {terms.heartbeat_timeout_s:g} s and a "
                f"beat every {beat_s:g} s; raise it where the run is founded, or lower heartbeat_interval"
            )
        self._plan = terms.plan
        holdings.prepare(terms)
        loaded, fragments = holdings.loaded, range(len(holdings.forms))
        versions = loaded.versions if known is None and loaded is not None else ()
        sizes = [form.up.size_bytes for form in holdings.forms]
        node.begin(terms.encode(), terms.rules, sizes, self, terms=known, versions=versions)
        self._settings.announce(node)
        founding = known is None or self._is_alone(known.state)
        wholes = [holdings.found(f) if founding else self._fetch(f, after=-1) for f in fragments]
        anchors = tuple(self._as_agreed(f, whole) for f, whole in enumerate(wholes))
        if loaded is None:
            return Joined(node.peer_id, terms.plan, manifest, anchors)
        self._begins = tuple(self._beside_loaded(f, whole) for f, whole in enumerate(wholes))
        return Joined(node.peer_id, terms.plan, manifest, anchors, frozenset(fragments))

    def _is_alone(self, state: ChainState) -> bool:
        """All that is left of a run is this peer and its folder, which keeps what it said and not what it held."""
        if any(member.key != self._node.key for member in state.members):
            return False
        loaded = self._holdings.loaded
        if any(state.versions) and (loaded is None or loaded.versions != state.versions):
            raise ConfigError(
                f"peer_dir {self._node.settings.folder!r} is that of a run at version {max(state.versions)} of which "
                "nobody else is left, and the weights are not kept there: load a state of that version "
                "(load_state_dict), or found a new run with an empty peer_dir"
            )
        return True

    def _beside_loaded(self, fragment: int, whole: Found) -> Agreed:
        """A loaded state yields to the run: where that has moved on, what the state had not sent is dropped (it may
        have been sent and counted after the state was saved)."""
        names = self._holdings.names(fragment)
        if self._holdings.is_as_loaded(fragment, whole):
            return self._agreed(fragment, whole.version, Steps(names), whole.anchor_hash)
        self._feedback.forget(fragment, names)
        return self._as_agreed(fragment, whole, counted=True)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._node.note_progress(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        """Nobody gives any."""
        return Orders()

    def leave(self, reason: str) -> None:
        self._thread.stop()
        self._node.leave(reason, self._settings.leave_patience_s)

    # --- what the node asks, in its own threads -----------------------------------------------------------------------

    def check(self, fragment: int, data: memoryview) -> str:
        return self._holdings.contents[fragment].check(data)

    def whole(self, fragment: int) -> tuple[int, memoryview] | None:
        return self._holdings.write(fragment)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> GossipTicket:
        """Encode now (the weights will change); it is checked and offered in the background."""
        self._begun += 1
        ticket = GossipTicket(contribution, self._begun, stuck_after_s, self._look)
        payload = self._encode(contribution, ticket.sequence)
        base_hash = self._holdings[contribution.fragment].anchor_hash
        self._thread.submit(lambda: self._offer(ticket, contribution, payload, base_hash))
        return ticket

    def _encode(self, contribution: Contribution, sequence: int) -> Payload:
        fragment, deltas = contribution.fragment, as_deltas(contribution.deltas)
        form, run_id = self._holdings.forms[fragment], self._node.peer.run_id
        self._feedback.begin(fragment, sequence)
        sender = Sender(
            fragment=fragment,
            deltas=deltas,
            rules=form.rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, fragment, sequence, f"{self._node.peer_id}/{name}"),
            excerpts={},
        )
        # Its memory is the node's afterwards, for as long as others may ask for it: it is not used again.
        pinned = any(deltas.device(entry.name).type == "cuda" for entry in form.up.entries)
        payload = Payload(form.up, form.up.size_bytes, memory=Memory(), pinned=pinned, hashed=False)
        write_frame(payload, form.up, sender)
        return payload

    def _offer(self, ticket: GossipTicket, contribution: Contribution, payload: Payload, base_hash: str) -> None:
        """In the carrying thread. What is of no use is not offered; but the others wait for something, so they get a
        contribution that says: no training is in this."""
        try:
            payload.wait()
            data, fragment = payload.data.numpy().data, contribution.fragment
            ticket.refusal = self._holdings.contents[fragment].check(data)
            if ticket.refusal:
                data = self._nothing(fragment)
            offered = self._node.offer(
                fragment,
                data,
                base_version=contribution.base_version,
                base_hash=base_hash,
                steps=0 if ticket.refusal else contribution.steps,
                samples=0 if ticket.refusal else contribution.samples,
                tokens=0 if ticket.refusal else contribution.tokens,
            )
            ticket.offered_sequence = 0 if offered is None else offered.sequence
        except BaseException as error:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            ticket.error = error
        finally:
            ticket.is_offered.set()

    def _nothing(self, fragment: int) -> memoryview:
        form = self._holdings.forms[fragment]
        zeros = {entry.name: torch.zeros(entry.shape) for entry in form.up.entries}
        return encode_frame(zeros, form.up, {name: rule.codec for name, rule in form.rules.items()})

    def _look(self, ticket: GossipTicket, timeout_s: float) -> Sight:
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
            return Sight(done=True)
        if not ticket.is_offered.is_set():
            return None
        version = ticket.base_version + 1
        decided = self._node.round_of(ticket.fragment, version)
        if decided is not None:
            return Sight(done=True, missed=not self._counts(ticket, decided))
        return Sight(done=True, missed=True) if self._node.is_lost(ticket.fragment, version) else None

    def _trouble(self, ticket: GossipTicket) -> WorkerError | None:
        """What makes waiting vain."""
        with self._node.lock:
            peer, now = self._node.peer, time.monotonic()
            if peer.is_expelled:
                return PeerLost(
                    f"the others have excluded this peer ({self._node.peer_id}): it is proven to have signed two "
                    "things that exclude each other. Was its folder (peer_dir) copied, or restored from a backup? "
                    "Start it under another worker_id with an empty folder"
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

    def finish(self, ticket: Ticket, *, reload: bool = False) -> Agreed:
        if isinstance(ticket, Begun):
            return ticket.agreed
        assert isinstance(ticket, GossipTicket)
        while not self._look(ticket, LOOK_S).done:
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

    def resume(self, ticket: Ticket, *, stuck_after_s: float | None = None) -> GossipTicket:
        """It goes on by itself, whatever became of the wait for it."""
        assert isinstance(ticket, GossipTicket)
        ticket.stuck_after_s, ticket.short_since = stuck_after_s, None
        if isinstance(ticket.error, RoundStuck):
            ticket.error = None
        return ticket

    # --- what was agreed ----------------------------------------------------------------------------------------------

    def _take_over(self, ticket: GossipTicket) -> Agreed:
        """All rounds that are decided and here, as one piece of news; or the whole, if they do not lead on from the
        anchor that is held."""
        fragment, held = ticket.fragment, self._holdings.begin_to_move(ticket.fragment)
        steps: list[tuple[str, Stepped]] = []
        counted, version, last = False, ticket.base_version, None
        while (decided := self._node.round_of(fragment, version + 1)) is not None:
            base_hash = decided.block.base_hash
            if version == held.version and base_hash != held.anchor_hash:
                log.warning(
                    "fragment %d version %d: the others hold another anchor (%s) than this peer (%s); taking theirs",
                    *(fragment, version, base_hash, held.anchor_hash),
                )
                return self._take_whole(ticket, counted=False)
            last = self._holdings.combine(fragment, decided, self._node.peer.run_id, self._node.peer_id)
            if last.frame is not None:
                steps.append((base_hash, self._holdings.step(fragment, last.frame)))
                counted = counted or self._counts(ticket, decided)
            version += 1
        if last is None:
            return self._take_whole(ticket, counted=self._is_counted_in_lost(ticket))
        self._feedback.settle(fragment, ticket.sequence, counted=counted)
        return self._agreed(
            fragment,
            version,
            Steps(self._holdings.names(fragment), steps),
            "",  # known when the news were taken over
            counted=counted,
            refused=self._reproach(ticket),
            participants=last.participants,
            watched=last.watched,
        )

    def _is_counted_in_lost(self, ticket: GossipTicket) -> bool:
        """Its bytes are gone, but what was decided is known."""
        with self._node.lock:
            taken = self._node.rounds.find(ticket.fragment, ticket.base_version + 1)
            key = self._node.peer.member.key
        if taken is None or not ticket.offered_sequence:
            return False
        return any(signed.author == key for signed in taken.block.offers)

    def _take_whole(self, ticket: GossipTicket, *, counted: bool) -> Agreed:
        self._feedback.settle(ticket.fragment, ticket.sequence, counted=counted)
        whole = self._fetch(ticket.fragment, after=ticket.base_version)
        return self._as_agreed(ticket.fragment, whole, counted=counted, refused=self._reproach(ticket))

    def _fetch(self, fragment: int, *, after: int) -> Found:
        """The newest whole of a fragment, newer than `after`, with its momentum and what else belongs to it."""
        while True:
            version, data = self._node.fetch_whole(fragment, patience_s=WHOLE_PATIENCE_S)
            if version > after:
                return self._holdings.read(fragment, data)
            self._node.watch(LOOK_S)

    def _as_agreed(self, fragment: int, whole: Found, *, counted: bool = False, refused: str = "") -> Agreed:
        return self._agreed(fragment, whole.version, whole.news, whole.anchor_hash, counted=counted, refused=refused)

    def _agreed(
        self,
        fragment: int,
        version: int,
        news: Whole | Steps,
        digest: str,
        *,
        counted: bool = False,
        refused: str = "",
        participants: tuple[Participant, ...] = (),
        watched: Watched | None = None,
    ) -> Agreed:
        assert self._plan is not None, "not joined"
        sent = self._node.service.bytes_sent
        received = self._node.counts.get("fetched_bytes", 0) + self._node.wholes.bytes_received
        before, self._traffic = self._traffic, (sent, received)
        return Agreed(
            fragment=fragment,
            version=version,
            counted=counted,
            too_old=False,
            news=news,
            anchor_hash=digest,
            participants=participants,
            bytes_sent=sent - before[0],
            bytes_received=received - before[1],
            retries=0,
            rejoins=0,
            plan=self._plan,
            counted_in=version if counted else 0,
            refused=refused,
            watched=watched,
        )

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """The anchor has moved, and this is its hash: the next contribution names it, and so do the node's beats."""
        fragment, before = agreed.fragment, self._holdings[agreed.fragment].version
        if not intact:
            log.warning("fragment %d: the anchor is not the others'; taking theirs", fragment)
            return self._as_agreed(fragment, self._fetch(fragment, after=agreed.version - 1))
        digest = agreed.news.digest if isinstance(agreed.news, Steps) else agreed.anchor_hash
        self._holdings.rest(fragment, agreed.version, digest)
        self._node.hold_anchor(fragment, agreed.version, digest)
        for version in range(before + 1, agreed.version + 1):
            self._node.release(fragment, version)
        if not self._belongs and self._holdings.are_complete:
            self._belongs = True
            self._node.belong()
        return None

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Anchor and momentum too: a run can be founded from it."""
        return {**self._holdings.state_dict(), "feedback": self._feedback.state_dict(under_way)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._holdings.load_state_dict(state)
        self._feedback.load_state_dict(state["feedback"])

    def catch_up(self, fragment: int) -> Begun:
        return Begun(fragment, self._begins[fragment])


__all__ = ["GossipSettings", "GossipTopology"]
