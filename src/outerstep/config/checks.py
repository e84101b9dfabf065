"""The checks that settings share: each value against its type and range; and what a server and a worker both have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..defaults import LOGGERS
from ..errors import ConfigError
from ..types import Wishes
from .kinds import Kind, kinds_of

LABEL = 256  # characters: what a message carries of a name
MOST = 1 << 53  # no setting is larger; JSON numbers are exact up to here


@dataclass(frozen=True)
class Checked:
    """A config class whose values fit their types and ranges. An error names the field, the value and the range."""

    own_words: ClassVar[Mapping[str, Collection[str]]] = {}  # by field, those that users have added to a choice

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            if hasattr(self, name):  # else it is a section's, which has checked it
                words = *kind.choices, *self.own_words.get(name, ())
                check_value(name, getattr(self, name), replace(kind, choices=words))


def check_value(name: str, value: Any, kind: Kind) -> None:
    if value is None and kind.optional:
        return
    if kind.words:
        if not any(value is word or (isinstance(value, str) and value == word) for word in kind.words):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, kind.words))}, got {value!r}")
    elif kind.base is str:
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be text, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int if kind.base is int else int | float):
        number = "a whole number" if kind.base is int else "a number"
        raise ConfigError(f"{name} must be {number} ≥ {kind.least:g}, got {value!r}")
    elif not kind.least <= value <= MOST:  # also false for nan
        raise ConfigError(f"{name} must be ≥ {kind.least:g}, got {_shown(value)}")


def _shown(value: float) -> str:
    """The value, and that it is too large if that is what is wrong with it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits, which is too large"
    return f"{value}, which is too large" if value > MOST else f"{value}"


def check_label(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is not None and not 1 <= len(value) <= LABEL:
        raise ConfigError(f"{name} must be 1 to {LABEL} characters, got {len(value)}; a hash of it will do")


def check_loggers(names: str | None) -> None:
    """`log_to`, of a server and of a worker."""
    for name in (names or "").replace(",", " ").split():
        if name not in LOGGERS:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            raise ConfigError(
                f"log_to must name {', '.join(LOGGERS)}, with commas between, got {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )


def check_mixing(alpha: float | None, carry: bool | None) -> None:
    """`fragment_alpha` and `fragment_carry`, of a server and of a worker."""
    if alpha is not None and alpha > 1.0:
        raise ConfigError(f"fragment_alpha must be between 0 and 1, got {alpha:g}")
    if alpha and carry:
        raise ConfigError(
            f"fragment_carry keeps the local steps whole, fragment_alpha={alpha:g} mixes them: choose one"
        )


def wishes_of(config: Any, *, codec: str | None = None) -> Wishes:
    """What a server or a worker wants of the plan."""
    return Wishes(
        sync_every=config.sync_every,
        codec=codec or config.codec,
        down_codec=config.down_codec,
        num_fragments=config.num_fragments,
        delay=config.fragment_delay,
        alpha=config.fragment_alpha,
        carry=config.fragment_carry,
        tokenizer=config.tokenizer,
    )
