"""What is kept of what was offered and of who is there, and when it is forgotten."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from outerstep.coordination.gossip import heard
from outerstep.coordination.gossip.heard import Acquaintances, HeardOffer, Offers
from outerstep.statements import Beat, Member, Offered, Round, Signed, body_of

RUN, SIZES = "a-run", (100, 50)
ANN, BOB, EVE = (Member(peer_id=name, key=name[0] * 64) for name in ("ann", "bob", "eve"))


def signed(author: Member, statement: Offered | Beat) -> Signed:
    return Signed(author=author.key, body=body_of(statement), signature=bytes(64))


OFFERED = Offered(
    run_id=RUN,
    fragment=0,
    version=6,
    sequence=1,
    digest="a" * 64,
    size_bytes=SIZES[0],
    base_hash="0" * 32,
    steps=1,
)


class TestOffers:
    """The newest version of the fragment is 5 throughout, so that the open round is 6."""

    def hear(self, offers: Offers, says: Offered, author: Member = ANN, now: float = 1.0) -> bool:
        return offers.hear(signed(author, says), says, 5, now)

    @pytest.mark.parametrize(("version", "is_kept"), [(5, False), (6, True), (7, True), (8, False)])
    def test_those_to_the_open_round_and_to_the_one_after_it_are_kept(self, version: int, is_kept: bool) -> None:
        offers = Offers(SIZES)
        assert self.hear(offers, replace(OFFERED, version=version)) is is_kept
        assert len(offers.statements()) == is_kept

    def test_one_to_a_fragment_that_there_is_not_is_not_kept(self) -> None:
        offers = Offers(SIZES)
        assert not self.hear(offers, replace(OFFERED, fragment=2))
        assert not self.hear(offers, replace(OFFERED, fragment=3))
        assert offers.statements() == []

    def test_the_same_again_is_no_news_and_another_is(self) -> None:
        offers = Offers(SIZES)
        another = replace(OFFERED, sequence=2, digest="b" * 64)
        assert [self.hear(offers, says) for says in (OFFERED, OFFERED, another, OFFERED)] == [True, False, True, False]
        assert [offer.says.sequence for offer in offers] == [1, 2]

    def test_it_is_missing_until_its_bytes_are_here_which_are_good_or_bad(self) -> None:
        offers = Offers(SIZES)
        assert offers.condition(OFFERED.digest) == "missing"
        self.hear(offers, OFFERED)
        self.hear(offers, replace(OFFERED, digest="b" * 64), BOB)
        offers.hold(OFFERED.digest, good=True)
        assert [offer.condition for offer in offers] == ["good", "missing"]
        offers.hold("b" * 64, good=False)
        assert [offer.condition for offer in offers] == ["good", "bad"]
        assert (offers.condition(OFFERED.digest), offers.condition("b" * 64)) == ("good", "bad")

    def test_bytes_that_are_here_before_the_offer_count_when_it_comes(self) -> None:
        offers = Offers(SIZES)
        offers.hold(OFFERED.digest, good=True)
        self.hear(offers, OFFERED)
        assert [offer.condition for offer in offers] == ["good"]

    def test_one_of_another_size_is_bad_whatever_is_held(self) -> None:
        offers = Offers(SIZES)
        offers.hold(OFFERED.digest, good=True)
        self.hear(offers, replace(OFFERED, size_bytes=99))
        self.hear(offers, replace(OFFERED, fragment=1, digest="b" * 64, size_bytes=50))
        assert [offer.condition for offer in offers] == ["bad", "missing"]

    def test_it_was_heard_and_tried_when_it_came_and_tried_again_when_bytes_came(self) -> None:
        offers = Offers(SIZES)
        self.hear(offers, OFFERED, now=3.0)
        self.hear(offers, replace(OFFERED, digest="b" * 64), BOB, now=4.0)
        offers.progressed("b" * 64, 9.0)
        assert [(offer.heard_at, offer.tried_at) for offer in offers] == [(3.0, 3.0), (4.0, 9.0)]

    def test_of_one_author_the_newest_three_are_kept_by_their_numbers(self) -> None:
        offers = Offers(SIZES)
        for sequence in (4, 1, 3, 2, 5):
            self.hear(offers, replace(OFFERED, sequence=sequence))
        assert [offer.says.sequence for offer in offers] == [3, 4, 5]

    def test_of_a_round_each_member_has_its_newest(self) -> None:
        offers = Offers(SIZES)
        for sequence, version in ((1, 6), (2, 6), (3, 7)):
            self.hear(offers, replace(OFFERED, sequence=sequence, version=version))
        self.hear(offers, OFFERED, EVE)
        self.hear(offers, replace(OFFERED, fragment=1, size_bytes=50), BOB)
        found = offers.of_round(0, 6, [ANN, BOB])
        assert {key: offer.says.sequence for key, offer in found.items()} == {ANN.key: 2}
        assert offers.of_round(0, 8, [ANN, BOB]) == {}

    def test_what_no_round_can_hold_any_more_is_dropped(self) -> None:
        offers = Offers(SIZES)
        for author, version in ((ANN, 6), (ANN, 7), (BOB, 6), (EVE, 7)):
            self.hear(offers, replace(OFFERED, version=version, sequence=version, digest=author.key), author)
        for digest in (ANN.key, BOB.key, EVE.key, "d" * 64, "f" * 64):
            offers.hold(digest, good=True)
        decided = signed(ANN, replace(OFFERED, digest="d" * 64))
        block = Round(height=1, parent="0" * 64, fragment=0, version=6, base_hash="0" * 32, offers=(decided,))
        offers.prune((6, 0), {ANN.key, BOB.key}, [block])
        assert [(offer.signed.author, offer.says.version) for offer in offers] == [(ANN.key, 7)]
        known = [offers.condition(digest) for digest in (ANN.key, BOB.key, EVE.key, "d" * 64, "f" * 64)]
        assert known == ["good", "missing", "missing", "good", "missing"]

    def test_an_offer_is_missing_and_never_tried_unless_something_else_is_said(self) -> None:
        offer = HeardOffer(signed(ANN, OFFERED), OFFERED, 7.0)
        assert (offer.condition, offer.tried_at) == ("missing", 0.0)


def beat(who: Member, number: int = 1, incarnation: int = 1, wants: str = "belong") -> Beat:
    return Beat(
        run_id=RUN,
        peer_id=who.peer_id,
        incarnation=incarnation,
        number=number,
        address="h:1",
        wants=wants,  # type: ignore[arg-type]
    )


def greet(others: Acquaintances, who: Member, said: Beat, now: float) -> None:
    others.greet(signed(who, said), said, now)


class TestAcquaintances:
    """Ann is a member from the beginning, at 10 s; the timeout is 5 s."""

    def others(self) -> Acquaintances:
        return Acquaintances([ANN], 10.0, 5.0)

    def test_only_what_is_newer_counts(self) -> None:
        others = self.others()
        for at, said in enumerate([beat(ANN, 2), beat(ANN, 2), beat(ANN, 1), beat(ANN, 1, incarnation=2)]):
            greet(others, ANN, said, 11.0 + at)
            assert others.is_outdated(ANN.key, said)
        known = others.get(ANN.key)
        assert known is not None
        assert (known.age, known.heard_at, known.since) == ((2, 1), 14.0, 11.0)
        assert not others.is_outdated(ANN.key, beat(ANN, 2, incarnation=2))
        assert not others.is_outdated(BOB.key, beat(BOB))

    def test_silence_counts_from_the_last_beat_or_from_when_it_became_a_member(self) -> None:
        others = self.others()
        assert (others.silent_s(ANN.key, 12.0), others.silent_s(BOB.key, 12.0)) == (2.0, 2.0)
        greet(others, ANN, beat(ANN), 12.0)
        assert others.silent_s(ANN.key, 15.0) == 3.0
        others.changed([ANN, BOB], 16.0)
        assert (others.silent_s(ANN.key, 17.0), others.silent_s(BOB.key, 17.0)) == (5.0, 1.0)

    def test_a_stranger_is_known_only_if_it_wants_to_belong_and_a_member_in_any_case(self) -> None:
        others = self.others()
        greet(others, ANN, beat(ANN, wants="watch"), 11.0)
        greet(others, BOB, beat(BOB, wants="watch"), 11.0)
        greet(others, EVE, beat(EVE), 11.0)
        assert [key for key, _ in others.items()] == [ANN.key, EVE.key]
        greet(others, EVE, beat(EVE, 2, wants="leave"), 12.0)  # once known, it may say what it likes
        assert others.has_changed_its_mind(EVE.key, beat(EVE))

    def test_has_it_changed_its_mind_since(self) -> None:
        others = self.others()
        assert not others.has_changed_its_mind(BOB.key, beat(BOB))
        greet(others, BOB, beat(BOB, 2), 11.0)
        assert not others.has_changed_its_mind(BOB.key, beat(BOB, 1)), "it still wants the same"
        greet(others, BOB, beat(BOB, 3, wants="watch"), 11.0)
        assert others.has_changed_its_mind(BOB.key, beat(BOB, 2))
        assert not others.has_changed_its_mind(BOB.key, beat(BOB, 3)), "that is what it said last"
        assert not others.has_changed_its_mind(BOB.key, beat(BOB, 4)), "what is newer is to be heard"

    def test_a_silent_stranger_is_told_of_no_more_and_forgotten_after_four_timeouts(self) -> None:
        others = self.others()
        for who in (ANN, BOB):
            greet(others, who, beat(who), 11.0)
        greet(others, EVE, beat(EVE), 16.0)
        assert [one.author for one in others.statements()] == [ANN.key, BOB.key, EVE.key]
        others.forget(16.1)
        assert [one.author for one in others.statements()] == [ANN.key, EVE.key]
        assert others.get(BOB.key) is not None
        others.forget(31.0)
        assert others.get(BOB.key) is not None
        others.forget(31.1)
        assert others.get(BOB.key) is None
        assert others.get(ANN.key) is not None, "a member is not forgotten"

    def test_of_one_who_has_left_the_last_number_is_remembered(self) -> None:
        others = self.others()
        greet(others, ANN, beat(ANN, 7), 11.0)
        others.changed([BOB], 12.0)
        others.forget(40.0)
        assert others.get(ANN.key) is None
        assert others.is_outdated(ANN.key, beat(ANN, 7))
        assert others.has_changed_its_mind(ANN.key, beat(ANN, 7))
        assert not others.is_outdated(ANN.key, beat(ANN, 8))
        others.changed([ANN], 41.0)  # Bob was never heard
        assert not others.is_outdated(BOB.key, beat(BOB))

    def test_what_a_former_member_said_after_it_left_is_remembered_too(self) -> None:
        others = self.others()
        greet(others, ANN, beat(ANN, 7), 11.0)
        others.changed([], 12.0)
        greet(others, ANN, beat(ANN, 9), 13.0)
        greet(others, BOB, beat(BOB, 9), 13.0)
        others.forget(40.0)
        assert others.is_outdated(ANN.key, beat(ANN, 9))
        assert not others.is_outdated(BOB.key, beat(BOB, 9)), "who was never a member leaves nothing behind"

    def test_of_those_who_left_the_last_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heard, "MOST_LEFT", 2)
        others = self.others()
        for who in (ANN, BOB, EVE):
            others.changed([who], 11.0)
            greet(others, who, beat(who, 5), 11.0)
        others.changed([], 12.0)
        others.forget(50.0)
        assert [others.is_outdated(who.key, beat(who, 5)) for who in (ANN, BOB, EVE)] == [False, True, True]

    def test_who_leaves_again_is_the_last_to_be_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heard, "MOST_LEFT", 2)
        others = self.others()
        for present in ([BOB], [ANN], []):  # Ann leaves, Bob leaves, Ann leaves again
            for who in present:
                greet(others, who, beat(who, 5), 11.0)
            others.changed(present, 11.0)
        others.changed([EVE], 12.0)
        others.changed([], 13.0)
        others.forget(50.0)
        assert [others.is_outdated(who.key, beat(who, 5)) for who in (ANN, BOB)] == [True, False]

    def test_a_stranger_finds_room_where_the_longest_silent_one_is_silent_for_too_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heard, "STRANGERS", 2)
        others = self.others()
        third = Member(peer_id="cat", key="c" * 64)
        greet(others, BOB, beat(BOB), 12.0)
        greet(others, EVE, beat(EVE), 11.0)
        greet(others, third, beat(third), 16.0)
        assert others.get(third.key) is None, "both are there still"
        greet(others, third, beat(third), 16.1)
        assert [key for key, _ in others.items()] == [BOB.key, third.key]
        greet(others, ANN, beat(ANN), 16.2)
        assert others.get(ANN.key) is not None, "a member needs no room"
