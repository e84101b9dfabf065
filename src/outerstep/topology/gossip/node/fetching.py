"""Contributions are fetched by digest: from who made them first, then from any other peer that has them.

One thread looks what is wanted, a few fetch, each one contribution at a time. What has arrived of one stays: the next
holder is asked for the rest. A part that has not the digest it should have is thrown away and asked for elsewhere; who
sent it is not asked for this contribution again, but nothing is held against it: a link may have done it.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ....coordination.backoff import Backoff
from ....digest import part_digest
from ....errors import NotFound, OuterstepError
from ....statements import Offered
from ....wire.http_transport import HttpTransport
from ....wire.peers import AskParts, GetHeld, Parts, about_contribution
from .decided import DecidedRounds
from .door import Contacts
from .keeping import Keeper
from .payloads import Arrival, Held, Holdings
from .settings import Callbacks
from .shared import Shared

log = logging.getLogger(__name__)

FETCHING_THREADS = 8
BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
LOOK_EVERY_S = 1.0
SWEEPS_UNTIL_LOST = 3  # in which every peer that answers says that it has it not


@dataclass
class _Job:
    """One contribution that is wanted."""

    says: Offered
    author: str
    not_before: float = 0.0
    tries: int = 0
    absent: int = 0  # sweeps in which nobody had it
    liars: set[str] = field(default_factory=set)  # keys of those whose bytes were not what they should be
    under_way: bool = False


class Fetcher:
    def __init__(
        self,
        shared: Shared,
        keeper: Keeper,
        contacts: Contacts,
        holdings: Holdings,
        rounds: DecidedRounds,
        callbacks: Callbacks,
    ) -> None:
        self._shared, self._keeper, self._contacts = shared, keeper, contacts
        self._holdings, self._rounds, self._callbacks = holdings, rounds, callbacks
        self._checking = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._draw = random.Random()
        self.counts: Counter[str] = Counter()  # "fetched", "fetched_bytes", "wrong", "absent", "failed"

    def start(self) -> None:
        self._shared.start("peer-wanting", self._look_always)
        for i in range(FETCHING_THREADS):
            self._shared.start(f"peer-fetching-{i}", self._fetch_always)

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
            for _ in range(FETCHING_THREADS):
                self._ready.put(None)

    def _look(self) -> None:
        """With the lock held: begin with what is wanted, forget what is not any more."""
        peer, now = self._shared.peer, self._shared.clock()
        missing = peer.missing()
        for digest in missing:
            held = self._holdings.get(digest)  # it may have been of no use for a while, and forgotten there
            if held is not None and digest not in self._jobs:
                peer.hold(digest, now, good=held.is_good)
                self._keeper.note()
        wanted = {**missing, **self._rounds.wanted()}
        wanted = {digest: want for digest, want in wanted.items() if self._holdings.get(digest) is None}
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
            held = self._fetch(job)
            if held is not None:
                held.is_good = self._is_good(job.says, held)
            with self._shared.lock:
                job.under_way = False
                if held is not None:
                    self._shared.peer.hold(job.says.digest, self._shared.clock(), good=held.is_good)
                    self._jobs.pop(job.says.digest, None)
                else:
                    self._put_off(job)
                self._keeper.note()

    def _put_off(self, job: _Job) -> None:
        job.not_before = self._shared.clock() + BACKOFF.pause_s(job.tries, self._draw)
        job.tries += 1
        if job.absent >= SWEEPS_UNTIL_LOST:
            self._rounds.lose(job.says.digest)

    def _is_good(self, says: Offered, held: Held) -> bool:
        with self._checking:
            why = self._callbacks.check(says.fragment, held.data)
        if why:
            log.warning("a contribution to fragment %d cannot be used: %s", says.fragment, why)
        return not why

    def _fetch(self, job: _Job) -> Held | None:
        """From one holder after the other."""
        answers = []
        for key in self._holders(job):
            transport = self._contacts.transport(key)
            if transport is None:
                continue
            answers.append(self._fetch_from(transport, key, job))
            if answers[-1] == "here":
                self.counts["fetched"] += 1
                self.counts["fetched_bytes"] += job.says.size_bytes
                return self._holdings.arrived(job.says.digest)
            if self._shared.is_stopping:
                return None
        nobody = bool(answers) and all(answer == "absent" for answer in answers)
        job.absent = job.absent + 1 if nobody else 0
        self.counts["absent" if nobody else "failed"] += 1
        return None

    def _holders(self, job: _Job) -> list[str]:
        """Keys of those that may have it: its author, then the other members in any order, those that are silent last,
        and last of all who has sent something else before."""
        with self._shared.lock:
            peer, now = self._shared.peer, self._shared.clock()
            silent = {m.key for m in peer.state.members if peer.is_silent(m.key, now)}
            keys = [m.key for m in peer.state.members if m.key not in (peer.member.key, job.author)]
            own = peer.member.key
        self._draw.shuffle(keys)
        first = [job.author] if job.author != own else []
        return sorted(first + keys, key=lambda key: (key in job.liars, key in silent))

    def _fetch_from(self, transport: HttpTransport, key: str, job: _Job) -> str:
        """ "here", "absent" (it says that it has it not), "wrong", or "failed"."""
        try:
            arrival = self._holdings.arrival(job.says.digest) or self._expect(transport, job)
            if arrival is None or not self._fetch_parts(transport, arrival, job):
                self.counts["wrong"] += 1
                job.liars.add(key)
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
        parts = transport.ask(AskParts(sender=peer.member.peer_id, run_id=peer.run_id, digest=says.digest))
        if not isinstance(parts, Parts) or parts.size_bytes != says.size_bytes:
            return None
        if parts.digest(about_contribution(peer.run_id, says.fragment)) != says.digest:
            return None
        return self._holdings.expect(says.digest, parts)

    def _fetch_parts(self, transport: HttpTransport, arrival: Arrival, job: _Job) -> bool:
        """Those that are missing. False: one was not what it should be."""

        def progressed() -> None:
            with self._shared.lock:
                self._shared.peer.progressed(job.says.digest, self._shared.clock())

        return fetch_parts(transport, self._shared, arrival, job.says.digest, progressed)


def fetch_parts(
    transport: HttpTransport, shared: Shared, arrival: Arrival, digest: str, progressed: Callable[[], None]
) -> bool:
    """Those that are missing, in order. False: one was not what it should be."""
    peer = shared.peer
    while arrival.missing:
        part = arrival.missing[0]
        place = arrival.view(part)
        transport.ask(GetHeld(sender=peer.member.peer_id, run_id=peer.run_id, digest=digest, part=part), into=place)
        if part_digest(place).hex() != arrival.parts.digests[part]:
            return False
        del arrival.missing[0]
        progressed()
    return True


__all__ = ["Fetcher", "fetch_parts"]
