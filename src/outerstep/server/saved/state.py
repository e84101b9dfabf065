"""What a server needs to resume, as plain data, and how its pieces must fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...coordination.server.remembered import Acceptance as Acceptance
from ...coordination.server.remembered import WorkerRecord as WorkerRecord
from ...core.outer import State
from ...errors import ModelError
from ...types import Manifest, Plan


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What the outer optimizer remembers. `by_name`: per parameter, as `core.outer.State`: tensors, numbers, None.
    `facts`: the rest of it, as JSON (counts and buffer size of Delayed Nesterov, say)."""

    kind: str
    by_name: State = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def on_host(self) -> OptimizerState:
        """The same, wherever its tensors are."""
        by_name = {
            name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in entry.items()}
            for name, entry in self.by_name.items()
        }
        return OptimizerState(self.kind, by_name, self.facts)


@dataclass(frozen=True, eq=False)
class ServerState:
    """A server between two rounds.

    `params` are the trained tensors as the workers hold them, fp32, under the names that the manifest keeps; `targets`
    where the outer optimizer is, as far as that is not the same (server/publish.py); `statistics` the averaged buffers
    of earlier versions, for contributions that come late; `centre` the last round's aggregate, for a rule that begins
    each round where the last ended; `rest` is what else the model's state dict holds, as given.
    `versions` is per fragment. With `plan` and `manifest` None nobody had joined; then `versions` is empty, or one
    number that every fragment of the plan to come starts from. `totals` and `facts` are whatever the server wants back:
    numbers, and JSON.
    """

    run_id: str
    params: dict[str, Tensor]
    targets: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    centre: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)
    manifest: Manifest | None = None
    plan: Plan | None = None
    versions: tuple[int, ...] = ()
    optimizer: OptimizerState = field(default_factory=lambda: OptimizerState("none"))
    ledger: dict[str, WorkerRecord] = field(default_factory=dict)
    totals: dict[str, int | float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    place: Path | None = None  # the folder that it was read from

    @property
    def round(self) -> int:
        """Rounds that every fragment has completed."""
        return min(self.versions, default=0)

    def check(self) -> None:
        """Raise ModelError if its pieces do not belong together."""
        wrong = next(_contradictions(self), None)
        if wrong is not None:
            raise ModelError(wrong)


def _contradictions(state: ServerState) -> Iterator[str]:
    for name, tensor in state.params.items():
        if tensor.dtype != torch.float32:
            yield f"trained tensor {name!r} must be float32, got {tensor.dtype}"
    aliases = state.manifest.aliases if state.manifest else {}
    for name in state.rest:
        if name in state.params or name in aliases:
            yield f"tensor {name!r} is both trained and not"
    yield from _against_manifest(state)
    unknown = [name for name in state.optimizer.by_name if name not in state.params]
    if unknown:
        yield f"the optimizer's state names {unknown[:3]}, which are not trained"
    yield from _beside(state, "target", state.targets)
    yield from _beside(state, "last aggregate", state.centre)
    for values in state.statistics.values():
        yield from _beside(state, "earlier value", values)
    yield from _against_versions(state)


def _beside(state: ServerState, what: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name not in state.params:
            yield f"there is a {what} for {name!r}, which is not trained"
        elif tensor.dtype != torch.float32 or tensor.shape != state.params[name].shape:
            shape = list(state.params[name].shape)
            yield f"the {what} of {name!r} must be float32 {shape}, got {tensor.dtype} {list(tensor.shape)}"


def _against_manifest(state: ServerState) -> Iterator[str]:
    if (state.manifest is None) != (state.plan is None):
        yield "manifest and plan are fixed together: one of them is missing"
    if state.manifest is None or state.plan is None:
        return
    shapes = {spec.name: spec.shape for spec in state.manifest.parameters}
    if shapes.keys() != state.params.keys():
        different = sorted(shapes.keys() ^ state.params.keys())
        yield f"the manifest and the trained tensors have different names: {different[:3]}"
        return
    for name, tensor in state.params.items():
        if tuple(tensor.shape) != shapes[name]:
            yield f"{name!r}: got {list(tensor.shape)}, the manifest has {list(shapes[name])}"
    planned = [name for names in state.plan.fragments for name in names]
    if sorted(planned) != sorted(shapes):
        yield "the plan's fragments are not the manifest's parameters, each once"
    if len(state.versions) != len(state.plan.fragments):
        yield f"there are {len(state.plan.fragments)} fragments but {len(state.versions)} versions"


def _against_versions(state: ServerState) -> Iterator[str]:
    for worker_id, record in state.ledger.items():
        for fragment, entry in record.accepted.items():
            if fragment >= len(state.versions):
                yield f"the ledger of {worker_id!r} names fragment {fragment}; there are {len(state.versions)}"
            elif entry.version > state.versions[fragment]:
                yield (
                    f"the ledger of {worker_id!r} has a contribution to version {entry.version} of fragment {fragment}"
                    f", which is at {state.versions[fragment]}: it is not in the model (ledger_of leaves such out)"
                )
