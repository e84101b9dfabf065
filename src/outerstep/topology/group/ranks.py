"""The processes of one group, and how they confer.

They train in step, so they meet at the same points in the same order; every method here is such a point and is called
by all ranks, from the training thread. What one rank raises there, all raise: nobody is left waiting for a process that
has given up. Values travel as msgspec-encoded bytes, checked against their type on arrival; nothing is unpickled.

A process group of its own on gloo carries them: it works beside NCCL, and nothing of the user's is disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import OuterstepError, Refused, WorkerError

T = TypeVar("T")

# A rank that dies closes its connections, which the others see at once. This is only for one that hangs: long enough
# for rank 0 to wait for a server out of reach, or for the slowest download of a large model.
MEETING_TIMEOUT = timedelta(hours=12)
LARGEST_MESSAGE = 1 << 30  # bytes


class Failure(msgspec.Struct, frozen=True):
    """An exception on its way to the other ranks."""

    kind: str
    message: str
    hint: str = ""
    retry_after_s: float = 0.0
    cause: Failure | None = None


class Ranks:
    """All processes of the job. Rank 0 speaks for them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def find(cls) -> Ranks | None:
        """The job this process was started in, if it is one of several (torchrun) and has begun to talk to them."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=MEETING_TIMEOUT)
        assert group is not None
        return cls(group)

    def tell(self, make: Callable[[], T], kind: type[T]) -> T:
        """Rank 0 makes it, everybody gets it."""
        value: list[T] = []
        error: BaseException | None = None
        said = b""
        if self.rank == 0:
            said, error = _attempt(make, kind, value)
        said = self._broadcast(said)
        return value[0] if value else _open(said, kind, error)

    def gather(self, make: Callable[[], T], kind: type[T]) -> list[T]:
        """Everybody makes one, everybody gets all, in the order of the ranks. If several fail, the lowest rank's
        failure is the group's: all must take the same turn afterwards."""
        value: list[T] = []
        said, error = _attempt(make, kind, value)
        everything = self._all_gather(said)
        for rank, one in enumerate(everything):
            if one[:1] == _FAILED:
                _open(one, kind, error if rank == self.rank else None)
        return [value[0] if r == self.rank else _open(one, kind, None) for r, one in enumerate(everything)]

    def check(self, make: Callable[[], T]) -> T:
        """Everybody makes its own and keeps it, if nobody failed."""
        made: list[T] = []
        self.gather(lambda: made.append(make()), type(None))
        return made[0]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into everybody's tensors, which are contiguous and in host memory."""
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, src=0, group=self._group)

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Bytes for each rank, of which we expect so many from each. What we have for ourselves is handed over."""
        arrived = [_room(size) for size in sizes]
        arrived[self.rank] = outgoing[self.rank]
        calls = []
        for other in range(self.size):
            if other != self.rank and sizes[other]:
                calls += [dist.irecv(part, src=other, group=self._group) for part in _messages(arrived[other])]
            if other != self.rank and outgoing[other].numel():
                calls += [dist.isend(part, dst=other, group=self._group) for part in _messages(outgoing[other])]
        for call in calls:
            assert call is not None
            call.wait()
        return arrived

    def _broadcast(self, said: bytes) -> bytes:
        length = torch.tensor([len(said)])
        dist.broadcast(length, src=0, group=self._group)
        data = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else _room(int(length))
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def _all_gather(self, said: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(said)]), group=self._group)
        longest = max(int(length) for length in lengths)
        own = torch.frombuffer(bytearray(said.ljust(longest, b"\0")), dtype=torch.uint8)
        heard = [_room(longest) for _ in range(self.size)]
        dist.all_gather(heard, own, group=self._group)
        return [data[: int(length)].numpy().tobytes() for data, length in zip(heard, lengths, strict=True)]


_SAID, _FAILED = b"\0", b"\1"


def _attempt(make: Callable[[], T], kind: type[T], value: list[T]) -> tuple[bytes, BaseException | None]:
    """What to send: the value (kept in `value`), or why there is none."""
    try:
        value.append(make())
        return _SAID + msgspec.msgpack.encode(value[0]), None
    except BaseException as error:  # noqa: BLE001 - the others must hear of it; it is raised again in _open()
        value.clear()
        return _FAILED + msgspec.msgpack.encode(describe(error)), error


def _open(said: bytes, kind: type[T], own: BaseException | None) -> T:
    if said[:1] == _SAID:
        return msgspec.msgpack.decode(said[1:], type=kind)
    raise own if own is not None else rebuild(msgspec.msgpack.decode(said[1:], type=Failure))


def describe(error: BaseException) -> Failure:
    cause = describe(error.__cause__) if error.__cause__ is not None else None
    if isinstance(error, Refused):
        return Failure(type(error).__name__, error.message, error.hint, error.retry_after_s, cause)
    return Failure(type(error).__name__, str(error), cause=cause)


def rebuild(failure: Failure) -> OuterstepError:
    """The same class on every rank; what is none of ours becomes a WorkerError."""
    kind = _family(OuterstepError).get(failure.kind)
    if kind is not None and issubclass(kind, Refused):
        error: OuterstepError = kind(failure.message, hint=failure.hint, retry_after_s=failure.retry_after_s)
    elif kind is not None:
        error = kind(failure.message)
    else:
        error = WorkerError(f"another process of the group failed: {failure.kind}: {failure.message}")
    if failure.cause is not None:
        error.__cause__ = rebuild(failure.cause)
    return error


def _family(of: type[OuterstepError]) -> dict[str, type[OuterstepError]]:
    found = {of.__name__: of}
    for child in of.__subclasses__():
        found |= _family(child)
    return found


def _messages(data: Tensor) -> list[Tensor]:
    return [data[begin : begin + LARGEST_MESSAGE] for begin in range(0, data.numel(), LARGEST_MESSAGE)]


def _room(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)
