"""What happened, for people and programs to read.

The names below are loaded when they are first used: a command that asks for a status needs no events.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..events import Event, EventSink
    from .sinks import EventLog, EventRing, FanOut, NumberedEvent

_WHERE = {"Event": "..events", "EventSink": "..events"}  # the others: sinks.py

__all__ = ["Event", "EventLog", "EventRing", "EventSink", "FanOut", "NumberedEvent"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE.get(name, ".sinks"), __name__), name)
