"""Publish: what the workers hold of one fragment, and how they get to its next version.

    T    where the outer optimizer is, exactly         (core/state.py)
    θ    what the workers hold

With an exact `down_codec` they are the same memory, and every agreement is fetched whole. Otherwise each round sends an
*update*, the same bytes to everybody, and the server applies what it sent:

    u = encode(T − θ);    θ ← θ + decode(u)

Product and sum are rounded one after the other, so worker and server get the same bits on any device. T − θ is what the
codec left out; it is in the next difference, so nothing is lost (error feedback without a memory of its own).

The last updates are kept in a ring, half as large as the whole at most (the newest always). A worker that holds an
older θ gets the chain that leads to the newest, if all of it is there and shorter than the whole; the others get the
whole. Both give the same bits.

θ moves in place, unless somebody is in the middle of fetching it: then the next version is another piece of memory, and
the old one stays until it is read or READING_S are over. So nobody ever reads bytes that change. One thread moves θ;
any number read it. On a GPU (places.py) θ always moves in place, and a frame in host memory is filled when somebody
asks for it, at the latest before θ moves on; what is sent each round, the encoded step, is copied at once. `_lock` is
held for microseconds, never while bytes are hashed, moved or sent.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

READING_S = 60.0  # a worker that has not asked for a part for this long has stopped reading
OLDER_HELD = 1  # versions of θ beside the newest, for those in the middle of them: memory must not grow with readers
OLDER_HELD_IF_EXACT = 2  # then there is no T, and everybody fetches the whole
MOVING_PATIENCE_S = 5.0  # how long a reader waits for a fragment to come to rest


class Frame:
    """A frame in memory. Bytes of it are lent to be sent; as long as a lent view or any slice of it lives, its ticket
    is in `lent`, and the memory must not change. Sending needs no lock, and nobody is told when it is done.

    The values of a frame that was made on a GPU stay there until they are needed here: then `fill` it, while it is
    lent."""

    def __init__(self, of: Layout, memory: Callable[[int], memoryview] = private_memory) -> None:
        self.view = memory(of.size_bytes)
        self.view[: of.data_begin] = of.prefix
        self.lent: set[object] = set()
        self.elsewhere: Tensor | None = None  # its values, all of them and flat; None: they are here
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
    """A frame that workers fetch, and the workers that are in the middle of it. (Guarded by its downlink's lock.)"""

    def __init__(self, frame: Frame, part_size_bytes: int) -> None:
        self.frame, self.size_bytes = frame, len(frame.view)
        self.part_count = part_count(self.size_bytes, part_size_bytes)
        self._part_size_bytes = part_size_bytes
        self._readers: dict[str, _Download] = {}

    def promised(self, worker_id: str, now: float) -> None:
        """This worker was told to fetch it, and will."""
        self._readers.setdefault(worker_id, _Download(now)).asked_at = now

    def lend(self, worker_id: str, part: int, now: float) -> memoryview:
        """One part, to be sent."""
        if part >= self.part_count:
            raise BadRequest(f"part {part} is out of range: there are {self.part_count}")
        reading = self._readers.setdefault(worker_id, _Download(now))
        reading.asked_at = now
        reading.parts.add(part)
        if len(reading.parts) == self.part_count:
            del self._readers[worker_id]  # it has all of it; the last bytes are on their way (`Frame.lent`)
        return self.frame.lend(*part_range(part, self.size_bytes, self._part_size_bytes))

    def last_asked_at(self, now: float) -> float | None:
        """When a worker that is still in the middle of it last asked; None = nobody is."""
        gone = [worker for worker, reading in self._readers.items() if now - reading.asked_at >= READING_S]
        for worker in gone:
            del self._readers[worker]
        return max((reading.asked_at for reading in self._readers.values()), default=None)

    def is_read(self, now: float) -> bool:
        return bool(self.frame.lent) or self.last_asked_at(now) is not None


class Published(Served):
    """One version of θ as a whole. The hashes of its parts are computed when the first worker asks for it."""

    def __init__(self, agreement: Agreement, frame: Frame, part_size_bytes: int) -> None:
        super().__init__(frame, part_size_bytes)
        self.agreement, self.version = agreement, agreement.version
        self.section_hashes = SectionHashes()
        self._hashing = threading.Lock()
        self._part_hashes: tuple[str, ...] = ()

    def part_hashes(self) -> tuple[str, ...]:
        """Computed once, for the first worker that asks; others wait for it. Only while a part of the frame is lent."""
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
    """The encoded step from the version before, whose anchor has `base_hash`, to `version`."""

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
    """θ in a block, as a device sees it: its largest magnitude, and its leaves when they are asked for."""

    block: Block
    largest: Tensor
    leaves: Callable[[], bytes]


class NextVersion:
    """A version on its way: θ follows T, in one pass over the memory. `target` is T, flat: when a block of it is where
    it should be, `move` that block, in any order and by any thread; then `hash_parts`."""

    def __init__(
        self, down: Downlink, version: int, before: Frame, frame: Frame, target: Tensor, update: Frame | None
    ) -> None:
        """θ from `before` to `frame`, which may be the same; the encoded step goes to `update` (None = θ is T)."""
        self.version, self.frame, self.update = version, frame, update
        self.in_place = frame is before
        self.mean: Tensor | None = None  # what T moved along, if it is to be kept until this is published
        self.pushes: Sequence[float] | None = None  # how much each counted, if it moved along one after the other
        self.squares = 0.0  # Σ g² of what T moved along at once
        self._squares: list[Tensor] = []  # of blocks on a device, not asked for yet
        self.anchor_hash = ""  # this and the hashes of the update's parts are known when all blocks have moved
        self.part_hashes: tuple[str, ...] = ()
        self.seen: Watched | None = None  # how similar contributions were that another rule than the mean combined
        self._down, self.from_above = down, False  # True: an agreement of a layer above, without contributions
        self._first_leaf, leaves = down.first_leaf, down.leaf_count
        self._leaves = memoryview(bytearray(8 * leaves))
        self._on_device: list[_Looked] | None = None  # what was looked at there, until it is asked for
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
        """Copy everything to the host, moved or not, and move the rest there. `target`: T there, unless it is θ."""
        self._ask()
        there, self._on_device = self._new, None
        self.frame.elsewhere = None
        self._old = self._new = self.frame.data(self._down.full, torch.float32)
        self._new.copy_(there)
        self.target = self._new if target is None else target

    def touched(self, block: Block) -> list[Tensor]:
        """What a block's move, and the step before it, change in place."""
        flats = [self._new] if self.target is self._new else [self._new, self.target]
        return [flat[block.place : block.end] for flat in flats]

    def add_squares(self, squares: float | Tensor) -> None:
        """Add the squares of the next block; blocks come in their order."""
        if isinstance(squares, Tensor):
            self._squares.append(squares)
        else:
            self.squares += squares

    def watched(self, participants: Sequence[Participant]) -> Watched | None:
        """How the round went, as far as it is the same for all workers. Of several pushes that each moved T by itself
        there is no aggregate, so nothing is known; of one it is that push."""
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
        """T is where it should be in this block: bring θ there, as far as the codec can. `room` is for a block. (Under
        no_grad.)"""
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
        """Fetch what was seen of θ on a device."""
        for looked in self._on_device or ():
            self._check_finite(looked.block, math.isfinite(float(looked.largest)))
            self._put_leaves(looked.block, looked.leaves())
        if self._on_device is not None:
            self._on_device.clear()
        for squares in self._squares:
            self.squares += float(squares)
        self._squares.clear()

    def hash_parts(self, team: ThreadTeam) -> None:
        """Hash the update's parts, and the anchor, when all blocks have moved."""
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
        """θ from `state`; T from `targets`, as far as it is there and differs from θ; the last aggregate, `centre`."""
        self.index, self.run_id = index, run_id
        self.is_exact = recipe.is_exact
        self.follows_means = True  # False: T moves along what another rule than the mean makes of contributions
        self.rules = {spec.name: recipe.rule(spec) for spec in specs}
        self.full = layout(FP32.name, [(s.name, s.shape, FP32.encoded_bytes(s.numel)) for s in specs])
        self.update = layout(
            recipe.name, [(s.name, s.shape, self.rules[s.name].codec.encoded_bytes(s.numel)) for s in specs]
        )
        self.part_size_bytes = part_size_bytes
        self._most_ring_bytes = (self.full.size_bytes - self.full.data_begin) // 2
        self._lock = threading.Condition()
        self._moving: int | None = None  # the version whose memory is being moved to the next
        self._ring: deque[Update] = deque()
        self._leaving: Update | None = None  # out of the ring, but somebody is in the middle of it
        self._idle: Frame | None = None  # of an older version that was forgotten
        self._memory: Callable[[int], memoryview] = private_memory
        self._ready: list[Frame] = []  # for updates, made in advance
        self.on_device: Tensor | None = None  # θ, flat, while it is worked on there: frames are filled when needed
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
        self._told: dict[int, str] = {}  # hashes of other versions' anchors, as workers of protocol 1 were told them
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
        """The bytes of each tensor: hashed without the gaps between them."""
        data = frame.view[self.full.data_begin :]
        return (data[entry.begin : entry.end] for entry in self.full.entries)

    @property
    def held_versions(self) -> list[int]:
        return sorted(self._held)

    @property
    def ring_versions(self) -> list[int]:
        return [update.version for update in self._ring]

    def params(self, of: Published | None = None) -> dict[str, Tensor]:
        """θ by name, of the newest version, in host memory. Views: for the thread that moves it, or while `of` is
        read."""
        frame = (of or self.newest).frame
        frame.fill()
        return self.by_name(frame.data(self.full, torch.float32))

    def targets(self) -> dict[str, Tensor]:
        """T by name, likewise; empty if it is θ."""
        return {} if self.is_exact else {name: values.cpu() for name, values in self.state.target.items()}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, in flat memory that is laid out as a whole frame's data."""
        return {e.name: flat[e.begin // 4 : e.end // 4].view(e.shape) for e in self.full.entries}

    # --- reading, from any thread ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Published | None]:
        """A version (None = the newest) whose bytes stay as they are meanwhile; None if it is not held (any more)."""
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
        """What leads a worker to `version` from the version and hash that it holds. None: it is not the newest now."""
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
        """The anchor's hash as protocol 1 has it, over the values one after the other; made for the first that asks.
        None: the version is not held any more."""
        with self.reading(version) as published:
            if published is None:
                return None
            told = self._told.get(version) or data_hash(self._tensors_of(published.frame))
            with self._lock:
                kept = {update.version - 1 for update in self._ring} | self._held.keys()
                self._told = {v: h for v, h in self._told.items() if v in kept} | {version: told}
            return told

    def part(self, request: GetPart, now: float) -> tuple[str, memoryview]:
        """The hash and the bytes of one part, which stay as they are for as long as the view is kept."""
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
        """Wait until the newest version is not being moved; then another one is the newest. Not for ever: what has
        moved is shown to nobody before it is on the disk, and the disk may be full."""
        if not self._lock.wait_for(lambda: self._moving is None, MOVING_PATIENCE_S):
            raise Busy(
                f"fragment {self.index} is on its way from version {self._moving} to the next",
                hint="ask again; the server's status says what keeps it",
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
        """Hold the newest version, and a few older ones while workers are in the middle of fetching them."""
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
        """θ on its way to `version`; afterwards `publish` it. If it fails there is no way back: the
        memory that was moved is not served any more."""
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
                newest.frame.fill()  # for its readers, before its values move on
            yield NextVersion(self, version, newest.frame, frame, self._target, update)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """What was being moved will not arrive, and cannot be served any more: nobody need wait for it."""
        with self._lock:
            if self._moving is not None:
                del self._held[self._moving]
            self._moving = None
            self._lock.notify_all()

    def publish(self, made: NextVersion, participants: tuple[Participant, ...], now: float) -> Published:
        """From now on this is the newest. (After the context of `moving`.)"""
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
        """Between two versions: θ and T are there from now on. What is sent stays in host memory, pinned for a GPU."""
        frame = self.newest.frame
        frame.fill()
        if device.type == "cuda":
            self._memory, frame.view = pinned_memory, pinned(frame.view)
        theta = frame.data(self.full, torch.float32).to(device, copy=True)
        target = theta if self.is_exact else self._target.to(device, copy=True)
        if device.type == "cuda" and not self.is_exact:  # to pin it takes as long as a round
            wanted = max(self._most_ring_bytes // self.update.size_bytes, 1) - len(self._ring)
            self._ready = [Frame(self.update, self._memory) for _ in range(wanted)]
        self.on_device, self._target = theta, target
        self.state.arrive(self.state.version, self.state.anchor_hash, self.by_name(theta), self.by_name(target))

    def to_host(self, made: NextVersion | None = None) -> None:
        """Back, between two versions or in the middle of `made`. It takes no memory of the device."""
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
        """Take the oldest updates out of the ring, until one more fits. The memory of one that nobody reads is used for
        the next; one that somebody is in the middle of is served until another takes its place."""
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
