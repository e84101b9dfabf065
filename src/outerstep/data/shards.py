"""Leased files: a unit is a whole shard, and nobody need know beforehand how many samples are in it.

    data = outerstep.data.LeasedShards(files, epochs=3)
    loader = outerstep.data.LeasedStream(files, data, read=read_jsonl, batch_size=32, num_workers=4)
    with outerstep.attach(model, optimizer, data=data):
        for epoch in range(3):
            for batch in loader:
                ...

    shards ──leased──▶ loader processes read them whole ──▶ samples, shard after shard ──▶ batches

`read(shard)` yields the samples of one shard; it runs in a loader process. A shard is whatever `read` understands: a
path, an address, or (path, begin, end) where files are too large to be held whole. Without `read` a shard is itself an
iterable of samples (hugging_face.py). A resumed worker reads the shard it
was in once more, and leaves out the samples that it has trained; so `read` must yield the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from ..errors import ConfigError
from .sampler import LeasedSampler

Read = Callable[[Any], Iterable[Any]]


class LeasedShards(LeasedSampler):
    """Shards, as the run leases them to this worker. Settings as of `LeasedSampler`; a unit is one shard."""

    def __init__(self, shards: Sequence[Any], **settings: Any) -> None:
        if settings.pop("unit_samples", 1) != 1:
            raise ConfigError("a unit of shards is one shard: leave unit_samples out")
        super().__init__(shards, unit_samples=1, **settings)

    def __iter__(self) -> Iterator[int]:
        return self._worker_data.shards(self.spec.name)

    def arrived(self, samples: int) -> int:
        """The next shard that was drawn has so many samples. Returns how many of them to leave out: they were trained
        before a restart, or before a loop was left."""
        return self._worker_data.measured(self.spec.name, samples)


class _WholeShards(Dataset[list[Any]]):
    """Whole shards, for the loader's processes."""

    def __init__(self, shards: Sequence[Any], read: Read) -> None:
        self._shards, self._read = shards, read

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int) -> list[Any]:
        return list(self._read(self._shards[index]))


class LeasedStream:
    """Batches of the samples in leased shards. `settings`: those of PyTorch's DataLoader that are about its processes
    (num_workers, prefetch_factor, timeout, …); each process holds one shard, and `prefetch_factor` of them wait."""

    def __init__(
        self,
        shards: Sequence[Any],
        data: LeasedShards,
        *,
        read: Read = iter,
        batch_size: int = 1,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **settings: Any,
    ) -> None:
        if not isinstance(data, LeasedShards):
            raise ConfigError(f"a stream of shards needs LeasedShards, got {type(data).__name__}")
        if len(shards) != data.spec.samples:
            raise ConfigError(f"{data.spec.samples} shards are leased, and {len(shards)} are to be read")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be ≥ 1, got {batch_size}")
        if settings.get("num_workers"):
            settings = {"prefetch_factor": 1, **settings}
        # batch_size None: an item is a shard, and stays one
        self._loader = DataLoader(
            _WholeShards(shards, read), batch_size=None, sampler=data, collate_fn=_as_it_is, **settings
        )
        self._data, self._collate = data, collate_fn
        self._batch_size, self._drop_last = batch_size, drop_last

    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for samples in self._loader:
            for sample in samples[self._data.arrived(len(samples)) :]:
                batch.append(sample)
                if len(batch) == self._batch_size:
                    self._data.delivered(len(batch))
                    yield self._collate(batch)
                    batch = []
        if batch:
            self._data.delivered(len(batch), trained=not self._drop_last)
            if not self._drop_last:  # else what was too little for a batch is passed over: it goes with the next step
                yield self._collate(batch)


def _as_it_is(samples: list[Any]) -> list[Any]:
    return samples
