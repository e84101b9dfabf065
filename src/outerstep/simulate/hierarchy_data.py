"""Clusters of clusters that train leased data: the top leases to clusters, their servers lease on to workers.

Both ends of both levels are those that ship: coordination/leases.py and coordination/sub_leases.py in the servers,
coordination/layers/sub_leasing.py in the leaders, coordination/worker/units.py in the workers. Each step of a worker
trains one unit. Steps have names in every model, so what is in the model of the top, and how often, can be read off for
the data, too.
"""

from __future__ import annotations

from typing import Any

from ..coordination.leases import LeaseTable
from ..coordination.sub_leases import SubLeaseTable
from ..events import Event, UnitsDone
from ..ranges import Ranges
from ..types import Dataset
from .data import ModelLedger, SimDataWorker
from .group_data import LeasingGroup
from .hierarchy import HierarchyHistory, HierarchyWorld, Layer
from .hierarchy_scenario import HierarchyScenario
from .layer_server import LayerServer


class LeasingWorld(HierarchyWorld):
    """`dataset`: what all workers train, `batch` samples in a step."""

    def __init__(
        self, scenario: HierarchyScenario, seed: int, dataset: Dataset, *, batch: int = 1, **options: Any
    ) -> None:
        self.dataset = dataset
        trains = {"dataset": dataset, "batch": batch}
        worker_type = type("Worker", (options.pop("worker_type", SimDataWorker),), trains)
        group_type = type("Group", (options.pop("group_type", LeasingGroup),), {"dataset": dataset})
        super().__init__(scenario, seed, worker_type=worker_type, group_type=group_type, **options)
        assert isinstance(self.top.place, LayerServer)
        self.top.place.watch = self._heard_at_the_top

    def table(self, layer: Layer) -> LeaseTable | None:
        if isinstance(layer.place, LeasingGroup):
            newest = layer.place.newest
            return newest.leases.tables[self.dataset.name] if newest is not None else None
        assert isinstance(layer.place, LayerServer)
        return layer.place.coordinator.leases.tables.get(self.dataset.name)

    def run(self) -> HierarchyHistory:
        history = super().run()
        if not history.violations:
            self.check_data()
        return history

    def _heard_at_the_top(self, event: Event) -> None:
        """What is said to be done is in the model by then."""
        if isinstance(event, UnitsDone):
            ledger = self._ledger()
            missing = [place for place in Ranges(event.places).numbers() if not ledger.holds(place)]
            if missing:
                self.history.violated(f"place {missing[0]} is said to be done, and is not in the top's model yet")

    # --- what must be true at the end -----------------------------------------------------------------------------

    def check_data(self) -> None:
        """Every place that the top ever leased is somewhere, once. What is done is in its model; what is in that more
        than once was counted, there or in a cluster."""
        table, counted = self.table(self.top), 0
        for layer in self.layers:
            below = self.table(layer)
            if isinstance(below, SubLeaseTable):
                self._check_places(layer, below, below.granted - below.given_up)
                counted += layer.place.repeated if isinstance(layer.place, LeasingGroup) else below.repeated
            elif below is not None:
                self.history.violated(f"{layer.name} leases places that nobody has granted to it")
        if table is None:
            return
        self._check_places(self.top, table, Ranges([(0, table.next)]))
        counted += table.repeated
        ledger = self._ledger()
        for place in (table.done - table.spent).numbers():
            if not ledger.holds(place):
                self.history.violated(f"place {place} is said to be done, and is not in the top's model")
        again = sum(ledger.again.values())
        if again > counted:
            twice = sorted(place for place, more in ledger.again.items() if more)
            self.history.violated(f"places {twice} are in the top's model once more, and {counted} are said to be")
        # (Members whose newest table has died go on from an older one, with what the dead had trained since: counted.)
        if again and not table.dataset.again and not self.history.faults["all_holders_died"]:
            self.history.violated(f"{again} places were trained twice, and the run leases nothing again")
        faults = self.history.faults
        faults["model_has_free"] += sum(1 for place in table.free.numbers() if ledger.holds(place))
        faults["units_done"] += (table.done - table.spent).total
        faults["units_repeated"] += counted
        faults["units_again"] += again
        faults["units_in_part"] += ledger.in_part
        faults["units_lost"] += table.lost.total
        faults["units_spent"] += table.spent.total
        faults["units_free"] += table.free.total

    def _check_places(self, layer: Layer, table: LeaseTable, all_of_it: Ranges) -> None:
        live = layer.place.coordinator.members.live_ids if isinstance(layer.place, LayerServer) else table.held
        names = ("free", "lost", "unclaimed", *(("fresh",) if isinstance(table, SubLeaseTable) else ("done",)))
        places = {name: getattr(table, name) for name in names}
        for name, theirs in table.held.items():
            places[f"held by {name}"] = theirs
            if name not in live:
                self.history.violated(f"{layer.name}: {theirs.total} units stay with somebody who has left: {name}")
        union = Ranges()
        for name, some in places.items():
            if union & some:
                self.history.violated(f"{layer.name}: places {union & some} are {name}, and something else")
            union |= some
        if union != all_of_it:
            self.history.violated(f"{layer.name}: places {all_of_it - union} are nowhere, {union - all_of_it} too many")

    def _ledger(self) -> ModelLedger:
        """Of the top's model."""
        applied = self.top.history.applied
        told = [(layer.history.trained, applied) for layer in self.clusters]
        return ModelLedger(self.dataset, self.scenario.fragments, told)
