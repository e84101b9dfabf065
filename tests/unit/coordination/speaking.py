"""What a worker can say to a coordinator, and what the coordinator has done by then."""

from collections.abc import Callable
from typing import Any

import pytest

from outerstep.coordination.server.effects import Accumulate
from unit.coordination.builders import (
    Desk,
)

Speak = Callable[[Desk, str], Any]
CONTRIBUTING: dict[str, Speak] = {
    "offer": lambda desk, worker: desk.offer(worker),
    "part": lambda desk, worker: desk.put(worker, 0),
    "commit": lambda desk, worker: desk.commit(worker),
}
SPEAKING: dict[str, Speak] = {
    **CONTRIBUTING,
    "heartbeat": lambda desk, worker: desk.heartbeat(worker),
    "poll": lambda desk, worker: desk.poll(worker),
    "get_part": lambda desk, worker: desk.get_part(worker, 0),
}


def saying(what: dict[str, Speak]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("say", what.values(), ids=what.keys())


def traces(desk: Desk) -> tuple[Any, ...]:
    """Everything that an accepted message would have changed."""
    coordinator = desk.coordinator
    open_rounds = [list(f.round.participants) for f in coordinator.fragments]
    return (list(desk.effects), coordinator.total_accepted, coordinator.uploads.held_bytes, open_rounds)


def accumulated(desk: Desk) -> list[Accumulate]:
    return [e for e in desk.effects if isinstance(e, Accumulate)]


def full_rounds(desk: Desk, count: int, workers: str = "ab") -> None:
    """Rounds in which everybody is on time; sequence = round."""
    for round_ in range(desk.version() + 1, desk.version() + count + 1):
        for worker in workers:
            desk.contribute(worker, round_, base_version=round_ - 1)
