"""What is refused although it is well formed, and who is blamed for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from amounts import cases
from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, chain
from outerstep.coordination.gossip import names as names_module
from outerstep.coordination.gossip.book import Book
from outerstep.coordination.gossip.meaning import (
    anywhere,
    wrong_with_beat,
    wrong_with_block,
    wrong_with_offer,
    wrong_with_state,
)
from outerstep.coordination.gossip.refusals import MOST_NAMES, OTHERS, GossipRefusals
from outerstep.errors import ConfigError
from outerstep.simulate.gossip import Registry
from outerstep.simulate.gossip_nonsense import Nonsense, callable_place
from outerstep.statements import (
    MOST_PEERS,
    Beat,
    ChainState,
    Change,
    Converse,
    Member,
    Name,
    Offered,
    Ownership,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    Withdrawal,
    body_of,
    digest_of_block,
    withdrawal_body,
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


class TestBlocks:
    """What is wrong with a block, whoever looks at it."""

    def setup_method(self) -> None:
        self.four = FourPeers()
        self.book = self.four.honest[0].book
        self.change = Change(height=2, parent=self.four.state.tip, members=self.four.members[:3])

    def wrong(self, block: Change | Round) -> str:
        return wrong_with_block(block, self.four.state, self.book)

    def say(self, who: int, statement: Any) -> Signed:
        body = body_of(statement)
        return Signed(author=self.four.members[who].key, body=body, signature=self.four.signers[str(who)](body))

    def round(self, *who: int, **facts: Any) -> Round:
        offer = Offered(
            run_id=RUN,
            fragment=0,
            version=1,
            sequence=1,
            digest="a" * 64,
            size_bytes=100,
            base_hash="0" * 32,
            steps=1,
        )
        offers = tuple(self.say(i, replace(offer, **facts)) for i in who)
        return Round(height=2, parent=self.four.state.tip, fragment=0, version=1, base_hash="0" * 32, offers=offers)

    def test_a_round_is_of_offers_of_members_to_it_in_their_order(self) -> None:
        assert self.wrong(self.round(0, 1, 3)) == ""
        assert "does not follow" in self.wrong(replace(self.round(0, 1), version=2))
        assert "order" in self.wrong(self.round(1, 0))
        assert "order" in self.wrong(self.round(1, 1))
        for facts in ({"version": 2}, {"base_hash": "f" * 32}):
            assert "an offer to another one" in self.wrong(self.round(0, 1, **facts))
        good = self.round(0, 1)
        vote = self.say(1, Voted(run_id=RUN, height=2, turn=0, kind="prevote", block=""))
        assert "something else" in self.wrong(replace(good, offers=(good.offers[0], vote)))
        unsigned = replace(good.offers[1], signature=bytes(64))
        assert "something else" in self.wrong(replace(good, offers=(good.offers[0], unsigned)))
        self.four.state = replace(self.four.state, members=self.four.members[:1])
        assert "something else" in self.wrong(good)

    def test_a_change_must_change_something_and_keep_the_order(self) -> None:
        assert self.wrong(self.change) == ""
        assert "changes nothing" in self.wrong(replace(self.change, members=self.four.members))
        backwards = tuple(reversed(self.four.members[:3]))
        assert "twice, or in no order" in self.wrong(replace(self.change, members=backwards))

    def test_its_proofs_must_prove_something(self) -> None:
        votes = [self.say(3, Voted(run_id=RUN, height=2, turn=0, kind="prevote", block=b)) for b in ("", "a" * 64)]
        assert self.wrong(replace(self.change, proofs=(Proof(first=votes[0], second=votes[1]),))) == ""
        same = Proof(first=votes[0], second=votes[0])
        assert "proves nothing" in self.wrong(replace(self.change, proofs=(same,)))

    def newcomer(self, **facts: Any) -> Change:
        key, sign = self.four.registry.enter("p9")
        body = body_of(
            Beat(**{"run_id": RUN, "peer_id": "p9", "incarnation": 1, "number": 1, "address": "h:1", **facts})
        )
        applied = (Signed(author=key, body=body, signature=sign(body)),)
        return replace(self.change, members=(*self.four.members, Member(peer_id="p9", key=key)), applied=applied)

    def test_a_newcomer_must_have_asked_under_this_name(self) -> None:
        assert self.wrong(self.newcomer()) == ""
        assert "has not asked" in self.wrong(replace(self.newcomer(), applied=()))
        assert "has not asked" in self.wrong(self.newcomer(wants="watch"))
        assert "has not asked" in self.wrong(self.newcomer(peer_id="p8"))

    @pytest.mark.parametrize(("name", "key"), [("p9", "f" * 64), ("x", "own"), ("p9", "own")])
    def test_who_was_expelled_comes_back_neither_by_name_nor_by_key(self, name: str, key: str) -> None:
        own = self.four.registry.enter("p9")[0]
        gone = Member(peer_id=name, key=own if key == "own" else key)
        self.four.state = replace(self.four.state, expelled=(gone,))
        assert "is expelled" in self.wrong(self.newcomer())
        self.four.state = replace(self.four.state, expelled=(Member(peer_id="x", key="f" * 64),))
        assert self.wrong(self.newcomer()) == ""

    def test_the_name_must_be_its_own_and_its_owner_must_say_so(self) -> None:
        names = (Name(peer_id="p9", key="f" * 64),)
        self.four.state = replace(self.four.state, names=names)
        assert "bears another's name" in self.wrong(self.newcomer())
        self.four.state = replace(self.four.state, names=(Name(peer_id="x", key="f" * 64),))
        assert self.wrong(self.newcomer()) == ""
        unfounded = Ownership(key="e" * 64, signature=bytes(64))
        assert "bears another's name" in self.wrong(self.newcomer(owner=unfounded))


class TestWithdrawing:
    """p0 is the inviter."""

    def setup_method(self) -> None:
        self.four = FourPeers()
        inviter = self.four.members[0].key
        self.book = Book(RUN, inviter, self.four.signers["0"], self.four.registry.verify, inviter=inviter)
        signature = self.four.signers["0"](withdrawal_body(RUN, "p3", self.four.members[3].key)).hex()
        self.withdrawal = Withdrawal(peer_id="p3", key=self.four.members[3].key, signature=signature)

    def wrong(self, members: tuple[Member, ...], *withdrawn: Withdrawal) -> str:
        block = Change(height=2, parent=self.four.state.tip, members=members, withdrawn=withdrawn)
        return wrong_with_block(block, self.four.state, self.book)

    def test_whose_invitation_is_withdrawn_goes(self) -> None:
        assert self.wrong(self.four.members[:3], self.withdrawal) == ""
        assert "keeps a peer whose invitation it withdraws" in self.wrong(self.four.members, self.withdrawal)

    def test_only_the_inviter_withdraws(self) -> None:
        forged = replace(self.withdrawal, signature="0" * 128)
        assert "the inviter did not sign" in self.wrong(self.four.members[:3], forged)
        assert "the inviter did not sign" in self.wrong(self.four.members[:3], self.withdrawal, forged)

    def test_a_withdrawal_of_one_that_is_not_here_changes_something_once(self) -> None:
        self.four.state = replace(self.four.state, members=self.four.members[:3])
        assert self.wrong(self.four.members[:3], self.withdrawal) == ""
        self.four.state = replace(self.four.state, expelled=(self.four.members[3],))
        assert "changes nothing" in self.wrong(self.four.members[:3], self.withdrawal)


def test_an_offer_is_to_a_fragment_that_there_is() -> None:
    offer = Offered(
        run_id=RUN, fragment=1, version=1, sequence=1, digest="a" * 64, size_bytes=1, base_hash="0" * 32, steps=1
    )
    assert wrong_with_offer(offer, 2) == ""
    assert wrong_with_offer(offer, 1) == "offers to fragment 1, and the run has 1"


def test_a_state_has_so_many_members_and_names_each_once() -> None:
    state = FourPeers().state
    many = tuple(Member(peer_id=f"p{i:03d}", key=f"{i:064x}") for i in range(MOST_PEERS + 1))
    assert wrong_with_state(replace(state, members=many[:MOST_PEERS])) == ""
    assert f"names {MOST_PEERS + 1} members" in wrong_with_state(replace(state, members=many))
    assert wrong_with_state(replace(state, members=many[:1])) == ""
    names = tuple(Name(peer_id=f"p{i:03d}", key=f"{i:064x}") for i in range(names_module.MOST_NAMES + 1))
    assert wrong_with_state(replace(state, names=names[:-1])) == ""
    assert wrong_with_state(replace(state, names=UNSET)) == ""
    assert "where a run has" in wrong_with_state(replace(state, names=names))
    assert "each once" in wrong_with_state(replace(state, names=(*names[:2], names[0])))


def test_a_beat_without_a_loss_is_possible_and_shows_what_it_can_of_a_long_place() -> None:
    good = Beat(run_id=RUN, peer_id="p", incarnation=1, number=1, address="h:1")
    assert wrong_with_beat(good, 2, callable_place) == ""
    long = replace(good, address="x" * 99, fingerprint="f" * 20)
    assert wrong_with_beat(long, 2, lambda beat: False) == (
        f"names a place that cannot be called: {'x' * 80!r}, fingerprint {'f' * 20!r}"
    )
    assert wrong_with_beat(replace(long, fingerprint="f" * 21), 2, lambda beat: False).endswith(repr("f" * 16 + "…"))


def test_rules_that_cannot_be_are_refused() -> None:
    assert GossipRules(min_peers=1, attackers=0, protocol=1, heartbeat_timeout_s=0.1).inviter == ""
    assert GossipRules(protocol=2, inviter="0" * 64).inviter == "0" * 64
    for facts, why in (
        ({"min_peers": 0}, "min_peers must be at least 1, got 0"),
        ({"attackers": -1}, "attackers must be at least 0, got -1"),
        ({"protocol": 99}, "protocol must be one of .* got 99"),
        ({"heartbeat_timeout_s": 0.0}, "must be > 0 s, got 0"),
        ({"heartbeat_timeout_s": float("inf")}, "must be > 0 s, got inf"),
        ({"heartbeat_timeout_s": float("nan")}, "must be > 0 s, got nan"),
    ):
        with pytest.raises(ConfigError, match=why):
            GossipRules(**facts)  # type: ignore[arg-type]


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
