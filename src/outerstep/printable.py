"""Text from anybody, for people: names, reasons and messages that a log or a terminal shows.

A newline in a worker's reason would forge a line of the log, and an escape code would move the cursor of whoever reads
it. `printable` is the one place that takes both away; what it writes instead is what JSON would: \\n, \\u001b.
"""

from __future__ import annotations

import json


def printable(text: object) -> str:
    """`text` on one line, with nothing in it that a terminal would act upon."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in shown)
