"""PyTorch's DistributedSampler without a world size: the same constructor, `set_epoch` and `len`, and the run's leases.

    from outerstep.data import ElasticSampler as DistributedSampler, LeasedLoader as DataLoader

    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    with outerstep.attach(model, optimizer, data=sampler):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

Where nothing leases data, `num_replicas` and `rank` make fixed shards of it, as PyTorch
does:

    positions  rank, rank + num_replicas, rank + 2·num_replicas, …  of the epoch's order

torchft's formula is the case of

    num_replicas = replicas in a group · groups        rank = rank in its group + replicas in a group · group

Fixed shards are lossy where members come and go, as torchft says of its own: what a dead member would have trained is
not trained in that epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from ..errors import ConfigError
from .order import keys, permuted
from .sampler import LeasedSampler


class ElasticSampler(LeasedSampler):
    """`dataset`, `shuffle`, `seed`: as PyTorch's. `num_replicas`, `rank`, `drop_last`: of fixed shards, and not looked
    at where the run leases. `settings`: as of `LeasedSampler`; `epochs` is 0, without end: the loop says how many."""

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed, **{"epochs": 0, **settings})
        if (num_replicas is None) != (rank is None):
            raise ConfigError(f"num_replicas and rank belong together, got {num_replicas} and {rank}")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ConfigError(f"rank must be from 0 to {num_replicas - 1}, got {rank}")
        self._shard = (rank, num_replicas) if rank is not None and num_replicas is not None else None
        self._drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Of fixed shards: their order is drawn from it. A run that leases knows itself which epoch it is."""
        self.epoch = epoch

    @property
    def _is_fixed(self) -> bool:
        return self._leased is None and self._shard is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions()) if self._is_fixed else super().__iter__()

    def __len__(self) -> int:
        """Of a whole epoch where the run leases; else of the shard."""
        if self._leased is None and self._shard is not None:
            return self._shard_size(self._shard[1])
        return self.spec.samples

    def delivered(self, samples: int, *, trained: bool = True) -> None:
        if not self._is_fixed:
            super().delivered(samples, trained=trained)

    def share(self, ahead: int) -> int | None:
        return None if self._is_fixed else super().share(ahead)

    def _shard_size(self, num_replicas: int) -> int:
        """The same for all: some samples are left out, or drawn twice."""
        samples = self.spec.samples
        return samples // num_replicas if self._drop_last else -(-samples // num_replicas)

    def _positions(self) -> list[int]:
        assert self._shard is not None
        rank, num_replicas = self._shard
        positions = rank + num_replicas * np.arange(self._shard_size(num_replicas), dtype=np.uint64)
        positions = positions.astype(np.uint64) % np.uint64(self.spec.samples)
        if self.spec.shuffle:
            positions = permuted(positions, self.spec.samples, keys(self.spec.seed, self.epoch))
        return [int(position) for position in positions]
