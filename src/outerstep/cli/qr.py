"""A join line as a QR code, for a terminal that has room for it."""

from __future__ import annotations

import io
import shutil

BORDER = 2
ROWS_AROUND = 6  # what was said before must stay in sight


def qr_code(text: str, room: tuple[int, int] | None = None) -> str:
    """The code, in half blocks. "": the terminal is too small (`room`: columns and rows), or segno is not installed."""
    try:
        import segno
    except ModuleNotFoundError:
        return ""
    columns, rows = room or shutil.get_terminal_size((0, 0))
    made = segno.make(text, error="l", micro=False)
    width, height = made.symbol_size(border=BORDER)
    if width > columns or (height + 1) // 2 + ROWS_AROUND > rows:
        return ""
    drawn = io.StringIO()
    made.terminal(drawn, border=BORDER, compact=True)
    return drawn.getvalue()
