"""What a node answers to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import BadRequest, Busy, NotFound, OtherRun, ProtocolMismatch, ServerFailed
from ....statements import Converse
from ....types import PROTOCOL_VERSION
from ....wire.messages import MAX_JOIN_BYTES, place_of
from ....wire.pages import pages
from ....wire.peers import AskParts, AskTerms, AskWhole, GetHeld, HeldAnswer, Parts, PeerAnswer, PeerRequest, Whole
from ....wire.routes import DownloadRoute, MessageRoute, Route
from .payloads import Held

if TYPE_CHECKING:
    from .node import Node

RETRY_S = 0.5
DISK_PATIENCE_S = 20.0


class PeerService:
    """The bytes' side of a Node: who asks is one of those that hold the run's token."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.bytes_sent = 0
        self.routes: dict[tuple[str, str], Route] = {
            **pages(self),
            place_of(AskTerms): MessageRoute(AskTerms, self.answer, "sender"),
            place_of(Converse): MessageRoute(Converse, self.answer, "sender", MAX_JOIN_BYTES),
            place_of(AskWhole): MessageRoute(AskWhole, self.answer, "sender"),
            place_of(AskParts): MessageRoute(AskParts, self.answer, "sender"),
            place_of(GetHeld): DownloadRoute(GetHeld, self.get_part, "sender"),
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
                if request.protocol != PROTOCOL_VERSION:
                    raise ProtocolMismatch(
                        f"this peer speaks protocol {PROTOCOL_VERSION}, the other {request.protocol}",
                        hint="install the same version of outerstep on both",
                    )
                return self._node.terms()
            case Converse():
                return self._converse(request)
            case AskWhole():
                return self._whole(request)
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

    def status(self) -> dict[str, object]:
        return self._node.status()

    def _converse(self, told: Converse) -> Converse:
        self._check_run(told.run_id)
        node = self._node
        with node.lock:
            try:
                node.peer.hear(told, node.clock())
                node.talk.was_heard(told.sender)
                node.keeper.note()
                answer = node.peer.say_to(told.height)
            except Exception as error:  # whatever it is, the peer may be half changed: as in threads of its own
                node.shared.fail(f"what {told.sender} said: {type(error).__name__}: {error}")
                raise
            if not node.keeper.wait_until_kept(DISK_PATIENCE_S):
                why = "is stopping" if node.shared.is_stopping else "cannot write down what it would say"
                raise Busy(f"this peer {why}", retry_after_s=RETRY_S)
        return answer

    def _whole(self, request: AskWhole) -> Whole:
        self._check_run(request.run_id)
        if request.fragment >= len(self._node.peer.state.versions):
            raise BadRequest(f"the run has {len(self._node.peer.state.versions)} fragments, got {request.fragment}")
        return self._node.wholes.offer(request.fragment)

    def _parts(self, request: AskParts) -> Parts:
        return self._find(request.run_id, request.digest).parts

    def _find(self, run_id: str, digest: str) -> Held:
        self._check_run(run_id)
        held = self._node.holdings.get(digest) or self._node.wholes.get(digest)
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

    def _check_health(self) -> None:
        if self.failure:
            raise ServerFailed(f"this peer has stopped: {self.failure}", hint="its log has the cause")
        if self._node.shared.is_stopping:
            raise Busy("this peer is stopping", retry_after_s=1.0)


__all__ = ["PeerService"]
