"""What a cluster leases to its members, without I/O: no place that the layer above has not granted to it.

To the layer above a cluster is a worker that was leased places (layers/sub_leasing.py asks for them). Its server leases
them on: the table is an ordinary one (leases.py), but new places do not come from its end, they come from above.

    above ──grant──▶ fresh ──lease──▶ held ──▶ pending ──▶ covered ──▶ done here ──to_tell──▶ in a contribution above
            ◀─withdraw─┴─────────────┘

`granted` are the places that are the cluster's own and not done yet, whoever of its members holds them. A place that is
done here is in the cluster's own model; with it is remembered in which version (`to_tell`), because a contribution to
the layer above must name exactly the places that are in what it sends. It is done *above* when the layer above says so
to all the world; nothing here waits for that.

What the layer above takes away (`withdraw`) its members may have drawn already: they may still bring it, and then it is
told like any other place. The layer above knows whose it was and counts what is in its model twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import BadRequest, Busy, PlanMismatch, Refused
from ..events import Event
from ..ranges import NONE, Range, Ranges
from ..types import Dataset, Lease, LeaseAnswer
from .leases import ASK_AGAIN_S, Leases, LeaseTable
from .worker.units import LEAD_S, LEAST_AHEAD

LONGEST_REASON = 256
MANY_PIECES, OF_HELD = 32, 8  # a cluster that holds so many ranges asks for an n-th of them at once, or more


class SubLeaseTable(LeaseTable):
    """One dataset, of which the layer above grants this cluster a part."""

    def __init__(self, dataset: Dataset, owner: str = "") -> None:
        super().__init__(dataset, owner)
        self.granted = self.fresh = NONE
        self.to_tell: dict[tuple[int, int], Ranges] = {}  # done here, by fragment and version that made them so
        self._parts: dict[tuple[int, int], Ranges] = {}  # of those and of places that are not whole yet: what came when
        self.over_at = -1.0  # when the layer above was asked, and said that there is nothing left
        self.waits_above = "the layer above"  # what nothing is granted for
        self.refusal: Refused | None = None  # of the layer above
        self._unmet: dict[str, int] = {}  # who was granted less than it wanted, and how much less
        self._said_since: set[str] = set()  # a restart: who has asked
        self._waits_since: dict[str, float] = {}
        self._closing: tuple[int, int] | None = None

    # --- from above -------------------------------------------------------------------------------------------------

    def grant(self, places: Ranges) -> None:
        """They are this cluster's now. (What was done here before, and given up on its way to the layer above, is to be
        trained once more.)"""
        new, self.over_at = places - self.granted, -1.0
        self.done, self.spent, self.lost = self.done - new, self.spent - new, self.lost - new
        self.granted |= new
        if self.dataset.again:
            self.fresh |= new
        else:  # each lease of them needs a record
            self.free |= new

    def _hand_over(self, worker_id: str, places: Ranges) -> None:
        """(What was done here and given up is nobody's any more: whoever is leased it trains it for the first time.)"""
        super()._hand_over(worker_id, places)
        for owners in (self.finished, self._earlier, self.overtaken, self._counted):
            if owners.get(worker_id, NONE) & places:
                self._put(owners, worker_id, owners[worker_id] - places)

    def withdraw(self, places: Ranges) -> None:
        """They are somebody else's now. Members that have drawn some may still bring them."""
        gone = places & self.granted
        if not gone:
            return
        self.granted, self.fresh, self.free = self.granted - gone, self.fresh - gone, self.free - gone
        self.unclaimed, self.lost = self.unclaimed - gone, self.lost - gone
        for worker_id, theirs in list(self.held.items()):
            self._put(self.held, worker_id, theirs - gone)
            self._put(self.lapsed, worker_id, self.lapsed.get(worker_id, NONE) | (theirs & gone))

    @property
    def given_up(self) -> Ranges:
        """Spent here: to be told to the layer above."""
        return self.granted & self.spent

    def was_told(self, given_up: Ranges) -> None:
        self.granted -= given_up & self.spent

    def done_after(self, versions: Mapping[int, int], up_to: Mapping[int, int] | None = None) -> Ranges:
        """Done here, in versions after these, and not after those."""
        return Ranges(
            each
            for (f, version), places in self.to_tell.items()
            if version > versions.get(f, 0) and (up_to is None or version <= up_to.get(f, 0))
            for each in places
        )

    def told(self, versions: Mapping[int, int]) -> None:
        """What is done in versions up to these is in the record of the cluster's leader."""
        self.to_tell = {made: places for made, places in self.to_tell.items() if made[1] > versions.get(made[0], 0)}
        kept = self.done_after({}) | self.granted
        for worker_id in self.covered:
            kept |= self._covered_by(worker_id)
        parts = {made: places & kept for made, places in self._parts.items()}
        self._parts = {made: places for made, places in parts.items() if places}

    def give_up_parts(self, versions: Mapping[int, int]) -> None:
        """The cluster has given up what its own model held in versions up to these, for what was agreed above. Places
        of which a fragment had a part by then, and another has not or had it later, will never be whole there."""
        torn = self.parts_in(versions)
        for worker_id in {*self.covered, *self.held} if torn else ():
            places = (self._covered_by(worker_id) | self.held.get(worker_id, NONE)) & torn
            self._give_up(worker_id, places)
            self._uncover(worker_id, places)
            self.in_parts.end(worker_id, places)  # if it goes on with them, their first part is not there any more
        for made, places in list(self.to_tell.items()):
            whole, again = places - torn, places & torn
            self.to_tell[made], self.granted = whole, self.granted | again
            if self.dataset.dropped == "again" and self.dataset.again:
                self.done, self.free = self.done - again, self.free | again
                self.repeated += again.total
            else:
                self.spent |= again

    def spare(self, live: Collection[str], now: float) -> Ranges:
        """What nobody here will train, because nobody trains this dataset any more. (What a dead member may still bring
        stays: the layer above would not know that it was ours.)"""
        trains = self.held.keys() & live or list(self.shares.among(live, now))
        if trains or self.unclaimed or not self.dataset.again:
            return NONE
        spare = self.fresh | self.free
        for places in self.lapsed.values():
            spare -= places
        return spare

    def demand(self, live: Collection[str], now: float, holds: Ranges) -> tuple[int, int, bool]:
        """How many more places there should be to lease here, how many of the cluster's are not trained, and whether
        somebody waits for one. Members lease for some time ahead; what lies ready here is for as long again, so that
        nobody waits for the way to the layer above and back."""
        crowd = self.shares.among(live, now)
        ready = self.fresh.total + self.free.total
        self._unmet = {name: count for name, count in self._unmet.items() if name in live}
        ahead = max(
            LEAST_AHEAD * len(list(crowd)), int(sum(map(crowd.pace, crowd)) * LEAD_S), sum(self._unmet.values())
        )
        if holds.pieces >= MANY_PIECES:  # the larger each grant is, the fewer ranges they are
            ahead = max(ahead, holds.total // OF_HELD)
        untrained = ready + self.unclaimed.total + sum(int(crowd.untrained(name, self._hand(name))) for name in crowd)
        return (ahead - ready if 2 * ready <= ahead else 0), untrained, bool(self._unmet) and not ready

    def nothing_is_left(self, asked_at: float) -> None:
        """The layer above was asked then, and has nothing."""
        self.over_at = asked_at
        self._unmet.clear()

    # --- what is different below ------------------------------------------------------------------------------------

    def lease(self, message: Lease, now: float, live: Collection[str]) -> LeaseAnswer:
        if self.refusal is not None:
            raise self.refusal
        answer = super().lease(message, now, live)
        if self.unclaimed:  # once all have said what they hold, nobody else can claim it
            self._said_since.add(message.worker_id)
            if self._said_since >= set(live):
                self.claimable_until = now
        unmet = message.want - sum(end - begin for begin, end in answer.granted)
        if answer.granted or not message.want or answer.state == "over":
            self._waits_since.pop(message.worker_id, None)
        if unmet > 0 and answer.state != "over" and (message.waits or not answer.granted):
            self._unmet[message.worker_id] = unmet
        else:
            self._unmet.pop(message.worker_id, None)
        return answer

    def _is_over_for(self, message: Lease, now: float) -> bool:
        """When the layer above had nothing left after this one began to wait."""
        if self._left:
            return False
        since = self._waits_since.setdefault(message.worker_id, now)
        return self.over_at >= since

    def _waiting_for(self) -> str:
        return "" if self._left else self.waits_above[:LONGEST_REASON]

    @property
    def _untouched(self) -> int:
        return self.fresh.total

    def _take_new(self, count: int) -> list[Range]:
        taken = self.fresh.first(count)
        self.fresh -= taken
        return list(taken)

    def _cut_back(self, worker_id: str, crowd: Any) -> bool:
        """Only when nothing more can come from above."""
        return self.over_at >= 0.0 and super()._cut_back(worker_id, crowd)

    def parts_in(self, versions: Mapping[int, int]) -> Ranges:
        """Places of which some fragment had a part in versions up to these, and that were not done by then."""
        parts = Ranges(each for (f, v), places in self._parts.items() if v <= versions.get(f, 0) for each in places)
        return parts - self.done_after({}, versions)

    def closed(self, fragment: int, version: int, left_out: Collection[str], fragments: int) -> list[Event]:
        self._closing = fragment, version
        return super().closed(fragment, version, left_out, fragments)

    def _note_begun(self, worker_id: str, fragment: int, parts: Ranges) -> Ranges:
        assert self._closing is not None
        parts = super()._note_begun(worker_id, fragment, parts)
        if parts:
            self._parts[self._closing] = self._parts.get(self._closing, NONE) | parts
        return parts

    def _cover(self, worker_id: str, fragment: int, places: Ranges, fragments: int) -> Ranges:
        assert self._closing is not None
        self._parts[self._closing] = self._parts.get(self._closing, NONE) | places
        return super()._cover(worker_id, fragment, places, fragments)

    def _finish(self, worker_id: str, places: Ranges) -> None:
        assert self._closing is not None
        new = places - (self.done - self.spent)
        super()._finish(worker_id, places)
        self.granted, self.fresh = self.granted - places, self.fresh - places
        if new:
            self.to_tell[self._closing] = self.to_tell.get(self._closing, NONE) | new

    def is_unused(self, live: Collection[str]) -> bool:
        return super().is_unused(live) and not self.granted

    def progress(self, live: Collection[str], now: float) -> dict[str, Any]:
        waiting_for = str(self.refusal) if self.refusal is not None else self._waiting_for() if self._unmet else ""
        return {**super().progress(live, now), "granted": self.granted.total, "waiting_for": waiting_for}

    # --- over a restart ---------------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        return {
            **super().remembered(),
            "granted": [list(one) for one in self.granted],
            "fresh": [list(one) for one in self.fresh],
            "to_tell": _by_version(self.to_tell),
            "parts": _by_version(self._parts),
        }

    @classmethod
    def resumed(cls, facts: Mapping[str, Any], claimable_until: float, *, forgetful: bool = False) -> SubLeaseTable:
        """What was fresh may have been leased since the record."""
        made = super().resumed(facts, claimable_until)
        assert isinstance(made, SubLeaseTable)
        made.granted, made.unclaimed = Ranges(facts["granted"]), made.unclaimed | Ranges(facts["fresh"])
        made.to_tell = {(int(f), int(version)): Ranges(places) for f, version, places in facts["to_tell"]}
        made._parts = {(int(f), int(version)): Ranges(places) for f, version, places in facts["parts"]}
        made._forgotten = Ranges([(0, max(made.granted.end, made.done.end))])
        return made


def _by_version(sets: Mapping[tuple[int, int], Ranges]) -> list[list[Any]]:
    """As JSON has it."""
    return [[fragment, version, [list(one) for one in places]] for (fragment, version), places in sets.items()]


class LayerLeases(Leases):
    """All datasets of a run, which may be a cluster of a layer above. `is_below`: it is one, so all that is leased here
    was leased there. `goes_back`: a restarted server may be at an earlier version than it was."""

    sub_table_type: type[SubLeaseTable] = SubLeaseTable

    def __init__(self) -> None:
        super().__init__()
        self.is_below = self.goes_back = False
        self.failure = ""  # why the cluster has lost the layer above

    def lease(self, message: Lease, now: float, live: Collection[str]) -> LeaseAnswer:
        name, table = message.dataset.name, self.tables.get(message.dataset.name)
        if self.is_below:
            if self.failure:
                raise BadRequest(
                    f"the layer above leases {name!r} to this cluster, which has lost it: {self.failure}",
                    hint="mend that and restart the cluster's server; units that are not trained go to other clusters",
                )
            if table is None and self.goes_back:
                raise BadRequest(
                    f"a cluster leases {name!r} on only if each of its rounds is recorded, and this server records "
                    "checkpoints",
                    hint="start it with --durability round",
                )
            if table is not None and not isinstance(table, SubLeaseTable):
                raise PlanMismatch(
                    f"{name!r} was leased by this server alone, before it had a layer above",
                    hint=f"`outerstep control forget {name}` here: from then on the layer above leases it",
                )
        elif isinstance(table, SubLeaseTable):
            raise Busy(
                f"{name!r} is leased by a layer above, which this server has not begun to speak to",
                hint="start the server with --above, as before",
                retry_after_s=ASK_AGAIN_S,
            )
        return super().lease(message, now, live)

    @property
    def sub_tables(self) -> dict[str, SubLeaseTable]:
        return {name: table for name, table in self.tables.items() if isinstance(table, SubLeaseTable)}

    def _kind(self, facts: Mapping[str, Any] | None) -> type[LeaseTable]:
        is_sub = self.is_below if facts is None else "granted" in facts
        return self.sub_table_type if is_sub else super()._kind(facts)
