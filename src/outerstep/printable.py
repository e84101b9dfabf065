"""Text from anybody, for people: names, reasons and messages that a log or a terminal shows.

A newline in a worker's reason would forge a line of the log, and an escape code would move the cursor of whoever reads
it. `printable` is the one place that takes both away; what it writes instead is what JSON would: \\n, \\u001b. For
programs that read a log, `json_line` is as strict.
"""

from __future__ import annotations

import json
import math
from typing import Any


def printable(text: object) -> str:
    """`text` on one line, with nothing in it that a terminal would act upon."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in shown)


def json_line(facts: dict[str, Any]) -> str:
    """Strict JSON on one line, with nothing in it that a terminal would act upon. What is not finite is null."""
    return printable(json.dumps(_plain(facts), default=str, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
