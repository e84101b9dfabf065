"""The controller in a closed loop: simulated clusters train, exchange over links of some bandwidth, measure, and obey.

    loop = ClosedLoop(LoopScenario(bytes_per_s=lambda round_: 1e8 if round_ < 20 else 1e7), seed=1)
    for each in loop.run():
        print(each.round, each.plan.sync_every, each.plan.codec, each.utilization)

The links are those of network.py, the decisions and the meter those that ship. Nothing here decides. What a cluster
does under a plan (when a fragment is sent, when it is adopted, how long it waits for that) happens event by event, so
that it also checks the formulas of coordination/cost.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..coordination.autoconfig import (
    ClusterState,
    ControllerState,
    LayerBounds,
    LayerDecision,
    LayerPlan,
    LayerState,
    LinkMeter,
    decide,
    orders_for,
)
from ..coordination.cost import NONE, bytes_per_value
from ..schedule import send_step
from .agenda import Agenda
from .network import Network

SERVER = "server"
PART_BYTES = 4 << 20
ONE_ROUND_TRIP = replace(NONE, round_trips=1.0)
LIMIT_S = 1e9


@dataclass(frozen=True)
class LoopScenario:
    """`bytes_per_s`: of every link and direction, in each round. `noise`: the standard deviation of its logarithm."""

    bytes_per_s: Callable[[int], float] = lambda round_: 1e8
    step_s: tuple[float, ...] = (1.0, 1.0)
    parameters: int = 100_000_000
    rounds: int = 60
    noise: float = 0.0
    latency_s: float = 0.001
    target_utilization: float = 0.95
    bounds: LayerBounds = field(default_factory=LayerBounds)
    decide: Callable[[ControllerState], tuple[LayerDecision, ...]] = lambda state: decide(state, ONE_ROUND_TRIP)


@dataclass(frozen=True)
class LoopRound:
    """`utilization`: of the first cluster in this round, as it happened. `decision`: the one that was taken when the
    round closed."""

    round: int
    plan: LayerPlan
    utilization: float
    decision: LayerDecision


@dataclass
class _SimTraining:
    """One cluster. `here` counts its steps in this round; `points` are what it meets on its way."""

    name: str
    step_s: float
    round: int = -1
    here: int = 0
    points: list[tuple[int, str, int, int]] = field(default_factory=list)  # (step, what, fragment, its round)
    held: set[tuple[int, int]] = field(default_factory=set)  # (round, fragment) that the cluster has got
    waits_for: tuple[int, int] | None = None
    began_at: dict[int, float] = field(default_factory=dict)


class ClosedLoop:
    def __init__(self, scenario: LoopScenario, seed: int) -> None:
        self._scenario = scenario
        self._rng = random.Random(f"autoconfig {seed}")
        self._agenda = Agenda()
        self._network = Network(self._agenda, random.Random(f"autoconfig links {seed}"))
        self._network.conditions.delay_s = scenario.latency_s
        self._meter = LinkMeter(SERVER)
        self._clusters = [_SimTraining(f"c{i}", step_s) for i, step_s in enumerate(scenario.step_s)]
        self._contributions: Counter[tuple[int, int]] = Counter()  # by (round, fragment)
        self._decisions: dict[int, LayerDecision] = {}  # by the round that was closed
        self._set_links(0)
        self._measure_first()
        self._plans = {0: self._decide(0, None).plan}  # by the first round that they hold for

    def run(self) -> list[LoopRound]:
        for cluster in self._clusters:
            self._begin_round(cluster)
        first, last = self._clusters[0], self._scenario.rounds
        self._agenda.run_until(lambda: first.round > last, limit_s=LIMIT_S)
        return [
            LoopRound(
                round=number,
                plan=self._plan_of(number),
                utilization=self._utilization(first, number),
                decision=self._decisions[number],
            )
            for number in range(last)
            if number in self._decisions
        ]

    def _utilization(self, cluster: _SimTraining, number: int) -> float:
        steps = orders_for(self._plan_of(number), cluster.name).assignment.local_steps
        return steps * cluster.step_s / (cluster.began_at[number + 1] - cluster.began_at[number])

    # --- links -------------------------------------------------------------------------------------------------------

    def _set_links(self, number: int) -> None:
        for cluster in self._clusters:
            for ends in ((cluster.name, SERVER), (SERVER, cluster.name)):
                noisy = math.exp(self._rng.gauss(0.0, self._scenario.noise))
                self._network.limit(*ends, self._scenario.bytes_per_s(number) * noisy)

    def _measure_first(self) -> None:
        """Before the first round: a probe."""
        for cluster in self._clusters:
            for ends in ((cluster.name, SERVER), (SERVER, cluster.name)):
                self._meter.answered(*ends, self._scenario.latency_s)
                self._meter.transferred(*ends, PART_BYTES, PART_BYTES / self._scenario.bytes_per_s(0), 0.0)

    def _transfer(self, source: str, target: str, size_bytes: int, then: Callable[[], None]) -> None:
        """In parts. `then` when the last one is there."""
        began, parts = self._agenda.now, max(1, -(-size_bytes // PART_BYTES))
        left = [parts]

        def arrived(damaged: bool) -> None:
            left[0] -= 1
            if not left[0]:
                seconds = self._agenda.now - began - self._scenario.latency_s
                self._meter.transferred(source, target, size_bytes, seconds, self._agenda.now)
                then()

        for part in range(parts):
            part_bytes = size_bytes * (part + 1) // parts - size_bytes * part // parts
            self._network.send(source, target, arrived, size_bytes=part_bytes)

    # --- a cluster ---------------------------------------------------------------------------------------------------

    def _begin_round(self, cluster: _SimTraining) -> None:
        cluster.round += 1
        cluster.here = 0
        cluster.began_at[cluster.round] = self._agenda.now
        if cluster is self._clusters[0]:
            self._set_links(cluster.round)
        plan = self._plan_of(cluster.round)
        mine = orders_for(plan, cluster.name).assignment
        steps = mine.local_steps
        for fragment in range(plan.num_fragments):
            sent = send_step(fragment, steps, plan.num_fragments)
            cluster.points.append((sent, "send", fragment, cluster.round))
            cluster.points.append((sent + mine.delay, "to adopt", fragment, cluster.round))
        cluster.points.append((steps, "turn over", 0, cluster.round))
        cluster.points.sort()  # at one step: send, then adopt, then begin the next round
        self._go_on(cluster)

    def _go_on(self, cluster: _SimTraining) -> None:
        step = cluster.points[0][0]
        self._agenda.after((step - cluster.here) * cluster.step_s, lambda: self._reach(cluster))

    def _reach(self, cluster: _SimTraining) -> None:
        step, what, fragment, of_round = cluster.points[0]
        cluster.here = step
        if what == "to adopt" and (of_round, fragment) not in cluster.held:
            cluster.waits_for = of_round, fragment
            return
        cluster.points.pop(0)
        if what == "send":
            self._contribute(cluster, fragment)
        if what == "turn over":
            cluster.points = [(at - step, *rest) for at, *rest in cluster.points]  # type: ignore[misc]
            self._begin_round(cluster)
        else:
            self._go_on(cluster)

    def _contribute(self, cluster: _SimTraining, fragment: int) -> None:
        key = cluster.round, fragment
        size = self._size_bytes(cluster.round, down=False)
        self._transfer(cluster.name, SERVER, size, lambda: self._contributed(key))

    def _got(self, cluster: _SimTraining, key: tuple[int, int]) -> None:
        cluster.held.add(key)
        if cluster.waits_for == key:
            cluster.waits_for = None
            self._reach(cluster)

    # --- the server --------------------------------------------------------------------------------------------------

    def _contributed(self, key: tuple[int, int]) -> None:
        self._contributions[key] += 1
        if self._contributions[key] < len(self._clusters):
            return
        number, fragment = key
        plan = self._plan_of(number)
        if fragment == plan.num_fragments - 1:
            following = number + (2 if plan.delay else 1)  # with a delay the next round has begun
            self._decisions[number] = self._decide(following, self._plan_of(following))
            self._plans[following] = self._decisions[number].plan
        for cluster in self._clusters:
            size = self._size_bytes(number, down=True)
            self._transfer(SERVER, cluster.name, size, self._delivery(cluster, key))

    def _delivery(self, cluster: _SimTraining, key: tuple[int, int]) -> Callable[[], None]:
        return lambda: self._got(cluster, key)

    def _size_bytes(self, number: int, *, down: bool) -> int:
        plan = self._plan_of(number)
        per_value = bytes_per_value(plan.down_codec if down else plan.codec)
        return int(self._scenario.parameters * per_value / plan.num_fragments)

    def _plan_of(self, number: int) -> LayerPlan:
        return self._plans[max(first for first in self._plans if first <= number)]

    def _decide(self, number: int, plan: LayerPlan | None) -> LayerDecision:
        clusters = tuple(ClusterState(name=c.name, step_s=c.step_s) for c in self._clusters)
        layer = LayerState(
            name="top",
            round=number,
            parameters=self._scenario.parameters,
            clusters=clusters,
            links=self._meter.reports(self._agenda.now),
            centre=SERVER,
            plan=plan,
            bounds=self._scenario.bounds,
            target_utilization=self._scenario.target_utilization,
        )
        (decision,) = self._scenario.decide(ControllerState(layers=(layer,)))
        return decision
