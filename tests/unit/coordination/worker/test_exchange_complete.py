"""A small contribution goes with its offer, and a small agreement comes with the answer to the poll."""

from __future__ import annotations

import random

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.worker.exchange import Exchange, Sending, Share, Step
from outerstep.errors import (
    BadRequest,
    Busy,
    HashMismatch,
    MissingParts,
    NotFinite,
    OuterstepError,
    ProtocolMismatch,
    StaleRound,
    Superseded,
)
from outerstep.types import (
    MOST_CARRIED_BYTES,
    Commit,
    CompleteOffer,
    CompleteOfferAnswer,
    GetPart,
    Offer,
    OfferAnswer,
    Poll,
    PollAnswer,
    PutPart,
    Trained,
)
from unit.coordination.builders import PART_BYTES, agreement_hashes, make_agreement, make_offer
from unit.coordination.talk import ACCEPTED, LOST, STORED, WAIT_S, Talk, agreed, joined, nothing_yet, send

TRAINED = Trained(dataset="d", places=((0, 1),))
TAKEN = CompleteOfferAnswer(state="accepted", version=1)


def carrying(version: int = 1, parts: int = 1) -> PollAnswer:
    return replace(agreed(version, parts=parts), carried_bytes=parts * PART_BYTES)


def poll(talk: Talk, answer: PollAnswer, *hashes: str) -> Poll:
    """Answer the next call, which is a poll, with payloads of these hashes."""
    call = talk.next()
    assert isinstance(call.request, Poll)
    talk.exchange.answered(call, answer, talk.now, carried_hashes=hashes)
    return call.request


class TestSending:
    def test_two_requests_make_an_exchange(self) -> None:
        talk = Talk(parts=1)
        offered = talk.say(TAKEN)
        assert offered == CompleteOffer(
            **{name: getattr(make_offer("a"), name) for name in Offer.__struct_fields__ if name != "size_bytes"},
            size_bytes=PART_BYTES,
            hash=talk.hashes[0],
        )
        assert poll(talk, carrying(), *agreement_hashes(0, 1, 1)).takes_bytes == MOST_CARRIED_BYTES
        outcome = talk.exchange.outcome
        assert outcome is not None
        assert (outcome.agreement, outcome.counted, talk.exchange.retries) == (make_agreement(1, parts=1), True, 0)

    def test_what_is_cut_into_parts_is_offered_first(self) -> None:
        assert type(Talk(parts=2).next().request) is Offer

    def test_what_is_too_large_is_offered_first(self) -> None:
        talk = Talk(parts=1)
        assert talk.exchange.outbox.own is not None
        own, answer = talk.exchange.outbox.own, joined()
        talk.session.answer = replace(answer, plan=replace(answer.plan, part_size_bytes=4 * MOST_CARRIED_BYTES))
        own.offer = replace(own.offer, size_bytes=MOST_CARRIED_BYTES + 1)
        assert type(talk.next().request) is Offer

    def test_it_is_offered_once_it_is_encoded(self) -> None:
        talk = Talk(parts=1)
        assert talk.exchange.outbox.own is not None
        talk.exchange.outbox.own.part_hashes.clear()
        assert talk.exchange.calls(talk.now) == []
        talk.exchange.part_ready(0, talk.hashes[0])
        assert isinstance(talk.next().request, CompleteOffer)

    @pytest.mark.parametrize(
        "trouble",
        [LOST, Busy("not now"), HashMismatch("a byte changed"), ProtocolMismatch("too old"), MissingParts("dropped")],
        ids=lambda error: type(error).__name__,
    )
    def test_whatever_goes_wrong_it_asks_before_it_sends_again(self, trouble: OuterstepError) -> None:
        """A lost answer may have been "accepted": then nothing is sent any more."""
        talk = Talk(parts=1)
        talk.say(trouble)
        assert type(talk.say(OfferAnswer(state="accepted", version=1))) is Offer
        assert talk.exchange.step is Step.POLL
        talk = Talk(parts=1)
        talk.say(trouble)
        assert [type(talk.say(answer)) for answer in (send(0), STORED, ACCEPTED)] == [Offer, PutPart, Commit]

    def test_a_server_without_room_is_asked_and_not_sent_the_bytes_again(self) -> None:
        talk = Talk(parts=1)
        talk.say(CompleteOfferAnswer(state="wait", retry_after_s=10.0))
        assert 5.0 <= talk.waits_s <= 15.0
        assert type(talk.next().request) is Offer

    def test_a_server_that_wants_parts_gets_parts(self) -> None:
        talk = Talk(parts=1)
        talk.say(CompleteOfferAnswer(state="send", missing=(0,)))
        assert [type(talk.say(answer)) for answer in (STORED, ACCEPTED)] == [PutPart, Commit]

    def test_a_round_that_has_closed_is_the_end_of_it(self) -> None:
        talk = Talk(parts=1)
        talk.say(StaleRound("too late"))
        assert talk.exchange.step is Step.POLL
        poll(talk, carrying(), *agreement_hashes(0, 1, 1))
        assert talk.exchange.outcome is not None
        assert not talk.exchange.outcome.counted

    @pytest.mark.parametrize("refusal", [NotFinite("NaN"), BadRequest("no")], ids=lambda error: type(error).__name__)
    def test_what_is_refused_for_good_is_a_failure(self, refusal: OuterstepError) -> None:
        talk = Talk(parts=1)
        talk.say(refusal)
        assert talk.exchange.failure is refusal

    def test_a_server_that_has_forgotten_it_gets_all_of_it_again(self) -> None:
        talk = Talk(parts=1)
        talk.say(TAKEN, nothing_yet(last_sequence=0))
        assert isinstance(talk.next().request, CompleteOffer)

    def test_an_earlier_one_is_asked_about_and_not_sent(self) -> None:
        """The server has it, unless it was restarted."""
        talk = Talk(parts=1)
        own = talk.exchange.outbox.own
        assert own is not None
        own.offer = replace(own.offer, sequence=2)
        outbox = type(talk.exchange.outbox)(Sending(make_offer("a", size_bytes=PART_BYTES), {0: "0" * 16}), own)
        talk.exchange.outbox = outbox
        earlier = talk.say(OfferAnswer(state="accepted", version=1))
        assert (type(earlier), getattr(earlier, "sequence", 0)) == (Offer, 1)
        following = talk.next().request
        assert isinstance(following, CompleteOffer)
        assert (following.sequence, following.follows) == (2, 1)

    def test_damage_is_counted_and_ends_somewhere(self) -> None:
        talk = Talk(parts=1, damaged_parts=0)
        talk.say(HashMismatch("a byte changed"))
        assert isinstance(talk.exchange.failure, HashMismatch)


class TestFetching:
    def test_a_chain_comes_along_too(self) -> None:
        talk = Talk(parts=1)
        talk.say(TAKEN)
        made = make_agreement(2, parts=1)
        chain = tuple(
            replace(make_agreement(version, parts=1).payloads[0], version=version, kind="update") for version in (1, 2)
        )
        answer = PollAnswer(agreement=replace(made, payloads=chain), last_sequence=1, carried_bytes=2 * PART_BYTES)
        poll(talk, answer, *agreement_hashes(0, 1, 1), *agreement_hashes(0, 2, 1))
        assert talk.exchange.outcome is not None

    @pytest.mark.parametrize(
        "hashes",
        [("0" * 16,), (*agreement_hashes(0, 1, 1), "0" * 16), tuple(agreement_hashes(0, 2, 1))],
        ids=["damaged", "too many", "of another version"],
    )
    def test_what_is_not_as_announced_is_fetched_in_parts(self, hashes: tuple[str, ...]) -> None:
        talk = Talk(parts=1)
        talk.say(TAKEN)
        poll(talk, carrying(), *hashes)
        assert talk.exchange.outcome is None
        assert isinstance(talk.next().request, GetPart)
        assert talk.exchange.step is Step.FETCH

    def test_of_a_payload_in_several_parts_nothing_is_taken_along(self) -> None:
        talk = Talk(parts=1)
        talk.say(TAKEN)
        poll(talk, carrying(parts=2), agreement_hashes(0, 1, 2)[0])
        assert talk.exchange.outcome is None
        talk.hand_over(make_agreement(1))
        assert talk.exchange.outcome is not None

    def test_damage_on_the_way_down_ends_somewhere(self) -> None:
        talk = Talk(parts=1, damaged_parts=0)
        talk.say(TAKEN)
        poll(talk, carrying(), "0" * 16)
        assert isinstance(talk.exchange.failure, HashMismatch)

    def test_a_poll_after_damage_takes_nothing_along(self) -> None:
        talk = Talk(parts=1)
        talk.say(HashMismatch("a byte changed"), OfferAnswer(state="accepted", version=1))
        assert poll(talk, nothing_yet()).takes_bytes is UNSET


class TestWhatDoesNotGoAlong:
    def test_a_contribution_with_facts_about_data_is_offered_first(self) -> None:
        talk = Talk(parts=1)
        own = talk.exchange.outbox.own
        assert own is not None
        own.offer = replace(own.offer, data=(TRAINED,))
        offered = talk.next().request
        assert isinstance(offered, Offer)
        assert (offered.data, offered.wait_s) == ((TRAINED,), WAIT_S)

    def test_a_process_of_a_group_offers_first(self) -> None:
        exchange = Exchange(
            Talk().session,
            fragment=0,
            after=0,
            now=0.0,
            offer=make_offer("a", size_bytes=PART_BYTES),
            part_hashes=Talk(parts=1).hashes,
            share=Share(1, range(1), speaks=True),
            rng=random.Random(0),
        )
        [call] = exchange.calls(0.0)
        assert type(call.request) is Offer
        assert exchange.parts == 0, "none is sent before the answer"

    def test_bytes_that_are_not_what_was_announced_are_counted_as_damage(self) -> None:
        talk = Talk(damaged_parts=1).brought_to(Step.POLL)
        poll(talk, carrying(), "0" * 16)
        assert talk.exchange.failure is None, "once may happen"
        talk.say(Superseded("a newer one is there"))
        poll(talk, carrying(2), "0" * 16)
        assert isinstance(talk.exchange.failure, HashMismatch)
        assert "2 parts arrived changed" in str(talk.exchange.failure)
