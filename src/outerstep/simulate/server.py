"""A simulated server: the real coordinator, the real commits and the real journal. Its model is the names of the steps
that made it.

`Commits` says what is carried out and in which order; here that takes virtual time, and the disk may refuse it. A crash
drops all but the disk; a restart reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import UNSET
from msgspec.structs import replace

from ..coordination.layers.lifecycle import GroupState
from ..coordination.server.commits import (
    AddContributions,
    AnnounceRound,
    Commits,
    CutJournal,
    ReportEnd,
    TakeStep,
    Task,
    WriteCheckpoint,
    WriteRecord,
)
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.effects import Accumulate, AskAgain, DropUpload
from ..coordination.server.plan import settle
from ..coordination.server.rounds import Fragment
from ..coordination.server.uploads import Upload, take_complete
from ..digest import data_hash, part_hash, payload_hash
from ..durable.journal import Journal
from ..errors import Busy, HashMismatch, ModelError, OtherCodec, Refused, Superseded
from ..events import Event, GroupStateChanged, GroupStateUnclear
from ..types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    ContributionKey,
    Control,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    Join,
    Lease,
    Leave,
    Manifest,
    Offer,
    OfferAnswer,
    ParameterSpec,
    Payload,
    Plan,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
    Wishes,
)
from .agenda import Agenda
from .disk import PowerCut
from .history import Contents, History, StepName
from .scenario import Scenario
from .storage import Machine, SimStorage, SimVersion, encoded

PART_BYTES = 8
CODECS = ("fp32", "bf16", "int8")  # names are all that a simulated contribution has of them
MEAN_PARTS = 4  # a mean is as large as so many contributions: some records are made of these, some of that
KEPT_VERSIONS = 2
START_AGAIN_S = 1.5  # after a start that the disk refused
NOTE_WAIT_S = 5.0
GATHER_S = 0.1
ABOVE = "above"  # whose steps come from there
TAKES_S: dict[type[Task], float] = {TakeStep: 0.2, WriteRecord: 0.02, WriteCheckpoint: 0.02}  # the others: no time

AWAY = (GroupState.IDLE, GroupState.EXIT)

Reply = Callable[[Answer | Refused], None]


class SimServer:
    coordinator_type: type[Coordinator] = Coordinator
    commits_type: type[Commits] = Commits
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
        self._nothing = tuple(
            SimVersion(fragment=i, version=0, anchor_hash=data_hash([b""])) for i in range(scenario.fragments)
        )
        self._storage = SimStorage(machine, self.journal_type)
        self._begin(self._first_plan, self._nothing)
        self._moves = 0  # agreements from above, since the run began
        self._serve()

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
            self._agenda.after(START_AGAIN_S, self.restart)
        except ModelError as damage:
            self._history.violated(f"the server cannot start again: {damage}")

    def _restore(self) -> None:
        self._storage = SimStorage(self._machine, self.journal_type)
        found = self._storage.load()
        if found is None:
            self._history.server_restarted([(made.version, made.anchor_hash) for made in self._nothing])
            self._begin(self._first_plan, self._nothing)
            self._serve()
            return
        checkpoint, records = found
        newest, remembered = list(checkpoint.fragments), checkpoint.remembered
        for record, contents in records:
            remembered = record.remembered
            made = record.round
            if made is not None:
                known = self._history.rounds.get(made.fragment, [])
                if made.version > len(known):  # durable, though nobody was told: it survived
                    self._history.faults["survived"] += 1
                    self._tell_history(made, contents)
                newest[made.fragment] = made
        self._history.server_restarted([(made.version, made.anchor_hash) for made in newest])
        self._begin(remembered.plan, tuple(newest))
        self._commits.resume(checkpoint.includes, min(checkpoint.remembered.versions))
        self.coordinator.resume(
            remembered.ledger,
            remembered.totals,
            remembered.facts,
            self._agenda.now,
            first_incarnation=1 if self._scenario.durability == "round" else 1000 * self.epoch,
        )
        self._serve()

    def _begin(self, plan: Plan, newest: tuple[SimVersion, ...]) -> None:
        """Empty but for the model."""
        scenario = self._scenario
        self.epoch += 1
        self._bodies: dict[ContributionKey, list[StepName]] = {}
        self._sums: dict[tuple[int, int], Contents] = {}
        self._stepped: tuple[SimVersion, Contents] | None = None  # the step of the round that is being closed
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # answers, each for a record to be durable
        self._turns: dict[ContributionKey, list[Callable[[], None]]] = {}  # offers whose answers wait
        self._is_busy = False
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
            fragments=[
                Fragment.at(_agreement(made), 1 << 20, mean_bytes=MEAN_PARTS * scenario.parts * PART_BYTES)
                for made in newest
            ],
        )
        self._commits = self.commits_type(
            self.coordinator,
            scenario.durability,
            save_every=scenario.checkpoint_every,
            last_record=self._storage.journal.last,
        )

    def _serve(self) -> None:
        self.is_up = True
        self._commits.note()
        self._work()
        self._later(1.0, self._tick)
        if self._scenario.above_every_s:
            self._later(self._scenario.above_every_s, self._from_above)

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
        record = 0
        try:
            if isinstance(request, CompleteOffer):
                answer = self._take_complete(request, body, damaged=damaged)
            elif isinstance(request, Join | Heartbeat | Leave | Lease | Offer | Control):
                answer, record = self._commits.answer(request, self._agenda.now)
            else:
                answer = self._answer(request, body, damaged=damaged)
        except Refused as refusal:
            is_forgotten = isinstance(refusal, OtherCodec) and isinstance(request, Offer) and request.codec in CODECS
            self._history.faults["forgotten_codec"] += is_forgotten
            answer = refusal
        self._flush()
        if isinstance(request, Offer) and isinstance(answer, OfferAnswer) and answer.state == "wait" and request.wait_s:
            self._hold(request, body, reply)
            return
        if record <= self._commits.written:
            reply(answer)
            return
        answered = False

        def once(what: Answer | Refused) -> None:
            nonlocal answered
            if not answered:
                answered = True
                reply(what)

        self._waiting.append((record, lambda: once(answer)))
        self._later(NOTE_WAIT_S, lambda: once(Busy("the disk does not take it", retry_after_s=1.0)))

    def _hold(self, request: Offer, body: list[StepName], reply: Reply) -> None:
        """The answer waits for the worker's turn, or for as long as it may."""
        key, told = request.key, False
        self._history.faults["held_offers"] += 1

        def ask_again() -> None:
            nonlocal told
            if not told:
                told = True
                self.handle(replace(request, wait_s=UNSET), body, reply)

        self._turns.setdefault(key, []).append(ask_again)
        self._later(request.wait_s or 0.0, ask_again)

    def _take_complete(self, request: CompleteOffer, body: list[StepName], *, damaged: bool) -> CompleteOfferAnswer:
        def commit(message: Commit) -> CommitAnswer:
            answer = self._answer(message, [], damaged=False)
            assert isinstance(answer, CommitAnswer)
            return answer

        answer = take_complete(
            request,
            lambda offer: self._commits.answer(offer, self._agenda.now)[0],
            lambda part: self._answer(part, body, damaged=damaged),
            commit,
        )
        self._history.faults["complete_offers"] += answer.state == "accepted"
        return answer

    def _answer(self, request: PutPart | Commit | Poll | GetPart, body: list[StepName], *, damaged: bool) -> Answer:
        now = self._agenda.now
        coordinator = self.coordinator
        match request:
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
                assert coordinator.plan is not None
                self._history.faults["earlier_codec"] += begun_commit.offer.codec != coordinator.plan.codec
                return coordinator.accept(request, now)
            case Poll():
                answer = coordinator.poll(request, now)
                if answer.agreement is None:
                    return answer
                agreement = replace(answer.agreement, payloads=self._payloads(request))
                most_bytes = min(request.takes_bytes or 0, PART_BYTES)
                is_carried = agreement.size_bytes > 0 and all(p.size_bytes <= most_bytes for p in agreement.payloads)
                self._history.faults["carried_agreements"] += is_carried
                return replace(answer, agreement=agreement, carried_bytes=agreement.size_bytes if is_carried else UNSET)
            case GetPart():
                coordinator.get_part(request, now)
                newest = coordinator.fragments[request.fragment].published.version
                kept = KEPT_VERSIONS if request.kind == "full" else self._scenario.kept_updates
                held = self._hashes.get((request.fragment, request.version))
                if held is None or not newest - kept < request.version <= newest:
                    raise Superseded(f"version {request.version} is not held")
                return GetPartAnswer(hash=_agreement_part(held, request.kind, request.part))

    def _flush(self) -> None:
        for effect in self._commits.take_effects():
            if isinstance(effect, DropUpload):
                self._bodies.pop(effect.key, None)
            elif isinstance(effect, AskAgain):
                for ask_again in self._turns.pop(effect.key, []):
                    self._later(0.0, ask_again)
            elif isinstance(effect, Event):
                self._heard(effect)
        self._work()

    def _heard(self, event: Event) -> None:
        self._history.say(f"{event.kind} {event.facts}")
        self._watch_lives(event)

    def _watch_lives(self, event: Event) -> None:
        if isinstance(event, GroupStateChanged):
            self._history.moves[f"{event.before or 'new'} to {event.state}"] += 1
        elif isinstance(event, GroupStateUnclear):
            self._history.violated(f"the life of {event.worker} has no such edge: {event.why}")

    def _check_lives(self) -> None:
        """Who is not here is idle or gone, and who is here is not gone."""
        for member in self.coordinator.members:
            state = member.life.state if member.life is not None else None
            if state is not None and (state is GroupState.EXIT if member.live else state not in AWAY):
                here = "here" if member.live else "away"
                self._history.violated(f"{member.worker_id} is {here}, and its life in {state}")

    # --- one task after the other -----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Contributions may arrive while a task is under way."""
        if self._is_busy:
            return
        task = self._commits.next()
        if task is not None:
            self._is_busy = True
            self._later(TAKES_S.get(type(task), 0.0), lambda: self._perform(task))
        elif self._commits.can_gather:
            self._later(0.0 if self._commits.must_gather else GATHER_S, self._gather)
        self._reply()

    def _gather(self) -> None:
        self._commits.gather()
        self._work()

    def _perform(self, task: Task) -> None:
        pause_s: float | None = 0.0
        try:
            self._carry_out(task)
        except OSError as trouble:
            pause_s = self._commits.failed()
            self._history.faults["held_back"] += pause_s is not None
            self._history.say(f"{type(task).__name__}: {trouble}")
        else:
            self._commits.done()
        self._later(pause_s or 0.0, self._resume_work)

    def _resume_work(self) -> None:
        self._is_busy = False
        self._work()

    def _reply(self) -> None:
        ready = [answer for record, answer in self._waiting if record <= self._commits.written]
        self._waiting = [(record, answer) for record, answer in self._waiting if record > self._commits.written]
        for answer in ready:
            answer()

    def _carry_out(self, task: Task) -> None:
        match task:
            case AddContributions():
                self._sums.setdefault((task.fragment, task.version), []).extend(map(self._contents, task.accepted))
                self._free(task.freed)
                self._flush()  # those whose turn it is now
            case TakeStep():
                self._step(task)
            case WriteRecord():
                made, contents = self._stepped if task.closing is not None and self._stepped is not None else (None, [])
                self._storage.append(task.remembered, made, contents)
            case AnnounceRound():
                self._announce(task)
            case WriteCheckpoint():
                self._storage.checkpoint(task, tuple(self._newest))
                self._history.faults["checkpoint"] += 1
            case CutJournal():
                self._storage.journal.cut(task.up_to)
            case ReportEnd():
                pass  # there is nobody to read it

    def _contents(self, accepted: Accumulate) -> tuple[ContributionKey, list[StepName]]:
        return accepted.key, self._bodies[accepted.key]

    def _free(self, accepted: tuple[Accumulate, ...]) -> None:
        for one in accepted:
            del self._bodies[one.key]
            self.coordinator.uploads.drop(one.key)

    def _step(self, task: TakeStep) -> None:
        closing = task.closing
        contents = [
            *self._sums.pop((closing.fragment, closing.version), []),
            *map(self._contents, task.taken),
        ]
        if self._commits.journals and not task.freed:
            self._check_replay(task, contents)
        if closing.from_above:
            contents += self._agreed_above(closing.fragment)
        before = self._newest[closing.fragment].anchor_hash.encode()
        made = SimVersion(
            fragment=closing.fragment,
            version=closing.version,
            anchor_hash=data_hash([before, encoded(contents)]),
            participants=closing.participants,
        )
        self._stepped = made, contents

    def _check_replay(self, task: TakeStep, contents: Contents) -> None:
        """A record may hold the contributions: all of them, and in the order in which they were added."""
        self._history.faults["kept_for_record"] += bool(task.added)
        held = [(one.key, self._bodies.get(one.key, [])) for one in (*task.added, *task.taken)]
        if held != contents:
            self._history.violated(f"round {task.closing.version} was {contents}, and its record would replay {held}")

    def _announce(self, task: AnnounceRound) -> None:
        assert self._stepped is not None
        made, contents = self._stepped
        self._free(task.step.held)
        self._tell_history(made, contents)
        self._newest[made.fragment] = made
        self._hashes[made.fragment, made.version] = made.anchor_hash
        self.coordinator.published(_agreement(made), self._agenda.now)
        self._flush()

    def _tell_history(self, made: SimVersion, contents: Contents) -> None:
        is_round = all(key.worker_id != ABOVE for key, _ in contents)
        self._history.faults["from_above"] += not is_round
        floor = max(1, self._scenario.rules.min_workers) if is_round else 0
        self._history.round_closed(made.fragment, made.version, made.anchor_hash, made.participants, contents, floor)

    def _tick(self) -> None:
        self.coordinator.tick(self._agenda.now)
        self._flush()
        self._check_lives()
        self._later(1.0, self._tick)

    def _from_above(self) -> None:
        """A layer above has agreed on every fragment: others' steps are to be in the model."""
        for fragment in range(self._scenario.fragments):
            self.coordinator.move_from_above(fragment, self._moves + 1)
        self._flush()
        self._later(self._scenario.above_every_s, self._from_above)

    def _agreed_above(self, fragment: int) -> Contents:
        self._moves += 1
        key = ContributionKey(run_id="sim", worker_id=ABOVE, fragment=fragment, sequence=self._moves)
        return [(key, [(ABOVE, self._moves)])]

    # --- agreements -------------------------------------------------------------------------------------------------

    def _payloads(self, request: Poll) -> tuple[Payload, ...]:
        """What leads from the version that the asker proves to hold to the newest, if it is kept; else the whole."""
        newest = self.coordinator.fragments[request.fragment].published.version
        known = self._hashes.get((request.fragment, request.held))
        oldest = max(newest - self._scenario.kept_updates, self._oldest_held[request.fragment])
        if oldest <= request.held <= newest and known is not None and known == request.held_hash:
            return tuple(self._payload(request.fragment, v, "update") for v in range(request.held + 1, newest + 1))
        return (self._payload(request.fragment, newest, "full"),)

    def carried(self, answer: PollAnswer) -> list[str]:
        """The hashes of the payloads that come with this answer, which is being given."""
        agreement = answer.agreement
        assert agreement is not None
        return [
            _agreement_part(self._hashes[agreement.fragment, payload.version], payload.kind, 0)
            for payload in agreement.payloads
        ]

    def _payload(self, fragment: int, version: int, kind: Literal["full", "update"]) -> Payload:
        parts = [_agreement_part(self._hashes[fragment, version], kind, i) for i in range(self._scenario.parts)]
        return Payload(version=version, kind=kind, size_bytes=len(parts) * PART_BYTES, hash=payload_hash(parts))


def _agreement(made: SimVersion) -> Agreement:
    return Agreement(
        fragment=made.fragment, version=made.version, anchor_hash=made.anchor_hash, participants=made.participants
    )


def _agreement_part(anchor_hash: str, kind: str, part: int) -> str:
    return part_hash(f"agreement {anchor_hash} {kind} {part}".encode())
