"""How a node listens: what another peer said goes to the state machine, and what was wrong with it to the operator.

The machine refuses by itself whatever cannot be meant (coordination/gossip/meaning.py). If something makes it stumble
all the same, that is a mistake in the machine, and still no reason to end: the rest of the message is heard piece by
piece, and the piece is left out and held against who told it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from ....events import MessageRefused
from ....statements import Converse
from .shared import Shared

log = logging.getLogger(__name__)


def hear(shared: Shared, told: Converse, teller: str = "") -> None:
    """With the lock held. `teller`: who this is, if it is certain; else as it calls itself."""
    try:
        shared.peer.hear(told, shared.clock(), teller)
    except Exception:
        log.exception("what %s said could not be heard as a whole: hearing it piece by piece", teller or told.sender)
        for piece in _pieces(told):
            _hear_piece(shared, piece, teller or told.sender)
    report(shared)


def _hear_piece(shared: Shared, piece: Converse, teller: str) -> None:
    try:
        shared.peer.hear(piece, shared.clock(), teller)
    except Exception as error:  # noqa: BLE001 - the whole was logged just now, with the place where it went wrong
        shared.peer.refusals.note(teller, f"said something that cannot be heard: {type(error).__name__}: {error}")


def _pieces(told: Converse) -> Iterator[Converse]:
    empty = replace(told, statements=(), proofs=(), decisions=(), withdrawn=UNSET)
    for decision in told.decisions:
        yield replace(empty, decisions=(decision,))
    for proof in told.proofs:
        yield replace(empty, proofs=(proof,))
    for withdrawal in () if told.withdrawn is UNSET else told.withdrawn:
        yield replace(empty, withdrawn=(withdrawal,))
    for statement in told.statements:
        yield replace(empty, statements=(statement,))


def blame(shared: Shared, key: str, why: str) -> None:
    """With the lock held: hold an impossible answer or offer against the member with this key."""
    shared.peer.refusals.note(shared.peer.name_of(key), why)
    report(shared)


def report(shared: Shared) -> None:
    """With the lock held."""
    for refusal in shared.peer.refusals.news():
        log.warning("%s %s (%d so far)", refusal.who, refusal.why, refusal.count)
        shared.events(MessageRefused("converse", refusal.who, "nonsense", refusal.why))
