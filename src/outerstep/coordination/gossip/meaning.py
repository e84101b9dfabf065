"""What must be true of something that was said, beyond its type, before it is kept, voted for or passed on.

Reading (book.py) finds out *that* somebody said it, and in which words. Here is whether those words can be meant in
this run at all. Each function answers why not, in words that follow a name; "" = they can be.

What is asked of a block and of a state is the same for every peer, whatever it has heard: a block of which something is
wrong here cannot be carried out by anybody, so it is neither voted for nor followed. (blocks.py asks the rest: whether
this peer is for it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import UNSET

from ...errors import BadRequest
from ...statements import (
    MOST_PEERS,
    Beat,
    Block,
    ChainState,
    Change,
    Member,
    Offered,
    Round,
)
from ...types import Dataset
from ..kept_leases import read_kept
from . import chain
from .book import Book
from .names import MOST_NAMES, is_anothers, owner_of

CanCall = Callable[[Beat], bool]
"""Can a connection be made to the place that a beat names? By its form: whether somebody answers shows later."""


def anywhere(beat: Beat) -> bool:
    """For peers that nobody calls."""
    return True


def wrong_with_beat(beat: Beat, fragments: int, can_call: CanCall) -> str:
    if not can_call(beat):
        return f"names a place that cannot be called: {beat.address[:80]!r}, fingerprint {_short(beat.fingerprint)}"
    if len(beat.held) not in (0, fragments):
        return f"holds {len(beat.held)} fragments, and the run has {fragments}"
    if not (math.isfinite(beat.steps_per_second) and math.isfinite(beat.loss or 0.0)):
        return f"reports {beat.steps_per_second} steps/s and a loss of {beat.loss}, which are no numbers"
    return ""


def wrong_with_offer(offer: Offered, fragments: int) -> str:
    return "" if offer.fragment < fragments else f"offers to fragment {offer.fragment}, and the run has {fragments}"


def wrong_with_state(
    state: ChainState, fragments: int | None = None, datasets: Collection[Dataset] | None = None
) -> str:
    """`fragments`: how many the run has, if that is known; `datasets`: which it leases."""
    if not state.versions or fragments not in (None, len(state.versions)):
        return f"names a run of {len(state.versions)} fragments" + (f", not {fragments}" if fragments else "")
    try:
        leased = leased_datasets(state)
    except BadRequest as error:
        return f"names a run of which {error.message}"
    if datasets is not None and leased != set(datasets):
        return f"names a run that leases {_named(leased)}, not {_named(datasets)}"
    names = () if state.names is UNSET else [name.peer_id for name in state.names]
    if len(names) > MOST_NAMES or len(set(names)) != len(names):
        return f"names {len(names)} names, where a run has {MOST_NAMES} at most, each once"
    return _wrong_with_members(state.members)


def leased_datasets(state: ChainState) -> set[Dataset]:
    """What the run leases. Refused (BadRequest) if its table cannot be read."""
    return set() if state.data is UNSET else {one.dataset for one in read_kept(state.data).tables}


def _named(datasets: Iterable[Dataset]) -> str:
    return ", ".join(sorted(one.name for one in datasets)) or "nothing"


def wrong_with_block(block: Block, state: ChainState, book: Book) -> str:
    """`state`: the run before it."""
    if not chain.follows(block, state):
        return "names a block that does not follow the last one"
    return _wrong_with_round(block, state, book) if isinstance(block, Round) else _wrong_with_change(block, state, book)


def _wrong_with_round(block: Round, state: ChainState, book: Book) -> str:
    names = {member.key: member.peer_id for member in state.members}
    for signed in block.offers:
        says = book.read(signed)
        if not isinstance(says, Offered) or signed.author not in names:
            return "names a round of something else than members' offers"
        if (says.fragment, says.version, says.base_hash) != (block.fragment, block.version, block.base_hash):
            return "names a round with an offer to another one"
    ids = [names[signed.author] for signed in block.offers]
    return "" if ids == sorted(set(ids)) else "names a round whose offers are not in the order of their peers"


def _wrong_with_change(block: Change, state: ChainState, book: Book) -> str:
    withdrawn = {one.key for one in chain.withdrawn_in(block)}
    if block.members == state.members and not withdrawn - {member.key for member in state.expelled}:
        return "names a change that changes nothing"
    if not all(map(book.is_withdrawn, chain.withdrawn_in(block))):
        return "names a withdrawal that the inviter did not sign"
    if any(member.key in withdrawn for member in block.members):
        return "keeps a peer whose invitation it withdraws"
    if not all(map(book.proves, block.proofs)):
        return "names a change with a proof that proves nothing"
    applied = {signed.author: book.read(signed) for signed in block.applied}
    keys = {member.key for member in state.members}
    for member in block.members:
        if member.key not in keys and not may_be_let_in(member, applied.get(member.key), state, book):
            return f"lets {member.peer_id} in, who has not asked, is not invited, is expelled, or bears another's name"
    return _wrong_with_members(block.members)


def may_be_let_in(member: Member, beat: object, state: ChainState, book: Book) -> bool:
    """Whatever this peer has heard of it: has it asked, is it invited, not expelled, and is its name its own?"""
    if not isinstance(beat, Beat) or beat.peer_id != member.peer_id or beat.wants != "belong":
        return False
    if any(m.key == member.key or m.peer_id == member.peer_id for m in state.expelled):
        return False
    if not book.has_invitation(member.key, beat):
        return False
    return book.is_owned(beat, member.key) and not is_anothers(member, owner_of(beat), state)


def _wrong_with_members(members: Sequence[Member]) -> str:
    ids, keys = [member.peer_id for member in members], {member.key for member in members}
    if not 1 <= len(members) <= MOST_PEERS:
        return f"names {len(members)} members, where a run has 1 to {MOST_PEERS}"
    return "" if ids == sorted(set(ids)) and len(keys) == len(ids) else "names members twice, or in no order"


def _short(text: str | None) -> str:
    return "none" if text is None else repr(text if len(text) <= 20 else f"{text[:16]}…")
