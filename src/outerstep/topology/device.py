"""Between a GPU and the host: encoded blocks come over beside the training, values to be hashed beside the arithmetic.

A copy between the two needs pinned host memory to run beside anything else. What is read from the model's weights is
read in the order of the training's own stream: once the encoders are queued there, training may go on and change them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..core.state import bytes_of
from ..digest import LEAF_VALUES, TreeHasher, leaves_of, tree_hash
from .payload import OutgoingFrame

log = logging.getLogger(__name__)

SLOTS = 2  # one block is encoded, or hashed, while another travels

Encode = Callable[[Tensor], None]
"""Writes the encoded bytes of one block."""


@dataclass
class Slot:
    """Memory on a GPU for one encoded block. `read`: its last copy has left."""

    data: Tensor
    read: torch.cuda.Event


class Ferry:
    """Blocks on a GPU: encoded there, then copied into the payload by a stream of its own, while the training's stream
    goes on with the next. A thread waits for each to arrive, and hashes it."""

    def __init__(self, payload: OutgoingFrame) -> None:
        self._payload = payload
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._slots: dict[torch.device, list[Slot]] = {}
        self._arrivals: queue.SimpleQueue[tuple[Slot | None, torch.cuda.Event, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._hash, name="outerstep-ferry", daemon=True).start()

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
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
