"""How many must agree, and what a decided block makes of the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.book import Book
from outerstep.simulate.gossip import Registry
from outerstep.statements import (
    Change,
    Decision,
    Member,
    Name,
    Offered,
    Proof,
    Round,
    Signed,
    Voted,
    Withdrawal,
    digest_of_block,
)


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


@pytest.mark.parametrize(
    ("count", "attackers", "liars"), [(1, 1, 0), (3, 1, 0), (4, 1, 1), (7, 1, 1), (7, 2, 2), (9, 9, 2)]
)
def test_one_more_than_can_lie_are_witnesses(count: int, attackers: int, liars: int) -> None:
    assert chain.attackers_among(count, attackers) == liars
    assert chain.witnesses(count, attackers) == liars + 1


def test_a_run_begins_with_its_founder() -> None:
    state = chain.found(member("a"), fragments=2, owner="e" * 64)
    assert (state.height, state.tip, state.members, state.versions) == (0, "0" * 64, (member("a"),), (0, 0))
    assert state.names == (Name(peer_id="a", key="a" * 64, owner="e" * 64),)
    assert chain.found(member("a"), fragments=2, versions=(7, 8)).versions == (7, 8)
    assert chain.found(member("a"), fragments=1).names == (Name(peer_id="a", key="a" * 64),)
    assert chain.found(member("a"), fragments=1, protocol=1).names is UNSET


OFFER = Signed(author="a" * 64, body=b"", signature=b"s" * 64)


@pytest.mark.parametrize(
    ("facts", "is_next"),
    [
        ({}, True),
        ({"height": 2}, False),
        ({"height": 0}, False),
        ({"parent": "f" * 64}, False),
        ({"fragment": 1, "version": 5}, True),
        ({"fragment": 2}, False),
        ({"fragment": 3}, False),
        ({"version": 0}, False),
        ({"version": 2}, False),
    ],
    ids=str,
)
def test_a_round_follows_by_its_height_parent_and_version(facts: dict[str, object], is_next: bool) -> None:
    state = chain.found(member("a"), fragments=2, versions=(0, 4))
    block = Round(height=1, parent=state.tip, fragment=0, version=1, base_hash="0" * 32, offers=(OFFER,))
    assert chain.follows(replace(block, **facts), state) is is_next


class TestDecided:
    """By three of four members, in one turn."""

    RUN = "a-run"

    def setup_method(self) -> None:
        registry = Registry()
        pairs = [registry.enter(f"p{i}") for i in range(5)]
        self.books = [Book(self.RUN, key, sign, registry.verify) for key, sign in pairs]
        members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs[:4]))
        founded = chain.found(members[0], 1)
        self.state = chain.after(Change(height=1, parent=founded.tip, members=members), founded)
        self.block = Change(height=2, parent=self.state.tip, members=members[:3])

    def vote(self, who: int, **facts: object) -> Signed:
        vote = Voted(run_id=self.RUN, height=2, turn=0, kind="precommit", block=digest_of_block(self.block))
        return self.books[who].write(replace(vote, **facts))

    def is_decided(self, *votes: Signed, block: Change | None = None, attackers: int = 1) -> bool:
        return chain.is_decided(Decision(block=block or self.block, votes=votes), self.state, self.books[0], attackers)

    def test_by_a_quorum_and_no_fewer(self) -> None:
        votes = [self.vote(i) for i in range(4)]
        assert self.is_decided(*votes)
        assert self.is_decided(*votes[:3])
        assert not self.is_decided(*votes[:2])
        assert not self.is_decided(*votes[:2], votes[1]), "one member is one voter"
        assert self.is_decided(*votes[:3], attackers=0)

    def test_a_vote_of_a_stranger_or_for_something_else_counts_for_nothing(self) -> None:
        two = [self.vote(0), self.vote(1)]
        for other in (
            self.vote(4),
            self.vote(2, kind="prevote"),
            self.vote(2, height=3),
            self.vote(2, block=""),
            replace(self.vote(2), signature=bytes(64)),
        ):
            assert not self.is_decided(*two, other)
            assert self.is_decided(*two, other, self.vote(3)), "nor does it do any harm"

    def test_what_is_no_vote_counts_for_nothing(self) -> None:
        offered = Offered(
            run_id=self.RUN,
            fragment=0,
            version=1,
            sequence=1,
            digest="a" * 64,
            size_bytes=1,
            base_hash="0" * 32,
            steps=1,
        )
        assert not self.is_decided(self.vote(0), self.vote(1), self.books[2].write(offered))

    def test_votes_of_different_turns_decide_nothing(self) -> None:
        assert not self.is_decided(self.vote(0), self.vote(1), self.vote(2, turn=1))
        assert self.is_decided(*(self.vote(i, turn=5) for i in range(3)))

    def test_only_the_next_block_can_be(self) -> None:
        votes = [self.vote(i) for i in range(3)]
        self.state = chain.after(self.block, self.state)
        assert not self.is_decided(*votes)


def test_whose_invitation_is_withdrawn_is_remembered_as_expelled() -> None:
    state = chain.found(member("a"), fragments=1)
    withdrawn = (Withdrawal(peer_id="b", key="b" * 64, signature="0" * 128),)
    block = Change(height=1, parent=state.tip, members=(member("a"),), withdrawn=withdrawn)
    assert chain.withdrawn_in(block) == withdrawn
    after = chain.after(block, state)
    assert (after.height, after.tip, after.expelled) == (1, digest_of_block(block), (member("b"),))
    assert chain.withdrawn_in(replace(block, withdrawn=UNSET)) == ()


def test_of_more_expelled_than_are_remembered_the_new_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MOST_EXPELLED", 3)
    state = chain.found(member("z"), fragments=1)

    def expel(*names: str) -> list[str]:
        nonlocal state
        withdrawn = tuple(Withdrawal(peer_id=n, key=n * 64, signature="0" * 128) for n in names)
        state = chain.after(
            Change(height=state.height + 1, parent=state.tip, members=state.members, withdrawn=withdrawn), state
        )
        return [one.peer_id for one in state.expelled]

    assert expel("b", "c") == ["b", "c"]
    assert expel("a") == ["a", "b", "c"]
    assert expel("d") == ["b", "c", "d"], "of the others those whose names come last"
    assert expel("a", "e", "f") == ["a", "d", "e", "f"], "of the others one at least"


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
