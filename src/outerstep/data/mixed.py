"""Batches of several leased datasets, mixed by weight.

    loader = MixedLoader([(LeasedLoader(books, b, 32), 3.0), (LeasedLoader(code, c, 32), 1.0)])
    with outerstep.attach(model, optimizer, data=[b, c]):
        for batch in loader:
            ...

The next batch is that of the loader with the smallest (batches so far + 1) / weight: after n batches each has had its
part of them to within one. Nothing is drawn at random, so the ranks of a group choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from ..errors import ConfigError


class MixedLoader:
    """`loaders`: each with its weight. `until`: the first of them is used up ("first"), or all are ("all"; the others
    share what a loader that is used up no longer takes)."""

    def __init__(
        self, loaders: Sequence[tuple[Iterable[Any], float]], *, until: Literal["first", "all"] = "all"
    ) -> None:
        if not loaders:
            raise ConfigError("a MixedLoader needs loaders, got none")
        for i, (_, weight) in enumerate(loaders):
            if not 0.0 < weight < float("inf"):
                raise ConfigError(f"the weight of loader {i} must be above 0 and finite, got {weight}")
        self._loaders, self._until = tuple(loaders), until

    def __iter__(self) -> Iterator[Any]:
        left = {i: iter(loader) for i, (loader, _) in enumerate(self._loaders)}
        due = {i: 1.0 / weight for i, (_, weight) in enumerate(self._loaders)}
        while left:
            i = min(left, key=lambda i: (due[i], i))
            try:
                batch = next(left[i])
            except StopIteration:
                if self._until == "first":
                    return
                del left[i]
                continue
            due[i] += 1.0 / self._loaders[i][1]
            yield batch
