"""Lines of a log for people: a record is one line, whatever is in it, and a terminal obeys nothing of it."""

from __future__ import annotations

import logging

from ..printable import printable


class PrintableFormatter(logging.Formatter):
    """For every handler that this package makes. A traceback below a message keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        return printable(super().formatMessage(record))
