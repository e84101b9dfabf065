"""Whose word counts for H, the codec and the number of fragments, and whether two models are the same.

The server's settings come first. What it left open is fixed by the first worker to join: by what that worker states,
else by the default. From then on a different wish is refused at join, showing both values and who said the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import ManifestMismatch, PlanMismatch
from ..types import Manifest, ParameterSpec, Wishes

DEFAULTS: Final = {"sync_every": 500, "codec": "bf16", "num_fragments": 1}
_FLAGS: Final = {"sync_every": "--sync-every", "codec": "--codec", "num_fragments": "--fragments"}


@dataclass(frozen=True)
class Settled:
    """The values in force, and who said so."""

    sync_every: int
    codec: str
    num_fragments: int
    said_by: dict[str, str]


def settle(server: Wishes, worker: Wishes, worker_id: str) -> Settled:
    """Fix the plan when the first worker joins."""
    values: dict[str, object] = {}
    said_by: dict[str, str] = {}
    for name, default in DEFAULTS.items():
        ours, theirs = getattr(server, name), getattr(worker, name)
        if ours is not None and theirs is not None and ours != theirs:
            raise _mismatch(name, ours, "the server", theirs)
        value, who = next(
            (v, w)
            for v, w in ((ours, "the server"), (theirs, f"worker {worker_id!r}"), (default, "the default"))
            if v is not None
        )
        values[name], said_by[name] = value, who
    return Settled(**values, said_by=said_by)  # type: ignore[arg-type]


def check_wishes(settled: Settled, wishes: Wishes) -> None:
    """Refuse a worker that wants something else than the run has."""
    for name in DEFAULTS:
        wanted, has = getattr(wishes, name), getattr(settled, name)
        if wanted is not None and wanted != has:
            raise _mismatch(name, has, settled.said_by[name], wanted)


def _mismatch(name: str, has: object, said_by: str, wanted: object) -> PlanMismatch:
    return PlanMismatch(
        f"this worker wants {name}={wanted}, but the run has {name}={has} (said by {said_by})",
        hint=f"leave {name} out to follow the run, or start the server with {_FLAGS[name]} {wanted}",
    )


def check_manifest(run: Manifest, offered: Manifest) -> None:
    """Refuse a model that differs from the run's, naming the first few differences."""
    differences = _differences(run, offered)
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise ManifestMismatch(
            f"this worker's model is not the run's: {shown}",
            hint="all workers must build the same model, in the same dtype as the first one that joined",
        )


def _differences(run: Manifest, offered: Manifest) -> list[str]:
    ours = {p.name: p for p in run.parameters}
    theirs = {p.name: p for p in offered.parameters}
    found = [f"{name!r} is missing" for name in ours if name not in theirs]
    found += [f"{name!r} is not in the run" for name in theirs if name not in ours]
    found += [line for name, spec in theirs.items() if name in ours for line in _spec_difference(ours[name], spec)]
    if not found and [p.name for p in run.parameters] != [p.name for p in offered.parameters]:
        found.append("the parameters are in another order")
    if not found and run.aliases != offered.aliases:
        found.append(f"other parameters are tied: got {offered.aliases}, run has {run.aliases}")
    # A manifest that the server made itself, for a client that brought none, knows neither.
    for what in ("buffers", "frozen") if run.buffers or run.frozen else ():
        odd = sorted(set(getattr(run, what)) ^ set(getattr(offered, what)))
        found += [f"{name!r} is among the {what} of only one of them" for name in odd]
    return found


def _spec_difference(run: ParameterSpec, offered: ParameterSpec) -> list[str]:
    if run.shape != offered.shape:
        return [f"{run.name!r}: got {list(offered.shape)}, run has {list(run.shape)}"]
    if run.dtype != offered.dtype:
        return [f"{run.name!r}: got {offered.dtype}, run has {run.dtype}"]
    return []
