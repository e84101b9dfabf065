"""Publish: the version of a fragment that workers hold, and how they get the next one.

    T    the outer optimizer's exact parameters        (core/state.py)
    θ    the parameters that workers hold

With an exact `down_codec`, T and θ share memory, and workers fetch every agreement whole. Otherwise each round produces
an *update*. Every worker gets the same bytes, and the server applies the bytes that it sent:

    u = encode(T − θ);    θ ← θ + decode(u)

Product and sum are rounded one after the other, so worker and server get the same bits on any device. T − θ is the part
that the codec left out. The next difference contains it, so nothing is lost (error feedback without extra memory).

A ring keeps the last updates, at most half as large as the whole frame (the newest update always stays). A worker with
an older θ gets the chain of updates to the newest θ, if the ring has the whole chain and the chain is smaller than the
whole frame. Other workers get the whole frame. Both give the same bits.

θ moves in place unless a worker is fetching it. In that case the next version gets other memory, and the old version
stays until it is read or READING_S have passed. So nobody ever reads bytes that change. One thread moves θ; any number
of threads read it. On a GPU (places.py) θ always moves in place. A frame in host memory is filled on the first request,
at the latest before θ moves again; the encoded step of a round is copied at once. `_lock` is held for microseconds,
never while bytes are hashed, moved or sent.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from msgspec.structs import replace
from torch import Tensor

from ..core.codecs import FP32, Dither
from ..core.codecs.recipe import Recipe
from ..core.state import FragmentState
from ..core.watch import watched as watched_round
from ..digest import (
    LEAF_VALUES,
    data_hash,
    leaf_count,
    leaves_of,
    part_count,
    part_hash,
    part_range,
    payload_hash,
    tree_hash,
    tree_root,
)
from ..errors import BadRequest, Busy, ServerFailed, Superseded
from ..pool import private_memory, watched
from ..threads import ThreadTeam
from ..types import MOST_PAYLOADS, Agreement, GetPart, ParameterSpec, Participant, Payload, Watched
from ..wire.frames import Layout, layout
from .blocks import Block
from .places import leaves_on, pinned, pinned_memory
from .section_hashes import SectionHashes

READING_S = 60.0  # a worker that has requested no part for this long has stopped reading
OLDER_HELD = 1  # older versions of θ for workers that are fetching them: memory must not grow with readers
OLDER_HELD_IF_EXACT = 2  # no memory for T then, and every worker fetches whole frames
MOVING_PATIENCE_S = 5.0  # how long a reader waits for a fragment to come to rest


class Frame:
    """A frame in memory, whose bytes are lent to senders. While a lent view or a slice of it lives, its ticket is in
    `lent`, and the memory must not change. So sending needs no lock and no notification at its end.

    The values of a frame made on a GPU stay there until the host needs them. `fill` copies them; lend the frame
    first."""

    def __init__(self, of: Layout, memory: Callable[[int], memoryview] = private_memory) -> None:
        self.view = memory(of.size_bytes)
        self.view[: of.data_begin] = of.prefix
        self.lent: set[object] = set()
        self.elsewhere: Tensor | None = None  # all its values, flat; None: they are in `view`
        self._data_begin = of.data_begin
        self._filling = threading.Lock()

    def fill(self) -> None:
        """Thread-safe: a second caller waits for the first."""
        with self._filling:
            if self.elsewhere is not None and self.elsewhere.numel():
                here = torch.frombuffer(self.view, dtype=torch.float32, offset=self._data_begin)
                here.copy_(self.elsewhere)
            self.elsewhere = None

    def lend(self, begin: int, end: int) -> memoryview:
        ticket = object()
        self.lent.add(ticket)
        return watched(self.view[begin:end], lambda: self.lent.discard(ticket)).toreadonly()

    def data(self, of: Layout, dtype: torch.dtype) -> Tensor:
        """Everything after the header, flat."""
        if len(self.view) == of.data_begin:  # frombuffer refuses to make nothing
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, offset=of.data_begin)


@dataclass
class _Download:
    """One worker that fetches a frame part by part."""

    asked_at: float
    parts: set[int] = field(default_factory=set)


class Served:
    """A frame, and the workers that are fetching it. (The downlink's lock guards it.)"""

    def __init__(self, frame: Frame, part_size_bytes: int) -> None:
        self.frame, self.size_bytes = frame, len(frame.view)
        self.part_count = part_count(self.size_bytes, part_size_bytes)
        self._part_size_bytes = part_size_bytes
        self._readers: dict[str, _Download] = {}

    def promised(self, worker_id: str, now: float) -> None:
        """This worker was told to fetch the frame."""
        self._readers.setdefault(worker_id, _Download(now)).asked_at = now

    def lend(self, worker_id: str, part: int, now: float) -> memoryview:
        """Lend one part to a sender."""
        if part >= self.part_count:
            raise BadRequest(f"part {part} is out of range: there are {self.part_count}")
        reading = self._readers.setdefault(worker_id, _Download(now))
        reading.asked_at = now
        reading.parts.add(part)
        if len(reading.parts) == self.part_count:
            del self._readers[worker_id]  # it has every part; the last bytes are still being sent (`Frame.lent`)
        return self.frame.lend(*part_range(part, self.size_bytes, self._part_size_bytes))

    def last_asked_at(self, now: float) -> float | None:
        """When a worker that is still fetching last requested a part; None = no worker is fetching."""
        gone = [worker for worker, reading in self._readers.items() if now - reading.asked_at >= READING_S]
        for worker in gone:
            del self._readers[worker]
        return max((reading.asked_at for reading in self._readers.values()), default=None)

    def is_read(self, now: float) -> bool:
        return bool(self.frame.lent) or self.last_asked_at(now) is not None


class Published(Served):
    """One whole version of θ. Its part hashes are computed at the first request."""

    def __init__(self, agreement: Agreement, frame: Frame, part_size_bytes: int) -> None:
        super().__init__(frame, part_size_bytes)
        self.agreement, self.version = agreement, agreement.version
        self._hashing = threading.Lock()
        self._part_hashes: tuple[str, ...] = ()

    @cached_property
    def section_hashes(self) -> SectionHashes:
        """The hashes for groups, made on first use. (If two threads make it at once, one copy is lost.)"""
        return SectionHashes()

    def part_hashes(self) -> tuple[str, ...]:
        """Computed once, at the first request; later callers wait. Call this only while a part of the frame is lent."""
        self.frame.fill()
        with self._hashing:
            if not self._part_hashes:
                ranges = (part_range(i, self.size_bytes, self._part_size_bytes) for i in range(self.part_count))
                self._part_hashes = tuple(part_hash(self.frame.view[begin:end]) for begin, end in ranges)
            return self._part_hashes

    def payload(self) -> Payload:
        hashes = self.part_hashes()
        return Payload(version=self.version, kind="full", size_bytes=self.size_bytes, hash=payload_hash(hashes))


class Update(Served):
    """The encoded step to `version` from the version before it, whose anchor has `base_hash`."""

    def __init__(
        self, version: int, base_hash: str, frame: Frame, part_hashes: tuple[str, ...], part_size_bytes: int
    ) -> None:
        super().__init__(frame, part_size_bytes)
        self.version, self.base_hash, self.part_hashes = version, base_hash, part_hashes
        self.payload = Payload(
            version=version, kind="update", size_bytes=self.size_bytes, hash=payload_hash(part_hashes)
        )


@dataclass(frozen=True, eq=False)
class _Looked:
    """Facts about θ in a block on a device: its largest magnitude, and its hash leaves on request."""

    block: Block
    largest: Tensor
    leaves: Callable[[], bytes]


class NextVersion:
    """A version in the making: θ follows T in one pass over the memory. `target` is T, flat. When a block of T is
    final, `move` that block, in any order and from any thread; then call `hash_parts`."""

    def __init__(
        self, down: Downlink, version: int, before: Frame, frame: Frame, target: Tensor, update: Frame | None
    ) -> None:
        """θ moves from `before` to `frame`, which may be the same. `update` gets the encoded step (None = θ is T)."""
        self.version, self.frame, self.update = version, frame, update
        self.in_place = frame is before
        self.mean: Tensor | None = None  # the aggregate, if it must be kept until this version is published
        self.pushes: Sequence[float] | None = None  # how much each push counted, if T moved along them one by one
        self.squares = 0.0  # Σ g² of the aggregate
        self._squares: list[Tensor] = []  # of blocks on a device, not fetched yet
        self.anchor_hash = ""  # known, like the part hashes, when all blocks have moved
        self.part_hashes: tuple[str, ...] = ()
        self.seen: Watched | None = None  # how similar the contributions were, if not the mean combined them
        self._down, self.from_above = down, False  # True: an agreement of the layer above, without contributions
        self._first_leaf, leaves = down.first_leaf, down.leaf_count
        self._leaves = memoryview(bytearray(8 * leaves))
        self._on_device: list[_Looked] | None = None  # facts about blocks there, until they are fetched
        if down.on_device is not None:
            self._on_device, self._old, self._new = [], down.on_device, down.on_device
        else:
            self._old, self._new = before.data(down.full, torch.float32), frame.data(down.full, torch.float32)
        if update is None:
            if self._old is not self._new and not self.in_place:
                self._new.copy_(self._old)
            self.target = self._new
            return
        self.target = target
        self._encoded = update.data(down.update, torch.uint8)
        self._begins = {entry.name: entry.begin for entry in down.update.entries}

    def continue_on_host(self, target: Tensor | None) -> None:
        """Copy all blocks to the host, moved or not, and move the rest there. `target`: T there, unless it is θ."""
        self._ask()
        there, self._on_device = self._new, None
        self.frame.elsewhere = None
        self._old = self._new = self.frame.data(self._down.full, torch.float32)
        self._new.copy_(there)
        self.target = self._new if target is None else target

    def touched(self, block: Block) -> list[Tensor]:
        """The memory that a block's step and move change in place."""
        flats = [self._new] if self.target is self._new else [self._new, self.target]
        return [flat[block.place : block.end] for flat in flats]

    def add_squares(self, squares: float | Tensor) -> None:
        """Add the squares of the next block. Blocks come in order."""
        if isinstance(squares, Tensor):
            self._squares.append(squares)
        else:
            self.squares += squares

    def watched(self, participants: Sequence[Participant]) -> Watched | None:
        """How the round went, as far as that is the same for all workers. If several pushes moved T one by one, there
        is no aggregate, so nothing is known. A single push is its own aggregate."""
        if self.from_above:
            return None
        made = math.sqrt(self.squares)
        if self.seen is not None:
            return replace(self.seen, aggregated_grad_norm=made)
        counted = [p for p in participants if p.weight > 0.0]
        norms = [p.norm for p in counted if p.norm is not None]
        if self.pushes is None:
            is_mean = self._down.follows_means and len(norms) == len(counted)
            return watched_round(None, norms, [p.weight for p in counted], made if is_mean else None, made)
        if len(norms) == len(self.pushes) == 1:
            return watched_round(None, norms, self.pushes, None, self.pushes[0] * norms[0])
        return None

    def move(self, block: Block, room: Tensor) -> None:
        """Move θ to T in this block, as far as the codec can. T is final there. `room`: scratch memory for a block.
        (Under no_grad.)"""
        theta = self._new[block.place : block.end]
        if self.update is not None:
            rule, begin = self._down.rules[block.name], self._begins[block.name]
            old, d = self._old[block.place : block.end], room[: block.count]
            torch.sub(self.target[block.place : block.end], old, out=d)
            first, end = rule.codec.encoded_bytes(block.start), rule.codec.encoded_bytes(block.stop)
            encoded = self._encoded[begin + first : begin + end]
            is_here = encoded.device == d.device
            made = encoded if is_here else torch.empty(end - first, dtype=torch.uint8, device=d.device)
            dither = None
            if rule.stochastic:
                dither = Dither.of(self._down.run_id, self._down.index, self.version, block.name).after(block.start)
            rule.codec.encode(d, made, dither)
            rule.codec.decode(made, d)
            torch.add(old, d, out=theta)
            if not is_here:
                encoded.copy_(made, non_blocking=True)
        if self._on_device is not None:
            largest = torch.linalg.vector_norm(theta, ord=math.inf)
            self._on_device.append(_Looked(block, largest, leaves_on(theta)))
            return
        self._check_finite(block, math.isfinite(torch.dot(theta, theta)) or bool(torch.isfinite(theta).all()))
        begin = self._down.full.data_begin
        self._put_leaves(block, leaves_of(self.frame.view[begin + 4 * block.place : begin + 4 * block.end]))

    def _check_finite(self, block: Block, is_finite: bool) -> None:
        if not is_finite:
            raise FloatingPointError(f"the outer step made tensor {block.name!r} of version {self.version} not finite")

    def _put_leaves(self, block: Block, leaves: bytes) -> None:
        first = 8 * (self._first_leaf[block.name] + block.start // LEAF_VALUES)
        self._leaves[first : first + len(leaves)] = leaves

    def _ask(self) -> None:
        """Fetch the facts about θ from the device."""
        for looked in self._on_device or ():
            self._check_finite(looked.block, math.isfinite(float(looked.largest)))
            self._put_leaves(looked.block, looked.leaves())
        if self._on_device is not None:
            self._on_device.clear()
        for squares in self._squares:
            self.squares += float(squares)
        self._squares.clear()

    def hash_parts(self, team: ThreadTeam) -> None:
        """Hash the update's parts and the anchor. All blocks must have moved."""
        if self._on_device is not None or self._squares:
            self._ask()
        self.anchor_hash = tree_root(self._leaves)
        if self.update is not None:
            view, size = self.update.view, self._down.part_size_bytes
            ranges = [part_range(i, len(view), size) for i in range(part_count(len(view), size))]
            pieces = [view[begin:end] for begin, end in ranges]
            if len(pieces) == 1:
                self.part_hashes = (part_hash(pieces[0]),)
            else:
                self.part_hashes = tuple(one.result() for one in [team.submit(part_hash, piece) for piece in pieces])


class Downlink:
    """One fragment's θ and T, the frames that workers fetch, and the ring of updates."""

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
        centre: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`state`: θ. `targets`: T, where it differs from θ. `centre`: the last aggregate."""
        self.index, self.run_id = index, run_id
        self.is_exact = recipe.is_exact
        self.follows_means = True  # False: a rule other than the mean makes the aggregate
        self.rules = {spec.name: recipe.rule(spec) for spec in specs}
        self.full = layout(FP32.name, [(s.name, s.shape, FP32.encoded_bytes(s.numel)) for s in specs])
        self.update = layout(
            recipe.name, [(s.name, s.shape, self.rules[s.name].codec.encoded_bytes(s.numel)) for s in specs]
        )
        self.part_size_bytes = part_size_bytes
        self._most_ring_bytes = (self.full.size_bytes - self.full.data_begin) // 2
        self._lock = threading.Condition()
        self._moving: int | None = None  # the version whose memory is being changed into the next
        self._ring: deque[Update] = deque()
        self._leaving: Update | None = None  # out of the ring, but a worker is still fetching it
        self._idle: Frame | None = None  # free memory of a forgotten version
        self._memory: Callable[[int], memoryview] = private_memory
        self._ready: list[Frame] = []  # prepared frames for updates
        self.on_device: Tensor | None = None  # θ on the device, flat; frames are filled on request
        frame = Frame(self.full)
        self._target = frame.data(self.full, torch.float32)
        theta = self.by_name(self._target)
        for name, values in theta.items():
            values.copy_(state[name])
        if not self.is_exact:
            self._target = torch.frombuffer(private_memory(max(4 * self._target.numel(), 4)), dtype=torch.float32)
            for name, values in self.by_name(self._target).items():
                values.copy_((targets or state).get(name, state[name]))
        counts = [leaf_count(entry.end - entry.begin) for entry in self.full.entries]
        firsts = list(accumulate(counts, initial=0))
        self.first_leaf = {entry.name: first for entry, first in zip(self.full.entries, firsts, strict=False)}
        self.leaf_count = firsts[-1]
        anchor_hash = tree_hash(self._tensors_of(frame))
        agreement = Agreement(fragment=index, version=version, anchor_hash=anchor_hash)
        self._told: dict[int, str] = {}  # version → the anchor's hash that workers of protocol 1 got
        self.state = FragmentState(
            {spec.name: spec.role for spec in specs},
            theta,
            index=index,
            target=self.by_name(self._target),
            version=version,
            anchor_hash=agreement.anchor_hash,
            centre=centre,
        )
        self._held: dict[int, Published] = {version: Published(agreement, frame, part_size_bytes)}

    @property
    def newest(self) -> Published:
        if not self._held:
            raise ServerFailed(f"an outer step of fragment {self.index} failed half-way", hint="resume a saved state")
        return self._held[max(self._held)]

    def _tensors_of(self, frame: Frame) -> Iterator[memoryview]:
        """The bytes of each tensor. The gaps between tensors are not hashed."""
        data = frame.view[self.full.data_begin :]
        return (data[entry.begin : entry.end] for entry in self.full.entries)

    @property
    def held_versions(self) -> list[int]:
        return sorted(self._held)

    @property
    def ring_versions(self) -> list[int]:
        return [update.version for update in self._ring]

    def params(self, of: Published | None = None) -> dict[str, Tensor]:
        """θ of the newest version, by name, in host memory. These are views: use them in the thread that moves θ, or
        while `of` is being read."""
        frame = (of or self.newest).frame
        frame.fill()
        return self.by_name(frame.data(self.full, torch.float32))

    def targets(self) -> dict[str, Tensor]:
        """T by name, as views, too; empty if T is θ."""
        return {} if self.is_exact else {name: values.cpu() for name, values in self.state.target.items()}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the tensors, by name, into flat memory with the layout of a whole frame."""
        return {e.name: flat[e.begin // 4 : e.end // 4].view(e.shape) for e in self.full.entries}

    # --- reading, from any thread ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Published | None]:
        """A version (None = the newest) whose bytes stay unchanged meanwhile. Yields None if it is not held."""
        with self._lock:
            self._wait_for_rest()
            published = self.newest if version is None else self._held.get(version)
            lent = published.frame.lend(0, published.size_bytes) if published is not None else None
        try:
            if published is not None:
                published.frame.fill()
            yield published
        finally:
            del lent

    def payloads(
        self, version: int, worker_id: str, held: int, held_hash: str | None, now: float
    ) -> tuple[Payload, ...] | None:
        """The payloads that take a worker from the version and hash that it holds to `version`. None: `version` is not
        the newest now."""
        with self._lock:
            if version != max(self._held, default=None):
                return None
            if held_hash is not None:
                if held == version and held_hash in (self.newest.agreement.anchor_hash, self._told.get(held)):
                    return ()
                chain = [update for update in self._ring if update.version > held]
                leads_there = (
                    chain and chain[0].version == held + 1 and held_hash in (chain[0].base_hash, self._told.get(held))
                )
                size_bytes = sum(update.size_bytes for update in chain)
                if leads_there and size_bytes < self.full.size_bytes and len(chain) <= MOST_PAYLOADS:
                    for update in chain:
                        update.promised(worker_id, now)
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

    def flat_hash(self, version: int) -> str | None:
        """The anchor's hash in protocol 1, over all values in order, computed at the first request. None: the version
        is no longer held."""
        with self.reading(version) as published:
            if published is None:
                return None
            told = self._told.get(version) or data_hash(self._tensors_of(published.frame))
            with self._lock:
                kept = {update.version - 1 for update in self._ring} | self._held.keys()
                self._told = {v: h for v, h in self._told.items() if v in kept} | {version: told}
            return told

    def part(self, request: GetPart, now: float) -> tuple[str, memoryview]:
        """The hash and the bytes of one part. The bytes stay unchanged while the view exists."""
        with self._lock:
            if request.kind == "update":
                served = [*self._ring, *([self._leaving] if self._leaving is not None else [])]
                update = next((update for update in served if update.version == request.version), None)
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

    def _wait_for_rest(self) -> None:
        """Wait until no version is being changed into the next. The wait has a limit: nobody sees the next version
        before it is on disk, and the disk may be full."""
        if not self._lock.wait_for(lambda: self._moving is None, MOVING_PATIENCE_S):
            raise Busy(
                f"fragment {self.index} is on its way from version {self._moving} to the next",
                hint="ask again; the server's status shows the cause of a delay",
                retry_after_s=1.0,
            )

    def _superseded(self, request: GetPart) -> Superseded:
        newest = max(self._held, default="on its way")
        return Superseded(
            f"version {request.version} of fragment {request.fragment} is not held as {request.kind}; "
            f"the newest is {newest}",
            hint="poll again and fetch the newest",
        )

    def forget_old(self, now: float) -> None:
        """Drop old versions, except for a few that workers are fetching."""
        with self._lock:
            newest = max(self._held)
            asked = {v: p.last_asked_at(now) for v, p in self._held.items() if v != newest}
            read = sorted((at, version) for version, at in asked.items() if at is not None)
            older = OLDER_HELD_IF_EXACT if self.is_exact else OLDER_HELD
            kept = {newest, *(version for _, version in read[-older:])}
            for version in self._held.keys() - kept:
                frame = self._held.pop(version).frame
                self._idle = None if frame.lent else frame

    # --- moving, from one thread ----------------------------------------------------------------------------------

    @contextmanager
    def moving(self, version: int, now: float) -> Iterator[NextVersion]:
        """Change θ into `version`; call `publish` afterwards. A failure cannot be undone: the changed memory is no
        longer served."""
        with self._lock:
            newest = self.newest
            in_place = not newest.is_read(now)
            self.forget_old(now)
            idle, self._idle = self._idle, None
            frame = newest.frame if in_place else idle or Frame(self.full, self._memory)
            update = None if self.is_exact else self._make_way(now) or self._frame_for_update()
            self._moving = newest.version if in_place else None
        try:
            if not in_place:
                newest.frame.fill()  # for its readers, before its values change
            yield NextVersion(self, version, newest.frame, frame, self._target, update)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up the version in the making. Its memory can no longer be served, and nobody may wait for it."""
        with self._lock:
            if self._moving is not None:
                del self._held[self._moving]
            self._moving = None
            self._lock.notify_all()

    def publish(self, made: NextVersion, participants: tuple[Participant, ...], now: float) -> Published:
        """Make this the newest version. (After the context of `moving`.)"""
        agreement = Agreement(
            fragment=self.index,
            version=made.version,
            anchor_hash=made.anchor_hash,
            participants=participants,
            watched=made.watched(participants),
        )
        published = Published(agreement, made.frame, self.part_size_bytes)
        made.frame.elsewhere = self.on_device
        stays = made.in_place or self.on_device is not None
        theta = None if stays else self.by_name(made.frame.data(self.full, torch.float32))
        with self._lock:
            before = self.newest
            self.state.arrive(made.version, made.anchor_hash, theta, None if self.is_exact else self.state.target)
            if made.in_place:
                del self._held[before.version]
            self._held[made.version] = published
            if made.update is not None:
                base_hash = before.agreement.anchor_hash
                self._ring.append(Update(made.version, base_hash, made.update, made.part_hashes, self.part_size_bytes))
            self._target = made.target
            self._moving = None
            self.forget_old(now)
            self._lock.notify_all()
        return published

    def to_device(self, device: torch.device) -> None:
        """Move θ and T to the device, between two versions. Frames stay in host memory, pinned for a GPU."""
        frame = self.newest.frame
        frame.fill()
        if device.type == "cuda":
            self._memory, frame.view = pinned_memory, pinned(frame.view)
        theta = frame.data(self.full, torch.float32).to(device, copy=True)
        target = theta if self.is_exact else self._target.to(device, copy=True)
        if device.type == "cuda" and not self.is_exact:  # pinning takes as long as a round, so do it in advance
            wanted = max(self._most_ring_bytes // self.update.size_bytes, 1) - len(self._ring)
            self._ready = [Frame(self.update, self._memory) for _ in range(wanted)]
        self.on_device, self._target = theta, target
        self.state.arrive(self.state.version, self.state.anchor_hash, self.by_name(theta), self.by_name(target))

    def to_host(self, made: NextVersion | None = None) -> None:
        """Move θ and T back to the host, between two versions or in the middle of `made`, without device memory."""
        assert self.on_device is not None
        target = None
        if not self.is_exact:
            target = torch.frombuffer(private_memory(max(4 * self._target.numel(), 4)), dtype=torch.float32)
            target = target[: self._target.numel()].copy_(self._target)
        frame = self.newest.frame if made is None else made.frame
        if made is None:
            frame.fill()
        else:
            made.continue_on_host(target)
        theta = frame.data(self.full, torch.float32)
        self.on_device, self._memory, self._ready = None, private_memory, []
        self._target = theta if target is None else target
        self.state.arrive(self.state.version, self.state.anchor_hash, self.by_name(theta), self.by_name(self._target))

    def _frame_for_update(self) -> Frame:
        return self._ready.pop() if self._ready else Frame(self.update, self._memory)

    def _make_way(self, now: float) -> Frame | None:
        """Take the oldest updates out of the ring until the next one fits. The memory of an update without readers is
        reused. An update with readers is served until another takes its place."""
        limit, size = self._most_ring_bytes, self.update.size_bytes
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
