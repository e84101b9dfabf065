"""Chains of updates, and parts whose hashes come one by one."""

from __future__ import annotations

import random

from outerstep.coordination.worker.exchange import Call, Exchange, Held, Patience, Piece, Session, Step
from outerstep.digest import part_hash, payload_hash
from outerstep.types import (
    Agreement,
    Answer,
    Commit,
    CommitAnswer,
    GetPart,
    GetPartAnswer,
    JoinAnswer,
    JoinedFragment,
    OfferAnswer,
    Payload,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
)
from unit.coordination.builders import MANIFEST, PART_BYTES, RUN, make_join, make_offer, make_plan

HASH = "0f" * 16


def hash_of(version: int, part: int) -> str:
    return part_hash(f"{version} {part}".encode())


def update(version: int, parts: int) -> Payload:
    proof = payload_hash([hash_of(version, part) for part in range(parts)])
    return Payload(version=version, kind="update", size_bytes=parts * PART_BYTES, hash=proof)


def chain(*payloads: Payload, version: int) -> Agreement:
    return Agreement(fragment=0, version=version, anchor_hash=HASH, payloads=payloads)


def make_exchange(held: Held | None = None, *, parts: int = 2, contributes: bool = False) -> Exchange:
    session = Session(make_join("a"))
    session.answer = JoinAnswer(
        run_id=RUN,
        incarnation=1,
        plan=make_plan(),
        manifest=MANIFEST,
        fragments=(JoinedFragment(version=0, last_sequence=0),),
    )
    return Exchange(
        session,
        fragment=0,
        after=held.version if held else -1,
        now=0.0,
        offer=make_offer("a", size_bytes=parts * PART_BYTES) if contributes else None,
        held=held,
        patience=Patience(),
        rng=random.Random(0),
    )


def say(exchange: Exchange, answer: Answer) -> Call:
    [call] = exchange.calls(0.0)
    exchange.answered(call, answer, 0.0)
    return call


def give(exchange: Exchange, call: Call) -> None:
    assert isinstance(call.request, GetPart)
    proof = hash_of(call.request.version, call.request.part)
    exchange.answered(call, GetPartAnswer(hash=proof), 0.0, received_hash=proof)


class TestChains:
    def test_it_says_what_it_holds_and_fetches_every_update_of_the_chain(self) -> None:
        exchange = make_exchange(Held(4, HASH))
        polled = say(exchange, PollAnswer(agreement=chain(update(5, 2), update(6, 1), version=6), last_sequence=0))
        assert isinstance(polled.request, Poll)
        assert (polled.request.held, polled.request.held_hash) == (4, HASH)
        calls = exchange.calls(0.0)
        asked = [(c.request.version, c.request.kind, c.request.part) for c in calls if isinstance(c.request, GetPart)]
        assert asked == [(5, "update", 0), (5, "update", 1), (6, "update", 0)]
        for call in reversed(calls):
            assert not exchange.done
            give(exchange, call)
        assert exchange.outcome is not None
        assert exchange.outcome.agreement.version == 6

    def test_who_holds_nothing_says_so(self) -> None:
        [call] = make_exchange().calls(0.0)
        assert isinstance(call.request, Poll)
        assert call.request.held_hash is None

    def test_an_empty_chain_is_what_we_hold(self) -> None:
        exchange = make_exchange(Held(4, HASH))
        say(exchange, PollAnswer(agreement=chain(version=4), last_sequence=0))
        assert exchange.outcome is not None
        assert exchange.calls(0.0) == []

    def test_a_chain_whose_second_payload_is_not_as_announced_is_polled_for_again(self) -> None:
        exchange = make_exchange(Held(4, HASH))
        other = Payload(version=6, kind="update", size_bytes=PART_BYTES, hash=HASH)
        say(exchange, PollAnswer(agreement=chain(update(5, 1), other, version=6), last_sequence=0))
        for call in exchange.calls(0.0):
            give(exchange, call)
        assert not exchange.done
        assert exchange.step is Step.POLL

    def test_a_piece_that_is_put_back_is_asked_for_again(self) -> None:
        session = Session(make_join("a"))
        session.answer = JoinAnswer(run_id=RUN, incarnation=1, plan=make_plan(), manifest=MANIFEST, fragments=())
        exchange = Exchange(session, fragment=0, after=4, now=0.0, held=Held(4, HASH))
        say(exchange, PollAnswer(agreement=chain(update(5, 1), update(6, 2), version=6), last_sequence=0))
        fetch = exchange.fetch
        assert fetch is not None
        assert fetch.pieces == (Piece(0, 0), Piece(1, 0), Piece(1, 1))
        first = fetch.next(0, session)
        assert first is not None
        fetch.again(first)
        assert fetch.next(0, session) == first


class TestPartsThatComeOneByOne:
    def test_a_part_is_sent_when_it_is_ready_and_the_commit_when_all_are(self) -> None:
        exchange = make_exchange(parts=3, contributes=True)
        say(exchange, OfferAnswer(state="send", missing=(0, 1, 2)))
        assert exchange.calls(0.0) == []
        hashes = [part_hash(bytes([part])) for part in range(3)]
        for part in (1, 0, 2):
            exchange.part_ready(part, hashes[part])
            call = say(exchange, PutPartAnswer(state="stored"))
            assert isinstance(call.request, PutPart)
            assert (call.request.part, call.request.hash) == (part, hashes[part])
        commit = say(exchange, CommitAnswer(version=1))
        assert isinstance(commit.request, Commit)
        assert commit.request.payload_hash == payload_hash(hashes)

    def test_without_all_hashes_nothing_is_committed(self) -> None:
        exchange = make_exchange(parts=2, contributes=True)
        exchange.part_ready(0, part_hash(b"0"))
        say(exchange, OfferAnswer(state="send", missing=()))
        assert exchange.step is Step.COMMIT
        assert exchange.calls(0.0) == []
        exchange.part_ready(1, part_hash(b"1"))
        [call] = exchange.calls(0.0)
        assert isinstance(call.request, Commit)
