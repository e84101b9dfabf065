"""The checks that settings share: of one value each, naming field, value and range; and of the one pair in both."""

from __future__ import annotations

from ..errors import ConfigError

LABEL = 256  # characters: what a message carries of a name
MOST = 1 << 53  # no setting is larger; JSON numbers are exact up to here


def check_whole(config: object, least: int, *names: str, optional: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number ≥ {least}, got {value!r}")
        if not least <= value <= MOST:
            raise ConfigError(f"{name} must be ≥ {least}, got {_shown(value)}")


def check_number(config: object, least: float, *names: str, optional: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number ≥ {least:g}, got {value!r}")
        if not least <= value <= MOST:  # also false for nan
            raise ConfigError(f"{name} must be ≥ {least:g}, got {_shown(value)}")


def _shown(value: float) -> str:
    """The value, and that it is too large if that is what is wrong with it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits, which is too large"
    return f"{value}, which is too large" if value > MOST else f"{value}"


def check_text(config: object, *names: str, optional: bool = True) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str) and not (value is None and optional):
            raise ConfigError(f"{name} must be text, got {value!r}")


def check_label(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is not None and not 1 <= len(value) <= LABEL:
        raise ConfigError(f"{name} must be 1 to {LABEL} characters, got {len(value)}; a hash of it will do")


def check_one_of(config: object, allowed: tuple[object, ...], *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_mixing(alpha: float | None, carry: bool | None) -> None:
    """`fragment_alpha` and `fragment_carry`, of a server and of a worker."""
    if alpha is not None and alpha > 1.0:
        raise ConfigError(f"fragment_alpha must be between 0 and 1, got {alpha:g}")
    if alpha and carry:
        raise ConfigError(
            f"fragment_carry keeps the local steps whole, fragment_alpha={alpha:g} mixes them: choose one"
        )
