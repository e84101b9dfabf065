"""A folder of saved states.

    saves/
      state-round-00000040/     the states (folder.py), newest number last; a second one of the same round ends in -1
      state-round-00000050/
      latest -> state-round-00000050

A state is written under a name that nobody reads, synced, and renamed: it is there whole or not at all, whenever the
power is cut. Which state is the newest is told by the serial number in its state.json, not by its round: after a run
went back to an earlier state, the rounds that follow are newer than those dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...coordination.server.commits import newest_first, superseded
from ...durable.disk import make_folders, sync
from ...durable.run_folder import read_run
from ...errors import ConfigError, ModelError
from ...model_folder import STATE
from .folder import StateFacts, looks_whole, read_facts, read_folder, write_folder
from .old import import_old
from .state import ServerState

log = logging.getLogger(__name__)

LATEST = "latest"
OLD_LATEST = "diloco_server_state_latest.pt"
_NAME = re.compile(r"state-round-(\d{8,16})(?:-(\d{1,9}))?\Z")
_LEFTOVER = re.compile(r"\.state-round-\d{8,16}(?:-\d{1,9})?\.(?:saving|deleting)\Z")


def save_state(
    state: ServerState, folder: str | os.PathLike[str], *, model_files: Path | None = None, keep: int = 3
) -> Path:
    """Write `state` into `folder` as a new state and return its path; of this run's states the newest `keep` stay.

    `model_files` is the folder that the model came from: its configuration and tokenizer go along. Raises OSError if
    the disk is full or broken; then, as after a crash, the states that were there are untouched.
    """
    if keep < 1:
        raise ConfigError(f"keep must be ≥ 1, got {keep}")
    state.check()
    place = Path(folder)
    make_folders(place)
    with _alone_in(place):
        _remove_leftovers(place)
        target = _free_name(place, state.round)
        _write_whole(state, target, _next_serial(place), model_files)
        _point_latest_to(target)
        _forget_older(target, state.run_id, keep)
    return target


def save_copy(state: ServerState, path: str | os.PathLike[str], *, model_files: Path | None = None) -> Path:
    """Write `state` as the folder `path`; a state that is there is replaced."""
    state.check()
    target = Path(path).absolute()
    if os.path.lexists(target) and not (target / STATE).is_file():
        raise ModelError(f"{target} exists, and is no saved state: choose a path that is free, or that of a state")
    make_folders(target.parent)
    with _alone_in(target.parent):
        replaced = target.with_name(f".{target.name}.deleting")
        for leftover in (replaced, target.with_name(f".{target.name}.saving")):
            shutil.rmtree(leftover, ignore_errors=True)
        _write_whole(state, target, time.time_ns() // 1_000_000, model_files, replaced)
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def _write_whole(
    state: ServerState, target: Path, serial: int, model_files: Path | None, replaced: Path | None = None
) -> None:
    """As `target`, there whole or not at all. `replaced`: where a state that is there already goes."""
    temporary = target.with_name(f".{target.name}.saving")
    temporary.mkdir(mode=0o700)
    try:
        write_folder(state, temporary, serial=serial, model_files=model_files)
        if replaced is not None and target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(target.parent)


def load_state(path: str | os.PathLike[str]) -> ServerState:
    """The state at `path`: one state's folder, a folder of states, or a `.pt` file of the old layout.

    In a folder of states the newest whole one is taken, and each that is skipped is named in the log.
    """
    place = Path(path)
    if (place / STATE).is_file():
        return read_folder(place)
    if place.is_dir():
        return _newest(place)
    if place.is_file():
        return import_old(place)
    if place.name == OLD_LATEST and any(_states(place.parent)):
        log.info("%s does not exist; looking for the newest state in %s", place.name, place.parent)
        return _newest(place.parent)
    raise ModelError(f"no saved state at {place}: it must be a folder that the server saved into, or an old .pt file")


def _newest(place: Path) -> ServerState:
    problems: list[str] = []

    def skip(name: str, reason: object) -> None:
        log.warning("saved state %s is skipped: %s", name, reason)
        problems.append(f"{name}: {reason}")

    found: dict[Path, StateFacts] = {}
    for folder in _states(place):
        try:
            found[folder] = read_facts(folder)
        except ModelError as error:
            skip(folder.name, error)
    newest = newest_first({folder: found[folder].serial for folder in reversed(found)})  # of equal ones, the last name
    run = read_run(place)
    wanted = run.run_id if run is not None else found[newest[0]].run_id if found else ""
    for folder in newest:
        facts = found[folder]
        if facts.run_id != wanted:
            skip(folder.name, f"it is of run {facts.run_id}, the newest of run {wanted}")
            continue
        try:
            state = read_folder(folder)
        except ModelError as error:
            skip(folder.name, error)
            continue
        log.info("using saved state %s", folder)
        return state
    if problems:
        raise ModelError(f"no state in {place} can be used: {'; '.join(problems)}")
    raise ModelError(f"{place} holds no saved state: it must have {STATE}, or folders named state-round-…")


def has_states(place: Path) -> bool:
    """Whatever condition they are in."""
    return any(_states(place))


def _states(place: Path) -> Iterator[Path]:
    """What save_state made here, by its name; a link is not."""
    if place.is_dir():
        yield from (e for e in sorted(place.iterdir()) if _NAME.match(e.name) and e.is_dir() and not e.is_symlink())


def _readable(place: Path) -> dict[Path, StateFacts]:
    found: dict[Path, StateFacts] = {}
    for folder in _states(place):
        try:
            found[folder] = read_facts(folder)
        except ModelError as error:
            log.warning("saved state %s is damaged, and left alone: %s", folder.name, error)
    return found


def _free_name(place: Path, round_: int) -> Path:
    """A second state of the same round (asked for by hand, or after going back) gets a name of its own."""
    name, again = f"state-round-{round_:08}", 0
    while os.path.lexists(place / (name + (f"-{again}" if again else ""))):
        again += 1
    return place / (name + (f"-{again}" if again else ""))


def _next_serial(place: Path) -> int:
    """The time, in ms; should the clock have gone back, one more than the newest that can be read."""
    return max(time.time_ns() // 1_000_000, 1 + max((facts.serial for facts in _readable(place).values()), default=0))


def _point_latest_to(target: Path) -> None:
    """For people, and for typing. That it cannot be made must not cost the state."""
    link, temporary = target.parent / LATEST, target.parent / f".{LATEST}.saving"
    if os.path.lexists(link) and not link.is_symlink():
        log.warning("%s is not a link of ours, and left alone", link)
        return
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, link)
        sync(target.parent)
    except OSError as error:
        log.warning("%s could not be pointed to %s: %s", link, target.name, error)


def _forget_older(newest: Path, run_id: str, keep: int) -> None:
    """Delete this run's states beyond the newest `keep`. One that is damaged does not count, and is left alone."""
    found = _readable(newest.parent)
    found.pop(newest, None)  # whatever the others are, this one stays
    ours = {f: facts for f, facts in found.items() if facts.run_id == run_id and looks_whole(f, facts)}
    for folder in superseded({folder: facts.serial for folder, facts in ours.items()}, keep - 1):
        doomed = folder.parent / f".{folder.name}.deleting"
        try:
            os.rename(folder, doomed)  # half deleted, it must not look like a state
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("old state %s could not be deleted: %s", folder, error)


def _remove_leftovers(place: Path) -> None:
    """What a save that was cut off left behind."""
    for entry in place.iterdir():
        if _LEFTOVER.match(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


@contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    """One save at a time in a folder: a second process would take the first one's unfinished state for a leftover."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(
                f"another save into {place} is under way; try again, or give each server its own"
            ) from error
        except OSError as error:  # some network file systems have no locks
            log.debug("%s cannot be locked: %s", place, error)
        yield
    finally:
        os.close(descriptor)
