"""How many must agree, and what a decided block makes of the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.gossip import chain
from outerstep.statements import Change, Member, Proof, Round, Signed


def member(name: str) -> Member:
    return Member(peer_id=name, key=name[0] * 64)


@given(st.integers(1, 64), st.integers(0, 5))
def test_two_quorums_share_an_honest_member_and_the_honest_are_one(count: int, attackers: int) -> None:
    f, quorum = chain.attackers_among(count, attackers), chain.quorum_of(count, attackers)
    assert 2 * quorum - count > f
    assert count - f >= quorum
    assert 2 * quorum > count


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (8, 5)])
def test_the_usual_numbers(count: int, quorum: int) -> None:
    assert chain.quorum_of(count, 1) == quorum


def test_a_round_moves_its_fragment_and_a_change_the_members() -> None:
    state = chain.found(member("a"), fragments=2)
    both = chain.in_order([member("b"), member("a")])
    change = Change(height=1, parent=chain.GENESIS, members=both)
    assert chain.follows(change, state)
    state = chain.after(change, state)
    assert (state.height, state.members, state.versions) == (1, both, (0, 0))
    offer = Signed(author="a" * 64, body=b"", signature=b"s" * 64)
    round_ = Round(height=2, parent=state.tip, fragment=1, version=1, base_hash="0" * 32, offers=(offer,))
    assert chain.follows(round_, state)
    state = chain.after(round_, state)
    assert state.versions == (0, 1)
    assert not chain.follows(round_, state)  # a second time


def test_who_is_proven_to_lie_is_remembered_as_expelled() -> None:
    state = chain.found(member("a"), fragments=1)
    state = chain.after(Change(height=1, parent=state.tip, members=(member("a"), member("b"))), state)
    said = Signed(author=member("b").key, body=b"", signature=b"s" * 64)
    gone = Change(height=2, parent=state.tip, members=(member("a"),), proofs=(Proof(first=said, second=said),))
    state = chain.after(gone, state)
    assert state.expelled == (member("b"),)
