"""One member's side of a ballot, rule by rule: the others' votes come by hand, and time is a number."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from outerstep.coordination.gossip import ballot as ballot_module
from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.ballot import Ballot, Ballots, TurnTimeouts, Verdict
from outerstep.coordination.gossip.book import Book
from outerstep.simulate.gossip import Registry
from outerstep.statements import Block, Change, Decision, Member, Offered, Proposed, Signed, Voted, digest_of_block

RUN = "a-run"
PACE = TurnTimeouts(2.0, 1.0, 4.0)


class Table:
    """Four members, of whom one may lie: three are a quorum. `me` is p0; the proposer of turn 0 is p2."""

    def __init__(self, me: int = 0) -> None:
        registry = Registry()
        pairs = [registry.enter(f"p{i}") for i in range(5)]
        members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs[:4]))
        founded = chain.found(members[0], 1)
        self.state = chain.after(Change(height=1, parent=founded.tip, members=members), founded)
        self.books = [Book(RUN, key, sign, registry.verify) for key, sign in pairs]
        self.keys = [key for key, _ in pairs]
        self.me, self.said_count = me, 0
        self.verdict: Verdict = "good"
        self.has_all, self.silent = True, set[str]()
        self.would_make: Block | None = self.block(3)
        self.judged: list[Block] = []
        self.ballot = self.open()

    def open(self, kept: Ballots = Ballots(), key: str | None = None) -> Ballot:  # noqa: B008
        def said() -> None:
            self.said_count += 1

        return Ballot(
            self.state, self.books[self.me], RUN, key or self.keys[self.me], 1, PACE, self, kept, on_said=said
        )

    def restart(self) -> None:
        self.ballot = self.open(self.ballot.kept)

    # What the ballot asks of the peer around it.
    def judge(self, block: Block) -> Verdict:
        self.judged.append(block)
        return self.verdict

    def has_all_of(self, block: Block) -> bool:
        assert block in self.ballot.blocks
        return self.has_all

    def make(self, now: float) -> Block | None:
        return self.would_make

    def is_silent(self, key: str, now: float) -> bool:
        return key in self.silent

    # What the others say.
    def block(self, remain: int) -> Change:
        return Change(height=2, parent=self.state.tip, members=self.state.members[:remain])

    def proposes(self, turn: int, block: Block, valid_turn: int = -1, by: int | None = None) -> bool:
        """By whoever's turn it is."""
        who = self.keys.index(self.ballot.proposer(turn)) if by is None else by
        said = Proposed(run_id=RUN, height=2, turn=turn, block=block, valid_turn=valid_turn)
        return self.ballot.hear(self.books[who].write(said), said)

    def votes(
        self, kind: Literal["prevote", "precommit"], turn: int, block: Block | None, *voters: int, height: int = 2
    ) -> list[bool]:
        digest = "" if block is None else digest_of_block(block)
        said = Voted(run_id=RUN, height=height, turn=turn, kind=kind, block=digest)
        return [self.ballot.hear(self.books[voter].write(said), said) for voter in voters]

    def own(self) -> list[tuple[str, int, str]]:
        """What this member has said: (what, turn, for which block)."""
        found = []
        for signed in self.ballot.kept.own:
            said = self.books[self.me].read(signed)
            if isinstance(said, Proposed):
                found.append(("proposal", said.turn, digest_of_block(said.block)))
            else:
                assert isinstance(said, Voted)
                found.append((said.kind, said.turn, said.block))
        return found

    def to_turn(self, turn: int, now: float = 0.0) -> None:
        """The others have given up the turns before."""
        for t in range(turn):
            self.votes("precommit", t, None, 1, 2, 3)
        assert self.ballot.advance(now) is None
        assert self.ballot.turn == turn


@pytest.fixture
def table() -> Table:
    return Table()


def test_the_members_propose_one_after_the_other(table: Table) -> None:
    assert [table.keys.index(table.ballot.proposer(turn)) for turn in range(5)] == [2, 3, 0, 1, 2]


def test_a_later_turn_is_waited_for_longer_up_to_a_limit() -> None:
    assert [PACE.wait_s(turn) for turn in range(4)] == [2.0, 3.0, 4.0, 4.0]
    assert [TurnTimeouts().wait_s(turn) for turn in (0, 3, 99)] == [4.0, 10.0, 60.0]


class TestHearing:
    def test_only_of_this_height_and_not_of_turns_too_far_ahead(self, table: Table) -> None:
        assert table.votes("prevote", 0, None, 1, height=3) == [False]
        assert table.votes("prevote", ballot_module.MOST_TURNS_AHEAD, None, 1) == [True]
        assert table.votes("prevote", ballot_module.MOST_TURNS_AHEAD + 1, None, 1) == [False]

    def test_a_proposal_only_of_whose_turn_it_is_once_and_only_if_it_follows(self, table: Table) -> None:
        elsewhere = Change(height=2, parent="f" * 64, members=table.state.members[:2])
        assert not table.proposes(0, elsewhere)
        assert not table.proposes(0, table.block(2), by=1)
        assert table.proposes(0, table.block(2))
        assert not table.proposes(0, table.block(3))
        assert table.ballot.blocks == [table.block(2)]

    def test_a_proposal_only_of_a_few_turns_around_this_one(self, table: Table) -> None:
        table.to_turn(5)
        heard = [turn for turn in range(12) if turn not in (2, 6) and table.proposes(turn, table.block(2))]
        assert heard == [3, 4, 5, 7, 8, 9]

    def test_a_vote_once_and_a_second_one_only_for_a_block_that_is_known_or_for_none(self, table: Table) -> None:
        one, other, unknown = table.block(1), table.block(2), table.block(3)
        table.proposes(0, one)
        table.proposes(1, other)
        assert table.votes("prevote", 0, one, 1) == [True]
        assert table.votes("prevote", 0, one, 1) == [False]
        assert table.votes("prevote", 0, other, 1) == [True]
        assert table.votes("prevote", 0, unknown, 1) == [False]
        assert table.votes("prevote", 0, None, 1) == [True]
        assert table.votes("prevote", 0, unknown, 3) == [True], "the first may be for a block that comes later"

    def test_what_was_said_is_told_for_the_last_turns_and_for_those_that_bind(self, table: Table) -> None:
        block = table.block(2)
        table.proposes(0, block)
        table.votes("prevote", 0, block, 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.ballot.kept.locked is not None
        table.to_turn(5)
        turns = {table.books[0].read(signed).turn for signed in table.ballot.statements}  # type: ignore[union-attr]
        assert turns == {0, 2, 3, 4}

    def test_a_turn_is_skipped_only_because_of_its_own_proposer(self, table: Table) -> None:
        table.ballot.skip(table.keys[3], 0)
        table.ballot.advance(0.0)
        assert table.own() == []
        table.ballot.skip(table.keys[2], 0)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, "")]

    def test_a_turn_can_be_skipped_before_it_comes_within_limits(self, table: Table) -> None:
        most = ballot_module.MOST_TURNS_AHEAD
        for turn in (most, most + 4):
            table.ballot.skip(table.ballot.proposer(turn), turn)
        assert table.ballot._void == {most}


class TestPrevoting:
    def test_for_a_block_that_it_is_for(self, table: Table) -> None:
        table.proposes(0, table.block(2))
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, digest_of_block(table.block(2)))]
        assert table.said_count == 1

    def test_for_none_if_it_is_against_it(self, table: Table) -> None:
        table.verdict = "bad"
        table.proposes(0, table.block(2))
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, "")]

    def test_it_waits_while_it_cannot_tell_and_then_votes_for_none(self, table: Table) -> None:
        table.verdict = "unknown"
        table.silent = {table.keys[2]}  # a proposer that has proposed may be silent
        table.proposes(0, table.block(2))
        for now in (1.0, 2.9):
            table.ballot.advance(now)
            assert table.own() == []
        table.ballot.advance(3.0)
        assert table.own() == [("prevote", 0, "")]

    def test_it_waits_for_a_proposal_only_once_something_is_due(self, table: Table) -> None:
        table.would_make = None
        for now in (0.0, 99.0):
            table.ballot.advance(now)
        table.would_make = table.block(3)
        for now in (100.0, 101.9):
            table.ballot.advance(now)
            assert table.own() == []
        table.ballot.advance(102.0)
        assert table.own() == [("prevote", 0, "")]

    def test_in_a_later_turn_it_waits_in_any_case(self, table: Table) -> None:
        table.would_make = None
        table.to_turn(1, now=10.0)
        table.ballot.advance(12.9)
        assert table.own() == []
        table.ballot.advance(13.0)
        assert table.own() == [("prevote", 1, "")]

    def test_for_a_silent_proposer_it_does_not_wait(self, table: Table) -> None:
        table.silent = {table.keys[2]}
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, "")]

    def test_what_follows_from_others_votes_is_done_at_once(self, table: Table) -> None:
        table.silent = {table.keys[2]}
        table.votes("prevote", 0, None, 1, 3)
        table.votes("precommit", 0, None, 1, 3)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, ""), ("precommit", 0, "")]
        assert table.ballot.turn == 1

    def test_its_own_word_is_in_the_book_as_anybody_elses(self, table: Table) -> None:
        table.proposes(0, table.block(2))
        table.ballot.advance(0.0)
        other = Voted(run_id=RUN, height=2, turn=0, kind="prevote", block="")
        assert not table.books[0].enter(table.books[0].write(other), other)

    def test_locked_on_another_block_it_votes_for_none(self, table: Table) -> None:
        lock(table, table.block(2))
        table.to_turn(1)
        table.proposes(1, table.block(3))
        table.ballot.advance(0.0)
        assert table.own()[-1] == ("prevote", 1, "")

    def test_for_the_block_that_it_is_locked_on_it_votes_again(self, table: Table) -> None:
        lock(table, table.block(2))
        table.to_turn(1)
        table.proposes(1, table.block(2))
        table.ballot.advance(0.0)
        assert table.own()[-1] == ("prevote", 1, digest_of_block(table.block(2)))


def lock(table: Table, block: Block, turn: int = 0) -> None:
    """It precommits this block, as three prevote it."""
    table.proposes(turn, block)
    table.votes("prevote", turn, block, 1, 2, 3)
    assert table.ballot.advance(0.0) is None
    locked = table.ballot.kept.locked
    assert locked is not None
    assert (locked.turn, locked.block) == (turn, block)
    assert table.own()[-1] == ("precommit", turn, digest_of_block(block))


class TestProposedAgain:
    """A proposal that names an earlier turn in which its block had a quorum of prevotes."""

    def test_it_is_voted_for_once_that_quorum_is_seen_whatever_we_think_of_it(self, table: Table) -> None:
        block = table.block(2)
        table.verdict = "bad"
        table.to_turn(1)
        table.proposes(1, block, valid_turn=0)
        table.votes("prevote", 0, block, 1, 2)
        table.ballot.advance(0.0)
        assert table.own() == []
        table.votes("prevote", 0, block, 3)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 1, digest_of_block(block))]
        assert table.judged == []

    def test_not_before_its_contributions_are_here(self, table: Table) -> None:
        block = table.block(2)
        table.has_all = False
        table.to_turn(1)
        table.proposes(1, block, valid_turn=0)
        table.votes("prevote", 0, block, 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.own() == []
        table.has_all = True
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 1, digest_of_block(block))]

    def test_a_turn_that_is_not_earlier_is_no_reason(self, table: Table) -> None:
        table.to_turn(1)
        table.proposes(1, table.block(2), valid_turn=1)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 1, "")]

    @pytest.mark.parametrize(("valid_turn", "is_free"), [(0, False), (1, True), (3, True)])
    def test_it_frees_from_a_lock_of_the_same_or_an_earlier_turn(
        self, table: Table, valid_turn: int, is_free: bool
    ) -> None:
        mine, theirs = table.block(2), table.block(1)
        table.to_turn(1)
        lock(table, mine, turn=1)
        for turn in range(1, 4):
            table.votes("precommit", turn, None, 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 4
        table.proposes(4, theirs, valid_turn=valid_turn)
        table.votes("prevote", valid_turn, theirs, 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.own()[-1] == ("prevote", 4, digest_of_block(theirs) if is_free else "")

    def test_the_block_that_it_is_locked_on_is_voted_for_with_any_earlier_turn(self, table: Table) -> None:
        mine = table.block(2)
        table.to_turn(1)
        table.votes("prevote", 0, mine, 1, 2, 3)
        lock(table, mine, turn=1)
        for turn in range(1, 4):
            table.votes("precommit", turn, None, 1, 2, 3)
        table.ballot.advance(0.0)
        table.proposes(4, mine, valid_turn=0)
        table.ballot.advance(0.0)
        assert table.own()[-1] == ("prevote", 4, digest_of_block(mine))


class TestPrecommitting:
    def test_none_if_a_quorum_prevotes_none(self, table: Table) -> None:
        table.verdict = "bad"
        table.proposes(0, table.block(2))
        table.votes("prevote", 0, None, 1)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, "")]
        table.votes("prevote", 0, None, 2)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, ""), ("precommit", 0, "")]
        assert table.ballot.kept.locked is None

    def test_a_quorum_that_disagrees_is_waited_for(self, table: Table) -> None:
        table.proposes(0, table.block(2))
        table.votes("prevote", 0, None, 1)
        for now in (0.0, 50.0):
            table.ballot.advance(now)
            assert len(table.own()) == 1, "two have voted, and that is no quorum"
        table.votes("prevote", 0, None, 2)
        for now in (100.0, 101.9):
            table.ballot.advance(now)
            assert len(table.own()) == 1
        table.ballot.advance(102.0)
        assert table.own()[-1] == ("precommit", 0, "")

    def test_a_quorum_for_a_block_that_nobody_proposed_is_none(self, table: Table) -> None:
        table.verdict = "bad"
        table.proposes(0, table.block(2))
        table.votes("prevote", 0, table.block(1), 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, "")]

    def test_what_had_a_quorum_too_late_for_a_lock_is_what_we_propose_next(self, table: Table) -> None:
        block = table.block(2)
        table.verdict = "bad"
        table.votes("prevote", 0, None, 1, 2)
        table.proposes(0, block)
        table.ballot.advance(0.0)
        assert table.own()[-1] == ("precommit", 0, "")
        table.votes("prevote", 0, block, 1, 2, 3)
        before = table.said_count
        table.ballot.advance(0.0)
        kept = table.ballot.kept
        assert kept.locked is None
        assert kept.valid is not None
        assert (kept.valid.turn, kept.valid.block) == (0, block)
        assert table.said_count == before + 1, "it must be written down"
        table.to_turn(2)
        table.ballot.advance(0.0)
        assert ("proposal", 2, digest_of_block(block)) in table.own()
        said = [table.books[0].read(signed) for signed in table.ballot.kept.own]
        assert [one.valid_turn for one in said if isinstance(one, Proposed)] == [0]


class TestTurns:
    def test_a_quorum_of_precommits_for_none_ends_it_at_once(self, table: Table) -> None:
        table.votes("precommit", 0, None, 1, 2)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 0
        table.votes("precommit", 0, None, 3)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 1

    def test_precommits_that_disagree_end_it_after_a_while(self, table: Table) -> None:
        table.votes("precommit", 0, None, 1, 2)
        table.votes("precommit", 0, table.block(2), 3)
        for now in (10.0, 11.9):
            table.ballot.advance(now)
            assert table.ballot.turn == 0
        table.ballot.advance(12.0)
        assert table.ballot.turn == 1
        table.votes("precommit", 1, None, 1, 2)
        table.votes("precommit", 1, table.block(2), 3)
        for now in (20.0, 22.9):
            table.ballot.advance(now)
            assert table.ballot.turn == 1, "each turn is waited for anew"
        table.ballot.advance(23.0)
        assert table.ballot.turn == 2

    def test_it_goes_where_more_than_the_liars_have_gone(self, table: Table) -> None:
        table.votes("prevote", 7, None, 1)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 0
        table.votes("precommit", 5, None, 2)
        table.votes("prevote", 3, None, 2)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 5

    def test_a_proposal_shows_where_its_author_is_too(self, table: Table) -> None:
        table.proposes(4, table.block(2))  # p2's
        table.votes("prevote", 3, None, 1)
        table.ballot.advance(0.0)
        assert table.ballot.turn == 3

    def test_proposals_of_turns_long_past_are_forgotten_with_their_blocks(self, table: Table) -> None:
        table.proposes(0, table.block(1))
        table.proposes(1, table.block(2))
        table.verdict = "bad"
        table.to_turn(4)
        assert table.ballot.blocks == [table.block(2)]
        told = [table.books[0].read(signed) for signed in table.ballot.statements]
        assert [one.turn for one in told if isinstance(one, Proposed)] == [1]

    def test_a_block_that_binds_is_not_forgotten(self, table: Table) -> None:
        lock(table, table.block(2))
        table.to_turn(9)
        assert table.block(2) in table.ballot.blocks
        told = [table.books[0].read(signed) for signed in table.ballot.statements]
        assert 0 in [one.turn for one in told if isinstance(one, Proposed)]


class TestProposing:
    def test_when_it_is_its_turn_it_proposes_and_is_for_it(self) -> None:
        table = Table(me=2)
        table.ballot.advance(0.0)
        digest = digest_of_block(table.block(3))
        assert table.own() == [("proposal", 0, digest), ("prevote", 0, digest)]

    def test_with_nothing_due_it_waits_in_the_first_turn_and_in_others_passes_on(self) -> None:
        table = Table(me=2)
        table.would_make = None
        for now in (0.0, 99.0):
            assert table.ballot.advance(now) is None
        assert table.own() == []
        for turn in range(4):
            table.votes("precommit", turn, None, 0, 1, 3)
        for now in (100.0, 103.9):
            table.ballot.advance(now)
            assert (table.ballot.turn, table.own()) == (4, [])
        table.votes("prevote", 4, None, 0, 1)
        table.ballot.advance(104.0)
        assert table.own() == [("prevote", 4, ""), ("precommit", 4, "")]

    def test_what_is_due_a_little_later_is_proposed_still(self) -> None:
        table = Table(me=3)
        table.would_make = None
        table.votes("precommit", 0, None, 0, 1, 2)
        table.ballot.advance(0.0)
        table.would_make = table.block(3)
        table.ballot.advance(1.0)
        assert table.own()[0] == ("proposal", 1, digest_of_block(table.block(3)))


class TestDeciding:
    def test_a_quorum_of_precommits_in_one_turn_decides(self, table: Table) -> None:
        block = table.block(2)
        table.proposes(0, block)
        table.votes("precommit", 0, block, 1)
        table.votes("precommit", 1, block, 2, 3)
        table.votes("prevote", 0, block, 1, 2, 3)
        assert table.ballot.advance(0.0) is None
        table.votes("precommit", 1, block, 1)
        decided = table.ballot.advance(0.0)
        assert isinstance(decided, Decision)
        assert decided.block == block
        assert {signed.author for signed in decided.votes} == {table.keys[i] for i in (1, 2, 3)}
        assert chain.is_decided(decided, table.state, table.books[0], 1)

    def test_one_that_only_watches_sees_it_and_says_nothing(self, table: Table) -> None:
        table.ballot = table.open(key=table.keys[4])  # nobody's
        block = table.block(2)
        table.proposes(0, block)
        assert table.ballot.advance(0.0) is None
        table.votes("precommit", 0, block, 0, 1, 2)
        decided = table.ballot.advance(0.0)
        assert decided is not None
        assert (decided.block, table.own()) == (block, [])


class TestRestarted:
    def test_it_is_where_it_was_and_says_nothing_else(self, table: Table) -> None:
        lock(table, table.block(2))
        said, kept = table.own(), table.ballot.kept
        table.restart()
        assert (table.own(), table.ballot.kept) == (said, kept)
        assert table.block(2) in table.ballot.blocks
        table.verdict = "bad"
        table.proposes(0, table.block(2))
        table.votes("prevote", 0, None, 1, 2, 3)
        table.ballot.advance(99.0)
        assert table.own() == said

    def test_it_can_decide_the_block_that_it_is_locked_on_without_hearing_it_again(self, table: Table) -> None:
        lock(table, table.block(2))
        table.restart()
        table.votes("precommit", 0, table.block(2), 1)
        assert table.ballot.advance(0.0) is None
        table.votes("precommit", 0, table.block(2), 2)
        decided = table.ballot.advance(0.0)
        assert decided is not None
        assert decided.block == table.block(2)

    def test_after_its_prevote_comes_its_precommit(self, table: Table) -> None:
        table.verdict = "bad"
        table.proposes(0, table.block(2))
        table.ballot.advance(0.0)
        table.restart()
        table.proposes(0, table.block(2))
        table.votes("prevote", 0, table.block(2), 1, 2, 3)
        table.ballot.advance(0.0)
        assert table.own() == [("prevote", 0, ""), ("precommit", 0, digest_of_block(table.block(2)))]

    def test_it_is_in_the_last_turn_in_which_it_said_something(self, table: Table) -> None:
        table.silent = set(table.keys)
        table.to_turn(3)
        table.restart()
        assert table.ballot.turn == 3
        table.ballot.advance(0.0)
        assert table.own()[-1][:2] == ("prevote", 3)
        assert len(table.own()) == len(set(table.own()))

    def test_after_a_proposal_of_its_own_it_votes_in_that_turn(self) -> None:
        table = Table(me=3)
        table.verdict = "unknown"
        table.votes("precommit", 0, None, 0, 1, 2)
        table.ballot.advance(0.0)
        digest = digest_of_block(table.block(3))
        assert table.own() == [("proposal", 1, digest)]
        table.restart()
        assert table.ballot.turn == 1
        table.verdict, table.would_make = "good", table.block(1)
        table.ballot.advance(0.0)
        assert table.own() == [("proposal", 1, digest), ("prevote", 1, digest)]

    def test_what_it_said_of_another_height_or_as_something_else_is_not_recalled(self, table: Table) -> None:
        book = table.books[0]
        other = Voted(run_id=RUN, height=3, turn=5, kind="prevote", block="")
        offered = Offered(
            run_id=RUN, fragment=0, version=2, sequence=1, digest="a" * 64, size_bytes=1, base_hash="0" * 32, steps=1
        )
        kept: list[Signed] = [book.write(other), book.write(offered)]
        table.ballot = table.open(Ballots(own=tuple(kept)))
        assert (table.ballot.turn, table.own()) == (0, [])


def test_nobody_is_told_that_something_was_said_unless_it_wants_to_know(table: Table) -> None:
    keyword: Any = table.books[0]
    ballot = Ballot(table.state, keyword, RUN, table.keys[0], 1, PACE, table)
    said = Proposed(run_id=RUN, height=2, turn=0, block=table.block(2))
    ballot.hear(table.books[2].write(said), said)
    ballot.advance(0.0)
    assert len(ballot.kept.own) == 1
