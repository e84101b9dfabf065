"""Leased data of members without a server that are one worker of a layer above, without I/O.

Two halves meet here. The members hold one table and change it by what all have decided (shared_leases.py). Their places
come from above, where one of them, the leader, leases as any worker does (layers/sub_leasing.py). What the leader hears
there it says to all when they decide; so all hold the same table, and nobody trains a place that was not granted.

    above ──answer──▶ the leader ──LeaseNews──▶ a decision ──▶ free ──divide──▶ held ──▶ … ──▶ done here ──▶ to_tell

`HeardTable` is what the leader sees: the table as it was decided last, with the news that nobody has decided on yet.
News has numbers, and the table remembers the last that is in it: news that is repeated changes nothing, and a leader
that comes after another begins where the table is. What a leader had heard and not passed on died with it: its
successor does not hold it, and the layer above leases it anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..errors import Refused
from ..events import Event
from ..ranges import NONE, Ranges
from ..types import MOST_RANGES, Count, Dataset, DatasetName, Label, LeaseStatement, Places, Plain, Positive, Trained
from .shared_leases import LEAD_TURNS, SharedLeases, SharedTable
from .sub_leases import LONGEST_REASON, MANY_PIECES, OF_HELD, SubLeaseTable
from .worker.units import LEAD_S, LEAST_AHEAD

MOST_NEWS = 64  # at one decision; the rest at the next
PACE_MEMORY = 0.5

Versions = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=4096)]


class LeaseNews(Plain, frozen=True):
    """What the leader has heard above of one dataset, or has kept of it.

    granted, taken    places that are the members' from now on, or not any more
    settled           given up here, and the layer above knows
    over              nothing is left to lease there
    kept              what is done in these versions is in the leader's record
    gives up          the members have given up what they had in these versions, for what was agreed above
    trouble           why nothing is leased; "" = it is again"""

    dataset: DatasetName
    number: Positive
    kind: Literal["granted", "taken", "settled", "over", "kept", "gives up", "trouble"]
    places: Places = ()
    versions: Versions = ()
    why: Label = ""


class SharedSubTable(SubLeaseTable, SharedTable):
    """One dataset, as all members have it, of which the layer above grants them a part. `heard`: the number of the last
    news that is in it."""

    def __init__(self, dataset: Dataset, owner: str = "") -> None:
        super().__init__(dataset, owner)
        self.heard, self.is_over, self.trouble = 0, False, ""
        self.is_confirmed = True  # the layer above has said what of it is still the members', since all began anew

    def hear_above(self, news: Iterable[LeaseNews]) -> None:
        for one in news:
            if one.dataset == self.dataset.name and one.number > self.heard:
                self.heard = one.number
                self._hear_one(one)

    def _hear_one(self, one: LeaseNews) -> None:
        places, versions = Ranges(one.places) & Ranges([(0, self.end)]), dict(one.versions)
        match one.kind:
            case "granted":
                self.grant(places)
            case "taken":
                self.withdraw(places)
            case "settled":
                self.was_told(places)
            case "over":
                self.is_over = True
            case "kept":
                self.told(versions)
            case "gives up":
                self.give_up_parts(versions)
            case "trouble":
                self.trouble = one.why

    def grant(self, places: Ranges) -> None:
        """(A decision is the record: nothing is fresh.)"""
        super().grant(places)
        self.free, self.fresh = self.free | self.fresh, NONE
        self.is_over, self.is_confirmed = self.is_over and not places, True

    def wanted_above(self, pace_per_s: float, holds: Ranges) -> tuple[int, int, bool]:
        """As `demand`. All that is granted is divided at once, and must last until what is asked for now is granted and
        decided: for some decisions, or for some time if that is more."""
        crowd = self.shares.among(self.shares.names, 0.0)
        names = list(crowd)
        per_turn = sum(map(crowd.pace, names))
        ahead = max(LEAST_AHEAD * max(len(names), 1), int((LEAD_TURNS + 1) * per_turn), int(pace_per_s * LEAD_S))
        if holds.pieces >= MANY_PIECES:
            ahead = max(ahead, holds.total // OF_HELD)
        untrained = self.free.total + sum(map(self._untrained, self.held))
        if not self.is_confirmed:
            return max(ahead - untrained, 1), untrained, True
        return (ahead - untrained if 2 * untrained <= ahead else 0), untrained, not untrained

    def _untrained(self, worker_id: str) -> int:
        """What it said at the last decision and was given then: it may hold what it has trained and not brought yet."""
        hand = self._hand(worker_id)
        if worker_id not in self.shares.names:
            return hand
        said, at = self.shares.said(worker_id)
        given = sum(places.total for turn, places in self.recent.get(worker_id, ()) if turn >= at)
        return min(hand, said + given)

    # --- what is different where all decide -----------------------------------------------------------------------

    @property
    def _more_may_come(self) -> bool:
        return not self.is_over

    def _believed(self, worker_id: str, places: Ranges) -> Ranges:
        """All of one's own members': what goes up must be named with the contribution that holds it, and not later."""
        return places if self._ratio == inf else super()._believed(worker_id, places)

    def _open_epochs(self, weights: Mapping[str, float], needs: Mapping[str, float], now: float) -> None:
        """New places come from above."""

    # --- over a restart, and for a member that heals ----------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        facts = super().remembered()
        above = {name: facts.pop(name) for name in ("granted", "fresh", "to_tell", "parts")}
        return {**facts, "above": {**above, "heard": self.heard, "is_over": self.is_over, "trouble": self.trouble}}

    @classmethod
    def resumed(
        cls, facts: Mapping[str, Any], claimable_until: float = 0.0, *, forgetful: bool = False
    ) -> SharedSubTable:
        above = facts["above"]
        made = super().resumed({**facts, **above}, claimable_until)
        assert isinstance(made, SharedSubTable)
        made.heard, made.is_over, made.trouble = int(above["heard"]), bool(above["is_over"]), str(above["trouble"])
        made._forgotten = NONE  # nothing is leased but by decisions
        return made


class SharedSubLeases(SharedLeases):
    """All datasets of a run that a layer above leases to its members."""

    table_type: type[SharedSubTable] = SharedSubTable
    tables: dict[str, SharedSubTable]  # type: ignore[assignment]  # of this type, all of them
    is_below = True

    def __init__(self, datasets: Iterable[Dataset]) -> None:
        self._news: tuple[LeaseNews, ...] = ()
        super().__init__(datasets)

    def decide(
        self,
        members: Mapping[str, str],
        said: Mapping[str, Collection[LeaseStatement]],
        brought: Mapping[str, Collection[Trained]],
        round_: tuple[int, int] = (0, 0),
        fragments: int = 1,
        *,
        may_lie: bool = False,
        news: Collection[LeaseNews] = (),
    ) -> list[Event]:
        """`news`: the leader's."""
        self._news = tuple(news)
        return super().decide(members, said, brought, round_, fragments, may_lie=may_lie)

    def _opened(self) -> None:
        for table in self.tables.values():
            table.hear_above(self._news)

    def doubt(self) -> None:
        """All members go on from saved states: what these say they hold, the layer above may have leased to others, or
        have in its model."""
        for table in self.tables.values():
            table.is_confirmed = False

    def confirm(self) -> None:
        """Not all have begun anew."""
        for table in self.tables.values():
            table.is_confirmed = True

    @property
    def is_confirmed(self) -> bool:
        return all(table.is_confirmed for table in self.tables.values())

    @property
    def trouble(self) -> str:
        """Why nothing is leased to the members; "" = it is."""
        return next((table.trouble for table in self.tables.values() if table.trouble), "")


class HeardTable:
    """(`GrantedTable`.) One dataset, as the leader sees it. What it is told becomes news."""

    def __init__(self, table: SharedSubTable) -> None:
        self.dataset = table.dataset
        self.news: list[LeaseNews] = []  # that nobody has decided on yet
        self.waits_above = "the layer above"  # what nothing is granted for
        self.pace_per_s = 0.0
        self._as_decided(table)
        self._done, self._done_at = self._table.done.total, -1.0

    def _as_decided(self, table: SharedSubTable) -> None:
        self._table = SharedSubTable.resumed(table.remembered())
        self._table.is_confirmed = table.is_confirmed
        self._table.hear_above(self.news)

    def decided(self, table: SharedSubTable, now: float) -> None:
        self.news = [one for one in self.news if one.number > table.heard]
        self._as_decided(table)
        done = table.done.total
        if done > self._done:
            if 0.0 <= self._done_at < now:
                pace = (done - self._done) / (now - self._done_at)
                self.pace_per_s = (
                    PACE_MEMORY * self.pace_per_s + (1.0 - PACE_MEMORY) * pace if self.pace_per_s else pace
                )
            self._done, self._done_at = done, now
        elif self._done_at < 0.0:
            self._done_at = now

    def _tell(
        self,
        kind: Literal["granted", "taken", "settled", "over", "kept", "gives up", "trouble"],
        places: Ranges = NONE,
        versions: Mapping[int, int] | None = None,
        why: str = "",
    ) -> None:
        one = LeaseNews(
            dataset=self.dataset.name,
            number=self._table.heard + 1,
            kind=kind,
            places=tuple(places)[:MOST_RANGES],
            versions=tuple((versions or {}).items()),
            why=why[:LONGEST_REASON],
        )
        self.news.append(one)
        self._table.hear_above([one])

    # --- what is heard above ------------------------------------------------------------------------------------------

    def grant(self, places: Ranges) -> None:
        """What was asked for is answered."""
        if places or not self._table.is_confirmed:
            self._tell("granted", places)

    def withdraw(self, places: Ranges) -> None:
        if places & self._table.granted:
            self._tell("taken", places & self._table.granted)

    def was_told(self, given_up: Ranges) -> None:
        if given_up & self._table.given_up:
            self._tell("settled", given_up)

    def nothing_is_left(self, asked_at: float) -> None:
        if not self._table.is_over:
            self._tell("over")

    def told(self, versions: Mapping[int, int]) -> None:
        if any(version <= versions.get(fragment, 0) for fragment, version in self._table.to_tell):
            self._tell("kept", versions=versions)

    def give_up_parts(self, versions: Mapping[int, int]) -> None:
        if self._table.parts_in(versions):
            self._tell("gives up", versions=versions)

    @property
    def refusal(self) -> Refused | None:
        """Why the layer above leases none; members are told in words."""
        return Refused(self._table.trouble) if self._table.trouble else None

    @refusal.setter
    def refusal(self, why: Refused | None) -> None:
        self.stop_because("" if why is None else str(why))

    def stop_because(self, why: str) -> None:
        if why[:LONGEST_REASON] != self._table.trouble:
            self._tell("trouble", why=why)

    # --- what is said above -------------------------------------------------------------------------------------------

    @property
    def granted(self) -> Ranges:
        return self._table.granted

    @property
    def given_up(self) -> Ranges:
        return self._table.given_up

    def done_after(self, versions: Mapping[int, int], up_to: Mapping[int, int] | None = None) -> Ranges:
        return self._table.done_after(versions, up_to)

    def parts_in(self, versions: Mapping[int, int]) -> Ranges:
        return self._table.parts_in(versions)

    def spare(self, live: Collection[str], now: float) -> Ranges:
        """All members train all datasets, as long as there are members."""
        return NONE

    def pace(self, live: Collection[str], now: float) -> float:
        return self.pace_per_s

    def demand(self, live: Collection[str], now: float, holds: Ranges) -> tuple[int, int, bool]:
        return self._table.wanted_above(self.pace_per_s, holds)


class HeardLeases:
    """(`GrantedTables`.) What one leader sees of all datasets, for as long as it leads."""

    is_below = True
    table_type: type[HeardTable] = HeardTable

    def __init__(self, leases: SharedSubLeases) -> None:
        self.sub_tables = {name: self.table_type(table) for name, table in leases.tables.items()}

    def decided(self, leases: SharedSubLeases, now: float) -> None:
        for name, table in leases.tables.items():
            self.sub_tables[name].decided(table, now)

    @property
    def news(self) -> tuple[LeaseNews, ...]:
        return tuple([one for table in self.sub_tables.values() for one in table.news][:MOST_NEWS])

    @property
    def failure(self) -> str:
        """Why the members have lost the layer above."""
        return next((str(table.refusal) for table in self.sub_tables.values() if table.refusal), "")

    @failure.setter
    def failure(self, why: str) -> None:
        for table in self.sub_tables.values():
            table.stop_because(why)
