"""What a setting may be, read off its type: how its text is understood, and how its value is written."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from .keywords import settings_of

NotNegative = Annotated[float, Meta(ge=0.0)]
AtLeastOne = Annotated[float, Meta(ge=1.0)]

LONGEST_METAVAR = 40
_TRUTH = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class Kind:
    """`optional`: None is a value, written "none" or as nothing. `choices`: the words that are allowed. `least`: the
    smallest number."""

    base: type
    optional: bool = False
    choices: tuple[str, ...] = ()
    least: float = 0

    @property
    def words(self) -> tuple[str | bool | None, ...]:
        """The values of a switch or a choice."""
        values: tuple[str | bool, ...] = (True, False) if self.base is bool else self.choices
        return (*values, None) if values and self.optional else values

    @property
    def metavar(self) -> str:
        if self.choices:
            words = "|".join(self.choices)
            return words if len(words) <= LONGEST_METAVAR else "NAME"  # the column would leave no room for the sentence
        return {int: "INTEGER", float: "NUMBER", bool: "0|1", str: "TEXT"}[self.base]

    def parse(self, text: str) -> Any:
        """The value that a flag's or a variable's text stands for; ValueError says what it should have been."""
        text = text.strip()
        if self.optional and text.lower() in ("", "none"):
            return None
        if self.base is bool:
            if text.lower() not in _TRUTH:
                raise ValueError("must be 0, 1, true or false")
            return _TRUTH[text.lower()]
        if self.base is str:
            return text
        try:
            return self.base(text)
        except ValueError as error:
            raise ValueError("must be a whole number" if self.base is int else "must be a number") from error


def write(value: object) -> str:
    """The text that `parse` reads as `value`."""
    if value is None:
        return "none"
    return str(int(value)) if isinstance(value, bool) else str(value)


def shown(value: object) -> str:
    """As a person reads it: 2 GiB says more than 2147483648."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        size = f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"
        return f"{value} ({size})"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def kinds_of(config: type) -> dict[str, Kind]:
    """The kind of each setting of a config dataclass, those of its sections included."""
    hints = get_type_hints(config, include_extras=True)
    found: dict[str, Kind] = {}
    for field in fields(config):
        section = is_dataclass(field.default)
        found |= kinds_of(hints[field.name]) if section else {field.name: _kind(hints[field.name])}
    return found


def defaults_of(config: type) -> dict[str, Any]:
    """The default of each setting that has one."""
    return {name: field.default for name, field in settings_of(config).items() if field.default is not MISSING}


def _kind(annotation: Any) -> Kind:
    arms = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    stated, *more = [arm for arm in arms if arm is not NoneType]
    assert not more, f"a setting has one type: {annotation}"
    optional = NoneType in arms
    if get_origin(stated) is Literal:
        return Kind(str, optional, tuple(map(str, get_args(stated))))
    base, *bounds = get_args(stated) if get_origin(stated) is Annotated else (stated,)
    assert base in (bool, str) or (base in (int, float) and bounds), f"not a type for a setting: {annotation}"
    return Kind(base, optional, least=bounds[0].ge if bounds else 0)
