"""What happened, and whether it was allowed to.

Local steps have names (worker id, running number). A contribution is a set of steps, a round applies the steps of its
contributions, and so "exactly once" can be read off: no step may be applied twice to a fragment, and none may vanish
unless its process was killed or its worker said that it discarded it. The same holds across restarts of the server:
what it comes back with must contain every agreement that any worker ever held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ..types import ContributionKey, Participant

StepName = tuple[str, int]
Sample = tuple[int, int]  # a place of the data, and which of its samples
Contents = list[tuple[ContributionKey, list[StepName]]]


@dataclass(frozen=True)
class RoundMade:
    """A version of a fragment, with everything that went into it."""

    anchor_hash: str
    contents: Contents


@dataclass(kw_only=True)
class Told:
    """What happened, in words if anybody wants to know, and which promises were broken."""

    faults: Counter[str] = field(default_factory=Counter)  # which kinds fired
    violations: list[str] = field(default_factory=list)
    log: list[str] | None = None
    clock: Callable[[], float] = lambda: 0.0
    virtual_s: float = 0.0

    def say(self, what: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.clock():9.2f}  {what}")

    def violated(self, rule: str) -> None:
        self.violations.append(rule)
        self.say(f"VIOLATION: {rule}")


@dataclass
class History(Told):
    may_go_back: bool = False  # the run does not keep every round: a restarted server may have older versions
    rounds: dict[int, list[RoundMade]] = field(default_factory=dict)  # of each fragment, version 1 first
    applied: dict[tuple[int, StepName], ContributionKey] = field(default_factory=dict)  # (fragment, step) -> by which
    gone: set[tuple[int, StepName]] = field(default_factory=set)  # went with versions that a restarted server gave up
    moves: Counter[str] = field(default_factory=Counter)  # how often a worker's life went from one state to another
    sent: Counter[tuple[object, ...]] = field(default_factory=Counter)  # how often each part was sent, arrived or not
    requests: list[float] = field(default_factory=list)  # when the server was asked something
    trained: dict[StepName, list[Sample]] = field(default_factory=dict)  # which samples of the data a step has trained
    _held: dict[tuple[int, int], str] = field(default_factory=dict)  # (fragment, version) -> the hash any holder saw
    _beliefs: list[tuple[ContributionKey, list[StepName], bool]] = field(default_factory=list)

    @property
    def round_count(self) -> int:
        return sum(map(len, self.rounds.values()))

    # --- the server -----------------------------------------------------------------------------------------------

    def round_closed(
        self,
        fragment: int,
        version: int,
        anchor_hash: str,
        participants: tuple[Participant, ...],
        contents: Contents,
        floor: int,
    ) -> None:
        made = self.rounds.setdefault(fragment, [])
        if version != len(made) + 1:
            self.violated(f"rounds are not monotone: fragment {fragment} made version {version} after {len(made)}")
        made.append(RoundMade(anchor_hash, contents))
        if len({p.worker_id for p in participants}) < floor:
            self.violated(f"fragment {fragment} version {version} closed with {len(participants)} contributions")
        for worker_id in {p.worker_id for p in participants}:
            voices = [p.staleness for p in participants if p.worker_id == worker_id]
            if len(voices) > 2 or len(set(voices)) < len(voices):
                self.violated(f"{worker_id} has {len(voices)} voices in version {version} of fragment {fragment}")
        for key, steps in contents:
            for step in steps:
                if (fragment, step) in self.applied:
                    self.violated(f"step {step} was applied twice to fragment {fragment}")
                self.applied[fragment, step] = key
        if self.log is not None:
            self.say(f"fragment {fragment} version {version}: " + ", ".join(f"{key}" for key, _ in contents))

    def server_restarted(self, versions: Sequence[tuple[int, str]]) -> None:
        """With these versions and their hashes, by fragment. Rounds that it had not told anybody about may be gone."""
        for fragment, (version, anchor_hash) in enumerate(versions):
            made = self.rounds.setdefault(fragment, [])
            if version and (version > len(made) or made[version - 1].anchor_hash != anchor_hash):
                self.violated(f"the server came back with another version {version} of fragment {fragment}")
            for later in range(version + 1, len(made) + 1):
                self._give_up(fragment, later, made[later - 1])
            del made[version:]
        self.say(f"the server is back with versions {[version for version, _ in versions]}")

    def _give_up(self, fragment: int, version: int, made: RoundMade) -> None:
        held = self._held.pop((fragment, version), None) is not None
        if not self.may_go_back:
            whose = "a worker holds it" if held else "it was published"
            self.violated(f"fragment {fragment} version {version} was lost, though {whose}")
        for _, steps in made.contents:
            for step in steps:
                self.applied.pop((fragment, step), None)
                self.gone.add((fragment, step))

    # --- the workers ----------------------------------------------------------------------------------------------

    def adopted(self, worker: str, fragment: int, version: int, anchor_hash: str, before: int) -> None:
        self.say(f"{worker} holds fragment {fragment} version {version}")
        if version < before and not self.may_go_back:
            self.violated(f"{worker} went back from version {before} to {version} of fragment {fragment}")
        seen = self._held.setdefault((fragment, version), anchor_hash)
        if seen != anchor_hash and not self.may_go_back:
            self.violated(f"two holders of fragment {fragment} version {version} hold different bits")

    def told(self, key: ContributionKey, steps: list[StepName], *, counted: bool) -> None:
        """A worker knows for good what became of its contribution."""
        self.say(f"{key} {'is counted' if counted else 'was missed'}")
        self._beliefs.append((key, steps, counted))

    def resumed(self, worker: str, sequences: Sequence[int], under_way: Collection[ContributionKey]) -> None:
        """A worker lives again from a saved state: by fragment, its last contribution then. It uses the numbers after
        these again, for the same steps among others, sends once more what was under way, and hears anew what becomes of
        them. What an earlier life heard of their being missed was true then."""

        def is_over(key: ContributionKey) -> bool:
            return key.worker_id == worker and (key in under_way or key.sequence > sequences[key.fragment])

        self._beliefs = [belief for belief in self._beliefs if belief[2] or not is_over(belief[0])]

    def check_beliefs(self) -> None:
        """What workers were told about their contributions, against what is in the model."""
        for key, steps, counted in self._beliefs:
            by = [self.applied.get((key.fragment, step)) for step in steps]
            gone = [(key.fragment, step) in self.gone for step in steps]
            if counted and not all(b == key or g for b, g in zip(by, gone, strict=True)):
                self.violated(f"{key} was reported as counted, but its steps were not applied")
            if not counted and key in by:
                self.violated(f"{key} was reported as missed, but its steps were applied")
