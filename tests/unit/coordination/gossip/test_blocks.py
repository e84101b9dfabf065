"""Which block a peer would propose, and which it is for: one view, four members, no talk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.gossip import GossipRules, bounds, chain
from outerstep.coordination.gossip.blocks import Blocks
from outerstep.coordination.gossip.book import Book
from outerstep.coordination.gossip.heard import Acquaintances, Offers
from outerstep.simulate.gossip import Registry
from outerstep.statements import (
    AnyStatement,
    Beat,
    ChainState,
    Change,
    Member,
    Offered,
    Proof,
    Round,
    Signed,
    Withdrawal,
    body_of,
    withdrawal_body,
)

RUN, BASE = "a-run", "0" * 32


@dataclass
class Me:
    state: ChainState
    member: Member
    wants: str = "belong"
    anchors: dict[int, tuple[int, str]] = field(default_factory=dict)


class View:
    """Of p0, with p1 … p3; all have been heard at 0 s, and may be silent for 10 s."""

    def __init__(self, fragments: int = 1, count: int = 4, **rules: Any) -> None:
        self.registry = Registry()
        pairs = [self.registry.enter(f"p{i}") for i in range(count)]
        self.members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs))
        state = chain.found(self.members[0], fragments)
        state = chain.after(Change(height=1, parent=state.tip, members=self.members), state)
        self.rules = GossipRules(heartbeat_timeout_s=10.0, **rules)
        self.me = Me(state, self.members[0], anchors=dict.fromkeys(range(fragments), (0, BASE)))
        self.book = Book(RUN, pairs[0][0], pairs[0][1], self.registry.verify, 2, fragments, self.rules.inviter)
        self.book.attend_to([member.key for member in self.members])
        self.offers = Offers((100,) * fragments)
        self.others = Acquaintances(self.members, 0.0, 10.0)
        self.blocks = Blocks(self.me, self.rules, self.book, self.offers, self.others, lambda beat: True, 0.0)

    def say(self, name: str, statement: AnyStatement) -> Signed:
        key, sign = self.registry.enter(name)
        body = body_of(statement)
        return Signed(author=key, body=body, signature=sign(body))

    def offer(self, name: str, now: float = 1.0, condition: str = "good", **facts: Any) -> Offered:
        says = Offered(
            **{
                "run_id": RUN,
                "fragment": 0,
                "version": 1,
                "sequence": 1,
                "digest": self.key(name),
                "size_bytes": 100,
                "base_hash": BASE,
                "steps": 1,
                **facts,
            }
        )
        self.offers.hear(self.say(name, says), says, self.me.state.versions[says.fragment], now)
        if condition != "missing":
            self.offers.hold(says.digest, good=condition == "good")
        return says

    def beats(self, name: str, now: float, number: int = 1, peer_id: str = "", **facts: Any) -> Signed:
        facts = {"address": "h:1", **facts}
        said = Beat(run_id=RUN, peer_id=peer_id or name, incarnation=1, number=number, **facts)
        signed = self.say(name, said)
        self.others.greet(signed, said, now)
        return signed

    def key(self, name: str) -> str:
        return self.registry.enter(name)[0]

    def lies(self, name: str) -> Proof:
        first, second = (
            Offered(
                run_id=RUN,
                fragment=0,
                version=9,
                sequence=9,
                digest=d * 64,
                size_bytes=1,
                base_hash=BASE,
                steps=1,
            )
            for d in "ab"
        )
        proof = Proof(first=self.say(name, first), second=self.say(name, second))
        assert self.book.convict(proof)
        return proof

    def contributors(self, now: float = 1.0, fragment: int = 0) -> list[str] | None:
        """To the round that it would propose; None: none."""
        made = self.blocks.make(now)
        if not isinstance(made, Round):
            return None
        assert made.fragment == fragment
        names = {member.key: member.peer_id for member in self.members}
        return [names[signed.author] for signed in made.offers]

    def remaining(self, now: float = 1.0) -> list[str] | None:
        """The members after the change that it would propose; None: none."""
        made = self.blocks.make(now)
        return [member.peer_id for member in made.members] if isinstance(made, Change) else None


class TestRounds:
    def test_as_many_members_as_a_round_needs_are_enough(self) -> None:
        view = View(min_peers=4)
        for name in ("p0", "p1", "p2", "p3"):
            view.offer(name)
        assert view.contributors() == ["p0", "p1", "p2", "p3"]

    def test_it_is_due_when_all_have_contributed(self) -> None:
        view = View()
        for name in ("p3", "p0", "p2"):
            view.offer(name)
            assert view.blocks.make(1.0) is None
        view.offer("p1")
        made = view.blocks.make(1.0)
        assert isinstance(made, Round)
        assert (made.height, made.parent, made.fragment, made.version, made.base_hash) == (
            2,
            view.me.state.tip,
            0,
            1,
            BASE,
        )
        assert [signed.author for signed in made.offers] == [member.key for member in view.members]

    def test_after_its_deadline_those_that_are_there_will_do(self) -> None:
        view = View(round_deadline_s=5.0)
        for at, name in enumerate(["p0", "p1", "p2"]):
            view.offer(name, now=1.0 + at)
        assert view.contributors(6.0) is None
        assert view.contributors(6.1) == ["p0", "p1", "p2"]

    @pytest.mark.parametrize(("min_peers", "count", "needed"), [(2, 4, 3), (4, 4, 4), (2, 5, 3), (1, 2, 2)], ids=str)
    def test_more_than_half_of_the_members_are_needed_and_min_peers(
        self, min_peers: int, count: int, needed: int
    ) -> None:
        view = View(count=count, min_peers=min_peers, round_deadline_s=1.0)
        for i in range(needed):
            assert view.contributors(9.0) is None
            view.offer(f"p{i}")
        assert view.contributors(9.0) == [f"p{i}" for i in range(needed)]

    def test_a_member_that_is_silent_is_not_waited_for(self) -> None:
        view = View(attackers=0)
        for name in ("p0", "p1", "p2"):
            view.offer(name)
            view.beats(name, 9.0)
        assert view.contributors(10.0) is None
        assert view.remaining(10.1) == ["p0", "p1", "p2"]
        members = {m.peer_id: m for m in view.members}
        assert view.blocks._is_awaited(members["p3"], set(), {}, 10.0)
        assert not view.blocks._is_awaited(members["p3"], set(), {}, 10.1)
        assert view.blocks._is_awaited(members["p0"], set(), {}, 99.0), "itself is never silent"

    def test_nor_is_one_that_wants_to_leave_or_is_proven_to_lie_or_has_contributed(self) -> None:
        view = View()
        members = {m.peer_id: m for m in view.members}
        assert view.blocks._is_awaited(members["p1"], set(), {}, 1.0)
        view.beats("p1", 1.0)
        assert view.blocks._is_awaited(members["p1"], set(), {}, 1.0)
        view.beats("p1", 1.0, number=2, wants="leave")
        assert not view.blocks._is_awaited(members["p1"], set(), {}, 1.0)
        view.lies("p2")
        assert not view.blocks._is_awaited(members["p2"], set(), {}, 1.0)
        assert not view.blocks._is_awaited(members["p3"], set(), {members["p3"].key: None}, 1.0)

    def test_bytes_that_are_missing_are_waited_for_as_long_as_some_come(self) -> None:
        view = View()
        for name in ("p0", "p1", "p2"):
            view.offer(name)
        says = view.offer("p3", now=2.0, condition="missing")
        for name in ("p1", "p2", "p3"):
            view.beats(name, 14.0)
        assert view.contributors(12.0) is None
        assert view.contributors(12.1) == ["p0", "p1", "p2"]
        view.offers.progressed(says.digest, 9.0)
        assert view.contributors(19.0) is None
        assert view.contributors(19.1) == ["p0", "p1", "p2"]

    def test_bytes_that_are_bad_are_not_waited_for(self) -> None:
        view = View()
        for name in ("p0", "p1", "p2"):
            view.offer(name)
        view.offer("p3", condition="bad")
        assert view.contributors() == ["p0", "p1", "p2"]

    def test_of_a_liar_nothing_is_used(self) -> None:
        view = View(round_deadline_s=5.0)
        for name in ("p0", "p1", "p2", "p3"):
            view.offer(name)
        view.book.proofs[view.key("p3")] = Proof(first=view.say("p3", OFFER), second=view.say("p3", OFFER))
        assert view.remaining() == ["p0", "p1", "p2"], "first it is expelled"
        made = view.blocks._make_round(1.0)
        assert made is not None
        assert view.key("p3") not in {signed.author for signed in made.offers}

    def test_those_that_started_from_another_anchor_than_most_are_left_out(self) -> None:
        view = View()
        for name in ("p0", "p1", "p3"):
            view.offer(name)
        view.offer("p2", base_hash="f" * 32)
        assert view.contributors() == ["p0", "p1", "p3"]

    @pytest.mark.parametrize(
        ("own", "chosen"),
        [((0, "f" * 32), "f" * 32), ((0, BASE), BASE), ((1, "f" * 32), BASE), (None, BASE)],
        ids=["ours", "theirs", "ours of another version", "none"],
    )
    def test_our_own_anchor_breaks_a_tie(self, own: tuple[int, str] | None, chosen: str) -> None:
        view = View()
        view.me.anchors = {} if own is None else {0: own}
        assert view.blocks._base_hash(0, 1, [BASE, "f" * 32, BASE, "f" * 32]) == chosen
        assert view.blocks._base_hash(0, 1, [BASE, "f" * 32, "f" * 32]) == "f" * 32
        assert view.blocks._base_hash(0, 1, []) == ""

    def test_the_fragment_that_is_furthest_behind_comes_first(self) -> None:
        view = View(fragments=3)
        view.me.state = replace(view.me.state, versions=(4, 3, 3))
        for fragment, version in ((2, 4), (0, 5)):
            for name in ("p0", "p1", "p2", "p3"):
                digest = f"{fragment}{view.key(name)[1:]}"
                view.offer(name, fragment=fragment, version=version, sequence=version, digest=digest)
        assert view.contributors(fragment=2) == ["p0", "p1", "p2", "p3"]
        for name in ("p0", "p1", "p2", "p3"):
            view.offer(name, fragment=1, version=4, sequence=4, digest="1" + view.key(name)[1:])
        assert view.contributors(fragment=1) == ["p0", "p1", "p2", "p3"]

    def test_nothing_is_proposed_while_too_few_are_there_to_decide(self) -> None:
        view = View()
        for name in ("p0", "p1", "p2", "p3"):
            view.offer(name)
        view.beats("p1", 8.0)
        assert view.blocks.heard_from(10.1) == ["p0", "p1"]
        assert view.blocks.is_short_of_peers(10.1)
        assert view.blocks.make(10.1) is None
        view.beats("p2", 9.0)
        assert view.blocks.heard_from(10.1) == ["p0", "p1", "p2"]
        assert not view.blocks.is_short_of_peers(10.1)
        assert view.blocks.make(10.1) is not None

    def test_with_just_min_peers_nobody_is_let_go_while_too_few_are_heard(self) -> None:
        view = View(min_peers=4)
        view.beats("p1", 8.0)
        assert view.blocks.is_short_of_peers(10.1)
        assert view.blocks.make(10.1) is None

    def test_with_fewer_members_than_min_peers_somebody_may_still_come(self) -> None:
        view = View(count=2, min_peers=3)
        assert view.blocks.is_short_of_peers(1.0)
        view.beats("q", 1.0)
        assert view.remaining(1.0) == ["p0", "p1", "q"]


OFFER = Offered(run_id=RUN, fragment=0, version=1, sequence=1, digest="a" * 64, size_bytes=100, base_hash=BASE, steps=1)


class TestChanges:
    def test_without_a_reason_there_is_none(self) -> None:
        assert View().blocks.make(1.0) is None

    def test_who_wants_to_leave_goes(self) -> None:
        view = View()
        view.beats("p2", 1.0, wants="leave")
        assert view.remaining() == ["p0", "p1", "p3"]
        view.me.wants = "leave"
        assert view.remaining() == ["p1", "p3"]

    def test_the_last_one_cannot_go(self) -> None:
        view = View(count=1, min_peers=1)
        view.me.wants = "leave"
        assert view.blocks.make(1.0) is None

    def test_a_liar_goes_with_the_proof_and_nobody_comes_at_the_same_time(self) -> None:
        view = View()
        proof = view.lies("p2")
        view.beats("q", 1.0)
        made = view.blocks.make(1.0)
        assert isinstance(made, Change)
        assert (made.height, made.parent, made.proofs, made.applied) == (2, view.me.state.tip, (proof,), ())
        assert made.withdrawn is UNSET
        assert [member.peer_id for member in made.members] == ["p0", "p1", "p3"]

    def test_a_liar_without_room_for_its_proof_waits_while_others_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        view = View()
        proofs = {view.key(name): view.lies(name) for name in ("p1", "p2")}
        view.beats("p3", 1.0, wants="leave")
        size = max(map(bounds.proof_bytes, proofs.values()))
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES", size)
        made = view.blocks.make(1.0)
        assert isinstance(made, Change)
        first, second = sorted(proofs)
        assert made.proofs == (proofs[first],)
        assert {member.key for member in made.members} == {view.key("p0"), second}

    def test_a_newcomer_comes_with_what_it_signed(self) -> None:
        view = View()
        applied = view.beats("q", 1.0)
        made = view.blocks.make(1.0)
        assert isinstance(made, Change)
        assert made.applied == (applied,)
        assert made.members == (*view.members, Member(peer_id="q", key=view.key("q")))

    def test_a_newcomer_must_still_be_there(self) -> None:
        view = View()
        view.beats("q", 1.0)
        for name in ("p1", "p2", "p3"):
            view.beats(name, 5.0)
        assert view.remaining(11.0) == ["p0", "p1", "p2", "p3", "q"]
        assert view.remaining(11.1) is None

    def test_a_name_that_is_taken_is_not_given_twice(self) -> None:
        view = View()
        view.beats("thief", 1.0, peer_id="p1")
        assert view.remaining() is None
        view.beats("q", 1.0)
        assert view.remaining() == ["p0", "p1", "p2", "p3", "q"]

    def test_a_newcomer_whose_beat_is_longer_than_the_room_for_all_comes_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bounds, "MOST_APPLIED_BYTES", 10)
        view = View()
        for at, name in enumerate(["q", "r"]):
            view.beats(name, 1.0 + at)
        assert view.remaining(2.0) == ["p0", "p1", "p2", "p3", "q"]
        view = View()
        for at, (name, address) in enumerate([("q", "h:1"), ("r", "h" * 250), ("s", "h:1")]):
            view.beats(name, 1.0 + at, address=address)
        assert view.remaining(3.0) == ["p0", "p1", "p2", "p3", "q"]

    def test_between_two_that_were_heard_at_once_the_name_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 5)
        view = View()
        for name in ("s", "q", "r"):
            view.beats(name, 1.0)
        assert view.remaining() == ["p0", "p1", "p2", "p3", "q"]

    def test_a_newcomer_of_whom_a_lie_is_proven_does_not_come(self) -> None:
        view = View()
        view.beats("q", 1.0)
        view.book.proofs[view.key("q")] = Proof(first=view.say("q", OFFER), second=view.say("q", OFFER))
        assert view.remaining() is None


class TestWithdrawals:
    """p0 is the inviter."""

    def view(self) -> View:
        return View(inviter=View().key("p0"))

    def withdraw(self, view: View, name: str) -> Withdrawal:
        sign = view.registry.enter("p0")[1]
        signature = sign(withdrawal_body(RUN, name, view.key(name))).hex()
        withdrawal = Withdrawal(peer_id=name, key=view.key(name), signature=signature)
        assert view.book.withdraw(withdrawal)
        return withdrawal

    def test_who_is_no_longer_invited_goes(self) -> None:
        view = self.view()
        withdrawal = self.withdraw(view, "p2")
        made = view.blocks.make(1.0)
        assert isinstance(made, Change)
        assert [member.peer_id for member in made.members] == ["p0", "p1", "p3"]
        assert made.withdrawn == (withdrawal,)
        assert view.blocks.judge(made) == "good"

    def test_one_that_was_never_here_is_named_once(self) -> None:
        view = self.view()
        withdrawal = self.withdraw(view, "q")
        made = view.blocks.make(1.0)
        assert isinstance(made, Change)
        assert (made.members, made.withdrawn) == (view.members, (withdrawal,))
        assert view.blocks.judge(made) == "good"
        view.me.state = chain.after(made, view.me.state)
        assert view.blocks.make(1.0) is None

    def test_they_are_named_by_key_as_many_as_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outerstep.coordination.gossip.blocks.MOST_PEERS", 2)
        view = self.view()
        keys = sorted(self.withdraw(view, name).key for name in ("x", "y", "z"))
        assert [one.key for one in view.blocks._withdrawn()] == keys[:2]


class TestJudgingRounds:
    def block(self, view: View, *names: str, **facts: Any) -> Round:
        offers = tuple(view.say(name, replace(OFFER, digest=view.key(name))) for name in names)
        block = Round(height=2, parent=view.me.state.tip, fragment=0, version=1, base_hash=BASE, offers=offers)
        return replace(block, **facts)

    def hold(self, view: View, *names: str, good: bool = True) -> None:
        for name in names:
            view.offers.hold(view.key(name), good=good)

    def test_it_is_for_one_whose_bytes_are_all_here_and_good(self) -> None:
        view = View()
        block = self.block(view, "p0", "p1", "p2")
        assert (view.blocks.judge(block), view.blocks.has_all_of(block)) == ("unknown", False)
        self.hold(view, "p0", "p1")
        assert (view.blocks.judge(block), view.blocks.has_all_of(block)) == ("unknown", False)
        self.hold(view, "p2")
        assert (view.blocks.judge(block), view.blocks.has_all_of(block)) == ("good", True)
        self.hold(view, "p1", good=False)
        assert (view.blocks.judge(block), view.blocks.has_all_of(block)) == ("bad", False)

    def test_one_bad_contribution_is_enough_though_others_are_missing(self) -> None:
        view = View()
        self.hold(view, "p1", good=False)
        assert view.blocks.judge(self.block(view, "p0", "p1", "p2")) == "bad"

    def test_too_few_contributions_are_bad(self) -> None:
        view = View()
        self.hold(view, "p0", "p1", "p2")
        assert view.blocks.judge(self.block(view, "p0", "p1")) == "bad"

    def test_one_of_a_liar_is_bad(self) -> None:
        view = View()
        self.hold(view, "p0", "p1", "p2")
        view.lies("p1")
        assert view.blocks.judge(self.block(view, "p0", "p1", "p2")) == "bad"

    def test_one_of_another_size_is_bad(self) -> None:
        view = View()
        self.hold(view, "p0", "p1", "p2")
        short = view.say("p2", replace(OFFER, digest=view.key("p2"), size_bytes=99))
        block = self.block(view, "p0", "p1")
        assert view.blocks.judge(replace(block, offers=(*block.offers, short))) == "bad"

    def test_from_another_anchor_than_ours_is_bad_if_ours_is_of_that_version(self) -> None:
        view = View()
        self.hold(view, "p0", "p1", "p2")
        block = self.block(view, "p0", "p1", "p2")
        for own, verdict in (((0, "f" * 32), "bad"), ((1, "f" * 32), "good"), ((0, BASE), "good")):
            view.me.anchors = {0: own}
            assert view.blocks.judge(block) == verdict
        view.me.anchors = {}
        assert view.blocks.judge(block) == "good"

    def test_what_does_not_follow_is_bad(self) -> None:
        view = View()
        self.hold(view, "p0", "p1", "p2")
        assert view.blocks.judge(self.block(view, "p0", "p1", "p2", version=2)) == "bad"


class TestJudgingChanges:
    def without(self, view: View, *names: str, **facts: Any) -> Change:
        members = tuple(member for member in view.members if member.peer_id not in names)
        return replace(Change(height=2, parent=view.me.state.tip, members=members), **facts)

    def test_nothing_is_missing_for_it(self) -> None:
        view = View()
        assert view.blocks.has_all_of(self.without(view, "p1"))

    def test_for_one_who_is_there_it_waits_and_for_one_who_leaves_it_is(self) -> None:
        view = View()
        assert view.blocks.judge(self.without(view, "p1")) == "unknown"
        view.beats("p1", 0.0)
        assert view.blocks.judge(self.without(view, "p1")) == "unknown"
        view.beats("p1", 0.0, number=2, wants="leave")
        assert view.blocks.judge(self.without(view, "p1")) == "good"
        assert view.blocks.judge(self.without(view, "p1", "p2")) == "unknown"

    def test_one_may_go_after_half_the_time_of_silence(self) -> None:
        view = View()
        view.blocks.now = 5.0
        assert view.blocks.judge(self.without(view, "p1")) == "unknown"
        view.blocks.now = 5.1
        assert view.blocks.judge(self.without(view, "p1")) == "good"
        view.beats("p1", 5.1)
        assert view.blocks.judge(self.without(view, "p1")) == "unknown"

    def test_itself_may_go_only_if_it_wants_to(self) -> None:
        view = View()
        view.blocks.now = 99.0
        assert view.blocks.judge(self.without(view, "p0")) == "unknown"
        view.me.wants = "leave"
        assert view.blocks.judge(self.without(view, "p0")) == "good"

    def test_a_liar_may_go_whether_the_block_says_why_or_we_know(self) -> None:
        view = View()
        proof = view.lies("p1")
        assert view.blocks.judge(self.without(view, "p1")) == "good"
        view.book.proofs.clear()
        assert view.blocks.judge(self.without(view, "p1")) == "unknown"
        assert view.blocks.judge(self.without(view, "p1", proofs=(proof,))) == "good"

    def test_a_proof_against_somebody_who_stays_is_bad(self) -> None:
        view = View()
        proof = view.lies("p1")
        view.beats("p2", 0.0, wants="leave")
        assert view.blocks.judge(self.without(view, "p2", proofs=(proof,))) == "bad"

    def with_newcomer(self, view: View, applied: Signed) -> Change:
        members = chain.in_order([*view.members, Member(peer_id="q", key=view.key("q"))])
        return Change(height=2, parent=view.me.state.tip, members=members, applied=(applied,))

    def test_a_newcomer_must_be_where_it_can_be_called(self) -> None:
        view = View()
        block = self.with_newcomer(view, view.beats("q", 0.0))
        assert view.blocks.judge(block) == "good"
        view.blocks.can_call = lambda beat: beat.address != "h:1"
        assert view.blocks.judge(block) == "bad"

    def test_a_newcomer_that_has_changed_its_mind_does_not_come(self) -> None:
        view = View()
        block = self.with_newcomer(view, view.beats("q", 0.0))
        view.beats("q", 1.0, number=2, wants="leave")
        assert view.blocks.judge(block) == "bad"

    def test_a_member_does_not_apply_and_nobody_applies_in_vain(self) -> None:
        view = View()
        block = self.with_newcomer(view, view.beats("q", 0.0))
        for name in ("p1", "r"):
            more = (*block.applied, view.beats(name, 0.0))
            assert view.blocks.judge(replace(block, applied=more)) == "bad"
        not_a_beat = view.say("q", OFFER)
        assert view.blocks.judge(replace(block, applied=(*block.applied, not_a_beat))) == "bad"
