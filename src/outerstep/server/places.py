"""Where a fragment's blocks are worked on: in host memory by a team of threads, or on a GPU by few large kernels.

What is done to a block is written once (store.py, publish.py) and gives the same bits in both places; a place says how
large blocks are, who goes through them, where their memory lies, and how bytes of the host get there.

On a GPU a block is 64 MiB and the blocks follow each other. Each is done as a whole or not at all: what it is about to
change is copied first, and if the memory does not suffice in the middle it is put back (`DeviceFull`). Then somebody
moves everything to the host, and goes on there with that very block: no round is lost (docs/adr/0047-…md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.robust.streams import ShareBlocks, one_by_one
from ..core.state import bytes_of
from ..digest import LEAF_VALUES, leaves_of
from ..errors import ConfigError
from ..pool import private_memory, watched
from ..threads import ThreadTeam
from . import blocks as cutting
from .blocks import Block

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
DEVICE_BLOCK_VALUES = 1 << 24  # 64 MiB of fp32: the launches cost little beside the arithmetic
assert DEVICE_BLOCK_VALUES % LEAF_VALUES == 0
FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
STAGES = 2  # pinned memory that is filled while the other travels
WORKING_BLOCKS = 24  # what the work on a block needs beside the fragment, in blocks: what is kept of it, and scratch
SPARE_BYTES = 512 << 20  # left to others on the device, and to what is not counted

BlockWork = Callable[[Block, Tensor], Any]


@dataclass(frozen=True)
class Pass:
    """One pass over all blocks of a fragment: `work` on each, with scratch memory for `rows` blocks, then `seal` in the
    order of the blocks, with the results. `touched`: the memory that `work` changes in place in a block."""

    work: BlockWork
    seal: Callable[[Block, Any], None] = lambda block, made: None
    touched: Callable[[Block], Sequence[Tensor]] = lambda block: ()
    rows: int = 1


class DeviceFull(Exception):
    """The memory of the device did not suffice. `done`: so many blocks are as they should be, the others untouched."""

    def __init__(self, done: int, why: str) -> None:
        super().__init__(why)
        self.done = done


class Workplace(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """By threads, in the memory that is sent and received?"""

    @property
    def block_values(self) -> int: ...

    @property
    def share(self) -> ShareBlocks:
        """Who goes through blocks that somebody else has cut."""

    def memory(self, numel: int) -> Tensor:
        """fp32, zeros."""

    def bring(self, data: Tensor) -> Tensor:
        """Bytes in host memory, to where they are worked on."""

    def go(self, blocks: Sequence[Block], prepare: Callable[[], Pass]) -> None:
        """A pass over these blocks. It waits for the end: what was read may change then, and what was written may be
        read. (Under no_grad.)"""

    def chosen(self) -> AbstractContextManager[object]:
        """In it, kernels are launched there."""

    def wait(self) -> None:
        """Until everything that was begun here is done."""


class HostBlocks:
    """All threads of a team take part, each at blocks of its own that fit its cache."""

    device = HOST
    is_host = True

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self.lend_memory: Callable[[int], memoryview] = private_memory

    @property
    def share(self) -> ShareBlocks:
        return self.team.share

    @property
    def block_values(self) -> int:
        return cutting.BLOCK_VALUES

    def memory(self, numel: int) -> Tensor:
        return torch.frombuffer(self.lend_memory(max(4 * numel, 4)), dtype=torch.float32)[:numel]

    def bring(self, data: Tensor) -> Tensor:
        return data

    def go(self, blocks: Sequence[Block], prepare: Callable[[], Pass]) -> None:
        one, size = prepare(), self.block_values
        self.team.share(blocks, lambda: _room(one, size, HOST), one.work, one.seal)

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        """Threads that have shared something are done."""


class DeviceBlocks:
    """One after the other, on a device. (Of a CPU too: then it is the same arithmetic without a GPU, for tests.)"""

    is_host = False

    def __init__(self, device: torch.device, block_values: int = DEVICE_BLOCK_VALUES) -> None:
        self.device, self.block_values = torch.empty(0, device=device).device, block_values  # with its number
        self.share: ShareBlocks = one_by_one
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []
        if self.device.type == "cuda":
            hashes_on(self.device)  # its kernels are compiled now, and not in the middle of the first round

    def memory(self, numel: int) -> Tensor:
        return torch.zeros(numel, device=self.device)

    def bring(self, data: Tensor) -> Tensor:
        if self.device.type == "cpu" or not data.numel():
            return data.to(self.device)
        if data.is_pinned():
            return data.to(self.device, non_blocking=True)
        stage, arrived = self._stage(data.numel())
        stage.copy_(data)
        brought = stage.to(self.device, non_blocking=True)
        arrived.record(torch.cuda.current_stream(self.device))
        return brought

    def go(self, blocks: Sequence[Block], prepare: Callable[[], Pass]) -> None:
        done = 0
        try:
            with self.chosen():
                one = prepare()
                room = _room(one, max((block.count for block in blocks), default=0), self.device)
                for block in blocks:
                    self._whole_or_not(block, room, one)
                    done += 1
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceFull(done, str(error)) from error
        finally:
            self.wait()

    def chosen(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def _whole_or_not(self, block: Block, room: Tensor, one: Pass) -> None:
        touched = one.touched(block)
        kept = [values.clone() for values in touched]
        try:
            made = one.work(block, room)
        except Exception:
            for values, before in zip(touched, kept, strict=True):
                values.copy_(before)
            raise
        one.seal(block, made)

    def _stage(self, size_bytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """The one that was used longest ago."""
        stage, arrived = self._stages.pop(0) if len(self._stages) == STAGES else (None, None)
        if arrived is not None:
            arrived.synchronize()
        if stage is None or arrived is None or stage.numel() < size_bytes:
            stage = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stages.append((stage, arrived))
        return stage[:size_bytes], arrived


def _room(one: Pass, values: int, device: torch.device) -> Tensor:
    return torch.empty((one.rows, values) if one.rows > 1 else (values,), device=device)


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own exception, or what a kernel's launch says of it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


# --- what is looked at in θ: is it finite, and its leaves -----------------------------------------------------------


def leaves_on(values: Tensor) -> Callable[[], bytes]:
    """The leaves of an anchor's hash of these values of one tensor, from a border between leaves on. On a GPU they are
    begun there, and asked for when everything is; the values must not change before."""
    if values.device.type == "cpu":
        made = leaves_of(bytes_of(values))
        return lambda: made
    if not hashes_on(values.device):
        return lambda: leaves_of(bytes_of(values))
    from ..core.leaf_kernels import finish, leaf_accumulators

    whole = values.numel() - values.numel() % LEAF_VALUES
    found = leaf_accumulators(values[:whole]) if whole else None
    return lambda: b"".join(
        [
            finish(found.cpu().numpy()) if found is not None else b"",
            leaves_of(bytes_of(values[whole:])) if whole < values.numel() else b"",
        ]
    )


@cache
def hashes_on(device: torch.device) -> bool:
    """Can leaves be hashed there? Triton must be there, and its kernels must make the hash that the host makes: both
    are tried once."""
    if find_spec("triton") is None:
        return False
    values = torch.arange(2 * LEAF_VALUES, dtype=torch.float32)
    try:
        from ..core.leaf_kernels import finish, leaf_accumulators

        with torch.cuda.device(device):
            found = finish(leaf_accumulators(values.to(device)).cpu().numpy())
    except Exception as error:  # noqa: BLE001 - a compiler that does not work here must not stop a run
        log.warning("anchors on %s are hashed on the host: %s", device, error)
        return False
    if found != leaves_of(bytes_of(values)):
        log.warning("anchors on %s are hashed on the host: Triton's kernels make another hash there", device)
        return False
    return True


# --- which device, and what there is of it --------------------------------------------------------------------------


def device_of(name: str) -> torch.device | None:
    """What the setting names; None: the host. Refused, if there is no such device here."""
    if name == "cpu":
        return None
    device = torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device is {name!r}, and torch finds {count or 'no'} CUDA device{'' if count == 1 else 's'} here; leave "
            "device out (--device), or start the server on a machine that has one"
        )
    return device


def free_bytes(device: torch.device) -> int:
    """What may be taken there: what nobody has, and what torch holds in this process and does not use."""
    if device.type == "cpu":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def working_bytes(*, is_plain: bool) -> int:
    """What the work on blocks takes beside the fragments. `is_plain`: contributions are added as they come; other rules
    have a block of each at once, and several forms of it."""
    rows = 1 if is_plain else 4
    return rows * WORKING_BLOCKS * 4 * DEVICE_BLOCK_VALUES + SPARE_BYTES


def release(device: torch.device) -> None:
    """What torch holds there and does not use goes back to everybody."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def pinned_memory(size_bytes: int) -> memoryview:
    """As `private_memory`, of a kind that a GPU reads and writes by itself."""
    return pinned(private_memory(max(size_bytes, 1)))[:size_bytes]


def pinned(memory: memoryview) -> memoryview:
    """The same memory, for as long as views of what comes back live; where it cannot be pinned, it is only slower."""
    if not torch.cuda.is_available():
        return memory
    address, runtime = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = int(runtime.cudaHostRegister(address, len(memory), FOR_ALL_DEVICES))
    if refused:
        log.warning("%d bytes cannot be pinned (CUDA error %d): copies to the GPU are slower", len(memory), refused)
        try:
            torch.zeros(1, device="cuda")  # the next kernel is told of that error, and then it is forgotten
        except RuntimeError as error:
            log.debug("%s", error)
        return memory
    return watched(memory, lambda: runtime.cudaHostUnregister(address))


__all__ = [
    "DEVICE_BLOCK_VALUES",
    "HOST",
    "DeviceBlocks",
    "DeviceFull",
    "HostBlocks",
    "Pass",
    "Workplace",
    "device_of",
    "free_bytes",
    "hashes_on",
    "is_out_of_memory",
    "leaves_on",
    "pinned",
    "pinned_memory",
    "release",
    "working_bytes",
]
