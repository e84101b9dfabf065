"""The worker that a topology is built for: who it is, what it exchanges, and the processes that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..events import EventSink
from ..types import InfoValue, MemberFacts
from .group.ranks import Ranks
from .group.sharded import Shards


class Inner(Protocol):
    """What a worker has beside its anchor, and a newcomer needs: optimizer, buffers, where in the data it is."""

    def state(self) -> dict[str, Any]:
        """Copies."""

    def load(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        """Says how many steps, samples and tokens were before."""


@dataclass(frozen=True)
class LocalWorker:
    """`instance` is drawn at each start. `tensors`: the model's by name, of a sharded model this process's rows;
    `anchors`: where the last agreed ones are found. `ranks`: the processes that are this worker, None = this one alone.
    `events`: where to tell what happens. `info` and `facts`: what it tells of itself, when it joins and while it
    trains."""

    worker_id: str
    instance: str
    hostname: str
    tensors: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    shards: Shards
    is_data_parallel: bool
    ranks: Ranks | None
    inner: Inner
    events: EventSink = lambda event: None
    info: Mapping[str, InfoValue] = field(default_factory=dict)
    facts: Callable[[], MemberFacts] = MemberFacts
