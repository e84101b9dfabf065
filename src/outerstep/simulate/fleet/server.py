"""A server of a fleet: the real coordinator and the real commits. Its model is how many steps went into it.

What takes time is what coordination/cost.py counts: bytes on lines, the server's work on each byte (a line of its own
here, in both directions) and its outer step. Its disk takes no time and keeps nothing: restarts of servers are the
business of the fault schedules (simulate/server.py). A contribution travels as one part, which stands for parts that
follow each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from ...coordination.cost import Overheads, bytes_per_value
from ...coordination.planning.capacity import RING_SHARE
from ...coordination.server.commits import AddContributions, AnnounceRound, Commits, TakeStep, Task
from ...coordination.server.coordinator import Coordinator
from ...coordination.server.effects import Accumulate, AskAgain, DropUpload
from ...coordination.server.plan import CARRY_BEYOND, settle
from ...coordination.server.rounds import Fragment, RoundRules
from ...coordination.server.uploads import take_complete
from ...coordination.windows import Transfer, Windows
from ...digest import part_hash, payload_hash
from ...errors import NotFinite, Refused, Superseded
from ...events import Event, GroupStateUnclear, VersionPublished, WorkerDied, WorkerLeft, WorkerQuarantined
from ...lanes import part_size
from ...types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    CompleteOffer,
    ContributionKey,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    Join,
    Leave,
    Manifest,
    Offer,
    OfferAnswer,
    ParameterSpec,
    Payload,
    Plan,
    Poll,
    PutPart,
    PutPartAnswer,
    Request,
    Wishes,
)
from ..agenda import Agenda
from .booked_lines import BookedLine
from .ledger import LayerLedger, Parcel
from .scenario import LayerSetting

RUN = "fleet"
FULL_BYTES = 4.0  # of a parameter: an anchor travels as fp32
LONGEST_POLL_S = 20.0  # as server/service.py has it
GATHER_S = 0.1
RECORD_S = 0.02
USUAL_NORM, HUGE_NORM = 1.0, 1e6
MOST_AGE = 4

Reply = Callable[[Answer | Refused, int], None]
"""The answer, and the bytes that come with it."""


@dataclass(frozen=True)
class ServerTerms:
    """What a server is started with. `members`: how many it waits for at the start."""

    setting: LayerSetting
    members: int
    parameters: int
    heartbeat_timeout_s: float
    start_deadline_s: float
    pool_bytes: int
    overheads: Overheads

    @property
    def rules(self) -> RoundRules:
        setting = self.setting
        return RoundRules(
            num_workers=self.members,
            quorum=None if setting.quorum is None else max(round(setting.quorum * self.members), 1),
            grace_s=setting.grace_s,
            round_deadline_s=setting.round_deadline_s,
            start_deadline_s=self.start_deadline_s,
            max_staleness=MOST_AGE,
        )

    @property
    def plan(self) -> Plan:
        setting, rules = self.setting, self.rules
        return Plan(
            sync_every=setting.sync_every,
            codec=setting.codec,
            down_codec=setting.down_codec,
            fragments=tuple((f"p{i}",) for i in range(setting.num_fragments)),
            part_size_bytes=self.bytes_of(FULL_BYTES),
            max_staleness=rules.max_staleness,
            mode=rules.mode,
            delay=setting.delay,
            carry=setting.delay > CARRY_BEYOND * setting.sync_every,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )

    def bytes_of(self, per_parameter: float) -> int:
        """Of one fragment."""
        return max(round(self.parameters * per_parameter / self.setting.num_fragments), 1)

    @property
    def up_bytes(self) -> int:
        return self.bytes_of(bytes_per_value(self.setting.codec))

    @property
    def down_bytes(self) -> int:
        return self.bytes_of(bytes_per_value(self.setting.down_codec))


class FleetServer:
    """`lines_in`, `lines_out`: of the machine it runs on, that all members share."""

    coordinator_type: type[Coordinator] = Coordinator

    def __init__(
        self,
        name: str,
        terms: ServerTerms,
        agenda: Agenda,
        ledger: LayerLedger,
        *,
        in_bytes_per_s: float,
        out_bytes_per_s: float,
    ) -> None:
        self.name, self.terms, self._agenda, self.ledger = name, terms, agenda, ledger
        work = terms.overheads.server_s_per_byte
        self.lines_in = (BookedLine.of_rate(in_bytes_per_s), BookedLine(work))
        self.lines_out = (BookedLine(work), BookedLine.of_rate(out_bytes_per_s))
        self.up_bytes, self.down_bytes = terms.up_bytes, terms.down_bytes
        self.full_bytes = terms.bytes_of(FULL_BYTES)
        self.part_bytes = part_size(terms.up_bytes)  # on the lines; what the machines see is one part
        self._connections = random.Random(f"connections to {name}")
        self._kept_updates = max(int(RING_SHARE * self.full_bytes / self.down_bytes), 1)
        self.deaths = self.quarantines = 0
        self.heard: Callable[[Event], None] = lambda event: None  # whoever leads this cluster
        self._bodies: dict[ContributionKey, Parcel] = {}
        self._sums: dict[tuple[int, int], list[tuple[ContributionKey, Parcel]]] = {}
        self._stepped: tuple[list[tuple[ContributionKey, Parcel]], list[tuple[ContributionKey, Parcel]]] = [], []
        self._waiting: list[tuple[int, Reply, Answer]] = []  # answers, each for a record to be durable
        self._polls: dict[int, list[tuple[Poll, Reply, float]]] = {}  # held open, by fragment
        self._turns: dict[ContributionKey, Callable[[], None]] = {}  # offers whose answers wait
        self._payloads: dict[tuple[int, int, str], Payload] = {}
        self._is_busy = self._gathers = False
        self._armed = 0
        self._withheld = 0.0
        setting = terms.setting
        manifest = Manifest(
            parameters=tuple(
                ParameterSpec(name=f"p{i}", shape=(max(terms.parameters // setting.num_fragments, 1),), dtype="float32")
                for i in range(setting.num_fragments)
            )
        )
        self.coordinator = self.coordinator_type(
            run_id=RUN,
            rules=terms.rules,
            heartbeat_timeout_s=terms.heartbeat_timeout_s,
            pool_bytes=max(terms.pool_bytes, 2 * self.up_bytes),
            part_size_bytes=terms.plan.part_size_bytes,
        )
        self.coordinator.remembers = True
        self.coordinator.fix(
            plan=terms.plan,
            settled=settle(Wishes(), Wishes(), ""),
            manifest=manifest,
            fragments=[
                Fragment.at(_agreement(i, 0), self.full_bytes, mean_bytes=self.full_bytes)
                for i in range(setting.num_fragments)
            ],
        )
        self.commits = Commits(self.coordinator, "round")
        self.commits.note()
        self._work()

    # --- messages -----------------------------------------------------------------------------------------------------

    def beat(self, heartbeat: Heartbeat) -> Answer | Refused:
        """At once: a fleet's heartbeats are most of its messages, and nothing depends on the way they take. (What there
        is to do, if anything, is done with the next message.)"""
        try:
            answer, _ = self.commits.answer(heartbeat, self._agenda.now)
        except Refused as refusal:
            return refusal
        return answer

    def windows_up(self) -> Windows:
        """Of a worker that comes."""
        return self._windows(self.up_bytes)

    def windows_down(self) -> Windows:
        return self._windows(self.down_bytes)

    def _windows(self, size_bytes: int) -> Windows:
        most = self.terms.overheads.connections
        return Windows(Transfer.of(size_bytes, 0.0, 0.0, most, self.part_bytes).parts, self._connections)

    def handle(self, request: Request, parcel: Parcel | None, reply: Reply, *, lie: str = "") -> None:
        now, record = self._agenda.now, 0
        answer: Answer | Refused
        try:
            if isinstance(request, CompleteOffer):
                answer = take_complete(
                    request,
                    lambda offer: self.commits.answer(offer, now)[0],
                    lambda part: self._answer(part, parcel, lie),
                    lambda commit: self._answer(commit, parcel, lie),  # type: ignore[arg-type, return-value]
                )
            elif isinstance(request, Join | Leave | Offer):
                answer, record = self.commits.answer(request, now)
            elif isinstance(request, Poll):
                self._poll(request, reply, now + min(request.wait_s, LONGEST_POLL_S))
                return
            else:
                answer = self._answer(request, parcel, lie)
        except Refused as refusal:
            answer = refusal
        if isinstance(request, Join):
            self._arm()
        self._flush()
        if isinstance(answer, OfferAnswer) and answer.state == "wait" and isinstance(request, Offer) and request.wait_s:
            self._hold(request, reply)
        elif record > self.commits.written and not isinstance(answer, Refused):
            self._waiting.append((record, reply, answer))
        else:
            reply(answer, self._size_of(request, answer))

    def _hold(self, request: Offer, reply: Reply) -> None:
        """The answer waits for the worker's turn, or for as long as it may."""
        told = False

        def ask_again() -> None:
            nonlocal told
            if not told:
                told = True
                self.handle(replace(request, wait_s=UNSET), None, reply)

        self._turns[request.key] = ask_again
        self._agenda.after(request.wait_s or 0.0, ask_again)

    def _answer(self, request: Request, parcel: Parcel | None, lie: str) -> Answer:
        now, coordinator = self._agenda.now, self.coordinator
        match request:
            case PutPart():
                begun = coordinator.begin_part(request, now)
                if isinstance(begun, PutPartAnswer):
                    return begun
                assert parcel is not None
                self._bodies[request.key] = parcel
                return coordinator.part_arrived(request, now)
            case Commit():
                found = coordinator.begin_commit(request, now)
                if isinstance(found, CommitAnswer):
                    return found
                if lie == "nan":
                    refusal = NotFinite("a value is not finite")
                    coordinator.reject(request.key, refusal, now)
                    raise refusal
                return coordinator.accept(request, now, HUGE_NORM if lie == "huge" else USUAL_NORM)
            case GetPart():
                coordinator.get_part(request, now)
                newest = coordinator.fragments[request.fragment].published.version
                kept = 2 if request.kind == "full" else self._kept_updates
                if not newest - kept < request.version <= newest:
                    raise Superseded(f"version {request.version} is not held")
                return GetPartAnswer(hash=_hash(request.fragment, request.version, request.kind))
            case _:
                raise AssertionError(f"{type(request).__name__} is answered elsewhere")

    def _size_of(self, request: Request, answer: Answer | Refused) -> int:
        """Of the payload that comes with the answer."""
        if not isinstance(answer, GetPartAnswer) or not isinstance(request, GetPart):
            return 0
        return self.full_bytes if request.kind == "full" else self.down_bytes

    def reading(self, key: ContributionKey, begins: int) -> None:
        """A part of it begins to arrive (1), or is here (−1): a worker that sends is not silent."""
        upload = self.coordinator.uploads.by_key.get(key)
        if upload is not None:
            upload.under_way = max(upload.under_way + begins, 0)
            upload.heard_at = self._agenda.now

    # --- polls that wait ----------------------------------------------------------------------------------------------

    def _poll(self, request: Poll, reply: Reply, until: float) -> None:
        """Answered when there is something new to say, or when it is time."""
        now = self._agenda.now
        try:
            answer = self.coordinator.poll(request, now)
        except Refused as refusal:
            reply(refusal, 0)
            return
        if answer.agreement is not None:
            agreement = replace(answer.agreement, payloads=self._leading(request))
            reply(replace(answer, agreement=agreement), 0)
        elif answer.wanted:
            reply(answer, 0)
        elif now >= until:
            reply(replace(answer, retry_after_s=0.0), 0)
        else:
            self._polls.setdefault(request.fragment, []).append((request, reply, until))
            self._agenda.at(until, lambda: self._poll_is_over(request, reply))

    def _poll_is_over(self, request: Poll, reply: Reply) -> None:
        held = self._polls.get(request.fragment, [])
        mine = next((one for one in held if one[0] is request), None)
        if mine is not None:
            held.remove(mine)
            self._poll(request, reply, 0.0)

    def _wake(self, fragment: int) -> None:
        for request, reply, until in self._polls.pop(fragment, []):
            self._poll(request, reply, until)

    def _leading(self, request: Poll) -> tuple[Payload, ...]:
        """What leads from the version that the asker proves to hold to the newest, if it is kept; else the whole."""
        fragment, newest = request.fragment, self.coordinator.fragments[request.fragment].published.version
        is_held = request.held_hash == _anchor_hash(fragment, request.held)
        if is_held and max(newest - self._kept_updates, 0) <= request.held <= newest:
            return tuple(self._payload(fragment, v, "update") for v in range(request.held + 1, newest + 1))
        return (self._payload(fragment, newest, "full"),)

    def _payload(self, fragment: int, version: int, kind: str) -> Payload:
        found = self._payloads.get((fragment, version, kind))
        if found is None:
            size_bytes = self.full_bytes if kind == "full" else self.down_bytes
            made = payload_hash([_hash(fragment, version, kind)])
            found = Payload(version=version, kind=kind, size_bytes=size_bytes, hash=made)  # type: ignore[arg-type]
            self._payloads[fragment, version, kind] = found
            self._payloads.pop((fragment, version - 2 * self._kept_updates, kind), None)
        return found

    # --- effects, and one task after the other ------------------------------------------------------------------------

    def _flush(self) -> None:
        effects = self.commits.take_effects()
        for effect in effects:
            if isinstance(effect, DropUpload):
                self._bodies.pop(effect.key, None)
            elif isinstance(effect, AskAgain):
                ask_again = self._turns.pop(effect.key, None)
                if ask_again is not None:
                    self._agenda.after(0.0, ask_again)
            elif isinstance(effect, Accumulate):
                # Others may be wanted there; and who was held back for a layer above is so no more.
                if effect.first and (len(self.coordinator.fragments) > 1 or self._withheld):
                    for fragment in list(self._polls):
                        self._wake(fragment)
            elif isinstance(effect, Event):
                self._told(effect)
        if effects or self._withheld:
            self._watch_withheld()
        if self.coordinator.wakes_sooner:
            self._arm()
        if not self._is_busy:
            self._work()

    def _told(self, event: Event) -> None:
        if isinstance(event, GroupStateUnclear):
            self.ledger.violated(f"the life of {event.worker} has no such edge: {event.why}")
        self.deaths += isinstance(event, WorkerDied)
        self.quarantines += isinstance(event, WorkerQuarantined)
        if isinstance(event, VersionPublished):
            fragment = event.agreement.fragment
            self._agenda.after(0.0, lambda: self._wake(fragment))
        if isinstance(event, VersionPublished | WorkerDied | WorkerLeft):
            self.heard(event)

    def _work(self) -> None:
        """Contributions may arrive while a task is under way."""
        if self._is_busy:
            return
        task = self.commits.next()
        if task is not None:
            self._is_busy = True
            self._agenda.after(self._takes_s(task), lambda: self._perform(task))
        elif self.commits.can_gather and not self._gathers:
            self._gathers = True
            self._agenda.after(0.0 if self.commits.must_gather else GATHER_S, self._gather)

    def _takes_s(self, task: Task) -> float:
        if isinstance(task, TakeStep):
            return self.terms.overheads.server_s_per_parameter * self.terms.bytes_of(1.0)
        return 0.0 if isinstance(task, AddContributions | AnnounceRound) else RECORD_S

    def _gather(self) -> None:
        self._gathers = False
        self.commits.gather()
        self._work()

    def _perform(self, task: Task) -> None:
        match task:
            case AddContributions():
                into = self._sums.setdefault((task.fragment, task.version), [])
                into += [(one.key, self._bodies[one.key]) for one in task.accepted]
                self._free(task.freed)
            case TakeStep():
                self._step(task)
            case AnnounceRound():
                self._announce(task)
            case _:
                pass  # there is no disk
        self.commits.done()
        self._is_busy = False
        self._flush()
        written = self.commits.written
        ready = [one for one in self._waiting if one[0] <= written]
        if ready:
            self._waiting = [one for one in self._waiting if one[0] > written]
            for _, reply, answer in ready:
                reply(answer, 0)

    def _free(self, accepted: tuple[Accumulate, ...]) -> None:
        for one in accepted:
            self._bodies.pop(one.key, None)
            self.coordinator.uploads.drop(one.key)

    def _step(self, task: TakeStep) -> None:
        closing = task.closing
        found = [
            *self._sums.pop((closing.fragment, closing.version), []),
            *((one.key, self._bodies[one.key]) for one in task.accepted),
        ]
        left_out = closing.left_out
        self._stepped = [one for one in found if one[0] not in left_out], [one for one in found if one[0] in left_out]

    def _announce(self, task: AnnounceRound) -> None:
        closing = task.step.closing
        self._free(task.step.held)
        self.ledger.version_made(closing.fragment, closing.version, closing.participants, *self._stepped)
        made = _agreement(closing.fragment, closing.version)
        self.coordinator.published(replace(made, participants=closing.participants), self._agenda.now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Look again when there is something to decide."""
        now = self._agenda.now
        moment = self.coordinator.next_wake(now)
        self._armed += 1
        if moment is not None:
            number = self._armed
            self._agenda.at(moment + 1e-6, lambda: self._tick(number))

    def _tick(self, number: int) -> None:
        if number == self._armed:
            self.coordinator.tick(self._agenda.now)
            self._flush()
            self._arm()

    # --- for whoever leads it as a cluster ----------------------------------------------------------------------------

    def hold(self, limit_s: float) -> None:
        """Members are told of the newest version when something has come from above, or then."""
        self.coordinator.withheld_until = self._withheld = self._agenda.now + limit_s
        self._agenda.at(self._withheld, self._flush)

    def release(self) -> None:
        self.coordinator.withheld_until = 0.0
        self._flush()

    def _watch_withheld(self) -> None:
        """Those that were held back ask again as soon as they may be told."""
        if self._withheld and self._agenda.now >= self.coordinator.withheld_until:
            self._withheld = 0.0
            for fragment in range(len(self.coordinator.fragments)):
                self._agenda.after(0.0, lambda f=fragment: self._wake(f))  # type: ignore[misc]

    def move(self, serial: int, fragments: tuple[int, ...]) -> None:
        """A version from above, in each of these."""
        for fragment in fragments:
            self.coordinator.move_from_above(fragment, serial)
        self._flush()


def _hash(fragment: int, version: int, kind: str) -> str:
    return part_hash(f"{fragment} {version} {kind}".encode())


def _anchor_hash(fragment: int, version: int) -> str:
    return f"{fragment:08x}{version:024x}"


def _agreement(fragment: int, version: int) -> Agreement:
    return Agreement(fragment=fragment, version=version, anchor_hash=_anchor_hash(fragment, version))
