"""What peers without a server say to each other, as plain, frozen values; the counterpart of types.py.

A *statement* is signed by its author and may be carried by anybody. Some have a *key*: an honest peer makes one
statement under each key and never another. Two different ones under the same key, with the same signature's owner, are
a *proof* that it lies, which everybody can check.

    Offered    "my contribution to this round has this digest"           key: fragment, sequence
    Proposed   "let this be the next block"                              key: height, turn
    Voted      "I am for this block" (or for none), twice per turn       key: height, turn, kind
    Beat       "I am alive, here, and hold this"                         no key: the newest counts

A *block* is what the peers decide one after the other: which contributions a round is made of (`Round`), or who belongs
to the run from now on (`Change`). Each names the block before it: the blocks are a chain, and everybody who holds its
end holds the same run. `docs/reference/wire.md` has the same in prose.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta

from .types import (
    MOST_DATASETS,
    Amount,
    Count,
    Hash,
    Key,
    Label,
    LeaseStatement,
    Plain,
    Positive,
    RunId,
    Signature,
    Trained,
    WorkerId,
)
from .versions import Since2

MOST_PEERS = 64
MOST_TABLE_BYTES = 1 << 20  # of leased data
MOST_STATEMENTS = 4096  # in one message
MOST_DECISIONS = 32

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # sha256: it must withstand forgers, not only accidents
Address = Annotated[str, Meta(min_length=1, max_length=256)]
PeerId = WorkerId


class Signed(Plain, frozen=True):
    """A statement as its author wrote it, byte for byte."""

    author: Key
    body: Annotated[bytes, Meta(max_length=1 << 20)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Member(Plain, frozen=True):
    """A peer that belongs to the run."""

    peer_id: PeerId
    key: Key


class Statement(Plain, frozen=True, tag_field="says"):
    """`run_id`: nothing that was said in one run means anything in another."""

    run_id: RunId


class Offered(Statement, frozen=True, tag="offered"):
    """`digest` is that of the encoded contribution (`digest_of_parts`); `base_hash` that of the anchor it started from:
    a contribution that started elsewhere cannot be averaged with. `data`: what its peer says of its leased data;
    `trained`: units whose last step is in it."""

    fragment: Count
    version: Positive  # that the round is to produce
    sequence: Positive
    digest: Digest
    size_bytes: Positive
    base_hash: Hash
    steps: Count
    samples: Amount = 0
    tokens: Amount = 0
    data: Since2[Annotated[tuple[LeaseStatement, ...], Meta(max_length=MOST_DATASETS)]] = UNSET
    trained: Since2[Annotated[tuple[Trained, ...], Meta(max_length=MOST_DATASETS)]] = UNSET


class Round(Plain, frozen=True, tag="round", tag_field="kind"):
    """The contributions of one fragment's round, as they were offered, in the order of their peers' ids."""

    height: Positive
    parent: Digest
    fragment: Count
    version: Positive
    base_hash: Hash
    offers: Annotated[tuple[Signed, ...], Meta(min_length=1, max_length=MOST_PEERS)]


class Proof(Plain, frozen=True):
    """Two statements of one author under one key that say different things."""

    first: Signed
    second: Signed


class Withdrawal(Plain, frozen=True):
    """The inviter takes an invitation back (`withdrawal_body`): this peer does not belong to the run from now on."""

    SINCE: ClassVar[int] = 2

    peer_id: PeerId
    key: Key
    signature: Signature


Withdrawals = Annotated[tuple[Withdrawal, ...], Meta(min_length=1, max_length=MOST_PEERS)]


class Change(Plain, frozen=True, tag="change", tag_field="kind"):
    """The members of the run from now on, in the order of their ids. A new one is there because of a beat of its own;
    one that lied is gone because of a proof, and one whose invitation was withdrawn because of that."""

    height: Positive
    parent: Digest
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=MOST_PEERS)]
    applied: Annotated[tuple[Signed, ...], Meta(max_length=MOST_PEERS)] = ()
    proofs: Annotated[tuple[Proof, ...], Meta(max_length=MOST_PEERS)] = ()
    withdrawn: Since2[Withdrawals] = UNSET


Block = Round | Change


class Proposed(Statement, frozen=True, tag="proposed"):
    """`valid_turn`: the turn in which more than enough were for it already; -1 = it is new."""

    height: Positive
    turn: Count
    block: Block
    valid_turn: Annotated[int, Meta(ge=-1, le=2**31)] = -1


class Voted(Statement, frozen=True, tag="voted"):
    """`prevote`: I would accept it. `precommit`: enough would, and I am bound by it. `block` "" = none."""

    height: Positive
    turn: Count
    kind: Literal["prevote", "precommit"]
    block: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Ownership(Plain, frozen=True):
    """The key that a peer's name belongs to, and its signature for the peer (coordination/gossip/names.py)."""

    SINCE: ClassVar[int] = 2

    key: Key
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Beat(Statement, frozen=True, tag="beat"):
    """`incarnation` counts the starts of the peer, `number` the beats of one. `wants`: to belong to the run, or, if it
    does, to leave it. `held`: version and hash of each fragment's anchor. `owner`: whose its name is.
    `invitation`: where only invited peers come, the inviter's signature (`invitation_body`)."""

    peer_id: PeerId
    incarnation: Positive
    number: Count
    address: Address
    fingerprint: Label | None = None
    wants: Literal["watch", "belong", "leave"] = "belong"
    height: Count = 0  # of the last block that it knows to be decided
    held: tuple[tuple[Count, Hash], ...] = ()
    step: Count = 0
    steps_per_second: float = 0.0
    loss: float | None = None
    owner: Since2[Ownership] = UNSET
    invitation: Since2[Signature] = UNSET


AnyStatement = Offered | Proposed | Voted | Beat


class Decision(Plain, frozen=True):
    """A block, and the precommits of more than enough members: knowing the members is enough to see it is decided."""

    block: Block
    votes: Annotated[tuple[Signed, ...], Meta(min_length=1, max_length=MOST_PEERS)]


class Name(Plain, frozen=True):
    """A name that a peer has borne, the key that it last said so with, and the one that vouched for it."""

    SINCE: ClassVar[int] = 2

    peer_id: PeerId
    key: Key
    owner: Key | None = None


class ChainState(Plain, frozen=True):
    """What all blocks up to `height` have made of the run. `tip`: the digest of the last one. `names`: whose they are
    (not so in a run of protocol 1). `data`: the lease table (coordination/shared_leases.py), if the run leases data."""

    height: Count
    tip: Digest
    members: tuple[Member, ...]
    versions: tuple[Count, ...]
    expelled: tuple[Member, ...] = ()
    names: Since2[tuple[Name, ...]] = UNSET
    data: Since2[Annotated[bytes, Meta(max_length=MOST_TABLE_BYTES)]] = UNSET


# --- the two ends of a conversation -------------------------------------------------------------------------------


class Converse(Plain, frozen=True):
    """What a peer tells another and is told in return. `height`: of the last block that it knows to be decided."""

    run_id: RunId
    sender: PeerId
    height: Count
    statements: Annotated[tuple[Signed, ...], Meta(max_length=MOST_STATEMENTS)] = ()
    proofs: Annotated[tuple[Proof, ...], Meta(max_length=MOST_PEERS)] = ()
    decisions: Annotated[tuple[Decision, ...], Meta(max_length=MOST_DECISIONS)] = ()
    withdrawn: Since2[Withdrawals] = UNSET


def body_of(statement: AnyStatement) -> bytes:
    """What is signed."""
    return msgspec.msgpack.encode(statement)


def withdrawal_body(run_id: str, peer_id: str, key: str) -> bytes:
    """What an inviter signs to take an invitation back."""
    return "\0".join(["outerstep withdrawal", run_id, peer_id, key]).encode()


def invitation_body(run_id: str, peer_id: str, key: str) -> bytes:
    """What an inviter signs: the peer of this id, with this key, may belong to the run."""
    return "\0".join(["outerstep invitation", run_id, peer_id, key]).encode()


def statement_of(body: bytes) -> AnyStatement | None:
    """None: it is none. Whatever the bytes are: half a character and endless nesting have errors of their own."""
    try:
        return _statements.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def digest_of_block(block: Block) -> str:
    return sha256(msgspec.msgpack.encode(block)).hexdigest()


def key_of(statement: AnyStatement) -> tuple[object, ...] | None:
    """Under which its author may say nothing else."""
    match statement:
        case Offered():
            return "offered", statement.fragment, statement.sequence
        case Proposed():
            return "proposed", statement.height, statement.turn
        case Voted():
            return "voted", statement.height, statement.turn, statement.kind
        case Beat():
            return None


_statements: msgspec.msgpack.Decoder[AnyStatement] = msgspec.msgpack.Decoder(AnyStatement)
