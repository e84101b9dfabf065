"""Lines of a log: for people one line for a record, whatever is in it, and for programs one JSON object."""

from __future__ import annotations

import logging
from typing import Any

from ..events import Event
from ..printable import json_line, printable
from .story import StoryLine

WAITING = 15  # a level between DEBUG and INFO: what is waited for, told again and again; a terminal shows the newest


class PrintableFormatter(logging.Formatter):
    """For every handler that this package makes. A traceback below a message keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        return printable(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One object per line: `time`, `level`, `logger`, `message`; of an event also `event` and its facts; of an error
    `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = event_of(record)
        if event is not None:
            said |= {"event": event.kind, **event.facts}
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json_line(said)


def told_by(record: logging.LogRecord) -> StoryLine | None:
    """The line of the story that the record is, if it is one."""
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return first if isinstance(first, StoryLine) else None


def event_of(record: logging.LogRecord) -> Event | None:
    told = told_by(record)
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return told.event if told is not None else first if isinstance(first, Event) else None
