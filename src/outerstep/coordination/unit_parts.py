"""Of which units the model holds a part, whose it is, and whether somebody goes on with it. Without I/O.

    pending ──round closes──▶ begun ──its worker brings the rest──▶ (done, or in `covered`)
                                │ its worker is gone, and another trains the unit; or has lost its memory
                                ▼
                              halves ──whoever trains the unit begins anew──▶ repeated

A part that is `begun` is the start of a chain: its worker's next contribution to that fragment continues it. A unit
that is continued and of which no part is known here is not whole: that part was left out of a round, or lost with one.

`resumed`: parts that were counted as repeated, or are halves, and with which their worker goes on all the same: it came
back, or from an earlier state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ranges import NONE, Ranges

Made = tuple[int, int]  # a fragment, and the version that a round of it makes
ByFragment = dict[int, Ranges]


@dataclass
class InRound:
    """What contributions to one open round hold of units that they do not hold whole, by worker. `continued`: of these,
    and of those that end, the ones of which earlier contributions have a part."""

    begun: dict[str, Ranges] = field(default_factory=dict)
    torn: dict[str, Ranges] = field(default_factory=dict)
    continued: dict[str, Ranges] = field(default_factory=dict)


class UnitParts:
    """Of one dataset."""

    def __init__(self) -> None:
        self._pending: dict[Made, InRound] = {}
        self.begun: dict[str, ByFragment] = {}
        self.resumed: dict[str, ByFragment] = {}
        self.halves: ByFragment = {}

    # --- open rounds ------------------------------------------------------------------------------------------------

    def accept(self, worker_id: str, made: Made, begun: Ranges, continued: Ranges, torn: Ranges) -> None:
        if begun or continued or torn:
            open_round = self._pending.setdefault(made, InRound())
            for sets, places in ((open_round.begun, begun), (open_round.continued, continued), (open_round.torn, torn)):
                sets[worker_id] = sets.get(worker_id, NONE) | places

    def closed(self, made: Made) -> InRound:
        return self._pending.pop(made, InRound())

    # --- what decided rounds hold -----------------------------------------------------------------------------------

    def known(self, worker_id: str, fragment: int) -> Ranges:
        """What this worker may go on with."""
        of_worker = (of.get(worker_id, {}) for of in (self.begun, self.resumed))
        return Ranges(each for sets in of_worker for each in sets.get(fragment, NONE))

    def begun_by(self, worker_id: str) -> Ranges:
        """In some fragment."""
        return Ranges(each for places in self.begun.get(worker_id, {}).values() for each in places)

    def note(self, worker_id: str, fragment: int, begun: Ranges, ended: Ranges) -> None:
        """Its contribution is in the model."""
        mine = self.begun.setdefault(worker_id, {})
        mine[fragment] = (mine.get(fragment, NONE) | begun) - ended
        resumed = self.resumed.setdefault(worker_id, {})
        resumed[fragment] = resumed.get(fragment, NONE) - begun - ended
        self.end(worker_id, NONE)

    def note_half(self, fragment: int, places: Ranges) -> None:
        if places:
            self.halves[fragment] = self.halves.get(fragment, NONE) | places

    def trained_again(self, worker_id: str, places: Ranges, apart_from: Callable[[str], Ranges]) -> Ranges:
        """This worker's contribution holds these: of which was a part in the model already, by somebody that did not go
        on with it, or that this one did not wait for? Each is said once. `apart_from`: of another worker, those that
        are counted otherwise."""
        again = Ranges(each for halves in self.halves.values() for each in halves & places)
        self.forget_halves(again)
        for other in [name for name in self.begun if name != worker_id]:
            for fragment, theirs in self.begun[other].items():
                if shared := theirs & places:
                    again |= shared - apart_from(other)
                    self.begun[other] = self.begun[other] | {fragment: theirs - shared}
                    resumed = self.resumed.setdefault(other, {})
                    resumed[fragment] = resumed.get(fragment, NONE) | shared
        return again

    def halved_before(self, worker_id: str, fragment: int, places: Ranges) -> Ranges:
        """Of these, those of which another part is there: a half in this fragment, or another's."""
        others = Ranges(each for name in self.begun if name != worker_id for each in self.begun_by(name))
        return places & (self.halves.get(fragment, NONE) | others)

    def forget_halves(self, places: Ranges) -> None:
        left = {fragment: halves - places for fragment, halves in self.halves.items()}
        self.halves = {fragment: halves for fragment, halves in left.items() if halves}

    def end(self, worker_id: str, places: Ranges) -> None:
        """This worker has no part of these any more that it could go on with."""
        for of in (self.begun, self.resumed):
            if not any(theirs & places or not theirs for theirs in of.get(worker_id, {}).values()):
                continue
            left = {fragment: theirs - places for fragment, theirs in of.pop(worker_id, {}).items()}
            if any(left.values()):
                of[worker_id] = {fragment: theirs for fragment, theirs in left.items() if theirs}

    def done(self, places: Ranges) -> None:
        self.forget_halves(places)
        for worker_id in {*self.begun, *self.resumed}:
            self.end(worker_id, places)

    def cut_loose(self, worker_id: str, places: Ranges) -> None:
        """If these are trained, then from their beginning: also by this worker."""
        if not places:
            return
        begun = self.begun.get(worker_id, {})
        for (fragment, _), open_round in self._pending.items():
            loose = open_round.begun.get(worker_id, NONE) & places
            if loose:
                open_round.begun[worker_id] -= loose
                torn = open_round.torn.get(worker_id, NONE)
                open_round.torn[worker_id] = torn | (loose - begun.get(fragment, NONE))
        for fragment, theirs in begun.items():
            self.note_half(fragment, theirs & places)
        self.end(worker_id, places)

    def go_back(self, worker_id: str) -> Ranges:
        """It has resumed from a state that is older than what it brought last: what it goes on with is repeated.
        Returns the places."""
        came = {fragment: self.known(worker_id, fragment) for fragment in self.begun.get(worker_id, {})}
        for (fragment, _), open_round in self._pending.items():
            came[fragment] = came.get(fragment, NONE) | open_round.begun.get(worker_id, NONE)
        places = Ranges(each for theirs in came.values() for each in theirs)
        self.cut_loose(worker_id, places)
        self.resumed[worker_id] = came
        self.end(worker_id, NONE)
        return places

    # --- over a restart ---------------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """What there is: only a server is told of parts."""
        found = {
            "begun": by_fragment(self.begun),
            "resumed": by_fragment(self.resumed),
            "halves": {str(fragment): plain(places) for fragment, places in self.halves.items()},
        }
        return {name: facts for name, facts in found.items() if facts}

    @classmethod
    def recalled(cls, facts: Mapping[str, Any]) -> UnitParts:
        made = cls()
        made.begun, made.resumed = from_fragments(facts.get("begun", {})), from_fragments(facts.get("resumed", {}))
        made.halves = {int(fragment): Ranges(places) for fragment, places in facts.get("halves", {}).items()}
        return made


def plain(places: Ranges) -> list[list[int]]:
    """As JSON has it."""
    return [[begin, end] for begin, end in places]


def by_fragment(sets: Mapping[str, Mapping[int, Ranges]]) -> dict[str, dict[str, list[list[int]]]]:
    """Of each worker, as JSON has it."""
    return {name: {str(fragment): plain(places) for fragment, places in of.items()} for name, of in sets.items()}


def from_fragments(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, ByFragment]:
    return {name: {int(fragment): Ranges(places) for fragment, places in of.items()} for name, of in facts.items()}
