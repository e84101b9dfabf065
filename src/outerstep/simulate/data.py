"""Simulated workers that train leased data: each step is a batch of samples, as long as there are any.

Both ends are those that ship: coordination/leases.py in the simulated server, coordination/worker/units.py here. What
is in the model is known by the names of the steps (history.py), so "exactly once" can be read off for each sample, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial

from msgspec import structs

from ..coordination.leases import NO_END
from ..coordination.worker.effects import Send
from ..coordination.worker.exchange import MemberFields
from ..coordination.worker.units import LeasedWork, LeaseRequest, unit_size
from ..errors import OuterstepError
from ..ranges import Ranges
from ..types import MOST_RANGES, MOST_WANTED, Answer, Dataset, Lease, LeaseAnswer, Trained
from .agenda import Agenda
from .history import History, Sample, StepName
from .scenario import Scenario
from .server import SimServer
from .server_liar import SimLiar
from .worker import SimSaved, SimWorker

ASK_AGAIN_S = 2.0


class SimDataWorker(SimWorker):
    """A step has `batch` samples. Where units have another size, contributions begin and end in the middle of some."""

    dataset: Dataset
    batch = 1
    work_type: type[LeasedWork] = LeasedWork

    def _begin_data(self) -> None:
        self.units = self.work_type([self.dataset])
        self._request: LeaseRequest | None = None
        self._ask_at = 0.0
        self._drawn: deque[Sample] = deque()

    def _resume(self, saved: SimSaved) -> None:
        self.units.load_state(deepcopy(saved.data))
        self.units.resumed(goes_back=bool(self._overtaken(saved)))
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
        while len(self._drawn) < self.batch:
            drawn = self.units.draw(self.dataset.name)
            if drawn is None:
                break
            place, skipped = drawn
            self._drawn.extend((place, i) for i in range(skipped, unit_size(self.dataset, place)))
        samples = [self._drawn.popleft() for _ in range(min(self.batch, len(self._drawn)))]
        if samples:
            self.units.deliver(self.dataset.name, len(samples))
            self.machine.count(0, 0, self.units.stepped(self._agenda.now))
            self._history.trained[self.worker_id, self.steps_taken + 1] = samples
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


class ModelLedger:
    """Which samples are in a model, and how often, read off the names of the steps in it. `told`: what each step has
    trained, and which steps each fragment holds."""

    def __init__(
        self,
        dataset: Dataset,
        fragments: int,
        told: Iterable[tuple[Mapping[StepName, list[Sample]], Collection[tuple[int, StepName]]]],
    ) -> None:
        self._dataset = dataset
        self._found = [Counter[Sample]() for _ in range(fragments)]
        for trained, applied in told:
            for step, samples in trained.items():
                for fragment, counts in enumerate(self._found):
                    if (fragment, step) in applied:
                        counts.update(samples)
        self.again: dict[int, int] = {}  # by place, how often some sample of it is in all of the model once more
        self.in_part = 0  # places of which not every sample is there once more
        for sample in self._found[0]:
            more = min(counts[sample] for counts in self._found) - 1
            self.again[sample[0]] = max(self.again.get(sample[0], 0), more, 0)
        for place, more in self.again.items():
            self.in_part += more > 0 and min(self._count(sample) for sample in self._samples(place)) <= more

    def holds(self, place: int) -> bool:
        """Every sample of it, in every fragment."""
        return all(self._count(sample) for sample in self._samples(place))

    def _count(self, sample: Sample) -> int:
        return min(counts[sample] for counts in self._found)

    def _samples(self, place: int) -> list[Sample]:
        return [(place, i) for i in range(unit_size(self._dataset, place))]


def check_data(server: SimServer, dataset: Dataset, history: History, fragments: int) -> None:
    """When everybody has left (though the server may have been killed before it noted that): every place that was ever
    leased is somewhere, once; of what is done each sample is in the model, and what is in it more than once was
    counted."""
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
    ledger = ModelLedger(dataset, fragments, [(history.trained, history.applied)])
    for place in (table.done - table.spent).numbers():
        if not ledger.holds(place):
            history.violated(f"place {place} is said to be done, and is not in the model")
    again = sum(ledger.again.values())
    if again > table.repeated and not history.may_go_back:
        history.violated(f"{again} places are in the model once more, and {table.repeated} are said to be")
    if not table.dataset.again and again:
        history.violated(f"{again} places were trained twice, and the run leases nothing again")
    missed = [place for place in table.free.numbers() if ledger.holds(place)]
    history.faults["model_has_free"] += len(missed)
    history.faults["units_done"] += table.done.total
    history.faults["units_again"] += again
    history.faults["units_in_part"] += ledger.in_part
    history.faults["units_repeated"] += table.repeated
    history.faults["units_lost"] += table.lost.total
    history.faults["units_spent"] += table.spent.total
