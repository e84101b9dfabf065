"""Versions that talk: in which protocol a message can be said, and how it is said in an older one.

A *protocol* is a number. Every end speaks all from OLDEST_PROTOCOL to PROTOCOL_VERSION, and two ends speak the highest
that both do. A message is one class for all of them. What a later protocol added is marked where it is declared:

    class Join(Plain):
        worker_id: WorkerId
        proof: Since2[Signature] = UNSET     # a field of protocol 2: left out in 1

    class Challenge(Plain):
        SINCE: ClassVar[int] = 2             # a message, statement or block of protocol 2: not said in 1 at all

    class Control(Plain):
        SINCE_KIND: ClassVar[Mapping[str, int]] = {"lead": 2}    # a kind of protocol 2 of an older message: likewise

A field that is UNSET is written nowhere. So what was signed or hashed in protocol 1 has the same bytes ever after, and
so have files. docs/adr/0018-versions-that-talk.md says why; docs/reference/wire.md, which releases may mix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from .errors import ProtocolMismatch

PROTOCOL_VERSION: Final = 2
OLDEST_PROTOCOL: Final = 1
SPOKEN_HERE: Final = f"{OLDEST_PROTOCOL}-{PROTOCOL_VERSION}"  # as in a header: the oldest and the newest

T = TypeVar("T")


@dataclass(frozen=True)
class Since:
    """Marks a field that came with this protocol."""

    protocol: int


Since2 = Annotated[T | UnsetType, Since(2)]


# --- two ends ---------------------------------------------------------------------------------------------------------


def is_spoken(protocol: int) -> bool:
    return OLDEST_PROTOCOL <= protocol <= PROTOCOL_VERSION


def check_spoken(protocol: int, who: str) -> None:
    """`who` speaks to us in this protocol: do we? (It reads this at its end: "here" and "there" would mislead.)"""
    if not is_spoken(protocol):
        raise ProtocolMismatch(
            f"{who} speaks protocol {protocol}; understood: {SPOKEN_HERE}", hint="update outerstep at the older end"
        )


def highest_common(shown: str | None) -> int | None:
    """With an end that shows this range. Release 0.2 shows none, and speaks 1. None: there is no common protocol."""
    found = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", shown if shown is not None else "1-1")
    if found is None:
        return None
    common = min(PROTOCOL_VERSION, int(found[2]))
    return common if common >= max(OLDEST_PROTOCOL, int(found[1])) else None


# --- one message ------------------------------------------------------------------------------------------------------


def needs(message: object) -> int:
    """The oldest protocol in which all of this can be said."""
    if isinstance(message, Struct):
        kind = type(message)
        if newest_in(kind) == OLDEST_PROTOCOL:
            return OLDEST_PROTOCOL
        said = [(since, value) for _, since, value in _said(message)]
        return max([_since_of(message), *(max(since, needs(value)) for since, value in said)])
    return max(map(needs, _items(message)), default=OLDEST_PROTOCOL)


def as_spoken(message: T, protocol: int) -> T:
    """The same, as far as this protocol can say it: without the fields of later ones."""
    if isinstance(message, Struct):
        kind = type(message)
        if newest_in(kind) <= protocol:
            return message
        if (since := _since_of(message)) > protocol:
            name = f"{kind.__name__} {message.kind!r}" if since > _since(kind) else kind.__name__  # type: ignore[attr-defined]
            raise ProtocolMismatch(
                f"{name} belongs to protocol {since}, and the other end speaks {protocol}",
                hint="update outerstep there",
            )
        said = {
            name: UNSET if since > protocol else as_spoken(value, protocol) for name, since, value in _said(message)
        }
        return replace(message, **said)
    if isinstance(message, tuple | list):
        return type(message)(as_spoken(item, protocol) for item in message)
    if isinstance(message, dict):
        return {key: as_spoken(item, protocol) for key, item in message.items()}  # type: ignore[return-value]
    return message


@cache
def newest_in(kind: type[Struct]) -> int:
    """The newest protocol of which anything can be in a message of this kind, however deep."""
    return max(max([_since(found), *fields_of(found).values(), *_kinds(found).values()]) for found in kinds_in(kind))


@cache
def fields_of(kind: type[Struct]) -> dict[str, int]:
    """Each field's protocol."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _mark(hints[name]) for name in kind.__struct_fields__}


def kinds_in(*hints: Any) -> set[type[Struct]]:
    """Every kind of value that can be in these."""
    found: set[type[Struct]] = set()
    left = list(hints)
    while left:
        hint = left.pop()
        left += get_args(hint)
        if isinstance(hint, type) and issubclass(hint, Struct) and hint not in found:
            found.add(hint)
            left += get_type_hints(hint, include_extras=True).values()
    return found


def _mark(hint: Any) -> int:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return max((mark.protocol for mark in marks if isinstance(mark, Since)), default=OLDEST_PROTOCOL)


def _since(kind: type[Struct]) -> int:
    since: int = getattr(kind, "SINCE", OLDEST_PROTOCOL)
    return since


def _since_of(message: Struct) -> int:
    """Of this very message: what it is, and what it asks for."""
    return max(_since(type(message)), _kinds(type(message)).get(getattr(message, "kind", ""), OLDEST_PROTOCOL))


def _kinds(kind: type[Struct]) -> Mapping[str, int]:
    """Of the values of its field `kind`, those that came later."""
    kinds: Mapping[str, int] = getattr(kind, "SINCE_KIND", {})
    return kinds


def _said(message: Struct) -> Iterator[tuple[str, int, Any]]:
    """Name, protocol and value of each field that has one."""
    for name, since in fields_of(type(message)).items():
        value = getattr(message, name)
        if value is not UNSET:
            yield name, since, value


def _items(message: object) -> list[Any]:
    if isinstance(message, dict):
        return list(message.values())
    return list(message) if isinstance(message, tuple | list) else []
