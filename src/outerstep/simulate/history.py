"""What happened, and whether it was allowed to.

Local steps have names (worker id, running number). A contribution is a set of steps, a round applies the steps of its
contributions, and so "exactly once" can be read off: no step may be applied twice to a fragment, and none may vanish
unless its process was killed or its worker said that it discarded it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..types import ContributionKey, Participant

StepName = tuple[str, int]


@dataclass
class History:
    applied: dict[tuple[int, StepName], ContributionKey] = field(default_factory=dict)  # (fragment, step) -> by which
    rounds: dict[int, list[int]] = field(default_factory=dict)  # fragment -> versions in order of publication
    hashes: dict[tuple[int, int], str] = field(default_factory=dict)  # (fragment, version) -> what any holder saw
    faults: Counter[str] = field(default_factory=Counter)  # which kinds fired
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    _beliefs: list[tuple[ContributionKey, list[StepName], bool]] = field(default_factory=list)

    def violated(self, rule: str) -> None:
        self.violations.append(rule)

    def round_closed(
        self,
        fragment: int,
        version: int,
        participants: tuple[Participant, ...],
        contents: list[tuple[ContributionKey, list[StepName]]],
        floor: int,
    ) -> None:
        versions = self.rounds.setdefault(fragment, [])
        if version != len(versions) + 1:
            self.violated(f"rounds are not monotone: fragment {fragment} made version {version} after {versions[-3:]}")
        versions.append(version)
        if len({p.worker_id for p in participants}) < floor:
            self.violated(f"fragment {fragment} version {version} closed with {len(participants)} contributions")
        for key, steps in contents:
            for step in steps:
                if (fragment, step) in self.applied:
                    self.violated(f"step {step} was applied twice to fragment {fragment}")
                self.applied[fragment, step] = key

    def adopted(self, worker: str, fragment: int, version: int, anchor_hash: str, held: int) -> None:
        if version < held:
            self.violated(f"{worker} went back from version {held} to {version} of fragment {fragment}")
        if self.hashes.setdefault((fragment, version), anchor_hash) != anchor_hash:
            self.violated(f"two holders of fragment {fragment} version {version} hold different bits")

    def told(self, key: ContributionKey, steps: list[StepName], *, counted: bool) -> None:
        self._beliefs.append((key, steps, counted))

    def check_beliefs(self, pending: set[tuple[int, StepName]]) -> None:
        """What workers were told about their contributions, against what the server applied or has in an open round."""
        for key, steps, counted in self._beliefs:
            by = [self.applied.get((key.fragment, step)) for step in steps]
            known = [b == key or (key.fragment, step) in pending for b, step in zip(by, steps, strict=True)]
            if counted and not all(known):
                self.violated(f"{key} was reported as counted, but its steps were not applied")
            if not counted and key in by:
                self.violated(f"{key} was reported as missed, but its steps were applied")
