"""The seven endpoints: old requests in, old answers out, and the run in between."""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..digest import data_hash
from ..errors import BadRequest, Busy, Fenced, OuterstepError, PlanMismatch, Refused, ServerError, UnknownWorker
from ..pool import Pool
from ..server import DiLoCoServer
from ..topology.protocol import Agreed
from ..types import Count, Label, Manifest, Plan, Wishes
from ..wire.http_request import HttpBody, HttpRequest
from ..wire.messages import BYTES_TYPE, convert, decode_json, encode_json
from ..wire.routes import MessageRoute, PlainRoute, Presented, Reply, Routes
from .answers import StatusPage
from .archive import describe
from .client import CompatClient, FragmentSubmission, ReadPayload, as_refusal
from .heard import HeardAnswers
from .limits import MAX_HEADER_BYTES, CompatLimits, body_limit_bytes
from .names import Introduction, SaidId, id_of
from .tensors import Expected, expect, read_tensors, write_tensors

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""How often a client that waits at the barrier is looked at: is it still there?"""

BYTES = (("Content-Type", BYTES_TYPE),)
LEFT_OUT = "X-Outerstep-Left-Out"
"""A header of the answer to a client whose contribution a screen or the run's rule left out of the round."""


class Register(Struct, frozen=True, kw_only=True):
    """`told`: whatever else a client says of itself."""

    worker_id: SaidId
    hostname: Label = ""
    told: dict[str, Any] = {}


class CompatHeartbeat(Struct, frozen=True, kw_only=True):
    worker_id: SaidId
    steps_per_second: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: SaidId


class SubmitHeader(Struct, frozen=True, kw_only=True):
    worker_id: SaidId


class FragmentHeader(Struct, frozen=True, kw_only=True):
    worker_id: SaidId
    fragment_id: Count


class ClientGone(ConnectionError):
    """Nobody waits for this answer any more."""


class Endpoints:
    def __init__(self, server: DiLoCoServer, limits: CompatLimits) -> None:
        self._server = server
        self._limits = limits
        config = server.config
        memory_bytes = server.service.run.pool_memory_bytes
        self._pool = Pool(memory_bytes=memory_bytes, spool_bytes=config.spool_bytes, spool_dir=config.spool_dir)
        state = server.get_global_params()
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
        self._max_tensors = len(sizes)
        self.max_body_bytes = limits.max_body_bytes or body_limit_bytes(sizes)
        self._clients: dict[str, CompatClient] = {}
        self._registering = threading.Lock()
        self._bodies: weakref.WeakValueDictionary[tuple[int, ...], memoryview] = weakref.WeakValueDictionary()
        self._writing = threading.Lock()
        self._closed: Refused | None = None
        self._page = StatusPage(server)
        folder = server.service.writer.folder
        self._heard = HeardAnswers(folder.place if folder is not None else None, server.service.coordinator.run_id)
        self._restore()

    def _restore(self) -> None:
        """The clients that were here when the server was stopped or killed. They do not know of it, and go on."""
        service = self._server.service
        with service.changed:
            live = [worker for worker in service.coordinator.members if worker.live]
        found = filter(
            None, (CompatClient.restored(service, worker, self._heard.of(worker.worker_id)) for worker in live)
        )
        self._clients = {client.worker_id: client for client in itertools.islice(found, self._limits.max_workers)}
        self._heard.keep(self._clients.keys())
        if self._clients:
            log.info("clients of the older protocol that have their places again: %d", len(self._clients))

    @property
    def routes(self) -> Routes:
        return {
            ("POST", "/register"): replace(_message(Register, self.register), decode=_read_register),
            ("POST", "/heartbeat"): _message(CompatHeartbeat, self.heartbeat),
            ("POST", "/deregister"): _message(Deregister, self.deregister),
            ("GET", "/global_params"): PlainRoute(self.global_params),
            ("GET", "/status"): PlainRoute(self.status),
            ("POST", "/submit_pseudograd"): PlainRoute(_refusing(self.submit)),
            ("POST", "/submit_fragment_pseudograd"): PlainRoute(_refusing(self.submit_fragment)),
        }

    def close(self) -> None:
        """Tell every client that waits to come back later."""
        self._closed = Busy("the server is stopping", hint="submit the same again when it is back", retry_after_s=5.0)
        for client in list(self._clients.values()):
            client.end(self._closed)

    # --- coming and going -----------------------------------------------------------------------------------------

    def register(self, request: Register, shown: Presented) -> Reply:
        """Joins the run, or reconnects an id that is registered. Either way the newest parameters."""
        introduction = Introduction.of(request.worker_id, request.hostname, shown.address, request.told)
        with self._registering:
            client, anchors = self._admit(introduction)
        return Reply(self._whole_model(anchors), headers=BYTES, handed=lambda: client.hand_anchors(anchors))

    def _admit(self, introduction: Introduction) -> tuple[CompatClient, Sequence[Agreed]]:
        worker_id = introduction.worker_id
        client = self._clients.get(worker_id)
        if client is not None and self._is_live(client):
            client.check_speaker(introduction.said or worker_id, introduction.address)
        if client is not None and client.is_reconnect(introduction):
            try:
                client.wake()
                return client, client.join_again()
            except Fenced:
                log.info("%s registers again after a newer start had taken its place", worker_id)
        # Another machine, or none: a new start of this worker. The coordinator says whether the id is free.
        if client is None:
            self._make_room()
        client, anchors = self._join(introduction)
        self._clients[worker_id] = client
        return client, anchors

    def _join(self, introduction: Introduction) -> tuple[CompatClient, Sequence[Agreed]]:
        """What it asks for settles what is open in a run that nobody has joined yet. Later, and where that cannot be,
        the client is taken as it is: the old servers did not ask."""
        service = self._server.service
        if service.coordinator.plan is None:
            wishes = introduction.wishes(self._server.config.wishes)
            for wished in (wishes, msgspec.structs.replace(wishes, sync_every=None)):
                with contextlib.suppress(PlanMismatch):
                    return CompatClient.join(service, introduction, wished)
        client, anchors = CompatClient.join(service, introduction, Wishes())
        plan, steps = client.wake(), introduction.sync_every
        if steps is not None and steps != plan.sync_every:
            log.warning("%s exchanges every %d steps, and the run has %d", client.worker_id, steps, plan.sync_every)
        return client, anchors

    def _make_room(self) -> None:
        """A client that is gone keeps its client, and what it had under way, until somebody else needs the place."""
        if len(self._clients) < self._limits.max_workers:
            return
        for worker_id in [w for w, client in self._clients.items() if not self._is_live(client)]:
            self._clients.pop(worker_id).end(_unknown(worker_id, "declared dead, and its place was needed"))
            self._heard.forget(worker_id)
        if len(self._clients) >= self._limits.max_workers:
            raise Busy(
                f"{len(self._clients)} workers are registered, which is the limit (max_workers)",
                hint="deregister one",
                retry_after_s=30.0,
            )

    def _is_live(self, client: CompatClient) -> bool:
        """The coordinator decides that; to it, a newer start of the same worker is not this one."""
        member = self._server.service.coordinator.members.find(client.worker_id)
        return member is not None and member.live and member.instance == client.instance

    def heartbeat(self, request: CompatHeartbeat, shown: Presented) -> dict[str, object]:
        client = self._client(request.worker_id, shown.address)
        client.listen(request.steps_per_second)
        client.obey()
        client.check_here()
        return self._page.heartbeat(client.sync_every)

    def deregister(self, request: Deregister, shown: Presented) -> dict[str, object]:
        """Leaving twice is leaving."""
        worker_id = id_of(request.worker_id)
        with self._registering:
            if worker_id in self._clients:
                self._client(request.worker_id, shown.address)
            client = self._clients.pop(worker_id, None)
        if client is not None:
            client.leave(_unknown(worker_id, "deregistered"), "deregistered")
            self._heard.forget(worker_id)
        return {"status": "ok"}

    # --- parameters -----------------------------------------------------------------------------------------------

    def global_params(self, request: HttpRequest) -> Reply:
        return Reply(write_tensors(self._server.get_global_params()), headers=BYTES)

    def status(self, request: HttpRequest) -> Reply:
        return Reply(encode_json(self._page.status(list(self._clients.values()))))

    # --- contributions --------------------------------------------------------------------------------------------

    def submit(self, request: HttpRequest) -> Reply:
        """The whole model: all fragments, and the whole state dict comes back."""
        header = decode_json(self._header(request.body), SubmitHeader)
        client = self._client(header.worker_id, request.body.peer)
        submissions, agreed = self._contribute(client, None, request.body)
        return self._answer(client, submissions, agreed, self._whole_model(agreed))

    def submit_fragment(self, request: HttpRequest) -> Reply:
        """One fragment of the plan, and the same comes back."""
        header = decode_json(self._header(request.body), FragmentHeader)
        client = self._client(header.worker_id, request.body.peer)
        submissions, agreed = self._contribute(client, header.fragment_id, request.body)
        return self._answer(client, submissions, agreed, write_tensors(agreed[0].anchor))

    def _header(self, body: HttpBody) -> bytes:
        """The JSON in front of the payload."""
        body.check_size(self.max_body_bytes, "a submission", "the size of the run's model sets this limit")
        if body.length < 4:
            raise BadRequest(f"the body has {body.length} bytes, which is too few for what it should hold")
        length = bytearray(4)
        body.read_into(memoryview(length))
        header_bytes, most = struct.unpack(">I", length)[0], min(body.left, MAX_HEADER_BYTES)
        if header_bytes > most:
            raise BadRequest(
                f"the header's length is given as {header_bytes} bytes; at most {most} fit",
                hint="a submission is 4 bytes of header length (big-endian), the JSON header, the torch.save payload",
            )
        header = bytearray(header_bytes)
        body.read_into(memoryview(header))
        return bytes(header)

    def _contribute(
        self, client: CompatClient, fragment: int | None, body: HttpBody
    ) -> tuple[list[FragmentSubmission], list[Agreed]]:
        """Read, contribute (None: the whole model), and wait for the round as long as it takes and the client stays."""
        client.listen()
        client.obey()
        client.check_open()
        try:
            payload = self._read(client, fragment, body)
        except Refused as refusal:
            plan = client.wake()
            if self._is_live(client) and (fragment is None or fragment < len(plan.fragments)):
                self._server.service.turn_away(client.worker_id, self._chosen(plan, fragment), refusal)
            raise
        fragments = self._chosen(client.wake(), fragment)
        submissions = client.take(fragments, payload)
        try:
            for submission in submissions:
                while not submission.wait(LOOK_EVERY_S):
                    if self._closed is not None:
                        submission.end(self._closed)
                    elif body.is_given_up():
                        raise ClientGone("the client hung up while its submission waited for the round")
            failure = next((submission.failure for submission in submissions if submission.failure is not None), None)
            if failure is not None:
                client.forget([submission for submission in submissions if submission.failure is not None])
                raise failure
            return submissions, client.agreements(submissions)
        finally:
            for submission in submissions:
                submission.let_go()

    def _read(self, client: CompatClient, fragment: int | None, body: HttpBody) -> ReadPayload:
        size_bytes = body.left
        if size_bytes == 0:
            raise BadRequest("the body ends after its header", hint="a torch.save payload follows the header")
        try:
            room = self._pool.take(size_bytes)
        except OSError as error:
            raise ServerError(f"no room for a body of {size_bytes} bytes: {error.strerror}") from error
        try:
            body.read_into(room.view)
            described = describe(room.view, max_tensors=self._max_tensors)
            self._server.service.name_tensors(fragment, {name: one.shape for name, one in described.items()})
            tensors = read_tensors(room.view, described, self._expected(client, fragment))
        except BaseException:
            self._pool.give_back(room)
            raise
        return ReadPayload(self._pool, room, data_hash([room.view]), tensors)

    def _expected(self, client: CompatClient, fragment: int | None) -> Expected:
        """By the run's plan as it is now."""
        plan, model = client.follow_plan(), self._server.service.run.model
        if fragment is not None and fragment >= len(plan.fragments):
            raise BadRequest(
                f"fragment {fragment} does not exist: the plan has {len(plan.fragments)}",
                hint="start the server with --fragments, with as many as the clients cut the model into; if nobody has "
                "said how many, they are named in their order, from 0 on",
            )
        names = [name for chosen in self._chosen(plan, fragment) for name in plan.fragments[chosen]]
        what = "the run's model" if fragment is None else f"fragment {fragment}"
        return expect(self._manifest, names, list(model.rest()), what)

    def _answer(
        self,
        client: CompatClient,
        submissions: Sequence[FragmentSubmission],
        agreed: Sequence[Agreed],
        body: memoryview,
    ) -> Reply:
        def handed() -> None:
            client.hand_answer(submissions, agreed)
            try:  # it may have been told to finish while it waited, when it sends no heartbeats
                client.listen()
                client.obey()
            except OuterstepError as error:
                log.info("%s has its answer; then: %s", client.worker_id, error)

        def ended(arrived: bool) -> None:
            client.answer_ended(submissions, arrived=arrived)
            if arrived:
                self._heard.note(client.worker_id, {one.fragment: one.version for one in agreed})

        left_out = ", ".join(
            f"fragment {one.fragment} of version {one.version}" for one in agreed if client.is_out(one)
        )
        if left_out:
            log.warning("%s: its contribution to %s was left out; the event log says why", client.worker_id, left_out)
        return Reply(
            body,
            headers=(*BYTES, (LEFT_OUT, left_out)) if left_out else BYTES,
            handed=handed,
            ended=ended,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    def _client(self, said: str, address: str) -> CompatClient:
        worker_id = id_of(said)
        client = self._clients.get(worker_id)
        if client is None:
            raise _unknown(worker_id, "not registered with this server")
        client.check_speaker(said, address)
        client.wake()
        return client

    @property
    def _manifest(self) -> Manifest:
        manifest = self._server.service.coordinator.manifest
        assert manifest is not None, "somebody has registered, so the run has one"
        return manifest

    def _chosen(self, plan: Plan, fragment: int | None) -> Sequence[int]:
        """The fragments that a submission is for; None: all. These clients know of no buffers: a fragment that has
        nothing else goes with the last that they know of."""
        if fragment is None:
            return range(len(plan.fragments))
        parameters = {spec.name for spec in self._manifest.parameters if spec.role == "parameter"}
        known = [i for i, names in enumerate(plan.fragments) if not parameters.isdisjoint(names)]
        return range(fragment, len(plan.fragments)) if known and fragment == known[-1] else [fragment]

    def _whole_model(self, anchors: Sequence[Agreed]) -> memoryview:
        """The state dict with these anchors in place. Everybody who gets the same versions gets the same bytes, which
        are made once."""
        plan = self._server.service.coordinator.plan
        assert plan is not None
        versions = (plan.revision, *(agreed.version for agreed in anchors))
        with self._writing:
            body = self._bodies.get(versions)
            if body is None:
                trained = {name: theta for agreed in anchors for name, theta in agreed.anchor.items()}
                body = self._bodies[versions] = write_tensors(self._server.service.whole_state(trained))
            return body


def _unknown(worker_id: str, why: str) -> UnknownWorker:
    return UnknownWorker(f"worker {worker_id!r} is {why}", hint="POST /register first; it answers with the parameters")


def _read_register(data: bytes | bytearray) -> Register:
    told = decode_json(data, dict)
    known = {name: told.pop(name) for name in ("worker_id", "hostname") if name in told}
    return convert({**known, "told": told}, Register)


def _message(kind: type[Any], handler: Callable[[Any, Presented], object]) -> MessageRoute:
    return MessageRoute(kind, _refusing(handler), speaker=None, sees_caller=True)


P = ParamSpec("P")
R = TypeVar("R")


def _refusing(handler: Callable[P, R]) -> Callable[P, R]:
    """What the run refused, in the words of the server that refused it."""

    def handle(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return handler(*args, **kwargs)
        except OuterstepError as error:
            raise as_refusal(error) from error

    return handle
