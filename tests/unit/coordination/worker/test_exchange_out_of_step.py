"""The worker's side of one exchange when the server knows more than it does, or less."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.worker.exchange import Exchange, Patience, Sending, Step
from outerstep.digest import payload_hash
from outerstep.errors import (
    Conflict,
    Fenced,
    MissingParts,
    OtherCodec,
    Refused,
    StaleRound,
    Superseded,
    TooOld,
    UnknownWorker,
)
from outerstep.types import (
    Commit,
    CommitAnswer,
    Join,
    JoinedFragment,
    Offer,
    OfferAnswer,
    Poll,
    PutPart,
)
from unit.coordination.builders import (
    PART_BYTES,
    RUN,
    contribution_hashes,
    make_agreement,
    make_join,
    make_key,
    make_offer,
)
from unit.coordination.talk import ACCEPTED, STORED, WAIT_S, Talk, agreed, joined, nothing_yet, send


class TestOtherCodec:
    @pytest.mark.parametrize("step", [Step.OFFER, Step.COMMIT], ids=lambda step: step.value)
    def test_a_server_that_forgot_a_change_of_codec_says_how_to_go_on(self, step: Step) -> None:
        """What it has is the newest there is, and its plan comes with it; the steps go with the next contribution."""
        talk = Talk().brought_to(step)
        talk.say(OtherCodec("the run uses another"))
        polled = talk.say(agreed(3, last_sequence=0))
        assert isinstance(polled, Poll)
        assert polled.after == -1
        talk.hand_over(make_agreement(3))
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement.version, outcome.counted, outcome.too_old) == (3, False, False)


class TestMissedRounds:
    @pytest.mark.parametrize("step", [Step.OFFER, Step.SEND, Step.COMMIT], ids=lambda step: step.value)
    @pytest.mark.parametrize(("kind", "too_old"), [(StaleRound, False), (TooOld, True)])
    def test_stale_fetches_the_newest_and_reports_that_it_is_not_counted(
        self, kind: type[Refused], too_old: bool, step: Step
    ) -> None:
        talk = Talk().brought_to(step)
        talk.say(kind("the round closed"))
        polled = talk.say(agreed(3, last_sequence=0))
        assert isinstance(polled, Poll)
        assert polled.after == 0
        talk.hand_over(make_agreement(3))
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement.version, outcome.counted, outcome.too_old) == (3, False, too_old)

    def test_a_stale_one_waits_until_the_closing_round_is_published(self) -> None:
        talk = Talk()
        talk.say(StaleRound("the round closed"))
        talk.say(nothing_yet(last_sequence=0))
        assert isinstance(talk.say(StaleRound("the round closed")), Offer)
        assert isinstance(talk.say(agreed(last_sequence=0)), Poll)
        assert talk.exchange.step is Step.FETCH

    def test_a_round_that_died_with_the_server_before_it_was_published_takes_the_contribution_after_all(self) -> None:
        """Else the worker would wait for the round, and the restarted server for the worker."""
        talk = Talk()
        talk.say(StaleRound("the round closed"))
        talk.say(nothing_yet(last_sequence=0))
        assert talk.say(send(0, 1)) == make_offer("a", wait_s=WAIT_S)
        talk.say(STORED, STORED, ACCEPTED)
        talk.say(agreed())
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.counted


class TestAnEarlierContribution:
    """It counted in a round after the version that its worker holds; then the next one is due."""

    def talk(self, **patience: Any) -> Talk:
        """#1 counts in version 3, version 2 is held; now it is #2's turn."""
        talk = Talk(**patience)
        talk.earlier = Sending(make_offer("a"), dict(enumerate(talk.hashes)), counted_in=3)
        key = make_key("a", sequence=2)
        talk.hashes = tuple(contribution_hashes(key, 2 * PART_BYTES))
        talk.exchange = Exchange(
            talk.session,
            fragment=0,
            after=2,
            now=talk.now,
            offer=make_offer("a", sequence=2, base_version=2, oldest_base=2),
            part_hashes=talk.hashes,
            earlier=talk.earlier,
            patience=Patience(**patience),
            rng=random.Random(0),
        )
        return talk

    def test_it_is_asked_about_first_and_its_agreement_is_waited_for(self) -> None:
        talk = self.talk()
        asked = talk.say(OfferAnswer(state="accepted", version=4))
        assert isinstance(asked, Offer)
        assert (asked.sequence, asked.follows) == (1, 0)
        offered = talk.say(send(0, 1))
        assert isinstance(offered, Offer)
        assert (offered.sequence, offered.follows) == (2, 1)
        talk.say(STORED, STORED, CommitAnswer(version=5))
        polled = talk.say(agreed(4, last_sequence=2))
        assert isinstance(polled, Poll)
        assert polled.after == 3
        talk.hand_over(make_agreement(4))
        assert talk.exchange.outcome is not None
        assert (talk.exchange.outcome.counted_in, talk.exchange.outcome.earlier_lost) == (5, False)

    def test_a_restarted_server_is_sent_it_again_before_the_next(self) -> None:
        talk = self.talk()
        talk.say(send(0, 1))
        for _ in range(2):
            part = talk.say(STORED)
            assert isinstance(part, PutPart)
            assert part.sequence == 1
        committed = talk.say(CommitAnswer(version=3))
        assert isinstance(committed, Commit)
        assert committed.payload_hash == payload_hash(contribution_hashes(make_key("a"), 2 * PART_BYTES))
        offered = talk.say(send(0, 1))
        assert isinstance(offered, Offer)
        assert offered.sequence == 2

    def test_a_restart_between_the_two_is_noticed(self) -> None:
        """The server that said "accepted" to the earlier one is not the one that is offered the next."""
        talk = self.talk()
        talk.say(OfferAnswer(state="accepted", version=3))
        talk.say(MissingParts("#2 follows #1, which is not here"))
        again = talk.say(send(0, 1))
        assert isinstance(again, Offer)
        assert again.sequence == 1

    def test_a_restart_after_both_sends_both_again_in_order(self) -> None:
        talk = self.talk()
        talk.say(OfferAnswer(state="accepted", version=3), send(0, 1), STORED, STORED, CommitAnswer(version=3))
        talk.say(nothing_yet(last_sequence=0))
        first = talk.say(OfferAnswer(state="accepted", version=3))
        second = talk.say(OfferAnswer(state="accepted", version=3))
        assert isinstance(first, Offer)
        assert isinstance(second, Offer)
        assert (first.sequence, second.sequence) == (1, 2)

    def test_one_that_became_too_old_meanwhile_is_reported_as_lost(self) -> None:
        talk = self.talk()
        talk.say(TooOld("it is"))
        offered = talk.say(send(0, 1))
        assert isinstance(offered, Offer)
        assert (offered.sequence, offered.follows) == (2, 0)
        talk.say(STORED, STORED, CommitAnswer(version=6), agreed(6, last_sequence=2))
        talk.hand_over(make_agreement(6))
        assert talk.exchange.outcome is not None
        assert (talk.exchange.outcome.counted, talk.exchange.outcome.earlier_lost) == (True, True)

    def test_one_that_the_next_has_superseded_is_in_its_round_or_before(self) -> None:
        """The exchange was begun anew after both were accepted."""
        talk = self.talk()
        talk.say(Superseded("#2 is there"), OfferAnswer(state="accepted", version=7))
        polled = talk.say(nothing_yet(last_sequence=2))
        assert isinstance(polled, Poll)
        assert polled.after == 6


class TestAnotherSpokeForThisWorker:
    @pytest.mark.parametrize("step", [Step.OFFER, Step.SEND, Step.COMMIT], ids=lambda step: step.value)
    def test_a_superseded_contribution_is_not_counted_and_the_next_continues_above(self, step: Step) -> None:
        talk = Talk().brought_to(step)
        talk.say(Superseded("older than the last accepted one (#1000000)"))
        answer = replace(joined(), fragments=(JoinedFragment(version=1, last_sequence=1_000_000),))
        assert isinstance(talk.say(answer), Join)
        polled = talk.say(agreed(1, last_sequence=1_000_000))
        assert isinstance(polled, Poll)
        assert polled.after == -1  # whatever is newest will do
        talk.hand_over(make_agreement(1))
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert not outcome.counted
        assert talk.session.next_sequence(0, used=1) == 1_000_001


class TestAServerThatWentBack:
    """It was resumed from an older state, and has forgotten who joined since."""

    def test_a_sequence_that_another_start_has_taken_is_found_out_by_its_hash(self) -> None:
        talk = Talk()
        talk.say(UnknownWorker("who?"), joined(incarnation=1000))
        talk.say(OfferAnswer(state="accepted", version=4))
        assert isinstance(talk.say(Conflict("other bytes")), Commit)
        talk.say(agreed(4, last_sequence=1))
        talk.hand_over(make_agreement(4))
        assert talk.exchange.outcome is not None
        assert not talk.exchange.outcome.counted

    def test_one_that_was_accepted_under_another_number_is_asked_for_again(self) -> None:
        """Another exchange of ours has joined again. The sequence that the server knows may be another start's."""
        talk = Talk().brought_to(Step.POLL)
        talk.session.answer = joined(incarnation=1000)
        talk.say(agreed(4, last_sequence=1))
        assert talk.say(OfferAnswer(state="accepted", version=4)) == make_offer("a", incarnation=1000, wait_s=WAIT_S)
        assert isinstance(talk.say(Conflict("other bytes")), Commit)
        talk.say(agreed(4, last_sequence=1))
        talk.hand_over(make_agreement(4))
        assert talk.exchange.outcome is not None
        assert not talk.exchange.outcome.counted

    def test_one_of_our_own_is_confirmed(self) -> None:
        talk = Talk()
        talk.say(UnknownWorker("who?"), joined(incarnation=1000))
        talk.say(OfferAnswer(state="accepted", version=4), CommitAnswer(version=4), agreed(4))
        talk.hand_over(make_agreement(4))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.counted

    def test_who_was_fenced_by_its_own_re_join_asks_before_it_gives_up(self) -> None:
        talk = Talk()
        talk.say(Fenced("incarnation 1000"))
        assert isinstance(talk.say(joined(incarnation=1000)), Join)
        assert talk.say(send(0, 1)) == make_offer("a", incarnation=1000, wait_s=WAIT_S)

    def test_who_is_fenced_for_good_gives_up(self) -> None:
        talk = Talk()
        talk.say(Fenced("incarnation 2"), Fenced("started again elsewhere"))
        assert isinstance(talk.exchange.failure, Fenced)


class TestUnknownWorker:
    @pytest.mark.parametrize("step", [Step.OFFER, Step.SEND, Step.COMMIT], ids=lambda step: step.value)
    def test_it_joins_again_and_offers_the_same_key_with_the_new_incarnation(self, step: Step) -> None:
        talk = Talk().brought_to(step)
        talk.say(UnknownWorker("declared dead"))
        assert talk.say(joined(incarnation=2)) == replace(make_join("a"), run_id=RUN)
        offered = talk.say(send(0, 1))
        assert offered == make_offer("a", incarnation=2, wait_s=WAIT_S)
        part = talk.say(STORED)
        assert isinstance(part, PutPart)
        assert part.incarnation == 2
        assert talk.exchange.rejoins == 1

    def test_who_was_accepted_joins_again_and_goes_on_polling(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(UnknownWorker("declared dead"), joined())
        assert isinstance(talk.say(agreed()), Poll)
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.counted

    def test_unknown_while_fetching_polls_again_after_the_join(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        talk.say(UnknownWorker("declared dead"), joined(incarnation=2))
        polled = talk.say(agreed())
        assert isinstance(polled, Poll)
        assert polled.incarnation == 2

    def test_it_does_not_hammer_a_server_that_keeps_forgetting_it(self) -> None:
        talk = Talk()
        talk.say(UnknownWorker("who?"))
        assert talk.waits_s > 0


class TestForgetfulServer:
    def test_accepted_and_then_forgotten_is_offered_again_under_the_same_key(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(nothing_yet(last_sequence=0))
        assert talk.say(send(0, 1)) == make_offer("a", wait_s=WAIT_S)

    def test_even_if_there_is_a_newer_agreement(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(agreed(last_sequence=0))
        assert talk.exchange.step is Step.OFFER

    def test_a_forgotten_one_that_comes_too_late_is_reported_as_not_counted(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(agreed(last_sequence=0), StaleRound("closed"), agreed(last_sequence=0))
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None
        assert not talk.exchange.outcome.counted

    def test_a_later_sequence_than_ours_is_no_loss(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(nothing_yet(last_sequence=2))
        assert talk.exchange.step is Step.POLL

    @pytest.mark.parametrize("step", [Step.SEND, Step.COMMIT], ids=lambda step: step.value)
    def test_missing_parts_goes_back_to_the_offer_which_tells_what_is_there(self, step: Step) -> None:
        talk = Talk().brought_to(step)
        talk.say(MissingParts("not on offer"))
        assert talk.waits_s > 0
        assert talk.say(send(1)) == make_offer("a", wait_s=WAIT_S)
        part = talk.say(STORED)
        assert isinstance(part, PutPart)
        assert part.part == 1
        assert talk.exchange.step is Step.COMMIT
