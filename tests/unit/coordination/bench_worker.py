"""A worker's machine on a bench: moves are confirmed at once, results are made up, and every effect is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outerstep.coordination.worker.effects import Effect, Finish, Move, Note, Send, Sight
from outerstep.coordination.worker.machine import InFlight, Metrics, Offline, Progress, Work, WorkerMachine
from outerstep.types import Participant, Plan

WAITING = Sight(done=False)
DONE = Sight(done=True)


def make_plan(fragments: int = 1, **changes: Any) -> Plan:
    facts: dict[str, Any] = {"sync_every": 4, "codec": "fp32", "part_size_bytes": 8, "max_staleness": 2}
    names = tuple((f"p{i}",) for i in range(fragments))
    return Plan(**{**facts, "fragments": names, "heartbeat_timeout_s": 0.0, **changes})


@dataclass(frozen=True)
class Came:
    """What an exchange came to."""

    plan: Plan
    fragment: int = 0
    version: int = 1
    counted: bool = True
    counted_in: int = 0
    too_old: bool = False
    refused: str = ""
    unchanged: bool = False
    above: tuple[int, ...] = ()
    steps_lost: int = 0
    participants: tuple[Participant, ...] = ()
    also: Sequence[Came] = ()


class Bench:
    """`versions`: of the anchors it begins with, one per fragment."""

    def __init__(
        self,
        versions: Sequence[int] = (0,),
        *,
        work: Work = Work(),  # noqa: B008 - frozen
        offline: Offline = Offline(10.0, 2),  # noqa: B008 - frozen
        **plan: Any,
    ) -> None:
        self.plan = make_plan(len(versions), **plan)
        self.machine = WorkerMachine("w", self.plan, work, offline)
        self.begun = self.do(self.machine.joined([self.came(f, version) for f, version in enumerate(versions)]))

    def came(self, fragment: int = 0, version: int = 1, **facts: Any) -> Came:
        return Came(**{"plan": self.plan, "fragment": fragment, "version": version, **facts})

    def do(self, effects: Sequence[Effect]) -> list[Effect]:
        """All that comes of it, in order, while every anchor is as it was agreed."""
        done: list[Effect] = []
        for effect in effects:
            done.append(effect)
            if isinstance(effect, Move):
                done += self.do(self.machine.confirmed(effect.fragment, None))
        return done

    def train(self, steps: int = 1) -> list[Effect]:
        done: list[Effect] = []
        for _ in range(steps):
            assert not self.machine.waiting, "it waits"
            done += self.do(self.machine.stepped())
        return done

    def look(self, sights: dict[int, Sight] | None = None, **facts: Any) -> list[Effect]:
        """Those that are not named are not over."""
        seen = dict.fromkeys(self.machine.in_sight, WAITING) | (sights or {})
        return self.do(self.machine.looked(seen, **facts))

    def land(self, fragment: int = 0, version: int = 1, **facts: Any) -> list[Effect]:
        """The exchange is over, and this is what it came to."""
        assert self.look({fragment: DONE}) == [Finish(fragment)]
        return self.do(self.machine.outcome(self.came(fragment, version, **facts)))

    def miss(self, fragment: int = 0, version: int = 1, **facts: Any) -> list[Effect]:
        return self.land(fragment, version, counted=False, **facts)

    def __getitem__(self, fragment: int) -> Progress:
        return self.machine.state.fragments[fragment]

    def flight(self, fragment: int = 0) -> InFlight:
        flight = self[fragment].in_flight
        assert flight is not None
        return flight

    @property
    def metrics(self) -> Metrics:
        return self.machine.state.metrics

    def unsent(self, fragment: int = 0) -> int:
        return self.machine.unsent(fragment).steps


def send(fragment: int = 0, base: int = 0, oldest: int | None = None, steps: int = 4, **facts: Any) -> Send:
    oldest_base = base if oldest is None else oldest
    return Send(fragment, base, oldest_base, steps, **{"samples": 0, "tokens": 0, **facts})


def kinds(effects: Sequence[Effect]) -> list[str]:
    """Of the notes among them."""
    return [effect.kind for effect in effects if isinstance(effect, Note)]


def acts(effects: Sequence[Effect]) -> list[Effect]:
    """Those that are no notes."""
    return [effect for effect in effects if not isinstance(effect, Note)]
