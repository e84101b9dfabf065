"""A simulated server: the real coordinator; for a model, the names of the steps that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from ..coordination.control import carry_out
from ..coordination.coordinator import Coordinator
from ..coordination.effects import Accumulate, CloseRound, DropUpload
from ..coordination.fragment import Fragment
from ..coordination.plan import settle
from ..coordination.uploads import Upload
from ..digest import data_hash, part_hash, payload_hash
from ..errors import HashMismatch, Refused, Superseded
from ..types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    ContributionKey,
    Control,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    Join,
    Leave,
    Manifest,
    Offer,
    ParameterSpec,
    Participant,
    Payload,
    Plan,
    Poll,
    PutPart,
    PutPartAnswer,
    Request,
    Wishes,
)
from .agenda import Agenda
from .history import History, StepName
from .scenario import Scenario

PART_BYTES = 8
KEPT_VERSIONS = 2
OUTER_STEP_S = 0.2


class SimServer:
    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        history: History,
        coordinator_type: Callable[..., Coordinator] = Coordinator,
    ) -> None:
        self._scenario = scenario
        self._agenda = agenda
        self._history = history
        self._bodies: dict[ContributionKey, list[StepName]] = {}
        self._sums: dict[tuple[int, int], list[tuple[ContributionKey, list[StepName]]]] = {}
        self._hashes: dict[tuple[int, int], str] = {}  # of every version's anchor
        self._busy_until = 0.0
        self.coordinator = coordinator_type(
            run_id="sim",
            rules=scenario.rules,
            heartbeat_timeout_s=scenario.heartbeat_timeout_s,
            pool_bytes=scenario.pool_parts * PART_BYTES,
            part_size_bytes=PART_BYTES,
        )
        names = tuple(f"p{i}" for i in range(scenario.fragments))
        self.coordinator.fix(
            plan=Plan(
                sync_every=scenario.sync_every,
                codec="fp32",
                down_codec="fp32",
                fragments=tuple((name,) for name in names),
                part_size_bytes=PART_BYTES,
                max_staleness=scenario.rules.max_staleness,
                mode=scenario.rules.mode,
                delay=scenario.delay,
                carry=scenario.carry,
                dylu=scenario.rules.dylu,
                heartbeat_timeout_s=scenario.heartbeat_timeout_s,
            ),
            settled=settle(Wishes(), Wishes(), ""),
            manifest=Manifest(parameters=tuple(ParameterSpec(name=n, shape=(1,), dtype="float32") for n in names)),
            fragments=[Fragment.at(self._agreement(i, 0, "", ()), 1 << 20) for i in range(scenario.fragments)],
        )
        agenda.after(1.0, self._tick)

    @property
    def pending(self) -> set[tuple[int, StepName]]:
        """(fragment, step) of those in a round which has not closed."""
        return {(f, step) for (f, _), contents in self._sums.items() for _, steps in contents for step in steps}

    def handle(self, request: Request, body: list[StepName], *, damaged: bool) -> Answer | Refused:
        """What the HTTP service does, with names of steps for bytes."""
        try:
            return self._answer(request, body, damaged=damaged)
        except Refused as refusal:
            return refusal
        finally:
            self._carry_out()

    def _answer(self, request: Request, body: list[StepName], *, damaged: bool) -> Answer:
        now = self._agenda.now
        coordinator = self.coordinator
        match request:
            case Join():
                return coordinator.join(request, now)
            case Heartbeat():
                return coordinator.heartbeat(request, now)
            case Leave():
                return coordinator.leave(request, now)
            case Offer():
                return coordinator.offer(request, now)
            case PutPart():
                begun = coordinator.begin_part(request, now)
                if isinstance(begun, PutPartAnswer):
                    return begun
                if damaged:
                    raise HashMismatch("a byte changed on its way")
                self._bodies[request.key] = body
                return coordinator.part_arrived(request, now)
            case Commit():
                begun_commit: Upload | CommitAnswer = coordinator.begin_commit(request, now)
                if isinstance(begun_commit, CommitAnswer):
                    return begun_commit
                return coordinator.accept(request, now)
            case Poll():
                answer = coordinator.poll(request, now)
                if answer.agreement is None:
                    return answer
                return replace(answer, agreement=replace(answer.agreement, payloads=self._payloads(request)))
            case Control():
                return carry_out(coordinator, request, now)
            case GetPart():
                coordinator.get_part(request, now)
                newest = coordinator.fragments[request.fragment].published.version
                kept = KEPT_VERSIONS if request.kind == "full" else self._scenario.kept_updates
                if not newest - kept < request.version <= newest:
                    raise Superseded(f"version {request.version} is not held")
                return GetPartAnswer(
                    hash=_agreement_part(request.fragment, request.version, request.kind, request.part)
                )

    def _carry_out(self) -> None:
        for effect in self.coordinator.take_effects():
            match effect:
                case Accumulate():
                    slot = (effect.key.fragment, effect.version)
                    self._sums.setdefault(slot, []).append((effect.key, self._bodies.pop(effect.key)))
                    self.coordinator.freed(effect.key)
                case CloseRound():
                    # One outer step at a time, each taking its while: contributions may arrive meanwhile.
                    self._busy_until = max(self._busy_until, self._agenda.now) + OUTER_STEP_S
                    self._agenda.at(self._busy_until, self._close(effect))
                case DropUpload():
                    self._bodies.pop(effect.key, None)
                case _:
                    pass

    def _close(self, effect: CloseRound) -> Callable[[], None]:
        def close() -> None:
            contents = self._sums.pop((effect.fragment, effect.version), [])
            floor = max(1, self._scenario.rules.min_workers)
            self._history.round_closed(effect.fragment, effect.version, effect.participants, contents, floor)
            before = self.coordinator.fragments[effect.fragment].published.anchor_hash
            made = self._agreement(effect.fragment, effect.version, before, effect.participants)
            self.coordinator.published(made, self._agenda.now)
            self._carry_out()

        return close

    def _payloads(self, request: Poll) -> tuple[Payload, ...]:
        """What leads from the version that the asker proves to hold to the newest, if it is kept; else the whole."""
        newest = self.coordinator.fragments[request.fragment].published.version
        known = self._hashes.get((request.fragment, request.held))
        kept = newest - self._scenario.kept_updates <= request.held <= newest
        if kept and known is not None and known == request.held_hash:
            return tuple(self._payload(request.fragment, v, "update") for v in range(request.held + 1, newest + 1))
        return (self._payload(request.fragment, newest, "full"),)

    def _payload(self, fragment: int, version: int, kind: Literal["full", "update"]) -> Payload:
        parts = [_agreement_part(fragment, version, kind, i) for i in range(self._scenario.parts)]
        return Payload(version=version, kind=kind, size_bytes=len(parts) * PART_BYTES, hash=payload_hash(parts))

    def _agreement(self, fragment: int, version: int, before: str, participants: tuple[Participant, ...]) -> Agreement:
        members = ",".join(f"{p.worker_id}#{p.sequence}" for p in participants)
        anchor_hash = data_hash([f"{before}{fragment}{version}{members}".encode()])
        self._hashes[fragment, version] = anchor_hash
        return Agreement(fragment=fragment, version=version, anchor_hash=anchor_hash, participants=participants)

    def _tick(self) -> None:
        self.coordinator.tick(self._agenda.now)
        self._carry_out()
        self._agenda.after(1.0, self._tick)


def _agreement_part(fragment: int, version: int, kind: str, part: int) -> str:
    return part_hash(f"agreement {fragment} {version} {kind} {part}".encode())


def contribution_part(key: ContributionKey, steps: list[StepName], part: int) -> str:
    return part_hash(f"{key} {steps} {part}".encode())
