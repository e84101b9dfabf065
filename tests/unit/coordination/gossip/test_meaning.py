"""What is refused although it is well formed, and who is blamed for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from amounts import cases
from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, chain
from outerstep.coordination.gossip.meaning import anywhere, wrong_with_beat, wrong_with_state
from outerstep.coordination.gossip.refusals import MOST_NAMES, OTHERS, GossipRefusals
from outerstep.simulate.gossip import Registry
from outerstep.simulate.gossip_nonsense import Nonsense, callable_place
from outerstep.statements import (
    Beat,
    ChainState,
    Change,
    Converse,
    Member,
    Proposed,
    Signed,
    Voted,
    body_of,
    digest_of_block,
)

RUN = "a-run"


class FourPeers:
    """p0 … p3, of which p3 says what it likes; and `newcomer`, who may be anybody."""

    def __init__(self) -> None:
        self.registry = Registry()
        pairs = [self.registry.enter(f"p{i}") for i in range(4)]
        self.members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs))
        founded = chain.found(self.members[0], 1)
        self.state = chain.after(Change(height=1, parent=founded.tip, members=self.members), founded)
        self.signers = dict(zip("0123", [sign for _, sign in pairs], strict=True))
        self.honest = [self.peer(i) for i in range(3)]

    def peer(self, number: int) -> GossipPeer:
        keepsake = Keepsake(run_id=RUN, state=self.state)
        sign, verify = self.signers[str(number)], self.registry.verify
        peer = GossipPeer(
            *(RUN, self.members[number], sign, verify, GossipRules(), keepsake, [100], 0.0), can_call=callable_place
        )
        peer.belong(0.0)
        peer.hold_anchor(0, 0, "0" * 32)
        return peer

    def says(self, statement: Any) -> Signed:
        """p3 signs it."""
        body = body_of(statement)
        return Signed(author=self.members[3].key, body=body, signature=self.signers["3"](body))

    def tell(self, *statements: Signed, now: float = 1.0, **more: Any) -> None:
        for peer in self.honest:
            told = Converse(run_id=RUN, sender="p3", height=peer.state.height, statements=statements, **more)
            peer.hear(told, now)

    def talk(self, now: float) -> None:
        for _ in range(6):
            for one in self.honest:
                one.tick(now)
                for other in self.honest:
                    if other is not one:
                        other.hear(one.say_to(other.state.height), now)
                        for digest in other.wanted():
                            other.hold(digest, now, good=True)


@cases(60)
@given(st.integers(0, 2**32))
def test_nonsense_of_a_member_is_blamed_on_it_alone_and_a_round_is_decided_all_the_same(seed: int) -> None:
    four = FourPeers()
    nonsense = Nonsense(RUN, "p3", four.members[3].key, four.signers["3"], random.Random(seed))
    for i, peer in enumerate(four.honest):
        peer.offer(0, str(i) * 64, "0" * 32, 0.0, steps=1)
    for turn in range(4):
        block = nonsense.block(four.state)
        proposed = Proposed(run_id=RUN, height=four.state.height + 1, turn=turn, block=block)
        more = {"proofs": nonsense.proofs(), "decisions": nonsense.decisions(four.state)}
        four.tell(*nonsense.statements(8), four.says(proposed), *nonsense.statements(2), **more)
    four.talk(1.0)
    four.talk(200.0)  # p3 is silent by now: the others go on without it
    assert [peer.state.versions for peer in four.honest] == [(1,)] * 3
    for peer in four.honest:
        assert set(peer.refusals.counts) == {"p3"}
        assert [member.peer_id for member in peer.state.members] == ["p0", "p1", "p2"]


def test_a_turn_whose_proposer_says_what_cannot_be_is_not_waited_for() -> None:
    four = FourPeers()
    height = four.state.height + 1
    turn = next(t for t in range(4) if four.honest[0]._ballot.proposer(t) == four.members[3].key)
    backwards = Change(height=height, parent=four.state.tip, members=tuple(reversed(four.members)))
    votes = [
        Signed(author=peer.member.key, body=body, signature=four.signers[peer.member.peer_id[1]](body))
        for peer in four.honest
        for kind in ("prevote", "precommit")
        for t in range(turn)
        for body in [body_of(Voted(run_id=RUN, height=height, turn=t, kind=kind, block=""))]  # type: ignore[arg-type]
    ]
    one = four.honest[0]
    one.hear(Converse(run_id=RUN, sender="p1", height=height - 1, statements=tuple(votes)), 1.0)
    assert one._ballot.turn == turn
    proposed = Proposed(run_id=RUN, height=height, turn=turn, block=backwards)
    one.offer(0, "0" * 64, "0" * 32, 1.0, steps=1)
    one.hear(Converse(run_id=RUN, sender="p3", height=height - 1, statements=(four.says(proposed),)), 1.0)
    one.tick(1.0)
    own = [one.book.read(signed) for signed in one.keepsake.ballots.own]
    assert Voted(run_id=RUN, height=height, turn=turn, kind="prevote", block="") in own
    assert digest_of_block(backwards) not in {digest_of_block(block) for block in one._ballot.blocks}
    assert proposed not in [one.book.read(signed) for signed in one.say_to(height - 1).statements]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"address": "nowhere"}, "names a place that cannot be called: 'nowhere', fingerprint none"),
        ({"address": "nowhere", "fingerprint": "f" * 99}, "fingerprint 'ffffffffffffffff…'"),
        ({"held": ((0, "0" * 32),)}, "holds 1 fragments, and the run has 2"),
        ({"loss": float("nan")}, "a loss of nan"),
        ({"steps_per_second": float("inf")}, "reports inf steps/s"),
    ],
)
def test_a_beat_must_be_possible(facts: dict[str, Any], why: str) -> None:
    good = Beat(run_id=RUN, peer_id="p", incarnation=1, number=1, address="h:1", held=((0, "0" * 32),) * 2, loss=0.5)
    assert wrong_with_beat(good, 2, callable_place) == ""
    assert wrong_with_beat(replace(good, held=()), 2, anywhere) == ""
    assert why in wrong_with_beat(replace(good, **facts), 2, callable_place)


def test_a_state_must_be_possible() -> None:
    state: ChainState = FourPeers().state
    assert wrong_with_state(state) == wrong_with_state(state, 1) == ""
    assert wrong_with_state(state, 2) == "names a run of 1 fragments, not 2"
    assert wrong_with_state(replace(state, versions=())) == "names a run of 0 fragments"
    assert "names 0 members" in wrong_with_state(replace(state, members=()))
    assert "twice" in wrong_with_state(replace(state, members=(*state.members, state.members[-1])))
    namesake = replace(state.members[0], peer_id="p9")
    assert "twice" in wrong_with_state(replace(state, members=(*state.members, namesake)))


def test_refusals_are_told_ever_more_rarely_and_names_are_bounded() -> None:
    refusals = GossipRefusals()
    for _ in range(9):
        refusals.note("x", "said no")
    assert [(one.who, one.count) for one in refusals.news()] == [("x", 1), ("x", 2), ("x", 4), ("x", 8)]
    assert refusals.news() == []
    for number in range(2 * MOST_NAMES):
        refusals.note(f"name-{number}", "y" * 10_000)
    assert len(refusals.counts) == MOST_NAMES + 1
    assert refusals.counts[OTHERS] == MOST_NAMES + 1
    assert max(len(one.why) for one in refusals.news()) == 200
