"""Proofs: who says two things under one key is caught, and nobody else can be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from outerstep.coordination.gossip import book as book_module
from outerstep.coordination.gossip import bounds
from outerstep.coordination.gossip.book import Book
from outerstep.coordination.gossip.chain import found
from outerstep.coordination.gossip.meaning import may_be_let_in
from outerstep.coordination.gossip.names import vouched
from outerstep.errors import ProtocolMismatch
from outerstep.simulate.gossip import Registry
from outerstep.statements import (
    AnyStatement,
    Beat,
    Member,
    Name,
    Offered,
    Ownership,
    Proof,
    Signed,
    Voted,
    Withdrawal,
    body_of,
    invitation_body,
    withdrawal_body,
)

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
    judge.book.attend_to([suspect.key])
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


def beat(number: int = 1, **facts: Any) -> Beat:
    return Beat(**{"run_id": RUN, "peer_id": "p", "incarnation": 1, "number": number, "address": "h:1", **facts})


def test_what_it_writes_it_reads_without_checking_it_again(people: tuple[Someone, Someone]) -> None:
    judge, _ = people
    checked: list[str] = []

    def verify(key: str, body: bytes, signature: bytes) -> bool:
        checked.append(key)
        return True

    book = Book(RUN, judge.key, judge._sign, verify)
    signed = book.write(voted())
    assert (signed.author, signed.body, signed.signature) == (
        judge.key,
        body_of(voted()),
        judge._sign(body_of(voted())),
    )
    assert book.read(signed) == voted()
    assert checked == []
    theirs = msgspec.structs.replace(signed, author="f" * 64)
    assert book.read(theirs) == book.read(theirs) == voted()
    assert checked == ["f" * 64]


def test_what_is_longer_than_anything_that_can_be_meant_is_not_even_decoded(
    people: tuple[Someone, Someone], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, suspect = people
    for size, is_read in ((len(body_of(offered())), True), (len(body_of(offered())) - 1, False)):
        monkeypatch.setattr(book_module, "MOST_CHANGE_BYTES", size - 64 * 3)
        book = Book(RUN, judge.key, judge._sign, judge.book._verify, fragments=3)
        assert (book.read(suspect.signs(offered())) is not None) is is_read


def test_a_beat_may_be_longer_where_there_are_more_fragments(people: tuple[Someone, Someone]) -> None:
    judge, suspect = people
    long = suspect.signs(beat(held=((1, "0" * 32),) * 150))
    assert len(long.body) > bounds.MOST_BEAT_BYTES + bounds.BEAT_BYTES_PER_FRAGMENT
    assert judge.book.read(long) is None
    assert Book(RUN, judge.key, judge._sign, judge.book._verify, fragments=150).read(long) is not None


class TestSettled:
    def test_at_a_height_and_at_no_other(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        signed = suspect.signs(offered())
        judge.book.settle(signed, 3)
        assert not judge.book.is_settled(signed, 3), "what was not read is not settled"
        judge.book.read(signed)
        assert not judge.book.is_settled(signed, 0)
        judge.book.settle(signed, 3)
        assert judge.book.is_settled(signed, 3)
        assert not judge.book.is_settled(signed, 4)


class TestShares:
    def test_who_is_attended_to_has_a_share_and_who_is_no_more_loses_it(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        signed, own = suspect.signs(offered()), judge.book.write(voted())
        judge.book.attend_to([suspect.key])
        before = judge.book.size_bytes
        judge.book.read(signed)
        judge.book.settle(signed, 3)
        judge.book.enter(signed, offered())
        kept = 3 * len(signed.body) + 2 * bounds.ENTRY_BYTES  # what was written, twice, and that it was said
        assert judge.book.size_bytes == before + kept
        judge.book.attend_to([])
        assert judge.book.size_bytes == before
        assert not judge.book.is_settled(signed, 3)
        judge.book.settle(own, 3)
        assert judge.book.is_settled(own, 3), "its own are kept in any case"

    def test_strangers_have_one_share_together(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        signed = suspect.signs(offered())
        judge.book.read(signed)
        judge.book.attend_to([])
        judge.book.settle(signed, 3)
        assert judge.book.is_settled(signed, 3)

    def test_a_share_grows_with_the_fragments(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        for fragments in (1, 5):
            book = Book(RUN, judge.key, judge._sign, judge.book._verify, fragments=fragments)
            share = bounds.KEPT_BYTES + bounds.KEPT_BYTES_PER_FRAGMENT * fragments
            for i in range(1, 700):
                statement = offered(f"{i:064x}", sequence=i)
                signed = suspect.signs(statement)
                book.read(signed)
                book.enter(signed, statement)
            assert 2 * share - 3 * bounds.ENTRY_BYTES < book.size_bytes <= 2 * share


class TestProofs:
    def test_what_contradicts_itself_is_not_entered_and_the_first_proof_stays(
        self, people: tuple[Someone, Someone]
    ) -> None:
        judge, suspect = people
        statements = [offered(d * 64) for d in "abc"]
        assert [judge.book.enter(suspect.signs(one), one) for one in statements] == [True, False, False]
        proof = Proof(first=suspect.signs(statements[0]), second=suspect.signs(statements[1]))
        assert judge.book.proofs == {suspect.key: proof}

    def test_beats_say_nothing_that_could_be_contradicted(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        assert all(judge.book.enter(suspect.signs(one), one) for one in (beat(), beat(address="h:2")))
        assert judge.book.proofs == {}

    def test_two_authors_may_say_different_things(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        assert judge.book.enter(judge.signs(offered()), offered())
        assert judge.book.enter(suspect.signs(offered("b" * 64)), offered("b" * 64))
        assert judge.book.proofs == {}

    def test_a_proof_is_kept_of_a_member_and_known_when_it_comes_again(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        proof = Proof(first=suspect.signs(offered()), second=suspect.signs(offered("b" * 64)))
        assert judge.book.proves(proof)
        assert not judge.book.convict(proof)
        judge.book.attend_to([suspect.key])
        assert judge.book.convict(proof)
        assert judge.book.proofs == {suspect.key: proof}
        other = Proof(first=suspect.signs(voted("c" * 64)), second=suspect.signs(voted("d" * 64)))
        assert judge.book.convict(other)
        assert judge.book.proofs == {suspect.key: proof}

    def test_a_long_statement_proves_nothing(
        self, people: tuple[Someone, Someone], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        judge, suspect = people
        first, second = (suspect.signs(offered(d * 64)) for d in "ab")
        monkeypatch.setattr(bounds, "MOST_PROVEN_BYTES", len(first.body))
        assert judge.book.proves(Proof(first=first, second=second))
        monkeypatch.setattr(bounds, "MOST_PROVEN_BYTES", len(first.body) - 1)
        assert not judge.book.proves(Proof(first=first, second=second))
        for signed, digest in ((first, "a"), (second, "b")):
            judge.book.enter(signed, offered(digest * 64))
        assert judge.book.proofs == {}

    def test_both_statements_must_hold(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        first, second = (suspect.signs(offered(d * 64)) for d in "ab")
        for bad in (0, 1):
            pair = [first, second]
            pair[bad] = msgspec.structs.replace(pair[bad], signature=bytes(64))
            assert not judge.book.proves(Proof(first=pair[0], second=pair[1]))


class TestInvited:
    """`judge` invites."""

    def book(self, judge: Someone) -> Book:
        return Book(RUN, judge.key, judge._sign, judge.book._verify, inviter=judge.key)

    def invitation(self, judge: Someone, suspect: Someone, name: str = "p") -> str:
        return judge._sign(invitation_body(RUN, name, suspect.key)).hex()

    def test_nobody_needs_one_where_nobody_invites(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        assert judge.book.has_invitation(suspect.key, beat())

    def test_the_inviter_needs_none_and_others_their_own(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        book = self.book(judge)
        good = self.invitation(judge, suspect)
        assert book.has_invitation(judge.key, beat())
        assert not book.has_invitation(suspect.key, beat())
        assert book.has_invitation(suspect.key, beat(invitation=good))
        assert not book.has_invitation(suspect.key, beat(invitation=self.invitation(judge, suspect, "q")))
        assert not book.has_invitation(suspect.key, beat(peer_id="q", invitation=good))
        forged = suspect._sign(invitation_body(RUN, "p", suspect.key)).hex()
        assert not book.has_invitation(suspect.key, beat(invitation=forged))

    def test_a_signature_is_checked_once_as_long_as_it_is_remembered(
        self, people: tuple[Someone, Someone], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        judge, suspect = people
        monkeypatch.setattr(book_module, "MOST_INVITATIONS", 2)
        checked: list[str] = []

        def verify(key: str, body: bytes, signature: bytes) -> bool:
            checked.append(signature.hex()[:1])
            return True

        book = Book(RUN, judge.key, judge._sign, verify, inviter=judge.key)
        for digit in "112121312":
            assert book.has_invitation(suspect.key, beat(invitation=digit * 128))
        assert checked == ["1", "2", "3", "1", "2"], "with a third one it begins anew"

    def test_withdrawn_by_the_inviter_it_counts_no_more(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        book = self.book(judge)
        good = beat(invitation=self.invitation(judge, suspect))
        body = withdrawal_body(RUN, "p", suspect.key)
        forged = Withdrawal(peer_id="p", key=suspect.key, signature=suspect._sign(body).hex())
        real = msgspec.structs.replace(forged, signature=judge._sign(body).hex())
        assert not book.withdraw(forged)
        assert (book.withdrawn, book.has_invitation(suspect.key, good)) == ({}, True)
        assert book.is_withdrawn(real)
        assert book.withdraw(real)
        assert (book.withdrawn, book.has_invitation(suspect.key, good)) == ({suspect.key: real}, False)
        assert book.withdraw(forged), "it is known to be withdrawn, whoever says so"
        assert book.withdrawn == {suspect.key: real}
        assert not book.is_withdrawn(msgspec.structs.replace(real, peer_id="q"))

    def test_the_inviter_cannot_withdraw_its_own_place_and_nobody_can_where_nobody_invites(
        self, people: tuple[Someone, Someone]
    ) -> None:
        judge, suspect = people
        own = judge._sign(withdrawal_body(RUN, "j", judge.key)).hex()
        assert not self.book(judge).is_withdrawn(Withdrawal(peer_id="j", key=judge.key, signature=own))
        theirs = judge._sign(withdrawal_body(RUN, "p", suspect.key)).hex()
        assert not judge.book.is_withdrawn(Withdrawal(peer_id="p", key=suspect.key, signature=theirs))


class TestOwned:
    def test_the_owner_that_it_names_must_vouch_for_name_and_key(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        signature = judge._sign(vouched(RUN, "p", suspect.key))
        owned = beat(owner=Ownership(key=judge.key, signature=signature))
        assert judge.book.is_owned(owned, suspect.key)
        assert not judge.book.is_owned(owned, judge.key)
        assert not judge.book.is_owned(msgspec.structs.replace(owned, peer_id="q"), suspect.key)
        assert not judge.book.is_owned(beat(owner=Ownership(key=suspect.key, signature=signature)), suspect.key)

    def test_one_that_names_none_claims_nothing(self, people: tuple[Someone, Someone]) -> None:
        judge, suspect = people
        assert beat().owner is UNSET
        assert judge.book.is_owned(beat(), suspect.key)

    def test_whoever_the_owner_vouches_for_may_come_under_its_name_with_another_key(
        self, people: tuple[Someone, Someone]
    ) -> None:
        judge, suspect = people
        before = Name(peer_id="p", key="ab" * 32, owner=judge.key)
        state = msgspec.structs.replace(found(Member(peer_id="j", key=judge.key), 1), names=(before,))
        newcomer = Member(peer_id="p", key=suspect.key)
        signature = judge._sign(vouched(RUN, "p", suspect.key))
        owned = beat(wants="belong", owner=Ownership(key=judge.key, signature=signature))
        assert may_be_let_in(newcomer, owned, state, judge.book)
        assert not may_be_let_in(newcomer, beat(wants="belong"), state, judge.book)

    def test_what_an_owner_signs_has_one_form(self) -> None:
        assert vouched("a-run", "p", "ab") == b"outerstep peer\0a-run\0p\0ab"
