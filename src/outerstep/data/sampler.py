"""Leased data for PyTorch's DataLoader.

    data = outerstep.data.LeasedSampler(dataset, epochs=3)
    loader = outerstep.data.LeasedLoader(dataset, data, batch_size=32, num_workers=4)
    with outerstep.attach(model, optimizer, data=data):
        for epoch in range(3):
            for batch in loader:
                ...

Every worker of the run says the same, whatever its number: the run leases each its part, fast workers more than slow
ones, and what a worker did not finish goes to another. An epoch is over for a worker when nothing of it is left to
lease; the next `for` begins the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ConfigError, WorkerError
from ..types import Dataset as LeasedDataset
from .leased import LeasedData

UNITS = 1000  # of an epoch, unless somebody says otherwise
MOST_UNIT_SAMPLES = 1024


class LeasedSampler(Sampler[int]):
    """Samples of a dataset, as the run leases them to this worker.

    `name` tells the run's datasets apart. A unit, the smallest thing that is leased, has `unit_samples` samples (a
    thousandth of the dataset, unless you say otherwise). `shuffle`: each epoch has an order of its own, drawn from
    `seed`. `again=False`: no unit is ever leased twice, so what a dead worker held is lost. `dropped`: units whose
    steps were trained and given up are "spent", or trained "again". `fingerprint`: of the contents, if you have one;
    a worker with another one is refused."""

    def __init__(
        self,
        data: Sized | int,
        *,
        name: str = "train",
        epochs: int = 1,
        unit_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        again: bool = True,
        dropped: Literal["spent", "again"] = "spent",
        fingerprint: str = "",
    ) -> None:
        samples = data if isinstance(data, int) else len(data)
        if samples < 1:
            raise ConfigError(f"dataset {name!r} must have samples, got {samples}")
        if unit_samples is not None and unit_samples < 1:
            raise ConfigError(f"unit_samples must be ≥ 1, got {unit_samples}")
        if epochs < 0 or seed < 0:
            raise ConfigError(f"epochs and seed must be ≥ 0, got {epochs} and {seed}")
        self.spec = LeasedDataset(
            name=name,
            samples=samples,
            unit_samples=unit_samples or min(max(samples // UNITS, 1), MOST_UNIT_SAMPLES),
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            again=again,
            dropped=dropped,
            fingerprint=fingerprint,
        )
        self._leased: LeasedData | None = None

    def belongs_to(self, data: LeasedData | None) -> None:
        """Of the worker that trains it."""
        self._leased = data

    def __iter__(self) -> Iterator[int]:
        return self._worker_data.samples(self.spec.name)

    def __len__(self) -> int:
        """Of a whole epoch: nobody knows beforehand how much of it this worker will train."""
        return self.spec.samples

    def delivered(self, samples: int) -> None:
        """So many samples more have come out of the loader, and are in the optimizer's next step. `LeasedLoader` calls
        it; a loader of your own must."""
        self._worker_data.delivered(self.spec.name, samples)

    @property
    def _worker_data(self) -> LeasedData:
        if self._leased is None:
            raise WorkerError(
                f"dataset {self.spec.name!r} belongs to no worker yet: give its sampler to attach(…, data=sampler)"
            )
        return self._leased


class LeasedLoader(DataLoader[Any]):
    """A DataLoader that tells its sampler which batches have come out of it. (The sampler may be given by either
    name.)"""

    def __init__(
        self,
        dataset: Dataset[Any],
        data: LeasedSampler | None = None,
        batch_size: int = 1,
        *,
        sampler: LeasedSampler | None = None,
        **settings: Any,
    ) -> None:
        if (data is None) == (sampler is None):
            raise ConfigError("a LeasedLoader needs one sampler: LeasedLoader(dataset, sampler, …)")
        data = sampler if data is None else data
        if not isinstance(data, LeasedSampler):
            raise ConfigError(f"a LeasedLoader needs a sampler of leased data, got {type(data).__name__}")
        for name in ("batch_sampler", "shuffle"):
            if settings.pop(name, None):
                raise ConfigError(f"{name} is decided by the leased data; leave it out")
        super().__init__(dataset, batch_size=batch_size, sampler=data, **settings)
        self._data = data

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return delivering(super().__iter__(), self._data, self.batch_size or 1, drop_last=self.drop_last)


def delivering(batches: Iterable[Any], data: LeasedSampler, size: int, *, drop_last: bool = False) -> Iterator[Any]:
    """Batches of a loader, as they come out of it. (The last may be smaller: the data knows how much was drawn.)"""
    for batch in batches:
        data.delivered(size)
        yield batch
    if drop_last:  # what was too little for a batch is passed over: it goes with the next step
        data.delivered(size)
