"""What carries bytes between the ranks of a run without a server: a process group that nothing else uses.

Point-to-point operations, so that a connection that breaks names the rank at its other end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PeerLost
from ..memory import KEPT, Memory, Rooms
from .peers import Peers

SPREAD_BYTES = 64 << 20  # of a whole anchor on its way through a GPU
LEAST_TIMEOUT_S = 300.0  # of an operation: who is dead shows by its pulse long before


class Links:
    """On gloo (host memory) or NCCL (a GPU's); counts the bytes that were handed to either. One thread speaks."""

    def __init__(
        self, group: dist.ProcessGroup, peers: Peers, device: torch.device, memory: Memory, *, pinned: bool = False
    ) -> None:
        """`pinned`: host memory is to be read by a GPU."""
        self.device, self.memory, self.pinned = device, memory, pinned
        self.bytes_sent = self.bytes_received = 0
        self._group, self._peers = group, peers
        rooms = Rooms(device, memory, pinned=pinned)
        self.take, self.give_back = rooms.take, rooms.give_back

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        """To each rank of `out` its bytes, from each rank of `into` its own; what goes to one rank comes in order."""
        ops = [dist.P2POp(dist.isend, data, rank, self._group) for rank, data in out if data.numel()]
        ops += [dist.P2POp(dist.irecv, data, rank, self._group) for rank, data in into if data.numel()]
        if not ops:
            return
        self.bytes_sent += sum(data.nbytes for _, data in out)
        self.bytes_received += sum(data.nbytes for _, data in into)
        ranks = [op.peer for op in ops]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._peers.lost(ranks[0], error) from error
        for rank, work in zip(ranks, works, strict=False):  # NCCL has one for all
            try:
                work.wait()
            except RuntimeError as error:
                raise self._peers.lost(rank, error) from error

    def spread(self, data: Tensor) -> None:
        """Rank 0's bytes into everybody's, which are in host memory."""
        for begin in range(0, data.numel(), SPREAD_BYTES):
            here = data[begin : begin + SPREAD_BYTES]
            there = here.to(self.device)
            try:
                dist.broadcast(there, src=0, group=self._group)
            except RuntimeError as error:
                raise self._peers.lost(0, error) from error
            if there is not here:
                here.copy_(there)


def make_links(peers: Peers, tensors: Mapping[str, Tensor], timeout_s: float) -> Links:
    """NCCL if the job has it and every rank has its model on a GPU; else gloo."""
    devices = {tensor.device for tensor in tensors.values()}
    on_gpu = all(device.type == "cuda" for device in devices) and len(devices) == 1
    wanted = b"nccl" if on_gpu and "nccl" in dist.get_backend_config() else b"gloo"
    backend = "nccl" if set(peers.exchange("links", wanted)) == {b"nccl"} else "gloo"
    try:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=max(timeout_s, LEAST_TIMEOUT_S)))
    except RuntimeError as error:
        raise PeerLost(f"the ranks could not connect to each other over {backend}: {error}") from error
    assert group is not None
    pinned = any(device.type == "cuda" for device in devices)
    device = devices.pop() if backend == "nccl" else torch.device("cpu")
    return Links(group, peers, device, Memory(KEPT), pinned=pinned)


__all__ = ["Links", "make_links"]
