"""The folder of a run: which run it holds, and which server uses it now.

run.json     the run's id, and whether it has begun: then there is a checkpoint, or something is wrong
lock         held for as long as a server lives; its content says which server
journal/     what happened since the last checkpoints (journal.py)
compat.json  which answers clients of the older protocol have got (compat/heard.py)
state-…/     the checkpoints (server/saved)
metrics.jsonl  every round with its numbers, for people (observe/sinks.py)
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from ..defaults import RUN_FOLDER
from ..errors import ModelError
from ..types import Plain, Positive, RunId
from .disk import make_folders, replace_synced
from .lock import lock

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
JOURNAL = "journal"
DEFAULT_PLACE = RUN_FOLDER
FORMAT, VERSION = "outerstep run", 1


class RunFacts(Plain, frozen=True):
    """The content of run.json."""

    run_id: RunId
    began: bool = False
    format: str = FORMAT
    version: Positive = VERSION


class RunFolder:
    """Ours from here to `close`: a second server is refused. Raises OSError if the folder cannot be written."""

    def __init__(self, place: Path) -> None:
        self._lock: int | None = None
        self.place = place
        make_folders(place)
        self._lock = lock(place, owner="server", folder="save_dir")
        try:
            self.facts = read_run(place)
        except BaseException:
            self.close()
            raise

    def note(self, run_id: str, *, began: bool) -> None:
        """Write down which run the folder holds from now on."""
        facts = RunFacts(run_id=run_id, began=began)
        if facts != self.facts:
            replace_synced(self.place / RUN_FILE, msgspec.json.encode(facts))
            self.facts = facts

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()


def read_run(place: Path) -> RunFacts | None:
    """Which run the folder holds; None = it does not say."""
    file = place / RUN_FILE
    try:
        facts = msgspec.json.decode(file.read_bytes(), type=RunFacts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:  # ValueError: not UTF-8
        raise ModelError(
            f"{file} cannot be read: {error}; restore it, or delete it if the newest saved state in {place} is the one "
            "to resume from"
        ) from error
    if (facts.format, facts.version) != (FORMAT, VERSION):
        raise ModelError(f"{file} must have format {FORMAT!r} {VERSION}, got {facts.format[:80]!r} {facts.version}")
    return facts


def has_journal(place: Path) -> bool:
    journal = place / JOURNAL
    return journal.is_dir() and any(journal.iterdir())
