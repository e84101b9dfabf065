"""What the workers hold of one fragment, and how they get there.

    T    where the outer optimizer is, exactly
    θ    what the workers hold

With an exact `down_codec` they are the same memory, and every agreement is fetched whole. Otherwise each round sends an
*update*, the same bytes to everybody, and the server applies what it sent:

    u = encode(T − θ);    θ ← θ + decode(u)

Product and sum are rounded one after the other, so worker and server get the same bits on any device. T − θ is what the
codec left out; it is in the next difference, so nothing is lost (error feedback without a memory of its own).

The last updates are kept in a ring, half as large as the whole at most (the newest always). Who holds an older θ gets
the chain that leads to the newest, if all of it is there and shorter than the whole; the others get the whole. Both
give the same bits.

θ moves in place, unless somebody is in the middle of fetching it: then the next version is another piece of memory, and
the old one stays until it is read or READING_S are over. So nobody ever reads bytes that change. One thread moves;
any number read. `_lock` is held for microseconds, never while bytes are hashed, moved or sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.codecs import FP32
from ..core.codecs.recipe import Recipe
from ..core.views import fp32_views
from ..errors import Busy, ServerFailed, Superseded
from ..types import MOST_PAYLOADS, Agreement, GetPart, ParameterSpec, Participant, Payload
from ..wire.frames import layout
from .motion import Motion, fp32_hash
from .pool import private_memory
from .published import Frame, Published, Update

OLDER_HELD = 1  # versions of θ beside the newest, for those in the middle of them: memory must not grow with readers
MOTION_PATIENCE_S = 5.0  # how long a reader waits for a fragment to come to rest
OLDER_HELD_IF_EXACT = 2  # then there is no T, and everybody fetches the whole


class Downlink:
    def __init__(
        self,
        index: int,
        specs: Sequence[ParameterSpec],
        state: Mapping[str, Tensor],
        recipe: Recipe,
        part_size_bytes: int,
        *,
        version: int = 0,
        run_id: str = "",
        targets: Mapping[str, Tensor] | None = None,
    ) -> None:
        """θ from `state`; T from `targets`, as far as it is there and differs from θ."""
        self.index, self.run_id = index, run_id
        self.is_exact = recipe.is_exact
        self.follows_means = True  # False: T moves along what another rule than the mean makes of contributions
        self.rules = {spec.name: recipe.rule(spec) for spec in specs}
        self.full = layout(FP32.name, [(s.name, s.shape, FP32.encoded_bytes(s.numel)) for s in specs])
        self.update = layout(
            recipe.name, [(s.name, s.shape, self.rules[s.name].codec.encoded_bytes(s.numel)) for s in specs]
        )
        self.part_size_bytes = part_size_bytes
        self._lock = threading.Condition()
        self._moving: int | None = None  # the version whose memory is being moved to the next
        self._ring: deque[Update] = deque()
        self._leaving: Update | None = None  # out of the ring, but somebody is in the middle of it
        self._idle: Frame | None = None  # of an older version that was forgotten
        frame = Frame(self.full)
        for name, theta in fp32_views(frame.view, self.full.places, self.full.data_begin).items():
            theta.copy_(state[name])
        self._target = frame.data(self.full, torch.float32)
        if not self.is_exact:
            self._target_memory = private_memory(max(4 * self._target.numel(), 4))
            self._target = torch.frombuffer(self._target_memory, dtype=torch.float32)
            for name, target in self.targets().items():
                target.copy_((targets or state).get(name, state[name]))
        agreement = Agreement(fragment=index, version=version, anchor_hash=fp32_hash(frame.view, self.full))
        self._held: dict[int, Published] = {version: Published(agreement, frame, part_size_bytes)}

    @property
    def newest(self) -> Published:
        if not self._held:
            raise ServerFailed(f"an outer step of fragment {self.index} failed half-way", hint="resume a saved state")
        return self._held[max(self._held)]

    @property
    def held_versions(self) -> list[int]:
        return sorted(self._held)

    @property
    def ring_versions(self) -> list[int]:
        return [update.version for update in self._ring]

    @property
    def target(self) -> Tensor:
        """T, flat: for the thread that moves it."""
        return self._target

    def params(self, of: Published | None = None) -> dict[str, Tensor]:
        """θ by name, of the newest version. Views: for the thread that moves it, or while `of` is read."""
        return fp32_views((of or self.newest).frame.view, self.full.places, self.full.data_begin)

    def targets(self) -> dict[str, Tensor]:
        """T by name, likewise; empty if it is θ."""
        if self.is_exact:
            return {}
        return fp32_views(self._target_memory, self.full.places, 0)

    # --- reading, from any thread ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Published | None]:
        """A version (None = the newest) whose bytes stay as they are meanwhile; None if it is not held (any more)."""
        with self._lock:
            self._wait_for_rest()
            published = self.newest if version is None else self._held.get(version)
            lent = published.frame.lend(0, published.size_bytes) if published is not None else None
        try:
            yield published
        finally:
            del lent

    def payloads(
        self, version: int, worker_id: str, held: int, held_hash: str | None, now: float
    ) -> tuple[Payload, ...] | None:
        """What leads a worker to `version` from the version and hash that it holds. None: it is not the newest now."""
        with self._lock:
            if version != max(self._held, default=None):
                return None
            if held_hash is not None:
                if held == version and held_hash == self.newest.agreement.anchor_hash:
                    return ()
                chain = self._chain(held, held_hash)
                for update in chain:
                    update.promised(worker_id, now)
                if chain:
                    return tuple(update.payload for update in chain)
            self._wait_for_rest()
            published = self._held.get(version)
            if published is None:
                return None
            published.promised(worker_id, now)
            lent = published.frame.lend(0, published.size_bytes)
        payload = published.payload()
        del lent
        return (payload,)

    def part(self, request: GetPart, now: float) -> tuple[str, memoryview]:
        """The hash and the bytes of one part, which stay as they are for as long as the view is kept."""
        with self._lock:
            if request.kind == "update":
                update = self._find_update(request.version)
                if update is None:
                    raise self._superseded(request)
                data = update.lend(request.worker_id, request.part, now)
                return update.part_hashes[request.part], data
            self._wait_for_rest()
            published = self._held.get(request.version)
            if published is None:
                raise self._superseded(request)
            data = published.lend(request.worker_id, request.part, now)
        return published.part_hashes()[request.part], data

    def forget_old(self, now: float) -> None:
        """Hold the newest, and few older versions, while somebody is in the middle of them."""
        with self._lock:
            self._forget_old(now)

    def _wait_for_rest(self) -> None:
        """Until the newest version is not being moved; then it is another one. Not for ever: what has moved is shown
        to nobody before it is on the disk, and that may be full."""
        if not self._lock.wait_for(lambda: self._moving is None, MOTION_PATIENCE_S):
            raise Busy(
                f"fragment {self.index} is on its way from version {self._moving} to the next",
                hint="ask again; the server's status says what keeps it",
                retry_after_s=1.0,
            )

    def _chain(self, held: int, held_hash: str) -> list[Update]:
        """The updates from `held` to the newest; none if they do not all lead there, or are no shorter than all."""
        chain = [update for update in self._ring if update.version > held]
        if not chain or chain[0].version != held + 1 or chain[0].base_hash != held_hash:
            return []
        size = sum(update.size_bytes for update in chain)
        return chain if size < self.full.size_bytes and len(chain) <= MOST_PAYLOADS else []

    def _find_update(self, version: int) -> Update | None:
        served = [*self._ring, *([self._leaving] if self._leaving is not None else [])]
        return next((update for update in served if update.version == version), None)

    def _superseded(self, request: GetPart) -> Superseded:
        newest = max(self._held, default="on its way")
        return Superseded(
            f"version {request.version} of fragment {request.fragment} is not held as {request.kind}; "
            f"the newest is {newest}",
            hint="poll again and fetch the newest",
        )

    def _forget_old(self, now: float) -> None:
        newest = max(self._held)
        asked = {v: p.last_asked_at(now) for v, p in self._held.items() if v != newest}
        read = sorted((at, version) for version, at in asked.items() if at is not None)
        older = OLDER_HELD_IF_EXACT if self.is_exact else OLDER_HELD
        kept = {newest, *(version for _, version in read[-older:])}
        for version in self._held.keys() - kept:
            frame = self._held.pop(version).frame
            self._idle = None if frame.is_lent else frame

    # --- moving, from one thread ----------------------------------------------------------------------------------

    @contextmanager
    def moving(self, version: int, now: float) -> Iterator[Motion]:
        """θ on its way to `version`; afterwards `publish` what the motion made. If it fails there is no way back: the
        memory that was moved is not served any more."""
        with self._lock:
            newest = self.newest
            in_place = not newest.is_read(now)
            self._forget_old(now)
            idle, self._idle = self._idle, None
            frame = newest.frame if in_place else idle or Frame(self.full)
            update = None if self.is_exact else self._make_way(now) or Frame(self.update)
            self._moving = newest.version if in_place else None
        try:
            yield Motion(self, version, newest.frame, frame, self._target, update)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """What was being moved will not arrive, and is not what it was: nobody need wait for it."""
        with self._lock:
            if self._moving is not None:
                del self._held[self._moving]
            self._moving = None
            self._lock.notify_all()

    def publish(self, made: Motion, participants: tuple[Participant, ...], now: float) -> Published:
        """From now on this is the newest. (With the motion's context closed.)"""
        anchor_hash, part_hashes = made.result()
        agreement = Agreement(
            fragment=self.index,
            version=made.version,
            anchor_hash=anchor_hash,
            participants=participants,
            watched=made.watched(participants),
        )
        published = Published(agreement, made.frame, self.part_size_bytes)
        with self._lock:
            before = self.newest
            if made.in_place:
                del self._held[before.version]
            self._held[made.version] = published
            if made.update is not None:
                base_hash = before.agreement.anchor_hash
                self._ring.append(Update(made.version, base_hash, made.update, part_hashes, self.part_size_bytes))
            else:
                self._target = made.target
            self._moving = None
            self._forget_old(now)
            self._lock.notify_all()
        return published

    def _make_way(self, now: float) -> Frame | None:
        """Take the oldest updates out of the ring, until one more fits. The memory of one that nobody reads is used for
        the next; one that somebody is in the middle of is served until another takes its place."""
        limit, size = (self.full.size_bytes - self.full.data_begin) // 2, self.update.size_bytes
        reused: Frame | None = None
        while self._ring and (len(self._ring) + 1) * size > limit:
            oldest = self._ring.popleft()
            if oldest.is_read(now):
                self._leaving = oldest
            else:
                reused = oldest.frame
        if self._leaving is not None and not self._leaving.is_read(now):
            reused, self._leaving = self._leaving.frame, None
        return reused
