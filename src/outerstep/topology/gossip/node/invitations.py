"""Invitations to a run that was founded with invite_only: the founder's key signs a peer's id and key.

Everybody who holds the run's token can make as many peers as it likes. Where that must not be, so that "fewer than a
third lie" is about people and not about processes, the run's terms name the founder's key as its inviter, and a change
that lets a peer in without the inviter's signature is one that nobody votes for (coordination/gossip/meaning.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ....errors import ConfigError
from ....security.secret_files import read_secret
from ....security.signing import open_key
from ....statements import PeerId, invitation_body
from ....types import Key
from ..terms import GossipTerms
from .records import PeerRunFacts


def invite(place: str | os.PathLike[str], peer_id: str, key: str) -> str:
    """The invitation of this peer to the run in the founder's folder, whether that peer is running or not."""
    folder = Path(place)
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
    return signer.sign(invitation_body(facts.run_id, peer_id, key)).hex()
