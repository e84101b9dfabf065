"""Simulated peers that train leased data: each step is one unit, and the table is what the blocks have made of it.

A peer that is started again has lost what it trained and had not contributed. A history is which unit is in which
fragment's decided rounds.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from msgspec import UNSET

from ..coordination.gossip.heard import signed_in
from ..coordination.shared_leases import SharedLeases, shortened
from ..coordination.worker.machine import Cycle, Progress, Units, Work, WorkerState
from ..coordination.worker.units import LeasedWork, LeaseRequest
from ..ranges import Ranges
from ..statements import Decision, Member, Round
from ..types import Dataset, LeaseAnswer
from .gossip import GossipWorld, SimPeer

MOST_STEPS = 6  # between two times that it may contribute


class SimDataPeer(SimPeer):
    world: DataWorld

    def start(self, *, disk_is_lost: bool = False) -> None:
        self.units = LeasedWork([self.world.dataset])
        self.units.holdings["train"].step_samples = 1
        fragments = self.world.scenario.fragments
        self._unsent, self._agreed = [Ranges()] * fragments, [Ranges()] * fragments
        self._offers: dict[tuple[int, int], Units] = {}  # by fragment and sequence
        super().start(disk_is_lost=disk_is_lost)

    def _answer(self, request: LeaseRequest) -> LeaseAnswer:
        return self._table.answer(self.name, request)

    @property
    def _table(self) -> SharedLeases:
        assert self.machine.state.data is not UNSET
        return self.world.read(self.machine.state.data)

    def _hear(self) -> None:
        request = self.units.request("train")
        self.units.answered(request, self._answer(request))

    def _train(self) -> None:
        steps = self.world.rng.randint(1, MOST_STEPS) if self.machine.is_member else 0
        for _ in range(steps):
            if not self.units.holdings["train"].queue:
                self._hear()
            if self.units.draw("train") is None:
                break
            self.units.deliver("train", 1)
            trained = Ranges(self.units.stepped(self.world.agenda.now))
            self._unsent = [unsent | trained for unsent in self._unsent]
        super()._train()

    def _leased(self, fragment: int) -> dict[str, Any]:
        self._hear()
        units = tuple(self._unsent[fragment])
        self._offers[fragment, self.machine.keepsake.sequences[fragment] + 1] = units
        said = self.units.statement("train", MOST_STEPS, self._table.turn)
        return {"data": shortened([said]), "trained": self.units.describe(units)}

    def _took(self, decision: Decision) -> None:
        block = decision.block
        self.world.decided(block.height, block)
        for signed, says in signed_in(block) if isinstance(block, Round) else ():
            units = self._offers.pop((says.fragment, says.sequence), None) if self._said(signed.author) else None
            if units is None or not isinstance(block, Round):
                continue
            self._agreed[block.fragment] |= Ranges(units)
            self._unsent[block.fragment] -= Ranges(units)
            progress = [Progress(0, Work(units=tuple(agreed)), 0) for agreed in self._agreed]
            self.units.exchanged(WorkerState(Work(), Cycle(0, MOST_STEPS), progress))
            self.units.was_decided(() if says.data is UNSET else says.data)

    def _said(self, author: str) -> bool:
        return author == self.machine.member.key

    def _after_anything(self) -> None:
        super()._after_anything()
        state = self.machine.state
        if state.data is not UNSET and self.world.tables.setdefault(state.height, state.data) != state.data:
            self.world.history.violated(f"{self.name} has another lease table at height {state.height}")


class DataWorld(GossipWorld):
    """Its peers lease; the liar, if there is one, trains nothing."""

    peer_type = SimDataPeer

    def __init__(self, *given: Any) -> None:
        rng = random.Random(f"gossip data {given[1]}")
        self.dataset = Dataset(
            name="train",
            samples=rng.choice([40, 120, 100_000]),
            unit_samples=1,
            epochs=rng.choice([1, 1, 2]),
            again=rng.random() < 0.7,
        )
        self.tables: dict[int, bytes] = {}
        self._model: list[Counter[int]] = []
        self._counted: set[int] = set()
        self._read: dict[bytes, SharedLeases] = {}
        super().__init__(*given)
        self._model = [Counter() for _ in range(self.scenario.fragments)]

    def found_data(self, founder: Member) -> bytes:
        leases = SharedLeases([self.dataset])
        leases.decide({founder.peer_id: founder.key}, {}, {})
        return leases.encode()

    def read(self, data: bytes) -> SharedLeases:
        if data not in self._read:
            self._read = {data: SharedLeases.decode(data)}
        return self._read[data]

    def decided(self, height: int, block: object) -> None:
        if height in self._counted or not isinstance(block, Round):
            return
        self._counted.add(height)
        for _, says in signed_in(block):
            for one in () if says.trained is UNSET else says.trained:
                self._model[block.fragment].update(Ranges(one.places).numbers())

    def check(self) -> None:
        newest = max((peer.machine.state for peer in self.honest), key=lambda state: state.height)
        assert newest.data is not UNSET
        table, violated = self.read(newest.data).tables["train"], self.history.violated
        places = {name: getattr(table, name) for name in ("done", "free", "lost")} | dict(table.held)
        union = Ranges()
        for name, some in places.items():
            if union & some:
                violated(f"places {union & some} are {name}, and something else")
            union |= some
        if union != Ranges([(0, table.next)]):
            violated(f"of {table.next} places that were leased, {Ranges([(0, table.next)]) - union} are nowhere")
        whole = {place: min(counts[place] for counts in self._model) for place in self._model[0]}
        for place in (table.done - table.spent).numbers():
            if not whole.get(place):
                violated(f"place {place} is said to be done, and is not in the model")
        again = sum(count - 1 for count in whole.values() if count > 1)
        if again > table.repeated:
            violated(f"{again} places are in the model once more, and {table.repeated} are said to be")
        self.history.faults["units_done"] += table.done.total
        self.history.faults["units_repeated"] += table.repeated
        self.history.faults["units_lost"] += table.lost.total
