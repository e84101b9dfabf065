"""What became of a fleet's time, steps and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .booked_lines import BookedLine
from .cluster import FleetLeader
from .ledger import LayerLedger, LifeBook, Promises
from .member import Clocks
from .scenario import FleetScenario
from .server import FleetServer


@dataclass(frozen=True)
class Moment:
    """How many workers do what, the worker-seconds of training in the model (of clusters: in theirs), and the bytes on
    the lines to the top, both directions."""

    at_s: float
    doing: dict[str, int]
    in_model_s: float
    sent_bytes: int


@dataclass(frozen=True)
class StepAccount:
    """Of all steps, in worker-seconds, as a mean over fragments. `useful`: in the model of the top; `under_way`: in
    weights, on the way, or in a cluster whose next exchange has not come; the others are lost, each for one reason."""

    taken: float
    useful: float
    under_way: float
    died: float
    discarded: float
    overwritten: float

    @property
    def lost(self) -> float:
        return self.died + self.discarded + self.overwritten


@dataclass(frozen=True)
class LayerReport:
    name: str
    servers: int
    rounds: int
    participants: float  # of a round
    staleness: float
    worst_staleness: int
    deaths: int
    quarantines: int


@dataclass(frozen=True)
class FleetReport:
    """All times are virtual. `total_s`: workers times duration; the shares of it are
    training, waiting, joining and down."""

    workers: int
    clusters: int
    duration_s: float
    seed: int
    setting: dict[str, Any]
    planned: float | None
    total_s: float
    seconds: dict[str, float]
    own_s: float
    steps: StepAccount
    up_bytes: int
    down_bytes: int
    failures: int
    leaves: int
    layers: tuple[LayerReport, ...]
    broken: tuple[str, ...]
    broken_count: int
    moments: tuple[Moment, ...]

    @property
    def useful_share(self) -> float:
        return self.steps.useful / self.total_s

    def as_plain(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "useful_share": self.useful_share,
            "shares": {doing: seconds / self.total_s for doing, seconds in self.seconds.items()},
            "lost_share": self.steps.lost / self.total_s,
        }


class PlayedFleet(Protocol):
    """A fleet whose time is over. `lines`: up and down, of each cluster."""

    scenario: FleetScenario
    lines: list[tuple[BookedLine, BookedLine]]
    top: FleetServer
    places: list[FleetServer]
    leaders: list[FleetLeader]
    clocks: Clocks
    failures: int
    leaves: int
    promises: Promises
    moments: list[Moment]


def report_of(fleet: PlayedFleet) -> FleetReport:
    scenario = fleet.scenario
    ups, downs = zip(*fleet.lines, strict=True)
    layers = [_layer("top", [fleet.top])]
    if fleet.leaders:
        layers.append(_layer("clusters", fleet.places))
    setting: dict[str, Any] = {"topology": scenario.topology, "across": asdict(scenario.across)}
    if scenario.topology == "hierarchy" and scenario.inside is not None:
        setting["inside"] = asdict(scenario.inside)
    return FleetReport(
        workers=scenario.workers,
        clusters=len(fleet.lines),
        duration_s=scenario.duration_s,
        seed=scenario.seed,
        setting={**setting, "why": scenario.why},
        planned=scenario.planned,
        total_s=scenario.workers * scenario.duration_s,
        seconds={str(doing): seconds for doing, seconds in fleet.clocks.seconds.items()},
        own_s=fleet.clocks.own_s,
        steps=_steps(fleet),
        up_bytes=sum(line.carried_bytes for line in ups),
        down_bytes=sum(line.carried_bytes for line in downs),
        failures=fleet.failures,
        leaves=fleet.leaves,
        layers=tuple(layers),
        broken=tuple(fleet.promises.broken),
        broken_count=fleet.promises.count,
        moments=tuple(fleet.moments),
    )


def _layer(name: str, servers: list[Any]) -> LayerReport:
    ledgers: list[LayerLedger] = [server.ledger for server in servers]
    contributions = sum(ledger.participants for ledger in ledgers)
    rounds = sum(ledger.rounds for ledger in ledgers)
    return LayerReport(
        name,
        len(servers),
        rounds,
        contributions / rounds if rounds else 0.0,
        sum(ledger.staleness[0] for ledger in ledgers) / contributions if contributions else 0.0,
        max(ledger.staleness[1] for ledger in ledgers),
        sum(server.deaths for server in servers),
        sum(server.quarantines for server in servers),
    )


def _steps(fleet: PlayedFleet) -> StepAccount:
    """Of clusters a step is useful when the round that holds it is in the top's model."""
    taken = useful = under_way = died = discarded = overwritten = 0.0
    for place in fleet.places:
        for book in place.ledger.books:
            applied = _mean_s(book, [each.total for each in book.applied])
            dropped = _mean_s(book, [each.total for each in book.given_up])
            said = book.discarded + book.overwritten
            part = book.overwritten / said if said else 0.0
            rest = book.taken * book.step_s - applied - dropped
            taken += book.taken * book.step_s
            overwritten += part * dropped
            discarded += (1.0 - part) * dropped
            died += rest if book.is_over else 0.0
            under_way += 0.0 if book.is_over else rest
            useful += applied
    for leader in fleet.leaders:
        below = leader.below.ledger
        for fragment in range(len(below.versions)):
            in_top = _in_top(fleet, leader, fragment)
            seconds = below.steps_of[fragment]
            gone = {version for ranges in in_top[1] for version in range(*ranges)}
            here = sum(seconds.values()) / len(below.versions)
            above = sum(seconds[v] for ranges in in_top[0] for v in range(*ranges)) / len(below.versions)
            lost = sum(seconds[v] for v in gone) / len(below.versions)
            useful += above - here
            discarded += lost
            under_way += here - above - lost
    return StepAccount(taken, useful, under_way, died, discarded, overwritten)


def _in_top(fleet: PlayedFleet, leader: Any, fragment: int) -> tuple[Any, Any]:
    """The cluster's rounds in the top's model, and those that it gave up."""
    if leader.worker is None:
        return (), ()
    book = fleet.top.ledger.books[leader.worker.life]
    return book.applied[fragment], book.given_up[fragment] - book.applied[fragment]


def _mean_s(book: LifeBook, steps: list[int]) -> float:
    return sum(steps) * book.step_s / len(steps)
