"""One block, decided by four members of whom one may be dead, late or somewhere else."""

from __future__ import annotations

import random

import pytest

from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.ballot import Ballot, Ballots, TurnTimeouts, Verdict
from outerstep.coordination.gossip.book import Book
from outerstep.simulate.gossip import Registry
from outerstep.statements import Block, ChainState, Change, Decision, Member, Proposed, Voted, digest_of_block

RUN = "a-run"


class Opinion:
    """Would propose that this many members remain, and is for whatever anybody proposes."""

    def __init__(self, state: ChainState, remain: int) -> None:
        self._state, self._remain = state, remain
        self.silent: set[str] = set()
        self.verdict: Verdict = "good"

    def judge(self, block: Block) -> Verdict:
        return self.verdict

    def has_all_of(self, block: Block) -> bool:
        return True

    def make(self, now: float) -> Block | None:
        return Change(
            height=self._state.height + 1, parent=self._state.tip, members=self._state.members[: self._remain]
        )

    def is_silent(self, key: str, now: float) -> bool:
        return key in self.silent


class Four:
    def __init__(self) -> None:
        registry = Registry()
        pairs = [registry.enter(f"p{i}") for i in range(4)]
        members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs))
        self.state = chain.found(members[0], 1)
        self.state = chain.after(Change(height=1, parent=self.state.tip, members=members), self.state)
        self.books = [Book(RUN, key, sign, registry.verify) for key, sign in pairs]
        self.keys = [key for key, _ in pairs]
        self.opinions = [Opinion(self.state, 4 - i) for i in range(4)]
        self.ballots = [self.ballot(i) for i in range(4)]

    def ballot(self, i: int, kept: Ballots = Ballots()) -> Ballot:  # noqa: B008
        return Ballot(
            self.state, self.books[i], RUN, self.keys[i], 1, TurnTimeouts(2.0, 1.0, 10.0), self.opinions[i], kept
        )

    def talk(self, who: list[int], now: float, rounds: int = 12) -> list[Decision | None]:
        """These hear all that these say, until nothing is new."""
        decided: list[Decision | None] = []
        for _ in range(rounds):
            decided = [self.ballots[i].advance(now) for i in who]
            self.tell(who, who)
        return decided

    def tell(self, tellers: list[int], hearers: list[int]) -> None:
        for i in tellers:
            for j in hearers:
                for signed in self.ballots[i].statements:
                    statement = self.books[j].read(signed)
                    assert isinstance(statement, Proposed | Voted)
                    self.ballots[j].hear(signed, statement)


def test_all_four_decide_the_proposers_block_in_the_first_turn() -> None:
    four = Four()
    decided = four.talk([0, 1, 2, 3], now=0.0)
    proposer = four.keys.index(four.ballots[0].proposer(0))
    expected = digest_of_block(four.opinions[proposer].make(0.0))  # type: ignore[arg-type]
    assert [digest_of_block(d.block) for d in decided if d is not None] == [expected] * 4
    assert four.ballots[0].turn == 0


def test_two_of_four_decide_nothing_however_long_they_wait() -> None:
    four = Four()
    for now in range(0, 200, 5):
        assert four.talk([0, 1], now=float(now), rounds=3) == [None, None]


def test_a_dead_proposer_costs_a_turn() -> None:
    four = Four()
    dead = four.keys.index(four.ballots[0].proposer(0))
    alive = [i for i in range(4) if i != dead]
    assert four.talk(alive, now=0.0) == [None] * 3
    decided = [d for now in (3.0, 6.0, 9.0) for d in four.talk(alive, now=now)]
    assert any(decided)
    assert len({digest_of_block(d.block) for d in decided if d is not None}) == 1


def decide_apart() -> tuple[str, set[str]]:
    """One member hears three precommits, decides and is gone; of the three that are left, one heard too little in time
    and precommits nothing. What it decided, and what they do."""
    four = Four()
    proposer = four.keys.index(four.ballots[0].proposer(0))
    leader, follower, deaf = (i for i in range(4) if i != proposer)
    heard = [proposer, leader, follower]
    four.talk(heard, now=0.0, rounds=2)  # proposed, and prevoted by three
    for i in heard:
        four.ballots[i].advance(0.0)  # the precommits are on their way
    four.ballots[deaf].advance(0.0)
    four.ballots[deaf].advance(3.0)  # it has waited for a proposal for long enough
    for signed in four.ballots[follower].statements:
        vote = four.books[deaf].read(signed)
        if isinstance(vote, Voted) and vote.kind == "prevote" and signed.author != four.keys[leader]:
            four.ballots[deaf].hear(signed, vote)
    four.ballots[deaf].advance(3.0)
    four.ballots[deaf].advance(5.5)  # and for a third vote for the same block
    four.tell(heard, [leader])
    decided = four.ballots[leader].advance(6.0)
    assert decided is not None
    rest = [proposer, follower, deaf]
    blocks = {digest_of_block(d.block) for now in range(6, 90) for d in four.talk(rest, now=float(now), rounds=2) if d}
    return digest_of_block(decided.block), blocks


def test_what_one_may_have_decided_is_the_only_thing_the_others_can() -> None:
    decided, by_the_rest = decide_apart()
    assert by_the_rest == {decided}


def test_without_locks_the_others_would_decide_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    start = Ballot._start

    def forget(self: Ballot, turn: int) -> None:
        start(self, turn)
        self._locked = self._valid = None

    monkeypatch.setattr(Ballot, "_start", forget)
    decided, by_the_rest = decide_apart()
    assert by_the_rest
    assert decided not in by_the_rest


def test_a_restarted_peer_does_not_vote_twice() -> None:
    four = Four()
    four.talk([0, 1, 2, 3], now=0.0, rounds=3)
    said = {body for signed in four.ballots[1].kept.own for body in [signed.body]}
    assert said
    four.opinions[1].verdict = "bad"  # it would now vote otherwise
    four.ballots[1] = four.ballot(1, four.ballots[1].kept)
    four.talk([0, 1, 2, 3], now=1.0)
    assert not four.books[0].proofs
    again = {signed.body for signed in four.ballots[1].kept.own}
    assert said <= again


def test_messages_in_any_order_with_losses_never_decide_two_blocks() -> None:
    for seed in range(60):
        rng, four = random.Random(seed), Four()
        blocks = set()
        for now in range(60):
            for i in range(4):
                decision = four.ballots[i].advance(float(now))
                if decision is not None:
                    blocks.add(digest_of_block(decision.block))
                for j in range(4):
                    for signed in four.ballots[i].statements:
                        if rng.random() < 0.2:
                            statement = four.books[j].read(signed)
                            assert isinstance(statement, Proposed | Voted)
                            four.ballots[j].hear(signed, statement)
        assert len(blocks) == 1
