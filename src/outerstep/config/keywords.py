"""A config from keyword arguments, and what is said to a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..errors import ConfigError

T = TypeVar("T")


def build(kind: type[T], settings: dict[str, Any]) -> T:
    """A config from keyword arguments; an unknown one is answered with the nearest known one."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise ConfigError(unknown("setting", name, known))
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in settings]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"missing setting: {', '.join(missing)}")
    return kind(**settings)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """That there is no such setting, key or table, and which one may have been meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f'unknown {what} "{name}"' + (f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}")
