"""What the decided blocks have made of the run.

How many must agree, of n members of whom f may lie:

    f = min(attackers, ⌊(n − 1)/3⌋)          quorum = ⌊(n + f)/2⌋ + 1

Two quorums share more than f members, so at least one honest one, which is for one block only; and the n − f honest
ones are a quorum by themselves, as n > 3f. It is always more than half, so no two parts of a divided run both continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...events import Event, UnitsUnseen
from ...ranges import NONE
from ...statements import (
    Block,
    ChainState,
    Change,
    Decision,
    Member,
    Name,
    Round,
    Voted,
    Withdrawal,
    digest_of_block,
)
from ...types import Key
from ...versions import PROTOCOL_VERSION
from ..shared_leases import SharedLeases
from . import names
from .book import Book
from .heard import signed_in

GENESIS = "0" * 64
MOST_EXPELLED = 256  # that are remembered; a new key is free, so that more would keep nobody out


def attackers_among(count: int, attackers: int) -> int:
    return min(attackers, (count - 1) // 3)


def witnesses(count: int, attackers: int) -> int:
    """So many members that say the same cannot all lie."""
    return attackers_among(count, attackers) + 1


def quorum_of(count: int, attackers: int) -> int:
    return (count + attackers_among(count, attackers)) // 2 + 1


def found(
    founder: Member,
    fragments: int,
    versions: tuple[int, ...] = (),
    *,
    owner: Key | None = None,
    protocol: int = PROTOCOL_VERSION,
    data: bytes | UnsetType = UNSET,
) -> ChainState:
    """A run of one. `versions`: those of a saved state. `owner`: of the founder's name. `protocol`: the run's. `data`:
    its lease table."""
    return ChainState(
        height=0,
        tip=GENESIS,
        members=(founder,),
        versions=versions or (0,) * fragments,
        names=(Name(peer_id=founder.peer_id, key=founder.key, owner=owner),) if protocol >= 2 else UNSET,
        data=data,
    )


def in_order(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.peer_id))


def follows(block: Block, state: ChainState) -> bool:
    """Is it the next one, by its numbers?"""
    if block.height != state.height + 1 or block.parent != state.tip:
        return False
    if isinstance(block, Change):
        return True
    return block.fragment < len(state.versions) and block.version == state.versions[block.fragment] + 1


def withdrawn_in(block: Change) -> tuple[Withdrawal, ...]:
    return () if block.withdrawn is UNSET else block.withdrawn


def after(block: Block, state: ChainState, attackers: int = 0) -> ChainState:
    """The run after one more decided block. `attackers`: as in its rules."""
    return carry_out(block, state, attackers)[0]


def carry_out(block: Block, state: ChainState, attackers: int) -> tuple[ChainState, tuple[Event, ...]]:
    """The same; and what became of leased data."""
    members, versions, expelled, borne = state.members, state.versions, state.expelled, state.names
    if isinstance(block, Round):
        versions = tuple(block.version if f == block.fragment else v for f, v in enumerate(versions))
    else:
        proven = {proof.first.author for proof in block.proofs}
        fresh = {member for member in members if member.key in proven}
        fresh |= {Member(peer_id=one.peer_id, key=one.key) for one in withdrawn_in(block)}
        expelled = in_order({*fresh, *in_order({*expelled} - fresh)[-max(MOST_EXPELLED - len(fresh), 1) :]})
        members, borne = block.members, names.after(block, borne)
    data, told = _data_after(block, state, members, attackers)
    made = msgspec.structs.replace(
        state,
        height=block.height,
        tip=digest_of_block(block),
        members=members,
        versions=versions,
        expelled=expelled,
        names=borne,
        data=data,
    )
    return made, told


def _data_after(
    block: Block, state: ChainState, members: Sequence[Member], attackers: int
) -> tuple[bytes | UnsetType, tuple[Event, ...]]:
    """The lease table: a round's offers say who has trained what, a change who is there."""
    if state.data is UNSET:
        return UNSET, ()
    leases, here = SharedLeases.decode(state.data), {member.peer_id: member.key for member in members}
    if isinstance(block, Change):
        told = leases.decide(here, {}, {})
        return leases.encode(), tuple(told)
    names = {member.key: member.peer_id for member in state.members}
    offers = {names[signed.author]: says for signed, says in signed_in(block) if signed.author in names}
    told = leases.decide(
        here,
        {name: () if says.data is UNSET else says.data for name, says in offers.items()},
        {name: () if says.trained is UNSET or not says.steps else says.trained for name, says in offers.items()},
        (block.fragment, block.version),
        len(state.versions),
        may_lie=attackers_among(len(members), attackers) > 0,
    )
    return leases.encode(), tuple(told)


def unseen(before: ChainState | None, now: ChainState) -> list[Event]:
    """What was decided to be done of leased data while somebody was not there. None: it is new in the run."""
    if now.data is UNSET:
        return []
    tables = SharedLeases.decode(before.data).tables if before is not None and before.data is not UNSET else {}
    found: list[Event] = []
    for name, table in SharedLeases.decode(now.data).tables.items():
        places = table.done - table.spent - (tables[name].done if name in tables else NONE)
        found += [UnitsUnseen(name, tuple(places))] if places else []
    return found


def leased_data(state: ChainState) -> list[dict[str, Any]]:
    """How far the data is that the run leases: of each dataset, the fields of `DataStatus`."""
    return [] if state.data is UNSET else SharedLeases.decode(state.data).progress()


def is_decided(decision: Decision, state: ChainState, book: Book, attackers: int) -> bool:
    """Is it the next block, and did a quorum of the members precommit it in one turn?"""
    if not follows(decision.block, state):
        return False
    digest, keys = digest_of_block(decision.block), {member.key for member in state.members}
    voters: set[str] = set()
    turns: set[int] = set()
    for signed in decision.votes:
        vote = book.read(signed)
        if (
            isinstance(vote, Voted)
            and signed.author in keys
            and (vote.kind, vote.height, vote.block) == ("precommit", decision.block.height, digest)
        ):
            voters.add(signed.author)
            turns.add(vote.turn)
    return len(turns) == 1 and len(voters) >= quorum_of(len(keys), attackers)
