"""Looks through a peer's folder, and takes out of it what cannot be carried out.

A peer that reads with less care (release 0.2) may have kept a beat that names no place, or be bound by a block that
nobody can carry out; a disk may have spoiled what it said about the open block.

    beats       those that cannot be used are left out: where a member is, it says again itself
    ballots     if they cannot be read or carried out they are dropped, and the peer does not vote on that one block: it
                may have voted already, and must not say anything else
    the rest    is what the peer is (key, run, state, sequences): it is only looked at. Without it the peer is a new one

So a repaired peer contradicts nothing that it said before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ....coordination.gossip import Keepsake
from ....coordination.gossip.ballot import Ballots
from ....coordination.gossip.book import Book
from ....coordination.gossip.chain import quorum_of
from ....coordination.gossip.meaning import wrong_with_beat, wrong_with_block, wrong_with_state
from ....errors import ConfigError
from ....security.signing import verify
from ....statements import Beat, ChainState, Signed
from ....types import Plain
from .listener import access_to
from .records import PeerFolder, PeerRunFacts, decode_kept


@dataclass(frozen=True)
class FolderReport:
    """`mended`: what was taken out, or would be. `noted`: what nobody can mend here, and what comes of it."""

    peer_id: str
    run_id: str
    state: ChainState
    mended: tuple[str, ...]
    noted: tuple[str, ...]


class _Torn(Plain, frozen=True):
    """A keepsake, of which only the ballots are spoiled."""

    run_id: str
    state: ChainState
    incarnation: int = 1
    ballots: msgspec.Raw = msgspec.Raw()
    sequences: tuple[int, ...] = ()


def repair(place: str | os.PathLike[str], *, dry_run: bool = False) -> FolderReport:
    """`dry_run`: only look."""
    if not (Path(place) / "run.json").exists():
        raise ConfigError(f"{place} is not a peer's folder: there is no run.json in it; give the peer_dir of a peer")
    folder = PeerFolder(place, is_whole=False)
    try:
        if folder.facts is None or folder.kept is None:
            raise ConfigError(f"the folder {place} holds no run yet: there is nothing to repair in it")
        return _repair(folder, folder.facts, folder.kept, dry_run=dry_run)
    finally:
        folder.close()


def _repair(folder: PeerFolder, facts: PeerRunFacts, kept: bytes, *, dry_run: bool) -> FolderReport:
    keepsake, spoiled = _read_keepsake(folder, kept)
    fragments = len(keepsake.state.versions)
    book = Book(facts.run_id, folder.key.public, folder.key.sign, verify, fragments=fragments)
    mended = spoiled or _wrong_with_ballots(keepsake, book)
    if mended:
        keepsake = msgspec.structs.replace(keepsake, ballots=Ballots(), abstains_at=keepsake.state.height + 1)
    usable, unusable = _sort_beats(folder.beats, keepsake.state, facts, book)
    if not dry_run:
        if mended:
            folder.keep(keepsake)
        if unusable:
            folder.remember(tuple(usable.values()))
    mended += [f"a beat of {who} is left out: it {why}" for who, why in unusable]
    noted = _note(keepsake.state, usable.keys() | {folder.key.public}, facts.attackers)
    return FolderReport(facts.peer_id, facts.run_id, keepsake.state, tuple(mended), tuple(noted))


def _read_keepsake(folder: PeerFolder, kept: bytes) -> tuple[Keepsake, list[str]]:
    file = folder.place / "keepsake"
    try:
        return decode_kept(file, kept, Keepsake), []
    except ConfigError as error:
        torn = decode_kept(file, kept, _Torn)
        whole = Keepsake(
            run_id=torn.run_id, state=torn.state, incarnation=torn.incarnation, sequences=torn.sequences
        )  # fmt: skip
        return whole, [f"what it said about block {torn.state.height + 1} is dropped: {error}"]


def _wrong_with_ballots(keepsake: Keepsake, book: Book) -> list[str]:
    bounds = [bound for bound in (keepsake.ballots.locked, keepsake.ballots.valid) if bound is not None]
    wrong = [why for bound in bounds if (why := wrong_with_block(bound.block, keepsake.state, book))]
    return [
        f"what it said about block {keepsake.state.height + 1} is dropped: it {why}" for why in dict.fromkeys(wrong)
    ]


def _sort_beats(
    beats: tuple[Signed, ...], state: ChainState, facts: PeerRunFacts, book: Book
) -> tuple[dict[str, Signed], list[tuple[str, str]]]:
    """Those that can be used, by key; and of the others whose they are and why not."""
    names = {member.key: member.peer_id for member in state.members}
    usable: dict[str, Signed] = {}
    unusable: list[tuple[str, str]] = []

    def can_call(beat: Beat) -> bool:
        return access_to(beat, facts.token, insecure=not facts.token) is not None

    for signed in beats:
        beat = book.read(signed)
        wrong = "is not what its author signed"
        if isinstance(beat, Beat):
            wrong = wrong_with_beat(beat, len(state.versions), can_call)
        if wrong:
            unusable.append((names.get(signed.author, signed.author[:16]), wrong))
        else:
            usable[signed.author] = signed
    return usable, unusable


def _note(state: ChainState, known: set[str], attackers: int) -> list[str]:
    noted = []
    wrong = wrong_with_state(state)
    if wrong:
        noted.append(f"the state {wrong}: give the peer an empty folder, with which it joins as somebody new")
    lost = [member.peer_id for member in state.members if member.key not in known]
    if lost:
        quorum = quorum_of(len(state.members), attackers)
        noted.append(
            f"where {', '.join(lost)} can be called is not known here. Until they call, they count as silent, and are "
            f"voted out by the others: {quorum} of {len(state.members)} members must be there for that"
        )
    return noted
