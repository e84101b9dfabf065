"""How long a journal may get: a checkpoint, which cuts it, is due behind so many bytes or records."""

from __future__ import annotations

from typing import Final

MODELS_IN_JOURNAL: Final = 4  # times the model's bytes behind the last checkpoint
LEAST_JOURNAL_BYTES: Final = 64 << 20  # and at least these
MOST_RECORDS: Final = 1000  # or so many records: a start replays them
