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


def count(text: str, what: str) -> int:
    """ "7B", "150M", "124000000"."""
    return round(_read(text, what, COUNTS, "a number such as 7B, 150M or 124000000", upper=True))


def rate(text: str, what: str) -> float:
    """In bytes per second. "200mbit", "1gbit", "25MB/s": the case does not matter, bits and bytes are told apart by
    their names."""
    return _read(text, what, RATES, "a rate such as 200mbit, 1gbit or 25MB/s", names=RATE_NAMES)


def seconds(text: str, what: str) -> float:
    """ "50ms", "3s"."""
    return _read(text, what, TIMES, "a time such as 50ms or 3s", zero=True)


def share(text: str, what: str, *, zero: bool = False) -> float:
    """ "95%" or "0.95"."""
    return round(_read(text, what, {"": 1.0, "%": 0.01}, "a share such as 95% or 0.95", zero=zero), 9)


def _read(
    text: str,
    what: str,
    units: Mapping[str, float],
    wanted: str,
    *,
    upper: bool = False,
    zero: bool = False,
    names: Sequence[str] = (),
) -> float:
    """`names`: of the units, if they are written in another way than they are looked up."""
    found = _NUMBER.match(text.strip())
    unit = (found[2].upper() if upper else found[2].lower()) if found else ""
    if found is None or unit not in units:
        raise ConfigError(f"{what} must be {wanted}, got {text!r}; units: {', '.join(names or filter(None, units))}")
    value = float(found[1]) * units[unit]
    if not math.isfinite(value) or value < 0.0 or (value == 0.0 and not zero):
        raise ConfigError(f"{what} must be above 0, got {text!r}")
    return value
