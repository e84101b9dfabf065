"""Invitations to a run that was founded with invite_only: the founder's key signs a peer's id and key.

Everybody who holds the run's token can make as many peers as it likes. Where that must not be, so that "fewer than a
third lie" is about people and not about processes, the run's terms name the founder's key as its inviter, and a change
that lets a peer in without the inviter's signature is one that nobody votes for (coordination/gossip/meaning.py).

What was signed can be taken back: a withdrawal, signed by the same key, is told to whichever members can be reached.
They pass it on, and the next block expels the peer, under that id and under that key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....errors import ConfigError, OuterstepError
from ....security import Access
from ....security.secret_files import read_secret
from ....security.signing import SigningKey, open_key
from ....statements import (
    Beat,
    Converse,
    PeerId,
    Signed,
    Withdrawal,
    invitation_body,
    statement_of,
    withdrawal_body,
)
from ....types import Key
from ....wire.http_transport import HttpTransport
from ..terms import GossipTerms
from .listener import access_to
from .records import PeerRunFacts

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # of one member that is told


def invite(place: str | os.PathLike[str], peer_id: str, key: str) -> str:
    """The invitation of this peer to the run in the founder's folder, whether that peer is running or not."""
    facts, signer = _inviter(Path(place), peer_id, key)
    return signer.sign(invitation_body(facts.run_id, peer_id, key)).hex()


def withdraw(place: str | os.PathLike[str], peer_id: str, key: str) -> list[str]:
    """Take this peer's invitation back, and tell the other members of the run. Returns where those are that heard it;
    one of them is enough."""
    folder = Path(place)
    facts, signer = _inviter(folder, peer_id, key)
    if key == signer.public:
        raise ConfigError(f"{peer_id!r} founded the run, and cannot withdraw itself: let it leave")
    signature = signer.sign(withdrawal_body(facts.run_id, peer_id, key)).hex()
    withdrawal = Withdrawal(peer_id=peer_id, key=key, signature=signature)
    told = Converse(run_id=facts.run_id, sender=facts.peer_id, height=0, withdrawn=(withdrawal,))
    heard: list[str] = []
    for access in _members(folder, facts, but=key):
        place_of = f"http://{access.address}" if access.plain else access.join_string
        try:
            HttpTransport(place_of, timeout_s=TIMEOUT_S).ask(told, timeout_s=TIMEOUT_S)
            heard.append(access.address)
        except OuterstepError as error:
            log.info("%s was not told: %s", access.address, error)
    return heard


def _members(folder: Path, facts: PeerRunFacts, but: str) -> Iterator[Access]:
    """Where the members of the run were last, all but the one with that key."""
    try:
        signed = msgspec.msgpack.decode((folder / "beats").read_bytes(), type=tuple[Signed, ...])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"where the members of the run are cannot be read in {folder}: {error}") from error
    for one in signed:
        beat = statement_of(one.body) if one.author != but else None
        if isinstance(beat, Beat) and (access := access_to(beat, facts.token, insecure=not facts.token)) is not None:
            yield access


def _inviter(folder: Path, peer_id: str, key: str) -> tuple[PeerRunFacts, SigningKey]:
    """The run in the folder, and the key that invites to it."""
    try:
        msgspec.convert(peer_id, PeerId)
        msgspec.convert(key, Key)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"invite wants a peer's id and its public key, 64 hexadecimal digits; got {peer_id!r} and {key!r}"
        ) from error
    try:
        facts = msgspec.json.decode(read_secret(folder / "run.json"), type=PeerRunFacts)
        terms = GossipTerms.decode((folder / "document").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not the folder of a peer that has begun: pass the founder's --peer-dir"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"the run in {folder} cannot be read: {error}") from error
    if not terms.rules.inviter:
        raise ConfigError(f"the run {facts.run_id} was not founded with --invite-only: its peers need no invitation")
    signer = open_key(folder / "key.pem")
    if signer.public != terms.rules.inviter:
        raise ConfigError(f"the peer {facts.peer_id!r} did not found the run: invite on its founder's machine")
    return facts, signer
