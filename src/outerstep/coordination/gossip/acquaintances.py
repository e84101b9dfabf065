"""Whom a peer has heard of: their latest beats, and how long ago those were new."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable
from dataclasses import dataclass

from ...statements import Beat, Member, Signed

STRANGERS = 64  # of whom beats are kept, though they do not belong to the run


@dataclass(frozen=True)
class Acquaintance:
    signed: Signed
    beat: Beat
    heard_at: float  # whether from itself or through others


class Acquaintances:
    """By key. Everybody is given time from when it became a member, or from when this peer began to listen."""

    def __init__(self, members: Iterable[Member], now: float) -> None:
        self._known: dict[str, Acquaintance] = {}
        self._began_at = now
        self._member_since = {member.key: now for member in members}

    def greet(self, signed: Signed, beat: Beat, now: float) -> None:
        before = self._known.get(signed.author)
        if before is None:
            is_stranger = signed.author not in self._member_since
            if is_stranger and sum(key not in self._member_since for key in self._known) >= STRANGERS:
                return
        elif (beat.incarnation, beat.number) <= (before.beat.incarnation, before.beat.number):
            return
        self._known[signed.author] = Acquaintance(signed, beat, now)

    def changed(self, members: Iterable[Member], now: float) -> None:
        """These are the members from now on."""
        self._member_since = {member.key: self._member_since.get(member.key, now) for member in members}

    def silent_s(self, key: str, now: float) -> float:
        known = self._known.get(key)
        since = known.heard_at if known is not None else self._began_at
        return now - max(since, self._member_since.get(key, self._began_at))

    def get(self, key: str) -> Acquaintance | None:
        return self._known.get(key)

    def items(self) -> ItemsView[str, Acquaintance]:
        return self._known.items()

    def statements(self) -> list[Signed]:
        return [known.signed for known in self._known.values()]


__all__ = ["Acquaintance", "Acquaintances"]
