"""A folder that one process uses at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE = "lock"


def lock(place: Path, *, owner: str, folder: str) -> int:
    """The descriptor that holds the lock. The system lets go of it when the process ends, however it ends. `owner`:
    what kind of process that is; `folder`: what the folder is called where it is chosen."""
    descriptor = os.open(place / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 512).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"{folder} {str(place)!r} belongs to a {owner} that is running ({holder}); stop that one, or give this one "
            f"a {folder} of its own"
        ) from error
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): see to it that no second %s uses it", place, error, owner)
    with suppress(OSError):  # a full disk: the holder is named only for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    return descriptor
