"""How a restarted worker goes on from its saved state; saved.py says what becomes of each fragment."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ..topology.protocol import Topology
from ..types import Plan
from .books import Books
from .cycle import Cycle
from .progress import Flight, Metrics, Progress
from .saved import SavedFragment, SavedState, check_plan
from .watching import Watching


def books_of(saved: SavedState, plan: Plan) -> Books:
    """As they were, with nothing under way yet."""
    check_plan(saved, plan)
    cycle = saved.cycle
    known = {name: value for name, value in saved.metrics.items() if name in Metrics.__dataclass_fields__}
    return Books(
        plan=plan,
        cycle=Cycle(cycle.step, cycle.sync_every, cycle.assigned or None),
        work=saved.work,
        fragments=[Progress(f.version, f.counted, f.oldest_base) for f in saved.fragments],
        watching=Watching(saved.work.steps),
        metrics=replace(Metrics(), **known),  # type: ignore[arg-type]
    )


def go_on(
    saved: SavedState,
    books: Books,
    topology: Topology,
    overtaken: Collection[int],
    settle: Callable[[list[int]], None],
) -> None:
    """The anchors are loaded. `overtaken`: the fragments of which the server has later contributions than the state
    knows of; `settle` lands what is under way."""
    behind = {i for i, fragment in enumerate(saved.fragments) if fragment.awaited is None} | set(overtaken)
    for i, fragment in enumerate(saved.fragments):
        if i in behind:
            books.flights[i] = Flight(topology.catch_up(i), books.work, books.work.steps, catches_up=True)
        else:
            _go_on_with(i, fragment, books, topology)
    settle(sorted(behind))
    # (The server may have been restarted meanwhile, and forgotten what overtook us.)
    dropped = {i for i in overtaken if books.fragments[i].counted == books.work}
    for i in sorted(behind - dropped):
        _go_on_with(i, saved.fragments[i], books, topology)
    if dropped:
        books.begin_cycle()
        books.fall_in()


def _go_on_with(index: int, saved: SavedFragment, books: Books, topology: Topology) -> None:
    """Carry on with what was sent and is in no agreement that we hold, in the order in which it was."""
    flight, late, progress = saved.awaited, saved.late, books.fragments[index]
    if late is not None and late.counted_in > progress.version:
        progress.late, progress.late_in = topology.reopen(index, late.exchange, late=True), late.counted_in
    if flight is not None:
        ticket = topology.reopen(index, flight.exchange)
        if ticket is not None:
            books.flights[index] = Flight(ticket, flight.work, flight.land_at, flight.sent or None, flight.parked)
