"""What peers have said under their keys, and what proves that one of them lies.

An honest peer says one thing under one key (statements.py), also after a restart: it writes down what it says before
anybody hears it. Two different statements under one key, both with the author's signature, are therefore a proof: it
can be handed on, everybody comes to the same conclusion, and nobody without the author's secret can make one up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ...errors import ProtocolMismatch
from ...statements import AnyStatement, Proof, Signed, body_of, key_of, statement_of
from ...versions import PROTOCOL_VERSION, needs

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]  # key, body, signature

MOST_READ = 8192  # statements whose signatures need not be checked again
MOST_SAID = 8192


class Book:
    def __init__(self, run_id: str, key: str, sign: Sign, verify: Verify, protocol: int = PROTOCOL_VERSION) -> None:
        """`key`: one's own. `protocol`: the run's."""
        self._run_id, self._key, self._protocol = run_id, key, protocol
        self._sign, self._verify = sign, verify
        self._read: OrderedDict[Signed, AnyStatement] = OrderedDict()
        self._said: OrderedDict[tuple[object, ...], Signed] = OrderedDict()
        self.proofs: dict[str, Proof] = {}  # by the key of the peer that is proven to lie

    def write(self, statement: AnyStatement) -> Signed:
        """One's own. What the run's protocol cannot say must not even be made: what others read is what counts."""
        if (needed := needs(statement)) > self._protocol:
            raise ProtocolMismatch(
                f"a {type(statement).__name__} of protocol {needed} in a run that speaks {self._protocol}"
            )
        body = body_of(statement)
        signed = Signed(author=self._key, body=body, signature=self._sign(body))
        self._remember(self._read, signed, statement, MOST_READ)
        return signed

    def read(self, signed: Signed) -> AnyStatement | None:
        """What it says. None: it is not what its author signed, of another run, or nothing that means anything."""
        known = self._read.get(signed)
        if known is not None:
            return known
        statement = statement_of(signed.body)
        if statement is None or statement.run_id != self._run_id:
            return None
        # Read as it was written, and no other way: else one statement could have two bodies, and frame its author.
        if body_of(statement) != signed.body:
            return None
        if needs(statement) > self._protocol:  # to some members it means nothing; so to none
            return None
        if not self._verify(signed.author, signed.body, signed.signature):
            return None
        self._remember(self._read, signed, statement, MOST_READ)
        return statement

    def enter(self, signed: Signed, statement: AnyStatement) -> bool:
        """Is it the first, or the same again, that its author says under this key? If not, that is proven now."""
        key = key_of(statement)
        if key is None:
            return True
        place = (signed.author, *key)
        before = self._said.get(place)
        if before is None:
            self._remember(self._said, place, signed, MOST_SAID)
            return True
        if before.body == signed.body:
            return True
        self.proofs.setdefault(signed.author, Proof(first=before, second=signed))
        return False

    def convict(self, proof: Proof) -> bool:
        """Does it prove what it claims? Then it is kept."""
        if proof.first.author in self.proofs:
            return True
        if not self.proves(proof):
            return False
        self.proofs[proof.first.author] = proof
        return True

    def proves(self, proof: Proof) -> bool:
        if proof.first.author != proof.second.author or proof.first.body == proof.second.body:
            return False
        first, second = self.read(proof.first), self.read(proof.second)
        return (
            first is not None and second is not None and key_of(first) is not None and key_of(first) == key_of(second)
        )

    @staticmethod
    def _remember(place: OrderedDict, key: object, value: object, most: int) -> None:  # type: ignore[type-arg]
        place[key] = value
        if len(place) > most:
            place.popitem(last=False)
