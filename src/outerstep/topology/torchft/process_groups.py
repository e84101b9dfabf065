"""What carries bytes between the replicas of a torchft run: process groups that its Manager sets up for each quorum.

Words (what each brings, hashes) always travel over gloo in host memory; values over the same gloo group, or over NCCL
from GPU to GPU. Whatever breaks here raises RuntimeError, and is a round that failed: the Manager's vote says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

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
TAG = 0


class ProcessGroups:
    """In the shape that torchft.Manager configures. `members`: the ranks of the quorum that `swap` counts in."""

    def __init__(self, backend: Backend, device: torch.device, timeout_s: float) -> None:
        """`device`: where the model is. Over NCCL values stay there; else a GPU's travel by way of pinned memory."""
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = 0, 1
        self.members: Sequence[int] = (0,)
        self.memory = Memory(KEPT)
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.pinned = backend == "gloo" and device.type == "cuda"
        self.bytes_sent = self.bytes_received = 0
        self._words = torchft.ProcessGroupGloo(timeout=timeout)
        self._values = torchft.ProcessGroupNCCL(timeout=timeout) if backend == "nccl" else self._words
        rooms = Rooms(self.device, self.memory, pinned=self.pinned)
        self.take, self.give_back = rooms.take, rooms.give_back

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
        for name, group in {"words": self._words, "values": self._values}.items():
            if name == "words" or group is not self._words:
                # Without `global_ranks`: they only name ranks in torch's flight recorder, and two replicas whose names
                # end with the same digits would have the same.
                group.configure(
                    f"{store_addr}/{name}", replica_id, rank, world_size, quorum_id, group_rank, group_world_size
                )
        self.rank, self.size = rank, world_size
        self.members = range(world_size)

    def errored(self) -> Exception | None:
        error: Exception | None = self._values.errored()
        return error

    def drop(self) -> None:
        """Whoever waits for this replica there is not to wait any longer; the next quorum brings new groups."""
        for group in {self._words, self._values}:
            group.abort(errored=False)

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
