"""The seven endpoints, without sockets: old requests in, old answers out, and the run in between."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta, Struct
from torch import Tensor

from ..digest import data_hash
from ..errors import BadRequest, Busy, Fenced, OuterstepError, Refused, ServerError, UnknownWorker
from ..server import DiLoCoServer
from ..server.pool import Pool
from ..topology.protocol import Agreed
from ..types import Count, Label, Manifest, WorkerId
from ..wire import strict_json
from ..wire.messages import BYTES_TYPE, JSON_TYPE
from .limits import CompatLimits, body_limit_bytes
from .seat import Payload, Piece, Seat
from .tensors import expect, read_tensors, write_tensors

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""How often somebody who waits at the barrier is looked at: is the client still there?"""


class Register(Struct, frozen=True, kw_only=True):
    """Clients send more than this; it is not looked at."""

    worker_id: WorkerId
    hostname: Label = ""


class Beat(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    steps_per_second: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class SubmitHeader(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class FragmentHeader(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    fragment_id: Count


class Caller(Protocol):
    """Who sent a payload, and may wait long for its answer."""

    def read_into(self, view: memoryview) -> None:
        """The next bytes of its body."""

    def is_gone(self) -> bool:
        """Has it closed the connection?"""


class CallerGone(Exception):
    """Nobody waits for this answer any more."""


@dataclass(frozen=True, eq=False)
class Body:
    data: memoryview
    kind: str


@dataclass(frozen=True)
class Answer:
    """`handed` is to be called when the last bytes are about to be written; and then `ended`, as soon as it is known
    whether the client has got them all, or that nobody will know."""

    body: Body
    handed: Callable[[], None] = lambda: None
    ended: Callable[[bool], None] = lambda arrived: None


class Desk:
    def __init__(self, server: DiLoCoServer, limits: CompatLimits) -> None:
        self._server = server
        self._limits = limits
        config = server.config
        self._pool = Pool(memory_bytes=config.pool_bytes, spool_bytes=config.spool_bytes, spool_dir=config.spool_dir)
        state = server.get_global_params()
        self._state_names = list(state)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
        self.max_body_bytes = limits.max_body_bytes or body_limit_bytes(sizes)
        self._seats: dict[str, Seat] = {}
        self._registering = threading.Lock()
        self._bodies: weakref.WeakValueDictionary[tuple[int, ...], Body] = weakref.WeakValueDictionary()
        self._writing = threading.Lock()
        self._untrained: dict[str, Tensor] | None = None
        self._closed: Refused | None = None

    def close(self) -> None:
        """Tell everybody who waits to come back later."""
        self._closed = Busy("the server is stopping", hint="submit the same again when it is back", retry_after_s=5.0)
        for seat in list(self._seats.values()):
            seat.end(self._closed)

    # --- coming and going -----------------------------------------------------------------------------------------

    def register(self, body: bytes) -> Answer:
        """Joins the run; or, for an id that has a seat, comes back to it. Either way the newest parameters."""
        request = strict_json.decode(body, Register)
        with self._registering:
            seat, anchors = self._sit_down(request)
        return Answer(self._whole_model(anchors), lambda: seat.hand_anchors(anchors))

    def _sit_down(self, request: Register) -> tuple[Seat, Sequence[Agreed]]:
        seat = self._seats.get(request.worker_id)
        if seat is not None and seat.hostname == request.hostname and not seat.left:
            try:
                return seat, seat.join_again()
            except Fenced:
                log.info("%s registers again after a newer start had taken its place", request.worker_id)
        # Another machine, or none: a new start of this worker. The coordinator says whether the id is free.
        if seat is None:
            self._make_room()
        seat, anchors = Seat.join(self._server.service, request.worker_id, request.hostname)
        self._seats[request.worker_id] = seat
        return seat, anchors

    def _make_room(self) -> None:
        """A client that is gone keeps its seat, and what it had under way, until somebody else needs the place."""
        if len(self._seats) < self._limits.max_workers:
            return
        for worker_id in [w for w, seat in self._seats.items() if not self._is_live(seat)]:
            self._seats.pop(worker_id).end(_unknown(worker_id, "given up, and its place was needed"))
        if len(self._seats) >= self._limits.max_workers:
            raise Busy(
                f"{len(self._seats)} workers are registered, which is the limit (max_workers)",
                hint="deregister one",
                retry_after_s=30.0,
            )

    def _is_live(self, seat: Seat) -> bool:
        """The coordinator decides that; to it, a newer start of the same worker is not this one."""
        member = self._server.service.coordinator.members.find(seat.worker_id)
        return member is not None and member.live and member.instance == seat.instance

    def heartbeat(self, body: bytes) -> Answer:
        request = strict_json.decode(body, Beat)
        seat = self._seat(request.worker_id)
        seat.listen(request.steps_per_second)
        seat.obey()
        seat.check_here()
        answer: dict[str, object] = {"status": "ok", "sync_round": self._server.sync_round}
        if seat.sync_every is not None:
            answer["recommended_sync_every"] = seat.sync_every
        return _json(answer)

    def deregister(self, body: bytes) -> Answer:
        """Leaving twice is leaving."""
        request = strict_json.decode(body, Deregister)
        with self._registering:
            seat = self._seats.pop(request.worker_id, None)
        if seat is not None:
            seat.leave(_unknown(request.worker_id, "deregistered"), "deregistered")
        return _json({"status": "ok"})

    # --- parameters -----------------------------------------------------------------------------------------------

    def global_params(self, body: bytes) -> Answer:
        return Answer(Body(write_tensors(self._server.get_global_params()), BYTES_TYPE))

    def status(self, body: bytes) -> Answer:
        return _json(self._server.status())

    # --- contributions --------------------------------------------------------------------------------------------

    def submit(self, header: bytes, size_bytes: int, caller: Caller) -> Answer:
        """The whole model: all fragments, and the whole state dict comes back."""
        seat = self._seat(strict_json.decode(header, SubmitHeader).worker_id)
        fragments = range(len(seat.plan.fragments))
        pieces, agreed = self._contribute(seat, fragments, "the run's model", size_bytes, caller)
        return self._answer(seat, pieces, agreed, self._whole_model(agreed))

    def submit_fragment(self, header: bytes, size_bytes: int, caller: Caller) -> Answer:
        """One fragment of the plan, and the same comes back."""
        request = strict_json.decode(header, FragmentHeader)
        seat = self._seat(request.worker_id)
        fragment, count = request.fragment_id, len(seat.plan.fragments)
        if fragment >= count:
            raise BadRequest(
                f"fragment {fragment} does not exist: the plan has {count}",
                hint="start the server with --fragments, with as many as the clients cut the model into",
            )
        pieces, agreed = self._contribute(seat, [fragment], f"fragment {fragment}", size_bytes, caller)
        return self._answer(seat, pieces, agreed, Body(write_tensors(agreed[0].anchor), BYTES_TYPE))

    def _contribute(
        self, seat: Seat, fragments: Sequence[int], what: str, size_bytes: int, caller: Caller
    ) -> tuple[list[Piece], list[Agreed]]:
        """Read, contribute, and wait for the round as long as it takes and the client stays."""
        seat.listen()
        seat.obey()
        seat.check_open()
        pieces = seat.take(fragments, self._read(seat, fragments, what, size_bytes, caller))
        try:
            for piece in pieces:
                while not piece.wait(LOOK_EVERY_S):
                    if self._closed is not None:
                        piece.end(self._closed)
                    elif caller.is_gone():
                        raise CallerGone
            failure = next((piece.failure for piece in pieces if piece.failure is not None), None)
            if failure is not None:
                seat.forget([piece for piece in pieces if piece.failure is not None])
                raise failure
            return pieces, seat.agreements(pieces)
        finally:
            for piece in pieces:
                piece.let_go()

    def _read(self, seat: Seat, fragments: Sequence[int], what: str, size_bytes: int, caller: Caller) -> Payload:
        plan = seat.plan
        names = [name for fragment in fragments for name in plan.fragments[fragment]]
        expected = expect(self._manifest, names, self._state_names, what)
        if size_bytes == 0:
            raise BadRequest("the body ends after its header", hint="a torch.save payload follows the header")
        try:
            room = self._pool.take(size_bytes)
        except OSError as error:
            raise ServerError(f"no room for a body of {size_bytes} bytes: {error.strerror}") from error
        try:
            caller.read_into(room.view)
            tensors = read_tensors(room.view, expected, max_tensors=len(self._state_names))
        except BaseException:
            self._pool.give_back(room)
            raise
        return Payload(self._pool, room, data_hash([room.view]), tensors)

    def _answer(self, seat: Seat, pieces: Sequence[Piece], agreed: Sequence[Agreed], body: Body) -> Answer:
        def handed() -> None:
            seat.hand_answer(pieces, agreed)
            try:  # it may have been told to finish while it waited, when it sends no heartbeats
                seat.listen()
                seat.obey()
            except OuterstepError as error:
                log.info("%s has its answer; then: %s", seat.worker_id, error)

        return Answer(body, handed, lambda arrived: seat.answer_ended(pieces, arrived=arrived))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _seat(self, worker_id: str) -> Seat:
        seat = self._seats.get(worker_id)
        if seat is None:
            raise _unknown(worker_id, "not registered with this server")
        return seat

    @property
    def _manifest(self) -> Manifest:
        manifest = self._server.service.coordinator.manifest
        assert manifest is not None, "somebody has registered, so the run has one"
        return manifest

    def _whole_model(self, anchors: Sequence[Agreed]) -> Body:
        """The state dict with these anchors in place. Everybody who gets the same versions gets the same bytes, which
        are made once."""
        versions = tuple(agreed.version for agreed in anchors)
        with self._writing:
            body = self._bodies.get(versions)
            if body is None:
                trained = {name: theta for agreed in anchors for name, theta in agreed.anchor.items()}
                body = self._bodies[versions] = Body(write_tensors(self._state(trained)), BYTES_TYPE)
            return body

    def _state(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every name of the state dict, in its order."""
        if self._untrained is None:  # they never change: copied once
            others = self._server.get_global_params()
            known = trained.keys() | self._manifest.aliases.keys()
            self._untrained = {name: tensor for name, tensor in others.items() if name not in known}
        aliases = self._manifest.aliases
        everything = {**self._untrained, **trained, **{alias: trained[kept] for alias, kept in aliases.items()}}
        return {name: everything[name] for name in dict.fromkeys([*self._state_names, *everything])}


def _unknown(worker_id: str, why: str) -> UnknownWorker:
    return UnknownWorker(f"worker {worker_id!r} is {why}", hint="POST /register first; it answers with the parameters")


def _json(value: object) -> Answer:
    return Answer(Body(memoryview(strict_json.encode(value)), JSON_TYPE))
