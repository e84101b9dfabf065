"""What a running server puts on the disk, and when: checkpoints, and a journal of what happened since.

    durability    round         each round is in the journal before anybody hears of it
                  checkpoint    checkpoints alone: a kill goes back to the last one
                  none          nothing, unless somebody asks for a checkpoint

A checkpoint is taken between two rounds: θ, T, outer state and ledger of the rounds that have closed. What an open
round has accepted is not in it; its workers keep what they sent until they hold an agreement, and send it again. The
journal is kept back to the checkpoint before the last: should the last one be damaged, nothing is lost. So that there
are two, the first round after each start is followed by one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import ServerConfig
from ..coordination.server.remembered import Remembered
from ..digest import Buffer
from ..durable.disk import FolderDisk
from ..durable.journal import Journal
from ..durable.run_folder import RunFolder, has_journal
from ..errors import ModelError, ServerError
from ..observe import EventLog
from .outer_state import state_of
from .saved import SavedState, save_state

if TYPE_CHECKING:
    from .service import ParameterService

log = logging.getLogger(__name__)

MODELS_IN_JOURNAL = 4  # so many times the model's bytes since the last checkpoint, and the next is due
LEAST_JOURNAL_BYTES = 64 << 20  # which a small model need not hurry about
MOST_RECORDS = 1000  # to be replayed at a start


class Keeper:
    """Writes into `save_dir`, which is ours alone. From one thread."""

    def __init__(self, config: ServerConfig, events: EventLog, folder: RunFolder | None) -> None:
        self._config = config
        self._events = events
        self.folder = folder
        self.mode = config.keeps
        self.journal: Journal | None = None
        if folder is not None and (self.journals or has_journal(folder.place)):
            self.journal = Journal(FolderDisk(folder.journal_place))
        self.base: int | None = None  # the last record that the last checkpoint includes; None = there is none yet
        self._alone = True  # the last checkpoint, for all we know: if it were lost, so would be all that builds on it
        self.saved_round = 0
        self.saved_versions: tuple[int, ...] = ()
        self.last = ""  # where the last one lies, or why it does not

    @property
    def journals(self) -> bool:
        return self.mode == "round"

    def go_on_from(self, state: SavedState) -> None:
        """The run lies in this folder, and this is its newest whole checkpoint."""
        self.base = int(state.facts.get("journal", 0))
        self.saved_round = state.round
        if self.journal is not None:
            self.journal.begin_after(self.base)

    def begin(self, run_id: str) -> None:
        """Say which run lies here, before anybody is listened to."""
        if self.folder is not None:
            self.folder.note(run_id, began=self.base is not None)

    def is_due(self, sync_round: int, model_bytes: int) -> bool:
        every = self._config.save_every
        if self.mode == "none" or self.base is None:
            return False
        if every and sync_round > self.saved_round and sync_round % every == 0:
            return True
        if self.journal is None or not self.journals:
            return False
        if self._alone and sync_round > self.saved_round:
            return True
        records, size = self.journal.behind(self.base)
        return records >= MOST_RECORDS or size > max(MODELS_IN_JOURNAL * model_bytes, LEAST_JOURNAL_BYTES)

    def append(self, head: bytes, payload: Sequence[Buffer] = ()) -> None:
        """When this returns it is on the disk. Raises OSError if it cannot be."""
        assert self.journal is not None
        self.journal.append(head, payload)

    def keep(self, state: SavedState, reason: str) -> Path | ServerError:
        """A checkpoint that fails is news, but no reason to stop training."""
        try:
            return self.checkpoint(state, reason)
        except (OSError, ModelError) as error:
            log.error("saving failed: %s; the run goes on", error)
            self._events.write("save_failed", reason=reason, why=str(error))
            self.last = f"failed: {error}"
            return ServerError(f"saving failed: {error}", hint="make room in save_dir, then save again")

    def checkpoint(self, state: SavedState, reason: str) -> Path:
        config, folder = self._config, self.folder
        assert folder is not None
        if self.base is None and self.journal is not None and self.journal.last:
            # What lies here was given up. With a number left out, nothing of it can be taken for what comes now.
            self.journal.begin_after(self.journal.last + 1)
        included = self.journal.last if self.journal is not None else 0
        model_files = Path(config.model_files) if config.model_files is not None else None
        path = save_state(
            dataclasses.replace(state, facts={**state.facts, "journal": included}),
            folder.place,
            model_files=model_files,
            keep=config.keep_saves,
        )
        folder.note(state.run_id, began=True)
        log.info("saved round %d as %s", state.round, path)
        self._events.write("save", reason=reason, round=state.round, path=str(path))
        self.last, self.saved_round, self.saved_versions = str(path), state.round, state.versions
        before, self.base = self.base, included
        self._alone = before is None
        self._cut(included if before is None else before)
        return path

    def _cut(self, up_to: int) -> None:
        try:
            if self.journal is not None:
                self.journal.cut(up_to)
        except OSError as error:  # it is only longer than it need be
            log.warning("the journal could not be cut: %s", error)

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()


def snapshot(service: ParameterService, remembered: Remembered) -> SavedState:
    """Called in the rounds thread when all rounds that `remembered` knows of are in the model, and no later one is."""
    statistics: dict[int, dict[str, Any]] = {}
    for store in service.stores:
        for version, values in store.statistics.items():
            statistics.setdefault(version, {}).update(values)
    return SavedState(
        run_id=remembered.run_id,
        params={name: theta for store in service.stores for name, theta in store.params().items()},
        targets={name: target for store in service.stores for name, target in store.down.targets().items()},
        statistics=statistics,
        centre={name: values for store in service.stores for name, values in store.centre.items()},
        rest=service.model.rest(),
        manifest=service.coordinator.manifest,
        plan=remembered.plan,
        versions=remembered.versions,
        optimizer=state_of(service.optimizer),
        ledger=remembered.ledger,
        totals=remembered.totals,
        facts=remembered.facts,
    )


def said(config: ServerConfig) -> dict[str, Any]:
    """The settings that a run goes on under. At the next start only what is said differently then is a change: an
    operator's orders since then are not undone by the same command given again."""
    return {
        "wishes": msgspec.to_builtins(config.wishes),
        "token_budget": config.token_budget,
        "outer": {
            "outer_lr": config.outer_lr,
            "outer_momentum": config.outer_momentum,
            "nesterov": config.nesterov,
            "dn_buffer_size": config.delayed_nesterov,
        },
    }


def with_settings(remembered: Remembered, config: ServerConfig) -> Remembered:
    return msgspec.structs.replace(remembered, facts={**remembered.facts, "said": said(config)})
