"""GradientGossip: one agreed round of all-to-all gossip at a time, by hand.

    async with GradientGossip("anna") as gossip:                          # founds a run; gossip.join_string says where
    async with GradientGossip("ben", ["outerstep://…"]) as gossip:        # joins it
        everybody = await gossip.gossip_round(pseudo_gradient)

What comes back is what the peers have agreed on: the same contributions in the same order, with the same bits, for
everybody. What to make of them is the caller's (`RobustAggregator`, `DiLoCoTrainer.sync_with_peers`). A whole training
run with anchors, healing and restarts is `DiLoCoWorker(model, optimizer, "gossip")`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from ...attached import note_attached
from ...core.codecs import Dither
from ...core.feedback import ErrorFeedback
from ...defaults import JOIN_TIMEOUT_S
from ...digest import data_hash
from ...errors import ModelError, NotFinite, OutOfStep, PeerLost
from ...types import Manifest, ParameterSpec, Wishes
from ..encode import ReadyDeltas, Sender, write_frame
from ..forms import Form, forms_of
from ..payload import Memory, OutgoingFrame
from .node import DecidedRound, Node, NodeSettings
from .state import Contents
from .terms import GossipTerms, GossipWishes, check_joiner, found

LOOK_S = 1.0
LEAVE_PATIENCE_S = 10.0


class GradientGossip:
    """`counted`: is one's own contribution in the last round? If not (it came too late), it goes into the next by
    itself, added to what is passed then."""

    def __init__(
        self,
        node_id: str,
        peers: Sequence[str] = (),
        *,
        codec: str | None = None,
        min_peers: int | None = None,
        attackers: int | None = None,
        round_deadline_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        protocol: int | None = None,
        invite_only: bool | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        **node: Any,
    ) -> None:
        """
        Args:
            node_id: a name that no other peer has.
            peers: addresses or join strings of peers in the run; none: found one.
            codec: bf16 if nobody says otherwise; "sparse64" sends the largest 64 of 4096 values, and the rest later.
            min_peers, attackers, round_deadline_s, heartbeat_timeout_s, protocol, invite_only: as between training
                peers; left out, as the run has it.
            node: further settings of `peer.NodeSettings`: listen, advertise, folder, credentials, insecure, invitation.
        """
        note_attached()
        self.node_id, self.counted = node_id, False
        self._wishes = GossipWishes(
            min_peers=min_peers,
            attackers=node.pop("liars", attackers),  # its name in earlier versions
            round_deadline_s=round_deadline_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            protocol=protocol,
            invite_only=invite_only,
        )
        self._codec, self._join_timeout_s = codec, join_timeout_s
        self._node = Node(NodeSettings(peer_id=node_id, join=tuple(peers), **node))
        self._feedback, self._sequence = ErrorFeedback(), 0
        self._version = 0
        self._joined: tuple[GossipTerms, Form, Contents] | None = None
        self._owed: dict[str, Tensor] = {}  # of a contribution that was not counted

    @property
    def current_round(self) -> int:
        """The last that was agreed on; 0 = none yet."""
        return self._version

    @property
    def join_string(self) -> str:
        """What another peer passes in `peers`. It holds the run's token."""
        return self._node.join_string

    @property
    def peers(self) -> tuple[str, ...]:
        """The ids of the members, this one included once it is let in."""
        if self._joined is None:
            return ()
        with self._node.lock:
            return tuple(member.peer_id for member in self._node.peer.state.members)

    async def gossip_round(self, local_grad: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Contribute to the next round and wait until it is agreed on: the contributions in it, in the order of the
        peers' ids, as they were sent (also one's own: what the codec left out of it comes later).

        Raises:
            NotFinite: there is NaN or Inf in it; it was not sent.
            OutOfStep: the others are so far ahead that rounds are not to be had any more. Take their weights; the next
                round is then `current_round` + 1.
        """
        return await asyncio.to_thread(self._round, local_grad)

    async def close(self) -> None:
        """Leave, when the others know all that this peer knows."""
        await asyncio.to_thread(self._node.leave, "done", LEAVE_PATIENCE_S)

    async def __aenter__(self) -> GradientGossip:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- what the node asks, in its own threads ---------------------------------------------------------------------

    def check(self, fragment: int, data: memoryview) -> str:
        assert self._joined is not None
        return self._joined[2].check(data)

    def snapshot(self, fragment: int) -> tuple[int, memoryview] | None:
        """There is no state but the number of the last round."""
        return self._version, memoryview(self._version.to_bytes(8, "little"))

    def most_snapshot_bytes(self, fragment: int) -> int:
        return 8

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _round(self, local_grad: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        wanted = {name: local_grad[name].detach() for name in sorted(local_grad)}
        _, form, contents = self._joined or self._join(wanted)
        _check_same(form, wanted)
        for name, owed in self._owed.items():
            wanted[name] = wanted[name].float() + owed.to(wanted[name].device)
        self._sequence += 1
        data = self._encode(form, wanted)
        wrong = contents.check(data)
        if wrong:
            raise NotFinite(wrong, hint="it was not sent; lower the learning rate, or clip the gradients")
        offered = self._node.offer(0, data, base_version=self._version, base_hash=_hash_of(self._version), steps=1)
        decided = self._wait()
        own = (self.node_id, 0 if offered is None else offered.sequence)
        self.counted = own in [(peer_id, says.sequence) for peer_id, says, _ in decided.contributions]
        self._feedback.settle(0, self._sequence, counted=self.counted)
        self._owed = {} if self.counted else {name: values.float().cpu() for name, values in wanted.items()}
        shapes = {entry.name: entry.shape for entry in form.up.entries}
        made = [
            {
                name: flat.view(shapes[name]).to(wanted[name].device)
                for name, flat in contents.reader(payload).tensors().items()
            }
            for _, _, payload in decided.contributions
        ]
        self._at(self._version + 1)
        return made

    def _join(self, like: Mapping[str, Tensor]) -> tuple[GossipTerms, Form, Contents]:
        specs = tuple(
            ParameterSpec(name=name, shape=tuple(tensor.shape), dtype="float32") for name, tensor in like.items()
        )
        manifest, wishes = Manifest(parameters=specs), Wishes(codec=self._codec, sync_every=1)
        known = self._node.ask_terms(self._join_timeout_s)
        if known is None:
            terms = found(manifest, wishes, self._wishes, self.node_id, self._node.key, by_hand=True)
        else:
            terms = GossipTerms.decode(known.document)
            check_joiner(terms, manifest, wishes, self._wishes, by_hand=True)
        (form,) = forms_of(terms.plan, manifest)
        self._joined = terms, form, Contents(form)
        self._node.begin(terms.encode(), terms.rules, [form.up.size_bytes], self, terms=known)
        version = 0 if known is None else self._fetch_version()
        self._at(version)
        self._node.belong()
        return self._joined

    def _encode(self, form: Form, wanted: Mapping[str, Tensor]) -> memoryview:
        run_id, sequence = self._node.peer.run_id, self._sequence
        self._feedback.begin(0, sequence)
        sender = Sender(
            fragment=0,
            deltas=ReadyDeltas(wanted),
            rules=form.rules,
            feedback=self._feedback,
            dither=lambda name: Dither.of(run_id, 0, sequence, f"{self.node_id}/{name}"),
            excerpts={},
        )
        pinned = any(tensor.is_cuda for tensor in wanted.values())
        payload = OutgoingFrame(form.up, form.up.size_bytes, memory=Memory(), pinned=pinned, hashed=False)
        write_frame(payload, form.up, sender)
        payload.wait()
        return payload.data.numpy().data

    def _wait(self) -> DecidedRound:
        node, version = self._node, self._version + 1
        while True:
            decided = node.round_of(0, version)
            if decided is not None:
                return decided
            if node.is_lost(0, version):
                newest = self._fetch_version()
                self._at(max(newest, version))
                raise OutOfStep(
                    f"rounds {version} to {self._version} were agreed on without this peer, and are not to be had any "
                    "more: take the others' weights, and go on from there"
                )
            with node.lock:
                if node.peer.is_expelled:
                    withdrawn = "its invitation was withdrawn, or " if node.peer.rules.inviter else ""
                    raise PeerLost(
                        f"the others have excluded this peer ({self.node_id}): {withdrawn}it is proven to have lied"
                    )
            node.watch(LOOK_S)

    def _fetch_version(self) -> int:
        """Where the others are."""

        def check(version: int, data: memoryview) -> str:
            return "" if bytes(data) == version.to_bytes(8, "little") else "it is of another round"

        return self._node.fetch_snapshot(0, patience_s=self._join_timeout_s, check=check)[0]

    def _at(self, version: int) -> None:
        self._version = version
        self._node.hold_anchor(0, version, _hash_of(version))
        self._node.release(0, version)


def _hash_of(version: int) -> str:
    """Everybody who is at a round is at the same one: there is nothing else to compare."""
    return data_hash([f"round {version}".encode()])


def _check_same(form: Form, wanted: Mapping[str, Tensor]) -> None:
    shapes = {entry.name: entry.shape for entry in form.up.entries}
    given = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    odd = next((name for name in (*shapes, *given) if shapes.get(name) != given.get(name)), None)
    if odd is not None:
        raise ModelError(
            f"a peer contributes the same tensors in every round: {odd!r} was {shapes.get(odd, 'missing')}, is now "
            f"{given.get(odd, 'missing')}"
        )
