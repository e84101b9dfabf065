"""Simulated members that meet without a server, and together are one worker of the layer above.

How they meet is an engine's business (torchft, all-reduce), which is not simulated: a quorum of those that are awake
does a thing together, or not at all. What is simulated is what that leaves to us: every member holds the leader's
record and the serial number of the last move; a leader dies, falls asleep or is told to hand over in the middle of
anything; a successor goes on from the record that it holds itself; and an ex-leader wakes up and speaks.

A member that crashes has nothing when it is back, and is healed by the others. If nobody is left that holds anything,
the cluster begins anew, with what the layer above has.

Every member has the life that a replica of torchft has, and each quorum is told to it. What that must come to is
checked here: a round that failed is rolled back, a quorum that grew was received as a join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..coordination.layers.leadership import MemberInSight, who_leads
from ..coordination.layers.lifecycle import GroupPlace, GroupState, Happening, Lifecycle
from ..coordination.layers.replica_life import ReplicaLife
from ..digest import data_hash
from ..types import ContributionKey, Participant
from .agenda import Agenda
from .history import Contents, StepName
from .layer_history import TAKEN_BACK, LayerHistory, Model
from .layer_server import Upward
from .leader import Change, SimLeader, SimLeaderRecord, copied
from .leader_data import SimDataBelow
from .server import ABOVE
from .storage import encoded

MEET_S = 0.3  # a quorum round of any kind
NOTICED_S = 8.0  # after so long it is known that a member cannot reach the layer above


class SeenLifecycle(Lifecycle):
    """One that remembers how often each state was entered; the last place is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: Counter[GroupState] = Counter()

    def feed(self, *happenings: Happening) -> GroupPlace:
        for happening in happenings:
            before = self.state
            super().feed(happening)
            self.entered[self.state] += self.state is not before
        return self.place


@dataclass
class SimMember:
    """One process; a restart makes it a new one. `version`: of what it holds, −1 = nothing. `was_behind`, `has_healed`:
    since its last quorum it was healed, or has healed others."""

    name: str
    life: ReplicaLife
    seen: SeenLifecycle
    instance: int = 0
    version: int = -1
    serial: int = 0
    record: SimLeaderRecord | None = None
    record_number: int = 0
    is_up: bool = True
    paused_until: float = 0.0
    steps: int = 0
    unsent: list[StepName] = field(default_factory=list)
    leader: SimLeader | None = None
    was_behind: bool = False
    has_healed: bool = False


class MemberBelow:
    """(`SimBelow`.) The cluster, as one process of it sees it: what it keeps and moves, it does in a quorum that it
    leads."""

    record_may_be_old = True

    def __init__(self, group: SimGroup, member: SimMember) -> None:
        self._group, self._member, self._instance = group, member, member.instance
        self._read = 0  # the number of the record that was read

    @property
    def _is_mine(self) -> bool:
        return self._member.instance == self._instance and self._group.leads(self._member)

    def model(self, fragment: int) -> Model:
        return self._group.history.model(fragment, max(self._member.version, 0))

    def version(self) -> int:
        return max(self._member.version, 0)

    def versions(self) -> dict[int, int]:
        return {}

    @property
    def data(self) -> SimDataBelow | None:
        """These train none that is leased."""
        return None

    def rounds_since(self, version: int) -> int:
        return sum(self._group.is_round[version + 1 : self._member.version + 1])

    def moves_known(self) -> dict[int, int]:
        return dict.fromkeys(range(self._group.fragments), self._member.serial)

    def kept(self) -> SimLeaderRecord | None:
        self._read = self._member.record_number
        return copied(self._member.record)

    def has_newest(self) -> bool:
        return self._read == self._group.record_number

    def keep(self, record: SimLeaderRecord, then: Callable[[str], None]) -> None:
        def spread() -> None:
            self._group.record_number += 1
            for member in self._group.quorum():
                member.record, member.record_number = copied(record), self._group.record_number

        self._group.meet(lambda: self._is_mine, spread, then)

    def move(self, serial: int, fragments: tuple[int, ...], change: Change, then: Callable[[str], None]) -> None:
        def spread() -> None:
            self._group.moved(serial, {fragment: change(fragment) for fragment in fragments})

        def again(why: str) -> None:
            """A vote that fails leaves everything as it was."""
            if why and self._is_mine:
                self._group.meet(lambda: self._is_mine, spread, again)
            else:
                then(why)

        self._group.meet(lambda: self._is_mine, spread, again)

    def hold(self, limit_s: float) -> None:
        self._group.held_until = self._group.agenda.now + limit_s

    def release(self) -> None:
        if self._is_mine:
            self._group.held_until = 0.0

    def end(self) -> None:
        self._group.is_training_over = True


class SimGroup:
    """`round_s`: between two rounds. `failing`: how often a quorum comes to nothing."""

    below_type: type[MemberBelow] = MemberBelow

    def __init__(
        self,
        name: str,
        members: int,
        fragments: int,
        agenda: Agenda,
        history: LayerHistory,
        upward: Upward,
        *,
        round_s: float,
        failing: float,
        life_type: type[ReplicaLife] = ReplicaLife,
    ) -> None:
        self.name, self.fragments, self.agenda, self.history, self._upward = name, fragments, agenda, history, upward
        self._round_s, self.failing = round_s, failing
        self._life_type = life_type
        self.members = [SimMember(f"{name}.{i}", *self._born()) for i in range(members)]
        self.is_round = [False]  # by version: did members make it?
        self.held_until = 0.0
        self.record_number = 0  # of the last that was kept
        self.is_training_over = False
        self.leaders: list[SimLeader] = []
        self._starts = 0
        self._lead: SimMember | None = None
        self.named = ""  # who is to lead, by an order that nobody has obeyed yet
        self._has_begun = False
        agenda.after(round_s, self._round)

    def _born(self) -> tuple[ReplicaLife, SeenLifecycle]:
        seen = SeenLifecycle()
        return self._life_type(seen), seen

    # --- faults -----------------------------------------------------------------------------------------------------

    def crash(self, member: SimMember, away_s: float) -> None:
        if not member.is_up:
            return
        member.is_up = False
        if member.leader is not None:
            member.leader.kill()
        self.history.say(f"{member.name} dies")
        self.agenda.after(away_s, lambda: self._restart(member))

    def _restart(self, member: SimMember) -> None:
        member.is_up, member.instance, member.version, member.serial = True, member.instance + 1, -1, 0
        member.record, member.record_number, member.leader = None, 0, None
        member.unsent, member.paused_until = [], 0.0
        self._bury(member)
        member.life, member.seen = self._born()
        member.was_behind = member.has_healed = False
        self._began_again(member)
        if self._lead is member:
            self._lead = None

    # --- what members train (group_data.py) -------------------------------------------------------------------------

    def _began_again(self, member: SimMember) -> None:
        """It has nothing."""

    def _healed(self, member: SimMember, newest: SimMember) -> None:
        """It has what that one has."""

    def _took_step(self, member: SimMember) -> None:
        """One more is unsent."""

    def _closed(self, awake: list[SimMember], brings: list[SimMember]) -> None:
        """A round, with the steps of those who bring some."""

    def pause(self, member: SimMember, seconds: float) -> None:
        member.paused_until = self.agenda.now + seconds
        if member.leader is not None:
            member.leader.pause(seconds)

    @property
    def lead(self) -> SimMember | None:
        return self._lead

    @property
    def is_at_rest(self) -> bool:
        """Nobody has anything left to bring."""
        return not any(member.unsent for member in self.members if member.is_up)

    # --- quorums ----------------------------------------------------------------------------------------------------

    def quorum(self) -> list[SimMember]:
        """Of those that are awake, with what the one that has most of it holds."""
        awake = [m for m in self.members if m.is_up and self.agenda.now >= m.paused_until]
        if not awake:
            return []
        newest = max(awake, key=lambda member: (member.version, member.name))
        if any(member.is_up and member.version > newest.version for member in self.members):
            return []  # who holds more is asleep
        if newest.version < 0:
            self._begin_anew(awake)
        elif newest.version + 1 < len(self.is_round):
            self._go_back(newest.version)
        for member in awake:
            if member.version != newest.version:
                self.history.faults["healed"] += 1
                member.was_behind = newest.has_healed = True
                member.version, member.serial = newest.version, newest.serial
                member.record, member.record_number = copied(newest.record), newest.record_number
                self._healed(member, newest)
        return awake

    def _begin_anew(self, awake: list[SimMember]) -> None:
        """Nobody holds anything."""
        self._go_back(0)
        for member in awake:
            member.version = 0

    def _go_back(self, version: int) -> None:
        """Nobody holds what came after this version any more."""
        if len(self.is_round) > version + 1:
            self.history.faults["all_holders_died"] += 1
            self.history.say(f"nobody holds what came after version {version}")
        for fragment in range(self.fragments):
            kept, last = self.history.model(fragment, version), self.history.model(fragment)
            for step in last - kept:
                self.history.own.discard((fragment, step))
                self.history.applied.pop((fragment, step), None)
            for step in kept - last:  # it was taken back since
                self.history.applied[fragment, step] = self._key(ABOVE, fragment)
            del self.history.models.setdefault(fragment, [frozenset()])[version + 1 :]
            del self.history.rounds.setdefault(fragment, [])[version:]
        del self.is_round[version + 1 :]

    # --- their lives --------------------------------------------------------------------------------------------------

    def _live(self, awake: list[SimMember], *, carried: bool) -> None:
        """These have met, and their vote was carried or not."""
        ending = [self.is_training_over and not member.unsent for member in awake]
        for member, ends in zip(awake, ending, strict=True):
            life, met_before, was = member.life, member.life.replicas, member.seen.state
            joins_before = member.seen.entered[GroupState.RECEIVED_JOIN]
            life.meets()
            life.met(len(awake), healed=member.was_behind, heals=member.has_healed)
            member.was_behind = member.has_healed = False
            grew = was is GroupState.TRAINING and len(awake) > met_before
            if grew and member.seen.entered[GroupState.RECEIVED_JOIN] == joins_before:
                self.history.violated(f"{member.name} met {len(awake)} after {met_before}, and received no join")
            life.heard(ends=ends, another_ends=sum(ending) > ends)
            if carried:
                life.agreed()
            else:
                life.failed()
            if not carried and member.seen.state is not GroupState.ROLLBACK:
                self.history.violated(f"a vote of {member.name} failed, and it is in {member.seen.place}")
            if life.unclear:
                self.history.violated(f"the life of {member.name} has no such edge: {life.unclear}")

    def _bury(self, member: SimMember) -> None:
        """What this process has lived through."""
        for state, times in member.seen.entered.items():
            self.history.faults[f"life_{state}"] += times

    def leave(self) -> None:
        """All members, at the very end."""
        for member in self.members:
            if member.is_up:
                member.life.left()
                if member.seen.state is not GroupState.EXIT:
                    self.history.violated(f"{member.name} has left, and is in {member.seen.place}")
            self._bury(member)

    def leads(self, member: SimMember) -> bool:
        return member is self._lead and member in self.quorum()

    def meet(self, may: Callable[[], bool], spread: Callable[[], None], then: Callable[[str], None]) -> None:
        """A quorum round: `spread` is done by all of them, or by none."""

        def act() -> None:
            if not may():
                then("another member leads, or there is no quorum")
            elif self._upward.rng.random() < self.failing:
                self.history.faults["vote_failed"] += 1
                self._live(self.quorum(), carried=False)
                then("the vote has failed")
            else:
                spread()
                self._live(self.quorum(), carried=True)
                then("")

        self.agenda.after(MEET_S, act)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        self.agenda.after(self._round_s, self._round)
        awake = self.quorum()
        for member in awake:
            if not self.is_training_over:
                for _ in range(2):
                    member.steps += 1
                    member.unsent.append((f"{member.name}#{member.instance}", member.steps))
                    self._took_step(member)
        self._choose(awake)
        brings = [member for member in awake if member.unsent]
        if not brings or self.agenda.now < self.held_until:
            return
        fails = self._upward.rng.random() < self.failing
        self._live(awake, carried=not fails)
        if fails:
            return
        made = [(f"{member.name}", list(member.unsent)) for member in brings]
        contents = {
            fragment: [(self._key(name, fragment), steps) for name, steps in made] for fragment in range(self.fragments)
        }
        self._publish(awake, contents, is_round=True)
        self._closed(awake, brings)
        for member in brings:
            member.unsent.clear()
        if self._lead is not None and self._lead.leader is not None:
            self._lead.leader.round_closed()
            if self.is_training_over:
                self._lead.leader.emptied()

    def _key(self, name: str, fragment: int) -> ContributionKey:
        return ContributionKey(run_id="sim", worker_id=name, fragment=fragment, sequence=len(self.is_round))

    def _publish(self, awake: list[SimMember], contents: dict[int, Contents], *, is_round: bool) -> None:
        version = len(self.is_round)
        for fragment, added in contents.items():
            joined = [Participant(worker_id=key.worker_id, sequence=1, weight=1.0) for key, _ in added]
            who = tuple(joined) if is_round else ()
            made = data_hash([f"{self.name} {version} {fragment}".encode(), encoded(added)])
            self.history.round_closed(fragment, version, made, who, added, 0)
        self.is_round.append(is_round)
        for member in awake:
            member.version = version

    def moved(self, serial: int, changes: dict[int, tuple[set[StepName], set[StepName]]]) -> None:
        contents: dict[int, Contents] = {}
        for fragment in range(self.fragments):
            added, gone = changes.get(fragment, (set(), set()))
            contents[fragment] = [
                (ContributionKey(run_id=run_id, worker_id=ABOVE, fragment=fragment, sequence=serial), sorted(steps))
                for run_id, steps in (("sim", added), (TAKEN_BACK, gone))
            ]
        awake = self.quorum()
        self._publish(awake, contents, is_round=False)
        for member in awake:
            member.serial = serial

    # --- who leads ----------------------------------------------------------------------------------------------------

    def _choose(self, awake: list[SimMember]) -> None:
        """As the real rule says. Who led before, and is awake, is told."""
        cut = self._upward.above.network.cut
        sights = [MemberInSight(m.name, not cut & {(m.name, "server"), ("server", m.name)}) for m in awake]
        name = who_leads(sights, self.named, self._lead.name if self._lead is not None else "")
        if name == self.named:
            self.named = ""
        lead = next((member for member in awake if member.name == name), None)
        if lead is None or (lead is self._lead and lead.leader is not None and not lead.leader.machine.failure):
            return
        if self._lead is not None and self._lead in awake and self._lead.leader is not None:
            self._lead.leader.lost("another member leads")
            self._lead.leader = None
        self.history.faults["new_leader"] += self._has_begun
        self.history.say(f"{lead.name} leads")
        self._lead, self._starts = lead, self._starts + 1
        if self._has_begun and not any(member.is_up and member.record is not None for member in self.members):
            self.history.faults["no_record"] += 1
            for fragment in range(self.fragments):
                self.history.forget_own(fragment, max(lead.version, 0))
        if lead.leader is not None:  # it led before, slept, and nobody has told it
            lead.leader.lost("it has led before")
        lead.leader = self._upward.leader_type(
            self.name,
            lead.name,
            1000 * self._starts,
            self.below_type(self, lead),
            self._upward.above,
            self.agenda,
            self._upward.rng,
            wait_s=self._upward.wait_s,
            is_new=not self._has_begun,
        )
        self._has_begun = True
        self.leaders.append(lead.leader)
