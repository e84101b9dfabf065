"""The worker's half of leased data, without I/O: what it was leased, has drawn, has trained, and still answers for.

    granted ─▶ queue ──draw──▶ drawn ──all its samples delivered, and a step──▶ open ──agreed, or given up──▶ settled

A worker numbers its units in the order in which it draws them, 0, 1, 2 …, whatever dataset they are of, and trains them
in that order. Its machine knows only these numbers (`Work.units`): of every fragment it knows which are unsent, sent,
agreed on or given up. Here is what they mean: places of a dataset (coordination/leases.py).

A loader draws long before the loop trains. So a unit that is drawn is not trained: samples are counted when they are
*delivered* to the loop, and those delivered before an optimizer step are in that step.

A step that trains a part of a unit and not its end has a number, too, from a line of its own (`PARTS` and above). So
of every contribution it is known which units it holds to the end, of which it has *begun* a part, and of which earlier
ones hold a part. A unit of which some part was given up is *torn*: it is never said to be in the model, and when its
last step is taken it is given up whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ...ranges import NONE, Range, Ranges
from ...types import MOST_RANGES, MOST_WANTED, Dataset, Lease, LeaseAnswer, LeaseStatement, Places, Trained
from .exchange import MemberFields
from .machine import Units, WorkerState

LEAD_S = 20.0  # training for so long is leased ahead, at the worker's pace,
LEAST_AHEAD = 2  # and at least so many units
PACE_MEMORY = 0.9
PLACE_UNKNOWN = -1
PARTS = 1 << 52  # the number of the first step that trains a part of a unit; units have lower ones
UNMEASURED = 1 << 60  # samples of a shard that nobody has read to its end yet


@dataclass
class _NumberedPlaces:
    """Numbers from `first` on, of places from `begin` to `end`."""

    first: int
    dataset: str
    begin: int
    end: int

    @property
    def last(self) -> int:
        """Above its last number."""
        return self.first + self.end - self.begin


@dataclass
class _InParts:
    """A unit that several steps train. `numbers`: of its parts but the last. `torn`: some were given up; `lost`: the
    run has lost some."""

    dataset: str
    place: int
    numbers: Ranges = NONE
    torn: bool = False
    lost: bool = False


@dataclass
class _Drawn:
    """A unit on its way through the loader. `skipped`: samples that had been trained before; `size`: those to come;
    `in_parts`: of these, those in steps that have numbers."""

    number: int
    name: str
    place: int
    skipped: int
    size: int
    in_parts: int = 0


@dataclass
class Holding:
    """One dataset's leases. `queue`: places to be drawn; `open`: trained, and not settled; `dropped`: to be told;
    `partly`: a place of which so many samples were trained before it was put back; `over`: nothing more will come.
    `goes_back`: it has resumed from a state that is older than what it had sent, and the run is to know."""

    dataset: Dataset
    queue: Ranges = NONE
    drawn: Ranges = NONE
    open: Ranges = NONE
    dropped: Ranges = NONE
    partly: Range = (PLACE_UNKNOWN, 0)
    goes_back: bool = False
    delivered: int = 0  # samples of units that are drawn
    over: bool = False
    is_confirmed: bool = True  # by the run, since a restart: an earlier start may have sent some of it
    requests: int = 0
    pace: float = 0.0  # units per second
    trained: int = 0  # units, since the last statement,
    per_turn: float = 0.0  # and between the two before it; 0 = not known yet
    step_samples: int = 0  # of a step of one process, as its loader says; 0 = unsaid

    @property
    def untrained(self) -> int:
        return self.queue.total + self.drawn.total

    @property
    def wanted(self) -> int:
        """How many more should be in the queue: the loader draws ahead, too."""
        return max(LEAST_AHEAD, int(self.pace * LEAD_S + 1)) - self.queue.total

    @property
    def is_due(self) -> bool:
        """Should the next request be made? When half of what is wanted ahead is used up."""
        is_low = self.wanted >= self.queue.total and (not self.over or self.untrained > 0)
        return is_low or bool(self.dropped) or not self.is_confirmed

    @property
    def is_waiting(self) -> bool:
        """Is there nothing to draw, and will there be?"""
        return not self.is_confirmed or (not self.queue and not self.over)


@dataclass(frozen=True)
class LeaseRequest:
    """As in `Lease`."""

    dataset: Dataset
    number: int
    want: int
    holds: Places
    dropped: Places
    untrained: int
    waits: bool
    pace: float
    goes_back: bool = False

    def message(self, head: MemberFields) -> Lease:
        return Lease(
            **head,
            dataset=self.dataset,
            number=self.number,
            want=self.want,
            holds=self.holds,
            dropped=self.dropped,
            untrained=self.untrained,
            waits=self.waits,
            pace=self.pace,
            goes_back=self.goes_back,
        )


@dataclass
class LeasedWork:
    """Of one worker, all datasets. `ranks`: processes of its group, each of which trains its part of each unit; samples
    are counted for one of them."""

    datasets: Sequence[Dataset]
    ranks: int = 1
    holdings: dict[str, Holding] = field(init=False)

    def __post_init__(self) -> None:
        self.holdings = {dataset.name: Holding(dataset) for dataset in self.datasets}
        if len(self.holdings) < len(self.datasets):
            raise ConfigError("two leased datasets have the same name; give each a name of its own")
        self._stretches: deque[_NumberedPlaces] = deque()  # which place each number stands for, while anybody may ask
        self._next = 0
        self._in_parts: dict[int, _InParts] = {}  # by the number of the unit
        self._next_part = PARTS
        self._drawn: deque[_Drawn] = deque()
        self._put_back = NONE  # numbers of units that were drawn and never trained
        self._trained_at: float | None = None

    # --- the loader -------------------------------------------------------------------------------------------------

    def draw(self, name: str, epoch: int | None = None, *, measured: bool = True) -> tuple[int, int] | None:
        """The next place of this epoch (None = of any), and how many of its samples to leave out. None: there is none
        in the queue. Not `measured`: it is a shard, of unknown size until it has been read."""
        holding = self.holdings[name]
        place = next(holding.queue.numbers(), None)
        if place is None or not holding.is_confirmed or (epoch is not None and place // holding.dataset.units != epoch):
            return None
        one = Ranges([(place, place + 1)])
        holding.queue, holding.drawn = holding.queue - one, holding.drawn | one
        skipped = 0
        if holding.partly[0] == place:
            skipped, holding.partly = holding.partly[1], (PLACE_UNKNOWN, 0)
        size = -(-unit_size(holding.dataset, place) // self.ranks) - skipped if measured else UNMEASURED
        number = self._number(name, place)
        if skipped:  # what was trained of it had another number for its end
            for before in [n for n, unit in self._in_parts.items() if (unit.dataset, unit.place) == (name, place)][-1:]:
                self._in_parts[number] = self._in_parts.pop(before)
        self._drawn.append(_Drawn(number, name, place, skipped, size))
        return place, skipped

    def follow(self, name: str, place: int, skipped: int) -> None:
        """What rank 0 of the group has drawn, another rank draws."""
        holding = self.holdings[name]
        holding.queue, holding.partly, holding.is_confirmed = Ranges([(place, place + 1)]), (place, skipped), True
        self.draw(name)

    def measure(self, name: str, samples: int) -> int:
        """The first shard that is drawn and was not read yet has so many samples. How many of them to leave out?"""
        one = next(one for one in self._drawn if one.name == name and one.size == UNMEASURED)
        one.skipped = min(one.skipped, samples)
        one.size = samples - one.skipped
        return one.skipped

    @property
    def draws(self) -> bool:
        """Is anything drawn, and not trained?"""
        return bool(self._drawn)

    def draw_again(self, name: str) -> None:
        """The loop was left early: what was drawn and not trained is drawn again, from the sample that comes next."""
        holding, again = self.holdings[name], [one for one in self._drawn if one.name == name]
        if not again:
            return
        holding.partly = self._partly(name)
        holding.delivered = 0
        self._drawn = deque(one for one in self._drawn if one.name != name)
        self._put_back |= Ranges((one.number, one.number + 1) for one in again)
        holding.queue, holding.drawn = holding.queue | holding.drawn, NONE

    def deliver(self, name: str, samples: int) -> int:
        """So many more are in the next optimizer step. (No more than were drawn: the last batch of an epoch may be
        smaller than the others.) Returns how many those are."""
        holding = self.holdings[name]
        drawn = sum(one.size for one in self._drawn if one.name == name)
        before, holding.delivered = holding.delivered, min(holding.delivered + samples, drawn)
        return holding.delivered - before

    def _number(self, name: str, place: int, places: int = 1) -> int:
        """The number of the first of so many."""
        last = self._stretches[-1] if self._stretches else None
        if last is not None and (last.dataset, last.end, last.last) == (name, place, self._next):
            last.end += places
        else:
            self._stretches.append(_NumberedPlaces(self._next, name, place, place + places))
        self._next += places
        return self._next - places

    @property
    def next_number(self) -> int:
        return self._next

    def begin_after(self, number: int) -> None:
        """The numbers below are of units that somebody else has drawn, whose machine this worker has taken over."""
        self._next, self._put_back = number, Ranges([(0, number)])

    # --- of a cluster, whose members draw and train ---------------------------------------------------------------

    def add(self, dataset: Dataset) -> Holding:
        """One more, or another one of this name."""
        holding = self.holdings.setdefault(dataset.name, Holding(dataset))
        holding.dataset = dataset
        return holding

    def trained_below(self, name: str, places: Ranges) -> Units:
        """These are in the cluster's own model. Their numbers."""
        holding, first = self.holdings[name], self._next
        for begin, end in places:
            self._number(name, begin, end - begin)
        holding.queue, holding.open = holding.queue - places, holding.open | places
        return ((first, self._next),) if places else ()

    # --- training ---------------------------------------------------------------------------------------------------

    def stepped(self, now: float) -> Units:
        """The optimizer has stepped: the numbers of the units that are trained now, and of its parts of others."""
        finished: list[Range] = []
        while self._drawn:
            one = self._drawn[0]
            holding = self.holdings[one.name]
            if holding.delivered < one.size:
                break
            self._drawn.popleft()
            holding.delivered -= one.size
            place = Ranges([(one.place, one.place + 1)])
            holding.drawn, holding.open = holding.drawn - place, holding.open | place
            in_parts = self._in_parts.get(one.number)
            if in_parts is not None and (in_parts.torn or in_parts.lost):
                holding.open -= place
                holding.dropped |= place if in_parts.torn else NONE
            holding.trained += 1
            finished.append((one.number, one.number + 1))
        if finished:
            self._measure(len(finished), now)
        return tuple(Ranges([*finished, *self._begun()]))

    def _begun(self) -> list[Range]:
        """Numbers for the parts that this step has trained of units that do not end with it."""
        numbers: list[Range] = []
        for name, holding in self.holdings.items():
            left = holding.delivered
            for one in self._drawn if left else ():
                if one.name != name:
                    continue
                if min(left, one.size) > one.in_parts:
                    one.in_parts = min(left, one.size)
                    part = (self._next_part, self._next_part + 1)
                    self._next_part += 1
                    unit = self._in_parts.setdefault(one.number, _InParts(name, one.place))
                    unit.numbers |= Ranges([part])
                    numbers.append(part)
                left -= one.size
                if left <= 0:
                    break
        return numbers

    def _measure(self, units: int, now: float) -> None:
        before, self._trained_at = self._trained_at, now
        if before is not None and now > before:
            pace = units / (now - before) / len(self.holdings)
            for holding in self.holdings.values():
                holding.pace = PACE_MEMORY * holding.pace + (1 - PACE_MEMORY) * pace if holding.pace else pace

    def describe(self, units: Units) -> tuple[Trained, ...]:
        """For an offer: the units that end in it, and those of which it holds a part."""
        numbers = Ranges(units)
        found = {name: [places, NONE, NONE, NONE] for name, places in self._places(numbers - self._torn_units).items()}
        for end, unit in self._in_parts.items():
            has_part, has_end, place = bool(unit.numbers & numbers), end in numbers, (unit.place, unit.place + 1)
            if not (has_part or has_end):
                continue
            sets, one = found.setdefault(unit.dataset, [NONE, NONE, NONE, NONE]), Ranges([place])
            if unit.torn or unit.lost:
                sets[3] |= one
                continue
            sets[1] |= NONE if has_end else one
            sets[2] |= one if unit.numbers - numbers else NONE
        return tuple(
            Trained(name, *(tuple(places)[:MOST_RANGES] for places in sets)) for name, sets in sorted(found.items())
        )

    @property
    def _torn_units(self) -> Ranges:
        return Ranges((end, end + 1) for end, unit in self._in_parts.items() if unit.torn or unit.lost)

    def exchanged(self, state: WorkerState) -> None:
        """What every fragment's agreements hold or have lost is settled; what was given up is to be told. (What is to
        count in a round to come is not: the server may be killed before it has closed that round.)"""
        dropped = self._places(state.dropped)
        self._tear(Ranges(state.dropped), Ranges(state.lost))
        state.dropped = state.lost = ()
        for name, places in dropped.items():
            self.holdings[name].dropped |= places
        settled: Ranges | None = None
        for progress in state.fragments:
            counted = Ranges(progress.counted.units) - Ranges(progress.late_units)
            settled = counted if settled is None else settled & counted
        waiting = Ranges([(0, self._next)]) - (settled or NONE) - self._put_back
        trained = waiting - Ranges((one.number, one.number + 1) for one in self._drawn)
        still_open = self._places(trained - self._torn_units)  # by number: a place may have been trained once more
        for name, holding in self.holdings.items():
            holding.open = still_open.get(name, NONE)
        first = next(waiting.numbers(), self._next)
        while self._stretches and self._stretches[0].last <= first:
            self._stretches.popleft()
        for end, unit in list(self._in_parts.items()):
            holding = self.holdings[unit.dataset]
            goes_on = end in waiting or unit.place in holding.queue
            if not goes_on and not (unit.numbers - (settled or NONE)):
                del self._in_parts[end]

    def _tear(self, dropped: Ranges, lost: Ranges) -> None:
        """These numbers were given up, and the run has lost those."""
        drawn = {one.number for one in self._drawn}
        for end, unit in self._in_parts.items():
            holding = self.holdings[unit.dataset]
            if unit.numbers & dropped and not holding.goes_back:  # (else they are in what an earlier start has sent)
                unit.torn = True
                if end not in drawn and end not in self._put_back:  # (of the others it is told when they end)
                    holding.dropped |= Ranges([(unit.place, unit.place + 1)])
            unit.lost = unit.lost or bool(unit.numbers & lost)

    def _places(self, units: Iterable[Range]) -> dict[str, Ranges]:
        """Which places these numbers stand for, by dataset."""
        wanted, found = Ranges(units), dict[str, list[Range]]()
        for one in self._stretches if wanted else ():
            shift = one.begin - one.first
            for begin, end in wanted & Ranges([(one.first, one.last)]):
                found.setdefault(one.dataset, []).append((begin + shift, end + shift))
        return {dataset: Ranges(places) for dataset, places in found.items()}

    # --- leasing ----------------------------------------------------------------------------------------------------

    def request(self, name: str) -> LeaseRequest:
        holding = self.holdings[name]
        holding.requests += 1
        holds = holding.queue | holding.drawn | holding.open
        return LeaseRequest(
            holding.dataset,
            holding.requests,
            min(max(holding.wanted, 0), MOST_WANTED),
            tuple(holds)[:MOST_RANGES],
            tuple(holding.dropped)[:MOST_RANGES],
            holding.untrained,
            holding.is_waiting,
            min(holding.pace, 1e9),
            holding.goes_back,
        )

    def statement(self, name: str, steps: int, turn: int) -> LeaseStatement:
        """For those who hold the table together with this worker. `steps`: from one exchange to the next; `turn`: of
        the last decision that this one knows of."""
        holding = self.holdings[name]
        trained, holding.trained = holding.trained, 0
        if trained:
            holding.per_turn = float(trained)
        expected = steps * holding.step_samples * self.ranks / holding.dataset.unit_samples
        holds = holding.queue | holding.drawn | holding.open
        return LeaseStatement(
            dataset=name,
            holds=tuple(holds)[:MOST_RANGES],
            spare=tuple(holding.queue)[:MOST_RANGES],
            dropped=tuple(holding.dropped)[:MOST_RANGES],
            untrained=holding.untrained,
            pace=min(holding.per_turn or expected, 1e9),
            turn=turn,
        )

    def was_decided(self, statements: Iterable[LeaseStatement]) -> None:
        """All have heard these."""
        for said in statements:
            self.holdings[said.dataset].dropped -= Ranges(said.dropped)

    def answered(self, request: LeaseRequest, answer: LeaseAnswer) -> None:
        """What is void and was not drawn is somebody else's by now, or done. (What it has is never drawn once more,
        whatever a server that heard an old request believes.)"""
        holding = self.holdings[request.dataset.name]
        new = Ranges(answer.granted) - holding.drawn - holding.open
        holding.dropped -= Ranges(request.dropped)
        holding.goes_back = holding.goes_back and not request.goes_back
        holding.queue = (holding.queue - Ranges(answer.void)) | new
        if holding.partly[0] in Ranges(answer.void):  # should it come again, then from its beginning
            holding.partly = (PLACE_UNKNOWN, 0)
        holding.over, holding.is_confirmed = answer.state == "over", True

    # --- over a restart ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Between two steps; plain values. What was drawn and not trained is to be drawn again."""
        put_back = self._put_back | Ranges((one.number, one.number + 1) for one in self._drawn)
        return {
            "numbers": [[one.first, one.dataset, one.begin, one.end] for one in self._stretches],
            "next": self._next,
            "in_parts": [
                [end, unit.dataset, unit.place, [list(part) for part in unit.numbers], unit.torn, unit.lost]
                for end, unit in self._in_parts.items()
            ],
            "next_part": self._next_part,
            "put_back": [list(one) for one in put_back],
            "datasets": {
                name: {
                    "queue": [list(one) for one in holding.queue | holding.drawn],
                    "open": [list(one) for one in holding.open],
                    "dropped": [list(one) for one in holding.dropped],
                    "partly": list(self._partly(name)),
                    "goes_back": holding.goes_back,
                    "pace": holding.pace,
                }
                for name, holding in self.holdings.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._stretches = deque(
            _NumberedPlaces(int(a), str(name), int(b), int(c)) for a, name, b, c in state["numbers"]
        )
        self._next, self._put_back = int(state["next"]), Ranges(state["put_back"])
        self._in_parts = {
            int(end): _InParts(str(name), int(place), Ranges(numbers), bool(torn), bool(lost))
            for end, name, place, numbers, torn, lost in state["in_parts"]
        }
        self._next_part = int(state["next_part"])
        for name, facts in state["datasets"].items():
            holding = self.holdings.get(name)
            if holding is None:
                known = ", ".join(sorted(self.holdings)) or "none"
                raise ConfigError(f"the saved state has leases of dataset {name!r}, and this worker trains {known}")
            holding.queue, holding.open = Ranges(facts["queue"]), Ranges(facts["open"])
            holding.dropped, holding.pace = Ranges(facts["dropped"]), float(facts["pace"])
            place, trained = facts["partly"]
            holding.partly = int(place), int(trained)
            holding.goes_back = bool(facts["goes_back"])
            holding.is_confirmed = False

    def resumed(self, *, goes_back: bool) -> None:
        """From a state, whether it is older than what was sent."""
        for holding in self.holdings.values():
            holding.goes_back = holding.goes_back or goes_back

    def _partly(self, name: str) -> Range:
        first = next((one for one in self._drawn if one.name == name), None)
        holding = self.holdings[name]
        return holding.partly if first is None else (first.place, first.skipped + holding.delivered)


def unit_size(dataset: Dataset, place: int) -> int:
    """How many samples it has: the last unit of an epoch may have fewer."""
    begin = place % dataset.units * dataset.unit_samples
    return min(dataset.unit_samples, dataset.samples - begin)
