"""The contributions of a run as bytes: which are held, which rounds they belong to, and how others' are fetched.

*Held*, by digest, in a pool: in memory up to a limit, beyond it in a spool file (outerstep/pool.py). How many there are
is bounded by what the state machine asks for: of each member and fragment the contributions to the open round, which
are at most three, and those of the last two decided ones.

*Decided*: of each fragment the last two rounds, which the topology adopts and others may ask for.

*Fetched*, by digest: from their author first, then from any other peer that has them. One thread looks what is wanted,
a few fetch, each one contribution at a time; at one holder two at most, and none for longer than its speed so far
allows (speeds.py), so that a peer that drips its answers keeps neither all threads nor any contribution. The parts of
one that have arrived stay: the next holder is asked for the rest. A part with a wrong digest is thrown away and asked
for elsewhere; the peer that sent it is not asked for this contribution again, but nothing is held against it: a link
may have done it.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ....coordination.backoff import Backoff
from ....coordination.gossip.heard import signed_in
from ....digest import part_count, part_digest, part_range
from ....errors import NotFound, OuterstepError
from ....events import ContributionRefused
from ....pool import Pool, Room
from ....statements import ChainState, Change, Decision, Member, Offered, Round
from ....wire.answers import WATCH
from ....wire.http_transport import HttpTransport
from ....wire.peers import AskParts, GetHeld, PartList, about_contribution
from .calls import ask, get_part
from .hearing import blame
from .listener import Contacts
from .records import Recorder
from .settings import Callbacks
from .shared import Shared
from .speeds import MOST_AT_ONE, Speeds

log = logging.getLogger(__name__)

# --- held -------------------------------------------------------------------------------------------------------------


HASHING_THREADS = 4
SPOOL_BYTES = 1 << 50  # as large as the disk


@dataclass(eq=False)
class HeldPayload:
    """A whole payload. `is_good`: the check has found nothing wrong with it."""

    parts: PartList
    data: memoryview
    is_good: bool = True

    def part(self, index: int) -> tuple[str, memoryview]:
        begin, end = part_range(index, self.parts.size_bytes, self.parts.part_size_bytes)
        return self.parts.digests[index], self.data[begin:end]


@dataclass(eq=False)
class Arrival:
    """A payload on its way in: which parts are still missing."""

    room: Room
    parts: PartList
    missing: list[int] = field(default_factory=list)

    def view(self, index: int) -> memoryview:
        begin, end = part_range(index, self.parts.size_bytes, self.parts.part_size_bytes)
        return self.room.view[begin:end]

    @property
    def missing_bytes(self) -> int:
        return sum(len(self.view(index)) for index in self.missing)


class Payloads:
    def __init__(self, memory_bytes: int) -> None:
        self._pool = Pool(memory_bytes=memory_bytes, spool_bytes=SPOOL_BYTES)
        self._lock = threading.Lock()
        self._held: dict[str, tuple[HeldPayload, Room]] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._pinned: dict[str, int] = {}

    @property
    def memory_bytes(self) -> int:
        return self._pool.memory_bytes

    @property
    def spooled_bytes(self) -> int:
        return self._pool.spooled_bytes

    def get(self, digest: str) -> HeldPayload | None:
        with self._lock:
            found = self._held.get(digest)
        return found[0] if found is not None else None

    def put(self, about: str, data: memoryview, part_size_bytes: int) -> str:
        """Keep a copy of our own contribution until `unpin`. Returns its digest."""
        room = self._pool.take(len(data))
        room.view[:] = data
        parts = cut(room.view, part_size_bytes)
        digest = parts.digest(about)
        with self._lock:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1
            if digest in self._held:
                self._pool.give_back(room)
            else:
                self._held[digest] = (HeldPayload(parts, room.view), room)
        return digest

    def unpin(self, digest: str) -> None:
        with self._lock:
            self._pinned[digest] -= 1
            if not self._pinned[digest]:
                del self._pinned[digest]

    # --- those of others --------------------------------------------------------------------------------------------

    def arrival(self, digest: str) -> Arrival | None:
        """The parts that have arrived so far; only the rest is still needed."""
        with self._lock:
            return self._arrivals.get(digest)

    def expect(self, digest: str, parts: PartList) -> Arrival:
        """Raises OSError if there is no room in memory or on the disk."""
        room = self._pool.take(parts.size_bytes)
        arrival = Arrival(room, parts, list(range(len(parts.digests))))
        with self._lock:
            return self._arrivals.setdefault(digest, arrival)

    def arrived(self, digest: str) -> HeldPayload | None:
        """The payload, when all parts are in; None: it was dropped meanwhile."""
        with self._lock:
            arrival = self._arrivals.pop(digest, None)
            if arrival is None:
                return None
            held = HeldPayload(arrival.parts, arrival.room.view)
            self._held[digest] = (held, arrival.room)
            return held

    def keep_only(self, needed: Iterable[str]) -> None:
        """Drop all others. Memory of which somebody holds a view is not reused."""
        keep = set(needed)
        with self._lock:
            keep |= self._pinned.keys()
            rooms = [self._held.pop(d)[1] for d in list(self._held) if d not in keep]
            rooms += [self._arrivals.pop(d).room for d in list(self._arrivals) if d not in keep]
        for room in rooms:
            self._pool.give_back(room)


def cut(data: memoryview, part_size_bytes: int) -> PartList:
    """The digests of its parts, by as many threads as there are parts, up to a few."""
    size = len(data)
    places = [part_range(i, size, part_size_bytes) for i in range(part_count(size, part_size_bytes))]
    if len(places) == 1:
        digests = [part_digest(data)]
    else:
        with ThreadPoolExecutor(min(HASHING_THREADS, len(places)), thread_name_prefix="outerstep-hash") as hashing:
            digests = list(hashing.map(lambda place: part_digest(data[place[0] : place[1]]), places))
    return PartList(size_bytes=size, part_size_bytes=part_size_bytes, digests=tuple(d.hex() for d in digests))


# --- decided ----------------------------------------------------------------------------------------------------------


KEPT_ROUNDS = 2


@dataclass(eq=False)
class Taken:
    """A decided round. `offers`: (peer id, key, offer), in the order of the ids. `is_lost`: its bytes are gone."""

    block: Round
    offers: tuple[tuple[str, str, Offered], ...]
    is_released: bool = False
    is_lost: bool = False


class DecidedRounds:
    """The rounds decided lately. Guarded by the node's lock."""

    def __init__(self, state: ChainState) -> None:
        self.leap(state)

    def leap(self, state: ChainState) -> None:
        self._members: tuple[Member, ...] = state.members
        self.versions = list(state.versions)
        self._rounds: list[deque[Taken]] = [deque(maxlen=KEPT_ROUNDS) for _ in state.versions]

    def add(self, decision: Decision) -> None:
        block = decision.block
        if isinstance(block, Change):
            self._members = block.members
            return
        names = {member.key: member.peer_id for member in self._members}
        offers = [(names.get(s.author, s.author), s.author, says) for s, says in signed_in(block)]
        self._rounds[block.fragment].append(Taken(block, tuple(offers)))
        self.versions[block.fragment] = block.version

    def find(self, fragment: int, version: int) -> Taken | None:
        return next((taken for taken in self._rounds[fragment] if taken.block.version == version), None)

    def release(self, fragment: int, version: int) -> None:
        """All up to this one are adopted."""
        for taken in self._rounds[fragment]:
            taken.is_released = taken.is_released or taken.block.version <= version

    def is_lost(self, fragment: int, version: int) -> bool:
        """Was it decided, with bytes that can no longer be had?"""
        if version > self.versions[fragment]:
            return False
        taken = self.find(fragment, version)
        return taken is None or taken.is_lost

    def needed(self) -> set[str]:
        """Digests that this peer or another may ask for."""
        return {says.digest for rounds in self._rounds for taken in rounds for _, _, says in taken.offers}

    def wanted(self) -> dict[str, tuple[Offered, str]]:
        """Digest → offer and author, of rounds that are still to be adopted."""
        return {
            says.digest: (says, key)
            for rounds in self._rounds
            for taken in rounds
            if not taken.is_released and not taken.is_lost
            for _, key, says in taken.offers
        }

    def lose(self, digest: str) -> None:
        """Note that nobody has these bytes any more."""
        for rounds in self._rounds:
            for taken in rounds:
                if not taken.is_released and any(says.digest == digest for _, _, says in taken.offers):
                    taken.is_lost = True


# --- fetched ----------------------------------------------------------------------------------------------------------


FETCHING_THREADS = 8
BUSY_S = 0.1  # until a busy holder is tried again
BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
LOOK_EVERY_S = 1.0
SWEEPS_UNTIL_LOST = 3  # sweeps in which every peer that answers does not have it


@dataclass
class _Job:
    """One contribution that is wanted."""

    says: Offered
    author: str
    not_before: float = 0.0
    tries: int = 0
    absent: int = 0  # sweeps in which nobody had it
    wrong: set[str] = field(default_factory=set)  # keys of members whose bytes were not what they should be
    under_way: bool = False
    found_busy: bool = False  # the holder that it waits for


class Fetcher:
    def __init__(
        self,
        shared: Shared,
        recorder: Recorder,
        contacts: Contacts,
        payloads: Payloads,
        rounds: DecidedRounds,
        callbacks: Callbacks,
    ) -> None:
        self._shared, self._recorder, self._contacts = shared, recorder, contacts
        self._payloads, self._rounds, self._callbacks = payloads, rounds, callbacks
        self._checking = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._draw = random.Random()
        self.counts: Counter[str] = Counter()  # "fetched", "fetched_bytes", "wrong", "absent", "failed"

    def start(self) -> None:
        self._shared.start("peer-wanting", self._look_always)
        for i in range(self._thread_count):
            self._shared.start(f"peer-fetching-{i}", self._fetch_always)

    @property
    def _thread_count(self) -> int:
        """So many that some stay free whatever the attackers do."""
        return max(FETCHING_THREADS, MOST_AT_ONE * (self._shared.peer.rules.attackers + 2))

    # --- what is wanted ---------------------------------------------------------------------------------------------

    def _look_always(self) -> None:
        shared = self._shared
        try:
            while not shared.is_stopping:
                with shared.lock:
                    seen = shared.changes
                    self._look()
                    pause_s = self._pause_s()
                    shared.wait(lambda seen=seen: shared.changes != seen, pause_s)  # type: ignore[misc]
        finally:
            for _ in range(self._thread_count):
                self._ready.put(None)

    def _look(self) -> None:
        """With the lock held: start jobs for what is wanted, end those of what is not."""
        peer, now = self._shared.peer, self._shared.clock()
        missing = peer.missing()
        for digest in missing:
            held = self._payloads.get(digest)  # it may have been of no use for a while, and forgotten there
            if held is not None and digest not in self._jobs:
                peer.hold(digest, now, good=held.is_good)
                self._recorder.note()
        wanted = {**missing, **self._rounds.wanted()}
        wanted = {digest: want for digest, want in wanted.items() if self._payloads.get(digest) is None}
        for digest in [d for d, job in self._jobs.items() if d not in wanted and not job.under_way]:
            del self._jobs[digest]
        for digest, (says, author) in wanted.items():
            job = self._jobs.setdefault(digest, _Job(says, author))
            if not job.under_way and now >= job.not_before:
                job.under_way = True
                self._ready.put(job)

    def _pause_s(self) -> float:
        now = self._shared.clock()
        waits = [job.not_before - now for job in self._jobs.values() if not job.under_way]
        return max(0.01, min([LOOK_EVERY_S, *waits]))

    # --- fetching ---------------------------------------------------------------------------------------------------

    def _fetch_always(self) -> None:
        while (job := self._ready.get()) is not None:
            if self._shared.is_stopping:
                return
            held = self._fetch_safely(job)
            if held is not None:
                held.is_good = self._is_good(job, held)
            with self._shared.lock:
                job.under_way = False
                if held is not None:
                    self._shared.peer.hold(job.says.digest, self._shared.clock(), good=held.is_good)
                    self._jobs.pop(job.says.digest, None)
                else:
                    self._put_off(job)
                self._recorder.note()

    def _put_off(self, job: _Job) -> None:
        if job.found_busy:
            job.not_before = self._shared.clock() + BUSY_S
            return
        job.not_before = self._shared.clock() + BACKOFF.pause_s(job.tries, self._draw)
        job.tries += 1
        if job.absent >= SWEEPS_UNTIL_LOST:
            self._rounds.lose(job.says.digest)

    def _is_good(self, job: _Job, held: HeldPayload) -> bool:
        fragment = job.says.fragment
        with self._checking:
            why = self._check(fragment, held.data)
        if why:
            with self._shared.lock:
                name = self._shared.peer.name_of(job.author)
                blame(self._shared, job.author, f"offered what cannot be used in fragment {fragment}: {why}")
            self._shared.events(ContributionRefused(name, fragment, why))
        return not why

    def _check(self, fragment: int, data: memoryview) -> str:
        """Bytes that another chose, in code that reads them: if it stumbles, they cannot be used either. (A mistake in
        it shows when this peer checks its own.)"""
        try:
            return self._callbacks.check(fragment, data)
        except Exception as error:
            log.exception("a contribution to fragment %d could not be checked", fragment)
            return f"it cannot be checked: {type(error).__name__}: {error}"

    def _fetch_safely(self, job: _Job) -> HeldPayload | None:
        try:
            return self._fetch(job)
        except Exception:
            log.exception("a contribution of %s could not be fetched; it is tried again", job.author[:16])
            self.counts["failed"] += 1
            return None

    def _fetch(self, job: _Job) -> HeldPayload | None:
        """Fetch from one holder after another."""
        answers = []
        for key in self._holders(job):
            transport = self._contacts.transport(key)
            if transport is None:
                continue
            with self._contacts.speeds.place_at(key) as is_free:
                job.found_busy = not is_free
                if not is_free:
                    return None
                answers.append(self._fetch_in_time(transport, key, job))
            if answers[-1] == "here":
                self.counts["fetched"] += 1
                self.counts["fetched_bytes"] += job.says.size_bytes
                return self._payloads.arrived(job.says.digest)
            if self._shared.is_stopping:
                return None
        nobody = bool(answers) and all(answer == "absent" for answer in answers)
        job.absent = job.absent + 1 if nobody else 0
        self.counts["absent" if nobody else "failed"] += 1
        return None

    def _holders(self, job: _Job) -> list[str]:
        """Keys of those that may have it: its author, then the other members in any order, those that were slow after
        them, those that are silent last, and last of all a peer that has sent something else before."""
        with self._shared.lock:
            peer, now = self._shared.peer, self._shared.clock()
            silent = {m.key for m in peer.state.members if peer.is_silent(m.key, now)}
            keys = [m.key for m in peer.state.members if m.key not in (peer.member.key, job.author)]
            own = peer.member.key
        self._draw.shuffle(keys)
        first = [job.author] if job.author != own else []
        speeds = self._contacts.speeds
        return sorted(first + keys, key=lambda key: (key in job.wrong, key in silent, -speeds.expected(key)))

    def _fetch_in_time(self, transport: HttpTransport, key: str, job: _Job) -> str:
        arrival = self._payloads.arrival(job.says.digest)
        size_bytes = job.says.size_bytes if arrival is None else arrival.missing_bytes
        return in_time(self._contacts.speeds, key, size_bytes, lambda: self._fetch_from(transport, key, job))

    def _fetch_from(self, transport: HttpTransport, key: str, job: _Job) -> str:
        """ "here", "absent" (it says that it has it not), "wrong", or "failed"."""
        try:
            arrival = self._payloads.arrival(job.says.digest) or self._expect(transport, job)
            if arrival is None or not self._fetch_parts(transport, arrival, job):
                self.counts["wrong"] += 1
                job.wrong.add(key)
                return "wrong"
        except NotFound:
            return "absent"
        except OSError as error:  # no room for it, in memory or on the disk: there will be
            log.warning("there is no room for a contribution of %d bytes: %s", job.says.size_bytes, error)
            return "failed"
        except OuterstepError as error:
            log.debug("a contribution could not be fetched from %s: %s", transport.address, error)
            return "failed"
        return "here"

    def _expect(self, transport: HttpTransport, job: _Job) -> Arrival | None:
        """Ask how it is cut, and make room for it. None: that is not how."""
        peer, says = self._shared.peer, job.says
        parts = ask(transport, AskParts(sender=peer.member.peer_id, run_id=peer.run_id, digest=says.digest), PartList)
        if parts.size_bytes != says.size_bytes:
            return None
        if parts.digest(about_contribution(peer.run_id, says.fragment)) != says.digest:
            return None
        return self._payloads.expect(says.digest, parts)

    def _fetch_parts(self, transport: HttpTransport, arrival: Arrival, job: _Job) -> bool:
        """Fetch the missing parts. False: one had the wrong digest."""

        def progressed() -> None:
            with self._shared.lock:
                self._shared.peer.progressed(job.says.digest, self._shared.clock())

        return fetch_parts(transport, self._shared, arrival, job.says.digest, progressed)


def in_time(speeds: Speeds, key: str, size_bytes: int, fetch: Callable[[], str]) -> str:
    """What `fetch` says; it ends when this peer has had its time. Then it was "slow"."""
    began_at, limit_s = time.monotonic(), speeds.limit_s(key, size_bytes)
    with WATCH.within(limit_s):
        said = fetch()
    took_s = time.monotonic() - began_at
    if said == "here":
        speeds.note(key, size_bytes, took_s)
    elif took_s >= limit_s:
        speeds.was_too_slow(key)
        return "slow"
    return said


def fetch_parts(
    transport: HttpTransport, shared: Shared, arrival: Arrival, digest: str, progressed: Callable[[], None]
) -> bool:
    """Fetch the missing parts, in order. False: one had the wrong digest."""
    peer = shared.peer
    while arrival.missing:
        part = arrival.missing[0]
        place = arrival.view(part)
        get_part(transport, GetHeld(sender=peer.member.peer_id, run_id=peer.run_id, digest=digest, part=part), place)
        if part_digest(place).hex() != arrival.parts.digests[part]:
            return False
        del arrival.missing[0]
        progressed()
    return True
