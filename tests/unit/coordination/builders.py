"""A coordinator with its clock turned by hand, and the messages that workers would send it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.effects import Accumulate, CloseRound, DropUpload, Effect
from outerstep.coordination.server.plan import settle
from outerstep.coordination.server.rounds import Fragment, RoundRules
from outerstep.coordination.server.uploads import Upload
from outerstep.digest import part_count, part_hash, payload_hash
from outerstep.events import Event
from outerstep.types import (
    PROTOCOL_VERSION,
    Agreement,
    Commit,
    CommitAnswer,
    ContributionKey,
    GetPart,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    Manifest,
    Offer,
    OfferAnswer,
    ParameterSpec,
    Participant,
    Payload,
    Plan,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Wishes,
)

RUN = "run"
PART_BYTES = 8
SIZE_BYTES = 2 * PART_BYTES
TIMEOUT_S = 10.0
MANIFEST = Manifest(
    parameters=(
        ParameterSpec(name="wte", shape=(8, 4), dtype="float32"),
        ParameterSpec(name="head", shape=(4,), dtype="float32"),
    ),
    aliases={"lm_head": "wte"},
)


def make_join(worker_id: str = "a", *, start: int = 1, hostname: str = "home", **changes: Any) -> Join:
    """`start`: which start of the process speaks."""
    facts: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "instance": f"{worker_id}-start-{start}", **changes}
    return Join(worker_id=worker_id, hostname=hostname, **facts)


def make_heartbeat(worker_id: str = "a", *, incarnation: int = 1, **changes: Any) -> Heartbeat:
    facts: dict[str, Any] = {"run_id": RUN, "step": 0, "steps_per_second": 0.0, **changes}
    return Heartbeat(worker_id=worker_id, incarnation=incarnation, **facts)


def make_offer(worker_id: str = "a", sequence: int = 1, *, fragment: int = 0, **changes: Any) -> Offer:
    facts: dict[str, Any] = {
        "run_id": RUN,
        "incarnation": 1,
        "base_version": 0,
        "steps": 1,
        "codec": "fp32",
        "size_bytes": SIZE_BYTES,
        **changes,
    }
    facts.setdefault("oldest_base", facts["base_version"])
    return Offer(worker_id=worker_id, sequence=sequence, fragment=fragment, **facts)


def make_key(worker_id: str = "a", sequence: int = 1, fragment: int = 0) -> ContributionKey:
    return ContributionKey(run_id=RUN, worker_id=worker_id, fragment=fragment, sequence=sequence)


def contribution_hashes(key: ContributionKey, size_bytes: int = SIZE_BYTES, flavour: str = "") -> list[str]:
    """The hashes of its parts; another flavour = other bytes."""
    return [part_hash(f"{key} {flavour} {i}".encode()) for i in range(part_count(size_bytes, PART_BYTES))]


def agreement_hashes(fragment: int, version: int, parts: int = 2) -> list[str]:
    return [part_hash(f"agreement {fragment} {version} {i}".encode()) for i in range(parts)]


def make_agreement(
    version: int, *, fragment: int = 0, participants: Iterable[Participant] = (), parts: int = 2
) -> Agreement:
    proof = payload_hash(agreement_hashes(fragment, version, parts))
    return Agreement(
        fragment=fragment,
        version=version,
        anchor_hash=proof,
        participants=tuple(participants),
        payloads=(Payload(version=version, kind="full", size_bytes=parts * PART_BYTES, hash=proof),),
    )


def make_plan(fragments: int = 1) -> Plan:
    return Plan(
        sync_every=4,
        codec="fp32",
        fragments=tuple((f"p{i}",) for i in range(fragments)),
        part_size_bytes=PART_BYTES,
        max_staleness=4,
        mode="quorum",
        heartbeat_timeout_s=TIMEOUT_S,
    )


class Desk:
    """The coordinator's driver in miniature: takes the effects, frees what was added, publishes what was closed.

    Each method is one message, with everything in it that a test does not care about filled in.
    """

    def __init__(
        self,
        workers: str = "",
        *,
        fragments: int = 1,
        heartbeat_timeout_s: float = TIMEOUT_S,
        pool_bytes: int = 1 << 20,
        max_payload_bytes: int = 1 << 20,
        mean_bytes: int = 0,
        prompt: bool = True,
        **rules: Any,
    ) -> None:
        """`workers`: one letter each, joined at the start and all that is configured unless `num_workers` is given.
        `prompt`: False leaves the freeing of bytes and the publishing to the test."""
        self.now = 1000.0
        self.run_id = RUN  # that the messages name
        self.prompt = prompt
        self.incarnations: dict[str, int] = {}
        self.effects: list[Effect] = []
        self.coordinator = Coordinator(
            run_id=RUN,
            rules=RoundRules(**{"num_workers": max(1, len(workers)), **rules}),
            heartbeat_timeout_s=heartbeat_timeout_s,
            pool_bytes=pool_bytes,
            part_size_bytes=PART_BYTES,
        )
        self.coordinator.fix(
            plan=make_plan(fragments),
            settled=settle(Wishes(sync_every=4, codec="fp32"), Wishes(num_fragments=fragments), "first"),
            manifest=MANIFEST,
            fragments=[
                Fragment.at(make_agreement(0, fragment=i), max_payload_bytes, mean_bytes=mean_bytes)
                for i in range(fragments)
            ],
        )
        for worker in workers:
            self.join(worker)

    # --- messages -------------------------------------------------------------------------------------------------

    def join(self, worker: str, **changes: Any) -> JoinAnswer:
        answer = self.coordinator.join(make_join(worker, **changes), self.now)
        self.incarnations[worker] = answer.incarnation
        self.carry_out()
        return answer

    def head(self, worker: str) -> dict[str, Any]:
        return {"run_id": self.run_id, "worker_id": worker, "incarnation": self.incarnations.get(worker, 1)}

    def heartbeat(self, worker: str) -> HeartbeatAnswer:
        message = Heartbeat(**self.head(worker), step=1, steps_per_second=1.0)
        return self.coordinator.heartbeat(message, self.now)

    def leave(self, worker: str) -> None:
        self.coordinator.leave(Leave(**self.head(worker), reason="done"), self.now)
        self.carry_out()

    def offer(self, worker: str, sequence: int = 1, **changes: Any) -> OfferAnswer:
        facts = {"run_id": self.run_id, "incarnation": self.incarnations.get(worker, 1), **changes}
        answer = self.coordinator.offer(make_offer(worker, sequence, **facts), self.now)
        self.carry_out()
        return answer

    def part_message(
        self, worker: str, part: int, sequence: int = 1, *, fragment: int = 0, flavour: str = "", **changes: Any
    ) -> PutPart:
        hash_ = part_hash(f"{make_key(worker, sequence, fragment)} {flavour} {part}".encode())
        facts = {**self.head(worker), "hash": hash_, **changes}
        return PutPart(fragment=fragment, sequence=sequence, part=part, **facts)

    def put(self, worker: str, part: int, sequence: int = 1, **changes: Any) -> PutPartAnswer:
        """The part's bytes arrive as they left."""
        message = self.part_message(worker, part, sequence, **changes)
        begun = self.coordinator.begin_part(message, self.now)
        return self.coordinator.part_arrived(message, self.now) if isinstance(begun, Upload) else begun

    def commit_message(
        self,
        worker: str,
        sequence: int = 1,
        *,
        fragment: int = 0,
        size_bytes: int = SIZE_BYTES,
        flavour: str = "",
        **changes: Any,
    ) -> Commit:
        hashes = contribution_hashes(make_key(worker, sequence, fragment), size_bytes, flavour)
        facts = {**self.head(worker), "payload_hash": payload_hash(hashes), **changes}
        return Commit(fragment=fragment, sequence=sequence, **facts)

    def commit(self, worker: str, sequence: int = 1, *, norm: float | None = None, **changes: Any) -> CommitAnswer:
        """The whole of it is checked and found good."""
        message = self.commit_message(worker, sequence, **changes)
        try:
            begun = self.coordinator.begin_commit(message, self.now)
            return begun if isinstance(begun, CommitAnswer) else self.coordinator.accept(message, self.now, norm)
        finally:
            self.carry_out()

    def contribute(
        self, worker: str, sequence: int = 1, *, fragment: int = 0, norm: float | None = None, **changes: Any
    ) -> CommitAnswer:
        """Offer, every missing part, commit."""
        answer = self.offer(worker, sequence, fragment=fragment, **changes)
        assert answer.state == "send", answer
        for part in answer.missing:
            self.put(worker, part, sequence, fragment=fragment)
        size_bytes = changes.get("size_bytes", SIZE_BYTES)
        return self.commit(worker, sequence, fragment=fragment, size_bytes=size_bytes, norm=norm)

    def poll(self, worker: str, after: int = 0, *, fragment: int = 0, **changes: Any) -> PollAnswer:
        message = Poll(**{**self.head(worker), **changes}, fragment=fragment, after=after)
        return self.coordinator.poll(message, self.now)

    def get_part(self, worker: str, version: int, *, fragment: int = 0) -> None:
        self.coordinator.get_part(GetPart(**self.head(worker), fragment=fragment, version=version, part=0), self.now)

    # --- time and effects -----------------------------------------------------------------------------------------

    def later(self, seconds: float, *, alive: str = "") -> None:
        """Time passes, and the coordinator looks at the clock; those `alive` have sent a heartbeat just before."""
        self.now += seconds
        for worker in alive:
            self.heartbeat(worker)
        self.coordinator.tick(self.now)
        self.carry_out()

    def carry_out(self) -> None:
        while taken := self.coordinator.take_effects():
            self.effects += taken
            if not self.prompt:
                return
            for effect in taken:
                if isinstance(effect, Accumulate):
                    self.coordinator.uploads.drop(effect.key)
                elif isinstance(effect, CloseRound):
                    self.publish(effect)

    def publish(self, closing: CloseRound) -> None:
        made = make_agreement(closing.version, fragment=closing.fragment, participants=closing.participants)
        self.coordinator.published(made, self.now)

    # --- what has happened ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> list[tuple[int, str]]:
        """Of every round that closed, in order: the version it makes, and its workers' letters."""
        return [(e.version, "".join(p.worker_id for p in e.participants)) for e in self.closings]

    @property
    def closings(self) -> list[CloseRound]:
        return [e for e in self.effects if isinstance(e, CloseRound)]

    @property
    def dropped(self) -> list[ContributionKey]:
        return [e.key for e in self.effects if isinstance(e, DropUpload)]

    def events(self, kind: str) -> list[dict[str, object]]:
        return [e.facts for e in self.effects if isinstance(e, Event) and e.kind == kind]

    @property
    def live(self) -> set[str]:
        return set(self.coordinator.members.live_ids)

    def expected(self, fragment: int = 0) -> set[str]:
        return set(self.coordinator.fragments[fragment].round.expected)

    def version(self, fragment: int = 0) -> int:
        return self.coordinator.fragments[fragment].published.version
