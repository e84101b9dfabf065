"""What happened in one layer of several: its model can also lose steps, by what is agreed above it.

A cluster whose steps were too old for the layer above goes on without them, like any worker. Then a version from above
takes them back. They are named, so that the end of a run can tell who gave them up, and whether that was allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..types import Participant
from .history import Contents, History, StepName

TAKEN_BACK = "taken-back"  # the run id of contents that are not added, but taken out
Model = frozenset[StepName]


@dataclass
class LayerHistory(History):
    """`place`: the layer's name, for the log. `models`: by fragment, what each version holds, the empty one first.
    `own`: what its own rounds brought."""

    place: str = ""
    models: dict[int, list[Model]] = field(default_factory=dict)
    taken_back: set[tuple[int, StepName]] = field(default_factory=set)
    own: set[tuple[int, StepName]] = field(default_factory=set)

    def say(self, what: str) -> None:
        super().say(f"{self.place}: {what}")

    def violated(self, rule: str) -> None:
        super().violated(f"{self.place}: {rule}")

    def model(self, fragment: int, version: int | None = None) -> Model:
        """None: the newest."""
        made = self.models.get(fragment) or [frozenset()]
        return made[-1 if version is None else version]

    def forget_own(self, fragment: int, version: int) -> None:
        """What is in this version need not be above: nobody could write down where it began."""
        self.own.difference_update((fragment, step) for step in self.model(fragment, version))

    def round_closed(
        self,
        fragment: int,
        version: int,
        anchor_hash: str,
        participants: tuple[Participant, ...],
        contents: Contents,
        floor: int,
    ) -> None:
        added = [(key, steps) for key, steps in contents if key.run_id != TAKEN_BACK]
        super().round_closed(fragment, version, anchor_hash, participants, added, floor)
        if participants:
            self.own.update((fragment, step) for _, steps in added for step in steps)
        model = set(self.model(fragment)).union(*(steps for _, steps in added))
        for _, steps in contents[len(added) :]:
            for step in steps:
                if self.applied.pop((fragment, step), None) is None:
                    self.violated(f"step {step} was taken back from fragment {fragment}, and was not there")
                self.taken_back.add((fragment, step))
                self.gone.add((fragment, step))
            model.difference_update(steps)
        self.models.setdefault(fragment, [frozenset()]).append(frozenset(model))

    def server_restarted(self, versions: Sequence[tuple[int, str]]) -> None:
        super().server_restarted(versions)
        for fragment, (version, _) in enumerate(versions):
            del self.models.setdefault(fragment, [frozenset()])[version + 1 :]
