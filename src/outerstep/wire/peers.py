"""What peers without a server ask of each other, beside what they tell each other (statements.py).

| request | answer |
|---|---|
| AskTerms | Terms: what run this is, and where it stands |
| Converse | Converse: what the other tells in return |
| AskSnapshot | OfferedSnapshot: which version of a fragment it could hand over, and the digests of its parts |
| AskParts | PartList: the digests of the parts of a payload with this digest |
| GetHeld  | HeldAnswer, and the bytes of one part |

Nothing in an answer is believed because of who gave it: parts are held against their digests, those against the
payload's, and that against what a signed offer, or more than f peers, have named (digest.py).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from ..digest import digest_of_parts, part_count
from ..statements import ChainState, Converse, Digest, PeerId, Signed
from ..types import Count, Plain, Positive, RunId

MOST_PARTS = 1 << 16
MOST_BEATS = 256
MOST_DOCUMENT_BYTES = 20 << 20  # with what it becomes as text, below the limit of a message
SNAPSHOT_PART_BYTES = 16 << 20  # the same for all peers: what they name must be comparable


class FromPeer(Plain, frozen=True):
    sender: PeerId


class AskTerms(FromPeer, frozen=True):
    protocol: Count


class Terms(Plain, frozen=True):
    """`document`: what the topology has the peers agree on before they begin, in its own form. `attackers`: as in the
    run's rules. `beats`: of the members, as far as they were heard; they say where those are."""

    run_id: RunId
    document: Annotated[bytes, Meta(max_length=MOST_DOCUMENT_BYTES)]
    state: ChainState
    attackers: Count = field(default=1, name="liars")  # as earlier versions write it
    beats: Annotated[tuple[Signed, ...], Meta(max_length=MOST_BEATS)] = ()


class AskSnapshot(FromPeer, frozen=True):
    run_id: RunId
    fragment: Count


class AskParts(FromPeer, frozen=True):
    run_id: RunId
    digest: Digest


class PartList(Plain, frozen=True):
    """How a payload is cut, and the digest of each part."""

    size_bytes: Positive
    part_size_bytes: Positive
    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MOST_PARTS)]

    def digest(self, about: str) -> str:
        """Of the payload; "" if there cannot be one with such parts."""
        if len(self.digests) != part_count(self.size_bytes, self.part_size_bytes):
            return ""
        return digest_of_parts(about, self.size_bytes, self.part_size_bytes, map(bytes.fromhex, self.digests))


class OfferedSnapshot(Plain, frozen=True):
    """A fragment's newest anchor, with all that is needed to resume from there."""

    version: Count
    parts: PartList


class GetHeld(FromPeer, frozen=True):
    """Asks for one part of the payload with this digest; the answer's body is the bytes."""

    run_id: RunId
    digest: Digest
    part: Count


class HeldAnswer(Plain, frozen=True):
    """Beside the bytes: the digest that they should have."""

    hash: Digest


PeerRequest = AskTerms | Converse | AskSnapshot | AskParts | GetHeld
PeerAnswer = Terms | Converse | OfferedSnapshot | PartList | HeldAnswer


def about_contribution(run_id: str, fragment: int) -> str:
    """What a contribution's digest says that it is."""
    return f"contribution/{run_id}/{fragment}"


def about_snapshot(run_id: str, fragment: int, version: int) -> str:
    return f"whole/{run_id}/{fragment}/{version}"
