"""Proofs: who says two things under one key is caught, and nobody else can be."""

from __future__ import annotations

import msgspec
import pytest

from outerstep.coordination.gossip.book import Book
from outerstep.errors import ProtocolMismatch
from outerstep.simulate.gossip import Registry
from outerstep.statements import AnyStatement, Beat, Offered, Proof, Signed, Voted, body_of

RUN = "a-run"


def offered(digest: str = "a" * 64, sequence: int = 1, run_id: str = RUN) -> Offered:
    return Offered(
        run_id=run_id,
        fragment=0,
        version=1,
        sequence=sequence,
        digest=digest,
        size_bytes=8,
        base_hash="0" * 32,
        steps=1,
    )


def voted(block: str = "") -> Voted:
    return Voted(run_id=RUN, height=3, turn=0, kind="prevote", block=block)


class Someone:
    def __init__(self, registry: Registry, name: str) -> None:
        self.key, self._sign = registry.enter(name)
        self.book = Book(RUN, self.key, self._sign, registry.verify)

    def signs(self, statement: AnyStatement) -> Signed:
        body = body_of(statement)
        return Signed(author=self.key, body=body, signature=self._sign(body))


@pytest.fixture
def people() -> tuple[Someone, Someone]:
    registry = Registry()
    return Someone(registry, "judge"), Someone(registry, "suspect")


def test_what_was_signed_is_read_and_what_was_altered_is_not(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    signed = suspect.signs(offered())
    assert judge.book.read(signed) == offered()
    assert judge.book.read(msgspec.structs.replace(signed, body=body_of(offered("b" * 64)))) is None
    assert judge.book.read(msgspec.structs.replace(signed, author=judge.key)) is None


def test_what_was_said_in_another_run_means_nothing(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    assert judge.book.read(suspect.signs(offered(run_id="another"))) is None


def test_two_digests_under_one_key_are_a_proof_that_others_accept(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    for statement in (offered(), offered("b" * 64)):
        signed = suspect.signs(statement)
        judge.book.enter(signed, statement)
    proof = judge.book.proofs[suspect.key]
    assert suspect.book.convict(proof)  # any book will do, even its own
    assert suspect.book.proofs.keys() == {suspect.key}


def test_saying_the_same_again_or_something_under_another_key_proves_nothing(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    for statement in (offered(), offered(), offered("b" * 64, sequence=2), voted(), voted()):
        assert judge.book.enter(suspect.signs(statement), statement)
    assert not judge.book.proofs


def test_an_honest_peer_cannot_be_framed(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    first, other = suspect.signs(offered()), suspect.signs(offered("b" * 64, sequence=2))
    forged = Signed(author=suspect.key, body=body_of(offered("c" * 64)), signature=first.signature)
    by_somebody_else = judge.signs(offered("d" * 64))
    beat = Beat(run_id=RUN, peer_id="p", incarnation=1, number=1, address="h:1")
    beats = Proof(first=suspect.signs(beat), second=suspect.signs(msgspec.structs.replace(beat, number=2)))
    for proof in (
        Proof(first=first, second=first),
        Proof(first=first, second=other),
        Proof(first=first, second=forged),
        Proof(first=first, second=by_somebody_else),
        beats,
    ):
        assert not judge.book.convict(proof)
    assert not judge.book.proofs


def test_one_statement_has_one_body_and_so_cannot_contradict_itself(people: tuple[Someone, Someone]) -> None:
    """The same words written another way, with a signature: somebody could have collected both."""
    judge, suspect = people
    fields = msgspec.msgpack.decode(body_of(offered()))
    reordered = msgspec.msgpack.encode(dict(reversed(fields.items())))
    assert reordered != body_of(offered())
    assert judge.book.read(Signed(author=suspect.key, body=reordered, signature=suspect._sign(reordered))) is None


def test_what_belongs_to_a_later_protocol_than_the_runs_is_neither_said_nor_heard(
    people: tuple[Someone, Someone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the run's older members it would mean nothing: so it means nothing to all."""
    judge, suspect = people
    monkeypatch.setattr("outerstep.coordination.gossip.book.needs", lambda statement: 2 if statement == voted() else 1)
    older = Book(RUN, judge.key, judge._sign, judge.book._verify, protocol=1)
    assert judge.book.read(suspect.signs(voted())) == voted()
    assert older.read(suspect.signs(voted())) is None
    assert older.read(suspect.signs(offered())) == offered()
    with pytest.raises(ProtocolMismatch, match="a Voted of protocol 2 in a run that speaks 1"):
        older.write(voted())
