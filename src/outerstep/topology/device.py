"""Between a GPU and the host: encoded blocks go and come beside the training, anchors in host memory come and go beside
the arithmetic (docs/adr/0048-a-workers-gpu-path.md).

A copy between the two needs pinned host memory to run beside anything else, and a stream of its own. What is read from
the model's weights is read in the order of the training's own stream: once the encoders are queued there, training may
go on and change them.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..core.codecs.recipe import Recipe
from ..core.codecs.scaled import ScaledCodec
from ..core.state import bytes_of
from ..digest import LEAF_VALUES, TreeHasher, leaves_of, tree_hash
from ..threads import process_helpers
from .payload import OutgoingFrame

log = logging.getLogger(__name__)

SLOTS = 2  # one block is encoded, or hashed, while another travels
ANCHOR_SLOTS = 3  # one comes, one is worked on, one goes back
STAGED_BYTES = 256 << 20  # an update up to this is brought to a GPU whole

Encode = Callable[[Tensor], None]
"""Writes the encoded bytes of one block."""


@dataclass
class Slot:
    """Memory on a GPU for one encoded block. `read`: its last copy has left."""

    data: Tensor
    read: torch.cuda.Event


class Ferry:
    """Blocks on a GPU: encoded there, then copied into the payload by a stream of its own, while the training's stream
    goes on with the next. A helper waits for each to arrive, and hashes it."""

    def __init__(self, payload: OutgoingFrame) -> None:
        self._payload = payload
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._slots: dict[torch.device, list[Slot]] = {}
        self._arrivals: queue.SimpleQueue[tuple[Slot | None, torch.cuda.Event, int] | None] = queue.SimpleQueue()
        process_helpers().run(self._hash, name="outerstep-ferry")

    def put(self, device: torch.device, begin: int, end: int, encode: Encode) -> None:
        target = self._payload.data[begin:end]
        arrived = _event()
        if device.type == "cpu":
            encode(target)
            self._arrivals.put((None, arrived, end))
            return
        training, side = torch.cuda.current_stream(device), self._side(device)
        slot = self._slot(device, end - begin)
        encoded = slot.data[: end - begin]
        training.wait_event(slot.read)
        encode(encoded)
        side.wait_stream(training)
        with torch.cuda.stream(side):
            target.copy_(encoded, non_blocking=True)
        slot.read.record(side)
        arrived.record(side)
        self._arrivals.put((slot, arrived, end))

    def close(self) -> None:
        self._arrivals.put(None)

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = _stream(device)
        return self._streams[device]

    def _slot(self, device: torch.device, size: int) -> Slot:
        """The one that was used longest ago, if it is large enough."""
        slots = self._slots.setdefault(device, [])
        slot = slots.pop(0) if len(slots) == SLOTS else None
        if slot is None or slot.data.numel() < size:
            slot = Slot(torch.empty(size, dtype=torch.uint8, device=device), _event())
        slots.append(slot)
        return slot

    def _hash(self) -> None:
        """(A slot is held until its copy has arrived: its memory must not go to somebody else before.)"""
        try:
            while (arrival := self._arrivals.get()) is not None:
                _, arrived, end = arrival
                arrived.synchronize()
                self._payload.written(end)
        except BaseException as error:  # noqa: BLE001 - it surfaces in the training thread, by way of the exchange
            self._payload.give_up(error)


@dataclass
class RoundTrip:
    """The way of an anchor's blocks to one GPU and back. `turn`: the slot that is used, or was last."""

    inward: torch.cuda.Stream
    outward: torch.cuda.Stream
    slots: list[Slot] = field(default_factory=list)
    turn: int = -1


class Shuttle:
    """Blocks of anchors in pinned host memory, brought to the GPU that works on them and back. Each way has a stream of
    its own, so that one block comes while another is worked on and a third goes: both directions of the bus are busy,
    and nobody waits for a block. One block at a time: `bring` it, then `take_back` or `dismiss` it."""

    def __init__(self) -> None:
        self._trips: dict[torch.device, RoundTrip] = {}

    def bring(self, host: Tensor, device: torch.device) -> Tensor:
        """These values on the device, flat; theirs own, unless they are there. Gone when two more were brought."""
        if device.type != "cuda" or host.device == device:
            return host.to(device)
        training, trip = torch.cuda.current_stream(device), self._trip(device)
        slot = self._next_slot(trip, host.numel(), host.dtype, device)
        held = slot.data[: host.numel()]
        trip.inward.wait_event(slot.read)
        with torch.cuda.stream(trip.inward):
            held.copy_(host, non_blocking=True)
        training.wait_stream(trip.inward)
        return held

    def take_back(self, values: Tensor, host: Tensor) -> None:
        """Values that took the place of what was brought last; they may change afterwards. On the host they are whole
        after `wait`."""
        trip = self._trips.get(values.device)
        if trip is None:
            host.copy_(values)
            return
        slot = trip.slots[trip.turn]
        held = slot.data[: values.numel()]
        if held.data_ptr() != values.data_ptr():
            held.copy_(values)
        trip.outward.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(trip.outward):
            host.copy_(held, non_blocking=True)
        slot.read.record(trip.outward)

    def dismiss(self, device: torch.device) -> None:
        """What was brought last is not used after what this thread has the device do so far."""
        trip = self._trips.get(device)
        if trip is not None:
            trip.slots[trip.turn].read.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until all that was taken back has arrived."""
        for trip in self._trips.values():
            trip.outward.synchronize()

    def _trip(self, device: torch.device) -> RoundTrip:
        if device not in self._trips:
            self._trips[device] = RoundTrip(_stream(device), _stream(device))
        return self._trips[device]

    def _next_slot(self, trip: RoundTrip, count: int, dtype: torch.dtype, device: torch.device) -> Slot:
        trip.turn = (trip.turn + 1) % ANCHOR_SLOTS
        if trip.turn == len(trip.slots):
            trip.slots.append(self._new_slot(trip, count, dtype, device))
        elif trip.slots[trip.turn].data.numel() < count:
            trip.slots[trip.turn] = self._new_slot(trip, count, dtype, device)
        return trip.slots[trip.turn]

    def _new_slot(self, trip: RoundTrip, count: int, dtype: torch.dtype, device: torch.device) -> Slot:
        """Its memory may still be in use for what the training's stream was told to do before."""
        slot = Slot(torch.empty(count, dtype=dtype, device=device), _event())
        slot.read.record(torch.cuda.current_stream(device))
        for stream in (trip.inward, trip.outward):
            slot.data.record_stream(stream)
        return slot


def staged(frame: memoryview, device: torch.device) -> Tensor:
    """A frame's bytes on this GPU. They come beside what the training's stream was told to do before."""
    side, training = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        there = torch.frombuffer(frame, dtype=torch.uint8).to(device, non_blocking=True)
    training.wait_stream(side)
    there.record_stream(training)
    return there


class HostCopies:
    """Hands values of a GPU's tensors to `use` in host memory, in order: the copy of one block runs while the one
    before is used."""

    def __init__(self, use: Callable[[Tensor], None]) -> None:
        self._use = use
        self._free: list[Tensor] = []
        self._under_way: list[tuple[torch.cuda.Event, Tensor, int]] = []

    def put(self, values: Tensor) -> None:
        if len(self._under_way) == SLOTS:
            self._take()
        count = values.numel()
        host = self._free.pop() if self._free else values.new_empty(0, device="cpu")
        if host.numel() < count:
            host = torch.empty(count, dtype=values.dtype, pin_memory=True)
        host[:count].copy_(values, non_blocking=True)
        event = _event()
        event.record(torch.cuda.current_stream(values.device))
        self._under_way.append((event, host, count))

    def flush(self) -> None:
        while self._under_way:
            self._take()

    def _take(self) -> None:
        event, host, count = self._under_way.pop(0)
        event.synchronize()
        self._use(host[:count])
        self._free.append(host)


class DeviceLeaves:
    """The leaves of an anchor's hash of values that are on a GPU, hashed there; for `hasher`, which gets them when it
    needs them. Only what a tensor leaves over of its last leaf is hashed on the host."""

    def __init__(self, hasher: TreeHasher) -> None:
        self._hasher = hasher
        self._rest: Tensor | None = None  # fewer values than a leaf has, until more of this tensor come

    def put(self, values: Tensor) -> None:
        """More values of one tensor; they may change afterwards."""
        from ..core.leaf_kernels import finish, leaf_accumulators

        if self._rest is not None:
            values = torch.cat((self._rest, values))
        whole = values.numel() - values.numel() % LEAF_VALUES
        if whole:
            made = leaf_accumulators(values[:whole])
            self._hasher.promise(lambda: finish(made.cpu().numpy()))
        self._rest = values[whole:].clone() if whole < values.numel() else None

    def flush(self) -> None:
        """Of this tensor there are no more."""
        rest, self._rest = self._rest, None
        if rest is not None:
            host = torch.empty(rest.shape, dtype=rest.dtype, pin_memory=True)
            host.copy_(rest, non_blocking=True)
            arrived = _event()
            arrived.record(torch.cuda.current_stream(rest.device))
            self._hasher.promise(lambda: _leaf_after(arrived, host))


def _leaf_after(arrived: torch.cuda.Event, values: Tensor) -> bytes:
    arrived.synchronize()
    return leaves_of(bytes_of(values))


@cache
def hashes_there(device: torch.device) -> bool:
    """Can leaves be hashed on this device? Triton must be there, and its kernels must make the hash that the host
    makes: both are tried once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    values = torch.arange(2 * LEAF_VALUES, dtype=torch.float32)
    found = TreeHasher()
    try:
        DeviceLeaves(found).put(values.to(device))
        is_right = found.hexdigest() == tree_hash([bytes_of(values)])
    except Exception as error:  # noqa: BLE001 - a compiler that does not work here must not stop a training
        log.warning("anchors on %s are hashed on the host: %s", device, error)
        return False
    if not is_right:
        log.warning("anchors on %s are hashed on the host: Triton's kernels make another hash there", device)
    return is_right


def warm_up(recipes: Iterable[str], devices: Iterable[torch.device]) -> None:
    """Have compiled, before a training begins, what these recipes need on these devices. A training that came upon it
    in the middle of an exchange would stand still for the seconds that the compiler takes."""
    codecs = {rule.codec for recipe in recipes for rule in Recipe.parse(recipe).rules}
    for device in sorted(set(devices), key=str):
        hashes_there(device)
        for codec in codecs:
            if isinstance(codec, ScaledCodec):
                codec.prepare(device)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
