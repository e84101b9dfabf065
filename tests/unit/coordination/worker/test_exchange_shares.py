"""One contribution that the processes of a group carry together; an exchange that only fetches; and for how long an
answer is overdue."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.worker.exchange import (
    ASKING,
    Exchange,
    Patience,
    Piece,
    Session,
    Share,
    Step,
    Wanted,
)
from outerstep.errors import FutureRound, HashMismatch, ServerFailed, Superseded, TransportError, UnknownWorker
from outerstep.types import Commit, CommitAnswer, GetPart, GetPartAnswer, Offer, OfferAnswer, Poll, PollAnswer, PutPart
from unit.coordination.builders import (
    PART_BYTES,
    agreement_hashes,
    contribution_hashes,
    make_agreement,
    make_join,
    make_key,
    make_offer,
    make_plan,
)
from unit.coordination.talk import ACCEPTED, LOST, STORED, Talk, agreed, joined, nothing_yet, send

PARTS = 4
AGREEMENT = make_agreement(3)


class Process:
    """Of two processes the one that sends these parts; the test plays the server."""

    def __init__(self, parts: range, *, speaks: bool = False, **patience: Any) -> None:
        self.now = 100.0
        self.session = Session(make_join("a"))
        self.session.answer = joined()
        size_bytes = PARTS * PART_BYTES
        self.exchange = Exchange(
            self.session,
            fragment=0,
            after=0,
            now=self.now,
            offer=make_offer("a", size_bytes=size_bytes),
            part_hashes=tuple(contribution_hashes(make_key("a"), size_bytes)),
            share=Share(2, parts, speaks),
            patience=Patience(poll_wait_s=8.0, **patience),
            rng=random.Random(0),
        )

    def ask(self, answer: Any) -> Any:
        """The next call is answered like this."""
        self.now = max(self.now, self.exchange.wake_at)
        call, *_ = self.exchange.calls(self.now)
        self.exchange.answered(call, answer, self.now)
        return call.request

    def send_own(self, *missing: int) -> list[int]:
        """Offer, be told what is missing, and send what is ours of it."""
        assert isinstance(self.ask(send(*missing)), Offer)
        sent = []
        for call in self.exchange.calls(self.now):
            assert isinstance(call.request, PutPart)
            sent.append(call.request.part)
            self.exchange.answered(call, STORED, self.now)
        return sent


class TestAProcessOfAGroup:
    @pytest.mark.parametrize(("parts", "sent"), [(range(2), [0, 1]), (range(2, 4), [2, 3])])
    def test_it_sends_its_own_parts_and_offers_again_to_see_whether_the_others_have_sent_theirs(
        self, parts: range, sent: list[int]
    ) -> None:
        process = Process(parts)
        assert process.send_own(0, 1, 2, 3) == sent
        assert process.exchange.step is Step.OFFER

    @pytest.mark.parametrize("speaks", [True, False])
    def test_while_only_parts_of_others_are_missing_it_asks_again_and_again_more_seldom(self, speaks: bool) -> None:
        process = Process(range(2), speaks=speaks)
        process.send_own(0, 1, 2, 3)
        pauses = []
        for _ in range(20):
            process.ask(send(2, 3))
            assert process.exchange.step is Step.OFFER
            assert process.exchange.waiting_for == "the other processes of this group to send their rows"
            pauses.append(process.exchange.wake_at - process.now)
        longest = [ASKING.longest_pause_s(before) for before in range(20)]
        assert all(0.5 * top <= pause <= top for pause, top in zip(pauses, longest, strict=True))

    def test_the_one_that_speaks_commits_when_nothing_is_missing(self) -> None:
        process = Process(range(2), speaks=True)
        process.send_own(0, 1, 2, 3)
        process.ask(send())
        assert process.exchange.step is Step.COMMIT
        assert isinstance(process.ask(ACCEPTED), Commit)
        assert process.exchange.step is Step.POLL

    def test_the_others_wait_until_it_is_accepted(self) -> None:
        process = Process(range(2))
        process.send_own(0, 1)
        process.ask(send())
        assert process.exchange.step is Step.OFFER
        process.ask(OfferAnswer(state="accepted", version=1))
        assert process.exchange.step is Step.POLL

    @pytest.mark.parametrize(("speaks", "wait_s"), [(True, 8.0), (False, 0.0)])
    def test_only_the_one_that_speaks_keeps_the_server_waiting(self, speaks: bool, wait_s: float) -> None:
        process = Process(range(2), speaks=speaks)
        process.session.answer = replace(joined(), plan=replace(make_plan(), revision=3))
        process.ask(OfferAnswer(state="accepted", version=1))
        poll = process.ask(nothing_yet(retry_after_s=1.0))
        assert isinstance(poll, Poll)
        assert (poll.wait_s, poll.sections, poll.plan_revision) == (wait_s, 2, 3)
        pause_s = 1.0 if speaks else 8.0
        assert 0.5 * pause_s <= process.exchange.wake_at - process.now <= 1.5 * pause_s

    def test_it_ends_at_the_agreement(self) -> None:
        process = Process(range(2))
        process.ask(OfferAnswer(state="accepted", version=1))
        process.ask(agreed(1))
        outcome = process.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement.version, outcome.counted, outcome.counted_in) == (1, True, 1)
        assert process.exchange.fetch is None

    def test_a_new_plan_comes_with_the_agreement(self) -> None:
        process = Process(range(2))
        process.ask(OfferAnswer(state="accepted", version=1))
        changed = make_plan(2)
        process.ask(PollAnswer(agreement=make_agreement(1), last_sequence=1, plan=changed))
        assert process.session.joined.plan == changed
        assert process.session.joined.incarnation == 1


def fetching(*pieces: Piece, **patience: Any) -> Exchange:
    session = Session(make_join("a"))
    session.answer = joined()
    return Exchange(
        session,
        fragment=0,
        after=0,
        now=0.0,
        fetch=Wanted(AGREEMENT, pieces),
        patience=Patience(**patience),
        rng=random.Random(0),
    )


class TestOnlyFetching:
    def test_it_begins_with_the_pieces_that_are_wanted_and_asks_for_no_others(self) -> None:
        exchange = fetching(Piece(0, 1))
        assert (exchange.step, exchange.agreement) == (Step.FETCH, AGREEMENT)
        [call] = exchange.calls(0.0)
        assert isinstance(call.request, GetPart)
        assert (call.request.version, call.request.part) == (3, 1)
        hash_ = agreement_hashes(0, 3)[1]
        exchange.answered(call, GetPartAnswer(hash=hash_), 0.0, received_hash=hash_)
        assert exchange.outcome is not None
        assert (exchange.outcome.agreement, exchange.outcome.counted) == (AGREEMENT, False)
        assert exchange.outcome.counted_in == 0

    def test_with_nothing_to_fetch_it_is_over_at_once(self) -> None:
        exchange = fetching()
        assert exchange.outcome is not None
        assert exchange.outcome.agreement == AGREEMENT

    def test_an_agreement_that_is_superseded_meanwhile_is_not_replaced_by_another(self) -> None:
        exchange = fetching(Piece(0, 0))
        [call] = exchange.calls(0.0)
        gone = Superseded("version 3 is not kept any more")
        exchange.failed(call, gone, 0.0)
        assert exchange.failure is gone

    def test_a_piece_that_is_lost_comes_before_those_not_asked_for_yet(self) -> None:
        exchange = fetching(Piece(0, 1), Piece(0, 0), calls_in_flight=1)
        [call] = exchange.calls(0.0)
        exchange.failed(call, LOST, 0.0)
        [again] = exchange.calls(exchange.wake_at)
        assert again.request == call.request


class TestOverdue:
    def test_an_offer_and_a_poll_may_take_the_time_they_were_given_and_nothing_else_may(self) -> None:
        for step in (Step.OFFER, Step.POLL):
            talk = Talk(poll_wait_s=5.0).brought_to(step)
            overdue = [talk.exchange.silent_s(talk.now + passed) for passed in (0.0, 4.0, 5.0, 7.5)]
            assert overdue == [0.0, 0.0, 0.0, 2.5]
        talk = Talk(poll_wait_s=5.0).brought_to(Step.SEND)
        assert [talk.exchange.silent_s(talk.now + passed) for passed in (0.0, 4.0)] == [0.0, 4.0]


class TestPauses:
    def test_before_the_first_answer_nothing_is_known(self) -> None:
        exchange = Talk().exchange
        assert (exchange.waiting_for, exchange.wanted, exchange.retries) == ("", frozenset(), 0)

    @pytest.mark.parametrize("at", [Step.OFFER, Step.POLL])
    def test_workers_that_are_told_to_wait_as_long_come_back_at_different_moments(self, at: Step) -> None:
        later = {Step.OFFER: OfferAnswer(state="wait", retry_after_s=1.0), Step.POLL: nothing_yet(retry_after_s=1.0)}
        pauses = []
        for seed in range(40):
            talk = Talk(seed=seed).brought_to(at)
            talk.say(later[at])
            pauses.append(talk.waits_s)
        assert 0.5 <= min(pauses) < 0.65
        assert 1.35 < max(pauses) <= 1.5

    def test_without_dice_of_its_own_it_throws_some(self) -> None:
        session = Session(make_join("a"))
        exchange = Exchange(session, fragment=0, after=-1, now=0.0)
        [call] = exchange.calls(0.0)
        exchange.failed(call, LOST, 0.0)
        assert exchange.wake_at > 0.0

    def test_a_poll_that_is_lost_after_a_fetch_was_given_up_is_asked_again(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        talk.say(Superseded("not kept any more"), LOST)
        assert isinstance(talk.say(agreed(2)), Poll)


class TestWhatIsCounted:
    def test_every_attempt_that_was_repeated(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        for retries in (1, 2):
            talk.say(Superseded("not kept any more"))
            assert (talk.exchange.step, talk.exchange.retries) == (Step.POLL, retries)
            talk.say(agreed(retries + 1))

    def test_every_time_it_joined_again(self) -> None:
        talk = Talk()
        for rejoins in (1, 2):
            talk.say(UnknownWorker("who?"))
            assert talk.exchange.rejoins == rejoins
            talk.say(joined(rejoins))

    def test_every_payload_that_was_not_the_announced_one(self) -> None:
        talk = Talk(damaged_parts=1).brought_to(Step.POLL)
        for _ in range(2):
            talk.say(agreed(1, parts=1))
            call = talk.next()
            talk.reply(call, GetPartAnswer(hash=agreement_hashes(0, 9)[0]))
        assert isinstance(talk.exchange.failure, HashMismatch)
        assert str(talk.exchange.failure) == "2 parts arrived changed. something on the path rewrites data"


class TestAnswersThatCannotBe:
    def test_a_part_beyond_the_last_is_not_looked_for(self) -> None:
        talk = Talk(parts=2)
        talk.say(send(1, 2))
        assert isinstance(talk.exchange.failure, TransportError)
        assert "parts that do not exist: 2" in str(talk.exchange.failure)

    def test_a_server_with_a_bug_is_not_asked_again(self) -> None:
        talk = Talk()
        bug = ServerFailed("a bug")
        talk.say(bug)
        assert talk.exchange.failure is bug


def test_a_server_that_is_behind_us_hands_out_whatever_it_has() -> None:
    talk = Talk()
    talk.say(FutureRound("fragment 0 is at version 0"))
    poll = talk.say(agreed(0, last_sequence=0))
    assert isinstance(poll, Poll)
    assert poll.after == -1
    assert talk.exchange.step is Step.FETCH


@pytest.mark.parametrize(("stays", "after"), [(True, 6), (False, 0)])
def test_a_worker_that_leaves_waits_for_its_own_round_and_others_for_any(stays: bool, after: int) -> None:
    talk = Talk(stay_for_own_round=stays).brought_to(Step.COMMIT)
    talk.say(CommitAnswer(version=7))
    poll = talk.say(nothing_yet())
    assert isinstance(poll, Poll)
    assert poll.after == after


def test_a_late_contribution_is_waited_for_in_asynchronous_rounds() -> None:
    talk = Talk()
    answer = joined()
    talk.session.answer = replace(answer, plan=replace(answer.plan, mode="async"))
    talk.brought_to(Step.COMMIT)
    talk.say(CommitAnswer(version=7))
    poll = talk.say(nothing_yet(waiting_for="the next contribution"))
    assert isinstance(poll, Poll)
    assert poll.after == 6
    assert talk.exchange.waiting_for == "the next contribution"


@pytest.mark.parametrize(("tiled", "said"), [(True, True), (False, UNSET)])
def test_a_poll_says_whether_its_sections_are_those_of_the_workers_tiling(tiled: bool, said: object) -> None:
    talk = Talk(contributes=False)
    exchange = Exchange(
        talk.session,
        fragment=0,
        after=0,
        now=0.0,
        share=Share(2, range(0), speaks=True, tiled=tiled),
        rng=random.Random(0),
    )
    [call] = exchange.calls(0.0)
    assert isinstance(call.request, Poll)
    assert call.request.tiled is said
