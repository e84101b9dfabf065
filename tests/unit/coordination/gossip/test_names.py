"""Names as decided changes make them: the eldest stay, however many come."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.names import MOST_NAMES, is_anothers
from outerstep.statements import Beat, ChainState, Change, Member, Name, Ownership, Signed, body_of

FOUNDER = Member(peer_id="a", key="0a" * 32)
OWNER = "ee" * 32


def key_of(number: int) -> str:
    return f"{number:064x}"


def asks(member: Member, owner: str | None = None) -> Signed:
    vouching = UNSET if owner is None else Ownership(key=owner, signature=bytes(64))
    beat = Beat(run_id="run", peer_id=member.peer_id, incarnation=1, number=1, address="x", owner=vouching)
    return Signed(author=member.key, body=body_of(beat), signature=bytes(64))


def change(state: ChainState, *members: Member, owner: str | None = None) -> ChainState:
    known = {member.key for member in state.members}
    applied = tuple(asks(member, owner) for member in members if member.key not in known)
    block = Change(
        height=state.height + 1, parent=state.tip, members=chain.in_order([FOUNDER, *members]), applied=applied
    )
    return chain.after(block, state)


def test_a_name_stays_its_bearers_by_key_or_by_owner() -> None:
    guest = Member(peer_id="guest", key=key_of(1))
    state = change(change(chain.found(FOUNDER, 1), guest, owner=OWNER))
    assert state.members == (FOUNDER,)
    another = replace(guest, key=key_of(2))
    assert not is_anothers(guest, None, state)
    assert not is_anothers(another, OWNER, state)
    assert is_anothers(another, None, state)
    assert is_anothers(another, "dd" * 32, state)
    assert is_anothers(replace(FOUNDER, key=key_of(2)), OWNER, state)
    assert not is_anothers(replace(another, peer_id="free"), None, state)


def test_who_comes_back_with_another_key_bears_it_with_that() -> None:
    first, second = (Member(peer_id="guest", key=key_of(i)) for i in (1, 2))
    state = change(change(chain.found(FOUNDER, 1), first, owner=OWNER))
    state = change(change(state, second, owner=OWNER))
    assert state.names == (Name(peer_id="a", key=FOUNDER.key), Name(peer_id="guest", key=second.key, owner=OWNER))
    assert is_anothers(first, None, state)
    state = change(state, second)  # it vouches for itself, and the owner is still known
    assert not is_anothers(first, OWNER, state)


def test_new_names_push_out_no_older_one() -> None:
    elder = Member(peer_id="elder", key=key_of(1))
    state = change(change(chain.found(FOUNDER, 1), elder))
    for i in range(2, 3 * MOST_NAMES):
        state = change(change(state, Member(peer_id=f"n{i}", key=key_of(i))))
    assert isinstance(state.names, tuple)
    assert len(state.names) == MOST_NAMES
    assert is_anothers(replace(elder, key=key_of(0)), None, state)
    here = Member(peer_id="here", key=key_of(10**6))
    state = change(state, here)  # and a member's name is known, even if it is the youngest
    assert is_anothers(replace(here, key=key_of(0)), None, state)


def test_a_run_of_protocol_1_has_none() -> None:
    state = chain.found(FOUNDER, 1, protocol=1)
    state = change(change(state, Member(peer_id="guest", key=key_of(1))))
    assert state.names is UNSET
    assert not is_anothers(Member(peer_id="guest", key=key_of(2)), None, state)
