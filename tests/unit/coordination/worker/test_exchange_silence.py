"""The worker's side of one exchange when answers are lost, refused, damaged or never come."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outerstep.coordination.worker.exchange import Call, Patience, Step
from outerstep.errors import (
    Busy,
    Conflict,
    HashMismatch,
    IdInUse,
    NotFinite,
    OtherRun,
    OuterstepError,
    PlanMismatch,
    Refused,
    RoundStuck,
    ServerError,
    ServerUnreachable,
)
from outerstep.types import (
    Answer,
    GetPartAnswer,
    HeartbeatAnswer,
    PutPart,
)
from unit.coordination.builders import (
    agreement_hashes,
)
from unit.coordination.talk import LOST, STORED, Talk, nothing_yet, send

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

    @pytest.mark.parametrize("kind", [Conflict, IdInUse, OtherRun, PlanMismatch, NotFinite], ids=lambda kind: kind.code)
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
        assert 0.05 <= talk.waits_s <= 0.08

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


@pytest.mark.parametrize("seed", range(8))
def test_a_server_that_is_busy_is_not_asked_before_the_time_it_named(seed: int) -> None:
    talk = Talk(seed=seed)
    talk.say(Busy("full", retry_after_s=10.0))
    assert 10.0 <= talk.waits_s <= 15.0
