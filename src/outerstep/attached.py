"""How `outerstep worker`, which is gone by then, learns that its script joined: a file that a worker removes.

cli/last_word.py looks for it when the script has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

ATTACHED_VARIABLE = "OUTERSTEP_ATTACHED_FILE"
INITIAL_VARIABLE = "OUTERSTEP_INITIAL_FOLDER"
"""Where `outerstep run` waits for its own script to put the initial weights (worker/initial.py)."""


def note_attached(environ: Mapping[str, str] = os.environ) -> None:
    """A worker, a client or a peer is being made in this script, or in a process that it started."""
    file = environ.get(ATTACHED_VARIABLE)
    if file:
        with contextlib.suppress(OSError):  # another process was first
            os.unlink(file)
