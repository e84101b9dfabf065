"""The workers: which are here, what was accepted of each, what is held against it, and what it is still to be told.

Three sets that are easily confused, and kept apart:

- *configured*: how many workers the operator announced (`num_workers`): only the start of the run waits for them;
- *live*: joined, and heard from within `heartbeat_timeout_s`;
- *expected*: those that an open round waits for: live when it opened, less those that died or left since (rounds.py).

A worker id outlives its processes. Each start of the process is an *instance*, and each new instance gets the next
*incarnation* number; a message from an older incarnation is fenced. The ledger of accepted sequences belongs to the id,
so it survives restarts, deaths and leaves.

An id belongs to the *keys* of the workers that joined under it, from the first join with a key on
(docs/adr/0019-an-id-belongs-to-a-key.md). A join under such an id must bring one of its keys, or be vouched for: by the
worker's own token, or by the session of its last start. What it brings is enrolled with the others. Incarnations are
public; so each start has a *session*, a secret that its other requests carry, and that nobody else is told.

After a restart of the server, a worker that was live is *expected back*: open rounds wait for it for the usual time.
That is no proof that it lives. So a start on another machine under its id is neither refused (the old machine may have
died with the server) nor taken (the old one may be about to speak): it is told to retry until one of them is known.
"""

from __future__ import annotations

import hmac
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal

from msgspec import UNSET

from ...errors import (
    Absurd,
    BadFrame,
    BadRequest,
    BadTensors,
    Busy,
    Closing,
    ConfigError,
    Conflict,
    Fenced,
    HashMismatch,
    IdInUse,
    Kicked,
    MissingParts,
    NoSession,
    NotFinite,
    NotOwner,
    OtherRun,
    Quarantined,
    Refused,
    ServerError,
    Superseded,
    UnknownWorker,
    UnsupportedMedia,
)
from ...tiling import ModelTiling
from ...types import Command, FromMember, Heartbeat, InfoValue, Join, JoinedFragment, MemberFacts, OfContribution, Offer
from ..backoff import Backoff
from ..layers.lifecycle import Lifecycle
from .claims import Claimant
from .remembered import LEAP, Acceptance, WorkerRecord

MOST_SPEED_RATIO = 10_000.0
"""Of two speeds in one run. Machines lie thousands of times apart: a laptop, and a node full of GPUs. Beyond this a
reported speed is a slip, or a lie."""

SPEED_PRECISION = 1e-9
"""Relative. v_w/v_max·H_base is rounded twice, so a product meant to be whole can fall short by a few 1e-16 and lose a
step to the floor (0.29/1·100 is 28.999999999999996). No speed is measured to a billionth: what lies that close below a
whole number is taken for it."""

MOST_KEYS = 64
"""Of one id. A worker that has its own token, and nowhere to keep a key, brings a new one at each start: the oldest is
forgotten."""

MAX_KNOWN_WORKERS = 16_384
"""Ids remembered, live and gone. The longest-gone is forgotten first, and before it those of which nothing is known but
that they were here; one that is live or in an open round never."""

RETURN_S = 30.0
"""After a restart, so long an id is kept for its old holder where nobody is ever declared dead."""

OFFENCES = 3  # within WINDOW_S are one too many
WINDOW_S = 4 * 3600.0
FIRST_S = 600.0
LONGEST_S = 24 * 3600.0
SPELLS = Backoff(FIRST_S, LONGEST_S)

OFFENCE_KINDS = (NotFinite, Absurd, BadTensors, BadFrame, UnsupportedMedia, Conflict)
"""What no healthy worker is refused for. (A part that changed on its way, a closed round or a full pool is no fault of
the worker's.)"""


BLAMELESS = (
    *(Busy, Closing, Fenced, HashMismatch, IdInUse, Kicked, MissingParts, OtherRun),
    *(Quarantined, ServerError, Superseded, UnknownWorker),
)
"""What a healthy worker may hear again and again about one contribution."""


@dataclass
class Conduct:
    """What is held against one worker id. Times are the coordinator's clock.

    A contribution that cannot be used is refused by itself and does no harm. But it costs, somebody waits for it, and
    it seldom is the last. So the third *offence* within WINDOW_S puts its worker id into quarantine: nothing is taken
    from it and no round waits for it; it may still fetch what is agreed, and train. It comes back by

    - time: FIRST_S, and twice as long each time again, up to LONGEST_S. Then it may contribute as before; but from the
      same process the next offence is enough for another spell;
    - a new process under this id that joins after that time: it begins with a clean slate;
    - an operator: `outerstep control pardon WORKER`, at once and with a clean slate.
    """

    offences: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=OFFENCES))  # when, and what
    total: int = 0
    spells: int = 0  # of quarantine, so far
    until: float = 0.0
    reason: str = ""

    def is_quarantined(self, now: float) -> bool:
        return now < self.until

    def offend(self, refusal: Refused, now: float) -> bool:
        """Take note of an offence. True: that was one too many."""
        self.total += 1
        self.offences.append((now, refusal.code))
        recent = sum(now - at <= WINDOW_S for at, _ in self.offences)
        if self.is_quarantined(now) or recent < (1 if self.spells else OFFENCES):
            return False
        self.until = now + SPELLS.longest_pause_s(self.spells)
        self.spells = min(self.spells + 1, 32)
        codes = ", ".join(code for _, code in self.offences)
        self.reason = f"refused for {codes}; the last time because {refusal.message}"[:256]
        return True

    def check(self, worker_id: str, now: float) -> None:
        if self.is_quarantined(now):
            raise Quarantined(
                f"worker {worker_id!r} is in quarantine for {self.until - now:.0f} s more: {self.reason}",
                hint="nothing of it is taken until then: let it reload the agreed weights and look for the cause; an "
                f"operator can end it with `outerstep control pardon {worker_id}`",
                retry_after_s=self.until - now,
            )

    def forgive(self, refusal: Refused) -> None:
        """The last offence of this kind was none."""
        found = next((offence for offence in reversed(self.offences) if offence[1] == refusal.code), None)
        if found is not None:
            self.offences.remove(found)
            self.total -= 1

    def clear(self) -> None:
        self.offences.clear()
        self.total = self.spells = 0
        self.until, self.reason = 0.0, ""

    def remembered(self, now: float) -> dict[str, Any]:
        """Clocks restart with the process: times are kept as ages. {} = nothing is held against it."""
        if not self.total:
            return {}
        return {
            "offences": [[now - at, code] for at, code in self.offences],
            "total": self.total,
            "spells": self.spells,
            "left_s": max(self.until - now, 0.0),
            "reason": self.reason,
        }

    @classmethod
    def resumed(cls, facts: Mapping[str, Any], now: float) -> Conduct:
        conduct = cls()
        if facts:
            conduct.offences.extend((now - float(age_s), str(code)) for age_s, code in facts["offences"])
            conduct.total, conduct.spells = int(facts["total"]), int(facts["spells"])
            conduct.until, conduct.reason = now + float(facts["left_s"]), str(facts["reason"])
        return conduct


@dataclass
class KnownWorker:
    """One worker id: its current start, its line in the ledger, its conduct, and the orders on their way to it."""

    worker_id: str
    instance: str
    hostname: str
    incarnation: int
    joined_at: float
    last_seen: float
    live: bool = True
    expected_back: bool = False  # live before the server was restarted, and not heard from since
    step: int = 0
    steps_per_second: float = 0.0
    loss: float | None = None
    staleness: int = 0  # of its last contribution
    contributions: int = 0
    bytes_received: int = 0
    tokens: int = 0
    delta_norm: float | None = None  # ‖Δ‖ of its last contribution
    zeros: set[int] = field(default_factory=set)  # fragments whose last contribution had steps in it, and was zero
    left_out: int = 0  # contributions that were there, and are not in what their rounds agreed on
    conduct: Conduct = field(default_factory=Conduct)
    kicked: str = ""  # why, until another instance joins
    protocol: int | None = None  # that it joined in; None: before the server was restarted
    token: str = ""  # the name of the one that it joined with
    plan_revision: int = 0  # of the plan that it was given then
    was_refused: bool = False  # a contribution, for what it was
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    accepted: dict[int, Acceptance] = field(default_factory=dict)  # per fragment, the last one
    closed: dict[int, Acceptance] = field(default_factory=dict)  # and the last one whose round has closed
    commands: dict[int, Command] = field(default_factory=dict)  # by id: sent with every heartbeat until acknowledged
    keys: tuple[str, ...] = ()  # that the id belongs to; () = nobody has brought one yet
    session: str = field(default="", repr=False)  # of this start; asked for if the id belongs to a key
    claims: dict[int, Claimant] = field(default_factory=dict)  # per fragment
    life: Lifecycle | None = None  # what it is doing (lives.py); None = not known: it was here before a restart
    unpublished: dict[int, int] = field(default_factory=dict)  # per fragment: the version that takes it in, until told
    info: dict[str, InfoValue] = field(default_factory=dict)  # what it tells of itself, while it is live
    tiling: ModelTiling | None = None  # what its processes hold, if its contributions are not cut by rows
    has_said_shape: bool = False  # with or without a tiling: it has joined since this server started
    facts: MemberFacts | None = None  # what it told last that may change
    facts_at: float = 0.0

    @property
    def is_guest(self) -> bool:
        """Is nothing known of it but that it was here?"""
        return not (self.accepted or self.kicked or self.conduct.total)

    @property
    def is_newcomer(self) -> bool:
        """Has nothing of it been accepted yet?"""
        return not self.accepted

    def claimant(self, fragment: int) -> Claimant:
        """Its claims at this fragment, which begin when it joins. Nothing is kept of one that has made none."""
        return self.claims.get(fragment) or Claimant(self.joined_at)

    # --- the ledger -----------------------------------------------------------------------------------------------

    def entry_of(self, message: OfContribution) -> Acceptance | None:
        """The ledger's entry if this very key was accepted. An older key than the last one is superseded, and nothing
        is taken before a contribution that its worker sent earlier and was told to count."""
        last_sequence = self.last_sequence(message.fragment)
        if message.sequence < last_sequence:
            raise Superseded(
                f"contribution {message.key} is older than the last accepted one (#{last_sequence})",
                hint="continue from the sequence that the join answer names",
            )
        if message.sequence == last_sequence:
            return self.accepted[message.fragment]
        if message.sequence > last_sequence + LEAP:
            raise BadRequest(
                f"contribution {message.key} must be at most {LEAP} above the last accepted one (#{last_sequence})",
                hint="continue from the sequence that the join answer names",
            )
        if isinstance(message, Offer) and message.follows > last_sequence:
            raise MissingParts(
                f"contribution {message.key} follows #{message.follows}, which is not here: the server was restarted",
                hint="send that one first",
            )
        return None

    def enter(self, offer: Offer, accepted: Acceptance, staleness: int, norm: float | None) -> None:
        """Write an accepted contribution into the ledger."""
        self.accepted[offer.fragment] = accepted
        self.staleness = staleness
        self.delta_norm = norm
        if offer.steps:
            (self.zeros.add if norm == 0.0 else self.zeros.discard)(offer.fragment)
        self.contributions += 1
        self.bytes_received += offer.size_bytes

    def last_sequence(self, fragment: int) -> int:
        entry = self.accepted.get(fragment)
        return entry.sequence if entry else 0

    def state_of(self, fragment: int, version: int) -> JoinedFragment:
        entry = self.accepted.get(fragment)
        counted_in = entry.version if entry else 0
        return JoinedFragment(version=version, last_sequence=self.last_sequence(fragment), counted_in=counted_in)

    def record(self) -> WorkerRecord:
        """What goes to disk, of closed rounds only. If it named what an open round has accepted, a worker that sends
        that again to the restarted server would be told "accepted", and its steps would be lost."""
        return WorkerRecord(
            instance=self.instance,
            hostname=self.hostname,
            incarnation=self.incarnation,
            retired=tuple(self.retired),
            accepted=dict(self.closed),
            keys=self.keys,
            token=self.token,
            info=self.info,
        )

    @classmethod
    def recorded(cls, worker_id: str, record: WorkerRecord, now: float) -> KnownWorker:
        """Known from the disk, and not live: it comes back by joining."""
        worker = cls(worker_id, record.instance, record.hostname, record.incarnation, now, now, live=False)
        worker.retired.extend(record.retired)
        worker.accepted, worker.closed = dict(record.accepted), dict(record.accepted)
        worker.keys, worker.token, worker.info = record.keys, record.token, record.info
        return worker


class Membership:
    """`session_secret`: what the sessions are made of. With the same one, they outlive the server's process."""

    def __init__(self, *, heartbeat_timeout_s: float, session_secret: bytes = b"") -> None:
        self._timeout_s, self._session_secret = heartbeat_timeout_s, session_secret
        self._workers: OrderedDict[str, KnownWorker] = OrderedDict()
        self._live_ids: frozenset[str] | None = None  # asked for with every message; None = somebody came or went
        self._clear_at = 0.0  # from then on nobody is in quarantine, unless somebody offends again
        self.total_deaths = 0
        self.first_incarnation = 1  # the lowest that is given; higher where others may have been given and forgotten
        self.last_command = 0  # saved with the run: a resumed server must not give an old number to a new order

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(self._workers.values())

    @property
    def return_s(self) -> float:
        """For so long after a restart of the server, whoever was here may come back."""
        return self._timeout_s or RETURN_S

    def find(self, worker_id: str) -> KnownWorker | None:
        return self._workers.get(worker_id)

    @property
    def live_ids(self) -> frozenset[str]:
        if self._live_ids is None:
            self._live_ids = frozenset(w.worker_id for w in self._workers.values() if w.live)
        return self._live_ids

    def quarantined(self, worker: KnownWorker) -> None:
        """This one is, for as long as its conduct says."""
        self._clear_at = max(self._clear_at, worker.conduct.until)

    def awaited_ids(self, now: float) -> frozenset[str]:
        """The live workers that are not in quarantine."""
        if now >= self._clear_at:
            return self.live_ids
        return frozenset(w.worker_id for w in self._workers.values() if w.live and not w.conduct.is_quarantined(now))

    @property
    def fastest(self) -> float:
        """Steps per second of the fastest live worker; 0 = nobody has said yet. A speed that is no machine's beside the
        others' is left out: one wrong word must not slow everybody else down."""
        speeds = [w.steps_per_second for w in self._workers.values() if w.live and w.steps_per_second > 0.0]
        if not speeds:
            return 0.0
        return max(speed for speed in speeds if speed <= MOST_SPEED_RATIO * median_low(speeds))

    # --- coming and going -----------------------------------------------------------------------------------------

    def join(self, message: Join, now: float, *, vouched: bool = False) -> tuple[KnownWorker, bool]:
        """The worker, and whether it came (back) to life with this message. A repeated join changes nothing. The caller
        has checked the signature of the key that it names; `vouched`: something else proves that the id is its own."""
        self.check_joins(message, now, vouched=vouched)
        worker = self._workers.get(message.worker_id)
        if worker is None:
            self._make_room()
            incarnation = self.first_incarnation
            worker = KnownWorker(message.worker_id, message.instance, message.hostname, incarnation, now, now)
            self._workers[message.worker_id] = worker
            arrived = True
        else:
            arrived = self._join_again(worker, message, now)
        if arrived:
            self._live_ids = None
        if message.proof is not UNSET and message.proof.key not in worker.keys:
            worker.keys = (*worker.keys, message.proof.key)[-MOST_KEYS:]
        if message.info is not UNSET:
            worker.info = message.info
        worker.session = self._session_of(worker)
        return worker, arrived

    def is_here(self, message: Join) -> bool:
        """Is it a live worker that repeats its join?"""
        worker = self._workers.get(message.worker_id)
        return worker is not None and worker.live and worker.instance == message.instance

    def is_newcomer(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is None or worker.is_newcomer

    def check_joins(self, message: Join, now: float, *, vouched: bool = False) -> None:
        """Refuse a worker that may not join under this id, or not now."""
        self.check_owner(message, vouched)
        worker = self._workers.get(message.worker_id)
        if worker is None:
            return
        if message.instance == worker.instance:
            if worker.kicked:
                raise _removed(worker)
        elif message.instance in worker.retired:
            raise Fenced(
                f"worker {worker.worker_id!r} was started again elsewhere after this process",
                hint="stop this process; the newer start carries on",
            )
        elif worker.live and worker.hostname != message.hostname:
            self._check_in_use(worker, now)

    def check_owner(self, message: Join, vouched: bool) -> None:
        """Refuse a key that is not the worker's."""
        worker = self._workers.get(message.worker_id)
        key = message.proof.key if message.proof is not UNSET else None
        if worker is not None and worker.keys and not vouched and key not in worker.keys:
            what = "another key than this worker's" if key is not None else "a key, and this worker shows none"
            raise NotOwner(
                f"worker id {worker.worker_id!r} belongs to {what}",
                hint="choose another --worker-id; or, if it is your worker and its key is lost, join with a token of "
                f"its own (`outerstep token new --worker {worker.worker_id}`), or ask the server's operator for "
                f"`outerstep control release {worker.worker_id}`",
            )

    def _join_again(self, worker: KnownWorker, message: Join, now: float) -> bool:
        if message.instance == worker.instance:
            returned = not worker.live
            worker.live, worker.last_seen, worker.expected_back = True, now, False
            return returned
        # Same id, new process, and the old one is gone or ran on the same machine: a restart. The old one is fenced.
        worker.retired.append(worker.instance)
        worker.kicked = ""
        if not worker.conduct.is_quarantined(now):
            worker.conduct.clear()
        worker.instance, worker.hostname = message.instance, message.hostname
        worker.incarnation = max(worker.incarnation + 1, self.first_incarnation)
        worker.live, worker.joined_at, worker.last_seen, worker.expected_back = True, now, now, False
        return True

    def _session_of(self, worker: KnownWorker) -> str:
        """The same for the same start, so that a join may be repeated, by each process of a group for itself."""
        facts = f"{worker.worker_id}\0{worker.instance}\0{worker.incarnation}"
        return hmac.digest(self._session_secret, facts.encode(), "sha256").hex()

    def holds_session(self, worker_id: str, session: str) -> bool:
        """Is this the secret of the worker's last start?"""
        worker = self._workers.get(worker_id)
        return worker is not None and hmac.compare_digest(session.encode(), worker.session.encode())

    def check_session(self, message: FromMember, session: str) -> None:
        """Refuse whoever speaks for the current start of a worker that has a key, and does not know its secret. (An
        older start is fenced, and an id without a key is anybody's.)"""
        worker = self._workers.get(message.worker_id)
        if worker is None or not worker.keys or message.incarnation != worker.incarnation:
            return
        if not hmac.compare_digest(session.encode(), worker.session.encode()):
            raise NoSession(
                f"worker {worker.worker_id!r} has a key, and this request does not carry the session of its join",
                hint="join (again)",
            )

    def _check_in_use(self, worker: KnownWorker, now: float) -> None:
        """Refuse an id that a worker on another machine holds."""
        silent_s, host = now - worker.last_seen, worker.hostname or "another host"
        if not worker.expected_back:
            raise IdInUse(
                f"worker id {worker.worker_id!r} is in use by a live worker on {host!r}, "
                f"heard from {silent_s:.0f} s ago",
                hint="choose another --worker-id, or stop that worker first",
            )
        if silent_s <= self.return_s:
            raise Busy(
                f"worker id {worker.worker_id!r} was in use on {host!r} before the server was restarted; "
                "whether that worker comes back is not known yet",
                retry_after_s=1.0,
            )

    def heard(self, message: FromMember, now: float) -> KnownWorker:
        """Check that the sender is the current, live start of its worker, and note what it says of itself."""
        worker = self._workers.get(message.worker_id)
        if worker is None or message.incarnation > worker.incarnation:
            raise UnknownWorker(f"worker {message.worker_id!r} has not joined this run", hint="join first")
        if message.incarnation < worker.incarnation:
            raise Fenced(
                f"worker {worker.worker_id!r} was started again (incarnation {worker.incarnation}); "
                f"this message is from incarnation {message.incarnation}",
                hint="stop this process; the newer start carries on",
            )
        if worker.kicked:
            raise _removed(worker)
        if not worker.live:
            raise UnknownWorker(
                f"worker {worker.worker_id!r} left, or was declared dead after {self._timeout_s:g} s of silence",
                hint="join again; local progress is kept",
            )
        worker.last_seen, worker.expected_back = now, False
        if isinstance(message, Heartbeat):
            worker.step, worker.steps_per_second, worker.loss = message.step, message.steps_per_second, message.loss
            if message.facts is not UNSET:
                worker.facts, worker.facts_at = message.facts, now
            for command_id in message.acknowledged:
                worker.commands.pop(command_id, None)
        return worker

    def knows(self, message: Join) -> bool:
        """Has this process of the worker been here before?"""
        worker = self._workers.get(message.worker_id)
        return worker is not None and worker.instance == message.instance

    def gone(self, worker: KnownWorker) -> None:
        """It left, died or was removed: the orders on their way to it are void."""
        worker.live, worker.info, worker.facts = False, {}, None
        self._live_ids = None
        worker.commands.clear()
        self._workers.move_to_end(worker.worker_id)

    def perhaps_dead(self, worker_ids: AbstractSet[str], now: float) -> str:
        """Which of these has not been heard from for longer than a live one would be silent, and what becomes of it;
        "" = none. A worker beats three times within the timeout."""
        there = [worker for worker in self if worker.live and worker.worker_id in worker_ids]
        worker = min(there, key=lambda each: each.last_seen, default=None)
        if worker is None or not self._timeout_s or now - worker.last_seen <= self._timeout_s / 2:
            return ""
        silent_s = now - worker.last_seen
        left_s = max(self._timeout_s - silent_s, 0.0)
        return (
            f"{worker.worker_id} has been silent for {silent_s:.0f} s; in {left_s:.0f} s it counts as dead and the "
            "round goes on without it (--heartbeat-timeout)"
        )

    def silent(self, now: float) -> list[KnownWorker]:
        """The live workers that have not been heard from for too long."""
        if self._timeout_s <= 0:
            return []
        return [w for w in self._workers.values() if w.live and now - w.last_seen > self._timeout_s]

    def next_death(self) -> float | None:
        """When, at the earliest, somebody would have been silent for too long."""
        if self._timeout_s <= 0:
            return None
        return min((w.last_seen + self._timeout_s for w in self._workers.values() if w.live), default=None)

    def _make_room(self) -> None:
        if len(self._workers) < MAX_KNOWN_WORKERS:
            return
        # What an open round has accepted would be counted again if its id were forgotten.
        gone = [worker for worker in self._workers.values() if not worker.live and worker.accepted == worker.closed]
        if not gone:
            raise Busy(
                f"{MAX_KNOWN_WORKERS} workers are live, or in a round that is open: that is the limit",
                retry_after_s=60.0,
            )
        forgotten = next((worker for worker in gone if worker.is_guest), gone[0])
        del self._workers[forgotten.worker_id]
        # A process of it that wakes up must not be taken for a newer one.
        self.first_incarnation = max(self.first_incarnation, forgotten.incarnation + 1)

    # --- orders ---------------------------------------------------------------------------------------------------

    def order(self, worker_id: str, kind: Literal["drain", "sync"], reason: str) -> None:
        """Send a worker this order with its heartbeats. The same order twice is one order."""
        worker = self._workers[worker_id]
        if all(command.kind != kind for command in worker.commands.values()):
            self.last_command += 1
            worker.commands[self.last_command] = Command(id=self.last_command, kind=kind, reason=reason)

    def order_leader(self, worker_id: str, leader: str, reason: str) -> None:
        """The last name that was given is the one that holds."""
        worker = self._workers[worker_id]
        self.last_command += 1
        others = {number: command for number, command in worker.commands.items() if command.kind != "lead"}
        command = Command(id=self.last_command, kind="lead", reason=reason, leader=leader)
        worker.commands = {**others, self.last_command: command}

    def withdraw(self, reason: str) -> list[str]:
        """Workers that have not heard of an order given for this reason need not obey it any more: these."""
        withdrawn = [w for w in self._workers.values() if any(c.reason == reason for c in w.commands.values())]
        for worker in withdrawn:
            worker.commands = {i: command for i, command in worker.commands.items() if command.reason != reason}
        return sorted(worker.worker_id for worker in withdrawn)

    # --- rounds and restarts --------------------------------------------------------------------------------------

    def round_closed(self, fragment: int, contributors: Iterable[str]) -> None:
        """What they had accepted last went into it: no other round of the fragment was open."""
        for worker_id in contributors:
            if worker_id in self._workers:
                worker = self._workers[worker_id]
                worker.closed[fragment] = worker.accepted[fragment]

    def restore(self, worker: KnownWorker) -> None:
        """Known from before the server was restarted."""
        worker.expected_back = worker.live
        worker.session = self._session_of(worker)
        self._workers[worker.worker_id] = worker
        self._live_ids = None
        self.quarantined(worker)


def _removed(worker: KnownWorker) -> Kicked:
    return Kicked(
        f"worker {worker.worker_id!r} was removed from the run: {worker.kicked}",
        hint="if it is meant to take part, start it again",
    )


def local_steps(speed: float, fastest: float, base: int, least: int = 1) -> int:
    """H_w = max(least, ⌊v_w / v_max · H_base⌋): all workers come back after about the same time.

    (Dynamic local updates, "DyLU": Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling".)
    `speed` and `fastest` are in steps per unit of time; a worker faster than `fastest` takes `base` steps, as it does.
    """
    for name, value in (("speed", speed), ("fastest", fastest)):
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} must be a finite number of steps per second > 0, got {value}")
    if not 1 <= least <= base:
        raise ConfigError(f"the local steps need 1 <= least <= base, got least={least}, base={base}")
    if speed >= fastest:
        return base
    return min(base, max(least, math.floor(speed / fastest * base * (1 + SPEED_PRECISION))))
