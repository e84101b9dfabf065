"""The page: a run in a browser, live, served by the server or peer that it shows.

Its names are loaded when they are used: `python -m outerstep.dashboard.library` runs one file of this package alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dashboard import Dashboard as Dashboard
    from .logins import PeerTokens as PeerTokens
    from .logins import ServerTokens as ServerTokens
    from .logins import link_to as link_to

__all__ = ["Dashboard", "PeerTokens", "ServerTokens", "link_to"]

_PLACES = {"Dashboard": "dashboard", "PeerTokens": "logins", "ServerTokens": "logins", "link_to": "logins"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
