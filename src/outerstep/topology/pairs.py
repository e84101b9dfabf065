"""Rounds of two: each peer exchanges with one other, another each time (core/gossip.py). The chain of blocks holds who
belongs to the run, and no rounds: there is nothing that all agree on.

In turn t a peer publishes its anchor φ and what it learned Δ, waits for its partner's of that turn, and steps:

    pairs          NoLoCo: m ← α·m − β·mean(Δ) − γ·(φ − mean φ);  φ ← φ + m
    exponential    φ ← the mean of both φ − Δ: after log2 n turns the mean of all

Who has no partner, or whose partner does not come (it is silent, or the deadline is over), steps alone. Anchors differ
from peer to peer; how far they are apart is told as `weight_divergence`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.codecs import Dither
from ..core.feedback import ErrorFeedback
from ..core.gossip import NoLoCo, exponential_partner, random_partner
from ..core.watch import sum_of_squares
from ..errors import BadFrame, ConfigError, ExchangeFailed, NotFinite
from ..peer import Node
from ..types import Manifest, Plan, Watched, Wishes
from . import Agreed, Contribution, Joined, Orders, Ticket
from .begun import Begun, NothingToPack
from .carrying import CarryingThread
from .contents import Contents
from .encode import Sender, as_deltas, encode_frame, write_frame
from .forms import Form, forms_of
from .gossip import GossipSettings
from .gossip_terms import GossipTerms, check_joiner, found
from .memory import Memory
from .news import Whole, anchor_hash
from .pair_step import PairStep, PairTicket, Shown
from .payload import Payload
from .standing import Standing, on_host, read_standing, write_standing
from .stepped import Momentum

log = logging.getLogger(__name__)

LOOK_S = 0.2
WHOLE_PATIENCE_S = 60.0
TURNS_SHOWN = 3  # who is ahead by less than so many turns still shows this one; of who is ahead by more, the newest


class PairsTopology(NothingToPack):
    """The surface is that of `GossipTopology`."""

    def __init__(
        self, node: Node, *, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], settings: GossipSettings
    ) -> None:
        self._node, self._settings = node, settings
        self._tensors, self._anchors = tensors, anchors
        self._feedback, self._momentum = ErrorFeedback(), Momentum()
        self._terms: GossipTerms | None = None
        self._forms: list[Form] = []
        self._contents: list[Contents] = []
        self._roles: dict[str, str] = {}
        self._versions: list[int] = []
        self._shown: dict[int, Shown] = {}
        self._lock = threading.Lock()  # guards `_shown`, and anchors while they move
        self._moving: set[int] = set()
        self._loaded: dict[str, Tensor] | None = None
        self._begins: tuple[Agreed, ...] = ()
        self._begun = 0
        self._traffic = (0, 0)
        self._thread = CarryingThread("outerstep-pairs")

    # --- membership -------------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        try:
            return self._join(manifest, wishes)
        except BaseException:
            self._node.stop()
            raise

    def _join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        node = self._node
        known = node.ask_terms(self._settings.join_timeout_s)
        if known is None:
            terms = found(manifest, wishes, self._settings.wishes, node.peer_id)
        else:
            terms = GossipTerms.decode(known.document)
            check_joiner(terms, manifest, wishes, self._settings.wishes)
        self._terms, self._forms = terms, forms_of(terms.plan, terms.manifest)
        self._contents = [Contents(form) for form in self._forms]
        self._roles = {spec.name: spec.role for spec in terms.manifest.parameters}
        count = len(self._forms)
        self._versions = self._versions or [0] * count
        self._moving = set(range(count))
        # The chain has more fragments than the model: the others are what is published in the last turns.
        node.begin(terms.encode(), terms.rules, [1] * (count * (1 + TURNS_SHOWN)), self, terms=known)
        self._settings.announce(node)
        anchors = tuple(self._found(f) if known is None else self._fetch(f) for f in range(count))
        self._begins = anchors
        overtaken = frozenset(range(count)) if self._loaded is not None else frozenset()
        return Joined(node.peer_id, terms.plan, manifest, anchors, overtaken)

    def _found(self, fragment: int) -> Agreed:
        values = self._loaded if self._loaded is not None else self._tensors
        names = [entry.name for entry in self._forms[fragment].full.entries]
        whole = {n: v.contiguous().clone() for n, v in on_host({n: values[n] for n in names}).items()}
        digest = anchor_hash(whole.values())
        return self._agreed(fragment, self._versions[fragment], Whole(whole, digest), digest)

    def _fetch(self, fragment: int) -> Agreed:
        """Some peer's anchor, to begin with."""
        form = self._forms[fragment]
        parameters = {name: role for name, role in self._roles.items() if role == "parameter"}
        _, data = self._node.fetch_whole(fragment, patience_s=WHOLE_PATIENCE_S)
        standing = read_standing(form, data, parameters)
        for name, values in standing.momentum.items():
            self._momentum.of(name, values.numel(), self._home(name)).copy_(values)
        self._versions[fragment] = standing.version
        news = Whole(standing.anchor, standing.anchor_hash)
        return self._agreed(fragment, standing.version, news, standing.anchor_hash, counted=self._loaded is not None)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._node.note_progress(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        return Orders()

    def leave(self, reason: str) -> None:
        self._thread.stop()
        self._node.leave(reason, self._settings.leave_patience_s)

    # --- what the node asks, in its own threads -----------------------------------------------------------------------

    def check(self, fragment: int, data: memoryview) -> str:
        """Nothing is offered to all."""
        return "in this run peers exchange in pairs"

    def whole(self, fragment: int) -> tuple[int, memoryview] | None:
        with self._lock:
            if fragment >= len(self._forms):
                shown = self._shown.get(fragment)
                form = self._forms[(fragment - len(self._forms)) // TURNS_SHOWN]
                return None if shown is None else (shown.turn, shown.write(form))
            if fragment in self._moving:
                return None
            form = self._forms[fragment]
            anchor = on_host({entry.name: self._anchors[entry.name] for entry in form.full.entries})
            momentum = {
                n: self._momentum.of(n, anchor[n].numel(), self._home(n)) for n in anchor if self._has_momentum(n)
            }
            digest, version = anchor_hash(anchor.values()), self._versions[fragment]
            return version, write_standing(form, Standing(version, digest, anchor, on_host(momentum), (), {}))

    # --- one exchange -------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> PairTicket:
        self._begun += 1
        ticket = PairTicket(contribution, self._begun, stuck_after_s)
        fragment, deltas = contribution.fragment, as_deltas(contribution.deltas)
        form, run_id, sequence = self._forms[fragment], self._node.peer.run_id, ticket.sequence
        self._feedback.begin(fragment, sequence)
        sender = Sender(
            fragment=fragment,
            deltas=deltas,
            rules=form.rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, fragment, sequence, f"{self._node.peer_id}/{name}"),
            excerpts={},
        )
        pinned = any(deltas.device(entry.name).type == "cuda" for entry in form.up.entries)
        payload = Payload(form.up, form.up.size_bytes, memory=Memory(), pinned=pinned, hashed=False)
        write_frame(payload, form.up, sender)
        anchor = {e.name: v.clone() for e in form.full.entries for v in [on_host({"": self._anchors[e.name]})[""]]}
        self._thread.submit(lambda: self._exchange(ticket, payload, anchor))
        return ticket

    def _exchange(self, ticket: PairTicket, payload: Payload, anchor: Mapping[str, Tensor]) -> None:
        """In the carrying thread."""
        try:
            payload.wait()
            delta, form = payload.data.numpy().data, self._forms[ticket.fragment]
            ticket.refusal = self._contents[ticket.fragment].check(delta)
            if ticket.refusal:
                zeros = {entry.name: torch.zeros(entry.shape) for entry in form.up.entries}
                delta = encode_frame(zeros, form.up, {name: rule.codec for name, rule in form.rules.items()})
            ticket.own = Shown(ticket.turn, anchor, delta)
            with self._lock:
                self._shown[self._place(ticket)] = ticket.own
            ticket.partner = self._wait_for_partner(ticket)
        except BaseException as error:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            ticket.error = error
        finally:
            ticket.done.set()

    def _wait_for_partner(self, ticket: PairTicket) -> Shown | None:
        """What it published in this turn or a later one; None: it does not come."""
        began_at, run = time.monotonic(), self._run
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
            self._node.watch(LOOK_S)

    def _place(self, ticket: PairTicket) -> int:
        """The number under which what is published in this turn is found."""
        return len(self._forms) + ticket.fragment * TURNS_SHOWN + ticket.turn % TURNS_SHOWN

    def _partner(self, ticket: PairTicket) -> tuple[str, str]:
        """Key and id of who it is in this turn, of those that belong and are not silent."""
        with self._node.lock:
            peer, now = self._node.peer, time.monotonic()
            enough = len(peer.state.members) >= self._run.min_peers
            keys = {m.peer_id: m.key for m in peer.state.members if not peer.is_silent(m.key, now)}
        own = self._node.peer_id
        if own not in keys or not enough:
            return ("?", "more peers") if ticket.stuck_after_s is None else ("", "")
        if self._run.pattern == "pairs":
            partner = random_partner(list(keys), own, f"{self._node.peer.run_id}/{ticket.fragment}", ticket.turn)
        else:
            partner = exponential_partner(list(keys), own, ticket.turn)
        return (keys[partner], partner) if partner is not None else ("", "")

    def _ask(self, key: str, ticket: PairTicket) -> Shown | None:
        found = self._node.wholes.fetch_from(key, self._place(ticket), least_version=ticket.turn)
        if found is None:
            return None
        try:
            shown = Shown.read(self._forms[ticket.fragment], found[1])
            wrong = self._contents[ticket.fragment].check(shown.delta)
        except BadFrame as error:
            wrong = error.message
        if wrong:
            log.warning("what %s published cannot be used (%s); stepping alone", ticket.partner_id, wrong)
            return ticket.own
        return shown

    def finish(self, ticket: Ticket, *, reload: bool = False) -> Agreed:
        if isinstance(ticket, Begun):
            return ticket.agreed
        assert isinstance(ticket, PairTicket)
        while not ticket.done.wait(1.0):  # in slices, so that Ctrl-C gets through
            pass
        if ticket.error is not None:
            raise ticket.error
        assert ticket.own is not None
        fragment, partner = ticket.fragment, ticket.partner or ticket.own
        self._feedback.settle(fragment, ticket.sequence, counted=not ticket.refusal)
        if ticket.refusal and not reload:
            raise ExchangeFailed("this peer's own contribution cannot be used") from NotFinite(ticket.refusal)
        with self._lock:
            self._moving.add(fragment)
        form, contents = self._forms[fragment], self._contents[fragment]
        rule = NoLoCo(self._run.outer_momentum, self._run.outer_lr) if self._run.pattern == "pairs" else None
        homes = {entry.name: self._home(entry.name) for entry in form.full.entries}
        news = PairStep(form, contents, (ticket.own, partner), rule, self._momentum, homes, self._roles)
        refused = f"{ticket.refusal}, so it was not published: lower the learning rate" if ticket.refusal else ""
        return self._agreed(
            fragment, ticket.turn, news, "", counted=not refused, refused=refused, watched=self._watched(ticket)
        )

    def _watched(self, ticket: PairTicket) -> Watched:
        """How far the two anchors are apart: the variance between them, ‖φ_i − φ_j‖²/4."""
        assert ticket.own is not None
        own = self._contents[ticket.fragment].reader(ticket.own.delta).tensors()
        norm = math.sqrt(sum(sum_of_squares(values) for values in own.values() if values.numel()))
        if ticket.partner is None:
            return Watched(pseudo_grad_norm=norm)
        pairs = [(ticket.own.anchor[n].reshape(-1), ticket.partner.anchor[n].reshape(-1)) for n in own]
        apart = sum(sum_of_squares(ours - theirs) for ours, theirs in pairs if ours.numel())
        return Watched(pseudo_grad_norm=norm, weight_divergence=apart / 4.0)

    def resume(self, ticket: Ticket, *, stuck_after_s: float | None = None) -> PairTicket:
        assert isinstance(ticket, PairTicket)
        ticket.stuck_after_s = stuck_after_s
        return ticket

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        fragment = agreed.fragment
        with self._lock:
            self._versions[fragment] = agreed.version
            self._moving.discard(fragment)
            is_complete = not self._moving
        digest = agreed.news.digest if isinstance(agreed.news, PairStep) else agreed.anchor_hash
        self._node.hold_anchor(fragment, agreed.version, digest)
        if is_complete and self._node.peer.wants == "watch":
            self._node.belong()
        return None

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        return {
            "pairs": True,
            "versions": list(self._versions),
            "anchors": dict(self._anchors),
            "momentum": dict(self._momentum.tensors),
            "feedback": self._feedback.state_dict(under_way),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "pairs" not in state:
            raise ConfigError("the state was not saved with this pattern: load it where it was saved")
        self._versions = list(state["versions"])
        self._loaded = {name: value.clone() for name, value in state["anchors"].items()}
        self._momentum.tensors = {name: value.clone() for name, value in state["momentum"].items()}
        self._feedback.load_state_dict(state["feedback"])

    def catch_up(self, fragment: int) -> Begun:
        return Begun(fragment, self._begins[fragment])

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _run(self) -> GossipTerms:
        assert self._terms is not None, "not joined"
        return self._terms

    def _agreed(
        self,
        fragment: int,
        version: int,
        news: Whole | PairStep,
        digest: str,
        *,
        counted: bool = False,
        refused: str = "",
        watched: Watched | None = None,
    ) -> Agreed:
        sent, received = self._node.service.bytes_sent, self._node.wholes.bytes_received
        before, self._traffic = self._traffic, (sent, received)
        plan: Plan = self._run.plan
        return Agreed(
            fragment=fragment,
            version=version,
            counted=counted,
            too_old=False,
            news=news,
            anchor_hash=digest,
            participants=(),
            bytes_sent=sent - before[0],
            bytes_received=received - before[1],
            retries=0,
            rejoins=0,
            plan=plan,
            counted_in=version if counted else 0,
            refused=refused,
            watched=watched,
        )

    def _has_momentum(self, name: str) -> bool:
        return self._run.pattern == "pairs" and self._roles[name] == "parameter"

    def _home(self, name: str) -> torch.device:
        return self._anchors[name].device if name in self._anchors else self._tensors[name].device


__all__ = ["PairsTopology"]
