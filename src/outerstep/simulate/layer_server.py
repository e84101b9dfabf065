"""A simulated server that is a cluster: its leader lives and dies with it, and the record is on its disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..coordination.server.commits import AnnounceRound
from ..coordination.server.coordinator import THE_LAYER_ABOVE
from ..coordination.sub_leases import LayerLeases
from ..events import Event, VersionPublished, WorkerDied, WorkerLeft
from ..types import Answer, Commit, ContributionKey, Control, GetPart, Poll, PollAnswer, PutPart
from .agenda import Agenda
from .disk import SimDisk
from .history import Contents, StepName
from .layer_history import TAKEN_BACK, LayerHistory, Model
from .leader import Change, SimAbove, SimLeader, SimLeaderRecord, copied
from .scenario import Scenario
from .server import ABOVE, SimServer
from .storage import Machine

RECORD = "above"
WRITE_S = 0.02


@dataclass
class LayerMachine(Machine):
    """With room for the leader's record. What a record says is remembered here; on the disk is which of them it is."""

    above: SimDisk = field(init=False)
    records: list[SimLeaderRecord] = field(default_factory=list)
    was_kept: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.above = SimDisk(self.power)

    def restart(self) -> None:
        super().restart()
        self.above.restart()

    def write(self, record: SimLeaderRecord) -> None:
        kept = copied(record)
        assert kept is not None
        self.records.append(kept)
        self.above.write(RECORD + ".new", [str(len(self.records) - 1).encode()])
        self.above.sync(RECORD + ".new")
        self.above.rename(RECORD + ".new", RECORD)
        self.above.sync_folder()
        self.was_kept = True

    def read(self) -> SimLeaderRecord | None:
        return copied(self.records[int(bytes(self.above.read(RECORD)))]) if RECORD in self.above.names() else None


@dataclass(frozen=True)
class Upward:
    """How a cluster is a worker above. `wait_s`: how long its members wait for that."""

    above: SimAbove
    wait_s: float
    leader_type: type[SimLeader]
    rng: random.Random


class LayerServer(SimServer):
    """(`SimBelow`.)"""

    record_may_be_old = False

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        agenda: Agenda,
        history: LayerHistory,
        machine: LayerMachine,
        upward: Upward | None = None,
    ) -> None:
        self.settings = scenario
        self.name, self._upward, self._layer, self._disks = name, upward, history, machine
        self.leader: SimLeader | None = None
        self.leaders: list[SimLeader] = []
        self.watch: Callable[[Event], None] = lambda event: None
        self._changes: dict[int, tuple[int, Change]] = {}  # moves from above under way, by fragment
        self._moved: Callable[[str], None] = lambda why: None
        super().__init__(scenario, agenda, history, machine)

    def _serve(self) -> None:
        super()._serve()
        self._changes.clear()
        if self._upward is not None:
            upward = self._upward
            is_new = not any(fragment.published.version for fragment in self.coordinator.fragments)
            if not is_new and not self._disks.was_kept:
                self._layer.faults["no_record"] += 1
                for i, fragment in enumerate(self.coordinator.fragments):
                    self._layer.forget_own(i, fragment.published.version)
            self.leader = upward.leader_type(
                self.name,
                self.name,
                1000 * self.epoch,
                self,
                upward.above,
                self._agenda,
                upward.rng,
                wait_s=upward.wait_s,
                is_new=is_new,
            )
            self.leaders.append(self.leader)

    def crash(self, away_s: float) -> None:
        if self.is_up and self.leader is not None:
            self.leader.kill()
        super().crash(away_s)

    # --- what its leader hears ----------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        super()._heard(event)
        self.watch(event)
        if self.leader is None:
            return
        if isinstance(event, VersionPublished) and event.agreement.participants:
            self.leader.round_closed(event.agreement.fragment)
        elif isinstance(event, WorkerLeft | WorkerDied) and not self.coordinator.members.live_ids:
            self.leader.emptied()

    def _answer(self, request: PutPart | Commit | Poll | GetPart, body: list[StepName], *, damaged: bool) -> Answer:
        answer = super()._answer(request, body, damaged=damaged)
        if isinstance(request, Poll) and isinstance(answer, PollAnswer) and answer.waiting_for == THE_LAYER_ABOVE:
            self._layer.faults["held_back"] += 1
            fragment = self.coordinator.fragments[request.fragment]
            if fragment.moves_next is not None and request.worker_id in fragment.round.expected:
                self._layer.violated(
                    f"{request.worker_id} waits for a version from above, which waits for a round that waits for it"
                )
        return answer

    # --- what its leader asks for -------------------------------------------------------------------------------------

    def model(self, fragment: int) -> Model:
        return self._layer.model(fragment)

    def version(self) -> int:
        return self.coordinator.fragments[0].published.version

    def versions(self) -> dict[int, int]:
        return {f: fragment.published.version for f, fragment in enumerate(self.coordinator.fragments)}

    @property
    def data(self) -> LayerServer:
        return self

    @property
    def leases(self) -> LayerLeases:
        return self.coordinator.leases

    def members_here(self) -> Collection[str]:
        return self.coordinator.members.live_ids

    def note_leases(self) -> None:
        self._commits.note()
        self._flush()

    def rounds_since(self, version: int) -> int:
        return self.coordinator.fragments[0].staleness(version)

    def moves_known(self) -> dict[int, int]:
        return {f: fragment.upper_version for f, fragment in enumerate(self.coordinator.fragments)}

    def keep(self, record: SimLeaderRecord, then: Callable[[str], None]) -> None:
        def write() -> None:
            try:
                self._disks.write(record)
            except OSError as trouble:
                self._layer.faults["not_kept"] += 1
                then(f"the record cannot be written: {trouble}")
            else:
                then("")

        self._later(WRITE_S, write)

    def kept(self) -> SimLeaderRecord | None:
        return self._disks.read()

    def has_newest(self) -> bool:
        return True

    def move(self, serial: int, fragments: tuple[int, ...], change: Change, then: Callable[[str], None]) -> None:
        self._moved = then
        self._changes = dict.fromkeys(fragments, (serial, change))
        for fragment in fragments:
            self.coordinator.move_from_above(fragment, serial)
        self._flush()

    def _agreed_above(self, fragment: int) -> Contents:
        serial, change = self._changes[fragment]
        added, gone = change(fragment)
        contents: Contents = []
        for run_id, steps in (("sim", added), (TAKEN_BACK, gone)):
            key = ContributionKey(run_id=run_id, worker_id=ABOVE, fragment=fragment, sequence=serial)
            contents.append((key, sorted(steps)))
        return contents

    def _announce(self, task: AnnounceRound) -> None:
        super()._announce(task)
        closing = task.step.closing
        if closing.from_above and self._changes.pop(closing.fragment, None) is not None and not self._changes:
            self._moved("")

    def hold(self, limit_s: float) -> None:
        self.coordinator.withheld_until = self._agenda.now + limit_s

    def release(self) -> None:
        self.coordinator.withheld_until = 0.0

    def end(self) -> None:
        self.handle(Control(kind="shutdown", reason="the layer above has ended its run"), [], lambda answer: None)
