"""The worker's side of one exchange, call by call, with the server played by the test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.exchange import Call, Exchange, Patience, Session, Step
from outerstep.coordination.sending import Sending
from outerstep.digest import payload_hash
from outerstep.errors import (
    Busy,
    Conflict,
    Fenced,
    HashMismatch,
    IdInUse,
    MissingParts,
    NotFinite,
    OtherRun,
    OuterstepError,
    PlanMismatch,
    Refused,
    RoundStuck,
    ServerError,
    ServerUnreachable,
    StaleRound,
    Superseded,
    TooOld,
    TransportError,
    UnknownWorker,
)
from outerstep.types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    FragmentState,
    GetPart,
    GetPartAnswer,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Offer,
    OfferAnswer,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from unit.coordination.builders import (
    MANIFEST,
    PART_BYTES,
    RUN,
    agreement_hashes,
    contribution_hashes,
    make_agreement,
    make_join,
    make_key,
    make_offer,
    make_plan,
)

LOST = TransportError("connection reset")
STORED = PutPartAnswer(state="stored")
ACCEPTED = CommitAnswer(version=1)


def joined(incarnation: int = 1) -> JoinAnswer:
    return JoinAnswer(
        run_id=RUN,
        incarnation=incarnation,
        plan=make_plan(),
        manifest=MANIFEST,
        fragments=(FragmentState(version=0, last_sequence=0),),
    )


def send(*missing: int) -> OfferAnswer:
    return OfferAnswer(state="send", missing=missing)


def agreed(version: int = 1, *, last_sequence: int = 1, parts: int = 2) -> PollAnswer:
    return PollAnswer(agreement=make_agreement(version, parts=parts), last_sequence=last_sequence)


def nothing_yet(**facts: Any) -> PollAnswer:
    return PollAnswer(**{"agreement": None, "last_sequence": 1, "retry_after_s": 0.5, **facts})


class Talk:
    """An exchange and the test that plays the server: each `say` takes the next call and answers it."""

    def __init__(
        self,
        *,
        contributes: bool = True,
        is_joined: bool = True,
        parts: int = 2,
        seed: int = 0,
        claim: int | None = None,
        **patience: Any,
    ) -> None:
        self.now = 1000.0
        self.session = Session(make_join("a"))
        if is_joined:
            self.session.answer = joined()
        size_bytes = parts * PART_BYTES
        self.hashes = tuple(contribution_hashes(make_key("a"), size_bytes))
        self.exchange = Exchange(
            self.session,
            fragment=0,
            after=0 if contributes or claim is not None else -1,
            now=self.now,
            claim=claim,
            offer=make_offer("a", size_bytes=size_bytes) if contributes else None,
            part_hashes=self.hashes if contributes else (),
            patience=Patience(**patience),
            rng=random.Random(seed),
        )
        self._made: list[Call] = []
        self.earlier: Sending | None = None

    def next(self) -> Call:
        """The next call, as soon as the machine wants to make one."""
        if not self._made:
            self.now = max(self.now, self.exchange.wake_at)
            self._made = self.exchange.calls(self.now)
        assert self._made, f"nothing to send in step {self.exchange.step}"
        return self._made.pop(0)

    def say(self, *answers: Answer | OuterstepError) -> Request:
        """Answer the next calls, one each; returns the last request."""
        for answer in answers:
            call = self.next()
            self.reply(call, answer)
        return call.request

    def reply(self, call: Call, answer: Answer | OuterstepError, *, received: str | None = None) -> None:
        step = self.exchange.step
        if isinstance(answer, OuterstepError):
            self.exchange.failed(call, answer, self.now)
        else:
            hash_ = received if received is not None else getattr(answer, "hash", None)
            self.exchange.answered(call, answer, self.now, received_hash=hash_)
        if self.exchange.step is not step:
            self._made.clear()  # nobody waits for these any more

    def hand_over(self, agreement: Agreement) -> None:
        """Give it every part that it asks for."""
        hashes = agreement_hashes(agreement.fragment, agreement.version, agreement.size_bytes // PART_BYTES)
        while self.exchange.step is Step.FETCH and not self.exchange.done:
            call = self.next()
            assert isinstance(call.request, GetPart)
            self.reply(call, GetPartAnswer(hash=hashes[call.request.part]))

    def brought_to(self, step: Step) -> Talk:
        """The happy path up to the first call of `step`."""
        script: list[tuple[Step, list[Answer]]] = [
            (Step.JOIN, [joined()]),
            (Step.OFFER, [send(*range(len(self.hashes)))]),
            (Step.SEND, [STORED] * len(self.hashes)),
            (Step.COMMIT, [ACCEPTED]),
            (Step.POLL, [agreed()]),
        ]
        for at, answers in script:
            if self.exchange.step is at and at is not step:
                self.say(*answers)
        assert self.exchange.step is step
        return self

    @property
    def waits_s(self) -> float:
        return self.exchange.wake_at - self.now


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
        assert talk.say(send(0, 1)) == make_offer("a")
        for part in range(2):
            assert talk.say(STORED) == PutPart(**of, part=part, hash=talk.hashes[part])
        assert talk.say(ACCEPTED) == Commit(**of, payload_hash=payload_hash(talk.hashes))
        assert talk.say(agreed()) == Poll(**head, fragment=0, after=0, wait_s=Patience().poll_wait_s)
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
        assert offered == make_offer("a", incarnation=3)
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


EVERY_STEP = list(Step)


class TestLostAnswers:
    @pytest.mark.parametrize("step", EVERY_STEP, ids=lambda step: step.value)
    def test_a_lost_answer_is_asked_for_again_with_the_very_same_request(self, step: Step) -> None:
        talk = Talk(is_joined=False, calls_in_flight=1).brought_to(step)
        first = talk.next()
        talk.reply(first, LOST)
        again = talk.next()
        talk.reply(again, LOST)
        assert (again.request, talk.exchange.step) == (first.request, step)
        assert again.id != first.id
        assert talk.exchange.retries == 2

    @pytest.mark.parametrize("seed", range(5))
    def test_the_back_off_grows_and_is_jittered_and_bounded(self, seed: int) -> None:
        talk = Talk(seed=seed, first_backoff_s=1.0, longest_backoff_s=20.0, give_up_after_s=1e9)
        waits = []
        for _ in range(40):
            talk.say(LOST)
            waits.append(talk.waits_s)
        ceilings = [min(2.0**n, 20.0) for n in range(40)]
        assert all(0.5 * top - 1e-6 <= wait <= top + 1e-6 for wait, top in zip(waits, ceilings, strict=True))
        assert len(set(waits[-20:])) == 20

    @pytest.mark.row("F09")
    def test_two_workers_do_not_come_back_at_the_same_moment(self) -> None:
        waits = set()
        for seed in range(10):
            talk = Talk(seed=seed)
            talk.say(LOST)
            waits.add(talk.waits_s)
        assert len(waits) == 10

    def test_a_thousand_failures_do_not_overflow(self) -> None:
        assert Patience(longest_backoff_s=30.0).backoff_s(100_000, random.Random(0)) <= 30.0

    def test_nothing_is_sent_before_the_back_off_is_over(self) -> None:
        talk = Talk()
        talk.say(LOST)
        assert talk.waits_s > 0
        assert talk.exchange.calls(talk.exchange.wake_at - 0.001) == []
        assert len(talk.exchange.calls(talk.exchange.wake_at)) == 1

    def test_an_answer_makes_the_back_off_short_again(self) -> None:
        talk = Talk(first_backoff_s=1.0, longest_backoff_s=1000.0)
        talk.say(LOST, LOST, LOST, LOST, LOST)
        assert talk.waits_s > 1.0
        talk.say(send(0, 1), LOST)
        assert talk.waits_s <= 1.0

    def test_one_lost_part_does_not_repeat_the_others(self) -> None:
        talk = Talk(parts=3, calls_in_flight=3).brought_to(Step.SEND)
        calls = [talk.next() for _ in range(3)]
        talk.reply(calls[1], LOST)
        talk.reply(calls[0], STORED)
        talk.reply(calls[2], STORED)
        again = talk.say(STORED)
        assert isinstance(again, PutPart)
        assert again.part == 1
        assert talk.exchange.step is Step.COMMIT


class TestGivingUp:
    @pytest.mark.parametrize("error", [LOST, ServerError("the disk is full")])
    def test_it_gives_up_after_the_limit_of_silence_and_not_before(self, error: OuterstepError) -> None:
        talk = Talk(give_up_after_s=100.0)
        first = talk.now
        while talk.exchange.failure is None:
            assert talk.exchange.wake_at - first <= 100.0 + 30.0
            talk.say(error)
        assert talk.now - first > 100.0
        assert isinstance(talk.exchange.failure, ServerUnreachable)
        assert str(error) in str(talk.exchange.failure)
        assert "the limit is 100 s" in str(talk.exchange.failure)

    def test_at_exactly_the_limit_it_tries_once_more(self) -> None:
        talk = Talk(give_up_after_s=100.0)
        call = talk.next()
        talk.now += 100.0
        talk.reply(call, LOST)
        assert talk.exchange.failure is None

    @pytest.mark.parametrize("sign", [nothing_yet(), Busy("full", retry_after_s=1.0)], ids=["answer", "busy"])
    def test_every_answer_begins_the_silence_anew(self, sign: Answer | OuterstepError) -> None:
        talk = Talk(give_up_after_s=100.0).brought_to(Step.POLL)
        for _ in range(5):
            call = talk.next()
            talk.now += 80.0
            talk.reply(call, sign)
            talk.say(LOST)
        assert talk.exchange.failure is None

    @pytest.mark.parametrize(
        "kind", [Conflict, IdInUse, OtherRun, PlanMismatch, NotFinite, Superseded], ids=lambda kind: kind.code
    )
    def test_a_refusal_that_trying_again_cannot_mend_ends_it_with_that_refusal(self, kind: type[Refused]) -> None:
        refusal = kind("no")
        talk = Talk()
        talk.say(refusal)
        assert talk.exchange.failure is refusal
        assert (talk.exchange.done, talk.exchange.calls(talk.now + 1e6)) == (True, [])

    def test_an_answer_of_the_wrong_kind_ends_it(self) -> None:
        talk = Talk()
        talk.say(HeartbeatAnswer(sync_round=1))
        assert "Offer was answered by HeartbeatAnswer" in str(talk.exchange.failure)

    def test_busy_waits_as_told(self) -> None:
        talk = Talk()
        first = talk.say(Busy("full", retry_after_s=40.0))
        assert 40.0 <= talk.waits_s <= 60.0
        assert talk.say(send(0, 1)) == first

    def test_busy_without_a_time_does_not_spin(self) -> None:
        talk = Talk()
        talk.say(Busy("full"))
        assert talk.waits_s > 0

    def test_busy_for_a_part_keeps_the_part(self) -> None:
        talk = Talk().brought_to(Step.SEND)
        call = talk.next()
        talk.reply(call, Busy("full", retry_after_s=1.0))
        talk.say(STORED)
        assert talk.say(STORED) == call.request


class TestStuck:
    def poll_for(self, talk: Talk, seconds: float, *, stuck: bool = True) -> None:
        call = talk.next()
        talk.now += seconds
        talk.reply(call, nothing_yet(stuck=stuck, waiting_for="2 workers to join", retry_after_s=0.0))

    def test_a_stuck_round_is_given_up_after_the_limit_and_not_before(self) -> None:
        talk = Talk(stuck_after_s=60.0).brought_to(Step.POLL)
        self.poll_for(talk, 500.0)
        self.poll_for(talk, 59.0)
        assert talk.exchange.failure is None
        self.poll_for(talk, 1.0)
        assert isinstance(talk.exchange.failure, RoundStuck)
        assert "2 workers to join" in str(talk.exchange.failure)

    def test_a_round_that_was_free_in_between_is_stuck_from_anew(self) -> None:
        talk = Talk(stuck_after_s=60.0).brought_to(Step.POLL)
        self.poll_for(talk, 1.0)
        self.poll_for(talk, 50.0, stuck=False)
        self.poll_for(talk, 50.0)
        self.poll_for(talk, 50.0)
        assert talk.exchange.failure is None

    @pytest.mark.parametrize(("limit_s", "stuck"), [(None, True), (60.0, False)])
    def test_a_round_that_is_only_slow_and_a_worker_without_a_limit_wait(
        self, limit_s: float | None, stuck: bool
    ) -> None:
        talk = Talk(stuck_after_s=limit_s).brought_to(Step.POLL)
        for _ in range(10):
            self.poll_for(talk, 1e6, stuck=stuck)
        assert talk.exchange.failure is None


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
        assert talk.say(send(0, 1)) == make_offer("a")
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
        assert talk.say(send(0, 1)) == make_offer("a", incarnation=1000)

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
        assert offered == make_offer("a", incarnation=2)
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
        assert talk.say(send(0, 1)) == make_offer("a")

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
        assert talk.say(send(1)) == make_offer("a")
        part = talk.say(STORED)
        assert isinstance(part, PutPart)
        assert part.part == 1
        assert talk.exchange.step is Step.COMMIT


def damage_going_up(talk: Talk, call: Call) -> None:
    talk.reply(call, HashMismatch("a byte changed"))


def damage_coming_down(talk: Talk, call: Call) -> None:
    talk.reply(call, GetPartAnswer(hash=agreement_hashes(0, 1)[0]), received="0" * 16)


@pytest.mark.parametrize(
    ("step", "damage"), [(Step.SEND, damage_going_up), (Step.FETCH, damage_coming_down)], ids=["upload", "download"]
)
class TestDamage:
    @pytest.mark.row("F21")
    def test_a_damaged_part_travels_again_alone(self, step: Step, damage: Callable[[Talk, Call], None]) -> None:
        talk = Talk().brought_to(step)
        first, second = talk.next(), talk.next()
        damage(talk, first)
        good: dict[Step, Answer] = {Step.SEND: STORED, Step.FETCH: GetPartAnswer(hash=agreement_hashes(0, 1)[1])}
        talk.reply(second, good[step])
        assert talk.exchange.step is step
        calls = talk.exchange.calls(talk.now)
        assert [call.request for call in calls] == [first.request]

    def test_more_damage_than_a_line_makes_ends_it(self, step: Step, damage: Callable[[Talk, Call], None]) -> None:
        talk = Talk(damaged_parts=3, calls_in_flight=1).brought_to(step)
        for _ in range(3):
            damage(talk, talk.next())
        assert talk.exchange.failure is None
        damage(talk, talk.next())
        assert isinstance(talk.exchange.failure, HashMismatch)


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
