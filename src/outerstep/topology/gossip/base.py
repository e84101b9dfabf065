"""What both kinds of exchange among peers share: all with all (topology.py), and in pairs (pairs.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.gossip.meaning import wrong_with_state
from ...coordination.shared_leases import terms_of
from ...core.feedback import ErrorFeedback
from ...core.state import FragmentSnapshot
from ...errors import ConfigError, PlanMismatch
from ...types import Dataset, Manifest, Participant, Watched, Wishes
from ..carrying import CarryingThread
from ..encode import CPU, Encoded, as_deltas, encode_frame, sender_to_peers, write_at
from ..payload import Memory, Rooms
from ..protocol import Agreed, Contribution, FinishedTicket, Joined, Orders
from ..update import AnchorUpdate, WholeAnchor
from .node import Node, Terms
from .state import PeerState
from .terms import GossipTerms, GossipWishes, check_joiner, found

LOOK_S = 1.0  # a waiting thread looks at least so often, so that Ctrl-C gets through
WHOLE_PATIENCE_S = 60.0  # for one attempt to fetch a whole fragment; attempts continue as long as somebody may have it


@dataclass(frozen=True)
class GossipSettings:
    """`join_timeout_s`: how long to look for the peers to join. `leave_patience_s`: how long a peer that leaves stays
    to tell the others what they may have missed. `announce` is called when others can join through this peer."""

    wishes: GossipWishes
    join_timeout_s: float
    leave_patience_s: float = 10.0
    announce: Callable[[Node], None] = lambda node: None


class PeerTopology(ABC):
    """Joins and leaves a run, encodes, and reports agreements. How it enters and exchanges is up to the subclass."""

    def __init__(
        self, node: Node, *, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], settings: GossipSettings
    ) -> None:
        """`tensors`: the model's, by name; the run begins with those of its founder. `anchors`: where the last agreed
        ones are."""
        self._node, self._settings = node, settings
        self._state, self._feedback = PeerState(tensors, anchors, node.events), ErrorFeedback()
        self._begins: dict[int, Agreed] = {}  # what this peer has to catch up with
        self._begun = 0
        self._datasets: tuple[Dataset, ...] = ()  # that this peer trains
        self._traffic = (0, 0)  # bytes sent and received that have been reported
        self._thread = CarryingThread("outerstep-gossip")

    # --- membership ---------------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Found a run, or join the one that the known peers are in, with its newest anchor."""
        assert manifest is not None
        try:
            return self._enter(manifest, wishes)
        except BaseException:
            self._node.stop()  # others must not find a half-made peer there
            raise

    @abstractmethod
    def _enter(self, manifest: Manifest, wishes: Wishes) -> Joined: ...

    def _find_terms(self, manifest: Manifest, wishes: Wishes) -> tuple[GossipTerms, Terms | None]:
        """The run's terms, as the known peers state them. None: this peer founds the run."""
        own = self._settings.wishes
        known = self._node.ask_terms(self._settings.join_timeout_s)
        if known is None:
            return self._with_data(found(manifest, wishes, own, self._node.peer_id, self._node.key)), None
        terms = GossipTerms.decode(known.document)
        check_joiner(terms, manifest, wishes, own)
        ours, theirs = terms_of(self._datasets), terms_of(terms.datasets or ())
        for what in sorted(ours.keys() | theirs.keys()):
            if ours.get(what) != theirs.get(what):
                raise PlanMismatch(
                    f"this peer trains {what} as {ours.get(what, 'none')}, the run has {theirs.get(what, 'none')}",
                    hint="all peers of a run train the same data",
                )
        wrong = wrong_with_state(known.state, datasets=terms.datasets or ())
        if wrong:
            raise PlanMismatch(
                f"what is known of the run cannot be: it {wrong}",
                hint="join through another peer; if it lies in this peer's own folder, give it an empty one",
            )
        return terms, known

    def _with_data(self, terms: GossipTerms) -> GossipTerms:
        if not self._datasets:
            return terms
        if terms.pattern != "all" or terms.rules.protocol < 2:
            raise ConfigError(
                "leased data needs rounds that all peers decide on, in protocol 2, got "
                f"pattern={terms.pattern!r} and protocol {terms.rules.protocol}: leave `data` out, or the settings"
            )
        return msgspec.structs.replace(terms, datasets=self._datasets)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._node.note_progress(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        """None: no server gives orders."""
        return Orders()

    def leave(self, reason: str) -> None:
        self._thread.stop()
        self._node.leave(reason, self._settings.leave_patience_s)

    def catch_up(self, fragment: int) -> FinishedTicket:
        return FinishedTicket(self._begins.pop(fragment), self.adopted)

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> None:
        """Nothing to reopen. A contribution under way was lost with the process, unless the others have it: then its
        steps are unsent, or the run has moved on with them."""
        return

    @abstractmethod
    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """The anchor has moved: see `Ticket.confirm`."""

    # --- a contribution -----------------------------------------------------------------------------------------------

    def _encode(self, contribution: Contribution, sequence: int) -> Encoded:
        fragment, deltas = contribution.fragment, as_deltas(contribution.deltas)
        form, run_id = self._state.forms[fragment], self._node.peer.run_id
        if contribution.owes_nothing:
            self._feedback.forget(fragment, form.rules)
        sender = sender_to_peers(
            form, fragment, deltas, self._feedback, run_id=run_id, worker_id=self._node.peer_id, sequence=sequence
        )
        # The node keeps this memory for as long as others may ask for it, so it is not reused.
        pinned = any(deltas.device(entry.name).type == "cuda" for entry in form.up.entries)
        return write_at(Rooms(CPU, Memory(), pinned=pinned), form.up, sender)

    def _check_own(self, fragment: int, payload: Encoded) -> tuple[memoryview, str]:
        """The contribution's bytes. If they are unusable: bytes that stand for no training, because the others wait for
        something, and the reason."""
        payload.wait()
        data, form = payload.data.numpy().data, self._state.forms[fragment]
        refusal = self._state.contents[fragment].check(data)
        if refusal:
            zeros = {entry.name: torch.zeros(entry.shape) for entry in form.up.entries}
            data = encode_frame(zeros, form.up, {name: rule.codec for name, rule in form.rules.items()})
        return data, refusal

    # --- what was agreed ----------------------------------------------------------------------------------------------

    def _fetch(self, fragment: int, *, after: int) -> FragmentSnapshot:
        """Fetch the newest snapshot of a fragment that is newer than `after`."""
        while True:
            version, data = self._node.fetch_snapshot(
                fragment,
                patience_s=WHOLE_PATIENCE_S,
                check=lambda version, data: self._state.wrong_with(fragment, version, data),
            )
            if version > after:
                return self._state.read(fragment, data)
            self._node.watch(LOOK_S)

    def _as_agreed(self, fragment: int, whole: FragmentSnapshot, *, counted: bool = False, refused: str = "") -> Agreed:
        update = WholeAnchor(whole.theta, whole.anchor_hash)
        return self._agreed(fragment, whole.version, update, whole.anchor_hash, counted=counted, refused=refused)

    def _agreed(
        self,
        fragment: int,
        version: int,
        update: AnchorUpdate,
        digest: str = "",
        *,
        counted: bool = False,
        refused: str = "",
        participants: tuple[Participant, ...] = (),
        watched: Watched | None = None,
    ) -> Agreed:
        """Make an agreement. `digest`: "" if it is known only after the update is applied."""
        sent = self._node.service.bytes_sent
        received = self._node.counts.get("fetched_bytes", 0) + self._node.snapshots.bytes_received
        before, self._traffic = self._traffic, (sent, received)
        return Agreed(
            fragment=fragment,
            version=version,
            counted=counted,
            update=update,
            anchor_hash=digest,
            participants=participants,
            bytes_sent=sent - before[0],
            bytes_received=received - before[1],
            plan=self._state.run.plan,
            counted_in=version if counted else 0,
            refused=refused,
            watched=watched,
        )

    def _rest(self, fragment: int, version: int, digest: str) -> None:
        """The anchor has moved to this hash. The next contribution and the node's beats name it."""
        self._state.rest(fragment, version, digest)
        self._node.hold_anchor(fragment, version, digest)
        if self._state.are_complete and self._node.peer.wants == "watch":
            self._node.belong()
