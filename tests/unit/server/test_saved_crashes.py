"""The plug is pulled, or the disk fails, at each single step of a save: the old state or the new, nothing between."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from outerstep import model_folder
from outerstep.server.saved import ServerState, load_state, save_state
from unit.server.saved_states import content, make_state

STEPS = [
    (os, "open"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "symlink"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "chmod"),
    (io, "open"),
    (builtins, "open"),
    (model_folder, "save_file"),
]


class PowerCut(BaseException):
    """Not an Exception: nobody may handle it."""


class Disk:
    """Counts the steps of a save and remembers what has been synced. `on_step` is told before each step."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.steps = 0
        self.synced: set[tuple[int, int, int]] = set()
        self._on_step = on_step

    @contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in STEPS:
                patch.setattr(module, name, self._watch(name, getattr(module, name)))
            yield

    def lose_what_was_not_synced(self, folder: Path) -> None:
        """As a file system may after a power cut: the name is there, the bytes are not."""
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink() and _identity(file.stat()) not in self.synced:
                os.truncate(file, file.stat().st_size // 2)

    def _watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            self._on_step(self.steps)
            done = real(*args, **kwargs)
            if name == "fsync":
                self.synced.add(_identity(os.fstat(args[0])))
            return done

        return step


def _identity(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def old(round_: int) -> ServerState:
    return make_state(round_, versions=(round_, round_), dtype="bfloat16")


NEW = make_state(9, versions=(9, 9), dtype="bfloat16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def prepare(folder: Path, model: Path, disk: Disk) -> None:
    """Two states, and what an earlier crash left, so that the save has something to remove as well."""
    before = model.with_name("before")
    if not before.exists():
        for round_ in (1, 2):
            save_state(old(round_), before, model_files=model)
        (before / ".state-round-00000003.saving").mkdir()
        (before / ".state-round-00000003.saving" / "half").touch()
    shutil.copytree(before, folder, symlinks=True)
    disk.synced |= {_identity(file.stat()) for file in folder.rglob("*")}


def count_steps(tmp_path: Path, model: Path) -> int:
    disk = Disk(lambda step: None)
    prepare(tmp_path / "count", model, disk)
    with disk.watched():
        save_state(NEW, tmp_path / "count", model_files=model, keep=1)
    assert not (tmp_path / "count" / "state-round-00000002").exists(), "the deleting must be among the steps"
    return disk.steps


def test_a_power_cut_at_any_step_leaves_the_old_state_or_the_new_one(tmp_path: Path, model: Path) -> None:
    outcomes = []
    steps = count_steps(tmp_path, model)
    assert steps > 40
    for cut in range(1, steps + 1):

        def on_step(step: int, cut: int = cut) -> None:
            if step >= cut:  # and nothing after it: the process is gone
                raise PowerCut

        disk, folder = Disk(on_step), tmp_path / f"cut-{cut}"
        prepare(folder, model, disk)
        with pytest.raises(PowerCut), disk.watched():
            save_state(NEW, folder, model_files=model, keep=1)
        disk.lose_what_was_not_synced(folder)
        found = content(load_state(folder))
        outcomes.append("new" if found == content(NEW) else "old")
        assert found == content(NEW if outcomes[-1] == "new" else old(2)), cut
        # Life goes on: the next save works and cleans up.
        save_state(make_state(10, versions=(10, 10)), folder, keep=1)
        assert content(load_state(folder)) == content(make_state(10, versions=(10, 10)))
        assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "state-round-00000010"], cut
    assert outcomes == sorted(outcomes, reverse=True), "once it is new, it stays new"
    assert set(outcomes) == {"old", "new"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_at_any_step_is_reported_or_harmless(tmp_path: Path, model: Path, code: int) -> None:
    reported = 0
    for bad in range(1, count_steps(tmp_path, model) + 1):

        def on_step(step: int, bad: int = bad) -> None:
            if step == bad:
                raise OSError(code, os.strerror(code))

        disk, folder = Disk(on_step), tmp_path / f"bad-{bad}"
        prepare(folder, model, disk)
        saved = False
        with suppress(OSError), disk.watched():
            save_state(NEW, folder, model_files=model, keep=1)
            saved = True
        reported += not saved
        assert content(load_state(folder)) in ([content(NEW)] if saved else [content(NEW), content(old(2))])
    assert reported > 20


def test_every_file_is_synced_before_the_state_gets_its_name(tmp_path: Path, model: Path) -> None:
    events: list[tuple[str, Path]] = []

    def noted(kind: str, real: Callable[..., Any], where: Callable[..., Path]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            events.append((kind, where(*args)))
            return real(*args)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted("sync", os.fsync, lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}"))))
        patch.setattr(os, "rename", noted("rename", os.rename, lambda old, new: new))
        patch.setattr(os, "replace", noted("replace", os.replace, lambda old, new: new))
        place = save_state(NEW, tmp_path / "saves", model_files=model)
    named = events.index(("rename", place))
    before = {path.name for kind, path in events[:named] if kind == "sync"}
    assert before >= {file.name for file in place.iterdir()} | {f".{place.name}.saving"}
    assert events[named + 1] == ("sync", place.parent), "before latest moves and older states go"
