"""Which settings have an effect in the chosen mode. A setting without one is never passed over in silence.

    grace_s: NotNegative = setting(0.0, ROUNDS, "Seconds to wait …", needs=Needs("quorum or async_mode", …))

One rule for all of them:

    said for this very start (a flag, a keyword)                 refused
    where several may read it (a variable, a line of the file)   a warning, and the default holds
    the default itself                                           accepted: it changes nothing anywhere

`build` (keywords.py) refuses, `make_config` (sources.py) sets aside what only deserves a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass
from types import SimpleNamespace
from typing import Any

WITHOUT_SERVER = ("allreduce", "gossip", "torchft")
TOPOLOGIES = ("server", *WITHOUT_SERVER)


@dataclass(frozen=True)
class Needs:
    """What a setting needs to have an effect. `text`, for people, follows "needs". `holds` is asked with all settings
    as attributes, whose values nobody has checked."""

    text: str
    holds: Callable[[Any], bool]


def with_topology(*names: str) -> Needs:
    """One of these; a topology of the user's own reads what it likes."""
    either = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return Needs(f"topology {either}", lambda c: c.topology in names or c.topology not in TOPOLOGIES)


def without_effect(fields: Mapping[str, Field[Any]], settings: Mapping[str, Any]) -> dict[str, Needs]:
    """Those of `settings` that say something and change nothing, and what they need."""
    together = SimpleNamespace(**{name: None if f.default is MISSING else f.default for name, f in fields.items()})
    vars(together).update(settings)
    found = {}
    for name, value in settings.items():
        needs = fields[name].metadata["needs"]
        if needs is not None and value != fields[name].default and not needs.holds(together):
            found[name] = needs
    return found
