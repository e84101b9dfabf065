"""A cluster of a fleet: a server with members, and the real machine of a cluster, which is a worker of the top.

Each of T, Θ, S and B (carried_leader.py) is two things: a version of the top, for all that others did, and the
cluster's own rounds (by the version that each made below).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ...coordination.layers.machine import RecordFacts
from ...coordination.layers.tasks import JoinAbove
from ...events import Event, VersionPublished
from ...ranges import Ranges
from ..agenda import Agenda
from ..carried_leader import CarriedLeader, CarriedUpward, Then
from .ledger import NOTHING, LayerLedger
from .member import Clocks, FleetHost, FleetMember
from .server import RECORD_S, FleetServer


@dataclass(frozen=True)
class ClusterHolding:
    """Of one fragment: the version of the top that is in it, and the cluster's own rounds."""

    above: int = 0
    own: Ranges = NOTHING


class FleetUpward(CarriedUpward[Ranges], FleetMember):
    """The cluster, to the top. Its steps are rounds."""

    def __init__(
        self, leader: FleetLeader, host: FleetHost, top: FleetServer, agenda: Agenda, rng: random.Random, clocks: Clocks
    ) -> None:
        self._led_by(leader)
        FleetMember.__init__(self, host, 1, top, agenda, rng, clocks)

    @property
    def has_unsent(self) -> bool:
        return any(one.unsent for one in self.fragments)

    def agreed(self, index: int) -> ClusterHolding:
        """Θ."""
        held = self.fragments[index].held
        version = held.version if held is not None else 0
        return ClusterHolding(version, self.ledger.held_at(self.life, index, version))

    def follow(self, index: int, target: ClusterHolding) -> None:
        """S = T, so that what is unsent is what T has and Θ has not."""
        agreed = self.agreed(index)
        missing = agreed.own - target.own
        if missing or agreed.above != target.above:
            self.ledger.violated(f"{self.worker_id} would take rounds {missing} back: {target} follows {agreed}")
        fragment = self.fragments[index]
        fragment.unsent, fragment.until = target.own - agreed.own, 1 << 62

    def _train(self) -> None:
        self._be("training")
        super()._train()


class FleetLeader(CarriedLeader[ClusterHolding]):
    """Of one cluster. It lives as long as the run."""

    worker: FleetUpward | None

    def __init__(
        self,
        host: FleetHost,
        below: FleetServer,
        top: FleetServer,
        agenda: Agenda,
        rng: random.Random,
        *,
        wait_s: float,
        record_s: float = RECORD_S,
    ) -> None:
        holding = [ClusterHolding() for _ in range(top.terms.setting.num_fragments)]
        super().__init__(host.name, agenda, list(holding), wait_s)
        self.host, self.below, self._top, self._rng = host, below, top, rng
        self._record_s = record_s
        self._joining: FleetUpward | None = None
        self.clocks = Clocks()
        self.t = holding
        self._made = [NOTHING for _ in holding]  # all of the cluster's own rounds
        # By fragment: S and B of the move under way; and who waits for it.
        self._moving_now: dict[int, tuple[ClusterHolding, ClusterHolding]] = {}
        self._then: Then = self._next
        below.heard = self._heard
        self.machine.began(is_new=True)
        self.work()

    # --- what happens below -------------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        if isinstance(event, VersionPublished):
            agreement = event.agreement
            if agreement.participants:
                self._made_round(agreement.fragment, agreement.version)
            else:
                self._moved(agreement.fragment)
        elif not self.below.coordinator.members.live_ids:
            self.emptied()

    def _made_round(self, fragment: int, version: int) -> None:
        held, made = self.t[fragment], Ranges([(version, version + 1)])
        self.t[fragment] = ClusterHolding(held.above, held.own | made)
        self._made[fragment] = self._made[fragment] | made
        self.round_closed(fragment)

    def _moved(self, fragment: int) -> None:
        """T′ = T + (S − B)."""
        s, b = self._moving_now.pop(fragment)
        held = self.t[fragment]
        if held.above != b.above:
            self.below.ledger.violated(f"a move from version {b.above} of the top was made on version {held.above}")
        self.t[fragment] = ClusterHolding(s.above, (held.own | (s.own - b.own)) - (b.own - s.own))
        if not self._moving_now:
            self._then()

    def _violated(self, rule: str) -> None:
        self.below.ledger.violated(rule)

    def _read(self) -> tuple[RecordFacts | None, Mapping[int, int]]:
        return None, {f: one.upper_version for f, one in enumerate(self.below.coordinator.fragments)}

    def _keep(self, then: Then) -> None:
        self.later(self._record_s, then)

    def _move(self, serial: int, fragments: tuple[int, ...], then: Then) -> None:
        self._moving_now, self._then = {f: (self._s(f), self._before[f]) for f in fragments}, then
        self.below.move(serial, fragments)

    def _hold(self, limit_s: float) -> None:
        self.below.hold(limit_s)

    def _release(self) -> None:
        self.below.release()

    def _join(self, task: JoinAbove) -> None:
        self._joining = FleetUpward(self, self.host, self._top, self._agenda, self._rng, self.clocks)

    def _joined(self, task: JoinAbove) -> None:
        self.worker = self._joining
        self.machine.joined(self._moving(), unsettled=False)

    # --- S and B ------------------------------------------------------------------------------------------------------

    def _s(self, fragment: int) -> ClusterHolding:
        if self.worker is None:
            if self._joining is None or self._joining.fragments[fragment].held is None:
                return self._before[fragment]
            return self._joining.agreed(fragment)
        agreed = self.worker.agreed(fragment)
        return ClusterHolding(agreed.above, agreed.own | self.worker.fragments[fragment].unsent)

    def _follow(self) -> None:
        assert self.worker is not None
        self._before = list(self.t)
        for fragment, target in enumerate(self._before):
            self.worker.follow(fragment, target)

    def settle(self) -> None:
        """The end of the run: what the cluster holds back is said, so that every round is somewhere."""
        upward = self.worker or self._joining
        if upward is None:
            return
        ledger: LayerLedger = self._top.ledger
        book = ledger.books[upward.life]
        upward.end()
        for fragment, held in enumerate(self.t):
            book.held[fragment] = (book.held[fragment] | held.own) - book.applied[fragment]
            foreign = book.applied[fragment] - self._made[fragment]
            if foreign:
                ledger.violated(f"rounds {foreign} of {self.host.name} are in the top, and were never made")
            vanished = self._made[fragment] - book.applied[fragment] - book.given_up[fragment] - held.own
            if vanished:
                ledger.violated(f"rounds {vanished} of {self.host.name} vanished")
        book.taken, book.said = 0, None  # its rounds have the numbers of versions, of which some came from above
