"""Files that only their owner reads: mode 0600 in folders of mode 0700; written atomically, also across power cuts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

LOCK_NAME = ".lock"


def make_folder(folder: Path) -> None:
    """`mkdir -p`; new folders belong to the owner only, and are synced in their parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        folder.mkdir(mode=0o700)
        _sync(folder.parent)


def write_secret(file: Path, data: bytes) -> None:
    """Readers see the old file or the new one."""
    make_folder(file.parent)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as target:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            target.write(data)
            target.flush()
            os.fsync(descriptor)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(file.parent)


def read_secret(file: Path) -> bytes:
    """Raises FileNotFoundError if there is none, and ConfigError if others can read it or could have put it there."""
    with open(file, "rb") as source:
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
        if mode & 0o077:
            raise ConfigError(f"{file} must be readable by its owner only, got mode {mode:04o}: chmod 600 {file}")
        around = stat.S_IMODE(os.stat(file.parent).st_mode)
        if around & 0o022:
            raise ConfigError(
                f"{file.parent} must not be writable by others, got mode {around:04o}: chmod 700 {file.parent}"
            )
        return source.read()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time changes the files in `folder`."""
    make_folder(folder)
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
