"""One peer's side of a conversation: what it makes of what it is told, and what it tells."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, bounds, chain
from outerstep.coordination.gossip import peer as peer_module
from outerstep.coordination.gossip.book import Book
from outerstep.coordination.gossip.meaning import anywhere
from outerstep.simulate.gossip import Registry
from outerstep.statements import (
    AnyStatement,
    Beat,
    Block,
    Change,
    Converse,
    Decision,
    Member,
    Offered,
    Ownership,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    Withdrawal,
    digest_of_block,
    withdrawal_body,
)

RUN, BASE, SIZES = "a-run", "0" * 32, (100, 50)


class Circle:
    """Four members, two fragments; `peer` is p0, and the others are their keys."""

    def __init__(self, keepsake: Keepsake | None = None, rules: GossipRules | None = None, **facts: Any) -> None:
        self.registry = Registry()
        pairs = {name: self.registry.enter(name) for name in ("p0", "p1", "p2", "p3", "q")}
        self.books = {name: Book(RUN, key, sign, self.registry.verify) for name, (key, sign) in pairs.items()}
        self.keys = {name: key for name, (key, _) in pairs.items()}
        self.signers = {name: sign for name, (_, sign) in pairs.items()}
        self.members = tuple(Member(peer_id=name, key=self.keys[name]) for name in ("p0", "p1", "p2", "p3"))
        founded = chain.found(self.members[0], 2)
        self.state = chain.after(Change(height=1, parent=founded.tip, members=self.members), founded)
        self.peer = GossipPeer(
            RUN,
            self.members[0],
            self.signers["p0"],
            self.registry.verify,
            rules or GossipRules(heartbeat_timeout_s=10.0),
            keepsake or Keepsake(run_id=RUN, state=self.state),
            SIZES,
            0.0,
            **facts,
        )

    def say(self, name: str, statement: AnyStatement) -> Signed:
        return self.books[name].write(statement)

    def tell(self, *statements: Signed, now: float = 1.0, teller: str = "", **facts: Any) -> None:
        told = {"run_id": RUN, "sender": "p9", "height": 1, "statements": statements, **facts}
        self.peer.hear(Converse(**told), now, teller)

    def decision(self, block: Block, *voters: str) -> Decision:
        vote = Voted(run_id=RUN, height=block.height, turn=0, kind="precommit", block=digest_of_block(block))
        return Decision(block=block, votes=tuple(self.say(name, vote) for name in voters or ("p1", "p2", "p3")))

    def change(self, *names: str) -> Change:
        state = self.peer.state
        members = tuple(member for member in self.members if member.peer_id in names)
        return Change(height=state.height + 1, parent=state.tip, members=members)

    def decide(self, block: Block, now: float = 1.0) -> Decision:
        decision = self.decision(block)
        self.tell(decisions=(decision,), now=now)
        assert self.peer.state.height == block.height
        return decision

    def round(self, fragment: int = 0, digests: str = "abc") -> Round:
        """Of p1, p2 and p3."""
        state = self.peer.state
        version = state.versions[fragment] + 1
        offers = tuple(
            self.say(name, offered(fragment=fragment, version=version, sequence=version, digest=d * 64))
            for name, d in zip(("p1", "p2", "p3"), digests, strict=True)
        )
        return Round(
            height=state.height + 1,
            parent=state.tip,
            fragment=fragment,
            version=version,
            base_hash=BASE,
            offers=offers,
        )

    def lie(self, name: str) -> Proof:
        first, second = (self.say(name, offered(digest=d * 64, sequence=99)) for d in "de")
        return Proof(first=first, second=second)

    @property
    def own_beat(self) -> Beat:
        said = self.peer.book.read(self.peer.beats()[0])
        assert isinstance(said, Beat)
        return said


def offered(**facts: Any) -> Offered:
    fragment = facts.get("fragment", 0)
    usual = {
        "run_id": RUN,
        "fragment": 0,
        "version": 1,
        "sequence": 1,
        "digest": "a" * 64,
        "size_bytes": SIZES[fragment] if fragment < 2 else 1,
        "base_hash": BASE,
        "steps": 1,
    }
    return Offered(**{**usual, **facts})


def beat(name: str, number: int = 1, **facts: Any) -> Beat:
    return Beat(**{"run_id": RUN, "peer_id": name, "incarnation": 1, "number": number, "address": "h:1", **facts})


@pytest.fixture
def circle() -> Circle:
    return Circle()


class TestItsBeat:
    def test_says_who_and_where_it_is_and_how_far(self) -> None:
        owner = Ownership(key="e" * 64, signature=bytes(64))
        circle = Circle(address="h:7", fingerprint="f", owner=owner)
        circle.peer.note_progress(5, 2.5, 0.25)
        circle.peer.hold_anchor(0, 3, "1" * 32)
        circle.peer.belong(1.0)
        assert circle.own_beat == beat(
            "p0",
            number=2,
            address="h:7",
            fingerprint="f",
            height=1,
            step=5,
            steps_per_second=2.5,
            loss=0.25,
            owner=owner,
        )
        circle.peer.hold_anchor(1, 4, "2" * 32)
        circle.peer.tick(2.0)
        assert circle.own_beat.held == ((3, "1" * 32), (4, "2" * 32)), "once it holds all of them"
        assert circle.own_beat.number == 3

    def test_in_the_beginning_it_only_watches(self, circle: Circle) -> None:
        assert circle.peer.stirred
        assert circle.own_beat == beat("p0", address="p0", wants="watch", height=1)

    def test_its_wish_is_told_at_once(self, circle: Circle) -> None:
        circle.peer.stirred = False
        circle.peer.leave(1.0)
        assert circle.peer.stirred
        assert (circle.peer.wants, circle.own_beat.wants) == ("leave", "leave")

    def test_an_invitation_is_shown_where_one_is_needed(self) -> None:
        inviter = Circle().keys["p1"]
        assert Circle(invitation="0" * 128).own_beat.invitation is UNSET
        rules = GossipRules(inviter=inviter)
        assert Circle(rules=rules, invitation="0" * 128).own_beat.invitation == "0" * 128
        assert Circle(rules=rules).own_beat.invitation is UNSET

    def test_an_owner_is_named_where_the_protocol_has_them(self) -> None:
        owner = Ownership(key="e" * 64, signature=bytes(64))
        assert Circle(rules=GossipRules(protocol=1), owner=owner).own_beat.owner is UNSET
        assert Circle(rules=GossipRules(protocol=2), owner=owner).own_beat.owner == owner

    def test_after_a_restart_it_counts_from_its_new_incarnation(self) -> None:
        state = Circle().state
        circle = Circle(Keepsake(run_id=RUN, state=state, incarnation=4))
        assert (circle.own_beat.incarnation, circle.peer.keepsake.incarnation) == (4, 4)


class TestWhatItIsTold:
    def test_of_another_run_nothing(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", beat("p1")), run_id="another")
        assert circle.peer.contacts == {}

    def test_a_beat_is_remembered_whoever_passes_it_on(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", beat("p1")), circle.say("p0", beat("p0", 50)))
        assert circle.peer.contacts == {circle.keys["p1"]: beat("p1")}, "its own it knows"
        for name, number in (("p1", 1), ("p0", 50)):
            assert circle.peer.book.is_settled(circle.say(name, beat(name, number)), 1), "once is enough"
        assert circle.peer.beats()[1:] == (circle.say("p1", beat("p1")),)
        assert circle.peer.silent_s(circle.keys["p1"], 5.0) == 4.0
        assert circle.peer.silent_s(circle.keys["p2"], 5.0) == 5.0

    def test_what_nobody_signed_is_blamed_on_the_teller(self, circle: Circle) -> None:
        forged = replace(circle.say("p1", beat("p1")), signature=bytes(64))
        circle.tell(forged, teller="t")
        circle.tell(forged)
        assert circle.peer.refusals.counts == {"t": 1, "p9": 1}
        assert "nobody signed" in circle.peer.refusals.news()[0].why

    def test_what_is_signed_and_cannot_be_is_blamed_on_its_author(self) -> None:
        circle = Circle(can_call=lambda one: one.address != "nowhere")
        circle.tell(circle.say("p1", beat("p1", address="nowhere")))
        circle.tell(circle.say("q", beat("q", held=((1, BASE),))))
        circle.tell(circle.say("p2", offered(fragment=2)))
        assert circle.peer.refusals.counts == {"p1": 1, circle.keys["q"][:16]: 1, "p2": 1}
        assert circle.peer.contacts == {}
        assert circle.peer.missing() == {}

    def test_of_strangers_only_beats_count(self, circle: Circle) -> None:
        circle.tell(circle.say("q", offered()))
        assert circle.peer.missing() == {}
        assert circle.peer.refusals.counts == {}

    def test_an_offer_is_wanted_until_its_bytes_are_here(self, circle: Circle) -> None:
        says = offered(fragment=1)
        circle.tell(circle.say("p1", says))
        assert circle.peer.missing() == {"a" * 64: (says, circle.keys["p1"])}
        assert circle.peer.wanted() == {"a" * 64: (50, circle.keys["p1"])}
        assert circle.peer.needed() == {"a" * 64}
        circle.peer.hold("a" * 64, 1.0, good=True)
        assert circle.peer.wanted() == {}
        assert circle.peer.needed() == {"a" * 64}

    def test_a_liars_offer_is_not_wanted(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", offered()))
        circle.tell(proofs=(circle.lie("p1"),))
        assert circle.peer.wanted() == {}

    def test_bytes_that_come_are_noted(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", offered()))
        circle.peer.progressed("a" * 64, 7.0)
        assert [offer.tried_at for offer in circle.peer._offers] == [7.0]

    def test_what_is_settled_is_not_looked_at_again_at_this_height(
        self, circle: Circle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[Signed] = []
        listen = circle.peer._listen

        def count(signed: Signed, now: float, teller: str) -> bool:
            looked.append(signed)
            return listen(signed, now, teller)

        monkeypatch.setattr(circle.peer, "_listen", count)
        one, early = circle.say("p1", offered()), circle.say("p1", vote(height=9))
        for _ in range(2):
            circle.tell(one, early)
        assert looked == [one, early]
        circle.decide(circle.change("p0", "p1", "p2"))
        circle.tell(one)
        assert looked[2:] == [one]

    def test_what_the_ballot_cannot_use_yet_is_looked_at_again(self, circle: Circle) -> None:
        far = circle.say("p1", vote(turn=999))
        circle.tell(far)
        assert not circle.peer.book.is_settled(far, 1)
        near = circle.say("p1", vote())
        circle.tell(near)
        assert circle.peer.book.is_settled(near, 1)

    def test_a_lie_that_it_hears_itself_stirs_it_and_is_passed_on(self, circle: Circle) -> None:
        for digest in "ab":
            circle.peer.stirred = False
            circle.tell(circle.say("p1", offered(digest=digest * 64)))
        assert circle.peer.stirred
        assert [proof.first.author for proof in circle.peer.say_to(1).proofs] == [circle.keys["p1"]]
        circle.peer.stirred = False
        circle.tell(circle.say("p1", offered(digest="c" * 64)))
        assert not circle.peer.stirred, "once is enough"

    def test_a_proof_is_kept_and_passed_on_and_a_false_one_blamed_on_the_teller(self, circle: Circle) -> None:
        proof = circle.lie("p1")
        circle.peer.stirred = False
        circle.tell(proofs=(Proof(first=proof.first, second=proof.first),))
        assert (circle.peer.refusals.counts, circle.peer.stirred) == ({"p9": 1}, False)
        circle.tell(proofs=(circle.lie("q"),))
        assert circle.peer.say_to(1).proofs == (), "of strangers none is kept"
        circle.tell(proofs=(proof,))
        assert circle.peer.stirred
        assert circle.peer.say_to(1).proofs == (proof,)
        assert circle.peer.refusals.counts == {"p9": 1}

    def test_a_proposal_that_cannot_be_carried_out_is_refused_and_its_turn_skipped(self, circle: Circle) -> None:
        nothing = Change(height=2, parent=circle.state.tip, members=circle.members)
        turn = next(t for t in range(4) if circle.peer._ballot.proposer(t) == circle.keys["p2"])
        circle.tell(circle.say("p2", Proposed(run_id=RUN, height=2, turn=turn, block=nothing)))
        assert circle.peer.refusals.counts == {"p2": 1}
        assert circle.peer._ballot._void == {turn}
        assert circle.peer._ballot.blocks == []


def vote(height: int = 2, turn: int = 0, kind: Literal["prevote", "precommit"] = "prevote") -> Voted:
    return Voted(run_id=RUN, height=height, turn=turn, kind=kind, block="")


class TestWithdrawals:
    """p1 is the inviter."""

    def circle(self) -> Circle:
        return Circle(rules=GossipRules(inviter=Circle().keys["p1"], heartbeat_timeout_s=10.0))

    def withdrawal(self, circle: Circle, by: str = "p1") -> Withdrawal:
        signature = circle.signers[by](withdrawal_body(RUN, "p3", circle.keys["p3"])).hex()
        return Withdrawal(peer_id="p3", key=circle.keys["p3"], signature=signature)

    def test_the_inviters_are_kept_and_passed_on(self) -> None:
        circle = self.circle()
        assert circle.peer.say_to(1).withdrawn is UNSET
        circle.peer.stirred = False
        circle.tell(withdrawn=(self.withdrawal(circle, by="p2"),))
        assert (circle.peer.refusals.counts, circle.peer.stirred) == ({"p9": 1}, False)
        circle.tell(withdrawn=(self.withdrawal(circle),))
        assert circle.peer.stirred
        assert circle.peer.say_to(1).withdrawn == (self.withdrawal(circle),)

    def test_what_a_block_has_said_is_passed_on_no_more(self) -> None:
        circle = self.circle()
        circle.tell(withdrawn=(self.withdrawal(circle),))
        block = replace(circle.change("p0", "p1", "p2"), withdrawn=(self.withdrawal(circle),))
        circle.decide(block)
        assert circle.peer.say_to(2).withdrawn is UNSET
        circle.peer.stirred = False
        circle.tell(withdrawn=(self.withdrawal(circle),))
        assert not circle.peer.stirred
        assert circle.peer.say_to(2).withdrawn is UNSET


class TestDecisions:
    def test_one_with_a_quorum_is_carried_out_and_can_be_taken_once(self, circle: Circle) -> None:
        before = circle.own_beat.number
        circle.peer.stirred = False
        block = circle.change("p0", "p1", "p2")
        decision = circle.decide(block)
        assert circle.peer.state == chain.after(block, circle.state)
        assert circle.peer.stirred
        assert (circle.own_beat.height, circle.own_beat.number) == (2, before + 1)
        assert (circle.peer.take(), circle.peer.take()) == (decision, None)

    def test_one_without_is_refused_and_blamed_on_the_teller(self, circle: Circle) -> None:
        circle.tell(decisions=(circle.decision(circle.change("p0", "p1", "p2"), "p1", "p2"),), teller="t")
        assert (circle.peer.state.height, circle.peer.refusals.counts) == (1, {"t": 1})
        assert "it has no quorum" in circle.peer.refusals.news()[0].why
        circle.tell(decisions=(circle.decision(circle.change("p0", "p1", "p2", "p3")),), teller="t")
        assert (circle.peer.state.height, circle.peer.refusals.counts) == (1, {"t": 2})
        assert "changes nothing" in circle.peer.refusals.news()[0].why

    def test_those_that_are_known_or_come_too_early_are_passed_over(self, circle: Circle) -> None:
        first = circle.decide(circle.change("p0", "p1", "p2"))
        block = circle.change("p0", "p1")
        later = circle.decision(replace(block, height=4))
        circle.tell(decisions=(first, later))
        assert circle.peer.state.height == 2
        assert circle.peer.refusals.counts == {}

    def test_who_is_behind_is_told_them_in_order(self, circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
        made = [circle.decide(circle.round()) for _ in range(4)]
        assert circle.peer.say_to(1).decisions == tuple(made)
        assert circle.peer.say_to(3).decisions == tuple(made[2:])
        assert circle.peer.say_to(5).decisions == ()
        assert circle.peer.say_to(0).decisions == (), "what comes first is not remembered"
        monkeypatch.setattr(peer_module, "MOST_DECISIONS", 3)
        assert circle.peer.say_to(1).decisions == tuple(made[:3])
        monkeypatch.setattr(bounds, "MOST_DECISION_BYTES", bounds.decision_bytes(made[0]) * 2)
        assert circle.peer.say_to(1).decisions == tuple(made[:2])
        assert circle.peer.say_to(2).decisions == tuple(made[1:3])

    def test_so_many_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer_module, "REMEMBERED_DECISIONS", 3)
        circle = Circle()
        made = [circle.decide(circle.round()) for _ in range(5)]
        assert circle.peer.say_to(3).decisions == tuple(made[2:])
        assert circle.peer.say_to(2).decisions == ()

    def test_statements_about_the_ballot_and_offers_are_for_those_at_the_same_height(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", offered()), circle.say("p1", vote()), circle.say("p1", beat("p1")))
        here = [type(circle.peer.book.read(one)) for one in circle.peer.say_to(1).statements]
        assert sorted(kind.__name__ for kind in here) == ["Beat", "Beat", "Offered", "Voted"]
        circle.peer.offer(1, "b" * 64, BASE, 1.0, steps=1)
        authors = [one.author for one in circle.peer.say_to(1).statements]
        assert authors == sorted(authors, key=lambda author: author != circle.keys["p0"]), "its own come first"
        there = [type(circle.peer.book.read(one)) for one in circle.peer.say_to(0).statements]
        assert there == [Beat, Beat]
        said = circle.peer.say_to(0)
        assert (said.run_id, said.sender, said.height) == (RUN, "p0", 1)

    def test_a_round_is_remembered_with_the_one_before_of_each_fragment(self, circle: Circle) -> None:
        blocks = []
        for fragment in (0, 1, 0, 0, 1):
            blocks.append(circle.round(fragment))
            circle.decide(blocks[-1])
        assert circle.peer.recent_rounds() == blocks[-4:]

    def test_the_bytes_of_a_decided_round_are_wanted_until_it_is_adopted(self, circle: Circle) -> None:
        circle.decide(circle.round(digests="abc"))
        assert set(circle.peer.wanted()) == {"a" * 64, "b" * 64, "c" * 64}
        circle.peer.hold("b" * 64, 1.0, good=True)
        assert set(circle.peer.wanted()) == {"a" * 64, "c" * 64}
        circle.peer.hold_anchor(0, 1, "1" * 32)
        assert circle.peer.wanted() == {}

    def test_the_bytes_of_each_fragments_last_two_rounds_are_kept(self, circle: Circle) -> None:
        for digests in ("abc", "def", "123"):
            circle.decide(circle.round(digests=digests))
        assert circle.peer.needed() == {d * 64 for d in "def123"}
        circle.decide(circle.round(1, digests="789"))
        assert circle.peer.needed() == {d * 64 for d in "def123789"}

    def test_a_convict_is_told_of_for_a_while_after_it_is_gone(self, circle: Circle) -> None:
        proof = circle.lie("p3")
        circle.tell(proofs=(proof,))
        circle.decide(replace(circle.change("p0", "p1", "p2"), proofs=(proof,)))
        heights = []
        while circle.peer.say_to(0).proofs:
            heights.append(circle.peer.state.height)
            names = ("p1", "p2") if len(circle.peer.state.members) == 3 else ("p0", "p1", "p2")
            members = tuple(member for member in circle.members if member.peer_id in names)
            state = circle.peer.state
            circle.peer._settle(
                circle.decision(Change(height=state.height + 1, parent=state.tip, members=members)), 1.0
            )
        assert heights == [2, 3, 4, 5]
        assert circle.peer.book.proofs == {}

    def test_a_member_is_told_of_before_one_that_is_gone(self, circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
        gone, here = circle.lie("p3"), circle.lie("p2")
        circle.tell(proofs=(gone, here))
        assert circle.peer.say_to(0).proofs == (gone, here)
        circle.decide(replace(circle.change("p0", "p1", "p2"), proofs=(gone,)))
        assert circle.peer.say_to(0).proofs == (here, gone)
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES_TOLD", bounds.proof_bytes(here))
        assert circle.peer.say_to(0).proofs == (here,)
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES_TOLD", 10**6)
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 1)
        assert circle.peer.say_to(0).proofs == (here,)


class TestOffering:
    def test_it_is_numbered_and_signed_and_its_bytes_are_here(self, circle: Circle) -> None:
        circle.peer.stirred = False
        says = circle.peer.offer(1, "a" * 64, "1" * 32, 1.0, steps=3, samples=4, tokens=5)
        assert says == offered(fragment=1, base_hash="1" * 32, steps=3, samples=4, tokens=5)
        assert circle.peer.stirred
        assert circle.peer.wanted() == {}
        assert circle.peer.rounds_offered() == frozenset({1})
        other = offered(fragment=1, digest="f" * 64)
        assert not circle.peer.book.enter(circle.say("p0", other), other), "it may say nothing else under this number"
        again = circle.peer.offer(1, "b" * 64, "1" * 32, 1.0, steps=3)
        assert (again.sequence, again.samples, again.tokens) == (2, 0, 0)
        assert circle.peer.keepsake.sequences == (0, 2)
        told = [circle.peer.book.read(one) for one in circle.peer.say_to(1).statements]
        assert [one for one in told if isinstance(one, Offered)] == [says, again]

    def test_after_a_restart_the_numbers_go_on(self) -> None:
        circle = Circle(Keepsake(run_id=RUN, state=Circle().state, sequences=(7, 8)))
        assert circle.peer.offer(1, "a" * 64, BASE, 1.0, steps=1).sequence == 9
        assert circle.peer.rounds_offered() == frozenset({1})

    def test_a_round_that_others_have_offered_to_waits_for_this_member(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", offered(fragment=1)))
        assert circle.peer.rounds_waiting() == frozenset({(1, 1)})
        circle.peer.offer(1, "b" * 64, BASE, 1.0, steps=1)
        assert circle.peer.rounds_waiting() == frozenset()
        circle.tell(circle.say("p1", offered(fragment=0, sequence=2)))
        circle.decide(circle.change("p1", "p2", "p3"))
        assert circle.peer.rounds_waiting() == frozenset(), "a stranger is not waited for"

    def test_what_it_offered_before_it_was_let_in_counts_once_it_is(self) -> None:
        outside = Circle()
        state = replace(outside.state, members=outside.members[1:])
        circle = Circle(Keepsake(run_id=RUN, state=state))
        says = circle.peer.offer(0, "a" * 64, BASE, 1.0, steps=1)
        circle.decide(circle.change("p1", "p2"))
        assert says in [circle.peer.book.read(one) for one in circle.peer.say_to(2).statements]


class TestKeepsake:
    def test_holds_all_that_it_may_not_say_differently(self, circle: Circle) -> None:
        circle.peer.belong(1.0)
        assert circle.peer.keepsake == Keepsake(run_id=RUN, state=circle.state, sequences=(0, 0))
        circle.peer.stirred = False
        turn = circle.peer._ballot.proposer(0)
        name = next(name for name, key in circle.keys.items() if key == turn)
        block = replace(circle.change("p0", "p1", "p2"), proofs=(circle.lie("p3"),))
        circle.tell(circle.say(name, Proposed(run_id=RUN, height=2, turn=0, block=block)))
        kept = circle.peer.keepsake
        assert len(kept.ballots.own) == 1
        assert circle.peer.stirred
        again = Circle(kept)
        assert again.peer.keepsake == kept

    def test_where_it_has_forgotten_what_it_said_it_abstains_until_that_height_is_decided(self) -> None:
        circle = Circle(Keepsake(run_id=RUN, state=Circle().state, abstains_at=2))
        assert circle.peer.keepsake.abstains_at == 2
        assert circle.peer._ballot._key is None
        circle.decide(circle.change("p0", "p1", "p2"))
        assert circle.peer.keepsake.abstains_at is UNSET
        assert circle.peer._ballot._key == circle.keys["p0"]


class TestLeaping:
    def test_all_that_was_of_earlier_heights_is_forgotten(self, circle: Circle) -> None:
        circle.decide(circle.round())
        circle.tell(circle.say("p1", offered(version=2, sequence=2, digest="d" * 64)))
        before = circle.own_beat.number
        circle.peer.stirred = False
        ahead = replace(circle.peer.state, height=9, tip="9" * 64, versions=(5, 5), members=circle.members[:3])
        circle.peer.leap(ahead, 7.0)
        assert (circle.peer.state, circle.peer.take(), circle.peer.recent_rounds()) == (ahead, None, [])
        assert circle.peer.say_to(1).decisions == ()
        assert circle.peer.needed() == set()
        assert circle.peer._ballot.height == 10
        assert circle.peer.stirred
        assert (circle.own_beat.height, circle.own_beat.number) == (9, before + 1)
        assert circle.peer.keepsake.ballots.own == ()

    def test_not_to_where_no_run_can_be(self, circle: Circle) -> None:
        for facts in ({"height": 1, "tip": "9" * 64}, {"height": 9, "versions": (1,)}, {"height": 9, "members": ()}):
            circle.peer.leap(replace(circle.state, **facts), 7.0)
            assert circle.peer.state == circle.state

    def test_a_new_member_is_given_time(self, circle: Circle) -> None:
        newcomer = Member(peer_id="q", key=circle.keys["q"])
        circle.peer.leap(replace(circle.state, height=9, members=(*circle.members, newcomer)), 50.0)
        assert not circle.peer.is_silent(newcomer.key, 60.0)
        assert circle.peer.is_silent(newcomer.key, 60.1)
        assert circle.peer.is_silent(circle.keys["p1"], 60.0)


class TestWaiting:
    def test_for_those_that_have_not_contributed(self, circle: Circle) -> None:
        assert circle.peer.waiting_for(0, 1.0) == "p0, p1, p2, p3"
        circle.tell(circle.say("p1", offered()), circle.say("p2", offered()), circle.say("p3", offered()))
        assert circle.peer.waiting_for(0, 1.0) == "p0"
        circle.peer.offer(0, "b" * 64, BASE, 1.0, steps=1)
        assert circle.peer.waiting_for(0, 1.0) == "the others' agreement"
        assert circle.peer.waiting_for(1, 1.0) == "p0, p1, p2, p3"

    def test_for_peers_with_the_same_anchor(self, circle: Circle) -> None:
        other = offered(base_hash="f" * 32)
        circle.tell(circle.say("p1", other), circle.say("p2", offered()), circle.say("p3", other))
        circle.peer.offer(0, "b" * 64, BASE, 1.0, steps=1)
        assert "same anchor: p1, p3 started from another one" in circle.peer.waiting_for(0, 1.0)

    def test_for_peers_that_are_silent(self, circle: Circle) -> None:
        circle.tell(circle.say("p2", beat("p2")), now=5.0)
        assert circle.peer.waiting_for(0, 10.1) == "p1, p3: 2 of 4 peers are heard of, 3 must agree"
        circle.tell(circle.say("p1", beat("p1")), now=5.0)
        assert circle.peer.waiting_for(0, 10.1) == "p0, p1, p2, p3"

    def test_to_be_let_in_or_for_a_place(self, circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
        assert circle.peer.is_member
        circle.decide(circle.change("p1", "p2", "p3"))
        assert not circle.peer.is_member
        assert circle.peer.waiting_for(0, 1.0) == "the other peers, to take this one in"
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 4)
        assert not circle.peer.is_full
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 3)
        assert circle.peer.is_full
        assert circle.peer.waiting_for(0, 1.0).startswith("a place: the run has 3 members")

    def test_for_more_peers(self) -> None:
        circle = Circle(rules=GossipRules(min_peers=5))
        assert "4 have joined, 5 are needed (min_peers)" in circle.peer.waiting_for(0, 1.0)
        circle = Circle(rules=GossipRules(min_peers=4))
        assert circle.peer.waiting_for(0, 1.0) == "p0, p1, p2, p3"

    def test_expelled_it_knows_so(self, circle: Circle) -> None:
        assert not circle.peer.is_expelled
        circle.decide(replace(circle.change("p1", "p2", "p3"), proofs=(circle.lie("p0"),)))
        assert circle.peer.is_expelled


def test_a_peer_that_nobody_calls_can_be_anywhere() -> None:
    assert anywhere(beat("p1", address="nowhere"))


class TestWhatFollowsFromIt:
    """A proposal that is due is waited for from the moment at which it is."""

    @staticmethod
    def has_voted(circle: Circle, height: int) -> bool:
        said = [circle.peer.book.read(one) for one in circle.peer.say_to(height - 1).statements]
        return any(isinstance(one, Voted) and one.height == height for one in said)

    def test_a_proof_alone_makes_a_change_due(self, circle: Circle) -> None:
        circle.tell(proofs=(circle.lie("p3"),), now=1.0)
        circle.peer.tick(4.9)
        assert not self.has_voted(circle, 2)
        circle.peer.tick(5.0)
        assert self.has_voted(circle, 2), "nobody has proposed it within four seconds"

    def test_a_decision_alone_begins_the_next_ballot(self, circle: Circle) -> None:
        circle.tell(proofs=(circle.lie("p2"),), now=1.0)
        circle.decide(circle.round(), now=2.0)
        circle.peer.tick(5.9)
        assert not self.has_voted(circle, 3)
        circle.peer.tick(6.0)
        assert self.has_voted(circle, 3)

    def test_one_that_was_heard_to_lie_is_told_of_for_a_while_as_well(self, circle: Circle) -> None:
        proof = circle.lie("p3")
        circle.tell(proof.first, proof.second)
        assert [one.first.author for one in circle.peer.say_to(0).proofs] == [circle.keys["p3"]]
        circle.decide(replace(circle.change("p0", "p1", "p2"), proofs=(proof,)))
        heights = []
        while circle.peer.say_to(0).proofs and circle.peer.state.height < 20:
            heights.append(circle.peer.state.height)
            names = ("p1", "p2") if len(circle.peer.state.members) == 3 else ("p0", "p1", "p2")
            circle.peer._settle(circle.decision(circle.change(*names)), 1.0)
        assert heights == [2, 3, 4, 5]

    def test_bytes_of_a_wrong_size_are_not_asked_for_whoever_proposes_them(self, circle: Circle) -> None:
        block = circle.round()
        wrong = circle.say("p1", offered(digest="f" * 64, size_bytes=SIZES[0] + 1))
        block = replace(block, offers=(wrong, *block.offers[1:]))
        proposer = next(name for name, key in circle.keys.items() if key == circle.peer._ballot.proposer(0))
        circle.tell(circle.say(proposer, Proposed(run_id=RUN, height=2, turn=0, block=block)))
        assert set(circle.peer.missing()) == {"b" * 64, "c" * 64}

    def test_an_offer_to_the_round_after_next_is_kept_over_a_leap(self, circle: Circle) -> None:
        circle.tell(circle.say("p1", offered(version=2)), circle.say("p2", offered(version=1, digest="b" * 64)))
        circle.peer.leap(replace(circle.state, height=5, tip="9" * 64, versions=(1, 0)), 2.0)
        assert set(circle.peer.missing()) == {"a" * 64}
