"""The data of a cluster, without I/O: what it was leased above, leases on, and has told of.

    due ─▶ a request, as any worker makes it ─▶ answered: granted places are leased to members (sub_leases.py)
    followed                what the leader sends from now on holds rounds up to these versions: places that are done in
                            them are units of the worker above, which its next contribution names
    kept                    and that is in the leader's record
    exchanged               of those, what the layer above has agreed on or refused is settled, as for any worker

The layer above is told that the cluster holds a place for as long as the place is nobody else's there: while it lies
here or with a member, while it is done here and not sent, and until an agreement from above has it.

What is durable where: the places that were granted, and those that are done here with the version that made them so,
are in the record of each of the cluster's rounds; which of them were sent is in the leader's record, with what was
sent. A place that is done in a version up to `versions` is in the latter, any other in the former.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from msgspec import convert, to_builtins
from msgspec.structs import replace

from ...errors import Refused
from ...ranges import Ranges
from ...types import MOST_RANGES, MOST_WANTED, Dataset, LeaseAnswer, Trained
from ..leases import end_of
from ..worker.machine import Units, WorkerState
from ..worker.units import Holding, LeasedWork, LeaseRequest

HAS_NONE = "the layer above, which has no unit for this cluster now"
IS_SILENT = "the layer above, which does not answer"
REFUSED_AGAIN_S, OVER_AGAIN_S, AGAIN_S = 10.0, 2.0, 0.5


class GrantedTable(Protocol):
    """One dataset, of which the layer above grants the cluster a part: a server's table (sub_leases.py), or what the
    leader of members sees of theirs (shared_sub_leases.py)."""

    dataset: Dataset
    waits_above: str

    @property
    def granted(self) -> Ranges: ...
    @property
    def given_up(self) -> Ranges: ...
    @property
    def refusal(self) -> Refused | None: ...
    @refusal.setter
    def refusal(self, why: Refused | None) -> None: ...
    def grant(self, places: Ranges) -> None: ...
    def withdraw(self, places: Ranges) -> None: ...
    def was_told(self, given_up: Ranges) -> None: ...
    def nothing_is_left(self, asked_at: float) -> None: ...
    def told(self, versions: Mapping[int, int]) -> None: ...
    def give_up_parts(self, versions: Mapping[int, int]) -> None: ...
    def done_after(self, versions: Mapping[int, int], up_to: Mapping[int, int] | None = None) -> Ranges: ...
    def parts_in(self, versions: Mapping[int, int]) -> Ranges: ...
    def spare(self, live: Collection[str], now: float) -> Ranges: ...
    def demand(self, live: Collection[str], now: float, holds: Ranges) -> tuple[int, int, bool]: ...
    def pace(self, live: Collection[str], now: float) -> float: ...


class GrantedTables(Protocol):
    """All datasets of a cluster. `failure`: why it has lost the layer above."""

    is_below: bool

    @property
    def failure(self) -> str: ...
    @failure.setter
    def failure(self, why: str) -> None: ...
    @property
    def sub_tables(self) -> Mapping[str, GrantedTable]: ...


class SubLeasing:
    """`leases`: the cluster's own tables. `to_note`: they have changed in a way that must be recorded."""

    def __init__(self, leases: GrantedTables) -> None:
        leases.is_below = True
        self.leases, self.to_note = leases, False
        self.work = LeasedWork(())
        self.begin({})

    def begin(self, versions: Mapping[int, int], *, gives_up: bool = False) -> None:
        """Nothing was sent of what is done in later versions than these, and what is done in them is known to the layer
        above. `gives_up`: or was given up. (The worker above may be one that goes on: numbers are not used twice.)"""
        if gives_up:
            self._give_up_parts(versions)
        self._steps_given_up, self._gave_up = 0, False  # by the worker above; in its last exchange
        number, self.versions = self.work.next_number, dict(versions)
        self.work = LeasedWork(())
        self.work.begin_after(number)
        self._asked: dict[str, tuple[GrantedTable | None, float]] = {}  # with the last request: of which table, when
        self._forgotten: set[str] = set()  # by the cluster, and the layer above knows
        self._not_before: dict[str, float] = {}

    # --- leasing ----------------------------------------------------------------------------------------------------

    def due(self, now: float, live: Collection[str]) -> list[LeaseRequest]:
        """What to ask the layer above; each is answered, failed or refused before this is called again."""
        requests = []
        for name in sorted(self.leases.sub_tables.keys() | self.work.holdings.keys()):
            table = self.leases.sub_tables.get(name)
            if now < self._not_before.get(name, 0.0) or (table is None and name in self._forgotten):
                continue
            request = self._request(name, table, now, live)
            if request is not None:
                self._asked[name] = table, now
                requests.append(request)
        return requests

    def _request(self, name: str, table: GrantedTable | None, now: float, live: Collection[str]) -> LeaseRequest | None:
        holding = self.work.holdings[name] if table is None else self.work.add(table.dataset)
        count, untrained, waits, pace, is_spare = 0, 0, False, 0.0, table is None
        if table is not None:
            spare = table.spare(live, now)
            if spare:
                table.withdraw(spare)
                self.to_note = is_spare = True
            holding.dropped |= table.given_up
        self._take_stock(holding, table)
        holds = holding.queue | holding.open
        if table is not None:
            count, untrained, waits = table.demand(live, now, holds)
            pace = table.pace(live, now)
        wants = count > 0 and (not holding.over or untrained > 0 or waits)
        if not (wants or is_spare or holding.dropped or not holding.is_confirmed):
            return None
        holding.requests += 1
        return LeaseRequest(
            holding.dataset,
            holding.requests,
            min(count, MOST_WANTED),
            tuple(holds)[:MOST_RANGES],
            tuple(holding.dropped)[:MOST_RANGES],
            untrained,
            waits,
            min(pace, 1e9),
        )

    def _take_stock(self, holding: Holding, table: GrantedTable | None) -> None:
        """What is the cluster's, and in nothing that it has sent."""
        holding.queue = Ranges()
        if table is not None:
            holding.queue = (table.granted - table.given_up) | (table.done_after(self.versions) - holding.open)

    def answered(self, request: LeaseRequest, answer: LeaseAnswer, now: float) -> None:
        name, holding = request.dataset.name, self.work.holdings[request.dataset.name]
        asked, asked_at = self._asked[name]
        table = self.leases.sub_tables.get(name)
        self.work.answered(request, answer)
        self._not_before[name] = now + (OVER_AGAIN_S if answer.state == "over" else max(answer.retry_after_s, AGAIN_S))
        (self._forgotten.add if table is None else self._forgotten.discard)(name)
        if table is None or table is not asked:
            return  # what was granted for another is not held, and goes back with the next request
        granted = (Ranges(answer.granted) & Ranges([(0, end_of(table.dataset))])).first(request.want)
        granted -= holding.open | table.done_after(self.versions)
        table.refusal = None
        table.withdraw(Ranges(answer.void) - granted)
        table.was_told(Ranges(request.dropped))
        table.grant(granted)
        if answer.state == "over":
            table.nothing_is_left(asked_at)
        table.waits_above = f"{HAS_NONE}: {answer.waiting_for}" if answer.waiting_for else HAS_NONE
        self.to_note = self.to_note or bool(granted or answer.void or request.dropped)

    def failed(self, request: LeaseRequest, now: float, refusal: Refused | None = None) -> None:
        """Nobody answers, or the layer above does not lease this: `refusal`."""
        name = request.dataset.name
        table = self.leases.sub_tables.get(name)
        self._not_before[name] = now + (REFUSED_AGAIN_S if refusal is not None else OVER_AGAIN_S)
        if table is not None:
            table.refusal, table.waits_above = refusal, IS_SILENT

    # --- what is sent -----------------------------------------------------------------------------------------------

    def followed(self, versions: Mapping[int, int]) -> Units:
        """What is sent from now on holds the cluster's rounds up to these versions. The units of the worker above that
        came with them."""
        numbers: list[tuple[int, int]] = []
        for name, table in sorted(self.leases.sub_tables.items()):
            self.work.add(table.dataset)
            numbers += self.work.trained_below(name, table.done_after(self.versions, versions))
        self.versions = dict(versions)
        return tuple(Ranges(numbers))

    def kept(self, versions: Mapping[int, int]) -> None:
        """The leader's record has all that is done in versions up to these."""
        for table in self.leases.sub_tables.values():
            table.told(versions)

    def describe(self, units: Units) -> tuple[Trained, ...]:
        """For an offer of what is sent now."""
        named = {trained.dataset: trained for trained in self.work.describe(units)}
        for name, table in self.leases.sub_tables.items():
            begun = tuple(table.parts_in(self.versions))[:MOST_RANGES]
            if begun:
                named[name] = replace(named.get(name, Trained(dataset=name, places=())), begun=begun)
        return tuple(named[name] for name in sorted(named))

    def exchanged(self, state: WorkerState) -> None:
        before = self._steps_given_up
        self._steps_given_up = state.metrics.steps_discarded + state.metrics.steps_overwritten
        self._gave_up = self._steps_given_up > before
        if self._gave_up:
            self._give_up_parts(self.versions)
        self.work.exchanged(state)

    def _give_up_parts(self, versions: Mapping[int, int]) -> None:
        for table in self.leases.sub_tables.values():
            table.give_up_parts(versions)
        self.to_note = True

    def lost(self, why: str) -> None:
        """The cluster has no layer above any more."""
        self.leases.failure = why

    # --- over a restart ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "versions": [[fragment, version] for fragment, version in self.versions.items()],
            "datasets": [to_builtins(holding.dataset) for holding in self.work.holdings.values()],
            "work": self.work.state(),
            "steps_given_up": self._steps_given_up,
            "gave_up": self._gave_up,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.begin({int(fragment): int(version) for fragment, version in state["versions"]})
        self.work = LeasedWork(())
        for dataset in state["datasets"]:
            self.work.add(convert(dataset, Dataset))
        self.work.load_state(state["work"])
        self._steps_given_up, self._gave_up = int(state["steps_given_up"]), bool(state["gave_up"])
        if self._gave_up:  # the tables may be as they were before
            self._give_up_parts(self.versions)
