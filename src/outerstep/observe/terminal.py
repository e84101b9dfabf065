"""The log on standard error: with colours and a countdown on a terminal, plain lines elsewhere, JSON if asked for.

    logging.basicConfig(handlers=[make_handler(as_json=False)])

Colours mean something: green is progress, yellow wants a look, red has gone wrong, bold is a name. NO_COLOR and
TERM=dumb are respected (rich does), and nothing but plain lines goes into a file or a pipe. A pending
wait is one line at the bottom, which is rewritten each second and disappears at the end.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

from ..printable import printable
from .log_lines import WAITING, JsonFormatter, PrintableFormatter, told_by

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {"": "", "name": "bold", "good": "green", "bad": "bold red", "warning": "yellow", "aside": "dim"}
OF_LEVEL = ((logging.ERROR, "bold red"), (logging.WARNING, "yellow"), (logging.INFO, ""))
CLEAR_LINE = "\r\x1b[2K"

logging.addLevelName(WAITING, "WAITING")


def make_handler(
    *, as_json: bool = False, prefix: str = "", plain: str = "%(message)s", stream: TextIO | None = None
) -> logging.Handler:
    """For `stream`, which is standard error unless another is given. `prefix`: in front of each line; `plain`: the
    format away from a terminal."""
    stream = stream if stream is not None else sys.stderr
    if as_json:
        return _with(logging.StreamHandler(stream), JsonFormatter())
    if stream is not None and stream.isatty():
        from rich.console import Console

        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return TerminalHandler(console, stream, prefix)
    return _with(logging.StreamHandler(stream), PrintableFormatter(f"{prefix}{plain}"))


def level_for(handler: logging.Handler) -> int:
    """What the handler has any use for: a countdown is for a terminal."""
    return WAITING if isinstance(handler, TerminalHandler) else logging.INFO


def _with(handler: logging.Handler, formatter: logging.Formatter) -> logging.Handler:
    handler.setLevel(logging.INFO)
    handler.setFormatter(formatter)
    return handler


class TerminalHandler(logging.Handler):
    """Writes lines; of the level WAITING only the last one stays, at the bottom, until the next line comes."""

    def __init__(self, console: Console, stream: TextIO, prefix: str = "") -> None:
        super().__init__(WAITING)
        self._console, self._stream, self._prefix = console, stream, prefix
        self._shown = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno == WAITING:
                self._show(record.getMessage())
                return
            self._clear()
            self._console.print(self._line(record), soft_wrap=True, highlight=False)
        except (OSError, ValueError, SystemExit):
            pass  # nobody reads it any more, which is no reason to stop; rich would end the program

    def _line(self, record: logging.LogRecord) -> Text:
        from rich.text import Text

        line = Text()
        line.append(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} ", "dim")
        line.append(self._prefix, "dim")
        level = next((style for least, style in OF_LEVEL if record.levelno >= least), "dim")
        told = told_by(record)
        if told is not None:
            for text, meaning in told.pieces:
                line.append(text, STYLES[meaning] or level)
        else:
            line.append(printable(record.getMessage()), level)
        if record.exc_info:
            line.append(f"\n{logging.Formatter().formatException(record.exc_info)}")
        return line

    def _show(self, text: str) -> None:
        """In place of what was shown before; "" takes it away."""
        text = printable(f"{self._prefix}{text}" if text else "")[: max(self._console.width - 1, 0)]
        if text != self._shown:
            bold, plain = ("", "") if self._console.no_color else ("\x1b[33m", "\x1b[0m")
            self._stream.write(f"{CLEAR_LINE}{bold}{text}{plain}" if text else CLEAR_LINE)
            self._stream.flush()
            self._shown = text

    def _clear(self) -> None:
        if self._shown:
            self._show("")
