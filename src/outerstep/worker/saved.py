"""A worker's own state, beside the model and the optimizer: how it is written, and how a restart resumes from it.

Each fragment has its own story. Let s be the last sequence and v the version that the state knows of, L and V what the
server knows when the worker is back, and "under way" a contribution that was sent and whose agreement was not adopted.

    L > s                  The state is older than what was sent. The steps in it are in the model, or in the open round
                           together with later ones; so they are dropped, and so is what the codec owed. The agreement
                           that holds contribution L is waited for and adopted.
    under way, L = s       It has arrived. It is not sent again; its agreement is adopted when its time comes.
    under way, L < s       It has not, or the server has forgotten it with an open round. It is sent again, same key and
                           bytes. If its round closed meanwhile, it is refused as stale; its steps go into the next.
    nothing, V = v         The hash proves that the anchor is the server's. Nothing is fetched, nothing moves.
    nothing, V > v         Rounds closed without us. The local weights are rebased, keeping their unsent steps; if those
                           are older than max_staleness they are dropped.
    nothing, V < v         The server has lost rounds. What it has is what everybody continues from: we rebase on that.

In no case does a step count twice. Without a round that closed meanwhile the worker continues bit for bit as if it had
never stopped; it is for that, too, that a round which waited for it still does (`Join.continues`). What to do in each
case is decided in coordination/worker/machine.py (`resumed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch import Tensor

from ..coordination.worker.exchange import is_forgotten
from ..coordination.worker.machine import Cycle, InFlight, Metrics, Progress, Units, Work, WorkerMachine, WorkerState
from ..digest import data_hash
from ..errors import ConfigError, ModelError
from ..types import Count, Hash, Plain, Plan, Positive, TensorName
from .recut import describe_places

if TYPE_CHECKING:
    from ..topology.protocol import Ticket, Topology
    from .replica import Replica

STATE_FORMAT = 2


class SavedContribution(Plain, frozen=True):
    """One that was sent. `awaited`: its agreement was not adopted; the others' were, and they count in a round that had
    not closed yet (`counted_in`). `work`, `land_at`, `overtaken`: as in `InFlight`, and `parked` is its `deferred`;
    `sent`: a copy of what was sent, if there is one; `exchange` is the topology's."""

    awaited: bool
    counted_in: Count
    exchange: dict[str, Any]
    work: Work
    land_at: Count
    parked: bool
    sent: dict[TensorName, Any]
    overtaken: bool = False


class SavedProgress(Plain, frozen=True):
    """As in `Progress`; and its contributions, the oldest first."""

    names: tuple[TensorName, ...]
    version: Count
    counted: Work
    oldest_base: Count
    contributions: tuple[SavedContribution, ...]
    late_units: Units = ()

    @property
    def awaited(self) -> SavedContribution | None:
        return next((one for one in self.contributions if one.awaited), None)

    @property
    def late(self) -> SavedContribution | None:
        """The last that counts in a round after our version."""
        return next((one for one in reversed(self.contributions) if not one.awaited), None)

    @property
    def progress(self) -> Progress:
        one, late = self.awaited, self.late
        flight = None
        if one is not None:
            flight = InFlight(one.work, one.land_at, bool(one.sent), deferred=one.parked, overtaken=one.overtaken)
        late_in = late.counted_in if late is not None else 0
        return Progress(self.version, self.counted, self.oldest_base, flight, late_in, self.late_units)

    def is_forgotten(self, last_sequence: int) -> bool:
        """Does the server, which has this sequence for its last, lack the contribution that was to count later?"""
        return self.late is not None and is_forgotten(int(self.late.exchange.get("sequence", 0)), last_sequence)


class SavedCycle(Plain, frozen=True):
    """Step `step` of a cycle of `sync_every`; `assigned`: this worker's own H (0 = the plan's)."""

    step: Count
    sync_every: Positive
    assigned: Count


class SavedWorker(Plain, frozen=True):
    """All of it. `local_hash`: of the weights that the model had; `changed`: somebody else had moved those, and nothing
    had been done about it. `dropped`, `lost`: as in `WorkerState`; `data`: what is leased (data/leased.py); `places`:
    which part of each tensor was here, for a start in another shape (recut.py)."""

    format: Literal[2]
    worker_id: str
    work: Work
    cycle: SavedCycle
    fragments: tuple[SavedProgress, ...]
    anchors: dict[TensorName, Any]
    local_hash: Hash
    metrics: dict[str, int | float]
    topology: dict[str, Any]
    changed: bool = False
    dropped: Units = ()
    lost: Units = ()
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    places: dict[str, Any] = msgspec.field(default_factory=dict)

    def forgotten(self, last_sequences: Sequence[int]) -> frozenset[int]:
        """The fragments whose late contribution the server has lost. `last_sequences`: by fragment, as it knows them;
        without a server there are none."""
        pairs = enumerate(zip(self.fragments, last_sequences, strict=False))
        return frozenset(i for i, (progress, last) in pairs if progress.is_forgotten(last))

    @property
    def state(self) -> WorkerState:
        """For the worker's machine."""
        cycle = Cycle(self.cycle.step, self.cycle.sync_every, self.cycle.assigned or None)
        known = {name: value for name, value in self.metrics.items() if name in Metrics.__dataclass_fields__}
        metrics = replace(Metrics(), **known)  # type: ignore[arg-type]
        return WorkerState(self.work, cycle, [f.progress for f in self.fragments], metrics, self.dropped, self.lost)


@dataclass(frozen=True)
class UnderWay:
    """By fragment: the exchange in flight, one that counts in a round to come, a copy of what was sent."""

    tickets: Mapping[int, Ticket]
    late: Mapping[int, Ticket]
    sent: Mapping[int, Mapping[str, Tensor]]


# --- writing --------------------------------------------------------------------------------------------------------


def write(
    worker_id: str, machine: WorkerMachine, replica: Replica, topology: Topology, under_way: UnderWay
) -> dict[str, Any]:
    """Plain tensors, numbers and text; the live tensors. Of several contributions that are sent together, those that
    have no ticket yet were not sent."""
    cycle = machine.state.cycle
    return {
        "format": STATE_FORMAT,
        "worker_id": worker_id,
        "work": asdict(machine.state.work),
        "cycle": {"step": cycle.step, "sync_every": cycle.sync_every, "assigned": cycle.assigned or 0},
        "fragments": [
            {
                "names": list(machine.plan.fragments[i]),
                "version": progress.version,
                "counted": asdict(progress.counted),
                "oldest_base": progress.oldest_base,
                "contributions": _write_contributions(i, progress, under_way),
                **({"late_units": [list(each) for each in progress.late_units]} if progress.late_units else {}),
            }
            for i, progress in enumerate(machine.state.fragments)
        ],
        "anchors": dict(replica.anchors),
        "local_hash": replica.local_hash(),
        "metrics": asdict(machine.state.metrics),
        **({"dropped": [list(each) for each in machine.state.dropped]} if machine.state.dropped else {}),
        **({"lost": [list(each) for each in machine.state.lost]} if machine.state.lost else {}),
        "topology": topology.state_dict(machine.in_flight.keys() & under_way.tickets.keys()),
        **describe_places(replica),
    }


def _write_contributions(index: int, progress: Progress, under_way: UnderWay) -> list[dict[str, Any]]:
    found = []
    if progress.late_in:
        adopted = InFlight(progress.counted, 0)
        found.append(_write_contribution(adopted, under_way.late[index], {}, counted_in=progress.late_in))
    if progress.in_flight is not None and index in under_way.tickets:
        sent = under_way.sent.get(index, {})
        found.append(_write_contribution(progress.in_flight, under_way.tickets[index], sent, counted_in=0))
    return found


def _write_contribution(
    flight: InFlight, ticket: Ticket, sent: Mapping[str, Tensor], *, counted_in: int
) -> dict[str, Any]:
    return {
        "awaited": counted_in == 0,
        "counted_in": counted_in,
        "exchange": ticket.pack(),
        "work": asdict(flight.work),
        "land_at": flight.land_at,
        "parked": flight.deferred,
        "sent": dict(sent),
        "overtaken": flight.overtaken,
    }


# --- reading --------------------------------------------------------------------------------------------------------


def read(state: Mapping[str, Any], replica: Replica) -> SavedWorker:
    """Refused by name if it is not one, or of another model."""
    if state.get("format") != STATE_FORMAT:
        raise ConfigError(f"a worker's state has format {STATE_FORMAT}, got {state.get('format')!r}")
    try:
        saved = msgspec.convert(state, SavedWorker)
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


def check_local(saved: SavedWorker, replica: Replica) -> None:
    """The state counts on the weights that the model had: what was learned is their distance from the anchor."""
    if replica.local_hash() != saved.local_hash:
        raise ModelError(
            "the model does not hold the weights that it had when this worker's state was saved; load model, optimizer "
            "and worker from the same checkpoint, all before the start (or none: then the worker joins as a new one)"
        )


def check_plan(saved: SavedWorker, plan: Plan) -> None:
    names = tuple(fragment.names for fragment in saved.fragments)
    if names != plan.fragments:
        raise ConfigError(
            f"the state has {len(names)} fragments that are not those of the run ({len(plan.fragments)}); "
            "start without load_state_dict"
        )


def signature(saved: SavedWorker | None) -> str:
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
