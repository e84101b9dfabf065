"""A worker's own state, beside the model and the optimizer: how it is written, and how a restart goes on from it.

Each fragment has its own story. Let s be the last sequence and v the version that the state knows of, L and V what the
server knows when the worker is back, and "under way" a contribution that was sent, or begun, and not yet taken over.

    L > s                  The state is older than what was sent. The steps in it are in the model, or in the open round
                           together with later ones; so they are dropped, and so is what the codec owed. The agreement
                           that holds contribution L is waited for and taken over.
    under way, L = s       It has arrived. It is not sent again; its agreement is taken over when its time comes.
    under way, L < s       It has not, or the server has forgotten it with an open round. It is sent again, same key and
                           bytes. If its round closed meanwhile, it is refused as stale; its steps go into the next.
    nothing, V = v         The hash proves that the anchor is the server's. Nothing is fetched, nothing moves.
    nothing, V > v         Rounds closed without us. The local weights move along, keeping their unsent steps; if those
                           are older than max_staleness they are dropped.
    nothing, V < v         The server has lost rounds. What it has is what everybody goes on from: we move there too.

In no case does a step count twice. Without a round that closed meanwhile the worker goes on bit for bit as if it had
never stopped; it is for that, too, that a round which waited for it still does (`Join.continues`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..digest import data_hash
from ..errors import ConfigError, ModelError
from ..types import Count, Hash, Plain, Plan, Positive, TensorName
from .progress import Flight, Work

if TYPE_CHECKING:
    from ..topology.protocol import Topology
    from .books import Books
    from .replica import Replica

STATE_FORMAT = 2


class SavedContribution(Plain, frozen=True):
    """One that was sent. `awaited`: its agreement has not been taken over; the others were, and count in a round that
    had not closed yet (`counted_in`). `work`, `land_at`, `parked`, `sent`: as in `Flight`; `exchange` is the
    topology's."""

    awaited: bool
    counted_in: Count
    exchange: dict[str, Any]
    work: Work
    land_at: Count
    parked: bool
    sent: dict[TensorName, Any]


class SavedFragment(Plain, frozen=True):
    """As in `Progress`; and its contributions, the oldest first."""

    names: tuple[TensorName, ...]
    version: Count
    counted: Work
    oldest_base: Count
    contributions: tuple[SavedContribution, ...]

    @property
    def awaited(self) -> SavedContribution | None:
        return next((one for one in self.contributions if one.awaited), None)

    @property
    def late(self) -> SavedContribution | None:
        """The last that counts in a round after our version."""
        return next((one for one in reversed(self.contributions) if not one.awaited), None)


class SavedCycle(Plain, frozen=True):
    """Step `step` of a cycle of `sync_every`; `assigned`: this worker's own H (0 = the plan's)."""

    step: Count
    sync_every: Positive
    assigned: Count


class SavedState(Plain, frozen=True):
    """All of it. `local_hash`: of the weights that the model had."""

    format: Literal[2]
    worker_id: str
    work: Work
    cycle: SavedCycle
    fragments: tuple[SavedFragment, ...]
    anchors: dict[TensorName, Any]
    local_hash: Hash
    metrics: dict[str, int | float]
    topology: dict[str, Any]


# --- writing --------------------------------------------------------------------------------------------------------


def write(worker_id: str, books: Books, replica: Replica, topology: Topology) -> dict[str, Any]:
    """Plain tensors, numbers and text; the live tensors."""
    cycle = books.cycle
    return {
        "format": STATE_FORMAT,
        "worker_id": worker_id,
        "work": asdict(books.work),
        "cycle": {"step": cycle.step, "sync_every": cycle.sync_every, "assigned": cycle.assigned or 0},
        "fragments": [_write_fragment(i, books) for i in range(len(books.fragments))],
        "anchors": dict(replica.anchors),
        "local_hash": replica.local_hash(),
        "metrics": asdict(books.metrics),
        "topology": topology.state_dict(books.flights),
    }


def _write_fragment(index: int, books: Books) -> dict[str, Any]:
    progress, flight = books.fragments[index], books.flights.get(index)
    contributions = []
    if progress.late is not None:
        landed = Flight(progress.late, progress.counted, 0)
        contributions.append(_write_contribution(landed, counted_in=progress.late_in))
    if flight is not None:
        contributions.append(_write_contribution(flight, counted_in=None))
    return {
        "names": list(books.plan.fragments[index]),
        "version": progress.version,
        "counted": asdict(progress.counted),
        "oldest_base": progress.oldest_base,
        "contributions": contributions,
    }


def _write_contribution(flight: Flight, *, counted_in: int | None) -> dict[str, Any]:
    return {
        "awaited": counted_in is None,
        "counted_in": counted_in or 0,
        "exchange": flight.ticket.pack(),
        "work": asdict(flight.work),
        "land_at": flight.land_at,
        "parked": flight.parked,
        "sent": dict(flight.sent or {}),
    }


# --- reading --------------------------------------------------------------------------------------------------------


def read(state: Mapping[str, Any], replica: Replica) -> SavedState:
    """Refused by name if it is not one, or of another model."""
    if state.get("format") != STATE_FORMAT:
        raise ConfigError(f"a worker's state has format {STATE_FORMAT}, got {state.get('format')!r}")
    try:
        saved = msgspec.convert(state, SavedState)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this is not the state of a worker: {error}") from error
    _check_same_tensors(saved.anchors, replica)
    return saved


def _check_same_tensors(anchors: Mapping[str, Any], replica: Replica) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in replica.tensors.items()}
    held = {name: tuple(anchor.shape) for name, anchor in anchors.items()}
    odd = next((name for name in (*shapes, *held) if shapes.get(name) != held.get(name)), None)
    if odd is not None:
        raise ModelError(
            f"the state is of another model: {odd!r} is {_describe(held.get(odd))} in it, {_describe(shapes.get(odd))} "
            "here; load it into the model it was saved with"
        )


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def check_local(saved: SavedState, replica: Replica) -> None:
    """The state counts on the weights that the model had: what was learned is their distance from the anchor."""
    if replica.local_hash() != saved.local_hash:
        raise ModelError(
            "the model does not hold the weights that it had when this worker's state was saved; load model, optimizer "
            "and worker from the same checkpoint, all before the start (or none: then the worker joins anew)"
        )


def check_plan(saved: SavedState, plan: Plan) -> None:
    names = tuple(fragment.names for fragment in saved.fragments)
    if names != plan.fragments:
        raise ConfigError(
            f"the state has {len(names)} fragments that are not those of the run ({len(plan.fragments)}); "
            "start without load_state_dict"
        )


def signature(saved: SavedState | None) -> str:
    """What the processes of a group must have in common."""
    if saved is None:
        return "none"
    facts: Iterable[object] = (
        saved.work.steps,
        saved.cycle.step,
        saved.cycle.sync_every,
        *((f.version, f.counted.steps, f.oldest_base) for f in saved.fragments),
        *((one.awaited, one.land_at, one.counted_in) for f in saved.fragments for one in f.contributions),
    )
    return data_hash([msgspec.json.encode(list(facts))])
