"""Leased data without a server, without I/O: every member holds the lease table, and changes it as all have decided.

What members decide together anyway (a quorum of torchft, a block of peers, a round of ranks) says who is there, what
each has contributed and what it says of its data. From equal tables and an equal decision come equal tables: so nobody
asks and nobody answers, and a lease needs no message.

    decide    what was contributed is done, as ever (leases.py)
              what a member that is gone held is free
              what is free, and what somebody holds beyond its part, is divided anew
    answer    what is mine now? Read from the own table

A member is given its part, by speed, of all that is left of an epoch, and of the next one before it runs out of it: it
must last until the next decision, whenever that is. Time is counted in decisions: a pace is units per decision.

What is in all fragments' agreements is done as far as its member is believed: at the pace of the others, or its own
(`Crowd.believable`). The rest is doubted: it stays that member's, is done a little later, and goes to others if it is
much. So one that calls its whole part trained at each decision gets no more than the fastest that is believed.

What goes back is the end of what a member says it has not drawn (`spare`). It trains on while that is decided, so it
may have drawn some of it by then: such a unit is in the model twice, and counted (`repeated`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import msgspec

from ..digest import data_hash
from ..errors import BadRequest
from ..events import Event
from ..ranges import NONE, Ranges
from ..types import MOST_RANGES, Dataset, LeaseAnswer, LeaseStatement, Places, Trained
from .kept_leases import check_kept, read_kept
from .leases import ASK_AGAIN_S, HELD_PIECES, NO_END, Leases, LeaseTable
from .shares import FairShares
from .weights import MAX_WEIGHT_RATIO
from .worker.units import LeaseRequest

LEAD_TURNS = 4.0  # so many decisions' worth of units is held ahead
SLACK = 8  # a member keeps up to an eighth more than its part: else units would wander at each decision
MOST_PIECES = 48  # ranges that a member is given: what it says of them must fit an offer
MOST_SAID, MOST_TRAINED = 32, 64  # ranges of each kind, where many offers make a block
MOST_LOST = 16  # ranges that go back at one decision because their member does not say that it holds them
MOST_GIFTS = 64  # of which a member may not have heard yet
MOST_OPENED = 16  # epochs, at one decision: tiny ones


class SharedTable(LeaseTable):
    """One dataset, as all members have it. `reserved` is `next`: nothing is leased beside the decisions."""

    def __init__(self, dataset: Dataset, owner: str = "") -> None:
        super().__init__(dataset, owner)
        self.recent: dict[str, list[tuple[int, Ranges]]] = {}  # what each was given, and at which decision
        self.doubted: dict[str, Ranges] = {}  # in all fragments' agreements, more than their member is believed
        self._ratio = inf
        self._crowd = self.shares.among((), 0.0)  # as it was when this decision began
        self._credited: dict[str, int] = {}  # units by this decision

    def open(self, members: Collection[str], now: float, *, may_lie: bool) -> None:
        """A decision begins. `may_lie`: some member may, so that nobody counts for more data than for weight."""
        self._ratio = MAX_WEIGHT_RATIO if may_lie else inf
        self._crowd = self.shares.among(members, now, self._ratio)
        self._credited = {}

    def _believed(self, worker_id: str, places: Ranges) -> Ranges:
        """The first of them, as many as it can have trained beside what this decision counts already."""
        room = int(min(self._crowd.believable(worker_id), NO_END)) - self._credited.get(worker_id, 0)
        believed = places.first(max(room, 0))
        self._credited[worker_id] = self._credited.get(worker_id, 0) + believed.total
        return believed

    def _hand(self, worker_id: str) -> int:
        """Where members may lie, with what is doubted: it is not given more instead."""
        hand = super()._hand(worker_id)
        return hand if self._ratio == inf else hand + self.doubted.get(worker_id, NONE).total

    def _note_brought(self, worker_id: str, units: int, now: float) -> None:
        """When the decision ends, and as far as it is believed."""

    def closed(self, fragment: int, version: int, left_out: Collection[str], fragments: int) -> list[Event]:
        told = super().closed(fragment, version, left_out, fragments)
        for worker_id in sorted(self.doubted) if version else ():
            told += self._complete(worker_id, NONE, version)
        return told

    def _complete(self, worker_id: str, finished: Ranges, version: int) -> list[Event]:
        places = self.doubted.get(worker_id, NONE) | finished
        believed = self._believed(worker_id, places)
        self._put(self.doubted, worker_id, places - believed)
        return super()._complete(worker_id, believed, version)

    def _uncover(self, worker_id: str, places: Ranges) -> None:
        super()._uncover(worker_id, places)
        self._put(self.doubted, worker_id, self.doubted.get(worker_id, NONE) - places)

    def _give_up(self, worker_id: str, places: Ranges) -> None:
        """What is spent counts as done: as far as its member is believed to have trained it."""
        places &= self.held.get(worker_id, NONE)
        believed = self._believed(worker_id, places)
        self._take_back(worker_id, places - believed)
        super()._give_up(worker_id, believed)

    def accept(self, worker_id: str, fragment: int, version: int, places: Places, now: float) -> None:
        if not self._crumbles(worker_id, Ranges(places)):
            super().accept(worker_id, fragment, version, places, now)

    def _brought_before(self, worker_id: str) -> Ranges:
        """By any start of it: one that was killed when it had offered something may be back before all have decided."""
        return self.finished.get(worker_id, NONE)

    def _crumbles(self, worker_id: str, places: Ranges) -> bool:
        """Would what is left of its places be in crumbs without these? The table would grow with each, in the hands of
        all members, and none of them could be joined or resumed. An honest member trains them in their order."""
        whole = self.held.get(worker_id, NONE) | self.lapsed.get(worker_id, NONE)
        return (whole - places).pieces > max(whole.pieces, HELD_PIECES)

    def hear(self, worker_id: str, said: LeaseStatement, now: float) -> None:
        """What a member holds and has given up."""
        self._absent.discard(worker_id)
        self._hands.pop(worker_id, None)
        dropped = Ranges(said.dropped)
        if not self._crumbles(worker_id, dropped):
            self._put(self.dropped, worker_id, self.dropped.get(worker_id, NONE) | dropped)
        self._settle_dropped(worker_id)
        news = self.recent[worker_id] = [one for one in self.recent.get(worker_id, ()) if one[0] > said.turn]
        holds, held = Ranges(said.holds), self.held.get(worker_id, NONE)
        for _, places in news:  # of which it had not heard when it said this
            holds |= places & held
        # (What some fragment's agreements hold already is among what it holds, or it will never bring the rest.)
        lost = Ranges(list(held - holds - self.doubted.get(worker_id, NONE))[:MOST_LOST])
        self._take_back(worker_id, lost)
        left = held - lost
        self._reconcile(worker_id, left | holds if (left | holds).pieces <= max(left.pieces, HELD_PIECES) else left)
        self.shares.told(worker_id, said.untrained, said.pace, now)

    def divide(self, said: Mapping[str, LeaseStatement], members: Collection[str], now: float) -> None:
        """All that is left, by speed. Every epoch by itself: all train the same one. Where nobody has `said` anything,
        members have come or gone, and everybody's part is cut at its end."""
        for worker_id, units in sorted(self._credited.items()):
            self.shares.brought(worker_id, units, now)
        weights, needs = self._weights(members, now)
        if not weights:
            return
        self.recent = {name: given for name, given in self.recent.items() if name in weights}
        self.finished = {name: places for name, places in self.finished.items() if name in weights}
        self._level(said, weights)
        self._give_out(weights, now)
        self._open_epochs(weights, needs, now)

    def _open_epochs(self, weights: Mapping[str, float], needs: Mapping[str, float], now: float) -> None:
        """As many as somebody needs to have enough ahead."""
        opened = 0
        while self.next < self.end and opened < MOST_OPENED and self._is_short(needs):
            begin, opened = self.next, opened + 1
            self.next = self.reserved = min((begin // self.dataset.units + 1) * self.dataset.units, self.end)
            self.free |= Ranges([(begin, self.next)])
            self._give_out(weights, now)

    def _weights(self, members: Collection[str], now: float) -> tuple[dict[str, float], dict[str, float]]:
        """By member, its part, and how many units it must hold."""
        crowd = self.shares.among(members, now, self._ratio)
        paces = {name: crowd.pace(name) if name in set(crowd) else 0.0 for name in sorted(members)}
        known = [pace for pace in paces.values() if pace > 0.0]
        usual = sum(known) / len(known) if known else 1.0
        equal = self.dataset.units / max(len(paces), 1)
        weights = {name: pace or usual for name, pace in paces.items()}
        return weights, {name: LEAD_TURNS * pace if pace else equal for name, pace in paces.items()}

    @property
    def _more_may_come(self) -> bool:
        """Beside what is free or in hands."""
        return self.next < self.end

    def _is_short(self, needs: Mapping[str, float]) -> bool:
        return any(self._hand(name) < need for name, need in needs.items())

    def _fair_parts(self, weights: Mapping[str, float]) -> dict[str, int]:
        """What each should hold, of all that is in hands or free."""
        total, whole = self.free.total + sum(map(self._hand, weights)), sum(weights.values())
        return {name: int(total * weight / whole) for name, weight in weights.items()}

    def _level(self, said: Mapping[str, LeaseStatement], weights: Mapping[str, float]) -> None:
        """What somebody holds beyond its part goes back. (One-way, nothing ever does.) One that holds twice as much
        cannot keep it by saying that it has drawn it all."""
        if not self.dataset.again:
            return
        parts = self._fair_parts(weights)
        is_more = self.free or self._more_may_come or any(map(super()._hand, weights))
        for name, part in parts.items():
            hand = self.held.get(name, NONE) - self._under_way(name)
            spare = NONE if said else hand
            if name in said:
                spare = hand & Ranges(said[name].spare[-MOST_SAID:])
            kept = part + part // SLACK + 1
            least = hand.total - spare.total
            if name in said and least > 2 * part + MOST_PIECES:
                spare, least = hand, 0
            self._take_back(name, spare - spare.first(max(kept - least, 0)))
            doubted = self.doubted.get(name, NONE) & self.held.get(name, NONE)
            self._take_back(name, doubted - doubted.first(2 * part + MOST_PIECES if is_more else 0))

    def _give_out(self, weights: Mapping[str, float], now: float) -> None:
        """What is free, to those that have least of their part; the lowest places first."""
        parts = self._fair_parts(weights)
        wanting = {name: part - self._hand(name) for name, part in parts.items() if part > self._hand(name)}
        wanting = wanting or {min(weights, key=lambda name: (self._hand(name) / weights[name], name)): 1}
        whole, total, given = sum(wanting.values()), self.free.total, 0
        wanted_before = 0
        for name, wanted in wanting.items():
            wanted_before += wanted
            upto = total * wanted_before // whole
            room = MOST_PIECES - self.held.get(name, NONE).pieces
            granted = Ranges(list(self.free.first(upto - given))[: max(room, 0)])
            given = upto
            if granted:
                self._hand_over(name, granted)
                self.recent[name] = [*self.recent.get(name, []), (int(now), granted)][-MOST_GIFTS:]

    def answer(self, worker_id: str, request: LeaseRequest) -> LeaseAnswer:
        held, holds = self.held.get(worker_id, NONE), Ranges(request.holds)
        granted = held - holds - self._under_way(worker_id)
        over = not granted and not self.free and not self._more_may_come
        return LeaseAnswer(
            state="over" if over else "more",
            granted=tuple(granted)[:MOST_RANGES],
            void=tuple(holds - held)[:MOST_RANGES],
            retry_after_s=0.0 if granted or over else ASK_AGAIN_S,
        )

    # --- over a restart, and for a member that heals ------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """Everything from which anything follows: else two members would decide differently."""
        counted = {name: [list(one) for one in places] for name, places in self._counted.items()}
        finished = {name: [list(one) for one in places] for name, places in self.finished.items()}
        recent = {
            name: [[turn, [list(one) for one in places]] for turn, places in given]
            for name, given in self.recent.items()
        }
        return {
            **super().remembered(),
            "counted": counted,
            "recent": recent,
            "finished": finished,
            "doubted": {name: [list(one) for one in places] for name, places in self.doubted.items()},
            "shares": self.shares.remembered(),
        }

    @classmethod
    def resumed(cls, facts: Mapping[str, Any], claimable_until: float = 0.0, *, forgetful: bool = False) -> SharedTable:
        made = super().resumed(facts, claimable_until, forgetful=forgetful)
        assert isinstance(made, SharedTable)
        made._counted = {str(name): Ranges(places) for name, places in facts["counted"].items()}
        made.recent = {
            str(name): [(int(turn), Ranges(places)) for turn, places in given]
            for name, given in facts["recent"].items()
        }
        made.finished = {str(name): Ranges(places) for name, places in facts["finished"].items()}
        made.doubted = {str(name): Ranges(places) for name, places in facts["doubted"].items()}
        made._forgotten = NONE  # nothing is leased but by decisions
        made.shares = FairShares.resumed(made.dataset.units, facts["shares"])
        return made


class SharedLeases(Leases):
    """All datasets of a run, as one member has them. `turn` counts decisions; `kept` is what others heal from, and
    `digest` is of it."""

    table_type: type[SharedTable] = SharedTable
    is_below = False  # does a layer above lease to these members?

    def __init__(self, datasets: Iterable[Dataset]) -> None:
        super().__init__()
        self._datasets = tuple(datasets)
        self.turn = 0
        self.tables: dict[str, SharedTable] = {}  # type: ignore[assignment]  # of this type, all of them
        for dataset in self._datasets:
            if dataset.units * max(dataset.epochs, 1) > NO_END:
                raise BadRequest(f"dataset {dataset.name!r} has too many units; make its units larger")
            self.tables[dataset.name] = self.table_type(dataset)
        self._keep()

    def decide(
        self,
        members: Mapping[str, str],
        said: Mapping[str, Collection[LeaseStatement]],
        brought: Mapping[str, Collection[Trained]],
        round_: tuple[int, int] = (0, 0),
        fragments: int = 1,
        *,
        may_lie: bool = False,
    ) -> list[Event]:
        """`members`: who is there, and which start of it. `brought`: by those whose contributions are in the round, of
        this fragment, that makes this version. `may_lie`: a member that is not one's own may be among them. What comes
        of it is the same wherever the table was the same."""
        self.turn += 1
        now, told = float(self.turn), list[Event]()
        for table in self.tables.values():
            table.open(members, now, may_lie=may_lie)
        self._opened()
        for worker_id in sorted(self._instances.keys() - members.keys()):
            told += self.gone(worker_id)
            del self._instances[worker_id]
        for worker_id, instance in sorted(members.items()):
            knows = any(one.holds for one in said.get(worker_id, ()))  # it goes on from a state of its own
            if self._instances.get(worker_id, instance) != instance and not knows:
                told += self.gone(worker_id)
            self.joined(worker_id, instance)
        for worker_id, trained in sorted(brought.items()):
            for units in trained:
                if units.dataset in self.tables:
                    self.tables[units.dataset].accept(worker_id, *round_, units.places, now)
        told += self.closed(*round_, (), fragments)
        for name, table in self.tables.items():
            words = {who: one for who, theirs in said.items() for one in theirs if one.dataset == name}
            for worker_id, one in sorted(words.items()):
                table.hear(worker_id, one, now)
            table.divide(words, members, now)
        self._keep()
        return told

    def _opened(self) -> None:
        """A decision has begun in each table."""

    def answer(self, worker_id: str, request: LeaseRequest) -> LeaseAnswer:
        return self.tables[request.dataset.name].answer(worker_id, request)

    def progress(self) -> list[dict[str, Any]]:
        """As one member sees it. (No clock tells how many units a second brings.)"""
        return [{**table.progress((), 0.0), "units_per_second": 0.0} for table in self.tables.values()]

    def _keep(self) -> None:
        self.kept: dict[str, Any] = {
            "turn": self.turn,
            "instances": dict(self._instances),
            "tables": self.remembered(),
        }
        self.digest = data_hash([msgspec.json.encode(self.kept, order="sorted")])

    def encode(self) -> bytes:
        return msgspec.json.encode(self.kept, order="sorted")

    @classmethod
    def decode(cls, table: bytes) -> SharedLeases:
        """Of another member. Refused (BadRequest) if it is none."""
        made = cls(one.dataset for one in read_kept(table).tables)
        made._resume(msgspec.json.decode(table))
        return made

    def check(self, kept: Mapping[str, Any] | None) -> None:
        """Can it go on from there? Refused (BadRequest) if not."""
        if kept is None or kept is self.kept:
            return
        tables = check_kept(kept).tables
        theirs, ours = {one.dataset for one in tables}, set(self._datasets)
        if theirs != ours:
            raise BadRequest(f"the run's lease table is of {_named(theirs)}, and this member trains {_named(ours)}")
        if any((one.above is not None) != self.is_below for one in tables):
            theirs_is, ours_is = ("without", "with") if self.is_below else ("with", "without")
            raise BadRequest(
                f"the run's lease table is of members {theirs_is} a layer above that leases to them, and this one is "
                f"{ours_is}"
            )

    def go_on_from(self, kept: Mapping[str, Any] | None) -> None:
        """Where another member is, or this one was. None: at the beginning. Refused (BadRequest) if nobody can be
        there."""
        self.check(kept)
        if kept is not self.kept:
            self._resume(kept)

    def _resume(self, kept: Mapping[str, Any] | None) -> None:
        fresh = {dataset.name: self.table_type(dataset) for dataset in self._datasets}
        found = {} if kept is None else {one["dataset"]["name"]: self.table_type.resumed(one) for one in kept["tables"]}
        self.tables = {**fresh, **{name: table for name, table in found.items() if name in fresh}}
        self.turn = 0 if kept is None else int(kept["turn"])
        self._instances = {} if kept is None else {str(name): str(one) for name, one in kept["instances"].items()}
        self._keep()


def _named(datasets: Iterable[Dataset]) -> str:
    return ", ".join(sorted(map(repr, datasets))) or "nothing"


def terms_of(datasets: Iterable[Dataset]) -> dict[str, str]:
    """What all members must mean alike, to be compared when they meet."""
    return {
        f"dataset {one.name!r}": msgspec.json.encode(one, order="deterministic").decode()
        for one in sorted(datasets, key=lambda one: one.name)
    }


def shortened(said: Iterable[LeaseStatement]) -> tuple[LeaseStatement, ...]:
    """In few ranges, all datasets together. What a member holds may be said too generously; what it can spare and has
    given up may not."""
    statements = tuple(said)
    most = max(MOST_SAID // max(len(statements), 1), 1)
    return tuple(
        msgspec.structs.replace(
            one, holds=covering(one.holds, most), spare=one.spare[-most:], dropped=one.dropped[:most]
        )
        for one in statements
    )


def covering(places: Places, most: int) -> Places:
    """The same, with the smallest gaps filled."""
    gaps = sorted(range(1, len(places)), key=lambda i: places[i][0] - places[i - 1][1], reverse=True)
    begins = [0, *sorted(gaps[: most - 1]), len(places)]
    return tuple((places[a][0], places[b - 1][1]) for a, b in pairwise(begins) if a < b)
