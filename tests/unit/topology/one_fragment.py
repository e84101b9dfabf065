"""A server for one worker and one fragment, whose answers are up to the test, payload by payload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outerstep.core.codecs.recipe import Recipe
from outerstep.digest import Parts, part_count, part_hash, part_range, payload_hash
from outerstep.errors import Fenced, StaleRound, Superseded
from outerstep.topology.encode import encode_frame
from outerstep.topology.forms import Form, forms_of
from outerstep.topology.update import anchor_tree
from outerstep.types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    FromMember,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    JoinedFragment,
    Leave,
    LeaveAnswer,
    Manifest,
    Offer,
    OfferAnswer,
    Payload,
    Plan,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from outerstep.wire.frames import rows_of, section_layout

PART_BYTES = 1 << 16


class OneFragment:
    """θ moves by what the down codec makes of minus the contribution. `payloads` chooses what a poll is answered with;
    `before` and `after` may raise, so that a request or its answer is lost, or refused. As at a real server, a new
    start of the worker fences the threads that the old one may still have."""

    address = "one fragment"

    def __init__(
        self, theta: Mapping[str, Tensor], manifest: Manifest, *, codec: str, down_codec: str, **plan: Any
    ) -> None:
        self.theta = {name: value.clone().float() for name, value in theta.items()}
        self.manifest = manifest
        facts: dict[str, Any] = {"sync_every": 1, "max_staleness": 4, "part_size_bytes": PART_BYTES, **plan}
        self.plan = Plan(
            codec=Recipe.parse(codec).name,
            fragments=(tuple(theta),),
            heartbeat_timeout_s=0.0,
            down_codec=down_codec,
            **facts,
        )
        self.form: Form = forms_of(self.plan, manifest)[0]
        self.version = 0
        self.last_sequence = 0
        self.updates: dict[int, memoryview] = {}
        self.hashes = {0: anchor_tree(self.theta.values())}
        self.polls: list[Poll] = []
        self.applied: list[dict[str, Tensor]] = []
        self.payloads: Callable[[Poll], list[tuple[str, int]]] = self.as_agreed
        self.before: Callable[[Request], None] = lambda request: None
        self.after: Callable[[Request], None] = lambda request: None
        self._offer: Offer | None = None
        self._parts: dict[int, bytes] = {}
        self._starts: list[str] = []  # by instance
        self._lock = threading.RLock()

    # --- the transport -------------------------------------------------------------------------------------------

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        self.before(request)
        with self._lock:
            answer = self._answer(request, body, into)
        self.after(request)
        return answer

    def _answer(self, request: Request, body: memoryview | None, into: memoryview | None) -> Answer:
        match request:
            case FromMember() if request.incarnation < len(self._starts):
                raise Fenced(f"the worker was started again (incarnation {len(self._starts)})")
            case Join():
                if request.instance not in self._starts:
                    self._starts.append(request.instance)
                state = JoinedFragment(version=self.version, last_sequence=self.last_sequence)
                return JoinAnswer(
                    run_id="one",
                    incarnation=self._starts.index(request.instance) + 1,
                    plan=self.plan,
                    manifest=self.manifest,
                    fragments=(state,),
                )
            case Offer() | Commit() if request.sequence <= self.last_sequence:
                if isinstance(request, Commit):
                    return CommitAnswer(version=self.version)
                return OfferAnswer(state="accepted", version=self.version)
            case Offer() if request.base_version < self.version:
                raise StaleRound(f"version {self.version} is there already")
            case Offer():
                if self._offer is None or self._offer.sequence != request.sequence:
                    self._parts = {}
                self._offer = request
                return OfferAnswer(
                    state="send", missing=tuple(p for p in range(self._cut.count) if p not in self._parts)
                )
            case PutPart():
                assert body is not None
                assert part_hash(body) == request.hash
                self._parts[request.part] = bytes(body)
                return PutPartAnswer(state="stored")
            case Commit():
                parts = [self._parts[part] for part in sorted(self._parts)]
                assert payload_hash([part_hash(part) for part in parts]) == request.payload_hash
                self.last_sequence = request.sequence
                self.contributed(b"".join(parts))
                return CommitAnswer(version=self.version)
            case Poll():
                return self._poll(request)
            case GetPart():
                assert into is not None
                frame = self.frame(request.kind, request.version)
                into[:] = frame[slice(*part_range(request.part, len(frame), self.plan.part_size_bytes))]
                return GetPartAnswer(hash=part_hash(into))
            case Heartbeat():
                return HeartbeatAnswer(sync_round=self.version)
            case Leave():
                return LeaveAnswer()
        raise AssertionError(request)

    def status(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass

    # --- rounds --------------------------------------------------------------------------------------------------

    @property
    def _cut(self) -> Parts:
        assert self._offer is not None
        return Parts(self._offer.section_bytes or (self._offer.size_bytes,), self.plan.part_size_bytes)

    def contributed(self, frame: bytes) -> None:
        """A round with this one contribution, in one section or several."""
        assert self._offer is not None
        deltas = {name: torch.empty(theta.shape) for name, theta in self.theta.items()}
        data, sections = torch.frombuffer(bytearray(frame), dtype=torch.uint8), self._offer.sections
        tensors = [(e.name, e.shape, self.form.rules[e.name].codec.encoded_bytes) for e in self.form.up.entries]
        for section in range(sections):
            up = section_layout(self.plan.codec, tensors, sections, section)
            for entry in up.entries:
                rows = rows_of(tuple(deltas[entry.name].shape), sections, section)
                target = deltas[entry.name].view(-1)[rows.first_value : rows.first_value + rows.numel]
                begin, end = (up.data_begin + edge for edge in (entry.begin, entry.end))
                self.form.rules[entry.name].codec.decode(data[begin:end], target)
            data = data[up.size_bytes :]
        self.applied.append(deltas)
        self.move({name: -delta for name, delta in deltas.items()})

    def move(self, wanted: Mapping[str, Tensor]) -> None:
        """The next version: what the down codec makes of this difference is added."""
        with self._lock:
            self._move(wanted)

    def _move(self, wanted: Mapping[str, Tensor]) -> None:
        self.version += 1
        frame = encode_frame(wanted, self.form.update, self.form.codecs)
        self.updates[self.version] = frame
        data = torch.frombuffer(frame, dtype=torch.uint8)
        for entry in self.form.update.entries:
            begin, end = (self.form.update.data_begin + edge for edge in (entry.begin, entry.end))
            decoded = torch.empty(entry.shape)
            self.form.codecs[entry.name].decode(data[begin:end], decoded.view(-1))
            self.theta[entry.name].add_(decoded)
        self.hashes[self.version] = anchor_tree(self.theta.values())

    def frame(self, kind: str, version: int) -> memoryview:
        if kind == "update":
            return self.updates[version]
        if version != self.version:
            raise Superseded(f"version {version} has been replaced")
        full = Recipe.parse("fp32")
        return encode_frame(self.theta, self.form.full, {s.name: full.codec(s) for s in self.manifest.parameters})

    def as_agreed(self, poll: Poll) -> list[tuple[str, int]]:
        """The chain from what is held, or the whole."""
        chain = [("update", version) for version in range(poll.held + 1, self.version + 1)]
        is_shorter = len(chain) * self.form.update.size_bytes < self.form.full.size_bytes
        if is_shorter and self.hashes.get(poll.held) == poll.held_hash:
            return chain
        return [("full", self.version)]

    def _poll(self, poll: Poll) -> PollAnswer:
        self.polls.append(poll)
        if poll.after >= self.version:
            return PollAnswer(agreement=None, last_sequence=self.last_sequence, retry_after_s=0.01)
        payloads = []
        for kind, version in self.payloads(poll):
            frame = self.frame(kind, version)
            size = self.plan.part_size_bytes
            count = part_count(len(frame), size)
            hashes = [part_hash(frame[slice(*part_range(i, len(frame), size))]) for i in range(count)]
            payloads.append(
                Payload(version=version, kind=kind, size_bytes=len(frame), hash=payload_hash(hashes))  # type: ignore[arg-type]
            )
        agreement = Agreement(
            fragment=0,
            version=self.version,
            anchor_hash=self.hashes[self.version],
            payloads=tuple(payloads),
            range_hashes=tuple(self._range_hash(poll.sections, i) for i in range(poll.sections)),
        )
        return PollAnswer(agreement=agreement, last_sequence=self.last_sequence)

    def _range_hash(self, sections: int, section: int) -> str:
        found = []
        for theta in self.theta.values():
            rows = rows_of(tuple(theta.shape), sections, section)
            found.append(theta.view(-1)[rows.first_value : rows.first_value + rows.numel])
        return anchor_tree(found)
