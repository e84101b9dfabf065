"""What happened, for people and programs to read."""

from .events import EventLog

__all__ = ["EventLog"]
