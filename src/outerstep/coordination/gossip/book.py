"""What peers have said under their keys, and what proves that one of them lies.

An honest peer says one thing under one key (statements.py), also after a restart: it writes down what it says before
anybody hears it. Two different statements under one key, both with the author's signature, are therefore a proof: it
can be handed on, everybody comes to the same conclusion, and nobody without the author's secret can make one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import UNSET

from ...errors import ProtocolMismatch
from ...statements import (
    AnyStatement,
    Beat,
    Proof,
    Signed,
    Withdrawal,
    body_of,
    invitation_body,
    key_of,
    statement_of,
    withdrawal_body,
)
from ...versions import PROTOCOL_VERSION, needs
from .bounds import (
    BEAT_BYTES_PER_FRAGMENT,
    KEPT_BYTES,
    KEPT_BYTES_PER_FRAGMENT,
    MOST_CHANGE_BYTES,
    Shares,
    is_short,
    is_within_bounds,
)
from .names import vouched

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]  # key, body, signature

MOST_INVITATIONS = 256  # whose signatures need not be checked again
STRANGERS = ""  # whose statements are kept as if all were one author's


@dataclass
class _ReadStatement:
    """A statement whose signature need not be checked again. `settled_at`: the height at which all was made of it that
    can be; it may mean more at another."""

    statement: AnyStatement
    settled_at: int = -1


class Book:
    """What is not signed by its author, or means nothing, is not kept; of the rest, so many bytes of each member."""

    def __init__(
        self,
        run_id: str,
        key: str,
        sign: Sign,
        verify: Verify,
        protocol: int = PROTOCOL_VERSION,
        fragments: int = 1,
        inviter: str = "",
    ) -> None:
        """`key`: one's own. `protocol`, `inviter`: the run's."""
        self._inviter = inviter
        self._invited: dict[tuple[str, str, str], bool] = {}
        self._run_id, self._key, self._protocol, self._fragments = run_id, key, protocol, fragments
        self._sign, self._verify = sign, verify
        share_bytes = KEPT_BYTES + KEPT_BYTES_PER_FRAGMENT * fragments
        self._read: Shares[Signed, _ReadStatement] = Shares(share_bytes)
        self._said: Shares[tuple[object, ...], Signed] = Shares(share_bytes)
        self._members = {key}
        self.proofs: dict[str, Proof] = {}  # by the key of the peer that is proven to lie
        self.withdrawn: dict[str, Withdrawal] = {}  # by the key of the peer, until a block says so

    @property
    def size_bytes(self) -> int:
        """Of what it keeps, about."""
        return self._read.size_bytes + self._said.size_bytes

    def attend_to(self, members: Iterable[str]) -> None:
        """These have a share each."""
        self._members = {self._key, *members}
        for shares in (self._read, self._said):
            shares.keep_only({STRANGERS, *self._members})

    def write(self, statement: AnyStatement) -> Signed:
        """One's own. What the run's protocol cannot say must not even be made: what others read is what counts."""
        if self._protocol < PROTOCOL_VERSION and (needed := needs(statement)) > self._protocol:
            raise ProtocolMismatch(
                f"a {type(statement).__name__} of protocol {needed} in a run that speaks {self._protocol}"
            )
        body = body_of(statement)
        signed = Signed(author=self._key, body=body, signature=self._sign(body))
        self._keep_reading(signed, statement)
        return signed

    def read(self, signed: Signed) -> AnyStatement | None:
        """What it says. None: it is not what its author signed, of another run, or nothing that means anything."""
        known = self._read.get(self._owner(signed), signed)
        if known is not None:
            return known.statement
        if len(signed.body) > MOST_CHANGE_BYTES + BEAT_BYTES_PER_FRAGMENT * self._fragments:
            return None  # longer than any that means something
        statement = statement_of(signed.body)
        if statement is None or statement.run_id != self._run_id:
            return None
        # Read as it was written, and no other way: else one statement could have two bodies, and frame its author.
        if body_of(statement) != signed.body:
            return None
        if self._protocol < PROTOCOL_VERSION and needs(statement) > self._protocol:
            return None  # to some members it means nothing; so to none
        if not is_within_bounds(statement, len(signed.body), self._fragments):
            return None
        if not self._verify(signed.author, signed.body, signed.signature):
            return None
        self._keep_reading(signed, statement)
        return statement

    def is_owned(self, beat: Beat, key: str) -> bool:
        """Does the owner that it names vouch for the peer with this key? (One that names none claims nothing.)"""
        if beat.owner is UNSET:
            return True
        body = vouched(self._run_id, beat.peer_id, key)
        return self._verify(beat.owner.key, body, beat.owner.signature)

    def is_withdrawn(self, withdrawal: Withdrawal) -> bool:
        """Did the run's inviter take this invitation back? (It cannot take back its own place.)"""
        if not self._inviter or withdrawal.key == self._inviter:
            return False
        body = withdrawal_body(self._run_id, withdrawal.peer_id, withdrawal.key)
        return self._verify(self._inviter, body, bytes.fromhex(withdrawal.signature))

    def withdraw(self, withdrawal: Withdrawal) -> bool:
        """Keep it, if it is one. Nobody but the inviter can make any, so that they need no other bound."""
        if withdrawal.key not in self.withdrawn:
            if not self.is_withdrawn(withdrawal):
                return False
            self.withdrawn[withdrawal.key] = withdrawal
        return True

    def has_invitation(self, key: str, beat: Beat) -> bool:
        """May a peer with this key come to the run? Only if its inviter says so, where there is one."""
        if not self._inviter or key == self._inviter:
            return True
        if beat.invitation is UNSET or key in self.withdrawn:
            return False
        shown = (key, beat.peer_id, beat.invitation)
        if shown not in self._invited:
            if len(self._invited) >= MOST_INVITATIONS:
                self._invited.clear()
            body = invitation_body(self._run_id, beat.peer_id, key)
            self._invited[shown] = self._verify(self._inviter, body, bytes.fromhex(beat.invitation))
        return self._invited[shown]

    def settle(self, signed: Signed, height: int) -> None:
        """At this height there is nothing more to be made of it."""
        known = self._read.get(self._owner(signed), signed)
        if known is not None:
            known.settled_at = height

    def is_settled(self, signed: Signed, height: int) -> bool:
        known = self._read.get(self._owner(signed), signed)
        return known is not None and known.settled_at == height

    def enter(self, signed: Signed, statement: AnyStatement) -> bool:
        """Is it the first, or the same again, that its author says under this key? If not, that is proven now, if both
        are short enough to be passed on."""
        key = key_of(statement)
        if key is None:
            return True
        place, owner = (signed.author, *key), self._owner(signed)
        before = self._said.get(owner, place)
        if before is None:
            self._said.put(owner, place, signed, len(signed.body))
            return True
        if before.body == signed.body:
            return True
        proof = Proof(first=before, second=signed)
        if is_short(proof):
            self.proofs.setdefault(signed.author, proof)
        return False

    def convict(self, proof: Proof) -> bool:
        """Does it prove what it claims, of a member? Then it is kept."""
        if proof.first.author in self.proofs:
            return True
        if proof.first.author not in self._members or not self.proves(proof):
            return False
        self.proofs[proof.first.author] = proof
        return True

    def proves(self, proof: Proof) -> bool:
        if proof.first.author != proof.second.author or proof.first.body == proof.second.body:
            return False
        if not is_short(proof):
            return False
        first, second = self.read(proof.first), self.read(proof.second)
        return (
            first is not None and second is not None and key_of(first) is not None and key_of(first) == key_of(second)
        )

    def _owner(self, signed: Signed) -> str:
        return signed.author if signed.author in self._members else STRANGERS

    def _keep_reading(self, signed: Signed, statement: AnyStatement) -> None:
        """It is kept twice: as it was written, and as it is read."""
        self._read.put(self._owner(signed), signed, _ReadStatement(statement), 2 * len(signed.body))
