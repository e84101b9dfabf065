"""The few things a journal does to a folder, so that a simulated disk can take its place."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..digest import Buffer


class Disk(Protocol):
    """One flat folder of files. Nothing is durable before it is synced: a file's bytes by `sync`, that it exists under
    its name (or does not any more) by `sync_folder`. Any operation may raise OSError."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> memoryview: ...

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        """A new file, or an old one from its beginning."""

    def sync(self, name: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def sync_folder(self) -> None: ...


class FolderDisk:
    """A folder of the file system. It is made if it is not there."""

    def __init__(self, place: Path) -> None:
        self.place = place
        make_folders(place)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.place.iterdir() if entry.is_file())

    def read(self, name: str) -> memoryview:
        """Mapped, not copied: a record may be as large as the model."""
        with open(self.place / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        descriptor = os.open(self.place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for piece in pieces:
                write_all(descriptor, piece)
        finally:
            os.close(descriptor)

    def sync(self, name: str) -> None:
        """It is read again at the next start at most: the system need not keep it in memory too."""
        sync(self.place / name, forget=True)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.place / old, self.place / new)

    def remove(self, name: str) -> None:
        os.unlink(self.place / name)

    def sync_folder(self) -> None:
        sync(self.place)


def sync(path: Path, *, forget: bool = False) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk. `forget`: drop them from memory then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_synced(file: Path, data: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_synced(file: Path, data: bytes) -> None:
    """The file holds this or what it held before, whenever the power is cut."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    write_synced(unfinished, data)
    os.replace(unfinished, file)
    sync(file.parent)


def write_all(descriptor: int, data: Buffer) -> None:
    """A call may write less than it was given, and the next one say why."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def make_folders(place: Path) -> None:
    """`mkdir -p`, each new entry synced in its parent. What a run keeps (weights, who takes part) is its owner's alone:
    the umask may take more away, and gives nobody else anything."""
    if not place.is_dir():
        make_folders(place.parent)
        place.mkdir(mode=0o700, exist_ok=True)
        sync(place.parent)
