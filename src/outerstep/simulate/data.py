"""Simulated workers that train leased data: each step is one unit, as long as there is one.

Both ends are those that ship: coordination/leases.py in the simulated server, coordination/worker/units.py here. What
is in the model is known by the names of the steps (history.py), so "exactly once" can be read off for the data, too.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

from msgspec import structs

from ..coordination.leases import NO_END
from ..coordination.worker.effects import Send
from ..coordination.worker.exchange import MemberFields
from ..coordination.worker.units import LeasedWork, LeaseRequest
from ..errors import OuterstepError
from ..ranges import Ranges
from ..types import MOST_RANGES, MOST_WANTED, Answer, Dataset, Lease, LeaseAnswer, Trained
from .agenda import Agenda
from .history import History
from .scenario import Scenario
from .server import SimServer
from .server_liar import SimLiar
from .worker import SimSaved, SimWorker

ASK_AGAIN_S = 2.0


class SimDataWorker(SimWorker):
    dataset: Dataset
    work_type: type[LeasedWork] = LeasedWork

    def _begin_data(self) -> None:
        self.units = self.work_type([self.dataset])
        self._request: LeaseRequest | None = None
        self._ask_at = 0.0

    def _resume(self, saved: SimSaved) -> None:
        self.units.load_state(deepcopy(saved.data))
        super()._resume(saved)

    def _save(self) -> None:
        super()._save()
        assert self.saved is not None
        self.saved.data = deepcopy(self.units.state())

    def _train(self) -> None:
        self.units.exchanged(self.machine.state)
        holding = self.units.holdings[self.dataset.name]
        if holding.is_due and self._agenda.now >= self._ask_at:
            self._ask_at = self._agenda.now + ASK_AGAIN_S
            self._request = self.units.request(self.dataset.name)
            answered = partial(self._leased, self._request)
            self._carrier.fire(self._request.message(self._session.head), answered)
        super()._train()

    def _leased(self, request: LeaseRequest, answer: Answer | OuterstepError) -> None:
        """A real worker has one request under way: it hears no answer to an earlier one."""
        if isinstance(answer, LeaseAnswer) and request is self._request:
            self.units.answered(request, answer)
            self._request = None

    def _step(self) -> None:
        drawn = self.units.draw(self.dataset.name)
        if drawn is not None:
            self.units.deliver(self.dataset.name, 1)
            self.machine.count(0, 0, self.units.stepped(self._agenda.now))
            self._history.trained[self.worker_id, self.steps_taken + 1] = drawn[0]
        super()._step()

    def _describe(self, send: Send) -> tuple[Trained, ...]:
        return self.units.describe(send.units)


class SimDataLiar(SimLiar):
    """A worker with a valid token that wants the others to go without data. It says that it is a billion times as fast
    as they are and has trained all that it has; that it holds what nobody was leased; it gives back and takes again,
    so that there is more to write down; it asks for datasets that nobody has; and says that others' units are in what
    it contributes. It never brings a unit of its own."""

    def __init__(self, scenario: Scenario, agenda: Agenda, server: SimServer, dataset: Dataset) -> None:
        super().__init__(replace(scenario, liar="voices"), agenda, server)
        self._dataset, self._number = dataset, 0
        self._held = self._ever_held = Ranges()

    def _speak(self) -> None:
        super()._speak()
        if self._joined is None or not self._server.is_up:
            return
        head = MemberFields(run_id=self._joined.run_id, worker_id="liar", incarnation=self._joined.incarnation)
        self._number += 1
        gives_back, dataset = self._number % 7 == 0, self._dataset
        if self._number % 11 == 0:
            dataset = structs.replace(dataset, name=f"name-{self._number}")
        far = (NO_END // 2, NO_END // 2 + 3)
        holds = () if gives_back else (*tuple(self._held)[: MOST_RANGES - 1], far)
        lease = Lease(**head, dataset=dataset, number=self._number, want=MOST_WANTED, holds=holds, waits=True, pace=1e9)
        self._server.handle(lease, [], partial(self._leased, gives_back=gives_back, is_theirs=dataset is self._dataset))

    def _leased(self, answer: Answer | OuterstepError, *, gives_back: bool, is_theirs: bool) -> None:
        if isinstance(answer, LeaseAnswer) and is_theirs:
            self._held = (Ranges() if gives_back else self._held - Ranges(answer.void)) | Ranges(answer.granted)
            self._ever_held |= Ranges(answer.granted)

    @property
    def granted(self) -> int:
        return self._ever_held.total

    def _claimed(self) -> tuple[Trained, ...]:
        """What the others have, and it never had."""
        table = self._server.coordinator.leases.tables.get(self._dataset.name)
        if table is None:
            return ()
        others = Ranges(each for name, theirs in table.held.items() if name != "liar" for each in theirs)
        return (
            Trained(dataset=self._dataset.name, places=tuple((others | table.done) - self._ever_held)[:MOST_RANGES]),
        )


def check_data(server: SimServer, dataset: Dataset, history: History, fragments: int) -> None:
    """When everybody has left (though the server may have been killed before it noted that): every place that was ever
    leased is somewhere, once; what is done is in the model, and what is in it more than once was counted."""
    table, live = server.coordinator.leases.tables.get(dataset.name), server.coordinator.members.live_ids
    if table is None:
        return
    places = {name: getattr(table, name) for name in ("done", "free", "lost", "unclaimed")}
    for name, theirs in table.held.items():
        places[f"held by {name}"] = theirs
        if name not in live:
            history.violated(f"{theirs.total} units stay with somebody who has left: {name}")
    union = Ranges()
    for name, some in places.items():
        if union & some:
            history.violated(f"places {union & some} are {name}, and something else")
        union |= some
    if union != Ranges([(0, table.next)]):
        history.violated(f"of {table.next} places that were leased, {Ranges([(0, table.next)]) - union} are nowhere")
    found = [Counter[int]() for _ in range(fragments)]
    for step, place in history.trained.items():
        for fragment, counts in enumerate(found):
            counts[place] += (fragment, step) in history.applied
    whole = {place: min(counts[place] for counts in found) for place in found[0]}  # so often in all of the model
    for place in (table.done - table.spent).numbers():
        if not whole.get(place):
            history.violated(f"place {place} is said to be done, and is not in the model")
    again = sum(count - 1 for count in whole.values() if count > 1)
    if again > table.repeated and not history.may_go_back:
        history.violated(f"{again} places are in the model once more, and {table.repeated} are said to be")
    if not table.dataset.again and again:
        history.violated(f"{again} places were trained twice, and the run leases nothing again")
    missed = [place for place, count in whole.items() if count and place in table.free]
    history.faults["model_has_free"] += len(missed)
    history.faults["units_done"] += table.done.total
    history.faults["units_repeated"] += table.repeated
    history.faults["units_lost"] += table.lost.total
    history.faults["units_spent"] += table.spent.total
