"""Whose word counts for H, the codec, the fragments and their delay, and whether two models are the same.

The server's settings come first. What it left open is fixed by the first worker to join: by what that worker states,
else by the default. From then on a different wish is refused at join, showing both values and who said the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ...defaults import SYNC_EVERY
from ...errors import ManifestMismatch, PlanMismatch
from ...types import MOST_ASSIGNED, Assignment, Manifest, ParameterSpec, Plan, Wishes

T = TypeVar("T")

DEFAULTS: Final = {"sync_every": SYNC_EVERY, "codec": "bf16", "down_codec": "same", "num_fragments": 1, "tokenizer": ""}
NAMES: Final = (*DEFAULTS, "delay", "alpha", "carry")
USUAL_DELAY = 5  # steps: published results lose less than 0.2 % up to here
MOST_WISHED_STEPS = 10_000  # of a worker: with more, no round would close in a day
CARRY_BEYOND = 0.1  # of H: with a longer delay the steps taken meanwhile are worth keeping
_FIXED: Final = {
    "down_codec": "agreements that workers still hold lead on from each other in it",
    "num_fragments": "versions, ledger and optimizer are kept by fragment",
    "tokenizer": "what the workers have trained on depends on it",
}
_FLAGS: Final = {
    "sync_every": "--sync-every",
    "codec": "--codec",
    "down_codec": "--down-codec",
    "num_fragments": "--fragments",
    "delay": "--fragment-delay",
    "alpha": "--fragment-alpha",
    "carry": "--fragment-carry",
    "tokenizer": "--tokenizer",
}


@dataclass(frozen=True)
class Settled:
    """The values in force, and who said so. `down_codec` "same": the one that goes with `codec`; `tokenizer` "": none
    is named."""

    sync_every: int
    codec: str
    down_codec: str
    num_fragments: int
    delay: int
    alpha: float
    carry: bool
    said_by: dict[str, str]
    tokenizer: str = ""  # runs from before it could be named have none


def settle(server: Wishes, worker: Wishes, worker_id: str, *, base_sync_every: int | None = None) -> Settled:
    """Fix the plan when the first worker joins. `base_sync_every`: H of the fastest worker under dynamic local updates,
    which everybody begins with if nobody says otherwise."""
    values: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    _check_bounds(server, worker)
    for name in NAMES:
        ours, theirs = getattr(server, name), getattr(worker, name)
        if ours is not None and theirs is not None and ours != theirs:
            raise _mismatch(name, ours, "the server", theirs)
        value, who = next(
            (v, w)
            for v, w in (
                (ours, "the server"),
                (theirs, f"worker {worker_id!r}"),
                (base_sync_every if name == "sync_every" else None, "dynamic local updates"),
                (_default(name, values), "the default"),
            )
            if v is not None
        )
        values[name], said_by[name] = value, who
    settled = Settled(**values, said_by=said_by)
    _check_streaming(settled.sync_every, settled.delay, settled.alpha, settled.carry)
    return settled


def settle_again(
    before: Settled,
    server: Wishes,
    worker: Wishes,
    worker_id: str,
    *,
    base_sync_every: int | None = None,
    fixed: Collection[str] = (),
) -> Settled:
    """The first worker that brings a manifest comes after clients that brought none, and may not have cared: what none
    of them said is this worker's to say. `fixed`: what cannot change any more, whoever said it."""
    said = [name for name in NAMES if name in fixed or before.said_by.get(name, "").startswith("worker ")]
    for name in said:
        wanted, has = getattr(worker, name), getattr(before, name)
        if wanted not in (None, has):
            raise _mismatch(name, has, before.said_by.get(name, "the default"), wanted)
    kept = {name: getattr(before, name) for name in said}
    made = settle(
        replace(server, **dict.fromkeys(said)), replace(worker, **kept), worker_id, base_sync_every=base_sync_every
    )
    said_by = {name: before.said_by.get(name, "the default") for name in said}
    return dataclasses.replace(made, said_by={**made.said_by, **said_by})


def _check_bounds(server: Wishes, worker: Wishes) -> None:
    """What the server left open is the first worker's to say, but nobody's to stop the run with."""
    steps, alpha = worker.sync_every, worker.alpha
    if server.sync_every is None and steps is not None and steps > MOST_WISHED_STEPS:
        raise PlanMismatch(
            f"a worker's sync_every must be at most {MOST_WISHED_STEPS}, got {steps}",
            hint=f"if that is meant, start the server with --sync-every {steps}",
        )
    if server.alpha is None and alpha is not None and alpha >= 1.0:
        raise PlanMismatch(
            f"a worker's fragment_alpha must be below 1, got {alpha:g}: at 1 nobody adopts what was agreed",
            hint=f"if that is meant, start the server with --fragment-alpha {alpha:g}",
        )


def _default(name: str, settled: dict[str, Any]) -> object:
    """A fragmented model is exchanged in the background; a whole one at once. The order of NAMES matters."""
    match name:
        case "delay":
            between = settled["sync_every"] // settled["num_fragments"]
            return 0 if settled["num_fragments"] == 1 else min(USUAL_DELAY, max(between - 1, 0))
        case "alpha":
            return 0.0
        case "carry":
            return settled["alpha"] == 0.0 and settled["delay"] > CARRY_BEYOND * settled["sync_every"]
        case _:
            return DEFAULTS[name]


def _check_streaming(sync_every: int, delay: int, alpha: float, carry: bool) -> None:
    if delay >= sync_every:
        raise PlanMismatch(
            f"fragment_delay must be below sync_every: a fragment is adopted before it is sent again; "
            f"got {delay} of {sync_every}"
        )
    if carry and alpha > 0.0:
        raise PlanMismatch(f"fragment_carry and fragment_alpha={alpha:g} exclude each other")


def changed(plan: Plan, changes: Wishes, assignments: Sequence[Assignment] | None = None) -> Plan:
    """The next revision of the plan. `assignments`: what each member does; None = as before, unless a number that they
    replace changes: then it holds for everybody. Its fragments stay, and so does what the workers' data are made of.
    `codec` is a recipe's canonical name: what it means, tensors know (server/run.py)."""
    for name, why in _FIXED.items():
        if getattr(changes, name) is not None:
            raise PlanMismatch(
                f"{name} cannot change during a run: {why}", hint="start another run from the saved model"
            )
    made = replace(
        plan,
        sync_every=_first(changes.sync_every, plan.sync_every),
        codec=_first(changes.codec, plan.codec),
        delay=_first(changes.delay, plan.delay),
        alpha=_first(changes.alpha, plan.alpha),
        carry=_first(changes.carry, plan.carry),
        revision=plan.revision + 1,
        assignments=_assigned(plan, changes, assignments),
    )
    if made.sync_every < len(made.fragments):
        raise PlanMismatch(f"sync_every ({made.sync_every}) must be at least {len(made.fragments)}: one per fragment")
    _check_streaming(made.sync_every, made.delay, made.alpha, made.carry)
    return made


def _assigned(
    plan: Plan, changes: Wishes, assignments: Sequence[Assignment] | None
) -> tuple[Assignment, ...] | UnsetType:
    if assignments is None:
        return plan.assignments if changes.sync_every is None and changes.delay is None else UNSET
    return tuple(assignments) if len(assignments) <= MOST_ASSIGNED else UNSET


def _first(wanted: T | None, has: T) -> T:
    return has if wanted is None else wanted


def check_wishes(settled: Settled, plan: Plan, wishes: Wishes) -> None:
    """Refuse a worker that wants something else than the run has now, or had when it was settled: a worker that comes
    back after a change of plan still asks for what it was started with."""
    for name in NAMES:
        wanted = getattr(wishes, name)
        now = len(plan.fragments) if name == "num_fragments" else getattr(plan, name)
        if wanted is not None and wanted not in (now, getattr(settled, name)):
            raise _mismatch(name, now, settled.said_by.get(name, "the default"), wanted)


def _mismatch(name: str, has: object, said_by: str, wanted: object) -> PlanMismatch:
    return PlanMismatch(
        f"this worker wants {name}={wanted}, but the run has {name}={'none' if has == '' else has} (said by {said_by})",
        hint=f"leave {name} out to follow the run, or start the server with {_FLAGS[name]} {wanted}",
    )


_SETTING: Final = " (the workers' `buffers` setting)"


def check_manifest(run: Manifest, offered: Manifest, *, by_name: bool = False) -> None:
    """Refuse a model that differs from the run's, naming the first few differences. `by_name`: the order is the run's,
    whatever the worker's is; the plan's fragments say it. (Where everybody cuts the fragments, all need the same.)"""
    differences = _differences(run, offered)
    if not differences and not by_name and [p.name for p in run.parameters] != [p.name for p in offered.parameters]:
        differences.append("the parameters are in another order")
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise ManifestMismatch(
            f"this worker's model is not the run's: {shown}",
            hint="all workers must build the same model, in the same dtype as the first one that joined",
        )


def _differences(run: Manifest, offered: Manifest) -> list[str]:
    ours = {p.name: p for p in run.parameters}
    theirs = {p.name: p for p in offered.parameters}
    found = [
        f"{name!r} is {'kept local' + _SETTING if name in offered.buffers else 'missing'}"
        for name in ours
        if name not in theirs
    ]
    found += [
        f"{name!r} is {'exchanged, and local in the run' + _SETTING if name in run.buffers else 'not in the run'}"
        for name in theirs
        if name not in ours
    ]
    found += [line for name, spec in theirs.items() if name in ours for line in _spec_difference(ours[name], spec)]
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
    if run.role != offered.role:
        return [f"{run.name!r}: got the role {offered.role!r}, run has {run.role!r}{_SETTING}"]
    return []
