"""What a node answers to others, and what it says of itself; in the words of a server's status where there are such."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....coordination.gossip.chain import leased_data
from ....errors import BadRequest, Busy, NotFound, OtherRun, RunFull, ServerFailed
from ....observe.families import families_of
from ....observe.prometheus import CONTENT_TYPE, METRICS_PATH, write_metrics
from ....observe.sinks import EventCounts
from ....observe.status import PEER_MODE, DataStatus, FragmentStatus, PeerMemberStatus, PeerStatus
from ....statements import Converse
from ....versions import check_spoken
from ....wire.http_request import HttpRequest
from ....wire.messages import MAX_JOIN_BYTES, place_of
from ....wire.pages import pages
from ....wire.peers import (
    AskParts,
    AskSnapshot,
    AskTerms,
    GetHeld,
    HeldAnswer,
    OfferedSnapshot,
    PartList,
    PeerAnswer,
    PeerRequest,
)
from ....wire.routes import DownloadRoute, MessageRoute, PlainRoute, Reply, Route
from .contributions import HeldPayload
from .hearing import hear

if TYPE_CHECKING:
    from .node import Node

RETRY_S = 0.5
DISK_PATIENCE_S = 20.0


class PeerService:
    """The bytes' side of a Node. Every caller has shown the run's token."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.bytes_sent = 0
        self.counts = EventCounts()
        self.routes: dict[tuple[str, str], Route] = {
            **pages(self),
            place_of(AskTerms): MessageRoute(AskTerms, self.answer, "sender"),
            place_of(Converse): MessageRoute(Converse, self.answer, "sender", MAX_JOIN_BYTES),
            place_of(AskSnapshot): MessageRoute(AskSnapshot, self.answer, "sender"),
            place_of(AskParts): MessageRoute(AskParts, self.answer, "sender"),
            place_of(GetHeld): DownloadRoute(GetHeld, self.get_part, "sender"),
            ("GET", METRICS_PATH): PlainRoute(self.metrics, reads=True),
        }

    @property
    def failure(self) -> str:
        return self._node.failure

    @property
    def trouble(self) -> str:
        return self._node.shared.trouble

    def answer(self, request: PeerRequest) -> PeerAnswer:
        self._check_health()
        match request:
            case AskTerms():
                check_spoken(request.protocol, "the peer that asks")
                self._check_place(request.sender)
                return self._node.terms(request.protocol)
            case Converse():
                return self._converse(request)
            case AskSnapshot():
                return self._snapshot(request)
            case AskParts():
                return self._parts(request)
            case GetHeld():
                raise BadRequest("GetHeld carries bytes")

    def get_part(self, request: GetHeld) -> tuple[HeldAnswer, memoryview]:
        self._check_health()
        held = self._find(request.run_id, request.digest)
        if request.part >= len(held.parts.digests):
            raise BadRequest(f"it has {len(held.parts.digests)} parts, number {request.part} was asked for")
        digest, data = held.part(request.part)
        self.bytes_sent += len(data)
        return HeldAnswer(hash=digest), data

    def status(self) -> PeerStatus:
        return self._node.status()

    def metrics(self, request: HttpRequest) -> Reply:
        """For Prometheus."""
        status = replace(self.status(), connections=request.connections.summary())
        families = families_of(status, self.counts.copy())
        return Reply(write_metrics(families), headers=(("Content-Type", CONTENT_TYPE),))

    def _converse(self, told: Converse) -> Converse:
        self._check_run(told.run_id)
        node = self._node
        with node.lock:
            hear(node.shared, told)
            node.conversations.was_heard(told.sender)
            node.recorder.note()
            answer = node.peer.say_to(told.height)
            if not node.recorder.wait_until_kept(DISK_PATIENCE_S):
                why = "is stopping" if node.shared.is_stopping else "cannot write down what it would say"
                raise Busy(f"this peer {why}", retry_after_s=RETRY_S)
        return answer

    def _snapshot(self, request: AskSnapshot) -> OfferedSnapshot:
        self._check_run(request.run_id)
        if request.fragment >= len(self._node.peer.state.versions):
            raise BadRequest(f"the run has {len(self._node.peer.state.versions)} fragments, got {request.fragment}")
        return self._node.snapshots.offer(request.fragment)

    def _parts(self, request: AskParts) -> PartList:
        return self._find(request.run_id, request.digest).parts

    def _find(self, run_id: str, digest: str) -> HeldPayload:
        self._check_run(run_id)
        held = self._node.payloads.get(digest) or self._node.snapshots.get(digest)
        if held is None:
            raise NotFound("this peer does not hold that", hint="ask another peer")
        return held

    def _check_run(self, run_id: str) -> None:
        if not self._node.shared.has_begun:
            raise Busy("this peer has not begun yet", hint="ask again", retry_after_s=RETRY_S)
        if run_id != self._node.peer.run_id:
            raise OtherRun(
                f"this peer belongs to run {self._node.peer.run_id}, the request to {run_id}",
                hint="give the peer that asks an empty folder, or another address to join",
            )

    def _check_place(self, peer_id: str) -> None:
        """A member may always ask, whatever became of it meanwhile."""
        node = self._node
        with node.lock:
            if not node.shared.has_begun or not node.peer.is_full:
                return
            members = [member.peer_id for member in node.peer.state.members]
        if peer_id not in members:
            raise RunFull(
                f"the run has {len(members)} members, the most there can be: there is no place for {peer_id!r}",
                hint="let one of them leave, or found another run",
            )

    def _check_health(self) -> None:
        if self.failure:
            raise ServerFailed(f"this peer has stopped: {self.failure}", hint="its log has the cause")
        if self._node.shared.is_stopping:
            raise Busy("this peer is stopping", retry_after_s=1.0)


def build_status(node: Node) -> PeerStatus:
    """With the lock held."""
    status = PeerStatus(
        mode=PEER_MODE,
        peer_id=node.peer_id,
        address=node.address,
        uptime_s=node.clock() - node.started_at,
        failure=node.failure,
        trouble=node.shared.trouble,
        bytes_sent=node.service.bytes_sent,
        bytes_received=node.counts.get("fetched_bytes", 0),
    )
    if not node.shared.has_begun:
        return status
    peer, now = node.peer, node.clock()
    members = {member.key: member.peer_id for member in peer.state.members}
    return replace(
        status,
        begun=True,
        run_id=peer.run_id,
        protocol=peer.rules.protocol,
        height=peer.state.height,
        is_member=peer.is_member,
        versions=list(peer.state.versions),
        members=[_member(node, key, peer_id, now) for key, peer_id in members.items()],
        silent=[peer_id for key, peer_id in members.items() if peer.is_silent(key, now)],
        expelled=[member.peer_id for member in peer.state.expelled],
        refused=dict(peer.refusals.counts),
        proven_to_lie=sorted(members.get(key, key) for key in peer.book.proofs),
        is_short_of_peers=peer.is_short_of_peers(now),
        losses=[float(f"{loss:.6g}") for loss in node.losses],
        fragments=[
            FragmentStatus(version=version, waiting_for=peer.waiting_for(fragment, now))
            for fragment, version in enumerate(peer.state.versions)
        ],
        data=[DataStatus(**one) for one in leased_data(peer.state)],
        held_bytes=node.payloads.memory_bytes,
        spooled_bytes=node.payloads.spooled_bytes,
        fetches=node.counts,
        conversations=node.conversations.conversations,
    )


def _member(node: Node, key: str, peer_id: str, now: float) -> PeerMemberStatus:
    """One member, as this peer knows it."""
    if key == node.key:
        step, speed, loss = node.progress
        known = PeerMemberStatus(peer_id=peer_id, step=step, steps_per_second=speed, loss=loss, is_self=True)
        return replace(known, address=node.address, height=node.peer.state.height)
    beat = node.peer.contacts.get(key)
    known = PeerMemberStatus(peer_id=peer_id, trouble=node.conversations.troubles().get(key, ""))
    if beat is None:
        return known
    return replace(
        known,
        address=beat.address,
        height=beat.height,
        wants=beat.wants,
        step=beat.step,
        steps_per_second=beat.steps_per_second,
        loss=beat.loss,
        last_seen_s=node.peer.silent_s(key, now),
    )
