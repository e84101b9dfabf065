"""The exception tree is the one drawn in its docstring, and a refusal finds its class by its code."""

import inspect
import re

import pytest

from outerstep import errors
from outerstep.errors import BY_CODE, MethodNotAllowed, OuterstepError, Refused

LINE = re.compile(r"^    (?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(?:\s+(?P<status>\d{3})\b)?")


def drawn() -> dict[str, tuple[str | None, int | None]]:
    """name -> (parent, HTTP status), as the docstring draws them: four columns a level."""
    found: dict[str, tuple[str | None, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = LINE.match(line)
        if match:
            del path[len(match["indent"]) // 4 :]
            found[match["name"]] = (path[-1] if path else None, int(match["status"]) if match["status"] else None)
            path.append(match["name"])
    return found


def defined() -> dict[str, type[OuterstepError]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, OuterstepError) and kind.__module__ == errors.__name__
    }


def test_every_class_is_drawn_under_its_parent_and_nothing_else_is() -> None:
    in_code = {
        name: next((base.__name__ for base in kind.__bases__ if issubclass(base, OuterstepError)), None)
        for name, kind in defined().items()
    }
    assert {name: parent for name, (parent, _) in drawn().items()} == in_code
    assert len(in_code) > 30


@pytest.mark.parametrize("kind", [k for k in BY_CODE.values() if k is not Refused], ids=lambda kind: kind.__name__)
def test_a_refusal_has_the_http_status_that_is_drawn(kind: type[Refused]) -> None:
    assert drawn()[kind.__name__][1] == kind.status


def test_every_refusal_has_a_code_of_its_own_and_is_found_by_it() -> None:
    refusals = {kind for kind in defined().values() if issubclass(kind, Refused)}
    assert set(BY_CODE.values()) == refusals
    assert len(BY_CODE) == len(refusals)
    assert all(kind.code == code for code, kind in BY_CODE.items())


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE.keys())
def test_a_refusal_shows_its_message_and_then_its_hint(kind: type[Refused]) -> None:
    assert str(kind("no room")) == "no room"
    full = kind("no room", hint="ask later", retry_after_s=1.5)
    assert str(full) == "no room. ask later"
    assert (full.message, full.hint, full.retry_after_s) == ("no room", "ask later", 1.5)


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.ModelError])
def test_a_wrong_setting_or_model_can_be_caught_as_a_value_error(kind: type[OuterstepError]) -> None:
    with pytest.raises(ValueError, match="too few") as raised:
        raise kind("too few")
    assert isinstance(raised.value, OuterstepError)


def test_a_refused_method_carries_the_allowed_ones() -> None:
    assert MethodNotAllowed("no", allow="GET, PUT").allow == "GET, PUT"
