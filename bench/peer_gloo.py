"""Two processes average their values by `torch.distributed.all_reduce` over gloo. Started by peers.py."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from harness import HOST, Actor
from peer_program import run_rounds


class Rank:
    def __init__(self, rank: int, port: int, numel: int) -> None:
        self._store = dist.TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
        self._rank = rank
        self._values = torch.full((numel,), float(rank))

    def port(self) -> int:
        return self._store.port

    def join(self) -> None:
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=2, timeout=timeout)

    def train(self) -> None:
        """Nothing: whatever the values are, they take the same time."""

    def exchange(self) -> None:
        dist.all_reduce(self._values)
        self._values.div_(2)

    def digest(self) -> float:
        return float(self._values.sum())

    def close(self) -> None:
        dist.destroy_process_group()


def main(numel: int, rounds: int) -> list[float]:
    with Actor(Rank, 0, 0, numel) as first, Actor(Rank, 1, first.ask("port"), numel) as second:
        return run_rounds([first, second], rounds)


if __name__ == "__main__":
    from peer_program import started_by_peers

    started_by_peers(main)
