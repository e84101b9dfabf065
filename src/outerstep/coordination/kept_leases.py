"""The form of a lease table that another member has told, or that lay in a state: what it must be before it is used.

A table is decided on by all members (shared_leases.py), and whatever it holds they reckon with. A value that cannot be
there (a pace without an end, a place that was never leased, or that two members hold) would stop every one of them at
its next decision. So a table is read here first: each value by its type, then all of them by what they mean together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import BadRequest
from ..ranges import NONE, Ranges
from ..types import MOST_DATASETS, Count, Dataset, Label, Plain, WorkerId
from .leases import NO_END, end_of
from .shares import LEAST_INTERVAL_S

LAST_TURN = 1 << 52  # decisions: what counts them still fits a message, however many follow

Amount = Annotated[float, Meta(ge=0.0, le=2.0**53)]
Pace = Annotated[float, Meta(ge=0.0, le=1e9)]
Turn = Annotated[int, Meta(ge=0, le=LAST_TURN)]
Stretch = Annotated[tuple[tuple[Count, Count], ...], Meta()]
FragmentIndex = Annotated[str, Meta(pattern=r"^[0-9]{1,9}\Z")]
ByWorker = dict[WorkerId, Stretch]


class KeptShare(Plain, frozen=True):
    """What one member has said and brought (shares.py)."""

    since: Amount
    at: Amount
    untrained: Count
    claimed: Pace
    proven: Amount
    brought: Count
    interval_s: Amount


class KeptSets(Plain, frozen=True):
    free: Stretch
    unclaimed: Stretch
    done: Stretch
    lost: Stretch
    spent: Stretch


class KeptAbove(Plain, frozen=True):
    """What a layer above has leased of it to the members (shared_sub_leases.py)."""

    granted: Stretch
    fresh: Stretch
    to_tell: tuple[tuple[Count, Count, Stretch], ...]
    parts: tuple[tuple[Count, Count, Stretch], ...]
    heard: Count
    is_over: bool
    trouble: Label


class KeptTable(Plain, frozen=True):
    """One dataset (`SharedTable.remembered`)."""

    dataset: Dataset
    owner: Label
    next: Count
    reserved: Count
    repeated: Count
    done_by: dict[WorkerId, Count]
    sets: KeptSets
    held: ByWorker
    lapsed: ByWorker
    dropped: ByWorker
    overtaken: ByWorker
    covered: dict[WorkerId, dict[FragmentIndex, Stretch]]
    counted: ByWorker
    recent: dict[WorkerId, tuple[tuple[Turn, Stretch], ...]]
    finished: ByWorker
    doubted: ByWorker
    shares: dict[WorkerId, KeptShare]
    above: KeptAbove | None = None


class KeptLeases(Plain, frozen=True):
    """All datasets (`SharedLeases.kept`)."""

    turn: Turn
    instances: dict[WorkerId, Label]
    tables: Annotated[tuple[KeptTable, ...], Meta(max_length=MOST_DATASETS)]


def read_kept(table: bytes) -> KeptLeases:
    """As a member writes it. Refused (BadRequest) if it is none."""
    try:
        kept = msgspec.json.decode(table, type=KeptLeases)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _refusal(str(error)) from error
    return _checked(kept)


def check_kept(kept: Mapping[str, Any]) -> KeptLeases:
    """The same, of plain values. Refused (BadRequest) if they are no table's."""
    try:
        return _checked(msgspec.convert(kept, KeptLeases))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(str(error)) from error


def _checked(kept: KeptLeases) -> KeptLeases:
    names = [table.dataset.name for table in kept.tables]
    wrong = "a dataset is there twice" if len(set(names)) < len(names) else ""
    for table in kept.tables:
        wrong = wrong or _wrong_with(table, kept.turn)
    if wrong:
        raise _refusal(wrong)
    return kept


def _refusal(why: str) -> BadRequest:
    return BadRequest(f"the run's lease table cannot be read: {why}")


def _wrong_with(table: KeptTable, turn: int) -> str:
    """Why these values cannot be together; "" = they can."""
    dataset, sets = table.dataset, table.sets
    if dataset.units * max(dataset.epochs, 1) > NO_END:
        return f"{dataset.name!r} has too many units"
    if not table.next == table.reserved <= end_of(dataset) or sets.unclaimed:
        return f"of {dataset.name!r} more is leased than there is, or than was decided"
    by_worker = (table.held, table.lapsed, table.dropped, table.overtaken, table.counted, table.finished, table.doubted)
    places = chain(
        (sets.free, sets.done, sets.lost, sets.spent),
        chain.from_iterable(theirs.values() for theirs in by_worker),
        chain.from_iterable(theirs.values() for theirs in table.covered.values()),
        (given for theirs in table.recent.values() for _, given in theirs),
        _granted(table),
    )
    last = table.next if table.above is None else end_of(dataset)
    if any(not begin < end <= last for stretch in places for begin, end in stretch):
        return f"{dataset.name!r} names places that were never leased"
    return (
        _wrong_with_places(table)
        or _wrong_with_times(table, turn)
        or ("" if Ranges(sets.spent) - Ranges(sets.done) == NONE else f"of {dataset.name!r} more is spent than done")
    )


def _granted(table: KeptTable) -> Iterable[Stretch]:
    above = table.above
    return () if above is None else (above.granted, *(one for *_, one in (*above.to_tell, *above.parts)))


def _wrong_with_above(table: KeptTable, above: KeptAbove) -> str:
    """What was granted and is not given up is free, lost, or in one member's hands; and none of that is done."""
    sets, name = table.sets, table.dataset.name
    mine = [Ranges(one) for one in (sets.free, sets.lost, *table.held.values())]
    union, done = Ranges(chain.from_iterable(mine)), Ranges(sets.done)
    if sum(one.total for one in mine) != union.total or union & done:
        return f"of {name!r}, a place is there twice"
    if union != Ranges(above.granted) - Ranges(sets.spent) or above.fresh or table.next:
        return f"of {name!r}, other places are in hands than were granted"
    return ""


def _wrong_with_places(table: KeptTable) -> str:
    """Each is free, done, lost, or in one member's hands."""
    if table.above is not None:
        return _wrong_with_above(table, table.above)
    sets = table.sets
    owners: Iterable[tuple[tuple[int, int], ...]] = (sets.free, sets.done, sets.lost, *table.held.values())
    ranges = sorted(chain.from_iterable(owners))
    at = 0
    for begin, end in ranges:
        if begin != at:
            return f"of {table.dataset.name!r}, place {min(begin, at)} is {'nowhere' if begin > at else 'there twice'}"
        at = end
    return "" if at == table.next else f"of {table.dataset.name!r}, place {at} is nowhere"


def _wrong_with_times(table: KeptTable, turn: int) -> str:
    for name, one in table.shares.items():
        if max(one.since, one.at) > turn or (one.brought and one.interval_s < LEAST_INTERVAL_S):
            return f"{name} has brought something at no time that there was"
    if any(given_at > turn for theirs in table.recent.values() for given_at, _ in theirs):
        return f"of {table.dataset.name!r} something was given at a decision that was not made"
    return ""
