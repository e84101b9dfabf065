"""What the outer step is told: the settings of the rule that ships, or of an optimizer by name."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, Protocol

from ..coordination.layers.between import check_inner_momentum
from ..errors import ConfigError
from .effects import Needs

SHIPPED = "nesterov"


class _OuterSettings(Protocol):
    """A server, or a worker without one."""

    @property
    def outer_lr(self) -> float | None: ...
    @property
    def outer_momentum(self) -> float | None: ...
    @property
    def nesterov(self) -> bool | None: ...
    @property
    def outer_optimizer(self) -> str | None: ...
    @property
    def outer_options(self) -> str | None: ...


def is_named(told: _OuterSettings) -> bool:
    """Does another optimizer than the one that ships take the step?"""
    return told.outer_optimizer not in (None, SHIPPED)


def check_momentum_inside(told: _OuterSettings, *, insists: bool) -> None:
    """Of a cluster, whose outer step is the plain mean unless somebody says otherwise."""
    momentum = math.nan if is_named(told) else told.outer_momentum or 0.0
    check_inner_momentum(momentum, told.outer_optimizer or SHIPPED, insists=insists)


def outer_arguments(told: _OuterSettings) -> dict[str, Any]:
    """What an optimizer by name is made with: `outer_options`, and the three settings that have names of their own, as
    far as they are said."""
    given = read_options(told.outer_options or "")
    for setting, key in (("outer_lr", "lr"), ("outer_momentum", "momentum"), ("nesterov", "nesterov")):
        value = getattr(told, setting)
        if value is not None and key in given:
            raise ConfigError(
                f"{setting} is short for {key}= in outer_options, got both ({value} and {given[key]}): "
                "leave one of the two out"
            )
        if value is not None:
            given[key] = value
    return given


BY_NAME = Needs("an outer_optimizer by name (nesterov has outer_lr, outer_momentum and nesterov)", is_named)


def check_outer_step(told: _OuterSettings) -> None:
    if told.outer_options is not None and not is_named(told):
        raise ConfigError(f"outer_options ({told.outer_options!r}) needs {BY_NAME.text}: leave it out")
    outer_arguments(told)


def with_named_class(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which outer_optimizer is a name. From Python it may be the class itself."""
    kind = settings.get("outer_optimizer")
    named = {"outer_optimizer": f"{kind.__module__}:{kind.__qualname__}"} if isinstance(kind, type) else {}
    return {**settings, **named}


def read_options(text: str) -> dict[str, Any]:
    """ "lr=0.01 betas=0.9,0.95 amsgrad=true" → numbers, tuples and words by name."""
    found: dict[str, Any] = {}
    for option in text.split():
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier() or not value:
            raise ConfigError(f"outer_options are KEY=VALUE with spaces between, got {option!r}; for example lr=0.01")
        if key in found:
            raise ConfigError(f"outer_options say {key} twice: {found[key]} and {value}")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
