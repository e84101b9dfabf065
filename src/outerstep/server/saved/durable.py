"""Files that are still there after the power was cut: written, then synced, and so are the folders that name them."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(file: Path, data: bytes) -> None:
    with open(file, "wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())


def make_folders(place: Path) -> None:
    """`mkdir -p`, each new entry synced in its parent."""
    if not place.is_dir():
        make_folders(place.parent)
        place.mkdir(exist_ok=True)
        sync(place.parent)
