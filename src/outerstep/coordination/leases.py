"""Which worker trains which data, without I/O: units are leased, trained, and done when they are in the model.

A dataset's epochs are one line of *places* 0, 1, 2 …: place p is unit number p mod `units` of epoch p // `units`
(data/order.py says which samples that is). Here are places only, and sets of them are ranges (ranges.py), so a million
units cost no more than the few that are in somebody's hands.

    next ──lease──▶ held ──offer accepted──▶ pending ──round closes──▶ covered ──all fragments──▶ done
            ▲         │                         │ left out
            │         │ its worker is gone      │
           free ◀─────┴─────────────────────────┘          (one-way: lost, and never leased again)

A place is *done* when, in every fragment, an agreed version holds its last step. That is decided with the round, and
remembered in the record of that round: model and data never disagree. "Accepted" is no promise: it is *pending* until
its round closes.

What went back and is leased again may have been trained before, in some fragments or by a worker that comes back with
it: such a place is *repeated*, and counted. A worker can bring only what it was leased, so a liar misreports its own
units alone.

A contribution may end in the middle of a unit: unit_parts.py remembers of which units a decided round holds a part. A
unit that is continued without that is not whole, and given up. A part that nobody continues is trained once more, which
is counted.

New places come from below a mark that is on the disk (`reserved`): so a lease needs no record of its own. After a
restart, what was leased since the record is *unclaimed*: for a while its workers may say that they hold it, then it is
free. A lease of places that were free before does need a record (`to_note`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import UNSET, convert, to_builtins

from ..errors import BadRequest, PlanMismatch, Superseded
from ..events import Event, UnitsDone, UnitsRepeated, UnitsReturned
from ..ranges import NONE, Range, Ranges
from ..types import MOST_DATASETS, MOST_RANGES, Dataset, Lease, LeaseAnswer, Offer, Places, Trained
from .shares import Crowd, FairShares
from .unit_parts import UnitParts, by_fragment, from_fragments, plain

MOST_DATASETS_OF_ONE = 8  # of those that a run leases, that one worker was the first to ask for
RESERVE = 4096  # places that are leased without a record
MOST_PIECES = 16  # ranges in one lease: what a worker holds must fit a message
MOST_RECENT = 64  # ranges that a worker has brought lately
HELD_PIECES = 128  # a worker that holds so many ranges gets no more of them
ASK_AGAIN_S = 1.0
NO_END = 1 << 53  # of a dataset without a last epoch


def end_of(dataset: Dataset) -> int:
    """Above its last place."""
    return dataset.units * dataset.epochs if dataset.epochs else NO_END


class LeaseTable:
    """One dataset."""

    def __init__(self, dataset: Dataset, owner: str = "") -> None:
        """`owner`: the worker that was the first to ask for it."""
        self.dataset, self.end, self.owner = dataset, end_of(dataset), owner
        self.next = self.reserved = 0  # below `next`, all were leased; below `reserved` they may be, without a record
        self.free = self.unclaimed = self.done = self.lost = self.spent = NONE
        self.held: dict[str, Ranges] = {}
        self.lapsed: dict[str, Ranges] = {}  # went back, and their worker may still bring them
        self.covered: dict[str, dict[int, Ranges]] = {}  # in agreements of some fragments, by worker
        self.pending: dict[tuple[int, int], dict[str, Ranges]] = {}  # in open rounds, by fragment and version
        self.dropped: dict[str, Ranges] = {}  # given up by their worker, and in open rounds in part
        self.finished: dict[str, Ranges] = {}  # the last that each has brought
        self._earlier: dict[str, Ranges] = {}  # likewise, before its present start
        self.overtaken: dict[str, Ranges] = {}  # were its, and are done by another; it may still bring them
        self._counted: dict[str, Ranges] = {}  # are done by another, and were counted; its other fragments may follow
        self._forgotten = NONE  # after a restart: somebody may have been leased these, and nobody knows
        self.in_parts = UnitParts()
        self._foreign: dict[tuple[int, int], Ranges] = {}  # brought to open rounds by workers that do not hold them
        self.repeated = 0  # places that some fragment's agreements hold and that were trained once more
        self.done_by: dict[str, int] = {}
        self.claimable_until = 0.0  # after a restart
        self.to_note = False  # the next answer must wait for a record
        self._absent: set[str] = set()  # gone, and something of theirs is in an open round
        self.shares = FairShares(dataset.units)
        self._hands: dict[str, int] = {}  # as `_hand` found them, until something changes
        self._answered: dict[str, tuple[int, LeaseAnswer]] = {}  # its last request's number

    # --- leasing ----------------------------------------------------------------------------------------------------

    def lease(self, message: Lease, now: float, live: Collection[str]) -> LeaseAnswer:
        worker_id, last = message.worker_id, self._answered.get(message.worker_id)
        if last is not None and message.number <= last[0]:
            if message.number == last[0]:
                return last[1]
            raise Superseded(
                f"request {message.number} for {self.dataset.name!r} came after number {last[0]}",
                hint="a worker asks for its leases one by one",
            )
        self._absent.discard(worker_id)
        self._hands.pop(worker_id, None)
        self._end_claims(now)
        holds = Ranges(message.holds)
        self._put(self.dropped, worker_id, self.dropped.get(worker_id, NONE) | Ranges(message.dropped))
        self._settle_dropped(worker_id)
        if message.goes_back:
            self._go_back(worker_id)
        self._reconcile(worker_id, holds, goes_back=message.goes_back)
        self.shares.told(worker_id, message.untrained, message.pace, now)
        # (Of what is under way it has nothing left to draw, unless it is a later start that does not know of it.)
        void = (holds - self.held.get(worker_id, NONE)) | (holds & self._under_way(worker_id))
        crowd = self.shares.among({*live, worker_id}, now)
        granted = self._grant(worker_id, min(message.want, self._share(worker_id, crowd, waits=message.waits)))
        if not granted and message.want and self._cut_back(worker_id, crowd):
            granted = self._grant(worker_id, min(message.want, self._share(worker_id, crowd, waits=message.waits)))
        self.shares.granted(worker_id, granted.total)
        over = not granted and self._is_over_for(message, now)
        answer = LeaseAnswer(
            state="over" if over else "more",
            granted=tuple(granted),
            void=tuple(void)[:MOST_RANGES],
            retry_after_s=0.0 if granted or over else ASK_AGAIN_S,
            waiting_for="" if granted or over else self._waiting_for(),
        )
        self._answered[worker_id] = message.number, answer
        return answer

    def _is_over_for(self, message: Lease, now: float) -> bool:
        """It was granted nothing. Will there ever be anything?"""
        return not self._left

    def _waiting_for(self) -> str:
        """Why somebody who wants units is granted none, in words; "" = others have them."""
        return ""

    @property
    def _untouched(self) -> int:
        """How many nobody was ever leased."""
        return self.end - self.next

    @property
    def _left(self) -> int:
        """How many could be leased, or may be after a while."""
        return self.free.total + self.unclaimed.total + self._untouched

    def _reconcile(self, worker_id: str, holds: Ranges, *, goes_back: bool = False) -> None:
        """What it was leased and does not hold goes back: the answer was lost, or it has lost its memory. What it holds
        and was taken from it is its own again, if nobody has it; not if it `goes_back`, for then nobody knows of which
        start it is. (What it claims beyond the mark was never leased: the answer to a lease beyond it waits for the
        record of a new mark.)"""
        held = self.held.get(worker_id, NONE)
        self._take_back(worker_id, held - holds - self._under_way(worker_id), may_bring=False)
        claimed = holds - held
        ours = claimed & (self.unclaimed if goes_back else self.free | self.unclaimed)
        if not self.dataset.again and not goes_back:
            ours |= claimed & self.lost & self.lapsed.get(worker_id, NONE)
        self._hand_over(worker_id, ours)

    def _hand_over(self, worker_id: str, places: Ranges) -> None:
        if places:
            self.to_note = self.to_note or bool(places & self.free)
            self.free, self.unclaimed, self.lost = self.free - places, self.unclaimed - places, self.lost - places
            self._put(self.lapsed, worker_id, self.lapsed.get(worker_id, NONE) - places)
            self._put(self.held, worker_id, self.held.get(worker_id, NONE) | places)

    def _grant(self, worker_id: str, count: int) -> Ranges:
        """The lowest that are free, then new ones."""
        room = HELD_PIECES - self.held.get(worker_id, NONE).pieces
        pieces: list[Range] = list(self.free.first(count))[: max(min(MOST_PIECES, room), 0)]
        count -= sum(end - begin for begin, end in pieces)
        if count > 0 and room > 0:
            pieces += self._take_new(count)
        granted = Ranges(pieces)
        self._hand_over(worker_id, granted)
        self.in_parts.cut_loose(worker_id, granted)  # it begins them anew
        return granted

    def _take_new(self, count: int) -> list[Range]:
        """Of those that nobody was ever leased."""
        begin, self.next = self.next, min(self.next + count, self.end)
        if self.next > self.reserved:
            ahead = RESERVE if self.dataset.again else 0
            self.reserved, self.to_note = min(self.next + ahead, self.end), True
        return [(begin, self.next)]

    def _share(self, worker_id: str, crowd: Crowd, *, waits: bool) -> int:
        """How many more it may have, so that all of them come to the end together: its part, by speed, of all that is
        left, less what it still has to train. A worker that waits gets one: it may need it to fill a batch, and train
        the others."""
        if not self.dataset.epochs:
            return self.end
        hands = {name: self._hand(name) for name in crowd}
        paces = {name: crowd.pace(name) for name in hands}
        known = [pace for pace in paces.values() if pace > 0.0]
        usual = sum(known) / len(known) if known else 1.0
        mine = crowd.untrained(worker_id, hands[worker_id])
        left = sum(crowd.untrained(name, hand) for name, hand in hands.items())
        total = self.free.total + self._untouched + left
        share = int(total * (paces[worker_id] or usual) / sum(pace or usual for pace in paces.values()) - mine + 0.5)
        room = max(crowd.room(worker_id, hands[worker_id]), 0.0)
        return int(min(max(share, int(waits or not hands[worker_id])), room))

    def _hand(self, worker_id: str) -> int:
        """How many it holds that no contribution of it has."""
        if worker_id not in self._hands:
            self._hands[worker_id] = (self.held.get(worker_id, NONE) - self._under_way(worker_id)).total
        return self._hands[worker_id]

    def _cut_back(self, worker_id: str, crowd: Crowd) -> bool:
        """Nothing is left for this one: what others hold beyond all need goes back, the last places first. (One-way,
        nothing ever does.) Did something?"""
        before = self.free
        if self._left or not self.dataset.again or not self.dataset.epochs:
            return False
        for name in crowd:
            excess = 0.0 if name == worker_id else -crowd.room(name, self._hand(name))
            if excess >= 1.0:
                hand = self.held.get(name, NONE) - self._under_way(name)
                self._take_back(name, hand - hand.first(hand.total - int(excess)))
        return self.free != before

    def pace(self, live: Collection[str], now: float) -> float:
        """Units per second, of those who are here."""
        crowd = self.shares.among(live, now)
        return sum(crowd.pace(name) for name in crowd)

    def progress(self, live: Collection[str], now: float) -> dict[str, Any]:
        """How far it is: the fields of `DataStatus`."""
        dataset = self.dataset
        return {
            "name": dataset.name,
            "samples": dataset.samples,
            "unit_samples": dataset.unit_samples,
            "epochs": dataset.epochs,
            "seed": dataset.seed,
            "shuffle": dataset.shuffle,
            "units": dataset.units * dataset.epochs,
            "done": self.done.total,
            "leased": sum(places.total for places in self.held.values()),
            "free": self.free.total + self.unclaimed.total,
            "lost": self.lost.total,
            "spent": self.spent.total,
            "repeated": self.repeated,
            "done_by": dict(self.done_by),
            "leased_to": {name: places.total for name, places in self.held.items()},
            "units_per_second": round(self.pace(live, now), 4),
        }

    # --- what becomes of it -----------------------------------------------------------------------------------------

    def accept(self, worker_id: str, fragment: int, version: int, places: Places, now: float) -> None:
        """A contribution was accepted for the round that makes this version. What its worker was never leased is
        passed over. (One that went on from an older state than it had trains some of it once more, and brings it before
        it has heard that it is done: such units are in the model twice.)"""
        self._absent.discard(worker_id)
        self._hands.pop(worker_id, None)
        said = Ranges(places)
        self._hand_over(worker_id, said & self.lapsed.get(worker_id, NONE) & (self.free | self.lost))
        self._hand_over(worker_id, said & self.unclaimed)
        brought = said & (self.held.get(worker_id, NONE) | self.lapsed.get(worker_id, NONE))
        overtaken = self.overtaken.get(worker_id, NONE)
        foreign = (said - brought) & (overtaken | self._forgotten)
        if fragment == 0:
            self._put(self.overtaken, worker_id, overtaken - foreign)
            self._note_foreign(fragment, version, foreign)
        again = self._brought_before(worker_id) & said
        if again and fragment == 0:
            for owners in (self.finished, self._earlier):
                self._put(owners, worker_id, owners.get(worker_id, NONE) - again)
            self._foreign[fragment, version] = self._foreign.get((fragment, version), NONE) | again
        self._note_brought(worker_id, (brought - self._under_way(worker_id)).total, now)
        if brought:
            open_round = self.pending.setdefault((fragment, version), {})
            open_round[worker_id] = open_round.get(worker_id, NONE) | brought
            self._hands.pop(worker_id, None)

    def _brought_before(self, worker_id: str) -> Ranges:
        """By earlier starts of it."""
        return self._earlier.get(worker_id, NONE)

    def _note_foreign(self, fragment: int, version: int, places: Ranges) -> None:
        """Leased to another since, or by a server that forgot it: in the model twice."""
        self._forgotten -= places  # once: who says so again and again shall not be believed
        if places:
            self._foreign[fragment, version] = self._foreign.get((fragment, version), NONE) | places

    def accept_parts(self, worker_id: str, fragment: int, version: int, trained: Trained) -> None:
        """This worker's contribution holds parts of units, and not their end. (If the round that makes this version
        does not close, they are brought again.) What it was never leased is passed over: a part that nobody goes on
        with is trained once more, and nobody says so of the units of others."""
        said, torn, continued = Ranges(trained.begun), Ranges(trained.torn), Ranges(trained.continued)
        self._hand_over(worker_id, said & self.lapsed.get(worker_id, NONE) & (self.free | self.lost))
        self._hand_over(worker_id, said & self.unclaimed)
        had = self.held.get(worker_id, NONE) | self.lapsed.get(worker_id, NONE) | self._covered_by(worker_id)
        had |= self.overtaken.get(worker_id, NONE)
        if fragment == 0:
            self._note_foreign(fragment, version, (said | torn) & self._forgotten - had - self.unclaimed)
        torn &= had | self.unclaimed
        self.in_parts.accept(worker_id, (fragment, version), said & had, continued, torn)

    def _note_brought(self, worker_id: str, units: int, now: float) -> None:
        self.shares.brought(worker_id, units, now)

    def closed(self, fragment: int, version: int, left_out: Collection[str], fragments: int) -> list[Event]:
        """The round that makes this version was decided, without those left out."""
        told: list[Event] = []
        self.repeated += self._foreign.pop((fragment, version), NONE).total
        ended, cut = self.pending.pop((fragment, version), {}), self.in_parts.closed((fragment, version))
        for worker_id in sorted({*ended, *cut.begun, *cut.torn}):
            self._hands.pop(worker_id, None)
            places, parts = ended.get(worker_id, NONE), cut.begun.get(worker_id, NONE)
            if worker_id in left_out:
                self._give_up(worker_id, places)
                continue
            torn = (cut.continued.get(worker_id, NONE) & (places | parts)) - self._known_parts(worker_id, fragment)
            torn_ends, places, parts = places & torn, places - torn, self._note_begun(worker_id, fragment, parts - torn)
            told += self._note_halves(worker_id, fragment, version, cut.torn.get(worker_id, NONE) | torn)
            told += self._note_again(worker_id, version, places | parts)
            self.in_parts.note(worker_id, fragment, parts, places)
            self._give_up(worker_id, torn_ends)
            places = self._not_overtaken(worker_id, places)
            finished = self._cover(worker_id, fragment, places, fragments) if places else NONE
            told += self._complete(worker_id, finished, version)
            self._settle_dropped(worker_id)
            self._settle_absent(worker_id)
        return told

    def _known_parts(self, worker_id: str, fragment: int) -> Ranges:
        """A unit that goes on in its next contribution has its first part here. If not, that was left out or lost."""
        return self.in_parts.known(worker_id, fragment)

    def _note_begun(self, worker_id: str, fragment: int, parts: Ranges) -> Ranges:
        """Its contribution holds a part of these, and is in the model. Returns those that are to be gone on with."""
        return self._not_overtaken(worker_id, parts) - self.done

    def _note_again(self, worker_id: str, version: int, places: Ranges) -> list[Event]:
        """Its contribution holds these, in part or whole. (A part whose end is somewhere is counted with that.)"""
        again = self.in_parts.trained_again(worker_id, places, self._covered_by)
        if not again:
            return []
        self.repeated += again.total
        return [UnitsRepeated(self.dataset.name, worker_id, version, tuple(again))]

    def _note_halves(self, worker_id: str, fragment: int, version: int, places: Ranges) -> list[Event]:
        """Its contribution holds a part of these, and nobody will go on with it. (The fragments of one such part are
        not each other's repetition.)"""
        places = self._note_begun(worker_id, fragment, places) if places else NONE
        if not places:
            return []
        told = self._note_again(worker_id, version, self.in_parts.halved_before(worker_id, fragment, places))
        self.in_parts.note_half(fragment, places)
        return told

    def _go_back(self, worker_id: str) -> None:
        """It has resumed from a state that is older than what it brought last. Of the units whose parts came since it
        trains those once more; one-way it must not, and they are lost."""
        parts = self.in_parts.go_back(worker_id)
        if not self.dataset.again:
            held = self.held.get(worker_id, NONE)
            lost = parts & held - self._under_way(worker_id)
            self._put(self.held, worker_id, held - lost)
            self.lost |= lost

    def _complete(self, worker_id: str, finished: Ranges, version: int) -> list[Event]:
        """All fragments have these."""
        if not finished:
            return []
        self._finish(worker_id, finished)
        return [UnitsDone(self.dataset.name, worker_id, version, tuple(finished))]

    def _cover(self, worker_id: str, fragment: int, places: Ranges, fragments: int) -> Ranges:
        """This fragment's agreement has them. Returns those that all fragments have now."""
        covered = self.covered.setdefault(worker_id, {})
        self.repeated += (covered.get(fragment, NONE) & places).total
        covered[fragment] = covered.get(fragment, NONE) | places
        for index in range(fragments):
            places &= covered.get(index, NONE)
        return places

    def _not_overtaken(self, worker_id: str, places: Ranges) -> Ranges:
        """What another has brought while these were in an open round, or in this very one, is in the model once more.
        That is counted once, and not by each fragment."""
        overtaken = self.overtaken.get(worker_id, NONE) & places
        self.repeated += overtaken.total
        self._put(self.overtaken, worker_id, self.overtaken.get(worker_id, NONE) - overtaken)
        self._put(self._counted, worker_id, self._counted.get(worker_id, NONE) | overtaken)
        return places - self._counted.get(worker_id, NONE)

    def _finish(self, worker_id: str, places: Ranges) -> None:
        new = places - self.done
        self.repeated += (places & self.done).total
        self.done |= places
        self.done_by[worker_id] = self.done_by.get(worker_id, 0) + new.total
        before = self.finished.get(worker_id, NONE) - places
        self._put(self.finished, worker_id, Ranges([*list(before)[-MOST_RECENT:], *list(places)[-MOST_RECENT:]]))
        self.free, self.unclaimed = self.free - places, self.unclaimed - places
        self.lost, self.spent = self.lost - places, self.spent - places
        self.in_parts.done(places)
        for owners in (self.held, self.lapsed):
            for owner in [name for name, theirs in owners.items() if theirs & places]:
                if owner != worker_id:  # what it has in some agreement is counted below
                    overtaken = (owners[owner] & places) - self._covered_by(owner)
                    self._put(self.overtaken, owner, self.overtaken.get(owner, NONE) | overtaken)
                self._put(owners, owner, owners[owner] - places)
        for other in [name for name in self.covered if name != worker_id]:
            twice = self._covered_by(other) & new
            self.repeated += twice.total
            self._put(self._counted, other, self._counted.get(other, NONE) | twice)
            self._uncover(other, places)
        self._uncover(worker_id, places)

    def _give_up(self, worker_id: str, places: Ranges) -> None:
        """Its worker has dropped the steps, or a round has left them out: spent, or to be trained again."""
        places &= self.held.get(worker_id, NONE)
        if not places:
            return
        if self.dataset.dropped == "again" and self.dataset.again:
            self._take_back(worker_id, places)
            self.in_parts.cut_loose(worker_id, places)
        else:
            self.in_parts.end(worker_id, places)
            self.in_parts.forget_halves(places)
            self.spent |= places
            self.done |= places
            self._put(self.held, worker_id, self.held.get(worker_id, NONE) - places)
            self._uncover(worker_id, places)

    def _settle_dropped(self, worker_id: str) -> None:
        """What its worker has given up in one fragment may still count in another: first that is awaited."""
        dropped = self.dropped.get(worker_id, NONE)
        for open_round in self.pending.values() if dropped else ():
            dropped -= open_round.get(worker_id, NONE)
        self._give_up(worker_id, dropped)
        self._put(self.dropped, worker_id, self.dropped.get(worker_id, NONE) - dropped)

    def _take_back(self, worker_id: str, places: Ranges, *, may_bring: bool = True) -> None:
        """`may_bring`: it has not said that it does not have them."""
        if not places:
            return
        self._put(self.held, worker_id, self.held.get(worker_id, NONE) - places)
        if may_bring:
            self._put(self.lapsed, worker_id, self.lapsed.get(worker_id, NONE) | places)
        else:
            self.in_parts.cut_loose(worker_id, places)
        if self.dataset.again:
            counted = self._covered_by(worker_id) & places
            self.repeated += counted.total
            self.in_parts.end(worker_id, counted)
            self.in_parts.forget_halves(counted)
            self._uncover(worker_id, places)
            self.free |= places
        else:  # nobody else will ever train them, so that what it brings of them still counts
            self.lost |= places

    def is_unused(self, live: Collection[str]) -> bool:
        """Nothing of it is in the model, or on the way there, and who asked for it first is not here."""
        return self.owner not in live and not (self.done or self.held or self.pending or self.covered)

    def gone(self, worker_id: str) -> list[Event]:
        """It left, died or was replaced by a start that knows nothing. What it had accepted in an open round may still
        count, so that much waits for the round."""
        self.shares.gone(worker_id)
        self._absent.add(worker_id)
        self._hands.pop(worker_id, None)
        returned = self.held.get(worker_id, NONE) - self._under_way(worker_id)
        self._take_back(worker_id, returned)
        self._settle_absent(worker_id)
        return [UnitsReturned(self.dataset.name, worker_id, tuple(returned), self.dataset.again)] if returned else []

    def started_again(self, worker_id: str) -> None:
        """It counts its requests from the start."""
        self._answered.pop(worker_id, None)
        self._earlier[worker_id] = self.finished.get(worker_id, NONE)

    def _settle_absent(self, worker_id: str) -> None:
        """Of one that is gone, what no open round holds any more goes back."""
        if worker_id in self._absent:
            self._take_back(worker_id, self.held.get(worker_id, NONE) - self._under_way(worker_id))
            if worker_id not in self.held:
                self._absent.discard(worker_id)

    def _under_way(self, worker_id: str) -> Ranges:
        """In open rounds; and, of one that is here, in some fragments' agreements: the others will follow."""
        found = NONE
        for open_round in self.pending.values():
            found |= open_round.get(worker_id, NONE)
        return found if worker_id in self._absent else found | self._covered_by(worker_id)

    def _covered_by(self, worker_id: str) -> Ranges:
        """In some fragment."""
        found = NONE
        for covered in self.covered.get(worker_id, {}).values():
            found |= covered
        return found

    def _uncover(self, worker_id: str, places: Ranges) -> None:
        self._hands.pop(worker_id, None)
        covered = self.covered.get(worker_id, {})
        for fragment in list(covered):
            covered[fragment] -= places
            if not covered[fragment]:
                del covered[fragment]
        if not covered:
            self.covered.pop(worker_id, None)

    def _put(self, owners: dict[str, Ranges], worker_id: str, places: Ranges) -> None:
        self._hands.pop(worker_id, None)
        if places:
            owners[worker_id] = places
        else:
            owners.pop(worker_id, None)

    def _end_claims(self, now: float) -> None:
        """Nobody has come for these."""
        if self.unclaimed and now >= self.claimable_until:
            if self.dataset.again:
                self.free |= self.unclaimed
            else:
                self.lost |= self.unclaimed
            self.unclaimed = NONE

    # --- over a restart ---------------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """Without open rounds: what was accepted there is brought again."""
        return {
            "dataset": to_builtins(self.dataset),
            "owner": self.owner,
            "next": self.next,
            "reserved": self.reserved,
            "repeated": self.repeated,
            "done_by": dict(self.done_by),
            "sets": {name: plain(getattr(self, name)) for name in _SETS},
            "held": {name: plain(places) for name, places in self.held.items()},
            "lapsed": {name: plain(places) for name, places in self.lapsed.items()},
            "dropped": {name: plain(places) for name, places in self.dropped.items()},
            "overtaken": {name: plain(places) for name, places in self.overtaken.items()},
            "covered": by_fragment(self.covered),
            **self.in_parts.remembered(),
        }

    @classmethod
    def resumed(cls, facts: Mapping[str, Any], claimable_until: float, *, forgetful: bool = False) -> LeaseTable:
        """`forgetful`: not every record was written; more may have been leased than this says."""
        made = cls(convert(facts["dataset"], Dataset), str(facts.get("owner", "")))
        made.next, made.repeated = int(facts["next"]), int(facts["repeated"])
        made.done_by = {str(name): int(count) for name, count in facts["done_by"].items()}
        for name in _SETS:
            setattr(made, name, Ranges(facts["sets"][name]))
        made.held = {name: Ranges(places) for name, places in facts["held"].items()}
        made.lapsed = {name: Ranges(places) for name, places in facts["lapsed"].items()}
        made.dropped = {name: Ranges(places) for name, places in facts["dropped"].items()}
        made.overtaken = {name: Ranges(places) for name, places in facts.get("overtaken", {}).items()}
        made.covered = from_fragments(facts["covered"])
        made.in_parts = UnitParts.recalled(facts)
        reserved = min(int(facts["reserved"]) + (RESERVE if forgetful else 0), made.end)
        made.unclaimed |= Ranges([(made.next, reserved)])
        made.next = made.reserved = reserved
        made._forgotten = Ranges([(0, reserved)])
        made.claimable_until = claimable_until
        return made


_SETS = ("free", "unclaimed", "done", "lost", "spent")


class Leases:
    """All datasets of a run."""

    table_type: type[LeaseTable] = LeaseTable

    def __init__(self) -> None:
        self.is_durable = True  # each round has a record (server/commits.py)
        self._instances: dict[str, str] = {}  # by worker, the start that asks
        self.tables: dict[str, LeaseTable] = {}

    def lease(self, message: Lease, now: float, live: Collection[str]) -> LeaseAnswer:
        """The first request for a name says what the dataset is; others must say the same."""
        wanted, table = message.dataset, self.tables.get(message.dataset.name)
        if table is None:
            self._make_room(wanted.name, message.worker_id, live)
            if wanted.units * max(wanted.epochs, 1) > NO_END:
                raise BadRequest(f"dataset {wanted.name!r} has too many units; make its units larger")
            if not wanted.again and not self.is_durable:
                raise BadRequest(
                    f"dataset {wanted.name!r} must never be leased twice, and this server does not record each round",
                    hint="start the server with --durability round, or leave out again=False",
                )
            table = self.tables[wanted.name] = self._kind(None)(wanted, message.worker_id)
            table.to_note = True
        for field in Dataset.__struct_fields__:
            ours, theirs = getattr(table.dataset, field), getattr(wanted, field)
            if ours != theirs:
                raise PlanMismatch(
                    f"dataset {wanted.name!r}: {field} is {ours!r} in this run, got {theirs!r}",
                    hint="all workers of a run train the same data; give another dataset another name",
                )
        return table.lease(message, now, live)

    def _kind(self, facts: Mapping[str, Any] | None) -> type[LeaseTable]:
        """Of a new table, or of one that is remembered like this."""
        return self.table_type

    def _make_room(self, name: str, owner: str, live: Collection[str]) -> None:
        """An id belongs to a key, so it is names per id that are few: one worker cannot take all."""
        theirs = [table for table in self.tables.values() if table.owner == owner]
        if len(theirs) == MOST_DATASETS_OF_ONE:
            raise BadRequest(
                f"worker {owner!r} was the first to ask for {MOST_DATASETS_OF_ONE} datasets, and {name!r} would be one "
                "more",
                hint="let another worker ask for it first, or use fewer datasets",
            )
        if len(self.tables) == MOST_DATASETS:
            for unused in [name for name, table in self.tables.items() if table.is_unused(live)]:
                del self.tables[unused]
        if len(self.tables) == MOST_DATASETS:
            raise BadRequest(
                f"a run leases at most {MOST_DATASETS} datasets, and {name!r} would be one more",
                hint=f"known: {', '.join(sorted(self.tables))}; `outerstep control forget NAME` forgets one",
            )

    def forget(self, name: str) -> LeaseTable:
        """The next request for this name says anew what it is. What is in the model of it stays there."""
        table = self.tables.pop(name, None)
        if table is None:
            known = ", ".join(sorted(self.tables)) or "none"
            raise BadRequest(f"this run leases no dataset {name!r}", hint=f"it leases: {known}")
        return table

    def take_note(self) -> bool:
        """Must the last answer wait for a record?"""
        noted = any(table.to_note for table in self.tables.values())
        for table in self.tables.values():
            table.to_note = False
        return noted

    def accept(self, offer: Offer, version: int, now: float) -> None:
        for trained in () if offer.data is UNSET else offer.data:
            table = self.tables.get(trained.dataset)
            if table is not None:
                table.accept(offer.worker_id, offer.fragment, version, trained.places, now)
                if trained.begun or trained.continued or trained.torn:
                    table.accept_parts(offer.worker_id, offer.fragment, version, trained)

    def closed(self, fragment: int, version: int, left_out: Iterable[str], fragments: int) -> list[Event]:
        without = set(left_out)
        return [e for table in self.tables.values() for e in table.closed(fragment, version, without, fragments)]

    def gone(self, worker_id: str) -> list[Event]:
        return [event for table in self.tables.values() for event in table.gone(worker_id)]

    def joined(self, worker_id: str, instance: str) -> None:
        """A new start counts its requests from one. One that was away goes on counting: a request of before, which
        the network held back, must not be heard as its newest."""
        if self._instances.get(worker_id) != instance:
            self._instances[worker_id] = instance
            for table in self.tables.values():
                table.started_again(worker_id)

    def remembered(self) -> list[dict[str, Any]]:
        return [table.remembered() for table in self.tables.values()]

    def resume(
        self, facts: Iterable[Mapping[str, Any]], claimable_until: float, live: Collection[str], *, forgetful: bool
    ) -> None:
        """`live`: who is expected back."""
        for one in facts:
            table = self._kind(one).resumed(one, claimable_until, forgetful=forgetful)
            self.tables[table.dataset.name] = table
            for worker_id in table.held.keys() - live:  # gone, with units in a round that was open then
                table.gone(worker_id)
