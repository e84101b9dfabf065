"""Which answers have arrived, told to the server that comes after this one.

A client whose answer was lost sends the same bytes again. One that has its answer may send the same bytes too, if its
gradients are constant. A server tells the two apart by what it saw of the answer (client.py). If it is killed, the next
one finds that in the run's folder.

The file is not synced: it outlives the process, not a power cut. What it has lost then costs a client that repeats
itself one cycle, and nobody anything else.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from ..types import Count, Plain, RunId, WorkerId

log = logging.getLogger(__name__)

FILE = "compat.json"
MOST_BYTES = 16 << 20


class HeardVersions(Plain, frozen=True):
    """By worker id and fragment, the newest version that is known to have arrived."""

    run_id: RunId
    heard: dict[WorkerId, dict[Count, Count]]


class HeardAnswers:
    """`folder`: the run's; None = nothing is kept."""

    def __init__(self, folder: Path | None, run_id: str) -> None:
        self._file = folder / FILE if folder is not None else None
        self._run_id = run_id
        self._heard = self._read()
        self._lock = threading.Lock()

    def of(self, worker_id: str) -> Mapping[int, int]:
        return self._heard.get(worker_id, {})

    def note(self, worker_id: str, versions: Mapping[int, int]) -> None:
        """It has got these."""
        with self._lock:
            self._heard[worker_id] = {**self.of(worker_id), **versions}
            self._write()

    def keep(self, worker_ids: Collection[str]) -> None:
        """And forget all others, with the next write."""
        with self._lock:
            self._heard = {worker_id: heard for worker_id, heard in self._heard.items() if worker_id in worker_ids}

    def forget(self, worker_id: str) -> None:
        with self._lock:
            if self._heard.pop(worker_id, None) is not None:
                self._write()

    def _read(self) -> dict[str, dict[int, int]]:
        if self._file is None:
            return {}
        try:
            with open(self._file, "rb") as file:
                found = msgspec.json.decode(file.read(MOST_BYTES), type=HeardVersions)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:  # ValueError: msgspec's errors are, and bad UTF-8
            log.warning("which answers had arrived is not known any more: %s: %s", self._file, error)
            return {}
        return found.heard if found.run_id == self._run_id else {}

    def _write(self) -> None:
        if self._file is None:
            return
        data = msgspec.json.encode(HeardVersions(run_id=self._run_id, heard=self._heard))
        unfinished = self._file.with_name(f".{FILE}.unfinished")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            os.replace(unfinished, self._file)
        except OSError as error:  # the answers have arrived all the same
            log.warning("which answers have arrived cannot be kept: %s: %s", self._file, error)
