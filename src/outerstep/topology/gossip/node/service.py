"""The service of a node: its answers to other peers, and its pages."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from ....errors import BadRequest, Busy, NotFound, OtherRun, RunFull, ServerFailed
from ....observe.families import families_of
from ....observe.prometheus import CONTENT_TYPE, METRICS_PATH, write_metrics
from ....observe.sinks import EventCounts
from ....observe.status import PeerStatus
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
    Terms,
)
from ....wire.routes import DownloadRoute, MessageRoute, PlainRoute, Reply, Route
from .contributions import HeldPayload, Payloads
from .conversations import Conversations
from .hearing import hear
from .records import Recorder
from .shared import Shared
from .snapshots import SnapshotExchange

RETRY_S = 0.5
DISK_PATIENCE_S = 20.0


class ServedNode(Protocol):
    """A node, as its service sees it. Recorder, conversations and snapshots exist once the run has begun."""

    shared: Shared
    payloads: Payloads
    recorder: Recorder
    conversations: Conversations
    snapshots: SnapshotExchange

    def terms(self, protocol: int) -> Terms:
        """The terms, for a peer that wants to join and speaks this protocol."""

    def status(self) -> PeerStatus:
        """The node's status."""


class PeerService:
    """The HTTP side of a node. Every caller has shown the run's token."""

    def __init__(self, node: ServedNode) -> None:
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
        return self._node.shared.failure

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
        with node.shared.lock:
            hear(node.shared, told)
            node.conversations.was_heard(told.sender)
            node.recorder.note()
            answer = node.shared.peer.say_to(told.height)
            if not node.recorder.wait_until_kept(DISK_PATIENCE_S):
                why = "is stopping" if node.shared.is_stopping else "cannot write down what it would say"
                raise Busy(f"this peer {why}", retry_after_s=RETRY_S)
        return answer

    def _snapshot(self, request: AskSnapshot) -> OfferedSnapshot:
        self._check_run(request.run_id)
        fragments = len(self._node.shared.peer.state.versions)
        if request.fragment >= fragments:
            raise BadRequest(f"the run has {fragments} fragments, got {request.fragment}")
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
        shared = self._node.shared
        if not shared.has_begun:
            raise Busy("this peer has not begun yet", hint="ask again", retry_after_s=RETRY_S)
        if run_id != shared.peer.run_id:
            raise OtherRun(
                f"this peer belongs to run {shared.peer.run_id}, the request to {run_id}",
                hint="give the peer that asks an empty folder, or another address to join",
            )

    def _check_place(self, peer_id: str) -> None:
        """Refuse a newcomer if the run is full. A member may always ask, whatever became of it meanwhile."""
        shared = self._node.shared
        with shared.lock:
            if not shared.has_begun or not shared.peer.is_full:
                return
            members = [member.peer_id for member in shared.peer.state.members]
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
