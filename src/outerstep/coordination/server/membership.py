"""Who is here.

Three sets that are easily confused, and kept apart:

- *configured*: how many workers the operator announced (`num_workers`): only the start of the run waits for them;
- *live*: joined, and heard from within `heartbeat_timeout_s`;
- *expected*: those an open round waits for: who was live when it opened, less whoever died or left since (rounds.py).

A worker id outlives its processes. Each start of the process is an *instance*, and each new instance gets the next
*incarnation* number; a message from an older incarnation is fenced. The ledger of accepted sequences belongs to the id,
so it survives restarts, deaths and leaves.

After a restart of the server, who was live is *expected back*: open rounds wait for it for the usual time. That is no
proof that it lives. So a start on another machine under its id is neither refused (the old machine may have died with
the server) nor taken (the old one may be about to speak): it is asked to come again until one or the other is known.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median_low

from ...errors import Busy, Fenced, IdInUse, Kicked, MissingParts, Superseded, UnknownWorker
from ...types import FragmentState, FromMember, Heartbeat, Join, OfContribution, Offer
from .offences import Conduct

MOST_SPEED_RATIO = 64.0

MAX_KNOWN_WORKERS = 16_384
"""Ids remembered, live and gone. The longest-gone is forgotten first; a live one never."""

RETURN_S = 30.0
"""After a restart, so long an id is kept for its old holder where nobody is ever declared dead."""


@dataclass(frozen=True)
class Accepted:
    """The last contribution accepted from a worker for a fragment."""

    sequence: int
    payload_hash: str
    version: int


@dataclass
class Member:
    """One worker id: its current start, and what it has had accepted."""

    worker_id: str
    instance: str
    hostname: str
    incarnation: int
    joined_at: float
    last_seen: float
    live: bool = True
    expected_back: bool = False  # live before the server was started again, and not heard from since
    step: int = 0
    steps_per_second: float = 0.0
    loss: float | None = None
    staleness: int = 0  # of its last contribution
    contributions: int = 0
    bytes_received: int = 0
    tokens: int = 0
    delta_norm: float | None = None  # ‖Δ‖ of its last contribution
    left_out: int = 0  # contributions that were there, and are not in what their rounds agreed on
    conduct: Conduct = field(default_factory=Conduct)
    kicked: str = ""  # why, until another instance joins
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    accepted: dict[int, Accepted] = field(default_factory=dict)  # per fragment, the last one
    closed: dict[int, Accepted] = field(default_factory=dict)  # and the last one whose round has closed

    def contributed(self, offer: Offer, staleness: int, norm: float | None) -> None:
        self.staleness = staleness
        self.delta_norm = norm
        self.contributions += 1
        self.bytes_received += offer.size_bytes
        self.tokens += offer.tokens if offer.fragment == 0 else 0  # each fragment sees the same tokens

    def entry_of(self, message: OfContribution) -> Accepted | None:
        """The ledger's entry if this very key was accepted. An older key than the last one is superseded."""
        entry = self.accepted.get(message.fragment)
        if entry is None or message.sequence > entry.sequence:
            self._check_order(message)
            return None
        if message.sequence < entry.sequence:
            raise Superseded(
                f"contribution {message.key} is older than the last accepted one (#{entry.sequence})",
                hint="continue from the sequence that the join answer names",
            )
        return entry

    def _check_order(self, message: OfContribution) -> None:
        """Nothing is taken before what its worker sent earlier and was told to count."""
        if isinstance(message, Offer) and message.follows > self.last_sequence(message.fragment):
            raise MissingParts(
                f"contribution {message.key} follows #{message.follows}, which is not here: the server was restarted",
                hint="send that one first",
            )

    def last_sequence(self, fragment: int) -> int:
        entry = self.accepted.get(fragment)
        return entry.sequence if entry else 0

    def state_of(self, fragment: int, version: int) -> FragmentState:
        entry = self.accepted.get(fragment)
        counted_in = entry.version if entry else 0
        return FragmentState(version=version, last_sequence=self.last_sequence(fragment), counted_in=counted_in)


class Membership:
    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._members: OrderedDict[str, Member] = OrderedDict()
        self.total_deaths = 0
        self.first_incarnation = 1  # the lowest that is given; higher where others may have been given and forgotten

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def live_ids(self) -> frozenset[str]:
        return frozenset(m.worker_id for m in self._members.values() if m.live)

    def awaited_ids(self, now: float) -> frozenset[str]:
        """The live ones from whom something is taken."""
        return frozenset(m.worker_id for m in self._members.values() if m.live and not m.conduct.is_quarantined(now))

    @property
    def fastest(self) -> float:
        """Steps per second of the fastest live worker; 0 = nobody has said yet. A speed that is no machine's beside the
        others' is left out: one wrong word must not slow everybody else down."""
        speeds = [m.steps_per_second for m in self._members.values() if m.live and m.steps_per_second > 0.0]
        if not speeds:
            return 0.0
        return max(speed for speed in speeds if speed <= MOST_SPEED_RATIO * median_low(speeds))

    def join(self, message: Join, now: float) -> tuple[Member, bool]:
        """The member, and whether it came (back) to life with this message. A repeated join changes nothing."""
        member = self._members.get(message.worker_id)
        if member is None:
            self._make_room()
            incarnation = self.first_incarnation
            member = Member(message.worker_id, message.instance, message.hostname, incarnation, now, now)
            self._members[message.worker_id] = member
            return member, True
        if message.instance == member.instance:
            self._check_kicked(member)
            returned = not member.live
            member.live, member.last_seen, member.expected_back = True, now, False
            return member, returned
        if message.instance in member.retired:
            raise Fenced(
                f"worker {member.worker_id!r} was started again elsewhere after this process",
                hint="stop this process; the newer start carries on",
            )
        if member.live and member.hostname != message.hostname:
            self._check_in_use(member, now)
        # Same id, new process, and the old one is gone or ran on the same machine: a restart. The old one is fenced.
        member.retired.append(member.instance)
        member.kicked = ""
        member.conduct.started_anew(now)
        member.instance, member.hostname = message.instance, message.hostname
        member.incarnation = max(member.incarnation + 1, self.first_incarnation)
        member.live, member.joined_at, member.last_seen, member.expected_back = True, now, now, False
        return member, True

    def _check_in_use(self, member: Member, now: float) -> None:
        """Is the id taken, by a worker on another machine?"""
        silent_s, host = now - member.last_seen, member.hostname or "another host"
        if not member.expected_back:
            raise IdInUse(
                f"worker id {member.worker_id!r} is in use by a live worker on {host!r}, "
                f"heard from {silent_s:.0f} s ago",
                hint="choose another --worker-id, or stop that worker first",
            )
        if silent_s <= (self._timeout_s or RETURN_S):
            raise Busy(
                f"worker id {member.worker_id!r} was in use on {host!r} before the server was started again; "
                "whether that worker comes back is not known yet",
                retry_after_s=1.0,
            )

    def heard(self, message: FromMember, now: float) -> Member:
        """Check that the sender is the current, live start of its worker, and note the sign of life."""
        member = self._members.get(message.worker_id)
        if member is None or message.incarnation > member.incarnation:
            raise UnknownWorker(f"worker {message.worker_id!r} has not joined this run", hint="join first")
        if message.incarnation < member.incarnation:
            raise Fenced(
                f"worker {member.worker_id!r} was started again (incarnation {member.incarnation}); "
                f"this message is from incarnation {message.incarnation}",
                hint="stop this process; the newer start carries on",
            )
        self._check_kicked(member)
        if not member.live:
            raise UnknownWorker(
                f"worker {member.worker_id!r} left, or was declared dead after {self._timeout_s:g} s of silence",
                hint="join again; local progress is kept",
            )
        member.last_seen, member.expected_back = now, False
        if isinstance(message, Heartbeat):
            member.step, member.steps_per_second, member.loss = message.step, message.steps_per_second, message.loss
        return member

    @staticmethod
    def _check_kicked(member: Member) -> None:
        if member.kicked:
            raise Kicked(
                f"worker {member.worker_id!r} was removed from the run: {member.kicked}",
                hint="if it is meant to take part, start it again",
            )

    def find(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    def knows(self, message: Join) -> bool:
        """Is it a worker process that has been here before?"""
        member = self._members.get(message.worker_id)
        return member is not None and member.instance == message.instance

    def restore(self, member: Member) -> None:
        """Known from before the server was started again."""
        member.expected_back = member.live
        self._members[member.worker_id] = member

    def round_closed(self, fragment: int, contributors: Iterable[str]) -> None:
        """What they had accepted last went into it: no other round of the fragment was open."""
        for worker_id in contributors:
            if worker_id in self._members:
                member = self._members[worker_id]
                member.closed[fragment] = member.accepted[fragment]

    def gone(self, member: Member) -> None:
        member.live = False
        self._members.move_to_end(member.worker_id)

    def silent(self, now: float) -> list[Member]:
        """The live members that have not been heard from for too long."""
        if self._timeout_s <= 0:
            return []
        return [m for m in self._members.values() if m.live and now - m.last_seen > self._timeout_s]

    def next_death(self) -> float | None:
        """When, at the earliest, somebody would have been silent for too long."""
        if self._timeout_s <= 0:
            return None
        return min((m.last_seen + self._timeout_s for m in self._members.values() if m.live), default=None)

    def _make_room(self) -> None:
        if len(self._members) < MAX_KNOWN_WORKERS:
            return
        oldest_gone = next((m.worker_id for m in self._members.values() if not m.live), None)
        if oldest_gone is None:
            raise Busy(f"{MAX_KNOWN_WORKERS} workers are live, which is the limit", retry_after_s=60.0)
        del self._members[oldest_gone]
