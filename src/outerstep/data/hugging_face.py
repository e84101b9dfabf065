"""The shards of a Hugging Face `IterableDataset`, to be leased. (A `datasets.Dataset` has an index: LeasedSampler.)

    rows = datasets.load_dataset(…, streaming=True)
    shards = outerstep.data.DatasetShards(rows)
    data = outerstep.data.LeasedShards(shards, epochs=3)
    loader = outerstep.data.LeasedStream(shards, data, batch_size=32, num_workers=4)

A dataset that is shuffled with a fixed seed yields the same each time, and so may be leased. One that is drawn again
each time may not.

In a loader's process such a dataset yields only the part of its rows that is meant for this process. A leased shard is
this process's alone. So it is read by batches, which are not divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

from fsspec.asyn import reset_lock  # type: ignore[import-untyped]  # torch needs it, too
from torch.utils.data import get_worker_info

from ..errors import ConfigError

ROWS_AT_ONCE = 256


class Batched(Protocol):
    """Columns of so many rows at a time."""

    def iter(self, batch_size: int) -> Iterable[Mapping[str, Sequence[Any]]]: ...


class Shardable(Protocol):
    """As `datasets.IterableDataset`. The library is not imported here."""

    @property
    def num_shards(self) -> int: ...

    def shard(self, num_shards: int, index: int) -> Batched: ...


class DatasetShards(Sequence[Iterable[Any]]):
    """Shard i is an iterable of its rows. Loader processes get the dataset, and open the shards by themselves."""

    def __init__(self, dataset: Shardable) -> None:
        if not isinstance(getattr(dataset, "num_shards", None), int) or not hasattr(dataset, "shard"):
            raise ConfigError(
                f"DatasetShards needs a datasets.IterableDataset, got {type(dataset).__name__}; a dataset with an "
                "index is leased by LeasedSampler as it stands"
            )
        self._dataset, self._shards = dataset, dataset.num_shards

    def __len__(self) -> int:
        return self._shards

    @overload
    def __getitem__(self, index: int) -> Iterable[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Iterable[Any]]: ...

    def __getitem__(self, index: int | slice) -> Iterable[Any] | list[Iterable[Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._shards))]
        if not 0 <= index < self._shards:
            raise IndexError(f"shard {index} of {self._shards}")
        return self._rows(self._dataset.shard(num_shards=self._shards, index=index))

    @staticmethod
    def _rows(shard: Batched) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            reset_lock()  # of remote files: the fork may have copied it in the wrong moment
        for columns in shard.iter(batch_size=ROWS_AT_ONCE):
            for i in range(len(next(iter(columns.values()), ()))):
                yield {name: column[i] for name, column in columns.items()}
