"""JSON as we accept it: UTF-8, finite numbers, no repeated keys, shallow, and of the shape that the message has."""

from __future__ import annotations

import json
import math
import re
from typing import TypeVar

import msgspec

from ..errors import BadRequest

MAX_DEPTH = 16
MAX_MARKS = 2_000_000  # strings and brackets: each costs many times its own size once it is an object
# A string (whose brackets don't count) or a bracket. Possessive, so that a long string costs no memory for going back.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T")


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Parse and check in one go; whatever is wrong is a BadRequest that says where."""
    text = bytes(data)
    _check_depth(text)
    try:
        parsed = json.loads(
            text.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constants, parse_float=_finite
        )
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # half a character cannot be written back
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not acceptable JSON: {error}") from error
    return convert(parsed, kind)


def convert(parsed: object, kind: type[T], *, from_text: bool = False) -> T:
    """Plain values into a message. `from_text`: numbers may come as strings (a query string has nothing else)."""
    try:
        return msgspec.convert(parsed, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise BadRequest(f"not a {kind.__name__}: {error}") from error


def encode(message: object) -> bytes:
    return msgspec.json.encode(message)


def _check_depth(text: bytes) -> None:
    """A hundred thousand brackets must not reach a recursive parser. Brackets inside strings don't count."""
    depth = 0
    for count, found in enumerate(_STRING_OR_BRACKET.finditer(text)):
        first = text[found.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_DEPTH:
            raise BadRequest(f"JSON is nested deeper than {MAX_DEPTH} levels")
        if count >= MAX_MARKS:
            raise BadRequest(f"JSON has more than {MAX_MARKS} strings and brackets")


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return made


def _no_constants(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
