"""What happened, for people and programs to read."""

from ..events import Event, EventSink
from .sinks import EventLog, EventRing, FanOut, NumberedEvent

__all__ = ["Event", "EventLog", "EventRing", "EventSink", "FanOut", "NumberedEvent"]
