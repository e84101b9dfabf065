"""Simulated members that hold the lease table together: they come, die, come back, miss meetings, and train meanwhile.

A step is one unit. At a meeting those who are there tell what they have, the round of the fragment whose turn it is
closes, and all decide. A meeting may fail for a member that decided nothing of it (torchft votes so, and a peer may
miss a block): at the next one it heals from another, as a newcomer does. A history is which unit of whom is in which
fragment's agreements, so what the tables say can be compared with what is in the model.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ..coordination.shared_leases import SharedLeases
from ..coordination.worker.machine import Cycle, Progress, Units, Work, WorkerState
from ..coordination.worker.units import LeasedWork, LeaseRequest
from ..ranges import Ranges
from ..types import Dataset, LeaseAnswer, LeaseStatement, Trained

MOST_MEMBERS = 6
MEETINGS = 60
SETTLED_AFTER = 40  # without faults
SYNC_EVERY = 8


@dataclass(frozen=True)
class SharedScenario:
    dataset: Dataset
    fragments: int
    members: int
    faults: float  # of each kind, the chance at a meeting
    trains_on: int  # steps while a meeting is under way

    @classmethod
    def drawn(cls, seed: int) -> SharedScenario:
        rng = random.Random(f"shared data {seed}")
        dataset = Dataset(
            name="train",
            samples=rng.choice([30, 150, 400]),
            unit_samples=1,
            epochs=rng.choice([1, 1, 2, 5]),
            again=rng.random() < 0.7,
        )
        return cls(
            dataset, rng.choice([1, 1, 2, 3]), rng.randint(1, 4), rng.choice([0.0, 0.05, 0.15]), rng.randint(0, 3)
        )


class SharedMember:
    """One start of one member. `speed`: steps from one meeting to the next, about."""

    leases_type: type[SharedLeases] = SharedLeases

    def __init__(self, scenario: SharedScenario, name: str, instance: str, speed: int) -> None:
        self.name, self.instance, self.speed = name, instance, speed
        self.units = LeasedWork([scenario.dataset])
        self.units.holdings["train"].step_samples = 1
        self.leases = self.leases_type([scenario.dataset])
        self.unsent = [Ranges() for _ in range(scenario.fragments)]
        self.agreed = [Ranges() for _ in range(scenario.fragments)]
        self.counts = [0] * scenario.fragments  # contributions in agreements, as far as it knows
        self.unheard: list[tuple[int, Units]] = []  # of decisions that it missed
        self.behind = self.began = True  # it must heal before it decides anything
        self.is_through = False

    def train(self, steps: int, now: float) -> None:
        for _ in range(steps):
            if not self.units.holdings["train"].queue:
                self.hear()
            drawn = self.units.draw("train")
            self.is_through = drawn is None
            if drawn is None:
                return
            self.units.deliver("train", 1)
            finished = Ranges(self.units.stepped(now))
            self.unsent = [unsent | finished for unsent in self.unsent]

    def hear(self) -> None:
        request = self.units.request("train")
        self.units.answered(request, self.answer(request))

    def answer(self, request: LeaseRequest) -> LeaseAnswer:
        return self.leases.answer(self.name, request)

    def say(self) -> tuple[LeaseStatement, ...]:
        self.hear()
        return (self.units.statement("train", SYNC_EVERY, self.leases.turn),)

    def brings(self, fragment: int) -> Units:
        return tuple(self.unsent[fragment])

    def heal(self, kept: Mapping[str, Any]) -> None:
        self.leases.go_on_from(json.loads(json.dumps(kept)))
        unheard, self.unheard = self.unheard, []
        for fragment, units in unheard:
            self.counted(fragment, units)

    def counted(self, fragment: int, units: Units) -> None:
        self.counts[fragment] += 1
        self.agreed[fragment] |= Ranges(units)
        self.unsent[fragment] -= Ranges(units)
        progress = [Progress(0, Work(units=tuple(agreed)), 0) for agreed in self.agreed]
        self.units.exchanged(WorkerState(Work(), Cycle(0, SYNC_EVERY), progress))
        self.hear()

    def saved(self) -> dict[str, Any]:
        kept = {"units": self.units.state(), "unsent": self.unsent, "agreed": self.agreed, "counts": self.counts}
        return deepcopy(kept)

    def load(self, saved: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        """`counts`: of its contributions, in agreements. What was unsent then is in a later one that counted."""
        kept = deepcopy(dict(saved))
        self.units.load_state(kept["units"])
        self.unsent, self.agreed, self.counts = kept["unsent"], kept["agreed"], kept["counts"]
        for fragment, count in counts.items():
            if count > self.counts[fragment]:
                self.agreed[fragment] |= self.unsent[fragment]
                self.unsent[fragment], self.counts[fragment] = Ranges(), count


@dataclass
class SharedHistory:
    """`model`: by fragment, how often each place is in it."""

    model: list[Counter[int]]
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


class SharedWorld:
    """`play` goes through faulty meetings, then through quiet ones until nobody has anything to train."""

    def __init__(
        self,
        scenario: SharedScenario,
        seed: int,
        member_type: Callable[[SharedScenario, str, str, int], SharedMember] = SharedMember,
    ) -> None:
        self._scenario, self._type, self._rng = scenario, member_type, random.Random(f"shared world {seed}")
        self.history = SharedHistory([Counter() for _ in range(scenario.fragments)])
        self._kept: dict[str, Any] | None = None  # of those who are not behind
        self._saved: dict[str, dict[str, Any]] = {}
        self._counts: dict[str, dict[int, int]] = {}  # by member and fragment, contributions in agreements
        self._started, self._version, self._now = 0, [0] * scenario.fragments, 0.0
        self.members = {name: self._start(name) for name in (f"m{i}" for i in range(scenario.members))}

    def play(self) -> SharedHistory:
        self._meet(faults=0.0)
        for _ in range(MEETINGS):
            self._shake(self._scenario.faults)
            self._meet(self._scenario.faults)
        quiet = 0
        while quiet < SETTLED_AFTER and not self.is_over:
            self._meet(faults=0.0)
            quiet += all(member.is_through for member in self.members.values())
        self._check()
        return self.history

    @property
    def is_over(self) -> bool:
        table = next(iter(self.members.values())).leases.tables["train"]
        return table.done.total + table.lost.total >= table.end

    # --- what happens ---------------------------------------------------------------------------------------------

    def _start(self, name: str) -> SharedMember:
        self._started += 1
        return self._type(self._scenario, name, f"{name}/{self._started}", self._rng.choice([2, 4, 8]))

    def _shake(self, chance: float) -> None:
        for name in sorted(self.members):
            if self._rng.random() < chance and sum(not one.behind for one in self.members.values()) > 1:
                before = self.members.pop(name)
                self.history.faults["died"] += 1
                how = self._rng.choice(["gone", "new", "resumed"])
                if how != "gone":
                    self.members[name] = again = self._start(name)
                    again.speed = before.speed
                    if how == "resumed" and name in self._saved:
                        again.load(self._saved[name], self._counts.get(name, {}))
                    else:  # it writes over what it finds
                        self._saved.pop(name, None)
                        self._counts.pop(name, None)
                    self.history.faults[how] += 1
            elif self._rng.random() < 0.3 and not self.members[name].unheard:
                self._saved[name] = self.members[name].saved()
        if self._rng.random() < chance and len(self.members) < MOST_MEMBERS:
            name = f"m{self._started}"
            self.members[name] = self._start(name)
            self.history.faults["came"] += 1

    def _meet(self, faults: float) -> None:
        """One round: everybody trains up to it, some do not come, for some the decision is lost."""
        self._now += 1.0
        for member in self.members.values():
            member.train(self._rng.randint(1, member.speed) if not member.behind else 0, self._now)
        there = {n: m for n, m in sorted(self.members.items()) if self._rng.random() >= faults}
        if not any(not member.behind for member in there.values()) and self._kept is not None:
            return
        for member in there.values():
            if member.behind and self._kept is not None:
                member.heal(self._kept)
                self.history.faults["healed"] += 1
        turn = self._version.index(min(self._version))
        said = {name: member.say() for name, member in there.items()}
        units = {name: member.brings(turn) for name, member in there.items() if not member.began}
        brought = {name: member.units.describe(units[name]) for name, member in there.items() if name in units}
        for member in there.values():
            member.train(self._rng.randint(0, self._scenario.trains_on), self._now)
        lost = {name for name in there if self._rng.random() < faults / 2}
        lost = lost if len(lost) < len([m for m in there.values() if not m.began]) or not lost else set()
        self._version[turn] += 1
        for name, member in there.items():
            member.behind = name in lost
            if name not in lost:
                self._decide(member, there, said, brought, turn)
        digests = {member.leases.digest for name, member in there.items() if name not in lost}
        if len(digests) > 1:
            self.history.violations.append("members that decided the same hold different tables")
        self._kept = next(member.leases.kept for name, member in there.items() if name not in lost)
        for member in self.members.values():
            member.behind = member.behind or member.name not in there
        for name, trained in brought.items():
            for one in trained:
                for place in Ranges(one.places).numbers():
                    self.history.model[turn][place] += 1
            counts = self._counts.setdefault(name, {})
            counts[turn] = there[name].counts[turn] + len(there[name].unheard) + 1
            if name in lost:
                there[name].unheard.append((turn, units[name]))
            else:
                there[name].counted(turn, units[name])
        for member in there.values():
            member.began = False

    def _decide(
        self,
        member: SharedMember,
        there: Mapping[str, SharedMember],
        said: Mapping[str, tuple[LeaseStatement, ...]],
        brought: Mapping[str, tuple[Trained, ...]],
        turn: int,
    ) -> None:
        instances = {name: one.instance for name, one in there.items()}
        member.leases.decide(instances, said, brought, (turn, self._version[turn]), self._scenario.fragments)
        member.units.was_decided(said[member.name])

    # --- what must be true ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        tables = [one.leases.tables["train"] for one in self.members.values() if not one.behind]
        table, violated = tables[0], self.history.violations.append
        found = self.history.model
        whole = {place: min(counts[place] for counts in found) for place in found[0]}
        again = sum(count - 1 for count in whole.values() if count > 1)
        for place in (table.done - table.spent).numbers():
            if not whole.get(place):
                violated(f"place {place} is said to be done, and is not in the model")
        if not self.is_over:
            missing = Ranges([(0, table.end)]) - table.done - table.lost
            violated(f"places {missing} are neither done nor lost: held {table.held}, free {table.free}")
        if again > table.repeated:
            violated(f"{again} places are in the model once more, and {table.repeated} are said to be")
        if not table.dataset.again and again:
            violated(f"{again} places were trained twice, and the run leases nothing again")
        self.history.faults["done"] += table.done.total
        self.history.faults["repeated"] += table.repeated
        self.history.faults["lost"] += table.lost.total
