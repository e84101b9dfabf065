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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
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
        self._step_samples = 0

    def belongs_to(self, data: LeasedData | None) -> None:
        """Of the worker that trains it."""
        self._leased = data
        self.expect(self._step_samples)

    def expect(self, step_samples: int) -> None:
        """A step has so many samples, as far as its loader knows."""
        self._step_samples = step_samples
        if self._leased is not None and step_samples:
            self._leased.expect(self.spec.name, step_samples)

    def __iter__(self) -> Iterator[int]:
        return self._worker_data.samples(self.spec.name)

    def __len__(self) -> int:
        """Of a whole epoch: nobody knows beforehand how much of it this worker will train."""
        return self.spec.samples

    def delivered(self, samples: int, *, trained: bool = True) -> None:
        """So many samples more have come out of the loader, and are in the optimizer's next step. `LeasedLoader` calls
        it; a loader of your own must. Not `trained`: they were too few for a batch, and are passed over."""
        self._worker_data.delivered(self.spec.name, samples, trained=trained)

    def share(self, ahead: int) -> int | None:
        """This worker's batch of a step: so many lie between it and the one that comes next. None: nobody says."""
        return self._worker_data.share(ahead)

    @property
    def _worker_data(self) -> LeasedData:
        if self._leased is None:
            raise WorkerError(
                f"dataset {self.spec.name!r} belongs to no worker yet: give its sampler to attach(…, data=sampler)"
            )
        return self._leased


class LeasedLoader(DataLoader[Any]):
    """A DataLoader that tells its sampler which batches have come out of it. (The sampler may be given by either
    name.)

    `shared`: each batch is this worker's share of the run's global batch, where the run has one: samples of all workers
    in a round = `--global-batch`, divided by speed. Until the run says so, and where it says nothing, it is
    `batch_size`. One batch is one optimizer step then."""

    def __init__(
        self,
        dataset: Dataset[Any],
        data: LeasedSampler | None = None,
        batch_size: int = 1,
        *,
        sampler: LeasedSampler | None = None,
        shared: bool = False,
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
        self._data, self._shares = data, None
        data.expect(batch_size)
        if shared:
            self._shares = SharedBatches(data, batch_size, drop_last=settings.pop("drop_last", False))
            super().__init__(dataset, batch_sampler=self._shares, **settings)
        else:
            super().__init__(dataset, batch_size=batch_size, sampler=data, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """(Nothing is drawn before the first batch is asked for: trainers make the iterator before they start.)"""
        batches = _begun_late(super().__iter__)
        if self._shares is not None:
            return self._shares.delivering(batches)
        return delivering(batches, self._data, self.batch_size or 1, drop_last=self.drop_last)


def _begun_late(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    yield from begin()


class SharedBatches(Sampler[list[int]]):
    """The numbers of the samples of one batch after the other, each as large as this worker's share of it. The loader's
    processes draw ahead: what they have drawn when the shares change keeps its size."""

    def __init__(self, data: LeasedSampler, batch_size: int, *, drop_last: bool) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be ≥ 1, got {batch_size}")
        self._data, self._batch_size, self._drop_last = data, batch_size, drop_last
        self._drawn: deque[int] = deque()  # sizes of the batches that have not come out of the loader yet

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn.clear()
        batch: list[int] = []
        for index in self._data:
            batch.append(index)
            if len(batch) >= (self._data.share(len(self._drawn)) or self._batch_size):
                self._drawn.append(len(batch))
                yield batch
                batch = []
        if batch:
            self._drawn.append(len(batch))
            if not self._drop_last:
                yield batch

    def __len__(self) -> int:
        """Of a whole epoch, as `LeasedSampler`, in batches of the size that was given."""
        samples = len(self._data)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def delivering(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches, in the order in which they were drawn, as they come out of the loader."""
        for batch in batches:
            self._data.delivered(self._drawn.popleft())
            yield batch
        if self._drawn:
            self._data.delivered(self._drawn.popleft(), trained=False)


def delivering(batches: Iterable[Any], data: LeasedSampler, size: int, *, drop_last: bool = False) -> Iterator[Any]:
    """Batches of a loader, as they come out of it. (The last may be smaller: the data knows how much was drawn.)"""
    for batch in batches:
        data.delivered(size)
        yield batch
    if drop_last:  # what was too little for a batch is passed over: it goes with the next step
        data.delivered(size, trained=False)
