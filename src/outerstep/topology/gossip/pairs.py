"""Rounds of two: in each turn a peer exchanges with one other peer, every time another one (core/gossip.py). The chain
of blocks holds the members but no rounds, because there is nothing that all peers agree on.

In turn t a peer publishes its anchor φ and what it learned, Δ. It waits for those of its partner, and steps:

    pairs          NoLoCo: m ← α·m − β·mean(Δ) − γ·(φ − mean φ);  φ ← φ + m
    exponential    φ ← the mean of both φ − Δ: after log2 n turns the mean of all

A peer steps alone if it has no partner, or if the partner does not come: it is silent, or the deadline is over. Anchors
differ from peer to peer; `weight_divergence` says how far.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.gossip import PairOuter, exponential_partner, random_partner
from ...core.state import FragmentSnapshot, FragmentState
from ...core.watch import sum_of_squares
from ...errors import BadFrame, ConfigError, ExchangeFailed, NotFinite
from ...types import Manifest, Watched, Wishes
from ..encode import Encoded
from ..forms import Form
from ..protocol import Agreed, Contribution, Joined, Sight
from ..update import OwnStep, anchor_hash
from .base import LOOK_S, GossipSettings, PeerTopology
from .node import Node
from .snapshot import most_bytes, read_snapshot, write_snapshot
from .state import Contents

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.2  # a partner that has not come yet
TURNS_SHOWN = 3  # a peer keeps its offers of so many turns; of a partner that is further ahead the newest one is taken


@dataclass(frozen=True)
class PairOffer:
    """What a peer publishes of a fragment in a turn: φ whole, Δ encoded."""

    turn: int
    anchor: Mapping[str, Tensor]
    delta: memoryview

    def write(self, form: Form) -> memoryview:
        digest = anchor_hash(self.anchor.values())
        whole = write_snapshot(form, FragmentSnapshot(self.turn, digest, self.anchor, {}, {}))
        return memoryview(bytearray(len(self.delta).to_bytes(8, "little") + bytes(self.delta) + bytes(whole)))

    @classmethod
    def read(cls, form: Form, data: memoryview, parameters: Collection[str] = ()) -> PairOffer:
        """Read an offer, or refuse it (BadFrame). `parameters`: the names whose values must be finite."""
        size = int.from_bytes(data[:8], "little")
        if size != form.up.size_bytes:
            raise BadFrame(f"a contribution to this fragment has {form.up.size_bytes} bytes, got {size}")
        whole, _ = read_snapshot(form, memoryview(bytearray(data[8 + size :])), parameters)
        return cls(whole.version, whole.theta, memoryview(bytearray(data[8 : 8 + size])))


class PairStep(OwnStep):
    """The step of one turn. `offers`: our own and the partner's, or our own twice if there is no partner."""

    def __init__(self, state: FragmentState, contents: Contents, offers: tuple[PairOffer, PairOffer]) -> None:
        super().__init__(tuple(state.roles))
        self._deltas = [contents.reader(one.delta).tensors() for one in offers]
        self._partner, self._state = offers[1].anchor, state

    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        own, partners = (deltas[name][start:stop].to(theta.device) for deltas in self._deltas)
        partner_phi = self._partner[name].reshape(-1)[start:stop].to(theta.device)
        state, outer = self._state, self._state.outer
        assert isinstance(outer, PairOuter)
        like = state.theta[name] if state.roles[name] == "parameter" else None
        outer.block(name, theta, own, partner_phi, partners, start, like)


class PairTicket:
    def __init__(
        self, topology: PairsTopology, contribution: Contribution, sequence: int, stuck_after_s: float | None
    ) -> None:
        self.fragment, self.turn = contribution.fragment, contribution.base_version + 1
        self.sequence, self.stuck_after_s = sequence, stuck_after_s
        self.waiting_for = "its partner"
        self.own: PairOffer | None = None
        self.partner: PairOffer | None = None
        self.partner_id = ""
        self.refusal = ""
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._topology = topology

    def look(self, timeout_s: float) -> Sight:
        done = self.done.wait(timeout_s)
        return Sight(done, waiting_for=self.waiting_for, failed=done and self.error is not None)

    def finish(self, *, reload: bool = False) -> Agreed:
        while not self.done.wait(LOOK_S):  # in slices, so that Ctrl-C gets through
            pass
        if self.error is not None:
            raise self.error
        return self._topology.settle(self, reload=reload)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._topology.adopted(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> PairTicket:
        self.stuck_after_s = stuck_after_s
        return self

    def pack(self) -> dict[str, Any]:
        """No server keeps a contribution for a peer that is away."""
        return {}

    def cancel(self) -> None:
        """Nothing to cancel: what was published stays published, and the wait ends with the process."""


class PairsTopology(PeerTopology):
    def __init__(
        self, node: Node, *, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], settings: GossipSettings
    ) -> None:
        super().__init__(node, tensors=tensors, anchors=anchors, settings=settings)
        self._shown: dict[int, PairOffer] = {}
        self._lock = threading.Lock()  # guards `_shown`

    def _enter(self, manifest: Manifest, wishes: Wishes) -> Joined:
        node, state = self._node, self._state
        terms, known = self._find_terms(manifest, wishes)
        state.prepare(terms)
        fragments, is_loaded = range(len(state.forms)), state.loaded is not None
        # The chain has more fragments than the model: the others are what is published in the last turns.
        node.begin(terms.encode(), terms.rules, [1] * (len(fragments) * (1 + TURNS_SHOWN)), self, terms=known)
        self._settings.announce(node)
        if known is None:
            self._begins = {f: self._as_agreed(f, state.found(f)) for f in fragments}
        else:  # some peer's anchor, to begin with
            self._begins = {f: self._as_agreed(f, self._fetch(f, after=-1), counted=is_loaded) for f in fragments}
        return Joined(node.peer_id, terms.plan, manifest, frozenset(fragments if is_loaded else ()))

    # --- what the node asks, in its own threads -----------------------------------------------------------------------

    def check(self, fragment: int, data: memoryview) -> str:
        """Never asked: in pairs nothing is offered to all peers."""
        return "in this run peers exchange in pairs"

    def snapshot(self, fragment: int) -> tuple[int, memoryview] | None:
        forms = self._state.forms
        if fragment < len(forms):
            return self._state.write(fragment)
        with self._lock:
            shown = self._shown.get(fragment)
        return None if shown is None else (shown.turn, shown.write(forms[(fragment - len(forms)) // TURNS_SHOWN]))

    def most_snapshot_bytes(self, fragment: int) -> int:
        forms = self._state.forms
        if fragment < len(forms):
            return self._state.most_bytes(fragment)
        form = forms[(fragment - len(forms)) // TURNS_SHOWN]
        return 8 + form.up.size_bytes + most_bytes(form)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> PairTicket:
        self._begun += 1
        ticket = PairTicket(self, contribution, self._begun, stuck_after_s)
        payload = self._encode(contribution, ticket.sequence)
        anchor = {name: value.clone() for name, value in self._state.anchor(ticket.fragment).items()}
        self._thread.submit(lambda: self._exchange(ticket, payload, anchor))
        return ticket

    def _exchange(self, ticket: PairTicket, payload: Encoded, anchor: Mapping[str, Tensor]) -> None:
        """In the carrying thread."""
        try:
            delta, ticket.refusal = self._check_own(ticket.fragment, payload)
            ticket.own = PairOffer(ticket.turn, anchor, delta)
            with self._lock:
                self._shown[self._place(ticket)] = ticket.own
            ticket.partner = self._wait_for_partner(ticket)
        except BaseException as error:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            ticket.error = error
        finally:
            ticket.done.set()

    def _wait_for_partner(self, ticket: PairTicket) -> PairOffer | None:
        """What the partner published in this turn or a later one; None: it does not come."""
        began_at, run = time.monotonic(), self._state.run
        limits = [limit for limit in (run.round_deadline_s, ticket.stuck_after_s) if limit is not None]
        while True:
            key, ticket.partner_id = self._partner(ticket)
            ticket.waiting_for = ticket.partner_id
            if not key:
                return None
            shown = self._ask(key, ticket)
            if shown is not None:
                return shown
            if limits and time.monotonic() - began_at > min(limits):
                log.warning(
                    "fragment %d turn %d: %s did not come; stepping alone",
                    *(ticket.fragment, ticket.turn, ticket.partner_id),
                )
                return None
            self._node.watch(ASK_AGAIN_S)

    def _place(self, ticket: PairTicket) -> int:
        """The fragment number under which this turn's offer is published."""
        return len(self._state.forms) + ticket.fragment * TURNS_SHOWN + ticket.turn % TURNS_SHOWN

    def _partner(self, ticket: PairTicket) -> tuple[str, str]:
        """Key and id of this turn's partner, chosen among the members that are not silent."""
        with self._node.lock:
            peer, now, run = self._node.peer, time.monotonic(), self._state.run
            enough = len(peer.state.members) >= run.min_peers
            keys = {m.peer_id: m.key for m in peer.state.members if not peer.is_silent(m.key, now)}
        own = self._node.peer_id
        if own not in keys or not enough:
            return ("?", "more peers") if ticket.stuck_after_s is None else ("", "")
        if run.pattern == "pairs":
            partner = random_partner(list(keys), own, f"{self._node.peer.run_id}/{ticket.fragment}", ticket.turn)
        else:
            partner = exponential_partner(list(keys), own, ticket.turn)
        return (keys[partner], partner) if partner is not None else ("", "")

    def _ask(self, key: str, ticket: PairTicket) -> PairOffer | None:
        found = self._node.snapshots.fetch_from(key, self._place(ticket), least_version=ticket.turn)
        if found is None:
            return None
        try:
            parameters = self._state[ticket.fragment].parameters
            shown = PairOffer.read(self._state.forms[ticket.fragment], found[1], parameters)
            wrong = self._state.contents[ticket.fragment].check(shown.delta)
        except BadFrame as error:
            wrong = error.message
        except Exception as error:  # another peer chose these bytes; if reading them fails, they are unusable too
            log.exception("what %s published could not be read", ticket.partner_id)
            wrong = f"it cannot be read: {type(error).__name__}: {error}"
        if wrong:
            log.warning("fragment %d turn %d: stepping alone", ticket.fragment, ticket.turn)
            self._node.blame(key, f"published what cannot be used: {wrong}")
            return ticket.own
        return shown

    def settle(self, ticket: PairTicket, *, reload: bool) -> Agreed:
        """Settle a turn: the step that it leads to."""
        assert ticket.own is not None
        fragment, partner = ticket.fragment, ticket.partner or ticket.own
        if self._feedback.is_used:
            self._feedback.settle(fragment, ticket.sequence, counted=not ticket.refusal)
        if ticket.refusal and not reload:
            raise ExchangeFailed("this peer's own contribution cannot be used") from NotFinite(ticket.refusal)
        state = self._state.begin_to_move(fragment)
        update = PairStep(state, self._state.contents[fragment], (ticket.own, partner))
        refused = f"{ticket.refusal}, so it was not published: lower the learning rate" if ticket.refusal else ""
        return self._agreed(
            fragment, ticket.turn, update, counted=not refused, refused=refused, watched=self._watched(ticket)
        )

    def _watched(self, ticket: PairTicket) -> Watched:
        """How far the two anchors are apart: the variance between them, ‖φ_i − φ_j‖²/4."""
        assert ticket.own is not None
        own = self._state.contents[ticket.fragment].reader(ticket.own.delta).tensors()
        norm = math.sqrt(sum(sum_of_squares(values) for values in own.values() if values.numel()))
        if ticket.partner is None:
            return Watched(pseudo_grad_norm=norm)
        pairs = [(ticket.own.anchor[n].reshape(-1), ticket.partner.anchor[n].reshape(-1)) for n in own]
        apart = sum(sum_of_squares(ours - theirs) for ours, theirs in pairs if ours.numel())
        return Watched(pseudo_grad_norm=norm, weight_divergence=apart / 4.0)

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        self._rest(agreed.fragment, agreed.version, agreed.update.digest)
        return None

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        return {
            "pairs": True,
            **self._state.state_dict(),
            "feedback": self._feedback.state_dict(under_way),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "pairs" not in state:
            raise ConfigError("the state was not saved with this pattern: load it where it was saved")
        self._state.load_state_dict(state)
        self._feedback.load_state_dict(state["feedback"])
