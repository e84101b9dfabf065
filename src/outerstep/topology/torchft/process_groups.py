"""What carries bytes between the replicas of a torchft run: process groups that its Manager sets up for each quorum.

Words (what each brings, hashes) always travel over gloo in host memory; values over the same gloo group, or over NCCL
from GPU to GPU. If that is left open ("auto"), the replicas of each quorum decide when they have told each other what
they can speak (state.py), and only then is there a group for NCCL. Whatever breaks here raises RuntimeError, and is a
round that failed: the Manager's vote says so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torchft
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
    Work,
)

from ..payload import KEPT, Memory, Rooms

Backend = Literal["gloo", "nccl"]
WantedBackend = Literal["gloo", "nccl", "auto"]
TAG = 0


def place_of(device: torch.device) -> str:
    """The GPU, on its host, as NCCL tells them apart: two replicas on one cannot use it. "" for a CPU."""
    if device.type != "cuda":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host}:{torch.cuda.get_device_properties(device).uuid}"


class ProcessGroups:
    """In the shape that torchft.Manager configures. `members`: the ranks of the quorum that `swap` counts in."""

    def __init__(self, backend: WantedBackend, device: torch.device, timeout_s: float) -> None:
        """`device`: where the model is. Over NCCL values stay there; else a GPU's travel by way of pinned memory."""
        self._timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = 0, 1
        self.members: Sequence[int] = (0,)
        self.memory = Memory(KEPT)
        self.is_open, self.home = backend == "auto", device
        self.bytes_sent = self.bytes_received = 0
        self._words = torchft.ProcessGroupGloo(timeout=self._timeout)
        self._nccl: Any = self._make_nccl() if backend == "nccl" else None
        self._rooms: dict[torch.device, Rooms] = {}
        self._configure: Callable[[Any, str], None] | None = None  # a group of this name, for the present quorum
        self._speak("nccl" if backend == "nccl" else "gloo")

    def _make_nccl(self) -> Any:
        return torchft.ProcessGroupNCCL(timeout=self._timeout)

    def _speak(self, backend: Backend) -> None:
        self.backend = backend
        self.device = self.home if backend == "nccl" else torch.device("cpu")
        self.pinned = backend == "gloo" and self.home.type == "cuda"
        self._values = self._nccl if backend == "nccl" else self._words
        if self.device not in self._rooms:
            self._rooms[self.device] = Rooms(self.device, self.memory, pinned=self.pinned)
        self.take = self._rooms[self.device].take

    def give_back(self, data: Tensor) -> None:
        for rooms in self._rooms.values():
            rooms.give_back(data)

    def settle(self, backend: Backend) -> None:
        """What the replicas of this quorum have decided, if it was left open to them. Each of them, or none."""
        if not self.is_open:
            return
        if backend == "nccl":
            assert self._configure is not None
            self._nccl = self._nccl or self._make_nccl()
            self._configure(self._nccl, "values")
        self._speak(backend)

    def here(self, data: Tensor) -> Tensor:
        """Where it travels from in this quorum; it may have been written for another."""
        return data if data.device.type == self.device.type else data.to(self.device)

    # --- what the Manager asks for --------------------------------------------------------------------------------

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        def configure(group: Any, name: str) -> None:
            # Without `global_ranks`: they only name ranks in torch's flight recorder, and two replicas whose names
            # end with the same digits would have the same.
            group.configure(
                f"{store_addr}/{name}", replica_id, rank, world_size, quorum_id, group_rank, group_world_size
            )

        self._configure = configure
        configure(self._words, "words")
        if self._values is not self._words and not self.is_open:
            configure(self._values, "values")
        self.rank, self.size = rank, world_size
        self.members = range(world_size)

    def errored(self) -> Exception | None:
        values = self._words if self.is_open else self._values  # of the last quorum; the next one's is not made yet
        error: Exception | None = values.errored()
        return error

    def drop(self) -> None:
        """Whoever waits for this replica there is not to wait any longer; the next quorum brings new groups."""
        for group in {self._words, self._values}:
            group.abort(errored=False)
        if self.is_open:
            self._speak("gloo")

    # --- words ----------------------------------------------------------------------------------------------------

    def exchange(self, said: bytes, timeout_s: float) -> list[bytes]:
        """Everybody's few bytes, in the order of the quorum's ranks."""
        lengths = self._all_gather(torch.tensor([len(said)]), timeout_s)
        longest = max(int(length) for length in lengths)
        own = torch.frombuffer(bytearray(said.ljust(longest, b"\0")), dtype=torch.uint8)
        heard = self._all_gather(own, timeout_s)
        return [data[: int(length)].numpy().tobytes() for data, length in zip(heard, lengths, strict=True)]

    def _all_gather(self, own: Tensor, timeout_s: float) -> list[Tensor]:
        heard = [torch.empty_like(own) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._words.allgather([heard], [own], options).wait()
        return heard

    # --- values ---------------------------------------------------------------------------------------------------

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        """To each member of `out` its bytes, from each of `into` its own, both numbered as in `members`; what goes to
        one of them comes in order."""
        self.bytes_sent += sum(data.nbytes for _, data in out)
        self.bytes_received += sum(data.nbytes for _, data in into)
        if self.device.type == "cuda":
            self._swap_all_at_once(out, into)
            return
        works: list[Work] = [self._values.recv([data], self.members[r], TAG) for r, data in into if data.numel()]
        works += [self._values.send([data], self.members[r], TAG) for r, data in out if data.numel()]
        for work in works:
            work.wait()

    def _swap_all_at_once(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        """NCCL would wait in a circle if two GPUs first sent and then received: so one collective of the whole quorum,
        from one piece of memory to another."""
        sends, receives = (  # by rank of the quorum, what belongs to one in its order
            sorted(((self.members[r], data) for r, data in side), key=lambda one: one[0]) for side in (out, into)
        )
        outgoing, incoming = ([data for _, data in side] for side in (sends, receives))
        sent, received = (
            [sum(data.numel() for r, data in side if r == rank) for rank in range(self.size)]
            for side in (sends, receives)
        )
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        room = torch.empty(sum(received), dtype=torch.uint8, device=self.device)
        work = self._values.alltoall_base(room, torch.cat([nothing, *outgoing]), received, sent, AllToAllOptions())
        work.wait()
        pieces = room.split([data.numel() for data in incoming])  # type: ignore[no-untyped-call]
        for data, piece in zip(incoming, pieces, strict=True):
            data.copy_(piece)
