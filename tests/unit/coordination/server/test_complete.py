"""An offer that brings its contribution along: three decisions, one after the other, as far as they go."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict

from outerstep.coordination.server.uploads import take_apart, take_complete
from outerstep.digest import part_hash, payload_hash
from outerstep.errors import BadRequest, HashMismatch
from outerstep.types import (
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    Offer,
    OfferAnswer,
    PutPart,
)
from unit.coordination.builders import PART_BYTES, make_offer

HASH = part_hash(b"x" * PART_BYTES)
OFFER = make_offer("a", 3, size_bytes=PART_BYTES, follows=2, loss=0.5)


def complete(**changes: Any) -> CompleteOffer:
    return CompleteOffer(**{**asdict(OFFER), "hash": HASH, **changes})


class Server:
    """Notes what it is asked; its answer to the offer is up to the test."""

    def __init__(self, answer: OfferAnswer, *, damaged: bool = False) -> None:
        self.asked: list[object] = []
        self._answer, self._damaged = answer, damaged

    def take(self) -> CompleteOfferAnswer:
        return take_complete(complete(), self._offer, self._put, self._commit)

    def _offer(self, message: Offer) -> OfferAnswer:
        self.asked.append(message)
        return self._answer

    def _put(self, message: PutPart) -> None:
        self.asked.append(message)
        if self._damaged:
            raise HashMismatch("a byte changed")

    def _commit(self, message: Commit) -> CommitAnswer:
        self.asked.append(message)
        return CommitAnswer(version=7)


def test_it_is_an_offer_a_part_and_a_commit_under_one_key() -> None:
    offer, part, commit = take_apart(complete())
    assert offer == OFFER
    assert (part.key, part.incarnation, part.part, part.hash) == (OFFER.key, OFFER.incarnation, 0, HASH)
    assert (commit.key, commit.incarnation, commit.payload_hash) == (OFFER.key, OFFER.incarnation, payload_hash([HASH]))


def test_sections_do_not_come_with_an_offer() -> None:
    with pytest.raises(BadRequest, match="has 2 sections; one that comes with its offer has one part"):
        take_apart(complete(section_bytes=(4, 4)))


def test_all_three_are_decided_in_their_order() -> None:
    server = Server(OfferAnswer(state="send", missing=(0,)))
    assert server.take() == CompleteOfferAnswer(state="accepted", version=7)
    assert server.asked == [*take_apart(complete())]


@pytest.mark.parametrize(
    "known", [OfferAnswer(state="send"), OfferAnswer(state="accepted", version=7)], ids=["here", "accepted"]
)
def test_what_is_here_already_is_compared_and_not_read_again(known: OfferAnswer) -> None:
    server = Server(known)
    assert server.take() == CompleteOfferAnswer(state="accepted", version=7)
    assert [type(message) for message in server.asked] == [Offer, Commit]


@pytest.mark.parametrize(
    "answer",
    [OfferAnswer(state="wait", retry_after_s=2.0), OfferAnswer(state="send", missing=(0, 1))],
    ids=["no room", "in parts"],
)
def test_what_cannot_be_taken_at_once_is_answered_as_a_plain_offer_is(answer: OfferAnswer) -> None:
    server = Server(answer)
    assert asdict(server.take()) == asdict(answer)
    assert [type(message) for message in server.asked] == [Offer]


def test_a_damaged_part_is_not_committed() -> None:
    server = Server(OfferAnswer(state="send", missing=(0,)), damaged=True)
    with pytest.raises(HashMismatch):
        server.take()
    assert [type(message) for message in server.asked] == [Offer, PutPart]
