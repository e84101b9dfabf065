"""One simulated run of clusters of clusters: let the faults happen, wait for calm, see everybody counted, end cleanly.

    top ── server with workers            each arrow is a network of its own
        ── members without a server
        ── site ── server with workers
                ── members without a server

Every step has a name and ends in the model of the top, once. What may be missing there is written down by whoever gave
it up: steps of a process that was killed before its cluster had counted them, those that a worker or a cluster said to
be too old, and those of a cluster in which all holders of them died.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..coordination.layers.replica_life import ReplicaLife
from ..types import Control
from .agenda import Agenda
from .hierarchy_scenario import HierarchyScenario, LayerFault
from .history import StepName, Told
from .layer_group import SimGroup
from .layer_history import LayerHistory
from .layer_server import LayerMachine, LayerServer, Upward
from .leader import SimAbove, SimLeader
from .network import Conditions, Network
from .worker import SimSaved, SimWorker

CALM_LIMIT_S = 3_000.0


def run_hierarchy(scenario: HierarchyScenario, seed: int, **options: Any) -> HierarchyHistory:
    """Options: those of `HierarchyWorld`."""
    return HierarchyWorld(scenario, seed, **options).run()


@dataclass
class HierarchyHistory(Told):
    """Of all layers together."""

    layers: dict[str, LayerHistory] = field(default_factory=dict)

    @property
    def round_count(self) -> int:
        return sum(layer.round_count for layer in self.layers.values())


@dataclass
class Layer:
    """A server or group, its workers if it has a server, and the network that leads to it."""

    name: str
    place: LayerServer | SimGroup
    history: LayerHistory
    network: Network
    machine: LayerMachine | None = None
    workers: list[SimWorker] = field(default_factory=list)  # every start of every worker
    current: list[SimWorker] = field(default_factory=list)
    parent: Layer | None = None

    @property
    def leaders(self) -> list[SimLeader]:
        return self.place.leaders

    @property
    def exchanges(self) -> int:
        """Over all who led it: how often a round above counted it."""
        return sum(worker.exchanges_done for leader in self.leaders for worker in leader.workers)

    @property
    def leader(self) -> SimLeader | None:
        """Who speaks for it now."""
        if isinstance(self.place, LayerServer):
            return self.place.leader if self.place.is_up else None
        return self.place.lead.leader if self.place.lead is not None else None


class HierarchyWorld:
    """`log`: filled with what happens, in words."""

    def __init__(
        self,
        scenario: HierarchyScenario,
        seed: int,
        *,
        leader_type: type[SimLeader] = SimLeader,
        worker_type: type[SimWorker] = SimWorker,
        server_type: type[LayerServer] = LayerServer,
        life_type: type[ReplicaLife] = ReplicaLife,
        group_type: type[SimGroup] = SimGroup,
        log: list[str] | None = None,
    ) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"hierarchy world {seed}")
        self.agenda = Agenda()
        self.history = HierarchyHistory(log=log, clock=lambda: self.agenda.now)
        self._worker_type, self._server_type, self._group_type = worker_type, server_type, group_type
        self._seed, self._leader_type, self._life_type, self._starts = seed, leader_type, life_type, 0
        self._drained: set[str] = set()
        sites, clusters = scenario.sites, scenario.clusters
        self.top = self._server("top", sites or len(clusters), across=True)
        self.sites = [
            self._server(
                f"site{i}", sum(c.site == i for c in clusters), across=True, parent=self.top, wait_s=clusters[0].wait_s
            )
            for i in range(sites)
        ]
        self.clusters = [self._cluster(i) for i in range(len(clusters))]
        for fault in scenario.faults:
            self.agenda.at(fault.at_s, self._inject(fault))

    # --- building -------------------------------------------------------------------------------------------------

    def _history(self, name: str) -> LayerHistory:
        made = LayerHistory(
            log=self.history.log, clock=self.history.clock, violations=self.history.violations, place=name
        )
        self.history.layers[name] = made
        return made

    def _network(self) -> Network:
        network = Network(self.agenda, self.rng)
        network.conditions = self._weather()
        return network

    def _weather(self) -> Conditions:
        return Conditions(loss=self.scenario.loss, repeat=self.scenario.repeat, damage=self.scenario.damage)

    def _upward(self, parent: Layer, wait_s: float) -> Upward:
        assert isinstance(parent.place, LayerServer)
        above = SimAbove(parent.place, parent.network, parent.place.settings, parent.history)
        return Upward(above, wait_s, self._leader_type, self.rng)

    def _server(
        self, name: str, workers: int, *, across: bool, parent: Layer | None = None, wait_s: float = 0.0
    ) -> Layer:
        rules = self.scenario.across if across else self.scenario.inside
        settings = self.scenario.server(rules, workers, across=across)
        history, machine = self._history(name), LayerMachine(random.Random(f"disk {name} {self._seed}"))
        upward = self._upward(parent, wait_s) if parent is not None else None
        place = self._server_type(name, settings, self.agenda, history, machine, upward)
        return Layer(name, place, history, self._network(), machine, parent=parent)

    def _cluster(self, index: int) -> Layer:
        plan, name = self.scenario.clusters[index], f"c{index}"
        parent = self.sites[plan.site] if self.sites else self.top
        if plan.kind == "group":
            history = self._history(name)
            upward = self._upward(parent, plan.wait_s)
            group = self._group_type(
                name,
                plan.members,
                self.scenario.fragments,
                self.agenda,
                history,
                upward,
                round_s=3.0,
                failing=self.scenario.failing,
                life_type=self._life_type,
            )
            return Layer(name, group, history, self._network(), parent=parent)
        layer = self._server(name, plan.members, across=False, parent=parent, wait_s=plan.wait_s)
        layer.current = [self._start(layer, i) for i in range(plan.members)]
        return layer

    def _start(self, layer: Layer, index: int, saved: SimSaved | None = None) -> SimWorker:
        self._starts += 1
        place = layer.place
        assert isinstance(place, LayerServer)
        worker = self._worker_type(
            index,
            self._starts,
            1_000_000 * self._starts,  # steps are named for ever
            place.settings,
            self.agenda,
            layer.network,
            place,
            layer.history,
            self.rng,
            saved,
            name=f"{layer.name}.{index}",
        )
        layer.workers.append(worker)
        return worker

    @property
    def layers(self) -> list[Layer]:
        """All that have a layer above."""
        return [*self.clusters, *self.sites]

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self) -> HierarchyHistory:
        agenda, calm_s = self.agenda, self.scenario.calm_after_s
        agenda.run_until(lambda: agenda.now >= calm_s, limit_s=calm_s + 1.0)
        self._calm()
        before = {layer.name: layer.exchanges for layer in self._living()}

        def advanced() -> bool:
            return all(layer.exchanges > before.get(layer.name, 0) for layer in self._living())

        if not agenda.run_until(advanced, limit_s=agenda.now + CALM_LIMIT_S):
            now = {layer.name: layer.exchanges for layer in self._living()}
            self.history.violated(f"no progress after the faults stopped: {before} exchanges, then {now}")
        elif self._end():
            self._check()
        return self._close()

    def _living(self) -> list[Layer]:
        """Those that nobody has told to end."""
        return [layer for layer in self.layers if layer.name not in self._drained]

    def _calm(self) -> None:
        self.history.say("it is calm")
        for layer in (self.top, *self.layers):
            layer.network.conditions = Conditions()
            layer.network.cut.clear()
            if layer.machine is not None:
                layer.machine.power.trouble, layer.machine.power.operations_left = 0, None
            if isinstance(layer.place, SimGroup):
                layer.place.failing = 0.0

    def _end(self) -> bool:
        """From the bottom: workers leave, then clusters, then sites."""
        workers = [worker for layer in self.clusters for worker in layer.workers if worker.alive]
        for worker in workers:
            worker.leave_when_done()
        for layer in self.clusters:
            if isinstance(layer.place, SimGroup):
                layer.place.is_training_over = True
        groups = [layer.place for layer in self.clusters if isinstance(layer.place, SimGroup)]
        if not self._wait(
            lambda: not any(worker.alive for worker in workers) and all(group.is_at_rest for group in groups),
            "a clean exit never ended",
        ):
            return False
        self.agenda.run_until(lambda: False, limit_s=self.agenda.now + 20.0)
        for layers in (self.clusters, self.sites):
            leaders = [layer.leader for layer in layers]
            for leader in leaders:
                if leader is not None:
                    leader.stop()
            if not self._wait(lambda: all(one is None or one.is_over for one in leaders), "a cluster never left"):  # noqa: B023
                return False
            self.agenda.run_until(lambda: False, limit_s=self.agenda.now + 5.0)
        for group in groups:
            group.leave()
        return True

    def _wait(self, ready: Callable[[], bool], otherwise: str) -> bool:
        over = self.agenda.run_until(ready, limit_s=self.agenda.now + CALM_LIMIT_S)
        if not over:
            self.history.violated(otherwise)
        return over

    def _close(self) -> HierarchyHistory:
        history = self.history
        history.virtual_s = self.agenda.now
        for layer in (self.top, *self.layers):
            history.faults += layer.history.faults
            history.faults["lost"] += layer.network.lost
            history.faults["repeated"] += layer.network.repeated
        return history

    # --- what must be true at the end -----------------------------------------------------------------------------

    def _check(self) -> None:
        for layer in self.layers:
            assert layer.parent is not None
            self._check_members(layer)
            self._check_cluster(layer, layer.parent)
        for layer in (self.top, *self.layers):
            layer.history.check_beliefs()

    def _check_members(self, layer: Layer) -> None:
        """As without a layer above: every step of a process that left cleanly is in the model, or it is known why
        not."""
        history = layer.history
        told = (worker.discarded | worker.abandoned for worker in layer.workers)
        known = history.gone.union(history.applied, history.taken_back, *told)
        for worker in layer.workers:
            vanished = worker.own - known if worker.left else set()
            if vanished:
                self.history.violated(f"{layer.name}: step {min(vanished)} vanished")

    def _check_cluster(self, layer: Layer, parent: Layer) -> None:
        """What its members learned is above, or it is known why not; and the last agreement is what it has."""
        allowed = self._given_up(layer) | (self._given_up(parent) if parent.parent is not None else set())
        vanished = layer.history.own - allowed - self.top.history.applied.keys()
        if vanished:
            self.history.violated(f"{layer.name}: step {min(vanished)} is not in the top, and nobody gave it up")
        leader = layer.leader
        if leader is None or leader.worker is None or not leader.worker.left:
            return
        for fragment in range(self.scenario.fragments):
            held, has = leader.worker.agreed(fragment), layer.history.model(fragment)
            if held != has:
                odd = min(held ^ has)
                self.history.violated(f"{layer.name}: left with another model than it was agreed on: step {odd}")

    @staticmethod
    def _given_up(layer: Layer) -> set[tuple[int, StepName]]:
        upward = (worker for leader in layer.leaders for worker in leader.workers)
        return set[tuple[int, StepName]]().union(*(worker.discarded | worker.abandoned for worker in upward))

    # --- faults ---------------------------------------------------------------------------------------------------

    def _inject(self, fault: LayerFault) -> Callable[[], None]:
        return lambda: self._strike(fault)

    def _strike(self, fault: LayerFault) -> None:
        layer = self.clusters[fault.cluster]
        self.history.say(f"fault: {fault}")
        self.history.faults[fault.kind] += 1
        where, _, what = fault.kind.partition("_")
        if where in ("top", "site"):
            above = self.top if where == "top" or not self.sites else self.sites[fault.cluster % len(self.sites)]
            self._strike_server(above, fault, what)
        elif where == "member":
            self._strike_member(layer, fault, what)
        elif where == "leader":
            self._strike_leader(layer, fault, what)
        elif fault.kind in ("power_cut", "disk"):
            self._strike_server(layer, fault, fault.kind)
        elif fault.kind in ("cut", "cut_up", "cut_down", "slow"):
            self._strike_link(layer, fault)
        elif fault.kind in ("drain", "sync"):
            self._order(layer, fault)
        elif fault.kind == "lead":
            if isinstance(layer.place, SimGroup):
                members = layer.place.members
                layer.place.named = members[fault.member % len(members)].name
        elif fault.kind == "bad_weather":
            for one in (self.top, *self.layers):
                one.network.conditions = Conditions(delay_s=0.5, loss=0.4, repeat=0.3, damage=0.05)
            self.agenda.after(fault.lasts_s, self._clear_up)
        elif isinstance(layer.place, LayerServer):  # cluster_crash, pair
            layer.place.crash(fault.lasts_s)
            if fault.kind == "cluster_crash":
                for i in range(len(layer.current)):
                    self._crash_worker(layer, i, fault.lasts_s)
        elif fault.kind == "pair" and layer.place.lead is not None:
            group, lead = layer.place, layer.place.lead
            group.pause(lead, fault.lasts_s + 12.0)
            others = [member for member in group.members if member is not lead]
            if others:
                self.agenda.after(8.0, lambda: group.crash(others[0], fault.lasts_s))
        else:
            for member in layer.place.members:
                layer.place.crash(member, fault.lasts_s)

    def _clear_up(self) -> None:
        for one in (self.top, *self.layers):
            one.network.conditions = self._weather()

    def _strike_member(self, layer: Layer, fault: LayerFault, what: str) -> None:
        if isinstance(layer.place, SimGroup):
            member = layer.place.members[fault.member % len(layer.place.members)]
            if what == "crash":
                layer.place.crash(member, fault.lasts_s)
            else:
                layer.place.pause(member, fault.lasts_s)
            return
        index = fault.member % len(layer.current)
        if what == "crash":
            self._crash_worker(layer, index, fault.lasts_s)
        elif what == "pause":
            layer.current[index].pause(fault.lasts_s)
        else:
            self._cut(layer.network, f"{layer.name}.{index}", fault.lasts_s, "cut")

    def _crash_worker(self, layer: Layer, index: int, away_s: float) -> None:
        worker = layer.current[index]
        worker.kill()

        def again() -> None:
            if layer.current[index] is worker and layer.name not in self._drained:
                layer.current[index] = self._start(layer, index, worker.saved)

        self.agenda.after(away_s, again)

    def _strike_leader(self, layer: Layer, fault: LayerFault, what: str) -> None:
        place = layer.place
        if isinstance(place, LayerServer):
            if what == "cut":
                self._strike_link(layer, fault)
            else:
                place.refuses = self.rng.random() < 0.5
                place.crash(fault.lasts_s)
        elif place.lead is not None:
            if what == "crash":
                place.crash(place.lead, fault.lasts_s)
            elif what == "pause":
                place.pause(place.lead, fault.lasts_s)
            else:
                assert layer.parent is not None
                self._cut(layer.parent.network, place.lead.name, fault.lasts_s, "cut")

    def _strike_server(self, layer: Layer, fault: LayerFault, what: str) -> None:
        if layer.machine is None or not isinstance(layer.place, LayerServer):
            return
        power = layer.machine.power
        if what == "crash":
            layer.place.refuses = self.rng.random() < 0.5
            layer.place.crash(fault.lasts_s)
        elif what == "power_cut":
            power.operations_left = fault.operation
        else:
            power.trouble = errno.ENOSPC if fault.operation % 2 else errno.EIO
            self.agenda.after(fault.lasts_s, lambda: setattr(power, "trouble", 0))

    def _strike_link(self, layer: Layer, fault: LayerFault) -> None:
        assert layer.parent is not None
        links = [layer.name]
        if isinstance(layer.place, SimGroup):
            links = [member.name for member in layer.place.members]
        for link in links:
            self._cut(layer.parent.network, link, fault.lasts_s, fault.kind)

    def _cut(self, network: Network, link: str, lasts_s: float, kind: str) -> None:
        if kind == "slow":
            network.conditions = Conditions(delay_s=2.0, loss=0.1)
            self.agenda.after(lasts_s, self._clear_up)
            return
        ways = {(link, "server"), ("server", link)}
        ways -= {("server", link)} if kind == "cut_up" else {(link, "server")} if kind == "cut_down" else set()
        network.cut |= ways
        self.agenda.after(lasts_s, lambda: network.cut.difference_update(ways))

    def _order(self, layer: Layer, fault: LayerFault) -> None:
        """An operator of the server above the cluster."""
        assert layer.parent is not None
        server = layer.parent.place
        assert isinstance(server, LayerServer)
        if not server.is_up or layer.name not in server.coordinator.members.live_ids:
            return
        if fault.kind == "drain":
            if len(self._living()) <= 2 + len(self.sites) or self.sites:
                return  # somebody must go on
            self._drained.add(layer.name)
            server.handle(Control(kind="drain", worker_id=layer.name), [], lambda answer: None)
        else:
            server.handle(Control(kind="sync", worker_id=layer.name), [], lambda answer: None)
