"""A config from flat keywords, and the answer to a name that does not exist.

A config may have sections: fields whose default is another dataclass (`WorkerConfig.gossip`). A user gives every
setting by its name alone, wherever it stands; no two sections share a name. A config's `OLD_NAMES` maps names of
earlier versions, which stay valid, to those of today; `NAMES_ELSEWHERE` those that other software has for the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from ..errors import ConfigError
from .effects import without_effect

T = TypeVar("T")

NAMES_ELSEWHERE = {  # torchtitan's, and torchft's
    "sync_steps": "sync_every",
    "fragment_sync_delay": "fragment_delay",
    "fragment_update_alpha": "fragment_alpha",
}


def settings_of(kind: type[Any]) -> dict[str, Field[Any]]:
    """Every setting of a config class by name, those of its sections included."""
    return {field.name: field for _, field in _walk(kind)}


def values_of(config: Any) -> dict[str, Any]:
    """The flat keywords that `build` makes `config` from."""
    return {
        field.name: getattr(getattr(config, section) if section else config, field.name)
        for section, field in _walk(type(config))
    }


def build(kind: type[T], settings: Mapping[str, Any]) -> T:
    """A config from keyword arguments; an unknown one is answered with the nearest known one."""
    settings = getattr(kind, "current_spelling", dict)(with_current_names(kind, settings))
    known = settings_of(kind)
    for name in settings:
        if name not in known:
            raise ConfigError(unknown("setting", name, known))
    missing = [name for name, field in known.items() if field.default is MISSING and name not in settings]
    if missing:
        raise ConfigError(f"missing setting: {', '.join(missing)}")
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for section, field in _walk(kind):
        if field.name in settings:
            (sections.setdefault(section, {}) if section else values)[field.name] = settings[field.name]
    for section, given in sections.items():
        values[section] = type(getattr(kind, section))(**given)
    made = kind(**values)  # what is wrong with a value is said first
    idle = without_effect(known, settings)
    if idle:
        raise ConfigError("; ".join(_no_effect(name, settings[name], needs.text) for name, needs in idle.items()))
    return made


def _no_effect(name: str, value: object, needed: str) -> str:
    return f"{name} ({value!r}) needs {needed}, and has no effect here: add that, or leave {name} out"


def with_current_names(kind: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under the names of today."""
    current_names = other_names(kind)
    for other, current in current_names.items():
        if other in settings and current in settings:
            what = "another" if other in NAMES_ELSEWHERE else "the old"
            raise ConfigError(f"{other} is {what} name of {current}, got both: leave {other} out")
    return {current_names.get(name, name): value for name, value in settings.items()}


def other_names(kind: type[Any]) -> dict[str, str]:
    """What else a setting may be called -> its name."""
    elsewhere = {name: ours for name, ours in NAMES_ELSEWHERE.items() if ours in settings_of(kind)}
    return {**getattr(kind, "OLD_NAMES", {}), **elsewhere}


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """That there is no such setting, key or table, and which one may have been meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f'unknown {what} "{name}"' + (f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}")


def _walk(kind: type[Any]) -> Iterator[tuple[str, Field[Any]]]:
    """(section, field), with "" for what stands in no section."""
    for field in fields(kind):
        if is_dataclass(field.default):
            yield from ((field.name, inner) for inner in fields(field.default))
        else:
            yield "", field
