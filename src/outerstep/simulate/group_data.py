"""Simulated members without a server that are a cluster and train leased data: each step is a unit, if there is one.

The table is the one that ships (coordination/shared_sub_leases.py): each member has its own, and all decide. Whoever
leads passes on what it hears above, by the machine that ships (coordination/layers/sub_leasing.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ..coordination.shared_sub_leases import HeardLeases, LeaseNews, SharedSubLeases
from ..coordination.worker.machine import Cycle, Progress, Work, WorkerState
from ..coordination.worker.units import LeasedWork, unit_size
from ..ranges import NONE, Ranges
from ..types import Dataset
from .layer_group import MemberBelow, SimGroup, SimMember

STEPS = 2  # from one round to the next


class TrainingMember:
    """One start of a member, as far as its data goes. `unsent`: numbers of the units that no round has."""

    def __init__(self, name: str, instance: str, dataset: Dataset, leases: SharedSubLeases) -> None:
        self.name, self.instance, self.dataset, self.leases = name, instance, dataset, leases
        self.units = LeasedWork([dataset])
        self.units.holdings[dataset.name].step_samples = dataset.unit_samples
        self.unsent = self.agreed = NONE

    def hear(self) -> None:
        request = self.units.request(self.dataset.name)
        self.units.answered(request, self.leases.answer(self.name, request))

    def train(self, now: float) -> int | None:
        """A step: which place it has trained."""
        holding = self.units.holdings[self.dataset.name]
        if not holding.queue:
            self.hear()
        drawn = self.units.draw(self.dataset.name)
        if drawn is None:
            return None
        self.units.deliver(self.dataset.name, unit_size(self.dataset, drawn[0]))
        self.unsent |= Ranges(self.units.stepped(now))
        return drawn[0]

    def counted(self, fragments: int) -> None:
        """What it has brought is in a round."""
        self.agreed, self.unsent = self.agreed | self.unsent, NONE
        progress = [Progress(0, Work(units=tuple(self.agreed)), 0) for _ in range(fragments)]
        self.units.exchanged(WorkerState(Work(), Cycle(0, STEPS), progress))
        self.hear()


class LeasingBelow(MemberBelow):
    """(`SimDataBelow`, too.) What its leader sees of the table lasts as long as that leader."""

    heard_type: type[HeardLeases] = HeardLeases

    def __init__(self, group: SimGroup, member: SimMember) -> None:
        super().__init__(group, member)
        assert isinstance(group, LeasingGroup)
        self.leases = self.heard_type(group.training[member.name].leases)
        group.heard[member.name] = self.leases

    def versions(self) -> dict[int, int]:
        return dict.fromkeys(range(self._group.fragments), self.version())

    @property
    def data(self) -> LeasingBelow:
        return self

    def members_here(self) -> Collection[str]:
        return [member.name for member in self._group.members if member.is_up]

    def note_leases(self) -> None:
        """All hear of it when they decide next."""


class LeasingGroup(SimGroup):
    """`heard`: what each member that leads, or has led, knows of the layer above. `repeated`: as all decisions
    have counted, also those that nobody holds any more."""

    dataset: Dataset
    leases_type: type[SharedSubLeases] = SharedSubLeases
    below_type = LeasingBelow

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.heard: dict[str, HeardLeases] = {}
        self.training: dict[str, TrainingMember] = {}
        self.repeated = 0
        super().__init__(*arguments, **options)
        for member in self.members:
            self._began_again(member)

    @property
    def newest(self) -> TrainingMember | None:
        """What those that hold most have decided."""
        found = max((member for member in self.members if member.is_up), key=lambda one: one.version, default=None)
        return None if found is None else self.training[found.name]

    def _began_again(self, member: SimMember) -> None:
        leases = self.leases_type([self.dataset])
        instance = f"{member.name}#{member.instance}"
        self.training[member.name] = TrainingMember(member.name, instance, self.dataset, leases)
        self.heard.pop(member.name, None)

    def _begin_anew(self, awake: list[SimMember]) -> None:
        super()._begin_anew(awake)
        self.history.faults["table_lost"] += self._has_begun
        for member in awake:
            self._began_again(member)

    def _healed(self, member: SimMember, newest: SimMember) -> None:
        mine, theirs = self.training[member.name], self.training[newest.name]
        mine.leases.go_on_from(json.loads(json.dumps(theirs.leases.kept)))
        if member.name in self.heard:
            self.heard[member.name].decided(mine.leases, self.agenda.now)

    def _took_step(self, member: SimMember) -> None:
        place = self.training[member.name].train(self.agenda.now)
        if place is not None:
            samples = range(unit_size(self.dataset, place))
            self.history.trained[member.unsent[-1]] = [(place, sample) for sample in samples]

    @property
    def _news(self) -> tuple[LeaseNews, ...]:
        """The leader's."""
        lead = self._lead
        leads = lead is not None and lead.leader is not None and not lead.leader.machine.failure
        return self.heard[lead.name].news if leads and lead is not None else ()

    def _closed(self, awake: list[SimMember], brings: list[SimMember]) -> None:
        there = {member.name: self.training[member.name] for member in awake}
        for one in there.values():
            one.hear()
        instances = {name: one.instance for name, one in there.items()}
        said = {name: (one.units.statement(self.dataset.name, STEPS, one.leases.turn),) for name, one in there.items()}
        brought = {one.name: there[one.name].units.describe(tuple(there[one.name].unsent)) for one in brings}
        news = self._news
        before = max(one.leases.tables[self.dataset.name].repeated for one in there.values())
        self.history.faults["news"] += len(news)
        for name, one in there.items():
            for fragment in range(self.fragments):
                round_ = fragment, len(self.is_round) - 1
                one.leases.decide(instances, said, brought, round_, self.fragments, news=news)
            one.units.was_decided(said[name])
        if len({one.leases.digest for one in there.values()}) > 1:
            self.history.violated("members that decided the same hold different tables")
        after = max(one.leases.tables[self.dataset.name].repeated for one in there.values())
        self.repeated += after - before
        for one in there.values():
            one.counted(self.fragments)
        for member in awake:
            if member.name in self.heard:
                self.heard[member.name].decided(there[member.name].leases, self.agenda.now)
