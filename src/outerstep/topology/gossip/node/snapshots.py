"""Snapshots: a fragment's anchor with its outer state, for a peer that joins, or has missed too much to follow.

Serving: the topology's snapshot is kept for as long as somebody fetches it. Fetching: a version counts if more than f
members name the same digest for it; then its parts may come from any of them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ....coordination.gossip.chain import witnesses
from ....errors import NotFound, OuterstepError, ServerUnreachable
from ....observe.quantities import counted
from ....pool import Room, private_memory
from ....wire.peers import SNAPSHOT_PART_BYTES, AskSnapshot, OfferedSnapshot, about_snapshot
from .calls import ask_member
from .contributions import Arrival, HeldPayload, cut, fetch_parts, in_time
from .hearing import blame
from .listener import Contacts
from .settings import Callbacks
from .shared import Shared
from .speeds import SLOWEST

log = logging.getLogger(__name__)

KEPT_S = 60.0  # after somebody last asked for a part of it
KEPT_VERSIONS = 2  # per fragment
ASK_TIMEOUT_S = 60.0  # the other end may have to copy and hash a whole model
PAUSE_S = 0.25

CheckSnapshot = Callable[[int, memoryview], str]
"""Given the version that was named and the bytes: why they cannot be used; "" if they can"""


@dataclass(eq=False)
class _Snapshot:
    version: int
    digest: str
    held: HeldPayload
    used_at: float


class SnapshotExchange:
    def __init__(self, shared: Shared, contacts: Contacts, callbacks: Callbacks) -> None:
        self._shared, self._contacts, self._callbacks = shared, contacts, callbacks
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._snapshots: dict[int, list[_Snapshot]] = {}
        self._draw = random.Random()
        self.bytes_received = 0

    # --- for others -------------------------------------------------------------------------------------------------

    def offer(self, fragment: int) -> OfferedSnapshot:
        """Offer the newest snapshot that the topology holds."""
        with self._making:
            newest = self._callbacks.snapshot(fragment)
            if newest is None:
                raise NotFound(f"this peer does not hold fragment {fragment} itself yet", hint="ask another peer")
            version, data = newest[0], memoryview(newest[1]).cast("B")
            with self._lock:
                kept = self._snapshots.setdefault(fragment, [])
                snapshot = next((s for s in kept if s.version == version), None)
            if snapshot is None:
                parts = cut(data, SNAPSHOT_PART_BYTES)
                digest = parts.digest(about_snapshot(self._shared.peer.run_id, fragment, version))
                snapshot = _Snapshot(version, digest, HeldPayload(parts, data), self._shared.clock())
                with self._lock:
                    kept.append(snapshot)
                    del kept[:-KEPT_VERSIONS]
        snapshot.used_at = self._shared.clock()
        return OfferedSnapshot(version=version, parts=snapshot.held.parts)

    def get(self, digest: str) -> HeldPayload | None:
        with self._lock:
            for kept in self._snapshots.values():
                for snapshot in kept:
                    if snapshot.digest == digest:
                        snapshot.used_at = self._shared.clock()
                        return snapshot.held
        return None

    def drop_unused(self) -> None:
        now = self._shared.clock()
        with self._lock:
            for kept in self._snapshots.values():
                kept[:] = [s for s in kept if now - s.used_at < KEPT_S]

    # --- for this peer ----------------------------------------------------------------------------------------------

    def fetch(self, fragment: int, patience_s: float, check: CheckSnapshot) -> tuple[int, memoryview]:
        give_up_at = time.monotonic() + patience_s
        why = "nobody was asked yet"
        doubted: set[str] = set()  # keys of members that named something wrong: they are asked last
        while time.monotonic() < give_up_at and not self._shared.is_stopping:
            version, digest, named_by, why = self._survey(fragment, doubted)
            if named_by:
                arrival = _expect(named_by[0][1])
                is_here = self._fetch_from_any([key for key, _ in named_by], arrival, digest)
                why = check(version, arrival.room.view) if is_here else "it broke off"
                if is_here and not why:
                    return version, arrival.room.view
                why = f"version {version} of {counted(len(named_by), 'peer')}: {why}"
                self._blame([key for key, _ in named_by] if is_here else [], fragment, why)
                doubted = doubted.union(key for key, _ in named_by)
            with self._shared.lock:
                self._shared.wait(lambda: False, PAUSE_S)
        self._shared.check()
        raise ServerUnreachable(f"fragment {fragment} could not be fetched from any peer in {patience_s:g} s: {why}")

    def fetch_from(self, key: str, fragment: int, least_version: int) -> tuple[int, memoryview] | None:
        """Fetch this member's snapshot, if its version is at least that; None: it has none, or not now."""
        with self._shared.lock:
            peer = self._shared.peer
            request = AskSnapshot(sender=peer.member.peer_id, run_id=peer.run_id, fragment=fragment)
        answer = self._ask(key, request)
        if isinstance(answer, str) or answer.version < least_version:
            return None
        arrival = _expect(answer)
        digest = answer.parts.digest(about_snapshot(request.run_id, fragment, answer.version))
        return (answer.version, arrival.room.view) if self._fetch_from(key, arrival, digest) else None

    def _blame(self, keys: list[str], fragment: int, why: str) -> None:
        with self._shared.lock:
            for key in keys:
                blame(self._shared, key, f"named a snapshot of fragment {fragment} that cannot be used: {why}")

    def _survey(self, fragment: int, doubted: set[str]) -> tuple[int, str, list[tuple[str, OfferedSnapshot]], str]:
        """The newest version that enough members name the same digest for: version, digest, and who did."""
        with self._shared.lock:
            peer = self._shared.peer
            now = self._shared.clock()
            silent = {m.key: peer.is_silent(m.key, now) for m in peer.state.members if m.key != peer.member.key}
            needed = witnesses(len(peer.state.members), peer.rules.attackers)
            request = AskSnapshot(sender=peer.member.peer_id, run_id=peer.run_id, fragment=fragment)
        keys = sorted(silent, key=lambda key: (key in doubted, silent[key], self._draw.random()))
        named: dict[tuple[int, str], list[tuple[str, OfferedSnapshot]]] = defaultdict(list)
        why = "no other member is known"
        for key in keys:
            answer = self._ask(key, request)
            if isinstance(answer, str):
                why = answer
                continue
            digest = answer.parts.digest(about_snapshot(request.run_id, fragment, answer.version))
            named[answer.version, digest].append((key, answer))
            if len(named[answer.version, digest]) >= needed:
                return answer.version, digest, named[answer.version, digest], ""
        heard = sum(map(len, named.values()))
        if len(named) == 1 and 0 < heard < needed:  # all that can be heard say the same
            (version, digest), by = next(iter(named.items()))
            return version, digest, by, ""
        if heard:
            why = f"{counted(heard, 'peer')} named {len(named)} different states, {needed} must name the same"
        return 0, "", [], why

    def _ask(self, key: str, request: AskSnapshot) -> OfferedSnapshot | str:
        """What it names, if there can be such bytes; else why not."""
        try:
            answer = ask_member(self._contacts, key, request, OfferedSnapshot, timeout_s=ASK_TIMEOUT_S)
        except OuterstepError as error:
            return str(error)
        parts, most = answer.parts, self._callbacks.most_snapshot_bytes(request.fragment)
        is_cut_right = parts.part_size_bytes == SNAPSHOT_PART_BYTES and parts.digest("")
        if is_cut_right and parts.size_bytes <= most:
            return answer
        why = f"{parts.size_bytes} bytes in {counted(len(parts.digests), 'part')}, where it has at most {most}"
        self._blame([key], request.fragment, why)
        return f"what was named cannot be: {why}"

    def _fetch_from_any(self, keys: list[str], arrival: Arrival, digest: str) -> bool:
        """The fastest first. If all that have it were too slow, they are asked again, and given more time: the link
        may be this peer's own."""
        speeds = self._contacts.speeds
        while not self._shared.is_stopping:
            answers = []
            for key in sorted(keys, key=speeds.expected, reverse=True):
                is_last = speeds.expected(key) <= SLOWEST
                answers.append(
                    in_time(
                        speeds,
                        key,
                        arrival.missing_bytes,
                        lambda key=key: "here" if self._fetch_from(key, arrival, digest) else "failed",  # type: ignore[misc]
                    )
                )
                if answers[-1] == "here":
                    return True
            if "slow" not in answers or is_last:
                return False
        return False

    def _fetch_from(self, key: str, arrival: Arrival, digest: str) -> bool:
        transport = self._contacts.transport(key)
        if transport is None:
            return False
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        try:
            is_here = fetch_parts(transport, self._shared, arrival, digest, nothing)
            self.bytes_received += len(arrival.room.view) if is_here else 0
            return is_here
        except OuterstepError as error:
            log.debug("a fragment could not be fetched from %s: %s", transport.address, error)
            return False


def _expect(offered: OfferedSnapshot) -> Arrival:
    parts = offered.parts
    return Arrival(Room(private_memory(parts.size_bytes), on_disk=False), parts, list(range(len(parts.digests))))
