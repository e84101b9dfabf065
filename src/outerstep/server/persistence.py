"""What a running server writes into its `save_dir`: checkpoints, and a journal of what happened since.

A checkpoint is taken between two rounds: θ, T, outer state and ledger of the rounds that have closed. The contributions
of an open round are not in it; the workers keep what they sent until they hold an agreement, and send it again.

A journal record is the coordinator as of a decision, and what replays the round that was decided:

    head       {"remembered": …, "round": null}                a note: only membership or orders have changed
               {"remembered": …, "round": {kind, fragment, version, participants, anchor_hash, …}}
    payload    kind "mean":    the flat fp32 mean that the outer optimizer stepped along, as long as the fragment
               kind "pushes":  the contributions as they came, in the order in which they were added: with the plain
                               mean, where they are smaller; with Delayed Nesterov, which pushes each, always
               kind "nothing": none; everybody was there, and nobody had trained
               kind "above":   T, flat fp32, where a layer above has moved it; nobody took part

When which of them is written: coordination/server/commits.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..config import ServerConfig, is_named
from ..coordination.server.commits import ReportEnd, WriteCheckpoint
from ..coordination.server.remembered import Remembered
from ..core.robust import ScreenVerdict
from ..core.state import bytes_of
from ..durable.disk import FolderDisk
from ..durable.journal import Journal, Record
from ..durable.run_folder import JOURNAL, RunFolder, has_journal
from ..errors import ModelError, ServerError
from ..events import EventSink, RunEnded, SaveFailed, StateSaved
from ..pool import private_memory
from ..tiling import Cutting, FragmentTiling, ModelTiling, sections_of
from ..types import (
    AnchorHash,
    Count,
    Label,
    LearningRate,
    ParameterSpec,
    Participant,
    Plain,
    Positive,
    Tiling,
    Watched,
)
from .outer_state import rule_told
from .publish import NextVersion
from .run import Run
from .saved import save_copy, save_state
from .saved.export import how_to_load
from .saved.saves import LATEST
from .store import Addend, FragmentStore

log = logging.getLogger(__name__)

Scale = Annotated[float, Meta(ge=0.0)]


class RecordedPush(Plain, frozen=True):
    """One contribution of the payload, in their order."""

    size_bytes: Count
    scale: Scale
    base: Count | None
    sections: Positive
    codec: Label = ""  # of the run, while that could not change
    tiling: Tiling | None = None  # None = by rows


RoundKind = Literal["mean", "pushes", "nothing", "above"]


class RoundRecord(Plain, frozen=True):
    kind: RoundKind
    fragment: Count
    version: Positive
    participants: tuple[Participant, ...]
    anchor_hash: AnchorHash
    pushes: tuple[RecordedPush, ...] = ()
    seen: Watched | None = None  # of contributions that another rule than the mean combined: the mean does not tell it
    outer_lr: LearningRate | None = None  # of this step; None = as the settings of the record say


class RecordHead(Plain, frozen=True):
    remembered: Remembered
    round: RoundRecord | None = None


@dataclass
class SteppedRound:
    """A round whose step was taken, and that nobody was told of yet. `addends`: the contributions that its record
    holds, in the order in which they were added; none = it holds the mean. `verdict`: of the rule that combined it."""

    store: FragmentStore
    made: NextVersion
    participants: tuple[Participant, ...]
    addends: list[Addend]
    verdict: ScreenVerdict | None
    outer_lr: float | None = None  # η of this step, if the controller chose it


class RunWriter:
    """Writes into `save_dir`, which belongs to this server alone. From one thread."""

    def __init__(self, run: Run, events: EventSink, folder: RunFolder | None) -> None:
        self._run, self._config, self._events = run, run.config, events
        self._settings = settings_of(run.config)
        self.folder = folder
        self.journal: Journal | None = None
        if folder is not None and (run.config.keeps == "round" or has_journal(folder.place)):
            self.journal = Journal(FolderDisk(folder.place / JOURNAL))
        self.last_save = ""  # where the last checkpoint is, or why there is none
        self.model_files = Path(run.config.model_files) if run.config.model_files is not None else None

    @property
    def shown_files(self) -> Path | None:
        """Where others find the files beside the model. A state may be deleted; `latest` is one."""
        if self._config.model_files is None and self.folder is not None and (self.folder.place / LATEST).is_dir():
            return self.folder.place / LATEST
        return self.model_files

    def append(self, remembered: Remembered, stepped: SteppedRound | None = None) -> int:
        """A note, or a round. When this returns it is on the disk. Returns its size in bytes; raises OSError if it
        cannot be written."""
        assert self.journal is not None
        round_, payload = (None, []) if stepped is None else self._round(stepped)
        head = msgspec.json.encode(RecordHead(remembered=self._with_settings(remembered), round=round_))
        self.journal.append(head, payload)
        return len(head) + sum(map(len, payload))

    def _round(self, stepped: SteppedRound) -> tuple[RoundRecord, list[memoryview]]:
        kind: RoundKind = "nothing"
        payload, pushes = list[memoryview](), tuple[RecordedPush, ...]()
        if stepped.made.from_above:
            kind, payload = "above", [bytes_of(stepped.made.target)]
        elif stepped.addends:
            counted = [addend for addend in stepped.addends if addend.weight > 0.0]
            kind, payload = "pushes", [addend.payload for addend in counted]
            pushes = tuple(
                RecordedPush(
                    size_bytes=len(one.payload),
                    scale=one.weight,
                    base=one.base,
                    sections=sections_of(one.sections),
                    codec=one.codec,
                    tiling=one.sections.as_said() if isinstance(one.sections, FragmentTiling) else None,
                )
                for one in counted
            )
        elif stepped.made.mean is not None:
            kind, payload = "mean", [bytes_of(stepped.made.mean)]
        record = RoundRecord(
            kind=kind,
            fragment=stepped.store.index,
            version=stepped.made.version,
            participants=stepped.participants,
            anchor_hash=stepped.made.anchor_hash,
            pushes=pushes,
            seen=stepped.made.seen,
            outer_lr=stepped.outer_lr,
        )
        return record, payload

    def checkpoint(self, task: WriteCheckpoint) -> Path:
        """Raises OSError or ModelError if it cannot be written."""
        config, folder = self._config, self.folder
        if task.place:
            state = self._run.snapshot(self._with_settings(task.remembered))
            return save_copy(state, task.place, model_files=self.model_files)
        assert folder is not None
        if self.journal is not None:
            self.journal.begin_after(task.includes)
        state = self._run.snapshot(self._with_settings(task.remembered))
        path = save_state(
            dataclasses.replace(state, facts={**state.facts, "journal": task.includes}),
            folder.place,
            model_files=self.model_files,
            keep=config.keep_saves,
        )
        if config.model_files is None:  # the files came with the state that was resumed, and it may be deleted now
            self.model_files = path
        folder.note(state.run_id, began=True)
        log.info("saved round %d as %s", state.round, path)
        self._events(StateSaved(task.reason, state.round, str(path)))
        self.last_save = str(path)
        return path

    def checkpoint_failed(self, task: WriteCheckpoint, error: Exception) -> ServerError:
        """Report it; training continues."""
        if task.place:  # who asked for it is told, and the run is as safe as before
            return ServerError(f"saving failed: {error}", hint="choose another path, then save again")
        log.error("saving failed: %s; training continues", error)
        self._events(SaveFailed(task.reason, str(error)))
        self.last_save = f"failed: {error}"
        return ServerError(f"saving failed: {error}", hint="make room in save_dir, then save again")

    def report_end(self, task: ReportEnd) -> None:
        """The workers are gone, so it is here that somebody will look for what became of the training."""
        reason, folder = task.left.reason, self.folder
        place = folder.place / LATEST if folder is not None and self.last_save else None
        ended = RunEnded(task.sync_round, task.left.loss, reason, str(place or ""))
        self._events(ended)
        if place is not None and not self.last_save.startswith("failed"):
            where = f"the model is in {place}: {how_to_load(place)}"
        elif place is not None:
            where = f"the model was not saved ({self.last_save}): `outerstep control save` tries again"
        else:
            where = "the model is in this server's memory alone: `outerstep export MODEL_DIR` writes it to disk"
        waits = "" if self._run.coordinator.closing else ". The server waits for more workers; Ctrl-C stops it"
        log.info("%s; %s%s", ended.said, where, waits)

    def cut(self, up_to: int) -> None:
        try:
            if self.journal is not None:
                self.journal.cut(up_to)
        except OSError as error:  # it is only longer than it need be
            log.warning("the journal could not be cut: %s", error)
            raise

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def _with_settings(self, remembered: Remembered) -> Remembered:
        return msgspec.structs.replace(remembered, facts={**remembered.facts, "said": self._settings})


def smaller_than_mean(addends: Sequence[Addend], numel: int) -> bool:
    """Have the contributions that count fewer bytes, as they came, than the mean of them?"""
    return 0 < sum(len(addend.payload) for addend in addends if addend.weight > 0.0) < 4 * numel


def settings_of(config: ServerConfig) -> dict[str, Any]:
    """The settings that a run continues under. At the next start only those that differ from these are changes: the
    same command given again does not undo an operator's orders since then."""
    return {
        "wishes": msgspec.to_builtins(config.wishes),
        "token_budget": config.token_budget,
        "outer": {
            **_outer_settings(config),
            "dn_buffer_size": config.delayed_nesterov,
            "deterministic": config.deterministic,
            **({"device": config.device} if config.device != "cpu" else {}),  # its step is the portable one
        },
    }


def _outer_settings(config: ServerConfig) -> dict[str, Any]:
    """With the numbers that hold now, whatever a later version's defaults are."""
    if is_named(config):
        names = ("outer_optimizer", "outer_options", "outer_lr", "outer_momentum", "nesterov")
        return {name: getattr(config, name) for name in names}
    rule = rule_told(config)
    return {"outer_lr": rule.lr, "outer_momentum": rule.momentum, "nesterov": rule.nesterov}


# --- reading --------------------------------------------------------------------------------------------------------


def read_record(record: Record) -> RecordHead:
    try:
        return msgspec.json.decode(record.head, type=RecordHead)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # ValueError: not UTF-8
        raise ModelError(
            f"journal record {record.serial} is not what this version of outerstep writes: {error}; "
            "use the version that wrote it, or resume a saved state by its path to drop what came after it"
        ) from error


def recorded_addends(round_: RoundRecord, payload: memoryview, specs: Sequence[ParameterSpec]) -> list[Addend]:
    """The contributions of a record, in memory that may be written to, as it was when they came. `specs`: of the
    fragment's tensors."""
    memory, made, begin = private_memory(max(len(payload), 1)), [], 0
    memory[: len(payload)] = payload
    for push in round_.pushes:
        data = memory[begin : begin + push.size_bytes]
        cutting: Cutting = push.sections
        if push.tiling is not None:
            cutting = ModelTiling(push.tiling, specs).fragment([spec.name for spec in specs])
        made.append(Addend(data, push.scale, push.base, cutting, push.codec))
        begin += push.size_bytes
    if begin != len(payload):
        raise ModelError(f"the pushes of a record must be as long as its payload, {len(payload)} bytes, got {begin}")
    return made
