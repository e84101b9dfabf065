"""A simulated server: the real coordinator and the real journal; for a model, the names of the steps that made it.

One after the other, as in the rounds thread of the real one: take the outer step, make it durable, then tell. What a
disk refuses is tried again, and held back until it works. A crash drops all but the disk; a restart reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from ..coordination.server.coordinator import Coordinator
from ..coordination.server.effects import Accumulate, CloseRound, DropUpload, Effect, Event
from ..coordination.server.plan import settle
from ..coordination.server.remembered import Remembered
from ..coordination.server.rounds import Fragment
from ..coordination.server.uploads import Upload
from ..digest import data_hash, part_hash, payload_hash
from ..durable.journal import Journal
from ..errors import Busy, HashMismatch, ModelError, Refused, Superseded
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
    Payload,
    Plan,
    Poll,
    PutPart,
    PutPartAnswer,
    Request,
    Wishes,
)
from .agenda import Agenda
from .disk import PowerCut
from .history import Contents, History, StepName
from .keeping import Head, Keeper, Machine, Made, encoded
from .scenario import Scenario

PART_BYTES = 8
KEPT_VERSIONS = 2
OUTER_STEP_S = 0.2
WRITE_S = 0.02
RETRY_S = 1.5
NOTE_WAIT_S = 5.0
NOTED = {"join", "leave", "kick", "plan"}
"""Events after which the coordinator is written down, before whoever caused them is told."""

Reply = Callable[[Answer | Refused], None]


@dataclass(eq=False)
class _Round:
    """Decided, and to be carried out."""

    effect: CloseRound
    made: Made | None = None  # once the outer step was taken
    contents: Contents = field(default_factory=list)


@dataclass(eq=False)
class _Note:
    """The coordinator as of now is to be written down; then these are told."""

    remembered: Remembered
    replies: list[Callable[[], None]] = field(default_factory=list)


class SimServer:
    coordinator_type: type[Coordinator] = Coordinator
    journal_type: type[Journal] = Journal

    def __init__(self, scenario: Scenario, agenda: Agenda, history: History, machine: Machine) -> None:
        self._scenario, self._agenda, self._history, self._machine = scenario, agenda, history, machine
        self.epoch = 0  # how often it was started
        self.is_up = False
        self.refuses = True  # while it is down: does anybody say so?
        names = tuple(f"p{i}" for i in range(scenario.fragments))
        self._manifest = Manifest(parameters=tuple(ParameterSpec(name=n, shape=(1,), dtype="float32") for n in names))
        self._first_plan = Plan(
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
        )
        self._settled = settle(Wishes(), Wishes(), "")
        nothing = tuple(Made(fragment=i, version=0, anchor_hash=data_hash([b""])) for i in range(scenario.fragments))
        self._begin(self._first_plan, nothing)
        self._keeper = Keeper(machine, self.journal_type)
        self._keeper.checkpoint(self.coordinator.remember(), nothing)
        self._go()

    # --- life -----------------------------------------------------------------------------------------------------

    def crash(self, away_s: float) -> None:
        """Whatever is not on the disk is gone. It is started again `away_s` later."""
        if not self.is_up:
            return
        self.is_up = False
        self._machine.power.cut()
        self._history.faults["server_died"] += 1
        self._history.say(f"the server dies, for {away_s:.1f} s")
        self._agenda.after(away_s, self.restart)

    def restart(self) -> None:
        self._machine.restart()
        try:
            self._restore()
        except OSError as trouble:
            self._history.say(f"the server cannot start: {trouble}")
            self._agenda.after(RETRY_S, self.restart)
        except ModelError as damage:
            self._history.violated(f"the server cannot start again: {damage}")

    def _restore(self) -> None:
        self._keeper = Keeper(self._machine, self.journal_type)
        checkpoint, records = self._keeper.load()
        newest, remembered = list(checkpoint.fragments), checkpoint.remembered
        for head, contents in self._replayed(records):
            remembered = head.remembered
            made = head.round
            if made is not None:
                known = self._history.rounds.get(made.fragment, [])
                if made.version > len(known):  # durable, though nobody was told: it survived
                    self._history.faults["survived"] += 1
                    self._tell_history(made, contents)
                newest[made.fragment] = made
        self._history.server_restarted([(made.version, made.anchor_hash) for made in newest])
        self._begin(remembered.plan, tuple(newest))
        self.coordinator.resume(
            remembered.ledger,
            remembered.totals,
            remembered.facts,
            self._agenda.now,
            first_incarnation=1 if self._keeps_rounds else 1000 * self.epoch,
        )
        self._go()

    def _replayed(self, records: list[tuple[Head, Contents]]) -> list[tuple[Head, Contents]]:
        return records

    def _begin(self, plan: Plan, newest: tuple[Made, ...]) -> None:
        """Empty but for the model."""
        scenario = self._scenario
        self.epoch += 1
        self._bodies: dict[ContributionKey, list[StepName]] = {}
        self._sums: dict[tuple[int, int], Contents] = {}
        self._jobs: deque[_Round | _Note] = deque()
        self._newest = list(newest)
        self._hashes = {(made.fragment, made.version): made.anchor_hash for made in newest}
        self._oldest_held = [made.version for made in newest]  # updates before this start are not kept
        self.coordinator = self.coordinator_type(
            run_id="sim",
            rules=scenario.rules,
            heartbeat_timeout_s=scenario.heartbeat_timeout_s,
            pool_bytes=scenario.pool_parts * PART_BYTES,
            part_size_bytes=PART_BYTES,
        )
        self.coordinator.remembers = True
        self.coordinator.fix(
            plan=plan,
            settled=self._settled,
            manifest=self._manifest,
            fragments=[Fragment.at(_agreement(made), 1 << 20) for made in newest],
        )

    def _go(self) -> None:
        self.is_up = True
        self._later(1.0, self._tick)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        epoch = self.epoch

        def act() -> None:
            if self.is_up and epoch == self.epoch:
                self._powered(action)

        self._agenda.after(delay_s, act)

    def _powered(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PowerCut:
            self._history.faults["died_writing"] += 1
            self.crash(self._scenario.restart_s)

    # --- messages -------------------------------------------------------------------------------------------------

    def handle(self, request: Request, body: list[StepName], reply: Reply, *, damaged: bool = False) -> None:
        """What the HTTP service does, with names of steps for bytes."""
        self._history.requests.append(self._agenda.now)
        answer: Answer | Refused
        try:
            answer = self._answer(request, body, damaged=damaged)
        except Refused as refusal:
            answer = refusal
        self._carry_out()
        note = next((job for job in reversed(self._jobs) if isinstance(job, _Note)), None)
        if note is None or not isinstance(request, Join | Leave | Control):
            reply(answer)
            return
        # Also a repeated join: what the first one changed may not be on disk yet.
        answered = False

        def once(what: Answer | Refused) -> None:
            nonlocal answered
            if not answered:
                answered = True
                reply(what)

        note.replies.append(lambda: once(answer))
        self._later(NOTE_WAIT_S, lambda: once(Busy("the disk does not take it", retry_after_s=1.0)))

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
                return coordinator.control(request, now)
            case GetPart():
                coordinator.get_part(request, now)
                newest = coordinator.fragments[request.fragment].published.version
                kept = KEPT_VERSIONS if request.kind == "full" else self._scenario.kept_updates
                held = self._hashes.get((request.fragment, request.version))
                if held is None or not newest - kept < request.version <= newest:
                    raise Superseded(f"version {request.version} is not held")
                return GetPartAnswer(hash=_agreement_part(held, request.kind, request.part))

    def _carry_out(self) -> None:
        effects = self.coordinator.take_effects()
        for effect in effects:
            match effect:
                case Accumulate():
                    slot = (effect.key.fragment, effect.version)
                    self._sums.setdefault(slot, []).append((effect.key, self._bodies.pop(effect.key)))
                    self.coordinator.freed(effect.key)
                case CloseRound():
                    self._put(_Round(effect), OUTER_STEP_S)
                case DropUpload():
                    self._bodies.pop(effect.key, None)
                case Event():
                    self._history.say(f"{effect.kind} {effect.facts}")
                case _:
                    pass
        if self._keeps_rounds and any(map(_is_noted, effects)):
            self._put(_Note(self.coordinator.remember()), WRITE_S)

    # --- one after the other ----------------------------------------------------------------------------------------

    @property
    def _keeps_rounds(self) -> bool:
        return self._scenario.durability == "round"

    def _put(self, job: _Round | _Note, takes_s: float) -> None:
        """A snapshot that waits to be written is replaced by the next one."""
        waiting = self._jobs[-1] if len(self._jobs) > 1 else None
        if isinstance(job, _Note) and isinstance(waiting, _Note):
            waiting.remembered = job.remembered
            return
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._later(takes_s, self._work)

    def _work(self) -> None:
        """The job at the head; contributions may arrive meanwhile."""
        job = self._jobs[0]
        try:
            if isinstance(job, _Note):
                self._keeper.note(job.remembered)
            else:
                self._close(job)
        except OSError as trouble:
            self._history.faults["held_back"] += 1
            self._history.say(f"held back: {trouble}")
            self._later(RETRY_S, self._work)
            return
        if isinstance(job, _Note):
            for reply in job.replies:
                reply()
        self._jobs.popleft()
        if self._jobs:
            self._later(WRITE_S if isinstance(self._jobs[0], _Note) else OUTER_STEP_S, self._work)

    def _close(self, job: _Round) -> None:
        """The outer step, the disk, the announcement, in this order."""
        made = self._make(job)
        self._write(job, made)
        self._publish(job, made)

    def _make(self, job: _Round) -> Made:
        effect = job.effect
        if job.made is None:
            job.contents = self._sums.pop((effect.fragment, effect.version), [])
            before = self._newest[effect.fragment].anchor_hash.encode()
            job.made = Made(
                fragment=effect.fragment,
                version=effect.version,
                anchor_hash=data_hash([before, encoded(job.contents)]),
                participants=effect.participants,
            )
        return job.made

    def _write(self, job: _Round, made: Made) -> None:
        assert job.effect.remembered is not None
        if self._keeps_rounds:
            self._keeper.round(job.effect.remembered, made, job.contents)
        self._keeper.rounds_since += 1

    def _publish(self, job: _Round, made: Made) -> None:
        assert job.effect.remembered is not None
        self._tell_history(made, job.contents)
        self._newest[made.fragment] = made
        self._hashes[made.fragment, made.version] = made.anchor_hash
        self.coordinator.published(_agreement(made), self._agenda.now)
        self._carry_out()
        if self._keeper.rounds_since >= self._scenario.checkpoint_every:
            self._save(job.effect.remembered)

    def _save(self, remembered: Remembered) -> None:
        """If that fails, it is tried again after the next round: the journal has it all."""
        try:
            if not self._keeps_rounds:
                self._keeper.journal.begin_after(self._keeper.journal.last + 1)  # checkpoints are named by it
            self._keeper.checkpoint(remembered, tuple(self._newest))
            self._history.faults["checkpoint"] += 1
        except OSError as trouble:
            self._history.say(f"no checkpoint: {trouble}")

    def _tell_history(self, made: Made, contents: Contents) -> None:
        floor = max(1, self._scenario.rules.min_workers)
        self._history.round_closed(made.fragment, made.version, made.anchor_hash, made.participants, contents, floor)

    def _tick(self) -> None:
        self.coordinator.tick(self._agenda.now)
        self._carry_out()
        self._later(1.0, self._tick)

    # --- agreements -------------------------------------------------------------------------------------------------

    def _payloads(self, request: Poll) -> tuple[Payload, ...]:
        """What leads from the version that the asker proves to hold to the newest, if it is kept; else the whole."""
        newest = self.coordinator.fragments[request.fragment].published.version
        known = self._hashes.get((request.fragment, request.held))
        oldest = max(newest - self._scenario.kept_updates, self._oldest_held[request.fragment])
        if oldest <= request.held <= newest and known is not None and known == request.held_hash:
            return tuple(self._payload(request.fragment, v, "update") for v in range(request.held + 1, newest + 1))
        return (self._payload(request.fragment, newest, "full"),)

    def _payload(self, fragment: int, version: int, kind: Literal["full", "update"]) -> Payload:
        parts = [_agreement_part(self._hashes[fragment, version], kind, i) for i in range(self._scenario.parts)]
        return Payload(version=version, kind=kind, size_bytes=len(parts) * PART_BYTES, hash=payload_hash(parts))


def _is_noted(effect: Effect) -> bool:
    return isinstance(effect, Event) and effect.kind in NOTED


def _agreement(made: Made) -> Agreement:
    return Agreement(
        fragment=made.fragment, version=made.version, anchor_hash=made.anchor_hash, participants=made.participants
    )


def _agreement_part(anchor_hash: str, kind: str, part: int) -> str:
    return part_hash(f"agreement {anchor_hash} {kind} {part}".encode())


def contribution_part(key: ContributionKey, steps: list[StepName], part: int) -> str:
    return part_hash(f"{key} {steps} {part}".encode())
