"""How a worker proves at a join which key it has.

    worker                                server
    AskNonce                       ──▶
                                   ◀──    nonce: fresh, and this process's own
    Join, with a JoinProof         ──▶    check_signature
                                   ◀──    JoinAnswer: the session's secret

What is signed names the worker id, the start (`instance`), the nonce, and the digest of the token that comes with it. A
signature is therefore good for one start at one server: a server that passes on to another what a worker signed for it
would have to show the token that the worker showed, and to that other server it means nothing.

A nonce is not remembered. It holds the time and a code that only the process which made it can compute. It may be shown
again while it lasts; that is of no use to anybody, because the same start then gets the same session.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from hashlib import sha256

from msgspec import UNSET
from msgspec.structs import replace

from ..errors import Busy, Forbidden
from ..types import Join, JoinProof
from .signing import SigningKey, verify

NONCE_LASTS_S = 900.0  # a join may carry 32 MiB over a slow link
PURPOSE = b"outerstep join 2"


class Nonces:
    """32 bytes: 8 of time (milliseconds), 8 at random, 16 of HMAC-SHA256 over both."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._secret = clock, secrets.token_bytes(32)

    def make(self) -> str:
        head = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(8)
        return (head + self._code(head)).hex()

    def check(self, nonce: str) -> None:
        """Was it made here, and lately?"""
        data = bytes.fromhex(nonce)
        head, code = data[:16], data[16:]
        if hmac.compare_digest(code, self._code(head)):
            age_s = self._clock() - int.from_bytes(head[:8], "big") / 1000
            if age_s <= NONCE_LASTS_S:
                return
        raise Busy("this nonce is not one of this server's, or no longer", hint="ask for another", retry_after_s=0.1)

    def _code(self, head: bytes) -> bytes:
        return hmac.digest(self._secret, head, "sha256")[:16]


def sign_join(join: Join, key: SigningKey, nonce: str, token: str) -> Join:
    signature = key.sign(_body(join, nonce, token))
    return replace(join, proof=JoinProof(key=key.public, nonce=nonce, signature=signature.hex()))


def check_signature(join: Join, nonces: Nonces, token: str) -> None:
    """Raises a Refused if the join claims a key that did not sign it. `token`: that came with it."""
    proof = join.proof
    if proof is UNSET:
        return
    nonces.check(proof.nonce)
    if not verify(proof.key, _body(join, proof.nonce, token), bytes.fromhex(proof.signature)):
        raise Forbidden(
            f"the signature of this join of {join.worker_id!r} is not that of the key it names",
            hint="it must cover the worker id, the instance, the nonce and the token that is shown",
        )


def _body(join: Join, nonce: str, token: str) -> bytes:
    """None of these can hold a zero byte."""
    digest = sha256(token.encode("latin-1", "replace")).hexdigest() if token else ""
    return b"\0".join([PURPOSE, *(part.encode() for part in (join.worker_id, join.instance, nonce, digest))])
