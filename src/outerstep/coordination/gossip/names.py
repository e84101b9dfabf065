"""Whose a peer's name is: it belongs to its first bearer, whether that peer is here or away.

A peer signs what it says with a key of its own; without a folder it draws a new one at each start. Its name belongs to
that key and to its *owner*: a key that the user of the peer keeps, and that vouches in each beat for the one of now. So
a peer comes back under its name with either, and nobody else can bear it, or get it banned, while it is away.

The names are part of what all blocks have made of the run, in the order in which they were first borne. Of those who
are away the eldest are remembered: new names, however many, push out no older one.

In a run of protocol 1 there are no owners, and a name is anybody's once its bearer is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from ...statements import Beat, ChainState, Change, Member, Name, statement_of
from ...types import Key

MOST_NAMES = 320  # of members, and of those who are away


def vouched(run_id: str, peer_id: str, key: str) -> bytes:
    """What an owner signs: in this run, that key speaks under that name."""
    return b"\0".join([b"outerstep peer", run_id.encode(), peer_id.encode(), key.encode()])


def is_anothers(member: Member, owner: Key | None, state: ChainState) -> bool:
    """Does the name that it comes under belong to somebody else? `owner`: who vouches for it."""
    names = () if state.names is UNSET else state.names
    name = next((name for name in names if name.peer_id == member.peer_id), None)
    return name is not None and name.key != member.key and (owner is None or name.owner != owner)


def owner_of(beat: Beat) -> Key | None:
    return None if beat.owner is UNSET else beat.owner.key


def after(block: Change, names: tuple[Name, ...] | UnsetType) -> tuple[Name, ...] | UnsetType:
    """The names after this change, which was found to be right."""
    if names is UNSET:
        return UNSET
    kept = {name.peer_id: name for name in names}
    for signed in block.applied:
        beat = statement_of(signed.body)
        if isinstance(beat, Beat):
            before = kept.get(beat.peer_id)
            owner = owner_of(beat) or (before.owner if before is not None else None)
            kept[beat.peer_id] = Name(peer_id=beat.peer_id, key=signed.author, owner=owner)
    return _within_bounds(kept, {member.peer_id for member in block.members})


def _within_bounds(names: dict[str, Name], present: Iterable[str]) -> tuple[Name, ...]:
    """Of those who are away, the youngest are forgotten."""
    here = set(present)
    away = [peer_id for peer_id in names if peer_id not in here]
    forgotten = set(away[max(MOST_NAMES - len(here), 0) :])
    return tuple(name for peer_id, name in names.items() if peer_id not in forgotten)
