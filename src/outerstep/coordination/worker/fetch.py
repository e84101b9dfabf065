"""Fetching an agreement, without I/O: which pieces of its payloads are still to come, and whether they are whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...digest import part_count, payload_hash
from ...types import Agreement, GetPart
from .session import Session


@dataclass(frozen=True)
class Held:
    """The anchor we hold: what leads from there to the newest agreement may be sent instead of all of it."""

    version: int
    hash: str


@dataclass(frozen=True, order=True)
class Piece:
    """Part `part` of payload number `payload` of an agreement."""

    payload: int
    part: int


@dataclass(frozen=True)
class Wanted:
    """The pieces of an agreement to fetch, in order. Whether the values in them are right is checked by who asked: a
    payload's hash is over all of its parts."""

    agreement: Agreement
    pieces: tuple[Piece, ...]


class Fetch:
    """One attempt at an agreement. The next attempt is another object, with memory of its own: late bytes of this one
    may still arrive."""

    def __init__(self, agreement: Agreement, pieces: Iterable[Piece]) -> None:
        self.agreement = agreement
        self.pieces = tuple(pieces)
        self._left = list(self.pieces)
        self._hashes: dict[Piece, str] = {}

    @classmethod
    def whole(cls, agreement: Agreement, part_size_bytes: int) -> Fetch:
        return cls(
            agreement,
            (
                Piece(i, part)
                for i, payload in enumerate(agreement.payloads)
                for part in range(part_count(payload.size_bytes, part_size_bytes))
            ),
        )

    def next(self, fragment: int, session: Session) -> GetPart | None:
        if not self._left:
            return None
        piece = self._left.pop(0)
        payload = self.agreement.payloads[piece.payload]
        return GetPart(**session.head, fragment=fragment, version=payload.version, kind=payload.kind, part=piece.part)

    def piece(self, request: GetPart) -> Piece:
        """What was asked for. (The payloads of a chain have different versions.)"""
        versions = [payload.version for payload in self.agreement.payloads]
        return Piece(versions.index(request.version), request.part)

    def again(self, request: GetPart) -> None:
        """It did not come, or not as it was sent."""
        self._left.insert(0, self.piece(request))

    def arrived(self, request: GetPart, part_hash: str) -> None:
        self._hashes[self.piece(request)] = part_hash

    @property
    def is_complete(self) -> bool:
        return len(self._hashes) == len(self.pieces)

    @property
    def is_as_announced(self) -> bool:
        """The parts make the payloads that the agreement names."""
        return all(
            payload_hash([self._hashes[piece] for piece in sorted(self._hashes) if piece.payload == i]) == payload.hash
            for i, payload in enumerate(self.agreement.payloads)
        )
