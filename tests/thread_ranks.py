"""A group without processes: its ranks are threads of the test, and confer over a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from outerstep.topology.group.ranks import Ranks
from support import in_threads


class ThreadRanks(Ranks):
    """Carries the same bytes as the real one, and so the same failures."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size = rank, meeting.parties
        self._meeting = meeting
        self._table = table

    def spread(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            values = self._exchange(tensor.clone())
            tensor.copy_(values[0])

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        everybodys = self._exchange([tensor.clone() for tensor in outgoing])
        arrived = [theirs[self.rank] for theirs in everybodys]
        assert [tensor.numel() for tensor in arrived] == list(sizes)
        return arrived

    def _broadcast(self, said: bytes) -> bytes:
        return bytes(self._exchange(said)[0])

    def _all_gather(self, said: bytes) -> list[bytes]:
        return self._exchange(said)

    def _exchange(self, mine: Any) -> list[Any]:
        self._table[self.rank] = mine
        self._meeting.wait(30)
        everybody = list(self._table)
        self._meeting.wait(30)
        return everybody


def in_ranks(size: int, job: Callable[[Ranks], Any]) -> list[Any]:
    """The same job on every rank; the results in the order of the ranks, or the first exception."""
    meeting, table = threading.Barrier(size), [None] * size
    ranks = [ThreadRanks(rank, meeting, table) for rank in range(size)]
    return in_threads(*[lambda r=r: job(r) for r in ranks])


def failures(size: int, job: Callable[[Ranks], Any]) -> Sequence[BaseException]:
    """What each rank raised; fails if one did not."""

    def caught(ranks: Ranks) -> BaseException:
        try:
            job(ranks)
        except Exception as error:  # noqa: BLE001 - it is what was asked for
            return error
        raise AssertionError(f"rank {ranks.rank} raised nothing")

    return in_ranks(size, caught)
