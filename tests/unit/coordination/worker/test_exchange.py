"""The worker's side of one exchange, call by call, with the server played by the test."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from outerstep.coordination.worker.exchange import Call, Patience, Session, Step
from outerstep.digest import payload_hash
from outerstep.errors import (
    Conflict,
    MissingParts,
    StaleRound,
    Superseded,
    UnknownWorker,
)
from outerstep.types import (
    MOST_CARRIED_BYTES,
    Commit,
    GetPart,
    GetPartAnswer,
    Join,
    Offer,
    OfferAnswer,
    Poll,
    PutPart,
)
from unit.coordination.builders import (
    RUN,
    agreement_hashes,
    make_agreement,
    make_join,
    make_offer,
)
from unit.coordination.talk import ACCEPTED, LOST, STORED, WAIT_S, Talk, agreed, joined, nothing_yet, send


class TestClaim:
    """A worker that was started anew asks for the agreement that holds what its earlier start contributed."""

    def test_it_waits_for_the_agreement_and_counts(self) -> None:
        talk = Talk(contributes=False, claim=3)
        polled = talk.say(nothing_yet(last_sequence=3))
        assert isinstance(polled, Poll)
        assert polled.after == 0
        talk.say(agreed(last_sequence=4))
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.counted

    def test_what_the_server_has_forgotten_is_not_waited_for_and_does_not_count(self) -> None:
        talk = Talk(contributes=False, claim=3)
        talk.say(nothing_yet(last_sequence=2))
        polled = talk.say(agreed(version=0, last_sequence=2))
        assert isinstance(polled, Poll)
        assert polled.after == -1
        talk.hand_over(make_agreement(0))
        assert talk.exchange.outcome is not None
        assert not talk.exchange.outcome.counted


class TestHappyPath:
    def test_offer_parts_commit_poll_fetch_done(self) -> None:
        talk = Talk()
        head = {"run_id": RUN, "worker_id": "a", "incarnation": 1}
        of = {**head, "fragment": 0, "sequence": 1}
        assert talk.say(send(0, 1)) == make_offer("a", wait_s=WAIT_S)
        for part in range(2):
            assert talk.say(STORED) == PutPart(**of, part=part, hash=talk.hashes[part])
        assert talk.say(ACCEPTED) == Commit(**of, payload_hash=payload_hash(talk.hashes))
        assert talk.say(agreed()) == Poll(
            **head, fragment=0, after=0, wait_s=Patience().poll_wait_s, takes_bytes=MOST_CARRIED_BYTES, trees=True
        )
        for part, hash_ in enumerate(agreement_hashes(0, 1)):
            assert not talk.exchange.done
            assert talk.say(GetPartAnswer(hash=hash_)) == GetPart(**head, fragment=0, version=1, part=part)
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement, outcome.counted, outcome.too_old) == (make_agreement(1), True, False)
        assert (talk.exchange.retries, talk.exchange.calls(talk.now + 100.0)) == (0, [])

    def test_it_joins_first_when_the_session_has_not(self) -> None:
        talk = Talk(is_joined=False)
        assert talk.say(joined(incarnation=3)) == make_join("a")
        offered = talk.say(send(0, 1))
        assert offered == make_offer("a", incarnation=3, wait_s=WAIT_S)
        assert talk.session.joined.incarnation == 3

    def test_without_a_contribution_it_fetches_what_there_is(self) -> None:
        talk = Talk(contributes=False)
        polled = talk.say(agreed(version=7, last_sequence=0))
        assert isinstance(polled, Poll)
        assert polled.after == -1
        talk.hand_over(make_agreement(7))
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement.version, outcome.counted) == (7, False)

    @pytest.mark.row("F02")
    def test_only_the_missing_parts_are_sent(self) -> None:
        talk = Talk(parts=4)
        talk.say(send(3, 1))
        sent = [talk.say(STORED) for _ in range(2)]
        assert [request.part for request in sent if isinstance(request, PutPart)] == [3, 1]
        assert talk.exchange.step is Step.COMMIT

    @pytest.mark.parametrize(
        ("answer", "step"), [(send(), Step.COMMIT), (OfferAnswer(state="accepted", version=1), Step.POLL)]
    )
    def test_what_the_server_has_already_is_not_sent(self, answer: OfferAnswer, step: Step) -> None:
        talk = Talk()
        talk.say(answer)
        assert talk.exchange.step is step

    def test_the_commit_waits_for_every_part_to_be_answered(self) -> None:
        talk = Talk().brought_to(Step.SEND)
        calls = [talk.next(), talk.next()]
        talk.reply(calls[1], STORED)
        assert (talk.exchange.step, talk.exchange.calls(talk.now)) == (Step.SEND, [])
        talk.reply(calls[0], STORED)
        assert talk.exchange.step is Step.COMMIT

    def test_who_finds_no_room_asks_again_later(self) -> None:
        talk = Talk()
        talk.say(OfferAnswer(state="wait", retry_after_s=10.0))
        assert 5.0 <= talk.waits_s <= 15.0
        assert isinstance(talk.say(send(0, 1)), Offer)

    def test_nothing_newer_yet_polls_again_later(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(nothing_yet(retry_after_s=10.0))
        assert 5.0 <= talk.waits_s <= 15.0
        assert isinstance(talk.say(agreed()), Poll)

    def test_it_passes_on_which_other_rounds_want_us(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(nothing_yet(wanted=((1, 4), (2, 5))))
        assert talk.exchange.wanted == {(1, 4), (2, 5)}
        talk.say(nothing_yet())
        assert talk.exchange.wanted == frozenset()


class TestFetching:
    def test_a_version_superseded_while_fetching_is_polled_for_again(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        talk.say(GetPartAnswer(hash=agreement_hashes(0, 1)[0]))
        first = talk.exchange.fetch
        talk.say(Superseded("version 1 is not held"))
        polled = talk.say(agreed(3))
        assert isinstance(polled, Poll)
        assert talk.exchange.fetch is not first
        talk.hand_over(make_agreement(3))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.agreement.version == 3

    def test_parts_of_an_abandoned_fetch_are_not_mixed_with_those_of_the_next(self) -> None:
        talk = Talk().brought_to(Step.POLL)
        talk.say(agreed(1, parts=3))
        calls = [talk.next() for _ in range(3)]
        talk.reply(calls[2], GetPartAnswer(hash=agreement_hashes(0, 1, 3)[2]))
        talk.reply(calls[0], Superseded("version 1 is not held"))
        talk.say(agreed(3, parts=2))
        talk.hand_over(make_agreement(3, parts=2))
        assert talk.exchange.outcome is not None

    def test_parts_that_do_not_make_the_announced_payload_are_not_an_outcome(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        talk.say(*(GetPartAnswer(hash=hash_) for hash_ in agreement_hashes(0, 2)))
        assert talk.exchange.outcome is None
        assert isinstance(talk.say(agreed()), Poll)
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None

    def test_parts_may_arrive_in_any_order(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        calls = [talk.next(), talk.next()]
        for part in (1, 0):
            talk.reply(calls[part], GetPartAnswer(hash=agreement_hashes(0, 1)[part]))
        assert talk.exchange.outcome is not None


class TestInFlight:
    @pytest.mark.parametrize("limit", [1, 2, 4, 9])
    @pytest.mark.parametrize("step", [Step.SEND, Step.FETCH], ids=lambda step: step.value)
    def test_never_more_calls_at_once_than_allowed(self, step: Step, limit: int) -> None:
        """Answers come in random order, some are lost; every part must have travelled in the end."""
        rng = random.Random(limit)
        talk = Talk(parts=7, calls_in_flight=limit)
        talk.brought_to(Step.POLL if step is Step.FETCH else step)
        if step is Step.FETCH:
            talk.say(agreed(parts=7))
        open_calls: list[Call] = []
        most = 0
        done: set[int] = set()
        while talk.exchange.step is step and not talk.exchange.done:
            talk.now = max(talk.now, talk.exchange.wake_at)
            open_calls += talk.exchange.calls(talk.now)
            most = max(most, len(open_calls))
            call = open_calls.pop(rng.randrange(len(open_calls)))
            assert isinstance(call.request, PutPart | GetPart)
            if rng.random() < 0.3:
                talk.reply(call, LOST)
                continue
            done.add(call.request.part)
            hash_ = agreement_hashes(0, 1, 7)[call.request.part]
            talk.reply(call, STORED if step is Step.SEND else GetPartAnswer(hash=hash_))
        assert most == min(limit, 7)
        assert done == set(range(7))
        assert talk.exchange.failure is None

    @pytest.mark.parametrize("step", [Step.JOIN, Step.OFFER, Step.COMMIT, Step.POLL], ids=lambda step: step.value)
    def test_a_question_is_asked_once_until_it_is_answered(self, step: Step) -> None:
        talk = Talk(is_joined=False).brought_to(step)
        assert len(talk.exchange.calls(talk.now)) == 1
        assert talk.exchange.calls(talk.now + 1e6) == []


class TestLateAnswers:
    def test_answers_to_calls_of_an_earlier_step_are_ignored(self) -> None:
        talk = Talk().brought_to(Step.SEND)
        early, late = talk.next(), talk.next()
        talk.reply(early, MissingParts("not on offer"))
        retries, wake_at = talk.exchange.retries, talk.exchange.wake_at
        for answer in (STORED, LOST, UnknownWorker("who?"), StaleRound("closed")):
            talk.reply(late, answer)
        assert (talk.exchange.step, talk.exchange.retries, talk.exchange.wake_at) == (Step.OFFER, retries, wake_at)

    def test_a_late_part_answer_does_not_count_for_the_parts_sent_since(self) -> None:
        talk = Talk().brought_to(Step.SEND)
        early, late = talk.next(), talk.next()
        talk.reply(early, MissingParts("not on offer"))
        talk.say(send(0, 1))
        first, second = talk.next(), talk.next()
        talk.reply(first, STORED)
        talk.reply(late, STORED)
        assert talk.exchange.step is Step.SEND
        talk.reply(second, STORED)
        assert talk.exchange.step is Step.COMMIT

    def test_an_answer_that_comes_twice_counts_once(self) -> None:
        talk = Talk().brought_to(Step.OFFER)
        call = talk.next()
        talk.reply(call, send(0, 1))
        talk.reply(call, OfferAnswer(state="accepted", version=1))
        assert talk.exchange.step is Step.SEND

    def test_an_answer_after_the_call_was_given_up_is_ignored(self) -> None:
        talk = Talk()
        call = talk.next()
        talk.reply(call, LOST)
        talk.reply(call, send(0, 1))
        assert talk.exchange.step is Step.OFFER

    def test_late_bytes_of_an_abandoned_fetch_are_ignored(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        early, late = talk.next(), talk.next()
        talk.reply(early, Superseded("not held"))
        talk.say(agreed(3))
        talk.reply(late, GetPartAnswer(hash=agreement_hashes(0, 1)[1]))
        talk.hand_over(make_agreement(3))
        assert talk.exchange.outcome is not None
        assert talk.exchange.outcome.agreement.version == 3

    def test_nothing_changes_after_the_end(self) -> None:
        talk = Talk().brought_to(Step.FETCH)
        calls = [talk.next(), talk.next()]
        talk.reply(calls[0], Conflict("other bytes"))
        failure = talk.exchange.failure
        talk.reply(calls[1], LOST)
        assert isinstance(failure, Conflict)
        assert (talk.exchange.failure, talk.exchange.outcome) == (failure, None)


class TestSession:
    def test_a_first_join_names_no_run_and_a_rejoin_does(self) -> None:
        session = Session(make_join("a"))
        assert session.join_request.run_id is None
        session.answer = joined()
        assert session.join_request == replace(make_join("a"), run_id=RUN)

    def test_a_rejoin_changes_the_incarnation_for_everybody_who_holds_the_session(self) -> None:
        talk = Talk()
        talk.session.answer = joined(incarnation=5)
        assert talk.session.head == {"run_id": RUN, "worker_id": "a", "incarnation": 5}
        offered = talk.say(send(0, 1))
        assert isinstance(offered, Offer)
        assert offered.incarnation == 5

    def test_before_the_join_there_is_no_head(self) -> None:
        session = Session(make_join("a"))
        with pytest.raises(AssertionError, match="not joined"):
            _ = session.head

    def test_the_session_remembers_the_join_it_was_made_with(self) -> None:
        assert isinstance(Session(make_join("a")).join_request, Join)
        assert Session(make_join("b")).worker_id == "b"
