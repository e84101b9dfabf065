"""Resume a run from the disk: load a checkpoint, and replay the journal on top of it.

A recorded round is closed by the code that closed it the first time, from the same mean or the same contributions, and
must give the anchor that the workers were told of, bit for bit. If it does not, the start is refused.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ..config import SHIPPED, ServerConfig, build
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.naming import Naming
from ..coordination.server.plan import Settled, changed
from ..coordination.server.remembered import LEAP, Remembered
from ..digest import is_tree
from ..durable.disk import FolderDisk
from ..durable.journal import Journal, Record
from ..durable.run_folder import RunFolder, has_journal
from ..errors import ConfigError, ModelError, PlanMismatch
from ..model_folder import STATE
from ..observe.quantities import counted
from ..types import Manifest, Plan, Watched, Wishes
from .model_state import ModelState
from .outer_state import OptimizerMaker, Outer, check_kind, recall, state_of
from .persistence import RoundRecord, read_record, recorded_addends, settings_of
from .refitting import recut
from .run import Run, read_codecs
from .saved import ServerState, has_states, load_state
from .store import FragmentStore

log = logging.getLogger(__name__)

READING_TRIES = 3


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint, the journal behind it, and whether they are in `save_dir`, where the run continues."""

    state: ServerState
    journal: Journal | None
    in_place: bool

    @property
    def base(self) -> int:
        """The serial number of the last record that the checkpoint includes."""
        return int(self.state.facts.get("journal", 0))

    @property
    def records(self) -> Iterable[Record]:
        return self.journal.after(self.base) if self.journal is not None else ()


def find_run(config: ServerConfig, folder: RunFolder | None) -> ResumePoint | None:
    """Where to resume from; None = nowhere, a new run begins. `folder` is that of `save_dir`."""
    wanted = Path(config.resume) if config.resume is not None else None
    if folder is not None and (wanted is None or wanted.resolve() == folder.place.resolve()):
        if holds_run(folder):
            found = _newest_in(folder.place, in_place=True)
            log.info("%s holds run %s: resuming it", folder.place, found.state.run_id)
            return found
        if wanted is not None:
            raise ConfigError(f"there is nothing to resume in {str(wanted)!r}: leave resume out to begin a run there")
    if wanted is None:
        return None
    if wanted.is_dir() and not (wanted / STATE).is_file():
        found = _newest_in(wanted, in_place=False)
    else:
        found = ResumePoint(load_state(wanted), None, in_place=False)
    if folder is not None and holds_run(folder):
        _check_same_run(folder, found.state, wanted)
    return found


def holds_run(folder: RunFolder) -> bool:
    """Does it hold anything that a worker may have been told of?"""
    began = folder.facts is not None and folder.facts.began
    return began or has_states(folder.place) or has_journal(folder.place)


def _newest_in(place: Path, *, in_place: bool) -> ResumePoint:
    journal = Journal(FolderDisk(place / "journal"), ours=in_place) if has_journal(place) else None
    return ResumePoint(load_state(place), journal, in_place)


def _check_same_run(folder: RunFolder, state: ServerState, wanted: Path) -> None:
    """A run may go back to an earlier state of its own; another run needs another folder."""
    held = folder.facts.run_id if folder.facts is not None else load_state(folder.place).run_id
    if held != state.run_id:
        raise ConfigError(
            f"save_dir {str(folder.place)!r} holds run {held}, and {str(wanted)!r} is of run {state.run_id}: leave "
            "resume out to continue the first, or choose another save_dir for the second"
        )
    log.warning("going back to %s: later rounds in %s are dropped", wanted, folder.place)


# --- without a server ---------------------------------------------------------------------------------------------


def newest_state(place: Path, make_optimizer: OptimizerMaker) -> ServerState:
    """The newest agreed model in a run's folder: its newest state, and the rounds that the journal has after it. Only
    for reading: the folder's lock is not taken, so a server may be using it. If that one has written or deleted
    something meanwhile, what could not be read is read once more."""
    for attempt in range(READING_TRIES):
        before = _names_in(place)
        try:
            return _read_newest(place, make_optimizer)
        except (OSError, ModelError) as error:
            if _names_in(place) != before and attempt < READING_TRIES - 1:
                continue
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{place} cannot be read: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def _names_in(place: Path) -> list[str]:
    return sorted(entry.name for folder in (place, place / "journal") if folder.is_dir() for entry in folder.iterdir())


def _read_newest(place: Path, make_optimizer: OptimizerMaker) -> ServerState:
    found = _newest_in(place, in_place=False)
    saved, records = found.state, list(found.records)
    if saved.plan is None or saved.manifest is None or not any(read_record(record).round for record in records):
        return saved
    stated = {"async_mode": saved.plan.mode == "async", "part_size_bytes": saved.plan.part_size_bytes}
    config: ServerConfig = build(ServerConfig, {"num_workers": 1, **stated})
    coordinator = Coordinator(
        run_id=saved.run_id,
        rules=config.rules,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        pool_bytes=config.room_bytes,
        part_size_bytes=saved.plan.part_size_bytes,
    )
    run = Run(config, coordinator, ModelState({**saved.rest, **saved.params}), make_optimizer)
    try:
        replayed = _Replayed.of(run, saved, saved.plan, saved.manifest)
        remembered = _replay(saved, replayed, records)
    except (ConfigError, ModelError) as error:
        raise ModelError(
            f"the rounds after {saved.place} cannot be replayed here: {error}. Let the server write a state "
            "(`outerstep control save`, or stop it), or read the model from the running server"
        ) from error
    run.model.forget_trained(replayed.manifest)
    return dataclasses.replace(
        saved,
        params={name: theta for store in replayed.stores for name, theta in store.params().items()},
        rest=run.model.rest(),
        manifest=replayed.manifest,
        plan=replayed.plan,
        versions=remembered.versions,
    )


# --- into a service -----------------------------------------------------------------------------------------------


def restore(run: Run, saved: ServerState, records: Iterable[Record], now: float) -> None:
    """Before anybody has joined."""
    coordinator = run.coordinator
    coordinator.run_id = saved.run_id
    run.model = ModelState({**saved.rest, **saved.params})
    if saved.plan is None or saved.manifest is None:
        run.imported = saved  # the first worker to join says which of it is trained
        coordinator.total_accepted = int(saved.totals.get("total_submissions", 0))
        return
    _check_unchanged(run.config, saved.plan, _naming(saved.facts))
    check_kind(run.make_optimizer(run.config, saved.manifest), saved.optimizer)
    replayed = _Replayed.of(run, saved, saved.plan, saved.manifest)
    remembered = _replay(saved, replayed, records)
    stores, optimizer = replayed.stores, replayed.outer.under(settings_of(run.config)["outer"])
    _recall_watched(saved, stores)
    plan = _plan_now(run, remembered.plan, remembered.facts.get("said", {}).get("wishes", {}))
    coordinator.codecs = (remembered.plan.codec,)  # if the settings change it, what is under way is of the old one
    for store in stores:
        store.max_staleness = plan.max_staleness
    run.open(plan, _settled(remembered), replayed.manifest, optimizer, stores, _naming(remembered.facts))
    if run.config.token_budget == remembered.facts.get("said", {}).get("token_budget"):
        coordinator.budget.limit = remembered.facts.get("token_budget")  # as an operator may have changed it since
    expect_back = run.config.heartbeat_timeout_s > 0
    coordinator.resume(
        remembered.ledger,
        remembered.totals,
        remembered.facts,
        now,
        expect_back=expect_back,
        first_incarnation=int(time.time()),  # joins since the last save may have been forgotten
    )
    log.info("resumed run %s at round %d", saved.run_id, coordinator.sync_round)


def _recall_watched(saved: ServerState, stores: list[FragmentStore]) -> None:
    """How the round went that made a version. What was replayed since knows it by itself."""
    try:
        watched = msgspec.convert(saved.facts.get("watched", []), list[Watched | None])
    except msgspec.ValidationError as error:
        raise ModelError(f"the saved state does not say how its last rounds went: {error}") from error
    for store, version, one in zip(stores, saved.versions, watched, strict=False):
        if store.newest.version == version:
            store.newest.agreement = replace(store.newest.agreement, watched=one)


class _OuterOverTime:
    """The outer optimizer under the settings of each record: another learning rate at a later start must not change
    earlier rounds."""

    def __init__(self, run: Run, saved: ServerState, manifest: Manifest) -> None:
        self._run, self._saved, self._manifest = run, saved, manifest
        self._made: Outer | None = None
        self._settings: dict[str, Any] = {}

    def under(self, settings: dict[str, Any]) -> Outer:
        """`settings`: {} = the record is older than they are; those of now hold."""
        if self._made is not None and settings == self._settings:
            return self._made
        config = dataclasses.replace(self._run.config, device="cpu")  # records that do not say so are older
        if settings:
            buffer_size = settings["dn_buffer_size"] if config.async_mode else None
            shipped = {"outer_optimizer": SHIPPED, "outer_options": None}  # records of it do not say so
            config = dataclasses.replace(config, **{**shipped, **settings, "dn_buffer_size": buffer_size})
        self._made, self._settings = self._make(config), settings
        return self._made

    def follow(self, manifest: Manifest) -> None:
        """From here on this is what is trained."""
        self._manifest, settings = manifest, self._settings
        self._saved = dataclasses.replace(
            self._saved, optimizer=self._saved.optimizer if self._made is None else state_of(self._made)
        )
        was_made, self._made = self._made is not None, None
        if was_made:
            self.under(settings)

    def _make(self, config: ServerConfig) -> Outer:
        made = self._run.make_optimizer(config, self._manifest)
        before = self._saved.optimizer if self._made is None else state_of(self._made)
        recall(made, before, {spec.name for spec in self._manifest.parameters})
        return made


@dataclass
class _Replayed:
    """What the records so far have made of a saved state."""

    run: Run
    plan: Plan
    manifest: Manifest
    stores: list[FragmentStore]
    outer: _OuterOverTime

    @classmethod
    def of(cls, run: Run, saved: ServerState, plan: Plan, manifest: Manifest) -> _Replayed:
        stores = run.make_stores(plan, manifest, saved.versions, saved.targets, saved.statistics, saved.centre)
        return cls(run, plan, manifest, stores, _OuterOverTime(run, saved, manifest))

    def follow(self, remembered: Remembered) -> None:
        """What is trained may have been settled since (refitting.py)."""
        manifest = remembered.manifest or self.manifest
        if remembered.plan.fragments != self.plan.fragments or manifest != self.manifest:
            run, first = self.run, int(remembered.facts.get("refitted_from", 0))
            run.model = run.model.named_for([spec.name for spec in manifest.parameters], manifest.aliases)
            self.stores = recut(run, self.stores, (self.plan, self.manifest), (remembered.plan, manifest), first)
            self.outer.follow(manifest)
        self.plan, self.manifest = remembered.plan, manifest


def _replay(saved: ServerState, replayed: _Replayed, records: Iterable[Record]) -> Remembered:
    """Replay the records into the stores, one by one. Returns what the last of them remembers."""
    assert saved.plan is not None
    remembered = Remembered(
        run_id=saved.run_id,
        plan=saved.plan,
        versions=saved.versions,
        ledger=saved.ledger,
        totals=saved.totals,
        facts=saved.facts,
    )
    count = rounds = 0
    for record in records:
        head = read_record(record)
        if head.remembered.run_id != saved.run_id:
            raise ModelError(
                f"journal record {record.serial} is of run {head.remembered.run_id}, the saved state of run "
                f"{saved.run_id}; {_REMEDY}"
            )
        replayed.follow(head.remembered)
        if head.round is not None:
            for store in replayed.stores:
                store.max_staleness = head.remembered.plan.max_staleness
            settings: dict[str, Any] = head.remembered.facts.get("said", {}).get("outer", {})
            if head.round.outer_lr is not None:
                settings = {**settings, "outer_lr": head.round.outer_lr}
            _replay_round(head.round, record, replayed.stores, replayed.outer.under(settings))
            rounds += 1
        remembered, count = head.remembered, count + 1
    if count:
        log.info("replayed %s, %d of them rounds", counted(count, "journal record"), rounds)
    if remembered.versions != tuple(store.newest.version for store in replayed.stores):
        raise ModelError(f"the journal's last record is about rounds {remembered.versions}, which it does not hold")
    return remembered


def _replay_round(round_: RoundRecord, record: Record, stores: list[FragmentStore], optimizer: Outer) -> None:
    if round_.fragment >= len(stores) or round_.version != stores[round_.fragment].newest.version + 1:
        raise ModelError(
            f"journal record {record.serial} makes version {round_.version} of fragment {round_.fragment}, which does "
            f"not follow on what is there; {_REMEDY}"
        )
    store = stores[round_.fragment]
    if round_.kind == "above":
        made = store.recall_move(round_.version, record.payload)
    else:
        if round_.kind == "mean":
            store.recall_mean(round_.version, record.payload)
        pushes = recorded_addends(round_, record.payload, store.specs) if round_.kind == "pushes" else ()
        made = store.close(round_.version, optimizer, pushes)
        made.seen = round_.seen
    published = store.publish(made, round_.participants)
    is_as_now = is_tree(round_.anchor_hash)  # else the record was written before there were trees
    found = published.agreement.anchor_hash if is_as_now else store.down.flat_hash(round_.version)
    if found != round_.anchor_hash:
        raise ModelError(
            f"replaying journal record {record.serial} makes version {round_.version} of fragment {round_.fragment} "
            f"with hash {found}, and the workers were told {round_.anchor_hash}: this "
            "machine computes other bits than the one that wrote it, or outer_optimizer_factory has changed; start once"
            f" on a machine, with a version of torch and an outer optimizer as before, and save there; or {_REMEDY}"
        )


def _check_unchanged(config: ServerConfig, saved: Plan, naming: Naming | None) -> None:
    """What can never change in a run must be as it was, where the settings state it. (Fragments that nobody has named
    yet are still to come.)"""
    wishes = config.wishes
    more_to_come = naming is not None and not naming.whole and (wishes.num_fragments or 0) > len(saved.fragments)
    has = {"num_fragments": len(saved.fragments), "down_codec": saved.down_codec}
    stated = {**{name: getattr(wishes, name) for name in has}, "part_size_bytes": config.part_size_bytes}
    if stated["down_codec"] == "same":  # as what went up when the run began; that may be another by now
        stated["down_codec"] = None
    elif stated["down_codec"] is not None:
        stated["down_codec"] = read_codecs(saved.codec, stated["down_codec"])[1].name
    for name, value in {**has, "part_size_bytes": saved.part_size_bytes}.items():
        if stated[name] not in (None, value) and not (name == "num_fragments" and more_to_come):
            raise ConfigError(f"the saved run has {name}={value}, which cannot change; the settings say {stated[name]}")


def _plan_now(run: Run, saved: Plan, said_before: dict[str, Any]) -> Plan:
    """The saved plan under the settings of now: a setting that differs from the last start's is a change of plan."""
    stated = {n: v for n, v in msgspec.to_builtins(run.config.wishes).items() if v is not None}
    if stated.get("codec") not in (None, said_before.get("codec")):
        stated["codec"] = read_codecs(stated["codec"], "same")[0].name
    changes = {
        name: value
        for name, value in stated.items()
        if name not in ("num_fragments", "down_codec") and value not in (getattr(saved, name), said_before.get(name))
    }
    for name, value in changes.items():
        log.info("the settings change %s of the saved run from %s to %s", name, getattr(saved, name), value)
    try:
        plan = changed(saved, Wishes(**changes)) if changes else saved
    except PlanMismatch as error:
        raise ConfigError(f"the settings do not fit the saved run: {error.message}") from error
    return replace(
        plan,
        max_staleness=run.coordinator.rules.max_staleness,
        heartbeat_timeout_s=run.config.heartbeat_timeout_s,
        **_decided(run.config, saved),
        mode=run.coordinator.rules.mode,
        weight_by=run.config.weight_by,
        dylu=run.config.dylu,
        revision=plan.revision + LEAP,
    )


def _decided(config: ServerConfig, saved: Plan) -> dict[str, float | UnsetType]:
    """What the controller has chosen stays chosen, unless the settings say it now, or there is no controller now."""
    said = {"round_deadline_s": config.round_deadline_s, "outer_lr": config.outer_lr}
    usual = {
        "round_deadline_s": UNSET if config.round_deadline_s is None else config.round_deadline_s,
        "outer_lr": UNSET,
    }
    is_steered = config.target_utilization is not None
    return {n: getattr(saved, n) if is_steered and said[n] is None else usual[n] for n in said}


def _settled(remembered: Remembered) -> Settled:
    try:
        return msgspec.convert(remembered.facts.get("settled", {}), Settled)
    except msgspec.ValidationError as error:
        raise ModelError(f"the saved state does not say how its plan was settled: {error}") from error


def _naming(facts: Mapping[str, Any]) -> Naming | None:
    found = facts.get("naming")
    try:
        return None if found is None else msgspec.convert(found, Naming)
    except msgspec.ValidationError as error:
        raise ModelError(f"the saved state does not say how far its model was named: {error}") from error


_REMEDY = "resume a saved state by its path to drop what came after it"
