"""Numbers with units, as people write them: 7B, 200mbit, 50ms, 3s. Strict: what is not understood is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import ConfigError

_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/%]*)\Z")
COUNTS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
RATES: Final = {  # to bytes per second
    **{f"{prefix}bit": scale / 8 for prefix, scale in (("k", 1e3), ("m", 1e6), ("g", 1e9))},
    **{f"{prefix}b/s": scale for prefix, scale in (("k", 1e3), ("m", 1e6), ("g", 1e9))},
}
RATE_NAMES: Final = ("kbit", "mbit", "gbit", "kB/s", "MB/s", "GB/s")  # bits and bytes as people tell them apart
TIMES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
LEAST_BARE_PARAMETERS: Final = 1000  # below it, people mean millions or billions


def count(text: str, what: str) -> int:
    """ "7B", "150M", "124000000"."""
    return round(_read(text, what, COUNTS, "a number such as 7B, 150M or 124000000", upper=True))


def parameters(text: str, what: str) -> int:
    """The size of a model. "7" is not taken as seven parameters: a small number must say of what it is."""
    found = count(text, what)
    if found < LEAST_BARE_PARAMETERS and _is_bare(text):
        said = text.strip()
        raise ConfigError(
            f"{what} without a unit must be at least {LEAST_BARE_PARAMETERS}, got {text!r}; "
            f"did you mean {said}B (billions) or {said}M (millions)?"
        )
    return found


def rate(text: str, what: str) -> float:
    """In bytes per second. "200mbit", "1gbit", "25MB/s": the case does not matter, bits and bytes are told apart by
    their names."""
    wanted = "a rate such as 200mbit, 1gbit or 25MB/s"
    return _read(text, what, RATES, wanted, names=RATE_NAMES, usual=("mbit", "MB/s"))


def seconds(text: str, what: str) -> float:
    """ "50ms", "3s"."""
    return _read(text, what, TIMES, "a time such as 50ms or 3s", zero=True, usual=("ms", "s"))


def share(text: str, what: str, *, zero: bool = False) -> float:
    """ "95%" or "0.95". Without a sign it is at most 1: "5" is not taken as 500 %."""
    wanted = "a share such as 95% or 0.95"
    found = round(_read(text, what, {"": 1.0, "%": 0.01}, wanted, zero=zero), 9)
    if found > 1.0 and _is_bare(text):
        raise ConfigError(f"{what} must be {wanted}, got {text!r}; did you mean {text.strip()}%?")
    return found


def _is_bare(text: str) -> bool:
    """A number alone."""
    found = _NUMBER.match(text.strip())
    return found is not None and not found[2]


def _read(
    text: str,
    what: str,
    units: Mapping[str, float],
    wanted: str,
    *,
    upper: bool = False,
    zero: bool = False,
    names: Sequence[str] = (),
    usual: Sequence[str] = (),
) -> float:
    """`names`: of the units, if they are written in another way than they are looked up. `usual`: those that a number
    alone may have meant."""
    found = _NUMBER.match(text.strip())
    unit = (found[2].upper() if upper else found[2].lower()) if found else ""
    if found is None or unit not in units:
        known = ", ".join(names or filter(None, units))
        meant = " or ".join(text.strip() + each for each in usual) if _is_bare(text) else ""
        remedy = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"{what} must be {wanted}, got {text!r}; units: {known}{remedy}")
    value = float(found[1]) * units[unit]
    if not math.isfinite(value) or value < 0.0 or (value == 0.0 and not zero):
        raise ConfigError(f"{what} must be above 0, got {text!r}")
    return value
