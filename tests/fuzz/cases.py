"""How many cases a fuzz test runs, and ways to spoil what was right.

`make test` runs every test here with the profile "ci": the same 10,000 cases each time. A failure prints the blob that
replays it. By hand, a hundred times as many, and others each time:

    pytest tests/fuzz --hypothesis-profile deep
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck
from hypothesis import strategies as st

import amounts

F = TypeVar("F", bound=Callable[..., Any])


def cases(count: int) -> Callable[[F], F]:
    """So many in `make test`, however long each of them takes."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return amounts.cases(count, suppress_health_check=slow)


SNIPPETS = [
    b"",
    b"\0",
    b"\xff",
    b"\r\n",
    b"\n",
    b'"',
    b"{",
    b"[",
    b"}",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"\\ud800",
    b" ",
]


@st.composite
def spoiled(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """The bytes with a few edits: a flipped bit, a piece cut out, doubled, replaced, moved, or the end missing."""
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(at + 40, len(data))))
        match draw(st.sampled_from(["flip", "cut", "double", "replace", "end"])):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[end:]
            case "double":
                data = data[:end] + data[at:]
            case "replace":
                data = data[:at] + draw(st.sampled_from(SNIPPETS) | st.binary(max_size=20)) + data[end:]
            case "end":
                data = data[:at]
    return data


ODD = st.sampled_from(
    [None, True, False, -1, 0, 1, 2**31, 2**53, 2**53 + 1, 2**64, -(2**70), 1.5, -0.0, 1e308, "", "x", "\0", "ü", "0",
     "a" * 600, [], [[]], {}, {"a": 1}, [0] * 50, "../..", "none", "true", "nan"]
)  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with one or two values replaced, removed or added, at any depth."""
    facts = copy.deepcopy(facts)
    for _ in range(draw(st.integers(1, 2))):
        place: Any = facts
        while isinstance(place, dict) and place and draw(st.booleans()):
            deeper = [value for value in place.values() if isinstance(value, dict)]
            if not deeper:
                break
            place = draw(st.sampled_from(deeper))
        key = draw(st.sampled_from(sorted(place)) if place else st.just("new"))
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                place[key] = copy.deepcopy(draw(ODD))
            case "remove":
                place.pop(key, None)
            case "add":
                place[draw(st.sampled_from(["surprise", "", "protocol", key.upper()]))] = copy.deepcopy(draw(ODD))
    return facts
